"""Every file that is not as the manifest says is refused, by name, and nothing else happens."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BERT, bert, build
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import zoo_core as zoo
from zoo_core.checkpoint import load_directory, verify
from zoo_core.checkpoint.weights import unusable
from zoo_core.errors import CheckpointError, UnknownName

QUERY = "encoder.layer.0.attention.self.query.weight"
KEYS = "encoder.layer.0.attention.self.zoo.project_keys"


class Checkpoint:
    """A good checkpoint, and ways to change it behind the zoo's back."""

    told = ""  # what the last one was refused with

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.weights = directory / "model.safetensors"

    def manifest(self, change: Callable[[dict[str, Any]], Any]) -> None:
        path = self.directory / "zoo.json"
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    def put(self, content: bytes) -> None:
        """Replace the weight file, and make the manifest agree."""
        self.weights.write_bytes(content)
        record = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        self.manifest(lambda data: data["files"].update({self.weights.name: record}))

    def tensors(self, change: Callable[[dict[str, Tensor]], Any]) -> None:
        """Change tensors, and make the manifest agree."""
        tensors = load_file(self.weights)
        change(tensors)
        save_file(tensors, self.weights, metadata={"format": "pt"})
        self.put(self.weights.read_bytes())

    def refused(self, says: str, kind: type[Exception] = CheckpointError) -> None:
        with pytest.raises(kind, match=says) as caught:
            zoo.load(self.directory)
        assert str(self.directory) in str(caught.value)
        told = str(caught.value).replace(str(self.directory), "DIRECTORY")
        Checkpoint.told = f"{kind.__name__}: {told}"


@pytest.fixture(autouse=True)
def in_the_table_of_faults(fault: Callable[..., None]) -> Iterator[None]:
    Checkpoint.told = ""
    yield
    fault("load", Checkpoint.told or "as it should be")


@pytest.fixture(scope="module")
def original() -> nn.Module:
    torch.manual_seed(0)
    return bert()


@pytest.fixture
def good(original: nn.Module, tmp_path: Path) -> Checkpoint:
    zoo.save(original, tmp_path / "checkpoint")
    return Checkpoint(tmp_path / "checkpoint")


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    Checkpoint(tmp_path / "nowhere").refused("is not a directory")


def test_a_reference_to_the_hub_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo_core.hub.pulling.pull", lambda ref: f"pulled {ref}")
    assert zoo.load("owner/name@main") == "pulled owner/name@main"


def test_an_empty_directory(tmp_path: Path) -> None:
    Checkpoint(tmp_path).refused("not a zoo checkpoint: .* has no zoo.json; zoo.save")


def test_a_stock_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    Checkpoint(tmp_path).refused("not a zoo checkpoint: .*pretrained=")


def config_of(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = directory / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda config: config.pop("attn_implementation"), "attn_implementation is missing, must"),
        (lambda config: config.update(attn_implementation="sdpa"), "is 'sdpa', must be 'zoo'"),
        (lambda config: config.pop("zoo"), "zoo is missing, must be"),
        (lambda config: config["zoo"][0]["options"].update(rank=5), "zoo is .*'rank': 5"),
        (lambda config: config.update(num_attention_heads=4), "num_attention_heads is 4, must be"),
        (lambda config: config.pop("hidden_size"), "hidden_size is missing, must be 32"),
        (lambda config: config.update(chunk_size_feed_forward=2), "d is 2, must be missing"),
        (lambda config: config.update(architectures=["BertLMHeadModel"]), "must be .'BertModel'."),
        (lambda config: config.clear(), "architectures is missing.* and .. more"),
    ],
    ids=["mark", "other", "zoo", "options", "heads", "missing", "added", "class", "empty"],
)
def test_verify_tells_what_stock_tools_would_not(good: Checkpoint, change: Any, says: str) -> None:
    """Their config.json is not what zoo.load goes by."""
    config_of(good.directory, change)
    (problem,) = verify(good.directory)
    assert re.search(f"{good.directory}/config.json disagrees with zoo.json: .*{says}", problem)
    assert "zoo.save(zoo.load(directory), directory)" in problem
    zoo.save(zoo.load(good.directory), good.directory)
    assert verify(good.directory) == []


