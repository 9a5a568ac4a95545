"""The module around a mechanism that is one function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zoo_core.attention import Context, Site
from zoo_core.functions import FROM_SITE

if TYPE_CHECKING:
    from zoo_core.functions import _Named


class FunctionAttention(nn.Module):
    """Calls a function with what it asks for by name; see `zoo_core.from_function`."""

    def __init__(
        self, function: _Named, told: tuple[str, ...], site: Site, options: dict[str, Any]
    ) -> None:
        super().__init__()
        self.function = function
        self.told = told
        self.options = options
        self.site = {name: getattr(site, name) for name in FROM_SITE}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        site = self.site if self.training else {**self.site, "dropout": 0.0}
        told = {name: site[name] if name in site else getattr(ctx, name) for name in self.told}
        output: Tensor = self.function.function(q, k, v, **told, **self.options)
        return output
