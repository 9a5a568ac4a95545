"""A downstream probe: how well labels can be read from frozen embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoo_core.errors import ZooError

_FOLDS = 5


def probe_correct(embeddings: Tensor, labels: Sequence[Any]) -> Tensor:
    """Whether each sample's label is told right by a logistic regression on the others, (n,).

    embeddings: (n, dim). Cross-validated with five stratified folds, standardised features.
    Raises ZooError without scikit-learn, or for labels that cannot be split so.
    """
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedKFold, cross_val_predict
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise ZooError("the probe needs scikit-learn: pip install scikit-learn") from error
    classes = {label: labels.count(label) for label in set(labels)}
    fewest = min(classes.values())
    if len(classes) < 2 or fewest < 2:
        raise ZooError(
            f"a probe needs at least two classes with two samples each, got {_counts(classes)}"
        )
    folds = StratifiedKFold(min(_FOLDS, fewest), shuffle=True, random_state=0)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    told = cross_val_predict(model, embeddings.float().numpy(), list(labels), cv=folds)
    return torch.tensor([float(a == b) for a, b in zip(told, labels, strict=True)])


def _counts(classes: dict[Any, int]) -> str:
    return ", ".join(f"{label!r}: {count}" for label, count in classes.items())
