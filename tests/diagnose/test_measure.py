"""zoo.diagnose.measure and `zoo diagnose`: whole models, left as they were."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import zoo_core as zoo
from zoo_core import registry
from zoo_core.cli import main
from zoo_core.diagnose.heads import Tally
from zoo_core.diagnose.measuring import PARTS
from zoo_core.diagnose.reports import (
    AttentionScore,
    Collapse,
    Diagnosis,
    HeadScore,
    LipschitzScore,
    Sensitivity,
)

ROWS = [{"input_ids": [1, *range(5, 5 + n), 2]} for n in (4, 9, 6)]


def build(family="bert", attention="linear", **how):
    tiny = registry.architecture(family).adapter().tiny()
    return zoo.build(family, attention, seed=0, **how, **tiny)


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [len(getattr(module, kind)) for module in model.modules() for kind in kinds]


def look(model):
    """Everything about a model that a measurement might change."""
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "modules": [(name, type(one), id(one)) for name, one in model.named_modules()],
        "modes": [one.training for one in model.modules()],
        "gradients": [(p.requires_grad, p.grad is None) for p in model.parameters()],
        "hooks": hooks(model),
        "config": str(getattr(model, "config", "")),
        "patches": zoo.inspect(model).patches,
    }


def same(first, second):
    states = first.pop("state"), second.pop("state")
    assert first == second
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


@pytest.mark.parametrize(
    "attention",
    [{"0": "softmax"}, "linear", {"0": "local", "1": "nystromformer"}],
    ids=["part is stock", "patched", "mixed"],
)
def test_a_measurement_leaves_the_model_as_it_was(attention):
    model = build(attention=attention)
    model.train()
    model.encoder.layer[0].eval()
    before, drawn = look(model), torch.random.get_rng_state()
    report = zoo.diagnose.measure(model, ROWS)
    same(look(model), before)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert not report.unfinished


def test_a_model_under_lora_keeps_its_wrapped_mechanism():
    peft = pytest.importorskip("peft")
    model = build(attention={"0": "linformer"})
    lora = peft.LoraConfig(target_modules=["query"], modules_to_save=["zoo"])
    wrapped = peft.get_peft_model(model, lora)
    before = look(wrapped)
    report = zoo.diagnose.measure(wrapped, ROWS, parts=["attention", "rank", "lipschitz"])
    same(look(wrapped), before)
    assert [one.mechanism for one in report.attention] == ["linformer", "stock"]


def test_a_measurement_that_fails_leaves_it_too(monkeypatch):
    model = build()
    before = look(model)
    monkeypatch.setattr(Tally, "add", lambda *args, **how: 1 / 0)
    with pytest.raises(zoo.ZooError, match=r"encoder\.layer\.0\.attention\.self \(linear\)"):
        zoo.diagnose.measure(model, ROWS)
    same(look(model), before)


def test_every_part_of_a_text_model():
    model = build(attention={"0": "softmax"})
    told = []
    report = zoo.diagnose.measure(model, ROWS, separators=[2], progress=told.append)
    first, second = report.attention
    assert [one.mechanism for one in report.attention] == ["softmax", "stock"]
    assert [len(one.heads) for one in (first, second)] == [2, 2]
    for head in (*first.heads, *second.heads):
        assert head.error < 1e-5
        assert 0.9 < head.uniformity <= 1
        assert 0 < head.separators < head.prefix + 0.5
        assert head.fp16_broken == 0
    assert len(report.rank.model) == 3
    assert len(report.lipschitz) == 2
    assert report.depth.rank <= report.depth.dim == 32
    assert len(report.sensitivity.by_depth) == 2
    assert any("encoder.layer.1.attention.self (stock)" in text for text in told)
    text = str(report)
    assert "what enters layer" in text
    assert "extrapolation" in text
    answer = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert set(PARTS) <= answer.keys()


@pytest.mark.parametrize("family", ["vit", "hf_vit"])
def test_every_part_of_an_image_model(family):
    model = build(family, "local")
    report = zoo.diagnose.measure(model, [torch.rand(3, 32, 32) for _ in range(3)])
    head = report.attention[0].heads[0]
    assert 0 < head.distance < 6
    assert head.separators != head.separators  # images have none
    assert report.depth.embedding
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))


def test_an_image_is_illustrated(tmp_path):
    image = torch.rand(3, 32, 32)
    files = zoo.diagnose.illustrate(build("deit", "local"), [image], tmp_path / "cls")
    assert [file.suffix for file in files] == [".png", ".svg"]


def test_where_no_map_is_defined_the_rest_is_measured():
    report = zoo.diagnose.measure(build(attention="yoso"), ROWS, parts=["attention"])
    layer = report.attention[0]
    assert "yoso has no attention map" in layer.without_map
    assert layer.heads[0].error > 0
    assert layer.heads[0].entropy != layer.heads[0].entropy
    assert "yoso has no attention map" in str(report)
    assert report.as_dict()["attention"][0]["heads"][0]["entropy"] is None


def test_warnings_name_layer_mechanism_and_heads():
    model = build(attention="softmax")
    attention = model.encoder.layer[1].attention.self
    with torch.no_grad():
        attention.value.weight[:16] *= 1e-6
        attention.value.bias[:16] *= 0
        model.embeddings.word_embeddings.weight[:, :20] = 0
    report = zoo.diagnose.measure(model, ROWS, parts=["attention", "depth"])
    found = [text for text in report.warnings if "dead" in text]
    assert len(found) == 1
    assert found[0].startswith("encoder.layer.1.attention.self (softmax), head 0: dead")
    assert any("has rank 12 in a width of 32" in text for text in report.warnings)
    assert report.rank is None


def test_an_interruption_keeps_what_is_done(monkeypatch):
    def interrupt(text):
        if "Jacobian" in text:
            raise KeyboardInterrupt

    report = zoo.diagnose.measure(build(), ROWS, progress=interrupt)
    assert report.attention
    assert report.rank
    assert report.unfinished == ("lipschitz", "depth", "sensitivity")
    assert "interrupted before these were done: lipschitz, depth, sensitivity" in str(report)
    with pytest.raises(KeyboardInterrupt):
        zoo.diagnose.measure(build(), ROWS, parts=["lipschitz"], progress=interrupt)


@pytest.mark.parametrize(
    ("part", "sign"), [("attention", "batch 2 of 2"), ("lipschitz", "Jacobian of encoder.layer.1")]
)
def test_of_the_part_at_work_it_keeps_what_was_measured(part, sign):
    def interrupt(text):
        if sign in text:
            raise KeyboardInterrupt

    model = build()
    before = look(model)
    report = zoo.diagnose.measure(
        model, ROWS, parts=[part, "sensitivity"], batch_size=2, progress=interrupt
    )
    same(look(model), before)
    found = getattr(report, part)
    assert found[0].path == "encoder.layer.0.attention.self"
    assert report.unfinished == (part, "sensitivity")
    assert found[0].mechanism == "linear"


def score(path, *broken, mechanism="linear", **how):
    """A layer, with how much of each head's output is broken."""
    still = dict.fromkeys((spec.name for spec in fields(HeadScore)), 0.4)
    heads = tuple(HeadScore(**{**still, "fp16_broken": 0.0, "broken": b}) for b in broken)
    return AttentionScore(path, mechanism, heads, **how)


