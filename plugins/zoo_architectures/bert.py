"""BERT and the families that are its classes: RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA."""

from __future__ import annotations

from zoo_architectures.rows import transformers_row

ROWS = (
    transformers_row(
        "bert",
        summary="BERT as encoder, decoder or with cross-attention, every task head.",
        default="google-bert/bert-base-uncased",
        package="bert",
        stem="Bert",
        self_attention="BertSelfAttention",
        cross_attention="BertCrossAttention",
        tiny={"intermediate_size": 64},
    ),
    transformers_row(
        "roberta",
        summary="RoBERTa, encoder or decoder.",
        default="FacebookAI/roberta-base",
        package="roberta",
        stem="Roberta",
        self_attention="RobertaSelfAttention",
        cross_attention="RobertaCrossAttention",
        position_offset=2,
        tiny={"intermediate_size": 64},
    ),
    transformers_row(
        "xlm_roberta",
        aliases=("xlmr",),
        summary="XLM-RoBERTa, RoBERTa over a hundred languages.",
        default="FacebookAI/xlm-roberta-base",
        package="xlm_roberta",
        stem="XLMRoberta",
        self_attention="XLMRobertaSelfAttention",
        cross_attention="XLMRobertaCrossAttention",
        position_offset=2,
        tiny={"intermediate_size": 64},
    ),
    transformers_row(
        "camembert",
        summary="CamemBERT, RoBERTa for French.",
        default="almanach/camembert-base",
        package="camembert",
        stem="Camembert",
        self_attention="CamembertSelfAttention",
        cross_attention="CamembertCrossAttention",
        position_offset=2,
        tiny={"intermediate_size": 64},
    ),
    transformers_row(
        "electra",
        summary="ELECTRA discriminators and generators.",
        default="google/electra-base-discriminator",
        package="electra",
        stem="Electra",
        self_attention="ElectraSelfAttention",
        cross_attention="ElectraCrossAttention",
        tiny={"intermediate_size": 64, "embedding_size": 32},
    ),
)
