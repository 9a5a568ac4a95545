"""Race whole models that differ in their attention only; what attention costs is the tax.

    tax = (t - t_floor) / t_floor,   the floor: the same model whose attention returns v

All competitors share one set of weights: each is a copy of the modules around the same parameters,
patched by its mechanism. Stock models of transformers with the same sizes take part as peers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core import patching
from zoo_core.attention import Context
from zoo_core.bench.cases import Case
from zoo_core.bench.competitors import Work
from zoo_core.bench.contest import Contest, Effort, Progress, Steps
from zoo_core.bench.layers import choose
from zoo_core.bench.machine import check_case
from zoo_core.bench.model_peers import model_peers_of
from zoo_core.bench.rows import Row
from zoo_core.builder import Order
from zoo_core.errors import BenchError
from zoo_core.mechanism import Mechanism, Options, Supports
from zoo_core.plan import Rule, obstacles


class _Values(nn.Module):
    """Attention that returns the values, the least that any attention can do."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> v."""
        return v


#: Not registered: nobody wants this in a model.
FLOOR = Mechanism(
    name="floor",
    summary="Every token gets its own value: a model without attention.",
    family="baseline",
    paper=None,
    time="n",
    memory="n",
    supports=Supports(key_padding=True, causal=True),
    options=Options,
    swap="needs-training",
    factory=lambda site, options: _Values(),
)


def measure_models(
    architecture: str,
    mechanisms: Sequence[str | Mechanism],
    cases: Sequence[Case],
    *,
    options: Mapping[str, Any] | None = None,
    peers: bool = True,
    effort: Effort | None = None,
    progress: Progress | None = None,
    task: str | None = None,
    **model_kwargs: Any,
) -> Iterator[Row]:
    """Rows of every case: "stock", "floor", each mechanism patched in, and peers.

    architecture, task, model_kwargs: as in `zoo.build`; weights are random without `pretrained`.
    cases: lengths and batches are of the model's input; heads and width are the model's own. An
        image model has one length, that of its images; leave the others out.
    Otherwise as `zoo_core.bench.measure`.
    """
    chosen = choose(mechanisms, options)
    effort = effort or Effort()
    for case in cases:
        check_case(case)
    host = Host.of(architecture, max(case.length for case in cases), task, model_kwargs)
    cases = list(dict.fromkeys(host.fit(case) for case in cases))
    steps = Steps(len(cases) * (effort.rounds + len(chosen)), progress)
    for case in cases:
        yield from _race(host, case, chosen, effort, steps, peers=peers)
        torch.compiler.reset()


