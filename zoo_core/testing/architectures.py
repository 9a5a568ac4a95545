"""What an architecture keeps: it describes its models, patches them exactly, and restores them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.architecture import Architecture
from zoo_core.testing.compare import expect, expect_bits, expect_close, expect_finite
from zoo_core.testing.conformance import architecture_rule, refused
from zoo_core.testing.models import (
    forward,
    inputs,
    masks,
    outputs_and_gradients,
    patch_reference,
    stock,
    twins,
)


@architecture_rule
def check_create(architecture: Architecture) -> None:
    """The tiny model builds and runs, is owned by its family, and unknown arguments are refused."""
    adapter, model = architecture.adapter(), stock(architecture)
    size = sum(parameter.numel() for parameter in model.parameters())
    expect(size < 2_000_000, "tiny()", "fewer than 2,000,000 parameters", f"{size:,}")
    expect(adapter.owns(model), "owns(its own tiny model)", "True", "False")
    expect(not adapter.owns(nn.Linear(1, 1)), "owns(nn.Linear)", "False", "True")
    expect_finite(forward(model, inputs(model)), "the tiny model", "outputs")
    error = refused(lambda: adapter.create(None, skeleton=True, nonsense_=1, **adapter.tiny()))
    named = error is not None and "nonsense_" in str(error)
    expect(named, "create(nonsense_=1)", "a ZooError that names the argument", repr(error))


@architecture_rule
def check_sites(architecture: Architecture) -> None:
    """Sites name every attention module once, in order, and a skeleton has the same ones."""
    adapter, model = architecture.adapter(), stock(architecture)
    sites = adapter.sites(model)
    modules = dict(model.named_modules())
    expect(len(sites) > 0, "sites(tiny model)", "at least one", "none")
    paths = [site.path for site in sites]
    expect(len(set(paths)) == len(paths), "sites", "one path each", str(paths))
    for site in sites:
        expect(site.path in modules, "sites", "paths of modules", site.path)
        if site.obstacle is None:
            width = site.heads * site.head_dim
            expect(width > 0 and site.dim > 0, site.path, "heads, head_dim and dim", repr(site))
    sketched = adapter.sites(adapter.create(None, skeleton=True, **adapter.tiny()))
    expect(
        [_facts(site) for site in sketched] == [_facts(site) for site in sites],
        "sites(skeleton)",
        f"the sites of the built model, {list(map(_facts, sites))}",
        str(list(map(_facts, sketched))),
    )


@architecture_rule
def check_config(architecture: Architecture) -> None:
    """create(**config(model)) builds the same model again."""
    adapter, model = architecture.adapter(), stock(architecture)
    again = adapter.create(None, **adapter.config(model))
    wanted = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    got = {name: tuple(x.shape) for name, x in again.state_dict().items()}
    expect(type(again) is type(model), "config", type(model).__name__, type(again).__name__)
    expect(got == wanted, "config", "the same tensors", f"{_difference(got, wanted)} differ")


@architecture_rule
def check_softmax_bits(architecture: Architecture) -> None:
    """Patched with softmax attention it gives the stock model's bits, gradients included."""
    for note, mask in masks(stock(architecture)).items():
        model = stock(architecture)
        arguments = inputs(model, mask)
        before, keys = outputs_and_gradients(model, arguments), list(model.state_dict())
        patch = patch_reference(architecture, model)
        if patch is None:
            return
        _expect_same(outputs_and_gradients(model, arguments), before, f"patched, {note}")
        renamed = [key for key in keys if key not in model.state_dict()]
        expect(not renamed, "patched", "every stock key under its name", f"{renamed} gone")


@architecture_rule
def check_mask_forms(architecture: Architecture) -> None:
    """A padding mask of bool, int or 0 and 1 in float means the same; all True is no mask."""
    model = stock(architecture)
    mask = masks(model).get("on the left")
    if mask is None or patch_reference(architecture, model) is None:
        return
    arguments = inputs(model, mask)
    wanted = forward(model, arguments)
    for dtype in (torch.bool, torch.int32, torch.float32):
        got = forward(model, {**arguments, "attention_mask": mask.to(dtype)})
        same = "what an int64 mask gives"
        expect_close(got[mask], wanted[mask], f"mask of {dtype}", same, tolerance=1e-5)
    ids = {"input_ids": arguments["input_ids"]}
    full = {**ids, "attention_mask": torch.ones_like(mask)}
    expect_bits(forward(model, full), forward(model, ids), "all-True mask", "what no mask gives")


@architecture_rule
def check_attentions(architecture: Architecture) -> None:
    """output_attentions=True gives maps or a ZooError, never an empty result."""
    model = stock(architecture)
    if architecture.library != "transformers" or patch_reference(architecture, model) is None:
        return
    arguments: dict[str, Any] = {**inputs(model), "output_attentions": True}
    maps: list[Any] = []
    if refused(lambda: maps.append(model(**arguments).attentions)) is None:
        right = bool(maps[0]) and all(isinstance(x, Tensor) and x.dim() == 4 for x in maps[0])
        expect(right, "output_attentions=True", "a map (B, H, N, N) for each layer", str(maps[0]))


@architecture_rule
def check_restore(architecture: Architecture) -> None:
    """restore() gives the stock model back: bits, keys, class, hooks and config."""
    model = stock(architecture)
    arguments, facts = inputs(model), _everything(model)
    before = outputs_and_gradients(model, arguments)
    patch = patch_reference(architecture, model)
    if patch is None:
        return
    patch.restore()
    _expect_same(outputs_and_gradients(model, arguments), before, "restored")
    for name, value in _everything(model).items():
        expect(value == facts[name], "restored", f"{name} as before: {facts[name]}", str(value))


@architecture_rule
def check_copies(architecture: Architecture) -> None:
    """A deep copy or a pickle of a patched model computes with its own weights."""
    model = stock(architecture)
    if patch_reference(architecture, model) is None:
        return
    arguments = inputs(model)
    before = forward(model, arguments)
    for note, twin in twins(model).items():
        expect_bits(forward(twin, arguments), before, note, "the original's output")
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        expect_bits(forward(model, arguments), before, note, "the original unmoved by its copy")
        silent = not forward(twin, arguments).any()
        expect(silent, note, "zeros from a copy whose weights are zero", "something else")


def _expect_same(got: dict[str, Tensor], wanted: dict[str, Tensor], where: str) -> None:
    expect(got.keys() == wanted.keys(), where, "the same gradients", _difference(got, wanted))
    for name, tensor in wanted.items():
        expect_bits(got[name], tensor, where, f"{name} of the stock model")


def _everything(model: nn.Module) -> dict[str, Any]:
    """What a restore must bring back, in a form that compares."""
    config: Any = getattr(model, "config", None)
    return {
        "keys": list(model.state_dict()),
        "classes": [type(module) for module in model.modules()],
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
        "config": config.to_dict() if hasattr(config, "to_dict") else None,
        "attributes": {path: sorted(vars(module)) for path, module in model.named_modules()},
        "trainable": [parameter.requires_grad for parameter in model.parameters()],
    }


def _facts(site: Any) -> tuple[Any, ...]:
    names = ("path", "layer", "kind", "dim", "heads", "head_dim", "max_len", "causal", "grid")
    return tuple(getattr(site, name) for name in names)


def _difference(got: dict[str, Any], wanted: dict[str, Any]) -> str:
    return ", ".join(sorted(got.keys() ^ wanted.keys())[:5]) or "shapes"
