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
from zoo_core.words import plural

if TYPE_CHECKING:
    from rich.table import Table

#: No table is wider, in characters.
_WIDEST = 1000


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
            output.warn(f"interrupted; {plural(len(self.rows), 'row')} complete")

    def show(self, *, summary: bool = False) -> None:
        """Tables of what was measured, or its fits as JSON lines; what was not, on stderr.

        summary: print Markdown for a README instead.
        """
        fits, breaks = scalings(self.rows), break_evens(self.rows)
        for fit in fits:
            self._line("scaling", fit.as_dict())
        for one in breaks:
            self._line("break_even", one.as_dict())
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
                faster = tables.PAYS_LEGEND.format("the stock model" if self.model else "softmax")
                legend = f"{tables.GROWTH_LEGEND} {faster}" if fits else faster
                _print(tables.scaling_table(fits, breaks), legend)
        self._remark_on_refusals()

    def draw(self, path: Path) -> None:
        """Plot the rows."""
        plot(self.rows, path, title=f"{tables.headline(self.machine)}; {tables.caption(self.rows)}")
        output.say(f"drawn in {path}", stderr=True)

    def keep(self, path: Path) -> None:
        """Save the rows, unless that would put nothing, or a part, in the place of a baseline."""
        kept = "left as it was" if path.exists() else "not written"
        if not self.measured:
            output.warn(f"{path} is {kept}: no mechanism was measured")
        elif self.interrupted and path.exists():
            rows = plural(len(self.rows), "row")
            output.warn(f"{path} is {kept}: the {rows} of this interrupted run are not kept")
        else:
            command = f"zoo {shlex.join(sys.argv[1:])}"
            baseline.save(path, self.rows, self.machine, command=command)
            output.say(f"kept in {path}", stderr=True)

    def remark_on_lengths(self, asked: Iterable[int]) -> None:
        """Say so where a whole model was not measured at a length, since images have their own."""
        wanted, found = set(asked), {row.case.length for row in self.rows}
        left_out = sorted(wanted - found)
        # An interrupted run of a text model lacks lengths too, but has no other ones.
        if left_out and (found - wanted or not self.interrupted):
            output.warn(
                f"--length {','.join(map(str, left_out))} was left out: the images of {self.model} "
                f"make {', '.join(map(str, sorted(found)))} tokens; --set their size instead"
            )

    def compare(self, before: baseline.Baseline, tolerance: float) -> bool:
        """Say what changed since a baseline; whether it is worse, or nothing could be compared."""
        changes = baseline.compare(before.rows, self.rows, tolerance=tolerance)
        broken = baseline.broken(before.rows, self.rows)
        for line in [*(one.as_dict() for one in changes), *(one.as_dict() for one in broken)]:
            self._line("change", line)
        for difference in baseline.other_machine(before.machine, self.machine):
            output.warn(f"another machine than the baseline's: {difference}")
        if (changes or broken) and not self.json:
            output.say()
            _print(tables.changes_table(changes, broken), tables.CHANGES_LEGEND)
        self._remark_on_unmatched(before, compared=bool(changes))
        slower = [change.row for change in changes if change.verdict == "slower"]
        if slower:
            output.warn(f"slower than the baseline: {_named(slower)}")
        if broken:
            names = _named([one.row for one in broken])
            output.warn(f"broken: measured in the baseline, refused now: {names}")
        return bool(slower or broken or not changes)

    def _remark_on_unmatched(self, before: baseline.Baseline, *, compared: bool) -> None:
        """Name the rows that the baseline lacks; where it lacks all of them, say why."""
        alone = baseline.unmatched(before.rows, self.rows)
        if compared and alone:
            output.warn(f"without a counterpart in the baseline: {_placed(alone)}")
        elif alone:
            output.warn("no row in common with the baseline:")
            names: dict[str, list[str]] = {}
            for name, reason in baseline.why_unmatched(before.rows, alone).items():
                names.setdefault(reason, []).append(name)
            for reason, some in names.items():
                output.warn(f"{', '.join(some)}: {reason}")
        elif not compared:
            output.warn("nothing was measured that a baseline could be compared with")

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


def _named(rows: Iterable[Row]) -> str:
    return ", ".join(dict.fromkeys(row.name for row in rows))


def _placed(rows: Iterable[Row]) -> str:
    """Rows in words: "linear at 64, 128 tokens, forward; ..."."""
    places: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        places.setdefault((row.name, row.case.mode), []).append(row.case.length)
    return "; ".join(
        f"{name} at {', '.join(map(str, dict.fromkeys(lengths)))} tokens, {mode}"
        for (name, mode), lengths in places.items()
    )


def _print(table: Table, legend: str) -> None:
    from rich.console import Console

    width = output.width()
    # A table that is too wide is for the terminal to wrap: no name or number is cut.
    whole = max(width, Console(width=_WIDEST).measure(table).maximum)
    Console(width=whole, highlight=False).print(table)
    Console(width=width, highlight=False).print(f"\n{legend}", style="dim")
