"""Patch a model's attention: all or nothing, stackable, exactly restorable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from zoo_core import plugins, registry
from zoo_core.architecture import ArchitectureAdapter
from zoo_core.errors import PatchError, ZooError
from zoo_core.hosts import adapter_of, unwrap
from zoo_core.isolation import describe as in_one_line
from zoo_core.mechanism import Options
from zoo_core.plan import Attention, Layers, Plan, Rule, Step, plan, rules

_STACK = "zoo_patches"


@dataclass(eq=False)
class Patch:
    """One patch of one model: what was planned, and the modules built for it, by site path.

    As a context manager it restores on exit. Patches stack; where two cover a layer the later one
    is in force, and they may be restored in any order.
    """

    model: nn.Module = field(repr=False)
    architecture: str
    attention: list[dict[str, Any]]
    modules: dict[str, nn.Module] = field(repr=False)

    def restore(self) -> None:
        """Take this patch off; without any left the model is bit-identical to the stock one."""
        stack = stack_of(self.model)
        if stack is None or self not in stack.patches:
            raise PatchError("this patch was already restored")
        stack.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        stack = stack_of(self.model)
        if stack is not None and self in stack.patches:
            self.restore()


@dataclass(eq=False)
class Stack:
    """The patches in force on one model, oldest first; kept on the model, so that it travels."""

    model: nn.Module
    adapter: ArchitectureAdapter
    patches: list[Patch] = field(default_factory=list)
    undo: Callable[[], None] | None = None

    def add(self, patch: Patch) -> None:
        """Put a patch on top, or leave the model as it was and raise."""
        self._replace([*self.patches, patch])

    def remove(self, patch: Patch) -> None:
        """Take a patch off."""
        self._replace([other for other in self.patches if other is not patch])

    def clear(self) -> None:
        """Take every patch off."""
        self._replace([])

    def in_force(self, patches: Sequence[Patch] | None = None) -> dict[str, nn.Module]:
        """The module that runs at each patched site."""
        chosen: dict[str, nn.Module] = {}
        for patch in self.patches if patches is None else patches:
            chosen.update(patch.modules)
        return chosen

    def adopt(self, running: Mapping[str, nn.Module | None]) -> None:
        """Take over modules that a tool replaced by copies (PEFT does, where it merges).

        running: what stands at each site. Anything but another module of the same class is left
        for `inspect` to complain about.
        """
        for patch in self.patches:
            for path, module in patch.modules.items():
                found = running.get(path)
                if type(found) is type(module) and self.in_force()[path] is module:
                    patch.modules[path] = found

    def attention(self, patches: Sequence[Patch] | None = None) -> list[dict[str, Any]]:
        """The manifest's attention block of what runs, one entry per mechanism and options."""
        patches = self.patches if patches is None else patches
        entries = [(patch, entry) for patch in patches for entry in patch.attention]
        covered: set[tuple[str, int]] = set()
        block: list[dict[str, Any]] = []
        for _, entry in reversed(entries):
            kind = entry.get("kind", "self")
            layers = [n for n in entry["layers"] if (kind, n) not in covered]
            covered |= {(kind, layer) for layer in layers}
            if layers:
                block.insert(0, {**entry, "layers": layers})
        return block

    def _replace(self, patches: list[Patch]) -> None:
        before = self.patches
        self._lift()
        try:
            self._lay(patches)
        except BaseException:
            self._lay(before)
            raise

    def _lift(self) -> None:
        if self.undo is not None:
            self.undo()
            self.undo = None
            delattr(self.model, _STACK)

    def _lay(self, patches: list[Patch]) -> None:
        self.patches = patches
        if not patches:
            return
        modules = self.in_force(patches)
        sites = {site.path: modules.get(site.path) for site in self.adapter.sites(self.model)}
        for path, module in modules.items():
            _follow(module, self.model.get_submodule(path))
        self.undo = self.adapter.install(self.model, sites, self.attention(patches))
        setattr(self.model, _STACK, self)


def _follow(module: nn.Module, host: nn.Module) -> None:
    """Move a module to where its host layer is, and to its dtype and mode."""
    reference = next((p for p in host.parameters() if p.is_floating_point()), None)
    if reference is not None:
        module.to(device=reference.device, dtype=reference.dtype)
    module.train(host.training)


def patch(
    model: Any,
    attention: Attention,
    *,
    options: Mapping[str, Any] | Options | None = None,
    layers: Layers | None = None,
    seed: int | None = None,
) -> Patch:
    """Replace the attention of a model, or of the known model inside a wrapper, in place.

    attention, options, layers: as in `zoo.build`. seed: makes random features reproducible and
    leaves torch's global generator alone; None draws from it.
    Raises DoesNotFit, OptionError or UnknownName before anything is changed.
    """
    chosen = rules(attention, options=options, layers=layers)
    return apply(model, chosen, seed=seed)


