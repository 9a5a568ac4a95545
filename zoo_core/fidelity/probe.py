"""A downstream probe: how well labels can be read from frozen embeddings."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoo_core.errors import ZooError

_FOLDS = 5
_SHOWN = 5


def obstacle(labels: Sequence[Any]) -> str | None:
    """Why a probe cannot be made of labels, in words; None where it can."""
    if importlib.util.find_spec("sklearn") is None:
        return "the probe needs scikit-learn: pip install scikit-learn"
    classes = Counter(labels)
    if len(classes) < 2 or min(classes.values()) < 2:
        return f"a probe needs at least two classes with two samples each, got {_counts(classes)}"
    return None


def probe_correct(embeddings: Tensor, labels: Sequence[Any]) -> Tensor:
    """Whether each sample's label is told right by a logistic regression on the others, (n,).

    embeddings: (n, dim). Cross-validated with five stratified folds, standardised features.
    Raises ZooError without scikit-learn, or for labels that cannot be split so.
    """
    if (why := obstacle(labels)) is not None:
        raise ZooError(why)
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    fewest = min(Counter(labels).values())
    folds = StratifiedKFold(min(_FOLDS, fewest), shuffle=True, random_state=0)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    told = cross_val_predict(model, embeddings.float().numpy(), list(labels), cv=folds)
    return torch.tensor([float(a == b) for a, b in zip(told, labels, strict=True)])


def _counts(classes: Counter[Any]) -> str:
    shown = ", ".join(f"{str(label)[:40]!r}: {n}" for label, n in classes.most_common(_SHOWN))
    more = len(classes) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
