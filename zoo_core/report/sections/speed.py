"""How fast a model is beside the stock one. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zoo_core import words
from zoo_core.report.blocks import Block, Lines, Series, Table, Text
from zoo_core.report.records import PATCHED, STOCK, Report, Speed
from zoo_core.report.sections.wording import absent


def speed(report: Report) -> Iterator[Block]:
    """Time and memory by length, and from where on it pays."""
    found = report.speed
    if found is None:
        yield absent(report, "speed")
        return
    yield Text(f"One forward of one sample, by turns with the stock model, on {found.machine}.")
    yield from map(Text, _pays(found))
    lengths = found.lengths
    if len(lengths) > 1:
        places = [str(length) for length in lengths]
        series = [
            Series("this model", _milliseconds(found, PATCHED)),
            Series("stock model", _milliseconds(found, STOCK), "stock"),
        ]
        yield Lines("Time of a forward, ms", places, "tokens", series, logarithmic=True)
    heads = ("tokens", "this model", "stock model", "time ratio", "memory", "stock memory")
    yield Table("Time and working memory", heads, [_speed_row(found, n) for n in lengths])


def _pays(speed: Speed) -> Iterator[str]:
    """From which length on it is faster, where that is more than noise."""
    longest = speed.lengths[-1]
    order = speed.order(longest)
    if order == "slower":
        yield f"Up to {longest} tokens the stock model is faster."
    elif order == "alike":
        yield f"At {longest} tokens both are as fast, within the noise of the measurement."
    elif order == "faster" and speed.pays_from is None:
        yield f"At {longest} tokens it is faster than the stock model."
    elif order == "faster" and speed.pays_from is not None:
        yield f"It is faster than the stock model from {speed.pays_from} tokens on."


def _milliseconds(speed: Speed, name: str) -> list[float]:
    rows = [speed.row(name, length) for length in speed.lengths]
    return [row.seconds * 1e3 if row and row.seconds else math.nan for row in rows]


def _speed_row(speed: Speed, length: int) -> tuple[str, ...]:
    ours, stock = speed.row(PATCHED, length), speed.row(STOCK, length)
    times = [words.milliseconds(row.seconds if row else None) for row in (ours, stock)]
    peaks = [words.megabytes(row.peak if row else None) for row in (ours, stock)]
    return str(length), *times, words.with_error(speed.ratio(length)), *peaks
