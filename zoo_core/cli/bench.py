"""`zoo bench`: how fast, how big, and how it grows, against softmax and the machine's floors."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zoo_core.bench import baseline
from zoo_core.bench.cases import DTYPES, LENGTHS, MODES, Case, sweep
from zoo_core.cli import bench_task, options, output, targets
from zoo_core.cli.references import host
from zoo_core.errors import BenchError

if TYPE_CHECKING:
    from zoo_core.bench.contest import Progress
    from zoo_core.bench.rows import Row
    from zoo_core.mechanism import Mechanism

_MODEL_LENGTHS = (512, 1024, 2048, 4096)
_AXES = tuple(spec.name for spec in fields(Case))


def _several(each: Any) -> Any:
    """A callback for values divided by commas: "512,1024" -> [512, 1024], each of a click type."""

    def parse(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        if text is None:
            return None
        return [each.convert(part.strip(), parameter, context) for part in text.split(",")]

    return parse


def _kept(context: click.Context, parameter: click.Parameter, text: str | None) -> Path | None:
    """A callback for a file of measurements, or the word for those that come with zoo-core."""
    if text != "shipped":
        return Path(text) if text else None
    from zoo_core.bench.measured import FILE

    return FILE


class _Finite(click.FloatRange):
    """A range without infinity, and without nan, which no bound keeps out."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


_counts = _several(click.IntRange(min=1))
#: More gain nothing anywhere, and torch crashes on numbers that the system does not grant.
_MOST_THREADS = 4 * (os.cpu_count() or 256)


@click.command("bench")
@click.argument("names", nargs=-1, metavar="[MECHANISM]...")
@click.option(
    "--model", metavar="NAME", help="Measure this architecture as a whole, as zoo build takes it."
)
@click.option("--attention", metavar="NAMES", help="The mechanisms, divided by commas.")
@click.option(
    "--length",
    metavar="N,...",
    callback=_counts,
    help=f"Tokens. Default: {','.join(map(str, LENGTHS))}.",
)
@click.option(
    "--batch", metavar="N,...", callback=_counts, default="1", show_default=True, help="Samples."
)
@click.option("--heads", metavar="N,...", callback=_counts, help=f"Heads. Default: {Case.heads}.")
@click.option(
    "--width", metavar="N,...", callback=_counts, help=f"Width of a head. Default: {Case.width}."
)
@click.option(
    "--dtype", callback=_several(click.Choice(DTYPES)), default="float32", show_default=True
)
@click.option("--device", default="cpu", show_default=True, help="As torch writes it: cuda:0.")
@click.option(
    "--mode",
    callback=_several(click.Choice(MODES)),
    default="forward",
    show_default=True,
    help="backward: forward and backward in training; compiled: the forward by torch.compile.",
)
@click.option("--padded", is_flag=True, help="Samples of N/2 to N tokens, padded to N.")
@click.option(
    "--native/--plain",
    default=None,
    help="With or without the native kernels of zoo native. Default: with, if they are built.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1, max=_MOST_THREADS),
    help="Threads. Default: torch's own.",
)
@click.option(
    "--rounds", type=click.IntRange(min=2), default=5, show_default=True, help="Turns of each."
)
@click.option(
    "--seconds",
    type=_Finite(min=0, min_open=True),
    default=0.1,
    show_default=True,
    help="The least time of one turn.",
)
@click.option("--peers/--no-peers", default=True, help="Measure public implementations too.")
@options.mechanism_option
@click.option(
    "--task",
    metavar="NAME",
    help="Train small models on reverse, histogram, sort, most-frequent, dyck1 or dyck2. With "
    "--model: a head, such as masked-lm.",
)
@bench_task.task_options
@options.host_setting
@click.option("--json", is_flag=True, help="Print JSON lines, each as soon as it is known.")
@click.option("--markdown", is_flag=True, help="Print a summary for a README.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    callback=targets.picture,
    help="Draw time and memory: PNG, SVG.",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    callback=targets.file,
    help="Keep the measurements as JSON.",
)
@click.option(
    "--against",
    metavar="FILE",
    callback=_kept,
    help="Compare ratios with kept ones, or with what comes with zoo-core: shipped. Exits with 1 "
    "where something got slower or broke, or nothing can be compared.",
)
@click.option(
    "--tolerance",
    type=_Finite(min=0),
    default=baseline.TOLERANCE,
    show_default=True,
    help="With --against: the change that is no change, beyond noise.",
)
def command(
    names: tuple[str, ...],
    attention: str | None,
    model: str | None,
    task: str | None,
    **given: Any,
) -> None:
    """Measure MECHANISMs (names, patterns such as '*former', or all) against fused softmax.

    \b
    zoo bench linformer local            bare attention, forward, by length
    zoo bench all --mode forward,backward --plot costs.png
    zoo bench --model bert --attention all --length 4096
    zoo bench --task reverse --attention softmax,linear    what each learns

    Ctrl-C ends a run and keeps what is complete.
    """  # noqa: D301 - click reads this backspace
    if given["json"] and given["markdown"]:
        raise click.UsageError("choose one of --json and --markdown")
    candidates = [*names, *(attention or "").split(",")]
    if task and model is None:
        done = _learn(task, candidates, **given)
    else:
        done = _race(candidates, model=model, task=task, **given)
    if not done:
        raise SystemExit(1)


