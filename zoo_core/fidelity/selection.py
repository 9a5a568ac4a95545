"""Which tensors a calibration trains, and the promise to leave everything else as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zoo_core.errors import ZooError
from zoo_core.hosts import adapter_of

_UNDER_PEFT = (
    'its tensors are frozen by LoRA; wrap the model with modules_to_save=["zoo"] to train them, '
    "or choose train='attention' to train the adapters"
)


@dataclass(frozen=True, eq=False)
class Selection:
    """The parameters to train by name: the mechanisms' own, and those of the host.

    layer: those of the host that lie inside the attention layers, whose output they shape; the
    per-layer stage trains these and the mechanisms' own, the end-to-end stage all.
    """

    mechanism: dict[str, Parameter]
    layer: dict[str, Parameter]
    rest: dict[str, Parameter]

    @property
    def host(self) -> dict[str, Parameter]:
        """The parameters of the host, for which a teacher needs copies."""
        return {**self.layer, **self.rest}

    @property
    def everything(self) -> dict[str, Parameter]:
        """All parameters that are trained."""
        return {**self.mechanism, **self.host}


def select(host: nn.Module, train: str) -> Selection:
    """Choose the parameters to train.

    train: "mechanism": only tensors that patches added. "attention": the query, key, value and
        output projections of patched layers too. "all": the whole model.
    What is frozen (requires_grad is False) stays out: by the user, by PEFT, or by a patch whose
    mechanism leaves a projection unused.
    Raises ZooError where there is nothing to train, saying what there is.
    """
    _, adapter = adapter_of(host)
    installed = {path: one for path, one in adapter.installed(host).items() if one is not None}
    own = {id(p) for module in installed.values() for p in module.parameters()}
    inside = _ids(host.get_submodule(path) for path in installed)
    around = _ids(_projections(host, installed))
    mechanism: dict[str, Parameter] = {}
    layer: dict[str, Parameter] = {}
    rest: dict[str, Parameter] = {}
    for name, parameter in host.named_parameters():
        if not (parameter.is_floating_point() and parameter.requires_grad):
            continue
        if id(parameter) in own:
            mechanism[name] = parameter
        elif train != "mechanism" and id(parameter) in around | inside:
            (layer if id(parameter) in inside else rest)[name] = parameter
        elif train == "all":
            rest[name] = parameter
    chosen = Selection(mechanism, layer, rest)
    if not chosen.everything:
        raise ZooError(_nothing(bool(own), _has_adapters(host), train))
    return chosen


def _nothing(has_own: bool, adapters: bool, train: str) -> str:
    if train == "mechanism" and has_own and adapters:
        return f"the mechanism cannot be trained by itself: {_UNDER_PEFT}"
    if train != "mechanism" or has_own:
        return (
            f"train={train!r} leaves nothing to train: every parameter that it chooses is frozen; "
            "thaw what is to be trained with requires_grad_(True)"
        )
    return (
        "there is nothing to train: this mechanism has no tensors of its own; choose "
        "train='attention' to train the projections around it"
    )


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _projections(host: nn.Module, paths: Iterable[str]) -> Iterator[nn.Module]:
    """Linear layers of whole attention layers; BERT keeps the output projection beside the rest."""
    for path in paths:
        parent = path.rpartition(".")[0]
        whole = host.get_submodule(parent if parent.endswith("attention") else path)
        yield from (module for module in whole.modules() if isinstance(module, nn.Linear))


def _has_adapters(host: nn.Module) -> bool:
    return any(type(module).__module__.partition(".")[0] == "peft" for module in host.modules())


@contextmanager
def kept(host: nn.Module, chosen: Selection) -> Iterator[Callable[[], None]]:
    """Freeze a host for a while, and give every flag, mode and gradient back.

    Hands out what gives every trained tensor its value back, which happens on an error anyway.
    """
    flags = [(p, p.requires_grad, p.grad) for p in host.parameters()]
    modes = [(module, module.training) for module in host.modules()]
    trained = [*chosen.everything.values(), *mechanism_buffers(host).values()]
    before = [tensor.detach().clone() for tensor in trained]
    for parameter, _, _ in flags:
        parameter.requires_grad_(False)
        parameter.grad = None

    def put_back() -> None:
        with torch.no_grad():
            for tensor, value in zip(trained, before, strict=True):
                tensor.copy_(value)

    try:
        yield put_back
    except BaseException:
        put_back()
        raise
    finally:
        for parameter, flag, gradient in flags:
            parameter.requires_grad_(flag)
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode


def mechanism_buffers(host: nn.Module) -> dict[str, Tensor]:
    """The buffers that patches added, some of which mechanisms renew in training."""
    return {name: buffer for name, buffer in host.named_buffers() if ".zoo." in name}
