"""What comes measured with zoo-core, and where it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

import zoo_core as zoo
from zoo_core import plan, registry
from zoo_core.bench import baseline, measured

MACHINE = {"processor": "one", "device": "cpu", "cores": 2, "threads": 2, "torch": "2"}
TINY = registry.architecture("bert").adapter().tiny


@pytest.fixture(autouse=True)
def kept(row, tmp_path, monkeypatch):
    """linear pays from 724 tokens on, linformer from the shortest, star never."""
    ratios = {"linear": (2.0, 0.5), "linformer": (0.9, 0.5), "star": (3.0, 1.5), "softmax": (1, 1)}
    rows = [
        row(name, n, ratios={"sdpa": ratio})
        for name, both in ratios.items()
        for n, ratio in zip((512, 1024), both, strict=True)
    ]
    # None of these may count.
    rows += [row("linear", n, ratios={"sdpa": 0.1}, mode="backward") for n in (128, 4096)]
    rows += [row("linear", n, ratios={"sdpa": 0.1, "stock": 0.1}, model="bert") for n in (128, 256)]
    rows += [row("linear", n, ratios={"sdpa": 0.1}, batch=32) for n in (128, 256)]
    path = tmp_path / "measured.json"
    baseline.save(path, rows, MACHINE)
    monkeypatch.setattr(measured, "FILE", path)


@pytest.mark.parametrize(
    ("name", "length", "pays", "words"),
    [
        ("linear", 512, False, "does not pay here: it is faster than fused softmax from about 724"),
        ("linear", 512, False, "on; this model sees at most 512 (measured with"),
        (
            "linear",
            2000,
            True,
            "from about 724 tokens on, and slower on shorter inputs (measured with",
        ),
        ("linformer", 512, True, "is faster than fused softmax from 512 tokens or fewer on (meas"),
        (
            "star",
            9999,
            False,
            "taking 1.5 times as long at 1024 tokens, the most that was measured",
        ),
        (
            "star",
            9999,
            False,
            "(measured with default options on one, 2 threads on 2 c",
        ),
    ],
)
def test_a_note_says_from_where_on_it_pays(name, length: int, pays: bool, words: str) -> None:
    found = measured.verdict(registry.mechanism(name))
    assert found is not None
    assert found.pays(length) is pays
    assert words in found.note(length)


def test_nothing_is_said_of_what_was_not_measured(tmp_path, monkeypatch) -> None:
    linear = registry.mechanism("linear")
    assert measured.verdict(replace(linear, distribution="else")) is None
    assert measured.verdict(registry.mechanism("softmax")) is None
    assert measured.verdict(registry.mechanism("dam")) is None
    monkeypatch.setattr(measured, "FILE", tmp_path / "none.json")
    assert measured.verdict(linear) is None


def attention(model) -> list[str]:
    return [site.mechanism for site in zoo.inspect(model).sites]


def test_softmax_is_kept_where_it_was_measured_to_be_faster() -> None:
    def build(attention, length: int):
        how = {"max_length": length, "softmax_where_faster": True, "seed": 0}
        return zoo.build("bert", attention, **how, **TINY())

    assert attention(build("linear", 700)) == ["zoo-core/softmax"] * 2
    assert attention(build("linear", 800)) == ["zoo-core/linear"] * 2
    mixed = build({"0": "star", "1": ("linformer", {"rank": 8})}, 600)
    assert attention(mixed) == ["zoo-core/softmax", "zoo-core/linformer"]
    assert zoo.inspect(mixed).sites[1].options["rank"] == 8
    assert attention(build("dam", 16)) == ["zoo-core/dam"] * 2  # never measured


def test_inspect_tells_what_does_not_pay() -> None:
    short = zoo.build("bert", {"0": "linear", "1": "softmax"}, max_length=64, **TINY())
    assert [note[:30] for note in zoo.inspect(short).notes] == ["linear does not pay here: it i"]
    long = zoo.build("bert", "linear", max_length=800, **TINY())
    assert zoo.inspect(long).notes == ()


def test_measurements_say_nothing_of_options_that_were_not_measured() -> None:
    how = {"max_length": 64, "softmax_where_faster": True, **TINY()}
    other = ("star", {"ring": False})
    assert attention(zoo.build("bert", "star", **how)) == ["zoo-core/softmax"] * 2
    assert attention(zoo.build("bert", other, **how)) == ["zoo-core/star"] * 2
    assert zoo.inspect(zoo.build("bert", other, max_length=64, **TINY())).notes == ()
    planned = plan.answer("bert", other, max_length=64, **TINY())
    assert planned.notes[0].startswith("star was not measured with these options; it is slower ")