def test_warnings_that_say_the_same_of_several_layers_are_one():
    broken = "NaN or infinity in the output"
    layers = [score(f"layer.{n}.self", 1.0, 1.0, 0.0) for n in (0, 1, 2, 5)]
    layers.append(score("layer.3.self", 1.0, 0.0, 0.0, mechanism="local"))
    report = Diagnosis("model", "data", 1, attention=tuple(layers))
    assert report.warnings == [
        f"layer.0-2,5.self (linear), heads 0-1: {broken}",
        f"layer.3.self (local), head 0: {broken}",
    ]
    layers.append(score("layer.4.self", 0.0, 0.0, 1.0))
    report = Diagnosis("model", "data", 1, attention=tuple(layers))
    assert report.warnings[0] == f"layer.0-2,4-5.self (linear), 9 heads: {broken}"


def test_layers_without_a_map_say_so_once():
    layers = [score(f"layer.{n}", 0.0, without_map="it has none") for n in range(3)]
    text = str(Diagnosis("model", "data", 1, attention=tuple(layers)))
    assert text.count("it has none") == text.count("layer.0-2: it has none") == 1


@pytest.mark.parametrize("width", [80, 120])
def test_a_report_fits_the_terminal_and_is_whole_without(width):
    layers = [
        score(f"encoder.layer.{n}.attention.self", 1.0, 0.0, mechanism="improved_clustered")
        for n in range(12)
    ]
    layers[3] = replace(layers[3], without_map="it has none, " + "for a long reason " * 9)
    depth = tuple(float(n) for n in range(13))
    report = Diagnosis(
        *("BertModel", "texts.txt", 16),
        attention=tuple(layers),
        rank=Collapse(depth, depth[1:], depth[1:], depth[1:]),
        lipschitz=tuple(LipschitzScore(one.path, one.mechanism, 1.5, None) for one in layers),
        sensitivity=Sensitivity(1e-3, depth[1:], 7.0),
    )
    lines = report.text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert "encoder.layer.0-11.attention.self, mean of heads" in lines
    assert max(map(len, str(report).splitlines())) > width
    words = set(" ".join(lines).split())
    assert {"improved_clustered", "separators", "Jacobian", "0.400", "12.000"} <= words
    assert set(str(report).split()) - words == {"attention,", *(one.path for one in layers)}


