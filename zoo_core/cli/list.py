"""`zoo list`: what is installed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from zoo_core.cli import output
from zoo_core.cli.output import Cell
from zoo_core.words import plural

if TYPE_CHECKING:
    from zoo_core.architecture import Architecture
    from zoo_core.catalogue import Preset
    from zoo_core.mechanism import Mechanism
    from zoo_core.unknown import Kind

_LETTERS = {"key_padding": "P", "causal": "C", "cross": "X", "bias": "B", "weights": "M"}
_LEGEND = "P padding, C causal, X cross-attention, B bias, M attention map"
#: Columns of a formula where there is no room for summaries either: 80 hold the whole table.
_FORMULA = 21
_COLOURS = {"exact": "green", "approximate": "yellow", "needs-training": "magenta"}


@click.command("list")
@click.argument("pattern", default="*")
@click.option("--family", help="Only this family, such as kernel.")
@click.option(
    "--swap",
    type=click.Choice(tuple(_COLOURS)),
    help="Only those that do this to pretrained weights without training.",
)
@click.option(
    "--supports",
    type=click.Choice(tuple(_LETTERS)),
    multiple=True,
    help="Only those that support this; may be repeated.",
)
@click.option("--distribution", metavar="NAME", help="Only from this distribution.")
@click.option("--architectures", is_flag=True, help="List model families instead.")
@click.option("--presets", is_flag=True, help="List presets of the catalogue instead.")
@click.option("--json", is_flag=True, help="Print a JSON array.")
def command(
    pattern: str,
    family: str | None,
    swap: str | None,
    supports: tuple[str, ...],
    distribution: str | None,
    architectures: bool,
    presets: bool,
    json: bool,
) -> None:
    """List attention mechanisms, or model families, or presets.

    PATTERN is a name or alias, with wildcards such as '*former'.
    """
    given = {"family": family, "swap": swap, "distribution": distribution}
    filters: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    filters |= dict.fromkeys(supports, True)
    if architectures and presets:
        raise click.UsageError("choose one of --architectures and --presets")
    if filters and (architectures or presets):
        raise click.UsageError("--family, --swap, --supports and --distribution are for mechanisms")
    if architectures:
        _list_architectures(pattern, json)
    elif presets:
        _list_presets(pattern, json)
    else:
        _list_mechanisms(pattern, filters, json)


def _list_mechanisms(pattern: str, filters: dict[str, Any], json: bool) -> None:
    from zoo_core import registry
    from zoo_core.cli import rows

    found = registry.mechanisms(pattern, **filters)
    contested = registry.contested()
    if json:
        output.as_json([rows.mechanism(one, contested=one.name in contested) for one in found])
        return
    if found:
        spare = ["summary"] if output.is_wide() else []
        headers = ["name", "family", "time", "swap", "supports", *spare]
        lines = (_mechanism(one, contested)[: len(headers)] for one in found)
        output.table(headers, lines, cut=bool(spare))
        output.say(Cell(f"\n{_LEGEND}", dim=True))
    _remark("mechanisms", len(found), contested & {one.name for one in found})


def _list_architectures(pattern: str, json: bool) -> None:
    from zoo_core import registry
    from zoo_core.cli import rows

    found = registry.architectures(pattern)
    contested = registry.contested(kind="architectures")
    if json:
        output.as_json([rows.architecture(one, contested=one.name in contested) for one in found])
        return
    if found:
        spare = ["default"] if output.is_wide() else []
        headers = ["name", "library", "summary", *spare]
        output.table(headers, (_architecture(one, contested)[: len(headers)] for one in found))
    _remark("architectures", len(found), contested & {one.name for one in found})


def _list_presets(pattern: str, json: bool) -> None:
    from zoo_core import registry
    from zoo_core.cli import rows

    found = registry.presets(pattern)
    if json:
        output.as_json([rows.preset(one) for one in found])
    elif not found:
        output.warn("No preset fits.")
    else:
        spare = ["attention"] if output.is_wide() else []
        headers = ["name", "architecture", "summary", *spare]
        output.table(headers, (_preset(one)[: len(headers)] for one in found))


def _preset(one: Preset) -> list[str | Cell]:
    return [Cell(one.name, bold=True), one.architecture, one.summary, ", ".join(one.mechanisms)]


def _mechanism(one: Mechanism, contested: set[str]) -> list[str | Cell]:
    promises = [_LETTERS[key] if getattr(one.supports, key) else "-" for key in _LETTERS]
    return [
        _label(one, contested),
        one.family,
        _time(one),
        Cell(one.swap, _COLOURS[one.swap]),
        " ".join(promises),
        one.summary,
    ]


def _time(one: Mechanism) -> str:
    formula = output.growth(one.time)
    return formula if output.is_wide() else in_lines(formula, _FORMULA)


def in_lines(formula: str, wide: int) -> str:
    """A formula of at most `wide` columns, broken after signs, so that no name in it is cut."""
    lines = [""]
    for part in re.split(r"(?<=[ ·*/+])", formula):
        if lines[-1] and len((lines[-1] + part).rstrip()) > wide:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _architecture(one: Architecture, contested: set[str]) -> list[str | Cell]:
    return [_label(one, contested), one.library, one.summary, one.default]


def _label(record: Mechanism | Architecture, contested: set[str]) -> Cell:
    """The name to write; `distribution/name` where another distribution claims it too."""
    if record.name in contested:
        return Cell(record.qualified, "yellow")
    return Cell(record.name, bold=True)


def _remark(kind: Kind, count: int, contested: set[str]) -> None:
    """On stderr: which names are contested, and what is missing and why."""
    from zoo_core import plugins
    from zoo_core.unknown import absences

    if contested:
        output.warn(f"claimed twice, write distribution/name: {', '.join(sorted(contested))}")
    if not count:
        output.warn(" ".join([f"No {kind} fit.", *absences()]))
    elif failed := sum(bool(plugin.failures) for plugin in plugins.installed()):
        output.warn(f"{plural(failed, 'plugin')} failed to load, see `zoo plugins`")
