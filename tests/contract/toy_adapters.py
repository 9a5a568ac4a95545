"""Bridges to BERT that each get one thing wrong; for test_kit_catches_adapters."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn

from zoo_architectures._transformers import TransformersAdapter
from zoo_architectures._transformers_families import Family
from zoo_core import Architecture

BERT = Family(
    package="bert",
    stem="Bert",
    default="none",
    self_attention="BertSelfAttention",
    cross_attention="BertCrossAttention",
    tiny=(("intermediate_size", 64),),
)


def record(adapter: type[TransformersAdapter]) -> Architecture:
    # The name sorts before the installed families', so that this one is asked first.
    return Architecture(
        name="a_toy",
        library="transformers",
        summary="A toy.",
        default="none",
        adapter=lambda: adapter(BERT),
    )


class OwnsEverything(TransformersAdapter):
    def owns(self, model):
        return True


class DropsArguments(TransformersAdapter):
    def create(self, ref=None, **kwargs):
        return super().create(ref, **{k: v for k, v in kwargs.items() if k != "nonsense_"})


class LargeSketch(TransformersAdapter):
    """Sketches another model than it builds."""

    def sites(self, model):
        sites = super().sites(model)
        on_meta = next(model.parameters()).is_meta
        return [replace(site, max_len=512) for site in sites] if on_meta else sites


class ForgetsLayers(TransformersAdapter):
    def config(self, model):
        return {k: v for k, v in super().config(model).items() if k != "num_hidden_layers"}


class Inexact(nn.Module):
    """A module that runs another and moves the last bits."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.zoo_supports = inner, inner.zoo_supports

    def forward(self, q, k, v, ctx):
        return self.inner(q, k, v, self.context(ctx)) * self.factor

    factor = 1 + 1e-6

    def context(self, ctx):
        return ctx

    def attention_map(self, q, k, ctx):
        return self.inner.attention_map(q, k, ctx)


class Deaf(Inexact):
    """Loses the padding."""

    factor = 1

    def context(self, ctx):
        return replace(ctx, key_padding=None)


class Wraps(TransformersAdapter):
    wrapper = Inexact

    def install(self, model, modules, attention):
        wrapped = {path: one and self.wrapper(one) for path, one in modules.items()}
        return super().install(model, wrapped, attention)


class LosesPadding(Wraps):
    wrapper = Deaf


class Frozen(Inexact):
    """Runs another without its gradient."""

    def forward(self, q, k, v, ctx):
        return self.inner(q.detach(), k, v, ctx)


class LosesGradients(Wraps):
    wrapper = Frozen


class LeavesTraces(TransformersAdapter):
    def install(self, model, modules, attention):
        model.was_patched = True
        return super().install(model, modules, attention)


class _Tied:
    """A forward that remembers the model it was made for, also in a copy."""

    def __init__(self, model):
        self.model = model

    def __call__(self, *args, **kwargs):
        return type(self.model).forward(self.model, *args, **kwargs)

    def __deepcopy__(self, memo):
        return copy.copy(self)


class PatchesForward(TransformersAdapter):
    def install(self, model, modules, attention):
        undo = super().install(model, modules, attention)
        model.forward = _Tied(model)
        return _Untie(model, undo)


class _Untie:
    def __init__(self, model, undo):
        self.model, self.undo = model, undo

    def __call__(self):
        self.undo()
        del self.model.forward


class TooMany(TransformersAdapter):
    def tiny(self):
        return {**super().tiny(), "vocab_size": 100_000}


class Hooked(TransformersAdapter):
    """Hooks the model, and takes the hooks off again."""

    def install(self, model, modules, attention):
        undo = super().install(model, modules, attention)
        handles = [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after),
        ]
        return _Unhook(handles, undo)

    @staticmethod
    def before(model, args, kwargs):
        return args, kwargs

    @staticmethod
    def after(model, args, out):
        return out


class _Unhook:
    def __init__(self, handles, undo):
        self.handles, self.undo = handles, undo

    def __call__(self):
        for handle in self.handles:
            handle.remove()
        self.undo()


class LosesFloatMasks(Hooked):
    @staticmethod
    def before(model, args, kwargs):
        mask = kwargs.get("attention_mask")
        lost = mask is not None and mask.is_floating_point()
        return args, {**kwargs, "attention_mask": None} if lost else kwargs


class EmptyMaps(Hooked):
    @staticmethod
    def after(model, args, out):
        out.attentions = ()
        return out
