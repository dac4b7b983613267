"""Tile choice by shared memory: the H200's tiles are fixed, smaller cards get tiles that fit."""

from itertools import product

import pytest
import torch

from shoal.kernels import linear, split_k_linear
from shoal.kernels.jit import HOPPER_SHARED_MEMORY

SMALL_CARD = 101_376  # sm_86, sm_89, sm_120
ROWS = (1, 2, 8, 9, 16, 24, 48, 64, 96, 128, 512)
FEW_ROWS = ROWS[:8]  # more rows have tiles of their own on Hopper
OUTPUTS = (1024, 2048, 2560, 3072, 4096, 4097, 6144, 9728)
K_SPLITS = (64, 256, 512, 640, 768, 1024, 2432)
UNLIMITED = 1 << 30


def linear_tile(rows: int, n: int, k_split: int, gated: bool, quantized: bool, limit: int) -> linear.Tile:
    form = {"gated": gated, "quantized": quantized, "dtype": torch.bfloat16}
    return linear.choose_tile(rows, n, k_split, **form, shared_limit=limit)  # type: ignore[arg-type]


def split_k_tile(rows: int, n: int, k_split: int, gated: bool, quantized: bool, limit: int) -> linear.Tile:
    return split_k_linear.choose_tile(rows, n, k_split, quantized=quantized, dtype=torch.bfloat16, shared_limit=limit)


@pytest.mark.parametrize("choose", [linear_tile, split_k_tile])
def test_an_h200_has_the_tiles_of_a_card_without_limit(choose: object) -> None:
    assert callable(choose)
    for case in product(ROWS, OUTPUTS, K_SPLITS, (False, True), (False, True)):
        assert choose(*case, HOPPER_SHARED_MEMORY) == choose(*case, UNLIMITED), case


@pytest.mark.parametrize("choose", [linear_tile, split_k_tile])
def test_a_smaller_card_changes_only_what_leaves_the_order_of_sums_alone(choose: object) -> None:
    assert callable(choose)
    for case in product(FEW_ROWS, OUTPUTS, K_SPLITS, (False, True), (False, True)):
        small, full = choose(*case, SMALL_CARD), choose(*case, UNLIMITED)
        if full.sequential:
            continue  # the gated product of S2-Pro; the order of sums is the same in both forms
        assert small._replace(block_n=0, stages=0) == full._replace(block_n=0, stages=0), case
        assert small.block_n <= full.block_n
        assert 2 <= small.stages <= full.stages


def test_tiles_that_do_not_fit_a_smaller_card_are_reduced() -> None:
    assert linear_tile(128, 4096, 256, False, False, SMALL_CARD).stages == 2
    assert linear_tile(64, 1024, 256, False, False, SMALL_CARD).stages == 3
    assert linear_tile(1, 3072, 256, True, False, SMALL_CARD).block_n == 16
    assert split_k_tile(1, 1024, 768, False, False, SMALL_CARD).block_n == 32
