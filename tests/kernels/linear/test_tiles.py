"""Tile choice by shared memory and multiprocessors: the H200's tiles are fixed, smaller cards get tiles that fit."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from shoal.kernels.jit import H200_MULTIPROCESSORS, HOPPER_SHARED_MEMORY, multiprocessor_count
from shoal.kernels.linear import linear, split_k_linear, tiles, waves
from shoal.kernels.linear.waves import MIN_GAIN, balanced_width, card_width, wave_utilization
from shoal.kernels.tile import Tile

SMALL_CARD = 101_376  # sm_86, sm_89, sm_120
ROWS = (1, 2, 8, 9, 16, 24, 48, 64, 96, 128, 512)
FEW_ROWS = ROWS[:8]  # more rows have tiles of their own on Hopper
OUTPUTS = (1024, 2048, 2560, 3072, 4096, 4097, 6144, 9728)
K_SPLITS = (64, 256, 512, 640, 768, 1024, 2432)
UNLIMITED = 1 << 30
CARDS = {"RTX 3060": 28, "RTX 4060 Ti": 34, "L4": 58, "A10": 72, "RTX 3090": 82, "A100": 108, "RTX 4090": 128}
# (outputs, elements of K per split, gated) of the layers of S1-mini and S2-Pro, without and with split-K.
LAYERS = ((4096, 256, False), (3072, 256, True), (6144, 640, False), (9728, 640, True))
SPLIT_LAYERS = ((1024, 512), (1024, 768), (2560, 1024), (2560, 2432))


def linear_tile(rows: int, n: int, k_split: int, gated: bool, quantized: bool, limit: int) -> Tile:
    form = {"gated": gated, "quantized": quantized, "dtype": torch.bfloat16}
    return tiles.choose_tile(rows, n, k_split, **form, shared_limit=limit)  # type: ignore[arg-type]


def split_k_tile(rows: int, n: int, k_split: int, gated: bool, quantized: bool, limit: int) -> Tile:
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
            continue  # the gated product of S2-Pro: the order of sums is the same
        assert small._replace(block_n=0, stages=0) == full._replace(block_n=0, stages=0), case
        assert small.block_n <= full.block_n
        assert 2 <= small.stages <= full.stages


def test_tiles_that_do_not_fit_a_smaller_card_are_reduced() -> None:
    assert linear_tile(128, 4096, 256, False, False, SMALL_CARD).stages == 2
    assert linear_tile(64, 1024, 256, False, False, SMALL_CARD).stages == 3
    assert linear_tile(1, 3072, 256, True, False, SMALL_CARD).block_n == 16
    assert split_k_tile(1, 1024, 768, False, False, SMALL_CARD).block_n == 32


def launches(multiprocessors: int) -> Iterator[tuple[str, float, float]]:
    """Yield each product of the released models with its utilization by the H200's width and by the chosen one."""
    for rows in FEW_ROWS:
        for n, k_split, gated in LAYERS:
            tile = linear_tile(rows, n, k_split, gated, False, SMALL_CARD)
            yield utilization(f"{rows} rows, {n} outputs", tile, rows, n, 1, multiprocessors)
        for n, k_split in SPLIT_LAYERS:
            tile = split_k_tile(rows, n, k_split, False, False, SMALL_CARD)
            yield utilization(f"{rows} rows, {n} outputs, split-K", tile, rows, n, 4, multiprocessors)


def utilization(
    name: str, tile: Tile, rows: int, n: int, splits: int, multiprocessors: int
) -> tuple[str, float, float]:
    others = splits * -(-rows // tile.block_m)
    widths = tile.block_n, balanced_width(tile.block_n, n, others, multiprocessors)
    before, after = (wave_utilization(-(-n // width) * others, multiprocessors) for width in widths)
    return name, before, after


@pytest.mark.parametrize("card", CARDS)
def test_the_last_wave_of_a_product_leaves_few_multiprocessors_idle(card: str) -> None:
    found = list(launches(CARDS[card]))
    assert all(after == before or after >= MIN_GAIN * before for _, before, after in found)
    assert min(after for _, _, after in found) >= 0.75, min(found, key=lambda each: each[2])


def test_products_of_few_programs_are_split_where_they_idle_a_card() -> None:
    assert wave_utilization(64, 58) < 0.56
    assert balanced_width(64, 1024, 4, 58) == 16  # 256 programs in five waves
    assert balanced_width(64, 1024, 4, 34) == 64  # 64 programs fill two waves of 34


def test_only_cards_with_less_shared_memory_change_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(waves, "multiprocessor_count", lambda device: 58)
    assert card_width(64, 1024, 4, cpu) == 64
    monkeypatch.setattr(waves, "shared_memory_limit", lambda device: SMALL_CARD)
    assert card_width(64, 1024, 4, cpu) == 16
    assert multiprocessor_count(cpu) == H200_MULTIPROCESSORS


def test_a_narrower_tile_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    # Integers, whose sums are exact in any order, as numpy's BLAS may choose for the interpreter.
    x, weight = (torch.randint(-8, 9, (rows, 512), device=device).float() for rows in (3, 64))
    wide = linear.linear(x, weight), split_k_linear.split_k_linear(x, weight)
    widths = []
    for module in (linear, split_k_linear):
        monkeypatch.setattr(module, "card_width", lambda width, *_: widths.append(width) or 16)
    assert torch.equal(linear.linear(x, weight), wide[0])
    assert torch.equal(split_k_linear.split_k_linear(x, weight), wide[1])
    assert len(widths) == 2
    assert min(widths) > 16