def test_verify_reads_config_json(good: Checkpoint) -> None:
    path = good.directory / "config.json"
    path.write_text("{")
    assert "config.json is not valid JSON" in verify(good.directory)[0]
    path.write_text("[]")
    assert "must be of type dict" in verify(good.directory)[0]
    path.unlink()
    assert "has no config.json" in verify(good.directory)[0]


def test_verify_knows_a_patch_that_the_manifest_does_not(tmp_path: Path) -> None:
    zoo.save(BertModel(BertConfig(**BERT)), tmp_path)
    assert verify(tmp_path) == []
    config_of(tmp_path, lambda config: config.update(attn_implementation="zoo"))
    assert "attn_implementation is 'zoo', must be missing" in verify(tmp_path)[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda config: config.update(architecture="vit_tiny_patch16_224"), "'zoo:vit_"),
        (lambda config: config["model_args"].pop("depth"), "model_args is"),
    ],
    ids=["mark", "arguments"],
)
def test_verify_knows_the_layout_of_timm(tmp_path: Path, change: Any, says: str) -> None:
    zoo.save(build("vit", "linear", num_classes=3), tmp_path)
    assert verify(tmp_path) == []
    config_of(tmp_path, change)
    assert says in verify(tmp_path)[0]


def test_a_missing_weight_file(good: Checkpoint) -> None:
    good.weights.unlink()
    good.refused("has no model.safetensors")
    assert "has no model.safetensors" in verify(good.directory)[0]


@pytest.mark.parametrize("kept", [0, 5, 100, -1], ids=lambda n: f"{n}_bytes")
def test_a_truncated_file(good: Checkpoint, kept: int) -> None:
    good.weights.write_bytes(good.weights.read_bytes()[:kept])
    good.refused("model.safetensors has .* bytes, its manifest says .* truncated")
    assert "its manifest says" in verify(good.directory)[0]


def test_a_truncated_file_whose_manifest_agrees(good: Checkpoint) -> None:
    good.put(good.weights.read_bytes()[:-4])
    good.refused("model.safetensors is damaged: its header describes")
    assert "is damaged" in verify(good.directory)[0]


@pytest.mark.parametrize("place", [8, 2000, -1], ids=["header", "middle", "end"])
def test_a_flipped_bit(good: Checkpoint, place: int) -> None:
    content = bytearray(good.weights.read_bytes())
    content[place] ^= 1
    good.weights.write_bytes(content)
    good.refused("model.safetensors")
    assert "model.safetensors" in verify(good.directory)[0]


def test_a_flipped_bit_in_a_tensor_is_told_by_its_hash(good: Checkpoint) -> None:
    content = bytearray(good.weights.read_bytes())
    content[-1] ^= 1
    good.weights.write_bytes(content)
    good.refused("does not have the SHA-256 of its manifest")


def test_weights_of_another_save(good: Checkpoint, tmp_path: Path) -> None:
    torch.manual_seed(1)
    zoo.save(bert(), tmp_path / "other")
    good.weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    good.refused("does not have the SHA-256 of its manifest")


def test_a_huge_header(good: Checkpoint) -> None:
    with good.weights.open("wb") as file:
        file.write((30_000_000).to_bytes(8, "little"))
        file.truncate(40_000_000)
    good.put(good.weights.read_bytes())
    good.refused("has a header of 30000000 bytes")


def test_a_pickle_in_place_of_weights(good: Checkpoint) -> None:
    torch.save({"x": torch.ones(2)}, good.weights)
    good.put(good.weights.read_bytes())
    good.refused("is not a safetensors file")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_values_that_are_not_finite(good: Checkpoint, value: float) -> None:
    good.tensors(lambda tensors: tensors[QUERY].view(-1).__setitem__(7, value))
    good.refused(f"tensor '{QUERY}' holds NaN or infinity")


def test_a_missing_tensor(good: Checkpoint) -> None:
    good.tensors(lambda tensors: tensors.pop(QUERY))
    good.refused(f"missing '{QUERY}'")


