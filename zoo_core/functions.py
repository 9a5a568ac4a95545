"""A mechanism from one plain function, for an author who has nothing else yet. Imports no torch."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Any, get_args, overload

from zoo_core.attention import Context, Site
from zoo_core.errors import RecordError
from zoo_core.mechanism import Mechanism, Need, Options, Supports, option

if TYPE_CHECKING:
    from torch import nn

_TENSORS = ("q", "k", "v")
FROM_SITE = ("scale", "dropout", "heads", "head_dim", "max_len")
_FROM_CONTEXT = tuple(spec.name for spec in fields(Context))


@overload
def from_function(function: Callable[..., Any], **record: Any) -> Mechanism: ...
@overload
def from_function(**record: Any) -> Callable[[Callable[..., Any]], Mechanism]: ...
def from_function(function: Callable[..., Any] | None = None, **record: Any) -> Any:
    """Make a Mechanism of `function(q, k, v, ...)`; also a decorator, with or without arguments.

    function: takes q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) and returns (B, H, L, E). Its
        other parameters are told by name: those of Context (`key_padding`, `causal`, `bias`, ...)
        and `scale`, `heads`, `head_dim`, `max_len` of Site; `dropout` is 0 in eval. What it takes
        is what the mechanism supports. Keyword-only parameters with a default become options.
    record: fields of Mechanism that say more: name, aliases, summary, family, paper, time, memory,
        swap, supports, exact_at, formula, deviations.

        @zoo.from_function(summary="Attention by ReLU.")
        def relu_attention(q, k, v, key_padding, *, power: int = 2): ...

    Raises RecordError for a parameter that nothing can fill.
    """
    if function is None:
        return lambda later: from_function(later, **record)
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name not in _TENSORS]
    options = _options(function, parameters)
    told = {spec.name for spec in fields(options)}
    for name in names:
        if name not in (*FROM_SITE, *_FROM_CONTEXT, *told):
            known = ", ".join((*FROM_SITE, *_FROM_CONTEXT))
            raise RecordError(
                f"{function.__qualname__} takes {name!r}, which nothing fills; take one of "
                f"{known}, or give it a default behind a * to make it an option"
            )
    supports = Supports(
        key_padding="key_padding" in names,
        causal="causal" in names,
        bias="bias" in names,
        grid="optional" if "grid" in names else "ignored",
        needs=frozenset(need for need in get_args(Need) if need in names),
    )
    described = inspect.getdoc(function) or f"The function {function.__qualname__}."
    defaults: dict[str, Any] = {
        "name": function.__name__,
        "summary": described.splitlines()[0],
        "family": "function",
        "paper": None,
        "time": "n**2*d",
        "memory": "n**2",
        "supports": supports,
        "swap": "needs-training",
    }
    factory = _Factory(_Named(function), tuple(name for name in names if name not in told))
    return Mechanism(**{**defaults, **record, "options": options, "factory": factory})


def _options(function: Callable[..., Any], parameters: Any) -> type[Options]:
    """The options class: one field for each keyword-only parameter with a default."""
    hints = typing.get_type_hints(function)
    made = []
    for name, parameter in parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty:
            hint = hints.get(name, type(parameter.default))
            made.append((name, hint, option(parameter.default)))
    title = "".join(part.title() for part in function.__name__.split("_")) + "Options"
    return make_dataclass(title, made, bases=(Options,), frozen=True, kw_only=True)


@dataclass(frozen=True)
class _Named:
    """A function that is pickled by its name, even where the decorator put a Mechanism there."""

    function: Callable[..., Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, (self.function.__module__, self.function.__qualname__)


def _find(module: str, name: str) -> _Named:
    found: Any = sys.modules.get(module) or __import__(module, fromlist=["_"])
    for part in name.split("."):
        found = getattr(found, part)
    if isinstance(found, Mechanism) and isinstance(found.factory, _Factory):
        return found.factory.function
    return _Named(found)


@dataclass(frozen=True)
class _Factory:
    """The factory of a mechanism made from a function. told: what the function asks for by name."""

    function: _Named
    told: tuple[str, ...]

    def __call__(self, site: Site, options: Options) -> nn.Module:
        from zoo_core.nn.function import FunctionAttention

        return FunctionAttention(self.function, self.told, site, options.as_dict())

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The author's function, for whoever asks where this comes from."""
        return self.function.function
