"""Batch sizes of CUDA graphs, chosen for the number of slots."""

from itertools import pairwise

import pytest

from shoal.engine.execution.fixed_size import batch_sizes


@pytest.mark.parametrize("slots", [1, 3, 16, 128, 200, 256, 512, 1000, 4096])
def test_the_sizes_end_with_the_slots_and_pad_at_most_a_third(slots: int) -> None:
    sizes = batch_sizes(slots)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == slots
    # The largest padding is that of one row more than the size below.
    assert all(1 - (below + 1) / size <= 1 / 3 for below, size in pairwise(sizes) if size > 16)


def test_a_batch_of_256_in_512_slots_is_not_padded() -> None:
    assert batch_sizes(512)[-7:] == [128, 192, 256, 320, 384, 448, 512]


def test_given_sizes_are_kept_up_to_the_slots() -> None:
    assert batch_sizes(4, (1, 3, 64)) == [1, 3, 4]
