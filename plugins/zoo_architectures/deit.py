"""DeiT and DeiT III of timm, plain and distilled."""

from __future__ import annotations

from zoo_architectures._timm_row import timm_row

ROWS = (
    timm_row(
        "deit",
        summary="DeiT of timm, plain or distilled (two prefix tokens), and DeiT III.",
        default="deit_base_patch16_224",
    ),
)
