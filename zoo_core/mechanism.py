"""What an attention mechanism says about itself, before anything is built. Imports no torch."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from zoo_core.errors import OptionError, RecordError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from zoo_core.attention import Site

API = 1
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")

Lengths = Literal["any", "fixed"]
Grid = Literal["ignored", "optional", "required"]
Need = Literal["hidden", "carry", "projections", "times"]
Swap = Literal["exact", "approximate", "needs-training"]


def check_name(kind: str, name: object) -> None:
    """Raise RecordError unless `name` is lower_snake ASCII of at most 64 characters."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        shown = repr(name)[:80]
        raise RecordError(f"{kind} name {shown} must be lower_snake ASCII, at most 64 characters")


def check_names(kind: str, name: object, aliases: object) -> None:
    """Raise RecordError unless the name, and every alias of a tuple of them, is sound."""
    check_name(kind, name)
    if not isinstance(aliases, tuple):
        raise RecordError(f"{name}: aliases must be a tuple of names, not {aliases!r}")
    for alias in aliases:
        check_name(kind, alias)


def check_choice(where: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise RecordError unless `value` is one of `choices`."""
    if value not in choices:
        raise RecordError(f"{where} is {value!r}, must be one of {', '.join(map(repr, choices))}")


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Where a mechanism comes from. `arxiv` is an id such as "2006.04768"."""

    title: str
    year: int
    arxiv: str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.title, str) or type(self.year) is not int:
            raise RecordError(
                f"Paper({self.title!r}, {self.year!r}): a title and a year are needed"
            )
        for name in ("arxiv", "url"):
            if not isinstance(getattr(self, name), str | None):
                raise RecordError(f"Paper {self.title!r}: {name} must be a string or None")

    @property
    def link(self) -> str | None:
        """The address to show: `url`, else the arXiv page, else None."""
        return self.url or (f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else None)


@dataclass(frozen=True, kw_only=True)
class Supports:
    """Static promises, read before anything is built. Nothing is promised by default.

    The conformance kit tests that every True holds and that every False is refused.

    key_padding: padded keys change no real output.
    causal: output i never sees a key beyond i + query_offset.
    cross: queries and keys of different lengths.
    bias: an additive bias of shape (B or 1, H or 1, L, S).
    weights: `attention_map(q, k, ctx)` exists and `forward == map @ v`.
    linear_in_v: the output is linear in v, so that an effective map exists and can be probed.
    lengths: "fixed" sizes parameters by `site.max_len`; shorter inputs work, longer are refused.
    grid: whether the (rows, cols) layout of the tokens is ignored, used if known, or required.
    needs: extras of Context that the module reads; a bridge supplies only what is asked.
    """

    key_padding: bool = False
    causal: bool = False
    cross: bool = False
    bias: bool = False
    weights: bool = False
    linear_in_v: bool = True
    lengths: Lengths = "any"
    grid: Grid = "ignored"
    needs: frozenset[Need] = frozenset()

    def __post_init__(self) -> None:
        for spec in fields(self):
            if isinstance(spec.default, bool):
                check_choice(f"Supports.{spec.name}", getattr(self, spec.name), (True, False))
        check_choice("Supports.lengths", self.lengths, get_args(Lengths))
        check_choice("Supports.grid", self.grid, get_args(Grid))
        for need in self.needs:
            check_choice("Supports.needs", need, get_args(Need))


def option(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] | None = None,
    at_most: Literal["max_len", "head_dim"] | None = None,
    help: str = "",
) -> Any:
    """Declare one field of an `Options` class.

    low, high: inclusive bounds; a value outside is refused.
    choices: the only values allowed.
    at_most: the Site field that caps the value; a larger one is clamped to it, not refused, and
        plan and inspect show the clamped value.
    help: one line for `zoo show`.
    """
    metadata = {"low": low, "high": high, "choices": choices, "at_most": at_most, "help": help}
    return field(default=default, metadata=metadata)


