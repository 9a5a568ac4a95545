"""ALBERT: one attention module, called once per layer."""

from __future__ import annotations

from zoo_architectures.rows import transformers_row

ROWS = (
    transformers_row(
        "albert",
        summary="ALBERT; its layers share weights, so they share one mechanism too.",
        default="albert/albert-base-v2",
        package="albert",
        stem="Albert",
        self_attention="AlbertAttention",
        out="dense",
        repeats=True,
        tiny={"intermediate_size": 64, "embedding_size": 16},
    ),
)
