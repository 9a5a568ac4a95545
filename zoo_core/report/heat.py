"""Heat maps as PNG, one pixel for each number, in colours that the colour-blind can tell apart.

The palettes are matplotlib's cividis (numbers from 0) and PuOr (numbers of both signs), between
which stops are interpolated, so that a page needs no plotting library.
"""

from __future__ import annotations

import base64
import io
import math

from PIL import Image

from zoo_core.report.records import Cells

_CIVIDIS = ("00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369")
_UNSIGNED = (*_CIVIDIS, "e1cc55", "fee838")
_SIGNED = ("7f3b08", "b35806", "e08214", "fdb863", "f7f7f7", "b2abd2", "8073ac", "542788", "2d004b")

#: Numbers below 0 that are smaller than this share of the largest get no colours of their own.
_VISIBLE = 0.05


def is_signed(cells: Cells) -> bool:
    """Whether a map is shown in colours for both signs."""
    return -least(cells) > _VISIBLE * peak(cells)


def peak(cells: Cells) -> float:
    """The largest size of a number; 0 without any."""
    return max((abs(x) for row in cells for x in row if math.isfinite(x)), default=0.0)


def png(cells: Cells) -> str:
    """The picture as a data URI. The largest size of a number has the strongest colour."""
    signed, most = is_signed(cells), peak(cells) or 1.0
    start, span = (-most, 2 * most) if signed else (0.0, most)
    levels = bytes(_level((x - start) / span) for row in cells for x in row)
    image = Image.frombytes("P", (len(cells[0]), len(cells)), levels)
    image.putpalette(_palette(_SIGNED if signed else _UNSIGNED))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def least(cells: Cells) -> float:
    """The lowest number; 0 without any."""
    return min((x for row in cells for x in row if math.isfinite(x)), default=0.0)


def _level(share: float) -> int:
    return round(255 * min(max(share, 0.0), 1.0)) if math.isfinite(share) else 0


def _palette(stops: tuple[str, ...]) -> bytes:
    """256 colours, linear between the stops."""
    colours = [tuple(bytes.fromhex(stop)) for stop in stops]
    found = bytearray()
    for level in range(256):
        place = level / 255 * (len(colours) - 1)
        first = min(int(place), len(colours) - 2)
        pair = zip(colours[first], colours[first + 1], strict=True)
        found += bytes(round(a + (b - a) * (place - first)) for a, b in pair)
    return bytes(found)
