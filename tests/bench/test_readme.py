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
        "| `linear` | <= 512 | 0.25 | 0.25 | 1.02 | - |\n"
        "| `performer` | 724 | 2.00 | 0.50 | 1.02 | 0.40 (performer-pytorch) |\n\n"
        "backward, batch 1, float32:\n\n"
        "| mechanism | pays from | / sdpa at 512 | / sdpa at 1024 | MB at 1024 (sdpa 1.02) | "
        "/ best peer |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| `linear` | <= 512 | 0.25 | 0.25 | 1.02 | - |\n"
        "| `performer` | 724 | 2.00 | 0.50 | 1.02 | 0.40 (performer-pytorch) |"
    )


def test_memory_stands_at_the_longest_length_that_all_reached(row) -> None:
    rows = [row("sdpa", n, role="reference", peak=n * 1000, ratios={}) for n in (512, 1024)]
    rows += [row("dam", 512, peak=3 * 10**6), row("linear", 512), row("linear", 1024)]
    assert markdown(rows).splitlines()[2:] == [
        "| mechanism | pays from | / sdpa at 512 | / sdpa at 1024 | MB at 512 (sdpa 0.51) | "
        "/ best peer |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `dam` | - | 1.00 | - | 3.00 | - |",
        "| `linear` | > 1024 | 1.00 | 1.00 | 1.00 | - |",
    ]


def test_three_lengths_show_how_costs_grow_beside_the_record(row) -> None:
    how = {"mode": "backward"}
    rows = [row("sdpa", n, role="reference", ratios={}, **how) for n in (128, 512, 1024, 2048)]
    rows += [
        row("luna", n, seconds=seconds, peak=n * 1000, **how)
        for n, seconds in ((128, 9.0), (512, 1.0), (1024, 2.0**1.5), (2048, 8.0))
    ]
    header, _, luna = markdown(rows).splitlines()[2:]
    assert "| time ~ n^p | memory ~ n^p, p (declared) |" in header
    assert "| 1.50 | 1.00 (1.00) |" in luna


def test_memory_of_a_forward_alone_grows_beside_no_declared_cost(row) -> None:
    rows = [row("sdpa", n, role="reference", ratios={}) for n in (512, 1024, 2048)]
    rows += [row("luna", n, seconds=n / 1e6, peak=n * 1000) for n in (512, 1024, 2048)]
    header, _, luna = markdown(rows).splitlines()[2:]
    assert "| time ~ n^p, p (declared) | memory ~ n^p |" in header
    assert "| 1.00 (1.00) | 1.00 |" in luna


def test_compiled_ones_stand_beside_themselves(row) -> None:
    rows = [
        row("sdpa", role="reference", mode="compiled"),
        row("linear", mode="compiled", ratios={"sdpa": 0.5, "eager": 0.8}),
    ]
    assert markdown(rows).splitlines()[2::2] == [
        "| mechanism | / sdpa at 512 | MB at 512 (sdpa 1.00) | / uncompiled |",
        "| `linear` | 0.50 | 1.00 | 0.80 |",
    ]


def test_one_length_says_nothing_about_where_it_pays(row) -> None:
    rows = [row("sdpa", role="reference"), row("linear")]
    assert "pays from" not in markdown(rows)


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
