"""Architecture + attention rules + options -> Plan, or every reason why it does not fit.

Imports no torch: a plan is made from records and sites alone, before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zoo_core import registry
from zoo_core.attention import Site
from zoo_core.errors import DoesNotFit, OptionError, ZooError
from zoo_core.mechanism import Mechanism, Options

Attention = str | tuple[str, Mapping[str, Any]] | Mapping[Any, Any]
Layers = str | int | Iterable[int]


@dataclass(frozen=True)
class Step:
    """One site and what is to be built there. `options` are clamped to the site."""

    site: Site
    mechanism: Mechanism
    requested: Options
    options: Options

    @property
    def clamped(self) -> dict[str, tuple[Any, Any]]:
        """The options that the site made smaller: name -> (requested, built)."""
        before, after = self.requested.as_dict(), self.options.as_dict()
        return {name: (before[name], after[name]) for name in after if before[name] != after[name]}


@dataclass(frozen=True)
class Plan:
    """What a patch will do: the steps, and the sites that keep their stock attention."""

    steps: tuple[Step, ...]
    stock: tuple[Site, ...] = ()

    @property
    def notes(self) -> list[str]:
        """From how many tokens on each mechanism pays, in words, as far as that was measured."""
        from zoo_core.bench.measured import as_measured, verdict

        longest: dict[tuple[Mechanism, bool], int] = {}
        for step in self.steps:
            default = as_measured(step.mechanism, step.options.as_dict(), step.site)
            key = step.mechanism, default
            longest[key] = max(step.site.max_len, longest.get(key, 0))
        found = [(verdict(one), default, length) for (one, default), length in longest.items()]
        return [
            known.note(length) if default else known.aside
            for known, default, length in found
            if known
        ]


@dataclass(frozen=True)
class Rule:
    """One mechanism for the layers that `selector` names; `name` is what the user wrote."""

    selector: Layers
    mechanism: Mechanism
    options: Options


def rules(
    attention: Attention,
    *,
    options: Mapping[str, Any] | Options | None = None,
    layers: Layers | None = None,
) -> list[Rule]:
    """Resolve names and check options; needs no model. See `zoo_core.build` for the forms."""
    if isinstance(attention, Mapping):
        if options is not None or layers is not None:
            raise OptionError(
                "attention rules by layer carry their own options and layers; "
                'write {"0-3": ("linformer", {"rank": 128})} and drop options= and layers='
            )
        return [rule for layer, one in attention.items() for rule in rules(one, layers=layer)]
    if isinstance(attention, tuple):
        if options is not None:
            raise OptionError("options are given twice: in the attention tuple and in options=")
        name, options = attention
    else:
        name = attention
    if options is None and (preset := registry.attention_preset(name)):
        return rules(preset, layers=layers)
    mechanism = registry.mechanism(name)
    parsed = mechanism.options.parse(options, owner=mechanism.name)
    return [Rule("all" if layers is None else layers, mechanism, parsed)]


def select(selector: Layers, sites: Sequence[Site]) -> list[Site]:
    """The sites that a selector names: 3, "0-3", "4-", "0,2,5-7", "all", "self", "cross:0-3"."""
    if isinstance(selector, int):
        selector = str(selector)
    elif not isinstance(selector, str):
        selector = ",".join(str(layer) for layer in selector)
    kind, _, numbers = selector.rpartition(":")
    if numbers in ("all", "self", "cross"):
        kind, numbers = (kind or numbers).removeprefix("all"), "0-"
    if kind not in ("", "self", "cross"):
        raise OptionError(f"layers {selector!r}: {kind!r} is not 'self' or 'cross'")
    layers = _numbers(numbers, 1 + max(site.layer for site in sites))
    return [site for site in sites if site.layer in layers and kind in ("", site.kind)]


def _numbers(text: str, count: int) -> set[int]:
    """The layer numbers that `text` names in a model of `count` layers."""
    chosen: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or not (last == "" or last.isdecimal()):
            raise OptionError(
                f"layers {text!r}: {part!r} is not a layer number or range; "
                'write 3, "0-3", "4-", "0,2,5-7", "all", "self" or "cross:0-3"'
            )
        start, stop = int(first), int(last) if last else (count - 1 if dash else int(first))
        if start > stop or stop >= count:
            raise OptionError(
                f"layers {text!r}: {part!r} is out of range; this model has layers 0-{count - 1}"
            )
        chosen |= set(range(start, stop + 1))
    return chosen


def obstacles(mechanism: Mechanism, site: Site) -> list[str]:
    """Every static reason why `mechanism` cannot run at `site`, in words."""
    supports, name = mechanism.supports, mechanism.name
    reasons = []
    if site.obstacle:
        reasons.append(f"{site.obstacle}; leave this layer out with layers= or attention rules")
    if site.causal and site.kind == "self" and not supports.causal:
        reasons.append(f"{name} has no causal form, and this model is a decoder")
    if site.kind == "cross" and not supports.cross:
        reasons.append(
            f'{name} cannot attend to another sequence; leave cross-attention out with {{"self": '
            f"{name!r}}}"
        )
    if "carry" in supports.needs and site.calls > 1:
        reasons.append(f"{name} hands state from layer to layer, and this model repeats one layer")
    if "times" in supports.needs and site.grid is not None:
        reasons.append(f"{name} reads the time of each token, and images have none")
    if supports.grid == "required" and site.grid is None:
        reasons.append(f"{name} needs tokens on a (rows, cols) grid, and this model has none")
    return reasons


def plan(chosen: Sequence[Rule], sites: Sequence[Site], *, model: str = "this model") -> Plan:
    """Match rules to sites. Raises DoesNotFit with every reason, OptionError for bad layers."""
    if not sites:
        reason = "the model has no attention layer"
        raise DoesNotFit(f"nothing can be patched into {model}: {reason}", [reason])
    assigned: dict[str, Rule] = {}
    for rule in chosen:
        for site in select(rule.selector, sites):
            if site.path in assigned:
                raise OptionError(f"layer {site.layer} ({site.path}) is named by two rules")
            assigned[site.path] = rule
    _check(assigned, sites, model)
    steps = []
    shared: dict[str, dict[str, Any]] = {}
    previous: dict[str, str] = {}
    for site in sites:
        if not (rule_here := assigned.get(site.path)):
            continue
        key = rule_here.mechanism.qualified
        linked = replace(site, shared=shared.setdefault(key, {}), previous=previous.get(key))
        previous[key] = site.path
        options = rule_here.options.clamped(linked)
        steps.append(Step(linked, rule_here.mechanism, rule_here.options, options))
    return Plan(tuple(steps), tuple(site for site in sites if site.path not in assigned))


def _check(assigned: Mapping[str, Rule], sites: Sequence[Site], model: str) -> None:
    """Raise DoesNotFit with the obstacles of all sites, layers with the same one in one line."""
    where: dict[str, list[int]] = {}
    for site in sites:
        if rule := assigned.get(site.path):
            for reason in obstacles(rule.mechanism, site):
                where.setdefault(reason, []).append(site.layer)
    if where:
        reasons = [f"layers {ranges(layers)}: {reason}" for reason, layers in where.items()]
        names = ", ".join(sorted({rule.mechanism.name for rule in assigned.values()}))
        raise DoesNotFit(f"{names} does not fit {model}: " + "; ".join(reasons), reasons)


def ranges(layers: Iterable[int]) -> str:
    """Layer numbers as a selector: 0, 1, 2, 5 -> "0-2,5"."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def together(paths: Sequence[str]) -> str:
    """Paths in words: those that differ in one number become one, `blocks.0-5.attn`."""
    split = [re.split(r"(\d+)", path) for path in paths]
    columns = list(zip(*split, strict=False))
    varying = [n for n, column in enumerate(columns) if len(set(column)) > 1]
    alike = len({len(parts) for parts in split}) == 1
    if not (alike and len(varying) == 1 and varying[0] % 2):  # odd places are the numbers
        return ", ".join(dict.fromkeys(paths))
    first = list(split[0])
    first[varying[0]] = ranges(map(int, columns[varying[0]]))
    return "".join(first)


