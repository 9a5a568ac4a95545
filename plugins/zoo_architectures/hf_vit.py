"""Vision transformers of the transformers library: ViT, DeiT, DINOv2."""

from __future__ import annotations

from zoo_architectures.rows import transformers_row

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")

ROWS = (
    transformers_row(
        "hf_vit",
        summary="ViT of transformers.",
        default="google/vit-base-patch16-224",
        package="vit",
        stem="ViT",
        self_attention="ViTAttention",
        tiny={"intermediate_size": 64},
        projections=_PROJECTIONS,
        out="o_proj",
        image=True,
    ),
    transformers_row(
        "hf_deit",
        summary="DeiT of transformers, with class and distillation tokens.",
        default="facebook/deit-base-distilled-patch16-224",
        package="deit",
        stem="DeiT",
        self_attention="DeiTAttention",
        tiny={"intermediate_size": 64},
        projections=_PROJECTIONS,
        out="o_proj",
        prefix=2,
        image=True,
    ),
    transformers_row(
        "dinov2",
        summary="DINOv2 of transformers.",
        default="facebook/dinov2-base",
        package="dinov2",
        stem="Dinov2",
        self_attention="Dinov2Attention",
        projections=_PROJECTIONS,
        out="o_proj",
        image=True,
    ),
)
