"""Words that several sections have in common. Imports no torch."""

from __future__ import annotations

from zoo_core.report.blocks import Text
from zoo_core.report.records import Report

FLOOR = "uniform attention"


def made(report: Report) -> str:
    """With what, and when."""
    about = dict(report.made)
    day = about.pop("date", "")
    tools = ", ".join(f"{name} {version}" for name, version in about.items())
    return f"Made with {tools} on {day}."


def absent(report: Report, part: str) -> Text:
    """Why a part is not there, in words."""
    return Text(f"Not measured: {report.missing.get(part, 'no reason is known')}.")


def sentence(text: str) -> str:
    """With a full stop; a first letter that names a tensor stays as it is."""
    first = text.split(" ", 1)[0]
    start = text if set("._/") & set(first) else text[:1].upper() + text[1:]
    return start if start.endswith(".") else f"{start}."
