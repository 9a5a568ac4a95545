"""ModernBERT: rotary positions; only its global layers can be patched."""

from __future__ import annotations

from zoo_architectures.rows import transformers_row

ROWS = (
    transformers_row(
        "modernbert",
        summary="ModernBERT; its global layers (sliding-window layers keep their attention).",
        default="answerdotai/ModernBERT-base",
        package="modernbert",
        stem="ModernBert",
        self_attention="ModernBertAttention",
        projections=("Wqkv",),
        out="Wo",
        tiny={
            "intermediate_size": 64,
            "layer_types": ["full_attention", "full_attention"],
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
)
