"""Depth and width: where a model is narrow, and what depth a published fit would give it.

The width that counts for depth is min(dim, rank of the embedding). Best depth for a width:
ln(width) = 5.039 + 0.0555 depth.

Wies, Levine, Jannai, Shashua, "Which Transformer Architecture Fits My Data? A Vocabulary
Bottleneck in Self-Attention", 2021, arXiv:2105.03928. The fit: Levine, Wies, Sharir, Bata, Shashua,
"Limits to Depth Efficiencies of Self-Attention", 2020, arXiv:2006.12467.
Deviations: the fit was made on causal language models; for any other model it is an extrapolation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.diagnose.rank import effective_rank
from zoo_core.diagnose.reports import DepthAdvice
from zoo_core.errors import ZooError
from zoo_core.hosts import adapter_of, unwrap

_A, _B = 5.039, 0.0555


def fitted_depth(width: float) -> float:
    """The depth that the fit gives a model of `width`, not below 1."""
    return max(1.0, (math.log(width) - _A) / _B)


@torch.no_grad()
def advise(model: Any) -> DepthAdvice:
    """The rank of the embedding or patch projection, narrow layers, and a suggested depth.

    Raises ZooError where the model has neither.
    """
    host = unwrap(model)
    _, adapter = adapter_of(host)
    sites = [site for site in adapter.sites(host) if site.kind == "self"]
    name, weight = _embedding(host)
    singular = _singular_values(weight)
    # The usual tolerance of a numerical rank, for the precision the weights were kept in.
    tolerance = max(weight.shape) * torch.finfo(weight.dtype).eps
    rank = int((singular > tolerance * singular[0]).sum())
    narrow = [site for site in sites if site.heads * site.head_dim < site.dim]
    depth = sum(site.calls for site in sites)
    width = min(sites[0].dim, rank) if sites else rank
    return DepthAdvice(
        embedding=name,
        dim=sites[0].dim if sites else weight.shape[-1],
        rank=rank,
        effective_rank=float(effective_rank(singular)),
        width=width,
        depth=depth,
        suggested_depth=fitted_depth(width),
        bottlenecks=tuple(
            f"{site.path}: {site.heads} heads of {site.head_dim} in a width of {site.dim}"
            for site in narrow
        ),
    )


def _embedding(host: nn.Module) -> tuple[str, Tensor]:
    """The name and the matrix (inputs, dim) through which inputs enter the model."""
    for name, module in host.named_modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings > 2:
            return name, module.weight
        if isinstance(module, nn.Conv2d):
            return name, module.weight.flatten(1).mT
    raise ZooError(f"{type(host).__name__} has neither an embedding nor a patch projection")


def _singular_values(weight: Tensor) -> Tensor:
    """In falling order, in double precision; a tall matrix has those of its small R factor."""
    wide = weight.double()
    if wide.shape[0] > wide.shape[1]:
        wide = torch.linalg.qr(wide, mode="r").R
    values: Tensor = torch.linalg.svdvals(wide)
    return values
