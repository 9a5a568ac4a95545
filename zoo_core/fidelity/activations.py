"""A cache of what frozen layers compute, and the forward that skips them.

A sample is known by a digest of what the model is given of it, so that nothing needs numbering, an
image that was augmented anew is another sample, and a text is the same one however far it is
padded to the right. Activations come back with the bits they were stored with, and only as long as
what computed them is as it was.
"""

from __future__ import annotations

import hashlib
import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from zoo_core.errors import UnsupportedCall, ZooError

_STATES = "states"
# What a transformers Trainer passes through a model to its loss; it changes with the batch mates.
_OF_THE_LOSS = frozenset({"num_items_in_batch"})


class ActivationCache:
    """Tensors by key, in memory or in files, of at most `limit` bytes together.

    When it is full it takes no more in: epochs visit all samples in turn, so that throwing out the
    oldest would throw out each one just before it is needed.

    folder: where to keep files, in a directory of its own that goes away with the cache; None:
        keep the tensors in memory, on the CPU. Raises ZooError where there is none.
    one_by_one: compute the activations of each sample by itself and without padding on its right,
        so that their bits depend on nothing else; False computes what is missing of a batch at
        once, which is faster on an accelerator and equal up to rounding.
    """

    def __init__(
        self, limit: int = 2**30, *, folder: str | Path | None = None, one_by_one: bool = True
    ) -> None:
        if limit < 0:
            raise ZooError(f"a cache of {limit} bytes cannot be; its limit must be at least 0")
        if folder is not None and not Path(folder).is_dir():
            raise ZooError(f"folder={str(folder)!r} is no directory for activations; make it first")
        self.limit, self.folder, self.one_by_one = limit, folder, one_by_one
        self.hits = self.misses = self.bytes = 0
        self._kept: dict[str, Tensor | Path] = {}
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._origin: Origin | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: str) -> Tensor | None:
        """What was put there, on the CPU, or None; counts hits and misses."""
        found = self._kept.get(key)
        self.hits += found is not None
        self.misses += found is None
        return load_file(found)[_STATES] if isinstance(found, Path) else found

    def put(self, key: str, states: Tensor) -> None:
        """Keep a copy of a tensor, if there is room."""
        size = states.numel() * states.element_size()
        if key in self._kept or self.bytes + size > self.limit:
            return
        kept = states.detach().to("cpu", copy=True).contiguous()
        self._kept[key] = kept if self.folder is None else self._write(key, kept)
        self.bytes += size

    def is_of(self, origin: Origin) -> bool:
        """Whether what is kept was computed by this origin, as it is now."""
        return self._origin is not None and self._origin.marks == origin.marks

    def clear(self, origin: Origin | None = None) -> None:
        """Forget everything, files included. origin: what computes all that is put there later."""
        self._kept.clear()
        self._origin = None if origin is None else origin.held()
        self.bytes = 0
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _write(self, key: str, states: Tensor) -> Path:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="activations-", dir=self.folder)
        path = Path(self._directory.name) / f"{key}.safetensors"
        save_file({_STATES: states}, path)
        return path


@dataclass(frozen=True, eq=False)
class Origin:
    """What computes activations: modules, their tensors, and how autocast is set.

    marks: tell it from any other without reading a weight: the identity and class of each module,
    the address of each tensor and how often it was written. A write through `tensor.data` or
    `tensor.numpy()` is counted by nobody and stays unseen.
    """

    modules: Sequence[nn.Module]
    tensors: Sequence[Tensor]
    marks: Sequence[Any]

    @classmethod
    def of(cls, base: nn.Module, parts: Iterable[nn.Module], device: torch.device) -> Origin:
        """As it is now: the parts with all that is in them, and the tensors of the base itself."""
        modules = list(parts)
        for module in modules:  # which grows; torch's own walk takes thrice as long
            modules.extend(one for one in module._modules.values() if one is not None)
        tensors = [tensor for module in (base, *modules) for tensor in _own_tensors(module)]
        marks = [
            torch.is_autocast_enabled(device.type),
            torch.get_autocast_dtype(device.type),
            *map(id, modules),
            *map(type, modules),
            *((tensor.data_ptr(), tensor._version) for tensor in tensors),
        ]
        return cls(modules, tensors, marks)

    @property
    def learns(self) -> bool:
        """Whether any of its tensors is trained."""
        return any(tensor.requires_grad for tensor in self.tensors)

    def held(self) -> Origin:
        """The same; while it is kept, no other module and no other memory takes its addresses."""
        return Origin(self.modules, [tensor.detach() for tensor in self.tensors], self.marks)