def test_a_place_for_the_picture_is_checked_before_anything_is_measured(directory, capsys):
    texts = directory.parent / "texts.txt"
    for name, why in (("no/maps", "is no directory, make it first"), ("a.gif", "must end with")):
        picture = directory.parent / name
        code, out, err = verb(capsys, directory, "--data", texts, "--picture", picture)
        assert (code, out) == (2, "")
        assert why in " ".join(err.split())


def test_misuse():
    with pytest.raises(zoo.ZooError, match="no part 'ranks'"):
        zoo.diagnose.measure(build(), ROWS, parts=["ranks"])
    with pytest.raises(zoo.ZooError, match="out of range"):
        zoo.diagnose.measure(build(), ROWS, layers=7)
    with pytest.raises(AttributeError, match="no attribute 'meassure'"):
        _ = zoo.diagnose.meassure


def test_the_published_fit():
    """Of the abstract: a width of 30K is best for 10^12 parameters, and GPT-3 (96 layers) too deep.

    A layer has 12 width^2 parameters.
    """
    from zoo_core.diagnose.depth import fitted_depth

    assert 12 * fitted_depth(30_000) * 30_000**2 == pytest.approx(1e12, rel=0.05)
    assert fitted_depth(12_288) < 96


@pytest.fixture
def directory(tmp_path):
    words = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[SEP]", *"abcdefghijkl"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    known = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", sep_token="[SEP]"
    )
    zoo.save(build(), tmp_path / "model", tokenizer=known)
    (tmp_path / "texts.txt").write_text("a b c d [SEP]\ne f g [SEP]\nh i j k l a b [SEP]")
    return tmp_path / "model"


def verb(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(("diagnose", *map(str, arguments)))
    return stop.value.code or 0, *capsys.readouterr()


def test_the_verb(directory, capsys):
    texts = directory.parent / "texts.txt"
    code, out, err = verb(capsys, directory, "--data", texts, "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["samples"] == 3
    assert answer["attention"][0]["mechanism"] == "linear"
    assert answer["attention"][0]["heads"][0]["separators"] > 0
    picture = directory.parent / "maps"
    code, out, err = verb(
        *(capsys, directory, "--data", texts, "--part", "depth", "--limit", "2"),
        *("--picture", picture),
    )
    assert "[SEP]" in picture.with_suffix(".svg").read_text()
    assert picture.with_suffix(".png").exists()
    assert code == 0, err
    assert out.startswith("BertModel on 2 samples of texts.txt")
    assert "uniformity" not in out
    code, out, err = verb(capsys, directory, "--data", texts, "--part", "everything")
    assert code == 2
    code, out, err = verb(capsys, directory, "--data", texts, "--layers", "9")
    assert code == 1
    assert "out of range" in err
