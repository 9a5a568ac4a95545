"""Losses of distillation, one value for each sample, so that batches may be cut anywhere.

A mean over the samples is then the same whatever the padding, the accumulation or the number of
processes. All are computed in float32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from zoo_core.errors import OptionError

_TINY = 1e-12


def relative_error(ours: Tensor, theirs: Tensor, mask: Tensor) -> Tensor:
    """Squared difference over squared size, summed over real tokens.

    ours, theirs: (B, N, dim); mask: bool (B, N), True = real -> (B,).
    """
    ours, theirs = ours.float(), theirs.float()
    hidden = ~mask[..., None]
    difference = (ours - theirs).masked_fill(hidden, 0).square().sum((-2, -1))
    return difference / theirs.masked_fill(hidden, 0).square().sum((-2, -1)).clamp_min(_TINY)


def embedding_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """One minus the cosine, plus the relative squared error: (B, dim) each -> (B,)."""
    ours, theirs = ours.float(), theirs.float()
    size = theirs.square().sum(-1).clamp_min(_TINY)
    return 1 - F.cosine_similarity(ours, theirs, dim=-1) + (ours - theirs).square().sum(-1) / size


def divergence(
    ours: Tensor, theirs: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """KL(theirs || ours) of logits in nats: (B, classes), or (B, N, classes) by token -> (B,).

    mask: bool (B, N), True = real; needed for logits by token, whose mean over real ones it is.
    """
    by_class = F.kl_div(
        F.log_softmax(ours.float() / temperature, -1),
        F.log_softmax(theirs.float() / temperature, -1),
        log_target=True,
        reduction="none",
    ).sum(-1)
    return by_class if mask is None or by_class.dim() == 1 else token_mean(by_class, mask)


def masked_lm(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the hidden tokens: (B, N, vocabulary), labels (B, N) -> (B,).

    Labels are -100 where nothing was hidden.
    """
    by_token = F.cross_entropy(logits.float().mT, labels, ignore_index=-100, reduction="none")
    return token_mean(by_token, labels != -100)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the real tokens: (B, N), mask bool (B, N) -> (B,)."""
    return values.masked_fill(~mask, 0).sum(-1) / mask.sum(-1).clamp_min(1)


def distillation(
    class_logits: Tensor,
    distilled_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    *,
    kind: str = "hard",
    alpha: float = 0.5,
    temperature: float = 3.0,
) -> Tensor:
    """The loss of DeiT: (B, classes) each, labels (B,) -> (B,).

    hard: (1 - alpha) CE(class, label) + alpha CE(distilled, argmax of the teacher)
    soft: (1 - alpha) CE(class, label) + alpha T^2 KL(teacher / T || distilled / T)
    Touvron, Cord, Douze, Massa, Sablayrolles, Jégou, "Training data-efficient image transformers &
    distillation through attention", 2021, arXiv:2012.12877, equations 2 and 3. alpha is 1/2 in its
    hard form; its soft form takes alpha = 0.1 and T = 3.
    """
    own = F.cross_entropy(class_logits.float(), labels, reduction="none")
    if kind == "hard":
        told = teacher_logits.argmax(-1)
        from_teacher = F.cross_entropy(distilled_logits.float(), told, reduction="none")
    elif kind == "soft":
        softened = divergence(distilled_logits, teacher_logits, temperature=temperature)
        from_teacher = temperature**2 * softened
    else:
        raise OptionError(f"kind={kind!r} must be 'hard' or 'soft'")
    return (1 - alpha) * own + alpha * from_teacher