def _own_tensors(module: nn.Module) -> list[Tensor]:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


class Replay:
    """Lets a model in training skip its frozen layers, with what a cache has of its samples.

    base: the module that holds the layers and is called with the inputs. Where a sample is new,
    base runs on it up to the last frozen layer; its own forward then passes those layers by.
    Evaluation, and calls that ask for hidden states or attention maps, run as ever; so does a model
    whose frozen part has something to learn again, thawed by hand or patched in.
    check: called before anything is cached of a part that is new or was changed.
    """

    def __init__(self, base: nn.Module, cache: ActivationCache, check: Callable[[], None]) -> None:
        self.base, self.cache, self.check = base, cache, check
        self.stem: Sequence[nn.Module] = ()
        self.layers: Sequence[nn.Module] = ()
        self._classes: list[type[nn.Module]] = []
        self._filling = False
        self._hooks = (
            base.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            base.register_forward_hook(self._after, always_call=True),
        )

    def skip(self, layers: Sequence[nn.Module], stem: Sequence[nn.Module] = ()) -> None:
        """Skip these layers, the first of the model, from now on; what was cached is void.

        stem: what runs before them, and is frozen with them.
        """
        self.stem, self.layers = stem, layers
        self.cache.clear()

    def remove(self) -> None:
        """Run every layer again, and forget what was cached."""
        self.skip(())
        for hook in self._hooks:
            hook.remove()

    def _before(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.layers or self._filling or not base.training:
            return
        call = Call.of(base, args, kwargs)
        if call.asks_for_inner_states(getattr(base, "config", None)):
            return
        origin = Origin.of(base, (*self.stem, *self.layers), call.device)
        if origin.learns:
            return
        if not self.cache.is_of(origin):
            self.check()
            self.cache.clear(origin)
        states = self._states(call)
        for layer in self.layers:
            self._classes.append(type(layer))
            layer.__class__ = _Skipped
        self.layers[-1].zoo_states = states

    def _after(self, base: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._classes:
            for layer, own in zip(self.layers, self._classes, strict=True):
                layer.__class__ = own
            del self.layers[-1].zoo_states
            self._classes = []

    def _states(self, call: Call) -> Tensor:
        """What leaves the last frozen layer, (B, N, dim); zeros at padding on the right."""
        keys = [call.key(index) for index in range(call.size)]
        found = {key: self.cache.get(key) for key in keys}
        missing = [index for index, key in enumerate(keys) if found[key] is None]
        groups = [[index] for index in missing] if self.cache.one_by_one else [missing]
        for group in filter(None, groups):
            for index, states in zip(group, self._run(call.pick(group)), strict=True):
                found[keys[index]] = states = call.cut(index, states)
                self.cache.put(keys[index], states)
        return call.together([found[key] for key in keys])

    def _run(self, arguments: Mapping[str, Any]) -> Tensor:
        """Run the base on some samples, as far as the last frozen layer."""
        stop = self.layers[-1].register_forward_hook(_stop)
        self._filling = True
        try:
            with torch.no_grad():
                self.base(**arguments)
        except _Reached as reached:
            return reached.states
        finally:
            self._filling = False
            stop.remove()
        raise UnsupportedCall("the forward of this model does not come to its frozen layers")


class _Skipped(nn.Module):
    """What a frozen layer is while a forward passes it by; the last one has the cached states."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        states: Tensor = getattr(self, "zoo_states", hidden_states)
        return states


class _Reached(Exception):
    """Ends a forward at the last frozen layer; carries its output."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


def _stop(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not isinstance(output, Tensor):
        raise UnsupportedCall(
            f"{type(layer).__name__} gives a {type(output).__name__}; only layers that give one "
            "tensor can be cached"
        )
    raise _Reached(output)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a model, taken apart into its samples.

    lengths: of each sample up to its last real token, where there is a mask of padding; padding
    before and between real tokens shifts positions, and stays.
    """

    arguments: dict[str, Any]
    size: int
    tokens: int | None
    lengths: list[int] | None

    @classmethod
    def of(cls, base: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Bind the arguments of a call to their names. Raises UnsupportedCall."""
        bound = inspect.signature(base.forward).bind(*args, **kwargs)
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            arguments.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        for name, value in arguments.items():
            if not (value is None or isinstance(value, Tensor | bool | int | float | str)):
                raise UnsupportedCall(
                    f"{name} is a {type(value).__name__}, which cannot be taken apart into "
                    "samples; freeze without a cache"
                )
            if isinstance(value, Tensor) and value.requires_grad:
                raise UnsupportedCall(
                    f"{name} wants a gradient, which would have to pass through the frozen layers; "
                    "freeze without a cache"
                )
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        if not tensors:
            raise UnsupportedCall("a call without any tensor has no samples to cache")
        mask = arguments.get("attention_mask")
        if mask is None or mask.dim() != 2:
            return cls(arguments, len(tensors[0]), None, None)
        tokens = mask.shape[1]
        ranks = torch.arange(1, tokens + 1, device=mask.device)
        lengths = (mask.bool() * ranks).amax(-1).clamp_min(1).tolist()
        return cls(arguments, len(tensors[0]), tokens, lengths)

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return next(v.device for v in self.arguments.values() if isinstance(v, Tensor))

    def asks_for_inner_states(self, config: Any) -> bool:
        """Whether the caller wants what skipped layers would have computed."""
        asked = ("output_attentions", "output_hidden_states")
        return any(self.arguments.get(name, getattr(config, name, False)) for name in asked)

    def pick(self, indices: Sequence[int]) -> dict[str, Any]:
        """The arguments for some of the samples, padded no further than the longest of them."""
        longest = None if self.lengths is None else max(self.lengths[index] for index in indices)
        return {name: self._part(value, indices, longest) for name, value in self.arguments.items()}

    def key(self, index: int) -> str:
        """A digest of all that the model is told of one sample."""
        digest = hashlib.blake2b(digest_size=20)
        for name, value in sorted(self.pick([index]).items()):
            if value is None or name in _OF_THE_LOSS:
                continue
            digest.update(name.encode())
            if isinstance(value, Tensor):
                digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
                flat = value.detach().cpu().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().tobytes())
            else:
                digest.update(repr(value).encode())
        return digest.hexdigest()

    def cut(self, index: int, states: Tensor) -> Tensor:
        """One sample's states (N, dim) without those of padding on its right."""
        return states if self.lengths is None else states[: self.lengths[index]]

    def together(self, states: Sequence[Tensor | None]) -> Tensor:
        """One batch of the states of every sample, on the device of the inputs."""
        rows = [one.to(self.device) for one in states if one is not None]
        tokens = len(rows[0]) if self.tokens is None else self.tokens
        return torch.stack([F.pad(row, (0, 0, 0, tokens - len(row))) for row in rows])

    def _part(self, value: Any, indices: Sequence[int], longest: int | None) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        part = value[list(indices)] if len(value) == self.size else value
        if longest is not None and part.dim() > 1 and part.shape[1] == self.tokens:
            part = part[:, :longest]
        return part
