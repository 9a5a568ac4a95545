"""What stands on the page of one model, a module for each section. Imports no torch."""

from __future__ import annotations

from zoo_core.report import findings
from zoo_core.report.blocks import Block, Bullets, Facts, Page, Section, Text
from zoo_core.report.records import Report
from zoo_core.report.sections.diagnosis import diagnosis
from zoo_core.report.sections.kept import calibration, kept
from zoo_core.report.sections.maps import maps
from zoo_core.report.sections.model import model
from zoo_core.report.sections.origin import origin
from zoo_core.report.sections.speed import speed
from zoo_core.report.sections.wording import made, sentence


def page(report: Report) -> Page:
    """The whole page of one model."""
    sections = [
        Section("warnings", "Warnings", _warnings(report)),
        Section("model", "What it is", list(model(report))),
        Section("origin", "Where it came from", list(origin(report))),
        Section("kept", "What it keeps", list(kept(report))),
        Section("calibration", "Calibration", calibration(report)),
        Section("speed", "Speed beside the stock model", list(speed(report))),
        Section("maps", "Attention maps", list(maps(report))),
        Section("diagnosis", "Diagnosis", list(diagnosis(report))),
        Section("method", "How this was measured", [_method(report)]),
    ]
    return Page(
        title=report.name,
        subtitle=f"{report.model.model} with {report.attention} attention",
        verdict=findings.verdict(report),
        sections=sections,
        footer=made(report),
    )


def _warnings(report: Report) -> list[Block]:
    found = report.warnings
    return [Bullets([sentence(text) for text in found]) if found else Text("There are none.")]


def _method(report: Report) -> Facts:
    """Data, samples and settings."""
    rows = [("data", report.data), ("samples", f"{report.samples}")]
    rows += [(f"{part}: left out", reason) for part, reason in report.missing.items()]
    rows += [(name, version) for name, version in report.made.items()]
    return Facts(rows)
