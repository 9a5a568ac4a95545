from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo_core.nn import hashing
from zoo_core.nn.hashing import Windows

HEADS, ROUNDS = 2, 3


def tokens(length: int, batch: int = 1, width: int = 4) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(batch, HEADS, length, width, dtype=torch.float64)


def random_buckets(length: int, number: int, batch: int = 1) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(number, (batch, HEADS, ROUNDS, length))


def lay_out(
    queries: Tensor, keys: Tensor, real: Tensor | None = None, *, before: int = 1, after: int = 0
) -> Windows:
    return hashing.windows(queries, keys, real, number=4, chunk=4, before=before, after=after)


class TestBuckets:
    def test_a_bucket_is_the_nearest_direction(self) -> None:
        x, rotations = tokens(20), torch.randn(HEADS, ROUNDS, 4, 3, dtype=torch.float64)
        found = hashing.buckets(x, rotations, 6)
        for h in range(HEADS):
            for r in range(ROUNDS):
                directions = [*rotations[h, r].T, *(-rotations[h, r].T)]
                for i, bucket in enumerate(found[0, h, r].tolist()):
                    products = [(x[0, h, i] @ direction).item() for direction in directions]
                    assert products[bucket] == max(products)

    def test_an_odd_number_leaves_out_the_last_opposite(self) -> None:
        rotations = torch.randn(HEADS, ROUNDS, 4, 3, dtype=torch.float64)
        assert hashing.buckets(tokens(200), rotations, 5).unique().tolist() == [0, 1, 2, 3, 4]

    def test_length_has_no_say(self) -> None:
        rotations = torch.randn(HEADS, ROUNDS, 4, 3, dtype=torch.float64)
        near, far = (hashing.buckets(s * tokens(50), rotations, 6) for s in (1e-3, 1e3))
        assert torch.equal(near, far)

    def test_autocast_moves_nothing_to_another_bucket(self) -> None:
        x, rotations = tokens(500).float(), torch.randn(HEADS, ROUNDS, 4, 3)
        wanted = hashing.buckets(x, rotations, 6)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(hashing.buckets(x, rotations, 6), wanted)


class TestWindows:
    @pytest.mark.parametrize(
        ("before", "after", "wanted"),
        [
            (1, 0, [range(8), range(8), range(4, 12)]),
            (0, 0, [range(4), range(4, 8), range(8, 12)]),
            (0, 1, [range(8), range(4, 12), range(4, 12)]),
        ],
        ids=["one-before", "alone", "one-after"],
    )
    def test_equal_buckets_give_a_chunk_and_its_neighbours(
        self, before: int, after: int, wanted: list[range]
    ) -> None:
        """Sorted as they are, tokens see a window that moves inwards at the ends."""
        sorted_already = random_buckets(12, 4).sort(-1).values
        seen = lay_out(sorted_already, sorted_already, before=before, after=after)
        assert seen.query[0, 0, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert seen.key[0, 0, 0].tolist() == [list(places) for places in wanted]

    def test_unequal_buckets_meet_where_they_lie(self) -> None:
        """Queries: four in each of three buckets. Keys: two in the first, ten in the last."""
        queries = torch.tensor([0, 1, 2] * 4).sort().values.view(1, 1, 1, 12)
        keys = torch.tensor([0] * 2 + [2] * 10).view(1, 1, 1, 12)
        seen = lay_out(queries, keys, before=0)
        assert seen.key[0, 0, 0].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [6, 7, 8, 9]]

    def test_padding_moves_no_window(self) -> None:
        queries, keys = random_buckets(13, 4), random_buckets(13, 4).flip(-1)
        alone = lay_out(queries, keys).dense()
        places = torch.arange(13) + torch.arange(13) // 3  # a pad after every third token
        real = torch.zeros(1, 18, dtype=torch.bool)
        real[:, places] = True
        spread_out = [
            torch.full((1, HEADS, ROUNDS, 18), 2).index_copy(-1, places, x) for x in (queries, keys)
        ]
        padded = lay_out(*spread_out, real).dense()
        assert torch.equal(padded[..., places, :][..., places], alone)
