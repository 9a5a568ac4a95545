"""Small host models and their inputs, for checks that run a whole model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core import patching
from zoo_core.architecture import Architecture
from zoo_core.errors import ZooError
from zoo_core.mechanism import Mechanism, Options
from zoo_core.nn.softmax import Softmax
from zoo_core.plan import Rule, obstacles
from zoo_core.testing.conformance import ConformanceFailure

LENGTH = 13

#: Softmax attention as the zoo computes it, so that the kit needs no plugin.
REFERENCE = Mechanism(
    name="kit_softmax",
    summary="The stock model's own attention.",
    family="softmax",
    paper=None,
    time="n**2*d",
    memory="n*d",
    supports=Softmax.supports,
    options=Options,
    swap="exact",
    factory=lambda site, options: Softmax(scale=site.scale, dropout=site.dropout),
)


def stock(architecture: Architecture, variant: str | None = None, **changes: Any) -> nn.Module:
    """The smallest stock model of a family in eval mode, the same at every call."""
    adapter = architecture.adapter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return adapter.create(variant, **{**adapter.tiny(), **changes}).eval()


def patch_reference(architecture: Architecture, model: nn.Module) -> patching.Patch | None:
    """Patch the layers that can be with softmax attention; None where none can."""
    sites = architecture.adapter().sites(model)
    layers = {site.layer for site in sites}
    layers -= {site.layer for site in sites if obstacles(REFERENCE, site)}
    if not layers:
        return None
    return patching.apply(model, [Rule(sorted(layers), REFERENCE, Options())])


def is_text(model: nn.Module) -> bool:
    """Whether the model reads token ids, which come in batches with padding."""
    return getattr(model, "main_input_name", None) == "input_ids"


def inputs(model: nn.Module, mask: Tensor | None = None, *, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of a small batch; `mask` (B, N), True = real token, is for text only."""
    source = torch.Generator().manual_seed(seed)
    if not is_text(model):
        name, shape = _image(model)
        return {name: torch.randn(shape, generator=source)}
    config: Any = model.config
    shape = (2, LENGTH) if mask is None else tuple(mask.shape)
    ids = torch.randint(5, config.vocab_size, shape, generator=source)
    arguments = {"input_ids": ids}
    if mask is not None:
        arguments["attention_mask"] = mask.long()
        if config.pad_token_id is not None:
            arguments["input_ids"] = ids.masked_fill(~mask, config.pad_token_id)
    return arguments


def embedded(model: nn.Module, mask: Tensor, junk: float) -> dict[str, Any]:
    """A padded batch given as embeddings, `junk` at the pads; positions do not depend on it."""
    host: Any = model
    embeddings = host.get_input_embeddings()(inputs(model, mask)["input_ids"]).detach()
    embeddings = embeddings.masked_fill(~mask[..., None], junk)
    return {"inputs_embeds": embeddings, "attention_mask": mask.long()}


def forward(model: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
    """The model's first output; a crash becomes a ConformanceFailure that shows the input."""
    shown = ", ".join(f"{name} {tuple(x.shape)}" for name, x in arguments.items())
    try:
        out = model(**arguments)
    except ZooError:
        raise
    except Exception as error:
        raised = f"{type(error).__name__}: {str(error)[:1500]}"
        raise ConformanceFailure(f"{type(model).__name__}({shown})", "an output", raised) from error
    first: Tensor = out if isinstance(out, Tensor) else out[0]
    return first


def outputs_and_gradients(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """The output and every parameter's gradient of one step, by name."""
    model.zero_grad()
    out = forward(model, arguments)
    torch.autograd.backward(out.square().mean())
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **{name: grad.clone() for name, grad in found.items()}}


def masks(model: nn.Module) -> dict[str, Tensor | None]:
    """Padding masks (B, N) to try, by name; images have none."""
    if not is_text(model):
        return {"no padding": None}
    right = torch.arange(LENGTH) < torch.tensor([[LENGTH], [5]])
    return {"no padding": None, "padding on the right": right, "on the left": right.flip(1)}


def twins(model: nn.Module) -> dict[str, nn.Module]:
    """Copies of a model that must not share anything with it."""
    return {
        "deep copy": copy.deepcopy(model),
        "pickled copy": pickle.loads(pickle.dumps(model)),
    }


def _image(model: nn.Module) -> tuple[str, tuple[int, ...]]:
    """The name and shape of a batch of two images."""
    config: Any = getattr(model, "config", None)
    if config is not None:
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return "pixel_values", (2, config.num_channels, height, width)
    embed: Any = model.patch_embed
    return "x", (2, embed.proj.weight.shape[1], *embed.img_size)
