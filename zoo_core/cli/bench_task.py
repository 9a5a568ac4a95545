"""`zoo bench --task`: small models learn an exact task, one with each mechanism."""

from __future__ import annotations

import json as json_module
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from zoo_core.cli import output
from zoo_core.cli.options import together
from zoo_core.words import plural

if TYPE_CHECKING:
    from zoo_core.bench.contest import Progress
    from zoo_core.mechanism import Mechanism
    from zoo_core.rasp.learning import Outcome

#: Options that only a task has use for.
task_options = together(
    click.option("--steps", type=click.IntRange(min=0), help="With --task: optimiser steps."),
    click.option(
        "--guided/--free",
        "guided",
        default=None,
        help="With --task: supervise the heads by the program's selectors. Default: once each.",
    ),
    click.option(
        "--depth",
        type=click.IntRange(min=1),
        help="With --task: layers. Default: as many as the program takes.",
    ),
    click.option("--seed", type=click.IntRange(min=0), help="With --task: of weights and words."),
)
_OWN = ("steps", "guided", "depth", "seed")
#: Option of `zoo bench` -> field of Lesson.
_SETTINGS = {
    "length": "length",
    "batch": "batch_size",
    "heads": "heads",
    "width": "width",
    "depth": "layers",
    "steps": "steps",
    "seed": "seed",
}
_ALSO = ("names", "attention", "options", "task", "guided", "json")


def lesson_settings(context: click.Context) -> dict[str, Any]:
    """The settings of the lesson that the command line names.

    Raises UsageError for an option that a task has no use for, or several values of one.
    """
    found: dict[str, Any] = {}
    for name, flag in _given(context):
        value = context.params[name]
        if name in _SETTINGS:
            values = value if isinstance(value, list) else [value]
            if len(values) > 1:
                raise click.UsageError(f"{flag} takes one number where there is a task")
            found[_SETTINGS[name]] = values[0]
        elif name not in _ALSO:
            raise click.UsageError(f"{flag} goes with a --model or with times, not with --task")
    return found


def refuse_task_options(context: click.Context) -> None:
    """Raise UsageError for an option on the command line that only a task has use for."""
    for name, flag in _given(context):
        if name in _OWN:
            raise click.UsageError(f"{flag} belongs to --task without --model")


def _given(context: click.Context) -> Iterator[tuple[str, str]]:
    """Name and flag of each parameter that the command line, not a default, has set."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            yield name, parameter.opts[0]


def run_task(
    task: str,
    mechanisms: Sequence[Mechanism],
    *,
    options: Mapping[str, Any] | None = None,
    guided: bool | None = None,
    json: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> bool:
    """Train one small BERT with each mechanism, print what each learned; whether all is complete.

    guided: whether the heads are supervised; None: one model of each kind.
    settings: fields of Lesson. Ctrl-C ends the run and keeps what is complete.
    Raises UnknownName for a task, OptionError for a setting or an option.
    """
    with output.working("loading torch"):
        from zoo_core.rasp.learning import Lesson
        from zoo_core.rasp.tasks import find

        chosen = find(task)
        lesson = Lesson.of(settings, chosen)
    outcomes: list[Outcome] = []
    ways = (False, True) if guided is None else (guided,)
    interrupted = False
    try:
        for outcome in _outcomes(chosen.name, mechanisms, ways, options, lesson, progress):
            outcomes.append(outcome)
            if json:
                line = {"kind": "outcome", **outcome.as_dict()}
                click.echo(json_module.dumps(line, ensure_ascii=False))
    except KeyboardInterrupt:
        interrupted = True
        output.warn(f"interrupted; {plural(len(outcomes), 'model')} complete")
    if not json and any(outcome.score for outcome in outcomes):
        _show(outcomes)
    for outcome in outcomes:
        if outcome.refused:
            how = "guided" if outcome.guided else "free"
            output.warn(f"not trained: {outcome.attention}, {how}: {outcome.refused}")
    return not interrupted and any(outcome.score for outcome in outcomes)


def _outcomes(
    task: str,
    mechanisms: Sequence[Mechanism],
    ways: Sequence[bool],
    options: Mapping[str, Any] | None,
    lesson: Any,
    progress: Progress | None,
) -> Iterator[Outcome]:
    from zoo_core.rasp.learning import try_to_learn

    total = len(mechanisms) * len(ways) * lesson.steps
    done = 0
    for mechanism in mechanisms:
        for guided in ways:
            what = f"{mechanism.name}, {'guided' if guided else 'free'}"

            def tell(step: int, done: int = done, what: str = what) -> None:
                if progress is not None:
                    progress(done + step, total, what)

            yield try_to_learn(
                task,
                mechanism.qualified,
                options=options,
                guided=guided,
                progress=tell,
                **lesson.as_dict(),
            )
            done += lesson.steps


def _show(outcomes: Sequence[Outcome]) -> None:
    """The table, and what its columns are."""
    from zoo_core.rasp.report import HEADINGS, LEGEND, caption, cells

    output.say(output.Cell(_wrapped(caption(outcomes)), bold=True))
    output.say()
    output.table(HEADINGS, [cells(outcome) for outcome in outcomes if outcome.score])
    output.say()
    output.say(output.Cell(_wrapped(LEGEND), dim=True))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, output.width())
