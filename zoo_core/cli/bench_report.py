"""What `zoo bench` prints: JSON lines or tables, and remarks on stderr."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zoo_core.bench import baseline, tables
from zoo_core.bench.plots import plot
from zoo_core.bench.readme import markdown
from zoo_core.bench.rows import Row
from zoo_core.bench.scaling import break_evens, scalings
from zoo_core.cli import output
from zoo_core.cli.output import Cell

if TYPE_CHECKING:
    from rich.table import Table


class Report:
    """Gathers the rows of one run and shows them.

    interrupted: whether Ctrl-C ended the run; what was complete by then is in `rows`.
    """

    def __init__(self, machine: Mapping[str, Any], *, model: str | None, json: bool) -> None:
        self.machine, self.model, self.json = machine, model, json
        self.rows: list[Row] = []
        self.interrupted = False

    @property
    def measured(self) -> list[Row]:
        """The mechanisms' rows with numbers."""
        return [row for row in self.rows if row.role == "mechanism" and not row.refused]

    def take(self, rows: Iterable[Row]) -> None:
        """Gather rows as they come; JSON lines are printed at once."""
        self._line("machine", dict(self.machine))
        try:
            for row in rows:
                self.rows.append(row)
                self._line("row", row.as_dict())
        except KeyboardInterrupt:
            self.interrupted = True
            output.warn(f"interrupted; {output.plural(len(self.rows), 'row')} complete")

    def show(self, *, summary: bool = False) -> None:
        """Tables of what was measured, or its fits as JSON lines; what was not, on stderr.

        summary: print Markdown for a README instead.
        """
        fits, breaks = scalings(self.rows), break_evens(self.rows)
        for fit in fits:
            self._line("scaling", fit.as_dict())
        for one in breaks:
            self._line("break_even", {"name": one.name, "mode": one.case.mode, "length": str(one)})
        if summary:
            command = shlex.join(["zoo", *sys.argv[1:]])
            output.say(f"{markdown(self.rows)}\n\n{tables.headline(self.machine)}; `{command}`.")
        elif not self.json and any(row.seconds is not None for row in self.rows):
            self._headline()
            if self.model:
                _print(tables.models_table(self.rows), tables.MODELS_LEGEND)
            else:
                _print(tables.layers_table(self.rows), tables.LAYERS_LEGEND)
            if fits or breaks:
                output.say()
                _print(tables.scaling_table(fits, breaks), tables.SCALING_LEGEND)
        self._remark_on_refusals()

    def draw(self, path: Path) -> None:
        """Plot the rows."""
        plot(self.rows, path, title=f"{tables.headline(self.machine)}; {tables.caption(self.rows)}")
        output.say(f"drawn in {path}", stderr=True)

    def compare(self, before: baseline.Baseline, tolerance: float) -> bool:
        """Say what changed since a baseline; whether something got slower."""
        changes = baseline.compare(before.rows, self.rows, tolerance=tolerance)
        slower = [change for change in changes if change.verdict == "slower"]
        for change in changes:
            self._line("change", change.as_dict())
        for difference in baseline.other_machine(before.machine, self.machine):
            output.warn(f"another machine than the baseline's: {difference}")
        if not changes:
            output.warn("the baseline has none of these mechanisms at these cases")
        elif not self.json:
            output.say()
            _print(tables.changes_table(changes), tables.CHANGES_LEGEND)
        if slower:
            names = dict.fromkeys(change.row.name for change in slower)
            output.warn(f"slower than the baseline: {', '.join(names)}")
        return bool(slower)

    def _headline(self) -> None:
        model = f"{self.model}: " if self.model else ""
        output.say(Cell(f"{model}{tables.caption(self.rows)}", bold=True))
        output.say(Cell(f"{tables.headline(self.machine)}\n", dim=True))

    def _line(self, kind: str, values: Mapping[str, Any]) -> None:
        """One JSON line, where JSON is asked for."""
        if self.json:
            click.echo(json_module.dumps({"kind": kind, **values}, ensure_ascii=False))

    def _remark_on_refusals(self) -> None:
        """Each reason once, with the names and lengths that it is the reason for."""
        where: dict[str, dict[str, list[int]]] = {}
        for row in self.rows:
            if row.refused:
                reason = row.refused.removeprefix(row.name).removeprefix(":").strip()
                name = f"{row.name} (peer)" if row.role == "peer" else row.name
                where.setdefault(reason, {}).setdefault(name, []).append(row.case.length)
        for reason, names in where.items():
            lengths = sorted({length for found in names.values() for length in found})
            everywhere = len(lengths) == len({row.case.length for row in self.rows})
            at = "" if everywhere else f" at {', '.join(map(str, lengths))} tokens"
            output.warn(f"not measured: {', '.join(names)}{at}: {reason}")


def _print(table: Table, legend: str) -> None:
    from rich.console import Console

    console = Console(width=output.width(), highlight=False)
    console.print(table)
    console.print(f"\n{legend}", style="dim")
