"""The names of transformers' ViT and DeiT weights, translated to timm's."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from zoo_core.errors import CheckpointError

_LAYER = r"(?:encoder\.layer|layers)\.(\d+)\."
# Names of transformers 5 and of earlier versions; q, k and v become parts 0, 1, 2 of one qkv.
_NAMES = {
    r"embeddings\.cls_token": "cls_token",
    r"embeddings\.distillation_token": "dist_token",
    r"embeddings\.position_embeddings": "pos_embed",
    r"embeddings\.patch_embeddings\.projection\.(\w+)": r"patch_embed.proj.\1",
    _LAYER + r"attention\.(?:attention\.query|q_proj)\.(\w+)": r"blocks.\1.attn.qkv.\2#0",
    _LAYER + r"attention\.(?:attention\.key|k_proj)\.(\w+)": r"blocks.\1.attn.qkv.\2#1",
    _LAYER + r"attention\.(?:attention\.value|v_proj)\.(\w+)": r"blocks.\1.attn.qkv.\2#2",
    _LAYER + r"attention\.(?:output\.dense|o_proj)\.(\w+)": r"blocks.\1.attn.proj.\2",
    _LAYER + r"layernorm_before\.(\w+)": r"blocks.\1.norm1.\2",
    _LAYER + r"layernorm_after\.(\w+)": r"blocks.\1.norm2.\2",
    _LAYER + r"(?:intermediate\.dense|mlp\.fc1)\.(\w+)": r"blocks.\1.mlp.fc1.\2",
    _LAYER + r"(?:output\.dense|mlp\.fc2)\.(\w+)": r"blocks.\1.mlp.fc2.\2",
    r"layernorm\.(\w+)": r"norm.\1",
    r"(?:classifier|cls_classifier)\.(\w+)": r"head.\1",
    r"distillation_classifier\.(\w+)": r"head_dist.\1",
}


def from_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename keys and fuse query, key and value; the pooler, which timm lacks, is left out.

    Raises CheckpointError for a key that is not one of ViT's or DeiT's.
    """
    renamed = {
        _rename(key): tensor
        for key, tensor in state.items()
        if not re.fullmatch(r"(?:\w+\.)?pooler\..*", key)
    }
    whole = {key: tensor for key, tensor in renamed.items() if "#" not in key}
    for key in sorted(renamed.keys() - whole.keys()):
        name = key.partition("#")[0]
        parts = [renamed.get(f"{name}#{part}") for part in range(3)]
        if any(part is None for part in parts):
            raise CheckpointError(f"the checkpoint has only some of query, key and value of {name}")
        whole[name] = torch.cat([part for part in parts if part is not None])
    return whole


def _rename(key: str) -> str:
    bare = re.sub(r"^(?:vit|deit)\.", "", key)
    for pattern, name in _NAMES.items():
        if match := re.fullmatch(pattern, bare):
            return match.expand(name)
    raise CheckpointError(f"{key} is not a weight of transformers' ViT or DeiT")
