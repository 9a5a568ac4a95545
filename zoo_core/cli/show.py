"""`zoo show`: everything one record says about itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from zoo_core.cli import output
from zoo_core.cli.output import Cell

if TYPE_CHECKING:
    from zoo_core.architecture import Architecture
    from zoo_core.catalogue import Preset
    from zoo_core.cli.rows import Row
    from zoo_core.mechanism import Mechanism

_SWAP = {
    "exact": "exact: pretrained weights give what the stock model gives",
    "approximate": "approximate: pretrained weights work untrained, nearly",
    "needs-training": "needs training: pretrained weights alone do not work",
}
_PROMISES = {
    "key_padding": "padding",
    "causal": "causal",
    "cross": "cross-attention",
    "bias": "bias",
    "weights": "attention map",
}
_TOKENS = 512

Fact = tuple[str, str]


@click.command("show")
@click.argument("name")
@click.option("--json", is_flag=True, help="Print a JSON object.")
def command(name: str, json: bool) -> None:
    """Show all about one mechanism, model family or preset.

    NAME may be an alias, or distribution/name.
    """
    from zoo_core import registry

    if not registry.owners(name):
        if registry.owners(name, kind="architectures"):
            return _show_architecture(registry.architecture(name), json)
        if preset := registry.preset(name):
            return _show_preset(preset, json)
    return _show_mechanism(registry.mechanism(name), json)


def _show_mechanism(record: Mechanism, json: bool) -> None:
    from zoo_core import registry
    from zoo_core.cli import rows

    if json:
        contested = record.name in registry.contested()
        output.as_json(rows.mechanism_details(record, contested=contested))
        return
    _title(record)
    _facts(_mechanism_facts(record))
    if options := rows.options(record.options):
        output.say()
        output.table(["option", "default", "meaning"], _options(options))


def _show_architecture(record: Architecture, json: bool) -> None:
    from zoo_core import registry
    from zoo_core.cli import rows

    if json:
        contested = record.name in registry.contested(kind="architectures")
        output.as_json(rows.architecture(record, contested=contested))
        return
    _title(record)
    _facts([("library", record.library), ("default", record.default), *_aliases(record)])


def _show_preset(record: Preset, json: bool) -> None:
    from zoo_core.cli import rows

    if json:
        output.as_json(rows.preset(record))
        return
    output.say(Cell(record.name, bold=True), Cell("  preset", dim=True))
    output.table([], [[record.summary]])
    output.say()
    _facts(_preset_facts(record))


def _preset_facts(record: Preset) -> Iterator[Fact]:
    yield "architecture", record.architecture
    rules = record.attention if isinstance(record.attention, Mapping) else {"": record.attention}
    yield (
        "attention",
        "\n".join(f"{layers} {_chosen(one)}".strip() for layers, one in rules.items()),
    )
    if record.max_length:
        yield "max length", str(record.max_length)
    if record.model_kwargs:
        yield "model", _assignments(record.model_kwargs)
    yield "defined in", str(record.source)


def _chosen(mechanism: Any) -> str:
    """One mechanism of a preset, with its options if it has any."""
    if isinstance(mechanism, str):
        return mechanism
    name, options = mechanism
    return f"{name} ({_assignments(options)})"


def _assignments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())


def _title(record: Mechanism | Architecture) -> None:
    origin = f"{record.distribution} {record.version}".strip() or "this process"
    output.say(Cell(record.name, bold=True), Cell(f"  {origin}", dim=True))
    output.table([], [[record.summary]])
    output.say()


def _facts(facts: Iterable[Fact]) -> None:
    output.table([], [[Cell(label, dim=True), value] for label, value in facts])


def _mechanism_facts(record: Mechanism) -> Iterator[Fact]:
    from zoo_core.bench.measured import verdict

    supports = record.supports
    if record.formula:
        yield "formula", record.formula
    if record.paper:
        link = f"\n{record.paper.link}" if record.paper.link else ""
        yield "paper", f"{record.paper.title} ({record.paper.year}){link}"
    yield "family", record.family
    yield from _aliases(record)
    yield "time", output.growth(record.time)
    yield "memory", output.growth(record.memory)
    if known := verdict(record):
        yield "speed", f"{known.summary}\n{known.how}"
    yield "swap", _SWAP[record.swap]
    for label, kept in (("supports", True), ("refuses", False)):
        words = [word for key, word in _PROMISES.items() if getattr(supports, key) is kept]
        if words:
            yield label, ", ".join(words)
    if supports.lengths == "fixed":
        yield "length", "at most that of the model it was built for"
    if supports.grid != "ignored":
        yield (
            "grid",
            {"optional": "used where the model has one", "required": "needed"}[supports.grid],
        )
    if supports.needs:
        yield "reads", ", ".join(sorted(supports.needs))
    yield "exact", _exact(record)
    yield "deviations", record.deviations


def _aliases(record: Mechanism | Architecture) -> list[Fact]:
    return [("aliases", ", ".join(record.aliases))] if record.aliases else []


def _exact(record: Mechanism) -> str:
    """The options, where they are not the defaults, at which it equals softmax attention."""
    from zoo_core.attention import Site
    from zoo_core.isolation import ForeignError, Isolation

    if record.exact_at is None:
        return "never equals softmax attention"
    row = Site(max_len=_TOKENS, grid=(1, _TOKENS))
    with Isolation() as isolation:
        try:
            options = isolation.attempt(partial(record.exact_at, Site(max_len=_TOKENS)))
            on_row = isolation.attempt(partial(record.exact_at, row))
        except ForeignError as error:
            return f"unknown: {error}"
    where = ""
    if options is None:
        options, where = on_row, " on a grid of one row"
    if options is None:
        return "never equals softmax attention"
    values, defaults = options.as_dict(), record.options().as_dict()
    changed = {key: value for key, value in values.items() if value != defaults[key]}
    if changed:
        where = f"{where or f' at {_TOKENS} tokens'} with {_assignments(changed)}"
    return f"equals softmax attention{where}"


def _options(options: Iterable[Row]) -> Iterator[list[str | Cell]]:
    """Two lines for each: what it means, and which values it takes."""
    for one in options:
        yield [Cell(one["name"], bold=True), repr(one["default"]), one["help"] or one["type"]]
        yield ["", "", Cell(_allowed(one), dim=True)]


def _allowed(option: Row) -> str:
    """`int, 1..max_len` or `one of a, b`."""
    if option["choices"]:
        return f"one of {', '.join(map(str, option['choices']))}"
    low, high = option["low"], option["at_most"] or option["high"]
    bounds = [str(bound) if bound is not None else "" for bound in (low, high)]
    return ", ".join([option["type"], *(["..".join(bounds)] if any(bounds) else [])])
