"""One row (Family) for each model family of transformers, and the heads that it may have."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

TASKS = (
    ("causal-lm", "LMHeadModel"),
    ("causal-lm", "ForCausalLM"),
    ("image-classification", "ForImageClassification"),
    ("masked-image-modeling", "ForMaskedImageModeling"),
    ("masked-lm", "ForMaskedLM"),
    ("multiple-choice", "ForMultipleChoice"),
    ("next-sentence-prediction", "ForNextSentencePrediction"),
    ("pretraining", "ForPreTraining"),
    ("question-answering", "ForQuestionAnswering"),
    ("sequence-classification", "ForSequenceClassification"),
    ("token-classification", "ForTokenClassification"),
)
# Who builds an encoder from the result of these rarely wants their heads.
PRETRAINING = frozenset(
    {"masked-image-modeling", "masked-lm", "next-sentence-prediction", "pretraining"}
)


@dataclass(frozen=True)
class Family:
    """What differs between model families.

    package: module under transformers.models. stem: class prefix ("Bert").
    self_attention, cross_attention: class names of the attention modules.
    projections: attribute names of the query, key and value Linears, or one fused Linear.
    out: path of the output projection, relative to the attention module ("..": its parent).
    prefix: leading tokens outside the grid (BERT: its CLS).
    position_offset: rows of the position table before position 0 (RoBERTa: 2).
    image: whether inputs are images.
    repeats: whether the layers share their attention module (ALBERT).
    tiny: config entries of the smallest model that differ from the other families'.
    """

    package: str
    stem: str
    default: str
    self_attention: str
    cross_attention: str | None = None
    projections: tuple[str, ...] = ("query", "key", "value")
    out: str = "../output.dense"
    prefix: int = 1
    position_offset: int = 0
    image: bool = False
    repeats: bool = False
    tiny: tuple[tuple[str, Any], ...] = ()

    @property
    def modeling(self) -> Any:
        """The modeling module of transformers."""
        return importlib.import_module(
            f"transformers.models.{self.package}.modeling_{self.package}"
        )

    def named(self, suffix: str) -> Any:
        """The class `stem + suffix`."""
        return getattr(self.modeling, self.stem + suffix)

    @property
    def heads(self) -> dict[str, type[PreTrainedModel]]:
        """Task -> model class, for the tasks this family has."""
        names = [(task, self.stem + suffix) for task, suffix in TASKS]
        return {t: getattr(self.modeling, n) for t, n in names if hasattr(self.modeling, n)}

    def class_named(self, name: str) -> type[PreTrainedModel] | None:
        """The model class of this name, None where this family has none."""
        found = getattr(self.modeling, name, None) if name.startswith(self.stem) else None
        is_model = isinstance(found, type) and issubclass(found, PreTrainedModel)
        return found if is_model else None

    def trained_head(self, name: str) -> type[PreTrainedModel] | None:
        """The class of this name if it has a head of its own use, not pretraining's only."""
        wanted = tuple(self.stem + suffix for task, suffix in TASKS if task not in PRETRAINING)
        return self.class_named(name) if name.startswith(wanted) else None

    @property
    def attention_classes(self) -> dict[type[nn.Module], str]:
        """Attention class -> "self" or "cross"."""
        classes = {getattr(self.modeling, self.self_attention): "self"}
        if self.cross_attention:
            classes[getattr(self.modeling, self.cross_attention)] = "cross"
        return classes
