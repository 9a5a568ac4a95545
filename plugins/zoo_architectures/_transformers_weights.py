"""Pretrained weights for transformers models: read with care, reported, positions resized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from zoo_architectures._report import LoadReport, patched
from zoo_core.checkpoint import host_config
from zoo_core.errors import CheckpointError


def locate(source: str) -> tuple[str, str | None]:
    """Split "owner/name@revision"; a directory has no revision."""
    if Path(source).is_dir():
        return source, None
    name, _, revision = source.partition("@")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(
            f"pretrained={source!r} is neither a directory that exists nor owner/name@revision"
        )
    return name, revision or None


def read_config(source: str) -> dict[str, Any]:
    """The config.json of a checkpoint, without the entries that could choose code."""
    name, revision = locate(source)
    try:
        stored, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no config.json could be read from {source}: {error}") from error
    if not stored:
        raise CheckpointError(f"{source} has no config.json; it is not a transformers checkpoint")
    if "zoo" in stored:
        raise patched(source)
    return host_config.safe(stored)


def from_checkpoint(
    model_class: type[PreTrainedModel],
    source: str,
    config: PreTrainedConfig,
    attention: tuple[type[nn.Module], ...],
    **kwargs: Any,
) -> PreTrainedModel:
    """Load safetensors weights into the stock class; the report is kept as `model.zoo_loaded`.

    attention: the classes of attention modules; a checkpoint that fills none of them is refused.
    """
    name, revision = locate(source)
    try:
        model, info = model_class.from_pretrained(
            name,
            revision=revision or "main",
            config=config,
            attn_implementation="sdpa",
            use_safetensors=True,
            output_loading_info=True,
            **kwargs,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{source} could not be loaded: {error}") from error
    new = tuple(sorted(info["missing_keys"]))
    inside = [f"{path}." for path, m in model.named_modules() if isinstance(m, attention)]
    needed = {key for key in model.state_dict() if key.startswith(tuple(inside))}
    if needed and needed <= set(new):
        raise CheckpointError(
            f"{source} fills no attention weight of {model_class.__name__}: it belongs to another "
            f"model (its own keys look like {', '.join(sorted(info['unexpected_keys'])[:3])})"
        )
    loaded = len(model.state_dict()) - len(new)
    unused = tuple(sorted(info["unexpected_keys"]))
    model.zoo_loaded = LoadReport(source, loaded, new, unused)
    return model


def resize_positions(model: PreTrainedModel, length: int, offset: int) -> None:
    """Give a text model `length` positions: table, buffers and config together.

    Rows beyond the trained ones repeat them from position 0 (as Longformer was started), so that
    the first positions stay what they were. offset: rows before position 0 (RoBERTa: 2).
    """
    embeddings = model.base_model.embeddings
    rows = length + offset
    table = getattr(embeddings, "position_embeddings", None)
    if isinstance(table, nn.Embedding):
        old = table.weight.detach()
        source = torch.arange(rows) - offset
        source = torch.where(source < 0, source + offset, source % (len(old) - offset) + offset)
        table.weight = nn.Parameter(old[source.to(old.device)].clone(), table.weight.requires_grad)
        table.num_embeddings = rows
    for name, buffer in list(embeddings.named_buffers(recurse=False)):
        if name == "position_ids":
            setattr(embeddings, name, torch.arange(rows, device=buffer.device).expand(1, -1))
        elif name == "token_type_ids":
            setattr(embeddings, name, buffer.new_zeros(1, rows))
    model.config.max_position_embeddings = rows
