from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo_core.nn.blocks import Blocks, surroundings

CPU = torch.device("cpu")
LENGTHS = pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 13], ids=lambda n: f"{n}-tokens")
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [
        {"before": 0, "after": 0},
        {"before": 1, "after": 1},
        {"before": 2, "after": 0},
        {"before": 1, "after": 2, "prefix": 1},
        {"before": 1, "after": 0, "prefix": 3},
    ],
    ids=lambda layout: "-".join(f"{name}{n}" for name, n in layout.items()),
)


def tokens(batch: int, length: int, width: int = 3) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(batch, 2, length, width, dtype=torch.float64)


def cut(batch: int, length: int, prefix: int = 0, **layout: int) -> Blocks:
    return Blocks(batch, length, size=4, prefix=min(prefix, length), **layout)


def rows_of(blocks: Blocks, sample: int) -> range:
    """Where the blocks of one sample lie on the axis of all blocks."""
    start = sample * (blocks.count + blocks.gap)
    return range(start, start + blocks.count)


@LENGTHS
@LAYOUTS
def test_join_undoes_split(length: int, layout: dict[str, int]) -> None:
    x, blocks = tokens(3, length), cut(3, length, **layout)
    assert blocks.split(x).shape == (blocks.total, 2, 4, 3)
    assert torch.equal(blocks.join(blocks.split(x)), x)


@LENGTHS
@LAYOUTS
def test_a_window_shows_its_blocks_and_the_prefix_once(length: int, layout: dict[str, int]) -> None:
    x, blocks = tokens(3, length), cut(3, length, **layout)
    positions, windows = blocks.keys(CPU), blocks.windows(x)
    for sample in range(3):
        for block, row in enumerate(rows_of(blocks, sample)):
            near = range((block - blocks.before) * 4, (block + 1 + blocks.after) * 4)
            wanted = set(near) & set(range(length)) | set(range(blocks.prefix))
            shown = [p for p in positions[row].tolist() if p >= 0]
            assert sorted(shown) == sorted(wanted)
            for slot, position in enumerate(positions[row].tolist()):
                if position >= 0:
                    assert torch.equal(windows[row, :, slot], x[sample, :, position])


@LENGTHS
def test_queries_say_where_the_tokens_of_a_block_stand(length: int) -> None:
    x, blocks = tokens(2, length), cut(2, length)
    positions, split = blocks.queries(CPU), blocks.split(x)
    for sample in range(2):
        for row in rows_of(blocks, sample):
            for slot, position in enumerate(positions[row].tolist()):
                if position < length:
                    assert torch.equal(split[row, :, slot], x[sample, :, position])


def test_keys_end_with_the_real_tokens_of_each_sample() -> None:
    blocks = cut(2, 10, prefix=2, before=1, after=1)
    positions = blocks.keys(CPU, torch.tensor([10, 1]))
    first, second = (positions[rows_of(blocks, sample)] for sample in range(2))
    assert first.max() == 9
    assert [row[row >= 0].tolist() for row in second] == [[0], [0], [0]]


@LAYOUTS
def test_no_window_holds_numbers_of_another_sample(layout: dict[str, int]) -> None:
    x, blocks = tokens(3, 8), cut(3, 8, **layout)
    x[1] = torch.nan
    windows = blocks.windows(x)
    assert windows[rows_of(blocks, 0)].isfinite().all()
    assert windows[rows_of(blocks, 2)].isfinite().all()


@LAYOUTS
@pytest.mark.parametrize("batch", [1, 3])
def test_derivatives(batch: int, layout: dict[str, int]) -> None:
    x, blocks = tokens(batch, 9, width=1).requires_grad_(), cut(batch, 9, **layout)
    assert torch.autograd.gradcheck(blocks.windows, x)
    assert torch.autograd.gradgradcheck(blocks.windows, x)


def test_windows_compile_at_any_length() -> None:
    def windows(x: Tensor) -> Tensor:
        return cut(*x.shape[::2], prefix=1, before=1, after=2).windows(x)

    torch._dynamo.reset()
    compiled = torch.compile(windows, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in [(1, 13), (1, 16), (3, 22)]:
        x = tokens(batch, length)
        assert torch.equal(compiled(x), windows(x))


def test_surroundings_are_the_blocks_around_each_block() -> None:
    x = torch.arange(1.0, 7).view(1, 1, 6, 1)
    seen = surroundings(x, 2, before=1, after=2)[0, 0, ..., 0]
    assert seen.tolist() == [
        [0, 0, 1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6, 0, 0],
        [3, 4, 5, 6, 0, 0, 0, 0],
    ]


class TestCopies:
    """Copies cost more time than the products of a window: none where it can be helped."""

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    def test_windows_share_memory_with_their_neighbours(self, compiled: bool) -> None:
        x, blocks = tokens(1, 400), Blocks(1, 400, size=4, before=2, after=2)
        form = torch.compile(blocks.windows, backend="aot_eager") if compiled else blocks.windows
        windows = form(x)
        assert windows.numel() == 5 * x.numel()
        assert windows.untyped_storage().nbytes() < 1.1 * x.untyped_storage().nbytes()

    def test_a_sample_that_fills_its_blocks_is_not_copied(self) -> None:
        x = tokens(1, 8)
        assert cut(1, 8).split(x).data_ptr() == x.data_ptr()

    def test_joining_copies_nothing(self) -> None:
        blocks = cut(3, 10)
        split = torch.zeros(blocks.total, 4, 2, 3).transpose(1, 2)  # as fused attention stores it
        assert blocks.join(split).data_ptr() == split.data_ptr()