@dataclass(frozen=True, eq=False)
class Host:
    """A stock model, and the layers whose attention can be replaced; None: all of them."""

    name: str
    model: nn.Module
    heads: int
    width: int
    length: int | None
    layers: tuple[int, ...] | None

    @classmethod
    def of(
        cls, architecture: str, longest: int, task: str | None, kwargs: Mapping[str, Any]
    ) -> Host:
        """Build it with random weights. Raises UnknownName, OptionError or BenchError."""
        order = Order.of(architecture, "softmax", options=None, layers=None, task=task, **kwargs)
        adapter, how = order.host.adapter(), {**order.how, "max_length": None}
        is_text = _reads_text(adapter.create(order.variant, skeleton=True, **how))
        if is_text:
            how["max_length"] = longest
        with patching.seeded(0):
            model = adapter.create(order.variant, **how)
        sites = adapter.sites(model)
        free = [site for site in sites if not obstacles(FLOOR, site)]
        if not free:
            reasons = "; ".join(obstacles(FLOOR, sites[0]))
            raise BenchError(f"{architecture}: no layer's attention can be replaced: {reasons}")
        layers = tuple(sorted({site.layer for site in free}))
        site, weights = free[0], order.how.get("pretrained")
        return cls(
            name=weights if isinstance(weights, str) else architecture,
            model=model,
            heads=site.heads,
            width=site.head_dim,
            length=None if is_text else site.max_len,
            layers=None if len(free) == len(sites) else layers,
        )

    def fit(self, case: Case) -> Case:
        """The case with what the model decides: heads, width, and the length of images."""
        if case.padded and self.length:
            raise BenchError(f"{self.name}: images have no padding; leave --padded out")
        length = self.length or case.length
        return replace(case, heads=self.heads, width=self.width, length=length)

    def patched(self, mechanism: Mechanism, options: Options, case: Case) -> Work:
        """The work of a copy with this attention."""
        model = self.twin()
        rule = Rule(self.layers if self.layers else "all", mechanism, options)
        patch = patching.apply(model, [rule], seed=0)
        block = patch.attention[0]["options"] if patch.attention else {}
        return self.work(mechanism.name, model, case, block)

    def stock(self, case: Case) -> Work:
        """The work of the model as it is."""
        return self.work("stock", self.twin(), case, {})

    def twin(self) -> nn.Module:
        """A copy of every module around the same parameters and buffers."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})

    def work(
        self,
        name: str,
        model: nn.Module,
        case: Case,
        options: Mapping[str, Any],
        *,
        whole: bool = True,
    ) -> Work:
        """Put a model where the case says, and call it on the case's inputs.

        whole: whether it has to compile in one piece.
        """
        model = model.to(device=case.device, dtype=getattr(torch, case.dtype))
        for parameter in model.parameters():  # a patch freezes what its mechanism ignores
            parameter.requires_grad_(True)
        inputs = _inputs(model, case)
        work = Work(name, _caller(model, inputs), tuple(model.parameters()), (model,))
        if case.mode == "compiled":
            work.compiled = _caller(torch.compile(model, dynamic=False, fullgraph=whole), inputs)
        work.options = options
        return work


def _race(
    host: Host,
    case: Case,
    chosen: Sequence[tuple[Mechanism, Options]],
    effort: Effort,
    steps: Steps,
    *,
    peers: bool,
) -> Iterator[Row]:
    contest, what = Contest(case, effort), f"{host.name}, {case.length} tokens, {case.mode}"
    blank = partial(Row, case=case, model=host.name)
    contest.enter(blank(name="stock", role="reference"), partial(host.stock, case))
    floor = partial(host.patched, FLOOR, Options(), case)
    contest.enter(blank(name="floor", role="floor"), floor)
    for mechanism, options in chosen:
        steps.say(f"{what}: preparing {mechanism.name}")
        row = blank(name=mechanism.name, role="mechanism", options=options.as_dict())
        entry = contest.enter(row, partial(host.patched, mechanism, options, case))
        if peers and not entry.row.refused:
            for peer in model_peers_of(mechanism.name):
                row = blank(name=peer.name, role="peer", of=mechanism.name)
                make = partial(peer.model, host.model, case, entry.row.options)
                contest.enter(row, partial(_peer, host, peer.name, make, case, entry.row.options))
        steps.step(what)
    yield from contest.run(steps, what)


def _peer(
    host: Host, name: str, make: Callable[[], nn.Module], case: Case, options: Mapping[str, Any]
) -> Work:
    with patching.seeded(0):
        return host.work(name, make(), case, options, whole=False)


def _reads_text(model: nn.Module) -> bool:
    return getattr(model, "main_input_name", None) == "input_ids"


def _inputs(model: Any, case: Case) -> dict[str, Tensor]:
    """Random token ids with the case's mask, or images of the model's size."""
    with patching.seeded(0):
        if _reads_text(model):
            ids = torch.randint(5, model.config.vocab_size, (case.batch, case.length))
            real = torch.arange(case.length) < torch.tensor(case.real_tokens)[:, None]
            arguments = {"input_ids": ids}
            if case.padded:
                arguments["attention_mask"] = real.long()
        else:
            name, pixels = _image(model, case.batch)
            arguments = {name: torch.randn(pixels).to(getattr(torch, case.dtype))}
    return {name: tensor.to(case.device) for name, tensor in arguments.items()}


def _image(model: Any, batch: int) -> tuple[str, tuple[int, ...]]:
    config = getattr(model, "config", None)
    if config is None:  # timm
        embed = model.patch_embed
        return "x", (batch, embed.proj.weight.shape[1], *embed.img_size)
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return "pixel_values", (batch, config.num_channels, height, width)


def _caller(model: Callable[..., Any], inputs: Mapping[str, Tensor]) -> Callable[[], Any]:
    return lambda: model(**inputs)