def _learn(
    task: str,
    candidates: Sequence[str],
    *,
    options: dict[str, Any],
    guided: bool | None,
    json: bool,
    **_: Any,
) -> bool:
    """What small models learn of a task; whether all of it is complete."""
    lesson = bench_task.lesson_settings(click.get_current_context())
    chosen = _mechanisms(candidates)
    with _progress() as progress:
        return bench_task.run_task(
            task, chosen, options=options, guided=guided, json=json, progress=progress, **lesson
        )


def _race(
    candidates: Sequence[str],
    *,
    model: str | None,
    json: bool,
    markdown: bool,
    plot: Path | None,
    save: Path | None,
    against: Path | None,
    tolerance: float,
    **how: Any,
) -> bool:
    """Times and memory; whether all of it was measured, and nothing got worse."""
    bench_task.refuse_task_options(click.get_current_context())
    if model is None and how["model_kwargs"]:
        raise click.UsageError("--set belongs to --model")
    cases = _cases(model, **how)
    chosen = _mechanisms(candidates)
    before = baseline.load(against) if against else None
    # It warns of a CUDA toolkit without a GPU, which is no concern of ours.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with output.working("loading torch"):
        from zoo_core.bench.machine import describe_machine
        from zoo_core.cli.bench_report import Report
        from zoo_core.nn import native

        machine = describe_machine(how["device"], how["threads"])
        if how["native"] is None and native.loaded():
            cases = [replace(case, native=_may_be_native(case)) for case in cases]
    report = Report(machine, model=model, json=json)
    with _progress() as progress:
        report.take(_rows(chosen, cases, model, progress, **how))
    report.show(summary=markdown)
    if model is not None and how["length"]:
        report.remark_on_lengths(how["length"])
    if save:
        report.keep(save)
    worse = before is not None and report.compare(before, tolerance)
    if plot:
        report.draw(plot)
    return bool(report.measured) and not (worse or report.interrupted)


def _cases(model: str | None, **given: Any) -> list[Case]:
    """Every combination of the axes that were given, the others at their defaults."""
    if model is not None and (given["heads"] or given["width"]):
        raise click.UsageError("--heads and --width are the model's own; use --set")
    axes = {name: given[name] for name in _AXES if given[name] is not None}
    return sweep(**{"length": _MODEL_LENGTHS if model else LENGTHS, **axes})


def _may_be_native(case: Case) -> bool:
    return (case.device, case.dtype) == ("cpu", "float32")


def _rows(
    chosen: Sequence[Mechanism],
    cases: Sequence[Case],
    model: str | None,
    progress: Progress | None,
    *,
    options: dict[str, Any],
    peers: bool,
    rounds: int,
    seconds: float,
    threads: int | None,
    task: str | None,
    model_kwargs: dict[str, Any],
    **_: Any,
) -> Iterator[Row]:
    """Measure bare mechanisms, or a whole model with each."""
    from zoo_core.bench import layers, models
    from zoo_core.bench.contest import Effort

    how: dict[str, Any] = {
        "options": options or None,
        "peers": peers,
        "effort": Effort(rounds=rounds, seconds=seconds, threads=threads),
        "progress": progress,
    }
    if model is None:
        return layers.measure(chosen, cases, **how)
    family, weights = host(model)
    how |= {"pretrained": weights or False, "task": task, **model_kwargs}
    return models.measure_models(family, chosen, cases, **how)


def _mechanisms(names: Sequence[str]) -> list[Mechanism]:
    """The records of names, patterns and "all", each once, in this order."""
    from zoo_core import registry

    found: dict[str, Mechanism] = {}
    for name in filter(None, (name.strip() for name in names)):
        pattern = "*" if name == "all" else name
        some = registry.mechanisms(pattern) if "*" in pattern else [registry.mechanism(name)]
        if not some:
            raise BenchError(f"no mechanism fits {name!r}; see `zoo list`")
        found |= {record.qualified: record for record in some}
    if not found:
        raise click.UsageError("name mechanisms, a pattern such as '*former', or all")
    return list(found.values())


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on a terminal's stderr, which is out of the way of what goes to stdout."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield tell
