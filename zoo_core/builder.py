"""Build a host model with its attention patched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from zoo_core import plan, registry
from zoo_core.architecture import Architecture
from zoo_core.errors import OptionError
from zoo_core.mechanism import Options
from zoo_core.patching import apply, seeded
from zoo_core.plan import Attention, Layers, Plan, Rule, rules


def build(
    architecture: str,
    attention: Attention | None = None,
    *,
    options: Mapping[str, Any] | Options | None = None,
    layers: Layers | None = None,
    pretrained: bool | str = False,
    task: str | None = None,
    max_length: int | None = None,
    seed: int | None = None,
    softmax_where_faster: bool = False,
    **model_kwargs: Any,
) -> nn.Module:
    """Build a model of the host library's own class, with its attention replaced.

    architecture: a family ("bert"), "family:variant" ("vit:vit_tiny_patch16_224"), or a preset.
    attention: a mechanism, a preset, ("linformer", {"rank": 128}), or rules by layer
        {"0-3": "local", "4-": ("linformer", {"rank": 128})}; softmax unless a preset says more.
    options, layers: for a single mechanism; layers as 3, "0-3", "4-", "0,2,5-7", "self", "cross".
    pretrained: True (the family's default), a directory, or "owner/name@revision".
    task: a transformers head such as "sequence-classification" or "masked-lm". Without it a
        fine-tuned checkpoint (whose config.json says BertForSequenceClassification) comes with its
        head and labels; any other is built bare, with a warning if it has a head of pretraining.
    max_length: longest input in tokens; beyond the pretrained one positions are extended.
    seed: for the whole build; leaves torch's global generator alone.
    softmax_where_faster: keep softmax where the longest input, `max_length`, is shorter than the
        length from which on the mechanism was measured to be faster.
    model_kwargs: override the host's config, or go to timm.create_model.

    Raises UnknownName, OptionError or DoesNotFit before any weights are made or fetched.
    """
    order = Order.of(
        architecture,
        attention,
        options=options,
        layers=layers,
        pretrained=pretrained,
        task=task,
        max_length=max_length,
        **model_kwargs,
    )
    order.plan()
    with seeded(seed):
        model = order.host.adapter().create(order.variant, **order.how)
    chosen: Sequence[Rule] = order.rules
    if softmax_where_faster:
        chosen = plan.softmax_where_faster(chosen, order.host.adapter().sites(model))
    apply(model, chosen, seed=seed)
    return model


@dataclass(frozen=True)
class Order:
    """What to build, with every name resolved: host, variant, arguments of `create`, rules."""

    name: str
    host: Architecture
    variant: str | None
    how: dict[str, Any]
    rules: list[Rule]

    @classmethod
    def of(
        cls,
        architecture: str,
        attention: Attention | None,
        *,
        options: Mapping[str, Any] | Options | None,
        layers: Layers | None,
        **how: Any,
    ) -> Self:
        """Expand a preset and look everything up. Raises UnknownName or OptionError."""
        if preset := registry.preset(architecture):
            how = {**preset.model_kwargs, **how}
            attention = preset.attention if attention is None else attention
            if how.get("max_length") is None:
                how["max_length"] = preset.max_length
            architecture = preset.architecture
        chosen = rules(
            "softmax" if attention is None else attention, options=options, layers=layers
        )
        host, variant = find(architecture)
        return cls(architecture, host, variant, how, chosen)

    def plan(self) -> Plan:
        """Plan on a sketch of the model, for which no weights are made or fetched."""
        adapter = self.host.adapter()
        sketch = adapter.create(self.variant, skeleton=True, **self.how)
        return plan.plan(self.rules, adapter.sites(sketch), model=self.name)


def find(architecture: str) -> tuple[Architecture, str | None]:
    """Split "family:variant" and look the family up."""
    if not isinstance(architecture, str):
        raise OptionError(f"architecture must be a name, not {architecture!r}")
    family, _, variant = architecture.partition(":")
    return registry.architecture(family), variant or None
