"""What people see."""

from __future__ import annotations

import pytest

from zoo_core.bench import baseline, tables
from zoo_core.bench.scaling import break_evens, scalings

rich_console = pytest.importorskip("rich.console")


def text(table, width: int = 80) -> str:
    console = rich_console.Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def lines(table, width: int = 80) -> list[list[str]]:
    """The words of each line that has any."""
    return [line.split() for line in text(table, width).splitlines() if line.strip()]


def test_layers(row) -> None:
    rows = [
        row("sdpa", role="reference", seconds=0.31, ratios={"flops": 1.05, "bytes": 30}),
        row(
            "performer",
            seconds=0.12,
            spread=0.0048,
            peak=25_300_000,
            ratios={"sdpa": 0.39, "flops": 1.7, "bytes": 12.4, "performer-pytorch": 0.5},
        ),
        row("performer-pytorch", role="peer", of="performer", seconds=0.24, ratios={"sdpa": 0.8}),
        row("gpsa", seconds=None, refused="gpsa: no", ratios={}),
    ]
    head, _, sdpa, performer, peer = lines(tables.layers_table(rows))
    assert head == "mechanism tokens ms +-% /sdpa /flops /bytes /peer MB".split()
    assert sdpa == "sdpa 512 310 0 - 1.05 30.0 - 1.00".split()
    assert performer == "performer 512 120 2 0.39 1.70 12.4 0.50 25.3".split()
    assert peer == "performer-pytorch 512 240 0 0.80 - - - 1.00".split()


def test_only_what_varies_has_a_column(row) -> None:
    rows = [row(mode=mode, padded=mode == "backward") for mode in ("forward", "backward")]
    head, _, first, second = lines(tables.layers_table(rows))
    assert head[:4] == ["mechanism", "tokens", "mode", "padded"]
    assert first[:4] == ["linear", "512", "forward", "1.00"]
    assert second[:4] == ["linear", "512", "backward", "padded"]
    assert tables.caption(rows) == "batch 1, 12 heads, width 64, float32"


def test_models(row) -> None:
    rows = [
        row("stock", role="reference", model="bert", ratios={"floor": 1.4}),
        row("floor", role="floor", model="bert", ratios={"stock": 0.71}),
        row("linear", model="bert", ratios={"floor": 1.12, "stock": 0.8}),
    ]
    head, _, *body = lines(tables.models_table(rows))
    assert head == "mechanism tokens ms +-% tax /stock MB".split()
    assert [line[4:6] for line in body] == [["0.40", "-"], ["-", "0.71"], ["0.12", "0.80"]]


def test_scaling(row) -> None:
    ratios = {512: 2.0, 1024: 0.5, 2048: 0.25}
    rows = [
        row("linear", n, seconds=n**1.5, peak=1000 * n, ratios={"sdpa": ratio})
        for n, ratio in ratios.items()
    ]
    head, _, line = lines(tables.scaling_table(scalings(rows), break_evens(rows)))
    assert head == "mechanism mode time declared memory declared pays from".split()
    assert line == "linear forward 1.50 +-0.00 1.00 off 1.00 +-0.00 - 724".split()


def test_without_fits_there_is_only_where_it_pays(row) -> None:
    rows = [row("linear", n, ratios={"sdpa": 0.5}) for n in (512, 1024)]
    head, _, line = lines(tables.scaling_table(scalings(rows), break_evens(rows)))
    assert head == "mechanism mode pays from".split()
    assert line == "linear forward <= 512".split()


def test_changes(row) -> None:
    now = row(ratios={"sdpa": 1.5})
    table = tables.changes_table(baseline.compare([row(ratios={"sdpa": 1.0})], [now]))
    assert lines(table)[-1] == "linear 512 forward 1.00 1.50 +50% 10% slower".split()


def test_nothing_is_cut_off_at_80_columns(row) -> None:
    rows = [
        row(
            "memory_compressed",
            8192,
            seconds=12.3456,
            ratios={"sdpa": 0.12, "flops": 1234.5, "bytes": 1234.5, "x": 0.5},
        ),
        row("memory-compressed-attention", 8192, role="peer", of="memory_compressed"),
    ]
    shown = text(tables.layers_table(rows))
    assert "…" not in shown
    assert "memory_compressed" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_what_differs_besides_the_length_tells_lines_apart(row) -> None:
    rows = [
        row("linear", n, batch=batch, ratios={"sdpa": 512 / n * batch})
        for batch in (1, 2)
        for n in (256, 1024)
    ]
    head, _, *body = lines(tables.scaling_table(scalings(rows), break_evens(rows)))
    assert head == "mechanism mode batch pays from".split()
    assert body == ["linear forward 1 512".split(), "linear forward 2 > 1024".split()]
    assert [one.as_dict()["batch"] for one in break_evens(rows)] == [1, 2]
