"""Rule 8, and gradients: dropout in train only, every parameter trains, every option acts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from zoo_core.mechanism import Mechanism, Options
from zoo_core.testing.cases import (
    MAX_LEN,
    Call,
    Probe,
    Setting,
    main_settings,
    option_sets,
    replaced,
    run,
    settings,
    small,
)
from zoo_core.testing.compare import changed, expect, expect_bits
from zoo_core.testing.conformance import ConformanceFailure, refused, rule
from zoo_core.testing.layouts import layouts, padded_and_not, spread


@rule(8)
def check_dropout(mechanism: Mechanism) -> None:
    """site.dropout acts in training, unless the record says it does not, and never in eval mode."""
    for setting in settings(mechanism):
        probe, call = setting.but(dropout=0.5).build(), setting.call(24)
        plain = setting.build()
        plain.load_state_dict(probe.state_dict())
        note = call.but("dropout 0.5")
        expect_bits(run(probe, call), run(plain, call), note, "in eval mode: no dropout")
        probe.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            acts = changed(run(probe, call), run(probe, call))
        admitted = "dropout" in mechanism.deviations
        expected = "in train mode: two calls differ, or `deviations` says why there is no dropout"
        expect(acts or admitted, note, expected, "the same output twice")


@rule(8)
def check_parameters_train(mechanism: Mechanism) -> None:
    """Every trainable parameter gets a gradient that is somewhere not zero."""
    for setting in settings(mechanism):
        probe = setting.build().train()
        trainable = {name: p for name, p in probe.named_parameters() if p.requires_grad}
        if not trainable:
            continue
        perturb(probe)
        for call in (setting.call(33, batch=2), setting.call(48, seed=1)):
            torch.autograd.backward(_loss(probe, run(probe, call, alike=False)))
        for name, parameter in trainable.items():
            got = "None" if parameter.grad is None else "zero everywhere"
            trained = parameter.grad is not None and bool(parameter.grad.any())
            expect(trained, setting.label, f"a gradient for parameter {name}", got)


@rule(8)
def check_unused(mechanism: Mechanism) -> None:
    """`unused` names exactly the projections whose values change nothing."""
    for setting in settings(mechanism):
        probe, call, fresh = setting.build(), setting.call(24), setting.call(24, seed=1)
        perturb(probe)
        out = run(probe, call)
        for name, letter in (("query", "q"), ("key", "k"), ("value", "v")):
            other = _projected_otherwise(call, name)
            other = other.but(f"another {letter}", **{letter: getattr(fresh, letter)})
            acts = changed(run(probe, other), out)
            if name in probe.unused:
                expect(not acts, other, f"the same output, since {name} is unused", "another one")
            else:
                expect(acts, other, f"another output, or {name!r} in `unused`", "the same output")


@rule(8)
def check_options_act(mechanism: Mechanism) -> None:
    """Every option changes something: the structure, an output, a training step or a gradient."""
    bases = [small(mechanism), *option_sets(mechanism).values()]
    for spec in fields(mechanism.options):
        tried = []
        for base in dict.fromkeys(bases):
            for value in _candidates(spec.metadata, getattr(base, spec.name)):
                other = replaced(base, spec.name, value)
                if other is None or other == base:
                    continue
                tried.append(f"{value!r}")
                if _behaves_otherwise(mechanism, base, other):
                    break
            else:
                continue
            break
        else:
            values = ", ".join(dict.fromkeys(tried)) or "no other value accepted"
            raise ConformanceFailure(
                f"option {spec.name}, values {values}", "some effect", "the same module throughout"
            )


@rule(8)
def check_option_bounds(mechanism: Mechanism) -> None:
    """A number below what an option can mean (0, -1) is refused in words, or works."""
    for spec in fields(mechanism.options):
        base = small(mechanism)
        value = getattr(base, spec.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        for low in (0, -1):
            options = replaced(base, spec.name, low)
            if options is None:
                continue
            setting = settings(mechanism)[0].but(options=options, label=f"{spec.name}={low}")
            if refused(setting.build) is None:
                call = setting.call(5)
                out = run(setting.build(), call)
                finite = bool(out.isfinite().all())
                expect(finite, call, "a ZooError, or finite outputs", "NaN or infinity")


@rule(7, quick=False)
def check_gradients(mechanism: Mechanism) -> None:
    """Gradients equal finite differences, for q, k, v and every parameter."""
    for setting in main_settings(mechanism):
        for call in padded_and_not(setting, 12):
            probe = setting.build()
            parameters = [p for p in probe.parameters() if p.requires_grad]

            def forward(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
                return run(probe, call.but(q=q, k=k, v=v))[..., call.real, :]  # noqa: B023

            inputs = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
            try:
                torch.autograd.gradcheck(forward, (*inputs, *parameters), fast_mode=True)
            except torch.autograd.gradcheck.GradcheckError as error:  # type: ignore[attr-defined]
                shown = " ".join(str(error).split())[:400]
                raise ConformanceFailure(str(call), "gradients = differences", shown) from error


def _projected_otherwise(call: Call, name: str) -> Call:
    """The call of a host whose projection `name` is another, for mechanisms that read weights."""
    if call.ctx.projections is None:
        return call
    weight, bias = call.ctx.projections[name]
    return call.but(projections={**call.ctx.projections, name: (weight.flip(0, 1), bias)})


def _behaves_otherwise(mechanism: Mechanism, base: Options, other: Options) -> bool:
    """Whether two option sets differ in anything a user could notice at the kit's sizes."""
    for setting in settings(mechanism):
        if setting.options != base:
            continue
        changed_setting = setting.but(options=other)
        if refused(changed_setting.build):
            continue
        pairs = zip(_fingerprint(setting), _fingerprint(changed_setting), strict=False)
        if any(not _same(one, two) for one, two in pairs):
            return True
    return False


