"""Plots: they are drawn, and hold what was measured."""

from __future__ import annotations

import pytest

from zoo_core.bench import plots
from zoo_core.errors import BenchError, ZooError

pytest.importorskip("matplotlib")


@pytest.fixture
def rows(row):
    return [
        row(name, n, role=role, of=of, seconds=n * 1e-6, peak=n * 100, mode=mode)
        for mode in ("forward", "backward")
        for n in (512, 1024, 2048)
        for name, role, of in (
            ("sdpa", "reference", ""),
            ("performer", "mechanism", ""),
            ("performer-pytorch", "peer", "performer"),
        )
    ]


def test_a_figure_names_its_lines_and_lengths(rows, tmp_path) -> None:
    path = tmp_path / "costs.svg"
    plots.plot(rows, path, title="a machine")
    svg = path.read_text()
    for words in ("performer-pytorch (peer)", "sdpa", "2048", "backward: peak memory", "a machine"):
        assert f"<!-- {words}" in svg, words


def test_png_too(rows, tmp_path) -> None:
    path = tmp_path / "costs.png"
    plots.plot(rows, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_peer_has_the_colour_of_its_mechanism_and_the_reference_is_black(rows) -> None:
    styles = {key[0]: style for key, style in plots._styles(plots._lines(rows)).items()}
    assert styles["sdpa"]["color"] == "black"
    assert styles["performer-pytorch (peer)"]["color"] == styles["performer"]["color"]
    assert styles["performer-pytorch (peer)"]["linestyle"] != styles["performer"]["linestyle"]


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([0.1, 0.5], [0.1, 0.5]),
        ([0.1, 0.12, 0.13], [0.1, 0.3, 0.5]),
        ([0.95, 0.97], [0.8, 1.0]),
        ([0.5, 0.9, 0.95], [0.5, 0.8, 1.0]),
    ],
    ids=["apart", "low", "high", "one in peace"],
)
def test_names_keep_apart(places, expected) -> None:
    assert plots.spread(places, 0.2) == pytest.approx(expected)


def test_what_cannot_be_drawn_is_said(rows, tmp_path) -> None:
    with pytest.raises(ZooError, match=r"must end with one of \.png"):
        plots.plot(rows, tmp_path / "costs.jpg")
    with pytest.raises(ZooError, match="is no directory"):
        plots.plot(rows, tmp_path / "no" / "costs.png")
    with pytest.raises(BenchError, match="at two lengths or more"):
        plots.plot(rows[:3], tmp_path / "costs.png")
