"""Tables and texts that fit a terminal, and are whole where there is none."""

from __future__ import annotations

from zoo_core.plain import paragraph, table

HEADS = ("layer", "what it does", "distance to others", "error")
ROWS = [("encoder.layer.0", "improved_clustered", "12.5", "0.001"), ("b", "linear", "3", "1.2e-05")]


def test_a_table_that_fits_stays_whole() -> None:
    whole = [
        "layer                  what it does  distance to others    error",
        "encoder.layer.0  improved_clustered                12.5    0.001",
        "b                            linear                   3  1.2e-05",
    ]
    assert table(HEADS, ROWS) == table(HEADS, ROWS, 64) == whole


def test_headings_give_way_first() -> None:
    assert table(HEADS, ROWS, 63) == [
        "                                     distance",
        "                                           to",
        "layer                  what it does    others    error",
        "encoder.layer.0  improved_clustered      12.5    0.001",
        "b                            linear         3  1.2e-05",
    ]


def test_columns_without_room_follow_beside_the_first() -> None:
    assert table(HEADS, ROWS, 40) == [
        "layer                  what it does",
        "encoder.layer.0  improved_clustered",
        "b                            linear",
        "",
        "                 distance",
        "                       to",
        "layer              others    error",
        "encoder.layer.0      12.5    0.001",
        "b                       3  1.2e-05",
    ]


def test_no_cell_is_cut_however_narrow_it_is() -> None:
    text = "\n".join(table(HEADS, ROWS, 5))
    assert all(cell in text for row in ROWS for cell in row)


def test_a_paragraph_breaks_between_words_only() -> None:
    text = "encoder.layer.0-11.attention.self: well-known words"
    assert paragraph(text, 20) == ["encoder.layer.0-11.attention.self:", "well-known words"]
    assert paragraph(text) == [text]
    assert paragraph("", 20) == [""]