def softmax_where_faster(chosen: Sequence[Rule], sites: Sequence[Site]) -> list[Rule]:
    """The rules, with softmax at every site whose longest input is too short for its mechanism.

    Decided once, by `site.max_len`: chosen anew for each input, results would change with the
    amount of padding. What was never measured, as with other options, stays as it is.
    """
    from zoo_core.bench.measured import verdict

    (softmax,) = rules("softmax")
    settled = []
    for rule in chosen:
        measured = rule.options == rule.mechanism.options()
        known = verdict(rule.mechanism) if measured else None
        named = select(rule.selector, sites)
        short = [site for site in named if known and not known.pays(site.max_len)]
        settled += _parts(softmax, short)
        settled += _parts(rule, [site for site in named if site not in short])
    return settled


def _parts(rule: Rule, sites: Sequence[Site]) -> list[Rule]:
    """A rule for just these sites: one for each kind."""
    kinds = dict.fromkeys(site.kind for site in sites)
    layers = {kind: ranges(site.layer for site in sites if site.kind == kind) for kind in kinds}
    return [replace(rule, selector=f"{kind}:{numbers}") for kind, numbers in layers.items()]


@dataclass(frozen=True)
class Answer:
    """Whether an attention fits: the reasons against it, or notes on where it pays."""

    reasons: list[str]
    notes: list[str]


def why(
    architecture: str,
    attention: Attention | None = None,
    *,
    options: Mapping[str, Any] | Options | None = None,
    layers: Layers | None = None,
    **how: Any,
) -> list[str]:
    """Why this attention cannot be patched into this architecture; an empty list means it fits.

    how: `task`, `max_length`, `pretrained` and the host's own arguments, as in `zoo.build`.
    The model is only sketched, without weights. Raises UnknownName for a name nobody registered.
    """
    return answer(architecture, attention, options=options, layers=layers, **how).reasons


def answer(
    architecture: str,
    attention: Attention | None = None,
    *,
    options: Mapping[str, Any] | Options | None = None,
    layers: Layers | None = None,
    **how: Any,
) -> Answer:
    """As `why`, with notes on where the attention pays."""
    from zoo_core.builder import Order

    try:
        planned = Order.of(architecture, attention, options=options, layers=layers, **how).plan()
    except DoesNotFit as error:
        return Answer(list(error.reasons), [])
    except LookupError:
        raise
    except ZooError as error:
        return Answer([str(error)], [])
    return Answer([], planned.notes)