def apply(model: Any, chosen: Sequence[Rule], *, seed: int | None = None) -> Patch:
    """Patch by resolved rules."""
    host = unwrap(model)
    architecture, adapter = adapter_of(host)
    planned = plan(chosen, adapter.sites(host), model=type(host).__name__)
    modules = build_modules(planned.steps, seed=seed)
    _prepare_for_wrapper(model, modules.values())
    new = Patch(host, architecture.qualified, describe(planned), modules)
    stack = stack_of(host) or Stack(host, adapter)
    stack.add(new)
    plugins.notify_patched(host, new)
    return new


def apply_block(
    model: nn.Module, block: Iterable[Mapping[str, Any]], *, seed: int | None = None
) -> Patch:
    """Patch by a manifest's attention block. Raises UnknownName for a plugin not installed."""
    chosen = []
    for entry in block:
        name = "/".join(filter(None, (entry.get("distribution"), entry["mechanism"])))
        mechanism = registry.mechanism(name)
        options = mechanism.options.parse(entry["options"], owner=mechanism.name)
        kind = entry.get("kind", "self")
        selector = f"{kind}:{','.join(map(str, entry['layers']))}"
        chosen.append(Rule(selector, mechanism, options))
    return apply(model, chosen, seed=seed)


def build_modules(steps: Iterable[Step], *, seed: int | None = None) -> dict[str, nn.Module]:
    """Call the factories, on the CPU whatever the default device, never on meta."""
    modules = {}
    with seeded(seed), torch.device("cpu"):
        for step in steps:
            module = modules[step.site.path] = _build(step)
            module.zoo_supports = step.mechanism.supports  # type: ignore[assignment]
    return modules


def _build(step: Step) -> nn.Module:
    """Call one factory. Raises PatchError for what it raises itself, and for another result."""
    factory = f"the factory of {step.mechanism.qualified}"
    try:
        module = step.mechanism.factory(step.site, step.options)
    except ZooError:
        raise
    except (Exception, SystemExit) as error:
        raise PatchError(
            f"{factory} failed at {step.site.path}: {in_one_line(error)}; tell its author"
        ) from error
    if not isinstance(module, nn.Module):
        raise PatchError(
            f"{factory} returned {type(module).__name__} instead of an nn.Module; tell its author"
        )
    return module


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw from generators seeded so and leave torch's global ones alone; None: draw from those."""
    if seed is None:
        yield
        return
    # To seed is to seed every device that is in use.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if used else ()
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        yield


def describe(planned: Plan) -> list[dict[str, Any]]:
    """The manifest's attention block: layers with the same mechanism and options in one entry."""
    block: dict[tuple[str, str, Options], dict[str, Any]] = {}
    for step in planned.steps:
        mechanism, kind = step.mechanism, step.site.kind
        entry = block.setdefault(
            (mechanism.qualified, kind, step.options),
            {
                "mechanism": mechanism.name,
                "options": step.options.as_dict(),
                "layers": [],
                "distribution": mechanism.distribution,
                "version": mechanism.version,
                **({"kind": kind} if kind != "self" else {}),
            },
        )
        entry["layers"].append(step.site.layer)
    return list(block.values())


def stack_of(model: nn.Module) -> Stack | None:
    """The stack of patches on a host model, None where there is none."""
    return getattr(model, _STACK, None)


def attention_block(model: Any) -> list[dict[str, Any]]:
    """The manifest's attention block of what is in force; empty on a stock model."""
    stack = stack_of(unwrap(model))
    return stack.attention() if stack else []


def _prepare_for_wrapper(model: Any, modules: Iterable[nn.Module]) -> None:
    """Keep a wrapper's own promise: LoRA trains nothing else, DDP averages every gradient."""
    parameters = [p for module in modules for p in module.parameters()]
    if not parameters or not isinstance(model, nn.Module):
        return
    if hasattr(model, "peft_config"):
        for parameter in parameters:
            parameter.requires_grad_(False)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        if torch.distributed.get_world_size(model.process_group) > 1:
            raise PatchError(
                "this mechanism has parameters of its own, whose gradients a finished "
                "DistributedDataParallel would not average; patch the model first, then wrap it"
            )


def redraw(model: Any) -> int:
    """Draw anew what mechanisms once drew at random (performer's directions); how many sites did.

    A step of training, every thousand optimiser steps or so; no forward does it by itself. From
    torch's global generator: ranks of a distributed run draw alike if seeded alike.
    """
    drawn = [site for site in _in_force(model) if hasattr(site, "redraw")]
    for site in drawn:
        site.redraw()  # type: ignore[operator]
    return len(drawn)


def auxiliary_loss(model: Any) -> Tensor:
    """The sum of the auxiliary losses of the last forward, a scalar; 0 where there are none."""
    losses = [
        module.auxiliary_loss()  # type: ignore[operator]
        for module in _in_force(model)
        if hasattr(module, "auxiliary_loss")
    ]
    return torch.stack(losses).sum() if losses else torch.zeros(())


def _in_force(model: Any) -> list[nn.Module]:
    """What runs at the sites of a model; none where it is not patched."""
    stack = stack_of(unwrap(model))
    return list(stack.in_force().values()) if stack else []
