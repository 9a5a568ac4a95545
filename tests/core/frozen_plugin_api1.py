"""A plugin written against the first version of every hook and record. Frozen: never edit it.

`test_frozen_plugin.py` holds its sha256. When a hook changes, this file must go on working as it
is; what is new gets a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zoo_core import (
    Architecture,
    Context,
    Mechanism,
    Options,
    Paper,
    Site,
    Supports,
    from_function,
    hookimpl,
    option,
)

SEEN = []


@dataclass(frozen=True, kw_only=True)
class FrozenOptions(Options):
    share: float = option(0.5, low=0.0, high=1.0, help="weight of the mean")
    width: int = option(8, low=1, at_most="max_len", help="clamped to the site")
    mode: str = option("mean", choices=("mean", "none"))
    flag: bool = False
    seed: int | None = None


def build(site: Site, options: FrozenOptions):
    from torch import nn

    class Frozen(nn.Module):
        unused = frozenset({"query", "key"})

        def __init__(self) -> None:
            super().__init__()
            self.told = (
                site.path,
                site.layer,
                site.layers,
                site.kind,
                site.dim,
                site.heads,
                site.head_dim,
                site.scale,
                site.dropout,
                site.max_len,
                site.causal,
                site.grid,
                site.prefix,
                site.previous,
            )
            site.shared.setdefault("first", site.path)

        def forward(self, q, k, v, ctx: Context):
            values = v
            if ctx.key_padding is not None:
                values = v.masked_fill(~ctx.key_padding[:, None, :, None], 0)
            share = options.share if options.mode == "mean" else 0.0
            return (1 - share) * values + share * values.mean(-2, keepdim=True)

    return Frozen()


def exact_at(site: Site) -> FrozenOptions | None:
    return None


FROZEN = Mechanism(
    name="frozen",
    aliases=("frozen_alias",),
    summary="Written against api 1.",
    family="test",
    paper=Paper(title="None", year=2026, arxiv=None, url="https://example.org"),
    time="n*d",
    memory="n*d",
    supports=Supports(
        key_padding=True,
        causal=False,
        cross=False,
        bias=False,
        weights=False,
        linear_in_v=True,
        lengths="any",
        grid="ignored",
        needs=frozenset(),
    ),
    options=FrozenOptions,
    swap="needs-training",
    factory=build,
    exact_at=exact_at,
    formula="a formula",
    deviations="none",
    api=1,
)


@from_function(name="frozen_function", family="test")
def frozen_function(q, k, v, key_padding, scale, *, power: int = 1):
    """Written against the first from_function."""
    return v * power


def adapter():
    raise NotImplementedError("only listed")


FROZEN_FAMILY = Architecture(
    name="frozen_family",
    aliases=("frozen_family_alias",),
    library="timm",
    summary="Written against api 1.",
    default="none",
    adapter=adapter,
    api=1,
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    return [FROZEN, frozen_function]


@hookimpl
def zoo_architectures() -> Iterable[Architecture]:
    return [FROZEN_FAMILY]


@hookimpl
def zoo_catalogues() -> Iterable[Path]:
    return [Path(__file__).with_name("frozen.toml").resolve()]


@hookimpl
def zoo_patched(model, patch) -> None:
    SEEN.append((model, patch))
