"""The summary for a README."""

from __future__ import annotations

from zoo_core.bench import markdown


def test_one_line_for_each_mechanism_and_a_table_for_each_mode(row) -> None:
    rows = [
        row(name, n, role=role, of=of, mode=mode, ratios=ratios, peak=n * 1000)
        for mode in ("forward", "backward")
        for n, ratio in ((512, 2.0), (1024, 0.5))
        for name, role, of, ratios in (
            ("sdpa", "reference", "", {}),
            ("performer", "mechanism", "", {"sdpa": ratio, "performer-pytorch": 0.4}),
            ("performer-pytorch", "peer", "performer", {"sdpa": 3.0}),
            ("linear", "mechanism", "", {"sdpa": 0.25}),
        )
    ]
    assert markdown([*rows, row("gpsa", seconds=None, refused="gpsa: no", ratios={})]) == (
        "forward, batch 1, float32:\n\n"
        "| mechanism | pays from | / sdpa at 512 | / sdpa at 1024 | MB at 1024 (sdpa 1.02) | "
        "/ best peer |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| `performer` | 724 | 2.00 | 0.50 | 1.02 | 0.40 (performer-pytorch) |\n"
        "| `linear` | <= 512 | 0.25 | 0.25 | 1.02 | - |\n\n"
        "backward, batch 1, float32:\n\n"
        "| mechanism | pays from | / sdpa at 512 | / sdpa at 1024 | MB at 1024 (sdpa 1.02) | "
        "/ best peer |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| `performer` | 724 | 2.00 | 0.50 | 1.02 | 0.40 (performer-pytorch) |\n"
        "| `linear` | <= 512 | 0.25 | 0.25 | 1.02 | - |"
    )


def test_whole_models_show_the_tax(row) -> None:
    rows = [
        row("stock", role="reference", model="bert", ratios={"floor": 1.5}),
        row("floor", role="floor", model="bert", ratios={"stock": 0.67}),
        row("linear", model="bert", ratios={"floor": 1.1, "stock": 0.7}),
    ]
    assert markdown(rows) == (
        "bert, forward, batch 1, float32:\n\n"
        "| attention | tax at 512 | / stock at 512 |\n"
        "| --- | --- | --- |\n"
        "| stock | 0.50 | - |\n"
        "| linear | 0.10 | 0.70 |"
    )