def test_a_missing_tensor_of_the_mechanism(good: Checkpoint) -> None:
    good.tensors(lambda tensors: tensors.pop(KEYS))
    good.refused(f"missing '{KEYS}'")


def test_many_missing_tensors_are_counted(good: Checkpoint) -> None:
    good.tensors(lambda tensors: [tensors.pop(name) for name in sorted(tensors)[:9]])
    good.refused("missing .* and 4 more")


def test_an_unknown_tensor(good: Checkpoint) -> None:
    good.tensors(lambda tensors: tensors.update({"../../x": torch.ones(1)}))
    good.refused("unknown '../../x'")


def test_another_shape(good: Checkpoint) -> None:
    good.tensors(lambda tensors: tensors.update({QUERY: torch.ones(32, 31)}))
    good.refused(rf"'{QUERY}' has shape \(32, 31\), the model \(32, 32\)")


def test_another_kind_of_number(good: Checkpoint) -> None:
    good.tensors(lambda tensors: tensors.update({QUERY: torch.ones(32, 32, dtype=torch.int32)}))
    good.refused(f"'{QUERY}' has dtype I32, the model F32")


def test_a_tie_to_a_tensor_of_another_shape(good: Checkpoint) -> None:
    good.tensors(lambda tensors: tensors.pop(QUERY))
    good.manifest(lambda data: data["tied"].update({QUERY: "embeddings.LayerNorm.weight"}))
    good.refused(f"'{QUERY}' has shape")


def test_a_tie_to_nothing(good: Checkpoint) -> None:
    good.tensors(lambda tensors: tensors.pop(QUERY))
    good.manifest(lambda data: data["tied"].update({QUERY: "nothing"}))
    good.refused("is tied to 'nothing', which is not stored")
    assert "is tied to 'nothing'" in verify(good.directory)[0]


def test_a_tie_of_a_stored_tensor(good: Checkpoint) -> None:
    good.manifest(lambda data: data["tied"].update({QUERY: "embeddings.LayerNorm.weight"}))
    good.refused(f"'{QUERY}' is both stored and tied")
    assert "is both stored and tied" in verify(good.directory)[0]


def test_a_tie_of_an_unknown_name(good: Checkpoint) -> None:
    good.manifest(lambda data: data["tied"].update({"evil": QUERY}))
    good.refused("unknown 'evil'")


def test_a_dtype_for_a_buffer_that_is_none(good: Checkpoint) -> None:
    good.manifest(lambda data: data.update(buffers={"evil": "F16"}))
    good.refused("'evil', which is no buffer")


def test_a_boolean_that_is_neither() -> None:
    flags = torch.tensor([0, 1, 2], dtype=torch.uint8).view(torch.bool)
    assert unusable(flags) == "holds bytes that are no booleans"
    assert unusable(flags[:2]) is None


def test_a_newer_schema(good: Checkpoint) -> None:
    good.manifest(lambda data: data.update(schema=7))
    good.refused("schema 7, .*pip install --upgrade zoo-core")


def test_a_plugin_that_is_not_installed(good: Checkpoint) -> None:
    entry = {"mechanism": "rocket", "distribution": "zoo-rocket", "version": "1.2"}
    good.manifest(lambda data: data["attention"][0].update(entry))
    # Told before any weight is looked at.
    good.weights.unlink()
    good.refused(
        r"needs zoo-rocket/rocket \(saved with version 1.2\); pip install zoo-rocket", UnknownName
    )


def test_a_mechanism_that_only_a_newer_release_has(good: Checkpoint) -> None:
    good.manifest(lambda data: data["attention"][0].update(mechanism="rocket"))
    good.refused("pip install --upgrade zoo-core", UnknownName)