def _scalar_types(options: type[Options]) -> dict[str, tuple[type, ...]]:
    """Map each option's name to the JSON types it accepts."""
    accepted = {}
    for name, hint in typing.get_type_hints(options).items():
        union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        parts = get_args(hint) if union else (hint,)
        if not set(parts) <= {bool, int, float, str, types.NoneType}:
            raise RecordError(
                f"{options.__name__}.{name} is annotated {hint}; options are JSON scalars "
                "(bool, int, float, str, or None)"
            )
        accepted[name] = parts
    return accepted


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of a mechanism's typed options: a frozen dataclass whose fields are `option(...)`.

    Values are finite JSON scalars, so that a manifest holds them without loss.
    Raises OptionError on construction for a wrong type or a value out of bounds.
    """

    def __post_init__(self) -> None:
        types_of = _scalar_types(type(self))
        for spec in fields(self):
            value = getattr(self, spec.name)
            value = self._checked(spec.name, value, types_of[spec.name], spec.metadata)
            object.__setattr__(self, spec.name, value)

    @staticmethod
    def _checked(name: str, value: Any, accepted: tuple[type, ...], meta: Mapping[str, Any]) -> Any:
        if type(value) is int and float in accepted and int not in accepted:
            value = float(value)
        if type(value) not in accepted:
            wanted = " or ".join("None" if t is types.NoneType else t.__name__ for t in accepted)
            raise OptionError(f"option {name}={value!r} must be {wanted}")
        if isinstance(value, float) and not math.isfinite(value):
            raise OptionError(f"option {name}={value!r} must be finite")
        if meta.get("choices") is not None and value not in meta["choices"]:
            allowed = ", ".join(map(repr, meta["choices"]))
            raise OptionError(f"option {name}={value!r} must be one of {allowed}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            low, high = meta.get("low"), meta.get("high")
            if low is not None and value < low:
                raise OptionError(f"option {name}={value!r} is below its lower bound {low}")
            if high is not None and value > high:
                raise OptionError(f"option {name}={value!r} is above its upper bound {high}")
        return value

    @classmethod
    def parse(cls, values: Mapping[str, Any] | Options | None, *, owner: str) -> Self:
        """Build options from a mapping; `owner` is the mechanism's name, for error messages."""
        if isinstance(values, Options):
            if not isinstance(values, cls):
                got = type(values).__name__
                raise OptionError(f"{owner} takes options of type {cls.__name__}, not {got}")
            return values
        values = dict(values or {})
        known = [spec.name for spec in fields(cls)]
        for name in values:
            if name not in known:
                has = f" (has: {', '.join(known)})" if known else " (it has no options)"
                hint = did_you_mean(str(name), known)
                raise OptionError(f"{owner} has no option {name!r}{has}{hint}")
        try:
            return cls(**values)
        except OptionError as error:
            raise OptionError(f"{owner}: {error}; see `zoo show {owner}`") from None

    def clamped(self, site: Site) -> Self:
        """Return these options with every `at_most` option no larger than the site allows."""
        changes = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is not None and (cap := spec.metadata.get("at_most")):
                changes[spec.name] = min(value, getattr(site, cap))
        return replace(self, **changes) if changes else self

    def as_dict(self) -> dict[str, Any]:
        """The options as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One attention mechanism: everything the zoo knows about it without importing its code.

    name: lower_snake, the literature's usual name without an "attention" suffix.
    summary: one sentence. family: "softmax", "kernel", "low-rank", "clustering", "sparse", ...
    time: growth of one forward in `n`, such as "n*rank*d". Where passes over memory count, reading
        or writing the channels of a token once takes as long as 6 keys of time: 4 bytes a channel
        against 4 operations, 6 of which a CPU does in a byte's time (`zoo bench` finds that by its
        yardsticks).
    memory: growth in `n` of the peak of a forward and its backward, where memory runs out first.
        What is worked on at once, part by part, counts as the tokens whose own memory it equals.
    swap: what patching pretrained weights without training does: nothing ("exact"); keep a
        sentence encoder's embeddings at a mean cosine of 0.8 or more ("approximate"); or less.
    factory: `(site, options) -> nn.Module` following `zoo_core.attention.AttentionModule`.
    exact_at: the options at which it equals softmax attention on `site`, or None there.
    api: version of this record's meaning; plugins written for 1 keep working.
    distribution, version: filled in by the host; what a plugin writes there is overwritten.
    """

    name: str
    aliases: tuple[str, ...] = ()
    summary: str
    family: str
    paper: Paper | None
    time: str
    memory: str
    supports: Supports
    options: type[Options]
    swap: Swap
    factory: Callable[[Site, Any], nn.Module] = field(repr=False)
    exact_at: Callable[[Site], Options | None] | None = field(default=None, repr=False)
    formula: str = ""
    deviations: str = "none"
    api: int = API
    distribution: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        check_names("mechanism", self.name, self.aliases)
        check_choice(f"{self.name}: swap", self.swap, get_args(Swap))
        if not isinstance(self.supports, Supports):
            raise RecordError(f"{self.name}: supports must be Supports, not {self.supports!r}")
        if not (isinstance(self.options, type) and issubclass(self.options, Options)):
            raise RecordError(f"{self.name}: options must be a subclass of Options (the type)")
        if "__dataclass_fields__" not in vars(self.options):
            raise RecordError(
                f"{self.name}: decorate {self.options.__name__} with "
                "@dataclass(frozen=True, kw_only=True), else it has no options"
            )
        if not (self.paper is None or isinstance(self.paper, Paper)):
            raise RecordError(f"{self.name}: paper must be Paper or None, not {self.paper!r}")
        for attribute in ("summary", "family", "time", "memory", "formula", "deviations"):
            if not isinstance(getattr(self, attribute), str):
                raise RecordError(f"{self.name}: {attribute} must be a string")
        if not callable(self.factory):
            raise RecordError(f"{self.name}: factory must be callable")
        _scalar_types(self.options)
        self.options()

    @property
    def qualified(self) -> str:
        """`distribution/name`: unambiguous, and what manifests store."""
        return f"{self.distribution}/{self.name}" if self.distribution else self.name
