"""ViT of timm, with its many descendants that are the same class."""

from __future__ import annotations

from zoo_architectures._timm_row import timm_row

ROWS = (
    timm_row(
        "vit",
        summary="VisionTransformer and NaFlexVit of timm: ViT, DINOv2, SigLIP, CLIP, ...",
        default="vit_base_patch16_224",
    ),
)