def test_an_architecture_that_is_not_installed(good: Checkpoint) -> None:
    good.manifest(lambda data: data.update(architecture="zoo-rocket/rocket"))
    good.refused("needs zoo-rocket/rocket; pip install zoo-rocket", UnknownName)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data["attention"][0].update(options={"rnk": 3}), "no option 'rnk'"),
        (lambda data: data["attention"][0].update(layers=[0, 9]), "9"),
        (lambda data: data["config"].update(num_attention_heads=5), "does not build a BertModel"),
        (lambda data: data["config"].update(hidden_size="x"), "does not build a BertModel"),
        (lambda data: data.update({"class": "BertPooler"}), "BertPooler"),
        (lambda data: data.update({"class": "AutoModel"}), "AutoModel"),
        (lambda data: data.update(architecture="zoo-core/electra"), "BertModel"),
        (
            lambda data: data.update(architecture="zoo-core/vit", library="timm"),
            "timm's vision transformers",
        ),
    ],
    ids=["option", "layer", "config", "config-type", "class", "auto", "family", "library"],
)
def test_a_manifest_that_builds_nothing(good: Checkpoint, change: Any, says: str) -> None:
    good.manifest(change)
    good.refused(says)


@pytest.mark.parametrize(
    "entry", [{"num_hidden_layers": 10**6}, {"vocab_size": 10**7}], ids=["layers", "words"]
)
def test_a_config_of_far_more_than_is_stored(good: Checkpoint, entry: dict[str, int]) -> None:
    """Refused while the model is built: a million layers would take hours."""
    good.manifest(lambda data: data["config"].update(entry))
    good.refused("asks for far more than the .* tensors stored")


@pytest.mark.parametrize(
    "entry",
    [
        {"_attn_implementation": "evil/kernel"},
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation_internal": {"": "evil/kernel"}},
        {"_experts_implementation": "evil/kernel"},
        {"auto_map": {"AutoModel": "evil--modeling.Evil"}},
        {"trust_remote_code": True},
        {"quantization_config": {"quant_method": "evil"}},
        {"custom_pipelines": {"evil": {}}},
        {"use_kernels": True},
        {"_name_or_path": "evil/model"},
    ],
    ids=lambda entry: next(iter(entry)),
)
def test_config_entries_that_choose_code_are_dropped(
    good: Checkpoint, original: nn.Module, entry: dict[str, Any]
) -> None:
    good.manifest(lambda data: data["config"].update(entry))
    config = zoo.load(good.directory).config
    assert config.to_dict().keys() == original.config.to_dict().keys()
    assert config._attn_implementation == "zoo"
    assert "evil" not in str(config)


def test_a_link_out_of_the_directory(good: Checkpoint, tmp_path: Path) -> None:
    good.weights.rename(tmp_path / "elsewhere")
    good.weights.symlink_to(tmp_path / "elsewhere")
    good.refused("is a link out of")
    assert "is a link out of" in verify(good.directory)[0]
    assert isinstance(load_directory(good.directory, root=tmp_path), nn.Module)
    assert verify(good.directory, root=tmp_path) == []


def test_a_dangling_link(good: Checkpoint) -> None:
    (good.directory / "zoo.json").unlink()
    (good.directory / "zoo.json").symlink_to("/nowhere")
    good.refused("is a link out of")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(good: Checkpoint) -> None:
    good.weights.unlink()
    os.mkfifo(good.weights)
    good.refused("is not a regular file")


def test_a_shard_that_repeats_a_tensor(original: nn.Module, tmp_path: Path) -> None:
    zoo.save(original, tmp_path, max_shard_size="20KB")
    paths = sorted(tmp_path.glob("model-*.safetensors"))
    first, second = (load_file(path) for path in paths[:2])
    save_file({**second, **dict(list(first.items())[:1])}, paths[1])
    record = {
        "sha256": hashlib.sha256(paths[1].read_bytes()).hexdigest(),
        "size": paths[1].stat().st_size,
    }
    Checkpoint(tmp_path).manifest(lambda data: data["files"].update({paths[1].name: record}))
    Checkpoint(tmp_path).refused("both hold tensor")
    assert "both hold" in verify(tmp_path)[0]


def test_an_index_that_lies_is_told_by_verify(original: nn.Module, tmp_path: Path) -> None:
    zoo.save(original, tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert "does not say in which file" in verify(tmp_path)[0]
