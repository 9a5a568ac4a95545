from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo_core.nn import clustering
from zoo_core.nn.clustering import SAMPLE, cluster, group, kmeans, pick, spread

HEADS = 2


def tokens(length: int, batch: int = 1, width: int = 4) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(batch, HEADS, length, width, dtype=torch.float64)


def padding(*rows: str) -> Tensor:
    """One row of 1 (real) and 0 (padding) for each sample."""
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


def lloyd(x: Tensor, number: int, iterations: int) -> list[int]:
    """Lloyd's algorithm on one head without padding, token by token."""
    points = [x[i * len(x) // m] for m in [min(SAMPLE * number, len(x))] for i in range(m)]
    number = min(number, len(points))
    centroids = [points[c * len(points) // number] for c in range(number)]

    def nearest(point: Tensor) -> int:
        return min(range(number), key=lambda c: (point - centroids[c]).norm().item())

    for _ in range(iterations):
        found = [nearest(point) for point in points]
        for c in range(number):
            inside = [point for point, at in zip(points, found, strict=True) if at == c]
            centroids[c] = torch.stack(inside).mean(0) if inside else centroids[c]
    return [nearest(point) for point in x]


class TestPick:
    @pytest.mark.parametrize("hosts", [True, False], ids=["as-hosts-store", "contiguous"])
    def test_it_takes_the_rows_of_each_sample_and_head(self, hosts: bool) -> None:
        x = tokens(7, batch=3)
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if hosts else x
        index = torch.randint(7, (3, HEADS, 9))
        picked = pick(x, index)
        for b in range(3):
            for h in range(HEADS):
                assert torch.equal(picked[b, h], x[b, h, index[b, h]])


class TestSpread:
    @pytest.mark.parametrize(
        ("length", "number", "wanted"),
        [(8, 4, [0, 2, 4, 6]), (7, 3, [0, 2, 4]), (3, 5, [0, 1, 2]), (1, 4, [0])],
    )
    def test_positions(self, length: int, number: int, wanted: list[int]) -> None:
        positions, found = spread(tokens(length, batch=2), None, number)
        assert positions.tolist() == [wanted, wanted]
        assert found is None

    @pytest.mark.parametrize(
        ("row", "number", "wanted"),
        [
            ("0011111111", 4, [2, 4, 6, 8]),
            ("1111111100", 4, [0, 2, 4, 6]),
            ("1010101010", 2, [0, 4]),
            ("0001001000", 4, [3, 6]),
            ("0000000000", 4, []),
        ],
    )
    def test_padding_is_left_out(self, row: str, number: int, wanted: list[int]) -> None:
        positions, found = spread(tokens(10), padding(row), number)
        assert positions[found].tolist() == wanted


class TestKMeans:
    @pytest.mark.parametrize("iterations", [0, 1, 4], ids=lambda n: f"{n}-steps")
    @pytest.mark.parametrize("number", [1, 3, 8], ids=lambda n: f"{n}-clusters")
    @pytest.mark.parametrize("length", [1, 2, 20, 60], ids=lambda n: f"{n}-tokens")
    def test_it_is_lloyds_algorithm(self, length: int, number: int, iterations: int) -> None:
        x = tokens(length)
        found = kmeans(x, None, min(number, length), iterations)
        assert found[0].tolist() == [lloyd(head, number, iterations) for head in x[0]]

    def test_padding_moves_nothing(self) -> None:
        rows = padding("1" * 20 + "0" * 20, "0" * 33 + "1" * 7, "10" * 20, "0" * 37 + "111")
        x = tokens(40, batch=4).masked_fill(~rows[:, None, :, None], 0)
        found = kmeans(x, rows, 5, 3)
        for b, real in enumerate(rows):
            alone = [lloyd(head, 5, 3) for head in x[b, :, real]]
            assert found[b, :, real].tolist() == alone

    def test_it_finds_clusters_that_lie_apart(self) -> None:
        wanted = torch.randint(4, (1, HEADS, 200))
        x = tokens(200) * 0.1 + 5 * torch.eye(4, dtype=torch.float64)[wanted]
        found = kmeans(x, None, 8, 10)
        for head in range(HEADS):
            pairs = set(zip(found[0, head].tolist(), wanted[0, head].tolist(), strict=True))
            assert len({c for c, _ in pairs}) == len(pairs)  # none holds tokens of two

    def test_clusters_that_lose_all_tokens_stay_finite(self) -> None:
        x = tokens(1).expand(-1, -1, 30, -1)
        index, means = cluster(x, None, 8, 5)
        used = torch.zeros(means.shape[:3], dtype=torch.bool).scatter(-1, index, True)[..., None]
        torch.testing.assert_close(means, torch.where(used, x[:, :, :1], 0))

    def test_half_precision_is_clustered_in_single(self) -> None:
        x = tokens(30).half()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            index, means = cluster(x, None, 4, 3)
        assert means.dtype == torch.float32
        assert torch.equal(index, kmeans(x.float(), None, 4, 3))

    def test_means_carry_the_gradient(self) -> None:
        x, real = tokens(12).requires_grad_(), padding("1" * 9 + "000")
        index, means = cluster(x.masked_fill(~real[:, None, :, None], 0), real, 3, 2)
        assert not index.requires_grad
        means.sum().backward()
        for head in range(HEADS):
            found = index[0, head].tolist()
            sizes = [found[:9].count(c) for c in range(3)]
            wanted = [1 / sizes[c] for c in found[:9]] + [0.0] * 3
            assert x.grad[0, head, :, 0].tolist() == pytest.approx(wanted)


class TestGroup:
    @pytest.mark.parametrize("size", [1, 3, 4])
    @pytest.mark.parametrize(
        "index",
        [[0], [2, 2, 2, 2, 2], [0, 1, 2, 3, 4], [3, 0, 3, 1, 3, 3, 0, 3, 4, 3, 3]],
        ids=["one-token", "one-group", "all-alone", "mixed"],
    )
    def test_each_block_holds_tokens_of_one_group(self, index: list[int], size: int) -> None:
        groups = group(torch.tensor([[index]]), number=5, size=size)
        place = groups.place[0, 0].tolist()
        assert len(set(place)) == len(index)
        assert groups.token[0, 0, place].tolist() == list(range(len(index)))
        assert [groups.group[0, 0, at // size].item() for at in place] == index

    def test_join_undoes_split(self) -> None:
        x = tokens(23, batch=3)
        groups = group(torch.randint(4, (3, HEADS, 23)), number=4, size=4)
        blocks = groups.split(x)
        assert blocks.shape == (3, HEADS, (23 + 4 * 3) // 4, 4, 4)
        assert torch.equal(groups.join(blocks), x)

    def test_tokens_of_a_group_keep_their_order(self) -> None:
        groups = group(torch.tensor([[[1, 0, 1, 0, 1]]]), number=2, size=4)
        assert groups.token[0, 0, :2].tolist() == [1, 3]
        assert groups.token[0, 0, 4:7].tolist() == [0, 2, 4]


def test_more_tokens_than_the_sample_are_all_clustered() -> None:
    """SAMPLE limits what moves the centroids, not what is clustered."""
    x = tokens(3 * clustering.SAMPLE)
    assert kmeans(x, None, 2, 3)[0].tolist() == [lloyd(head, 2, 3) for head in x[0]]
