"""What another process makes of a checkpoint: zoo.load the same, stock libraries never softmax."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import BERT, bert, build, output
from transformers import BertConfig, BertForMaskedLM

import zoo_core as zoo

LOAD = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from tiny_models import output
import zoo_core as zoo

same = {}
for path in map(Path, sys.argv[1:]):
    expected = load_file(path.parent / f"{path.name}.expected")["output"]
    same[path.name] = torch.equal(output(zoo.load(path)), expected)
print(json.dumps(same))
"""

# A process where the zoo is not installed: its packages cannot be imported.
STOCK = """
import json, sys
for name in ("zoo_core", "zoo_attention", "zoo_architectures"):
    sys.modules[name] = None
import timm, torch, transformers
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, BertModel

readers = {
    "BertModel": lambda path: BertModel.from_pretrained(path),
    "AutoModel": lambda path: AutoModel.from_pretrained(path),
    "AutoModelForMaskedLM": lambda path: AutoModelForMaskedLM.from_pretrained(path),
    "pipeline": lambda path: transformers.pipeline("fill-mask", model=path),
    "timm_config": lambda path: timm.create_model(f"local-dir:{path}", pretrained=True),
    "timm_weights": lambda path: timm.create_model(
        "vit_tiny_patch16_224", checkpoint_path=f"{path}/model.safetensors", **SIZES
    ),
    "state_dict": lambda path: timm.create_model("vit_tiny_patch16_224", **SIZES).load_state_dict(
        load_file(f"{path}/model.safetensors")
    ),
    "bert_state_dict": lambda path: BertModel(BertConfig(**BERT)).load_state_dict(
        load_file(f"{path}/model.safetensors")
    ),
}
BERT, SIZES, jobs = json.loads(sys.argv[1])
results = {}
for job in jobs:
    reader, path = job
    try:
        model = readers[reader](path)
        results[f"{reader} {path}"] = "loaded"
        if hasattr(model, "state_dict"):
            stored = load_file(f"{path}/model.safetensors")
            live = model.state_dict()
            equal = all(n in live and torch.equal(live[n], t) for n, t in stored.items())
            results[f"{reader} {path}"] = "right" if equal else "wrong"
    except Exception as error:
        results[f"{reader} {path}"] = f"{type(error).__name__}: {error}"
print(json.dumps(results))
"""


def run(program: str, *arguments: str, importable: Path | None = None) -> Any:
    """Run a program in a new interpreter and read the JSON of its last line."""
    paths = [str(importable)] if importable else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_outputs_are_equal_to_the_last_bit_in_a_fresh_process(tmp_path: Path) -> None:
    models = {
        "bert": bert(),
        "masked_lm": bert(task="masked-lm", options={"share": "layers"}),
        "half": bert().to(torch.bfloat16),
        "modernbert": build("modernbert").half(),
        "vit": build("vit", "linformer"),
        "distilled": build("deit", variant="deit_tiny_distilled_patch16_224"),
    }
    for name, model in models.items():
        zoo.save(model, tmp_path / name)
        save_file({"output": output(model)}, tmp_path / f"{name}.expected")
    for name in ("bert", "masked_lm", "modernbert"):
        models[name].save_pretrained(tmp_path / f"{name}_by_transformers")
        save_file({"output": output(models[name])}, tmp_path / f"{name}_by_transformers.expected")
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    paths = [str(tmp_path / name) for name in names]
    found = run(LOAD, *paths, importable=Path(__file__).parent)
    assert found == dict.fromkeys(names, True)


@pytest.fixture(scope="module")
def stock_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What readers that know nothing of the zoo say, by "reader directory"."""
    root = tmp_path_factory.mktemp("stock")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    vit = {"variant": "vit_tiny_patch16_224", **sizes}
    for name, attention in (("linformer", "linformer"), ("uniform", "uniform")):
        zoo.save(bert(attention), root / f"bert_{name}")
        bert(attention).save_pretrained(root / f"written_by_transformers_{name}")
        zoo.save(build("vit", attention, **vit), root / f"vit_{name}")
    zoo.save(BertForMaskedLM(BertConfig(**BERT)), root / "unpatched_bert")
    model = build("vit", **vit)
    zoo.patching.stack_of(model).patches[0].restore()
    zoo.save(model, root / "unpatched_vit")
    jobs = [
        (reader, str(path))
        for path in sorted(root.iterdir())
        for reader in (
            ("timm_config", "timm_weights", "state_dict")
            if "vit" in path.name
            else ("BertModel", "AutoModel", "AutoModelForMaskedLM", "pipeline")
        )
    ]
    jobs += [("bert_state_dict", str(root / f"bert_{n}")) for n in ("linformer", "uniform")]
    results = run(STOCK, json.dumps([BERT, sizes, jobs]))
    assert len(results) == len(jobs)
    return {key.replace(f"{root}/", ""): value for key, value in results.items()}


def test_a_patched_model_is_refused_by_every_stock_reader(stock_results: dict[str, str]) -> None:
    patched = {key: said for key, said in stock_results.items() if "unpatched" not in key}
    assert len(patched) >= 20
    assert all("zoo" in said for said in patched.values())
    assert {
        key: said for key, said in patched.items() if said in ("loaded", "right", "wrong")
    } == {}


def test_an_unpatched_model_is_read_right(stock_results: dict[str, str]) -> None:
    readers = (
        "AutoModelForMaskedLM unpatched_bert",
        "timm_config unpatched_vit",
        "timm_weights unpatched_vit",
    )
    assert {reader: stock_results[reader] for reader in readers} == dict.fromkeys(readers, "right")