def _fingerprint(setting: Setting) -> Iterator[Any]:
    """What a module is and does, cheapest first: its state, outputs, training and gradients."""
    setting = setting.but(dropout=0.25)
    probe = setting.build()
    yield [(name, tuple(tensor.shape)) for name, tensor in probe.state_dict().items()]
    yield sorted(probe.unused)
    for length in (24, MAX_LEN):
        yield run(probe, setting.call(length, batch=2))
    if setting.mechanism.supports.key_padding:
        yield run(probe, spread(setting.call(24), layouts(24)["7 pads scattered"], "pads"))
    yield from _training(probe.train(), setting)


def _training(probe: Probe, setting: Setting) -> list[Tensor | None]:
    """Outputs and gradients of three seeded training steps: enough for what redraws or anneals."""
    found: list[Tensor | None] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(3):
            call, inputs = setting.call(24).leaves()
            out = run(probe, call)
            torch.autograd.backward(_loss(probe, out))
            found += [out, *(tensor.grad for tensor in inputs.values())]
    return [*found, *(parameter.grad for parameter in probe.parameters())]


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return torch.equal(one, two)
    return bool(one == two) if not isinstance(one, Tensor) else False


def _candidates(metadata: Any, value: object) -> list[object]:
    """Other values to try for an option, its bounds among them."""
    if metadata.get("choices"):
        return list(metadata["choices"])
    if isinstance(value, bool):
        return [not value]
    bounds = [metadata.get("low"), metadata.get("high")]
    near = [bound for bound in bounds if bound is not None and abs(bound) <= 64]
    if isinstance(value, int):
        return [*near, value + 1, value * 2, value // 2, 1, 2, 3, 8, None]
    if isinstance(value, float):
        return [*near, value / 2, value * 2, value + 0.125, 0.0, 0.5, 1.0, -1.0, None]
    return [1, 2, 4, 0.5, 1.0, True, *near]


def perturb(probe: Probe) -> None:
    """Move every parameter off its start, where a zero gate would hide what lies behind it."""
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in probe.parameters():
            noise = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter.dtype))


def _loss(probe: Probe, out: Tensor) -> Tensor:
    """A generic loss of the output plus the sites' auxiliary losses."""
    loss = (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).square().sum()
    for site in probe.sites:
        auxiliary: Any = getattr(site, "auxiliary_loss", None)
        if auxiliary is not None:
            loss = loss + auxiliary()
    return loss
