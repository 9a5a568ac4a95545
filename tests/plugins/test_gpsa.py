from __future__ import annotations

import pytest
import torch
from timm.models import convit
from torch import Tensor, nn

from zoo_attention.gpsa import GPSA, GpsaOptions
from zoo_core import Context, Site
from zoo_core.errors import UnsupportedCall

WIDTH = 4
GRIDS = pytest.mark.parametrize("grid", [(1, 1), (3, 5), (5, 3), (4, 4)], ids=str)


def build(heads: int, *, trained: bool = False, **options: object) -> nn.Module:
    """A module in float64; trained: with other parameters than those it starts from."""
    site = Site(heads=heads, head_dim=WIDTH, dim=heads * WIDTH, scale=WIDTH**-0.5, grid=(4, 4))
    module = GPSA.factory(site, GpsaOptions(**options)).double().eval()
    if trained:
        torch.manual_seed(1)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    return module


def inputs(heads: int, length: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def by_formula(module: nn.Module, q: Tensor, k: Tensor, grid: tuple[int, int], prefix: int):
    """The map, one query and one head at a time."""
    weights = (q @ k.mT * WIDTH**-0.5).softmax(-1)
    cells = [(row, col) for row in range(grid[0]) for col in range(grid[1])]
    for h, (gate, w) in enumerate(zip(module.gate.sigmoid(), module.position, strict=True)):
        for i, (row, col) in enumerate(cells):
            moves = [(r - row, c - col) for r, c in cells]
            scores = [w[0] * dy + w[1] * dx + w[2] * (dy**2 + dx**2) for dy, dx in moves]
            mixed = (1 - gate) * weights[:, h, prefix + i]
            mixed[:, prefix:] += gate * torch.stack(scores).softmax(0)
            weights[:, h, prefix + i] = mixed
    return weights


@GRIDS
@pytest.mark.parametrize("prefix", [0, 2])
def test_it_computes_its_formula(grid: tuple[int, int], prefix: int) -> None:
    module = build(3, trained=True)
    q, k, v = inputs(3, prefix + grid[0] * grid[1])
    ctx = Context(grid=grid, prefix=prefix)
    wanted = by_formula(module, q, k, grid, prefix)
    torch.testing.assert_close(module.attention_map(q, k, ctx), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(module(q, k, v, ctx), wanted @ v, rtol=0, atol=1e-12)


def test_timm_gets_the_same_from_the_same_weights() -> None:
    """On its square grid without a prefix; timm guesses the grid from the square root of N."""
    torch.manual_seed(0)
    theirs, ours = convit.GPSA(dim=12, num_heads=3).double().eval(), build(3, trained=True)
    with torch.no_grad():
        theirs.gating_param.copy_(ours.gate)
        theirs.pos_proj.weight.copy_(ours.position[:, [1, 0, 2]])  # timm's order is dx, dy
        theirs.proj.weight.copy_(torch.eye(12))
        theirs.proj.bias.zero_()
    x = torch.randn(2, 16, 12, dtype=torch.float64)
    q, k = theirs.qk(x).view(2, 16, 2, 3, WIDTH).permute(2, 0, 3, 1, 4)
    v = theirs.v(x).view(2, 16, 3, WIDTH).transpose(1, 2)
    got = ours(q, k, v, Context(grid=(4, 4))).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, theirs(x), rtol=0, atol=1e-12)


def test_heads_start_as_timm_starts_them() -> None:
    theirs = convit.GPSA(dim=9 * WIDTH, num_heads=9, locality_strength=0.7)
    theirs.local_init()
    wanted = theirs.pos_proj.weight[:, [1, 0, 2]].double()
    wanted = wanted.view(3, 3, 3).transpose(0, 1).flatten(0, 1)  # timm counts column by column
    torch.testing.assert_close(build(9, locality=0.7).position, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("heads", "local"), [(1, 1), (2, 1), (3, 1), (4, 4), (12, 9)])
def test_only_a_square_number_of_heads_starts_local(heads: int, local: int) -> None:
    used = build(heads).position.any(-1)
    assert used.tolist() == [True] * local + [False] * (heads - local)


def test_open_gates_and_nine_local_heads_are_a_convolution() -> None:
    """With any values: the kernel at each place is out @ value of the head that looks there."""
    torch.manual_seed(0)
    rows, cols, channels = 5, 7, 6
    image = torch.randn(2, channels, rows, cols, dtype=torch.float64)
    value = torch.randn(9, WIDTH, channels, dtype=torch.float64)
    out = torch.randn(9, channels, WIDTH, dtype=torch.float64)
    v = torch.einsum("hdc,bcyx->bhyxd", value, image).flatten(2, 3)
    q, k, _ = inputs(9, rows * cols)
    heads = build(9, gate=40.0, locality=40.0)(q, k, v, Context(grid=(rows, cols)))
    got = torch.einsum("hcd,bhnd->bcn", out, heads).unflatten(-1, (rows, cols))
    kernel = (out @ value).permute(1, 2, 0).unflatten(-1, (3, 3))
    wanted = nn.functional.conv2d(image, kernel)
    torch.testing.assert_close(got[..., 1:-1, 1:-1], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("prefix", [0, 1])
def test_closed_gates_are_softmax_attention(prefix: int) -> None:
    module = build(4, gate=GPSA.exact_at(Site()).gate)
    q, k, v = inputs(4, 12 + prefix)
    wanted = (q @ k.mT * WIDTH**-0.5).softmax(-1) @ v
    got = module(q, k, v, Context(grid=(3, 4), prefix=prefix))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_gates_start_nearly_closed() -> None:
    gate = build(4).gate.sigmoid()
    torch.testing.assert_close(gate, torch.full_like(gate, 0.018), rtol=0, atol=1e-4)


def test_prefix_rows_and_columns_have_no_positional_attention() -> None:
    module = build(4, gate=40.0)
    q, k, _ = inputs(4, 14)
    weights = module.attention_map(q, k, Context(grid=(3, 4), prefix=2))
    assert (weights[:, :, 2:, :2] < 1e-12).all()
    wanted = (q @ k.mT * WIDTH**-0.5).softmax(-1)[:, :, :2]
    torch.testing.assert_close(weights[:, :, :2], wanted, rtol=0, atol=1e-12)


def test_frames_are_refused() -> None:
    with pytest.raises(UnsupportedCall, match="rows, cols"):
        build(1)(*inputs(1, 8), Context(grid=(2, 2, 2)))
