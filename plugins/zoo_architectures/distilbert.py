"""DistilBERT."""

from __future__ import annotations

from zoo_architectures.rows import transformers_row

ROWS = (
    transformers_row(
        "distilbert",
        summary="DistilBERT, a BERT of half the depth.",
        default="distilbert/distilbert-base-uncased",
        package="distilbert",
        stem="DistilBert",
        self_attention="DistilBertSelfAttention",
        projections=("q_lin", "k_lin", "v_lin"),
        out="out_lin",
        tiny={"hidden_dim": 64},
    ),
)
