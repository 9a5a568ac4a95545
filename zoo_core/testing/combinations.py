"""One mechanism in one architecture: it runs, trains and travels, or is refused in words."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo_core import registry
from zoo_core.architecture import Architecture
from zoo_core.builder import build
from zoo_core.checkpoint import load, save
from zoo_core.errors import DoesNotFit, ZooError
from zoo_core.inspection import inspect
from zoo_core.mechanism import Mechanism
from zoo_core.plan import why
from zoo_core.testing.compare import expect, expect_bits, expect_close, expect_finite
from zoo_core.testing.conformance import Check, always, refused
from zoo_core.testing.models import (
    embedded,
    forward,
    inputs,
    masks,
    outputs_and_gradients,
    stock,
    twins,
)


def combination(
    architecture: Architecture, mechanism: Mechanism, *, variant: str | None = None, **changes: Any
) -> None:
    """Build one mechanism into one architecture and run it, or see it refused in words.

    Both must be installed or registered, since models are built and loaded by name.
    variant: of the family, its default if not given. changes: arguments of the host beside `tiny`.
    """
    tiny = {**architecture.adapter().tiny(), **changes}
    host = architecture.qualified if variant is None else f"{architecture.qualified}:{variant}"
    names = (host, mechanism.qualified)
    where = f"zoo.build({names[0]!r}, attention={names[1]!r}, **tiny)"
    reasons = why(*names, **tiny)
    if reasons:
        error = refused(lambda: build(*names, **tiny))
        agrees = isinstance(error, DoesNotFit) and list(error.reasons) == reasons
        expect(agrees, where, f"DoesNotFit with the reasons of zoo.why, {reasons}", repr(error))
        return
    _expect_decoder(architecture, mechanism, where)
    model = build(*names, seed=0, **tiny).eval()
    _expect_runs_and_trains(model, stock(architecture, variant, **changes), where)
    _expect_padding(model, mechanism, where)
    arguments = inputs(model)
    before = forward(model, arguments)
    expect_bits(forward(model, arguments), before, where, "the same from a second call")
    for note, twin in {**twins(model), "saved and loaded": _reloaded(model)}.items():
        expect_bits(forward(twin, arguments), before, f"{where}, {note}", "the same output")
    text = str(inspect(model))
    expect(mechanism.name in text, f"zoo.inspect of {where}", mechanism.name, text)


def combinations_of_architecture(architecture: Architecture) -> list[Check[Architecture]]:
    """One check for each installed mechanism."""
    return [
        _combination_check(
            f"with_{mechanism.name}", lambda one, two=mechanism: combination(one, two)
        )
        for mechanism in registry.mechanisms()
    ]


def combinations_of_mechanism(mechanism: Mechanism) -> list[Check[Mechanism]]:
    """One check for each installed architecture; none for an unregistered mechanism."""
    if mechanism not in registry.mechanisms():
        return []
    return [
        _combination_check(f"in_{host.name}", lambda one, two=host: combination(two, one))
        for host in registry.architectures()
    ]


def _combination_check(name: str, function: Any) -> Check[Any]:
    return Check(
        name=name,
        rule="combination",
        summary="A mechanism runs and trains in an architecture, or is refused in words.",
        function=function,
        quick=False,
        applies=always,
    )


def _expect_runs_and_trains(model: nn.Module, plain: nn.Module, where: str) -> None:
    """Finite outputs and gradients; no parameter is left out that the stock model trains."""
    arguments = inputs(model)
    found = outputs_and_gradients(model.train(), arguments)
    model.eval()
    for name, tensor in found.items():
        expect_finite(tensor, where, name)
    expected = outputs_and_gradients(plain, arguments)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    own = {name for name in trainable if name not in dict(plain.named_parameters())}
    idle = sorted((trainable & expected.keys() | own) - found.keys())
    expect(not idle, where, "a gradient for every trainable parameter", f"none for {idle}")


def _expect_padding(model: nn.Module, mechanism: Mechanism, where: str) -> None:
    """A padded batch is right, whichever side the padding is on, or refused in words."""
    for note, mask in masks(model).items():
        if mask is None:
            continue
        if not mechanism.supports.key_padding:
            error = refused(lambda: forward(model, inputs(model, mask)))  # noqa: B023
            expect(error is not None, f"{where}, {note}", "a ZooError for padding", "an output")
            continue
        wanted = forward(model, embedded(model, mask, 0.0))
        for junk in (50.0, torch.nan):
            got = forward(model, embedded(model, mask, junk))
            told = f"{where}, {note} holding {junk}"
            same = "real tokens unmoved by what the pads hold"
            expect_close(got[mask], wanted[mask], told, same, tolerance=1e-5)


def _expect_decoder(architecture: Architecture, mechanism: Mechanism, where: str) -> None:
    """In a decoder of the family no output sees a later token, or the plan refuses."""
    adapter, names = architecture.adapter(), (architecture.qualified, mechanism.qualified)
    tiny = {**adapter.tiny(), "is_decoder": True}
    try:
        sites = adapter.sites(adapter.create(None, skeleton=True, **tiny))
    except ZooError:
        return
    if not any(site.causal for site in sites):
        return
    where = where.replace("**tiny", "is_decoder=True, **tiny")
    reasons = why(*names, **tiny)
    expected = "reasons against it if and only if the mechanism is not causal"
    expect(bool(reasons) != mechanism.supports.causal, where, expected, str(reasons))
    if reasons:
        return
    model = build(*names, seed=0, **tiny).eval()
    ids = inputs(model)["input_ids"]
    other = torch.cat([ids[:, :-1], ids[:, -1:] % 50 + 20], dim=1)
    got, wanted = (forward(model, {"input_ids": x})[:, :-1] for x in (other, ids))
    expect_close(got, wanted, where, "earlier tokens unmoved by the last", tolerance=1e-5)


def _reloaded(model: nn.Module) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder, "model"))
        return load(Path(folder, "model"))
