"""Build the model that a manifest describes, ready to take the checkpoint's tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import metadata
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from zoo_core import registry
from zoo_core.checkpoint import host_config
from zoo_core.checkpoint.header import Entry
from zoo_core.checkpoint.manifest import Manifest, mechanism_name
from zoo_core.errors import CheckpointError, UnknownName
from zoo_core.patching import apply_block


def require_plugins(manifest: Manifest, where: object) -> None:
    """Raise UnknownName, saying what to install, unless all that a manifest needs is installed.

    Reads no weights and builds nothing.
    """
    _require(registry.architecture, manifest.architecture, "", where)
    for entry in manifest.attention:
        _require(registry.mechanism, mechanism_name(entry), entry["version"], where)


def rebuild(
    manifest: Manifest,
    where: object,
    *,
    base: nn.Module | None = None,
    stored: Mapping[str, Entry] | None = None,
) -> nn.Module:
    """The patched model, on the CPU, in evaluation mode; its parameters may still hold anything.

    base: the stock model to patch, instead of a new one. stored: the tensors that are to fill a
    new one; a config that asks for far more is given up early.
    Leaves torch's random generator as it is, and does not depend on torch's default dtype or
    device. Raises CheckpointError naming `where`.
    """
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            _default_dtype(torch.float32),
            nullcontext() if stored is None else _bounded(stored.values()),
        ):
            model = _stock(manifest) if base is None else base
            if manifest.attention:
                apply_block(model, manifest.attention, seed=0)
    except Exception as error:
        raise CheckpointError(
            f"{where}: its config does not build a {manifest.model_class}: {error}"
        ) from error
    if type(model).__name__ != manifest.model_class:
        raise CheckpointError(
            f"{where}: its config builds a {type(model).__name__}, not a {manifest.model_class}"
        )
    return model.eval()


def _require(look_up: Callable[[str], object], name: str, version: str, where: object) -> None:
    try:
        look_up(name)
    except UnknownName as error:
        made = f" (saved with version {version})" if version else ""
        install = _install(name.rpartition("/")[0])
        raise UnknownName(f"{where} needs {name}{made}{install}: {error}") from error


def _stock(manifest: Manifest) -> nn.Module:
    config = host_config.safe(manifest.config)
    if manifest.library == "transformers":
        config["class"] = manifest.model_class
    adapter = registry.architecture(manifest.architecture).adapter()
    with WithoutInitialisation():
        return adapter.create(None, pretrained=False, **config)


def _install(distribution: str) -> str:
    """How to get a distribution, as the end of a sentence; "" where none is known."""
    if not distribution:
        return ""
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"; pip install {distribution}"
    return f"; pip install --upgrade {distribution}"


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _bounded(stored: Collection[Entry]) -> Iterator[None]:
    """Raise CheckpointError once far more parameters are made than these tensors can fill.

    A number of layers in a config may be anything, and a million take for ever to build; that not
    all of them are stored would be found only afterwards. What is tied, or made and replaced, is
    stored once.
    """
    room = {"tensors": 4 * len(stored) + 1_000}
    room["numbers"] = 4 * sum(math.prod(entry.shape) for entry in stored) + 10_000_000
    thread = threading.get_ident()

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if threading.get_ident() != thread:  # the hook is the whole process's
            return
        room["tensors"] -= 1
        room["numbers"] -= parameter.numel()
        if min(room.values()) < 0:
            raise CheckpointError(f"it asks for far more than the {len(stored)} tensors stored")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


class WithoutInitialisation(TorchFunctionMode):
    """Skip whatever fills a parameter in place: each is about to be replaced by a stored one.

    Buffers are computed as always, because not all of them are stored. That is why the model is
    not built on the meta device, which leaves junk in those.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        target = args[0] if args else kwargs.get("tensor")
        if in_place and isinstance(target, nn.Parameter):
            # trunc_normal_ draws again whatever lies out of bounds, as fresh memory may: give it 0.
            return target.detach().zero_() if name == "normal_" else target
        return func(*args, **kwargs)
