"""Choose the tile of a linear layer by rows, outputs and shared memory. See `linear` for the kernels."""

import torch

from shoal.kernels.jit import HOPPER_SHARED_MEMORY, next_power_of_two
from shoal.kernels.tile import NARROW, SMALL_M, SWAP_AB_ROWS, Tile


def choose_tile(
    rows: int, n: int, k_split: int, *, gated: bool, quantized: bool, dtype: torch.dtype, shared_limit: int
) -> Tile:
    """Return the fastest tile on an H200 at the released sizes, reduced to `shared_limit` bytes if necessary.

    n is the number of outputs, k_split the elements of K per split; activations have `dtype`, `quantized` weights one
    byte. The reduction changes only block_n and stages, which do not affect the order of sums: results have the
    same bits on every card.
    """
    if rows <= few_rows(n, k_split, quantized=quantized):
        sizes = {"element_size": dtype.itemsize, "shared_limit": shared_limit}
        return _small_m_tile(rows, k_split, gated=gated, quantized=quantized, **sizes)
    # Tiles measured on Hopper with 16-bit activations; other cards and dtypes use the interleaved form.
    if shared_limit >= HOPPER_SHARED_MEMORY and dtype.itemsize == 2 and k_split % 128 == 0:
        tile = _gated_tile(rows, n, quantized=quantized) if gated else _plain_tile(rows, n, quantized=quantized)
        if tile is not None and rows % tile.block_m == 0 and n % tile.block_n == 0:
            return tile
    tile = _large_m_tile(rows, n, k_split, gated=gated)
    weight_bytes = tile.block_n * (2 if gated else 1) * (1 if quantized else dtype.itemsize)
    # A stage buffers one block of inputs and weights for each of the four splits; one stage fewer is in shared memory.
    buffer = 4 * tile.block_k * (tile.block_m * dtype.itemsize + weight_bytes)
    return tile._replace(stages=max(2, min(tile.stages, 1 + shared_limit // buffer)))


def few_rows(n: int, k_split: int, *, quantized: bool) -> int:
    """Return the number of rows up to which the small-M kernel is faster: for S1-mini's 8-bit layers two tiles."""
    return 2 * SMALL_M if quantized and n <= NARROW and k_split <= 768 else SMALL_M


# Layers with fewer outputs have too few large tiles to fill the GPU.
SEQUENTIAL_OUTPUTS = 3072


def _plain_tile(rows: int, n: int, *, quantized: bool) -> Tile | None:
    """Return the tile of the sequential form, or None where the interleaved form is faster."""
    if n < SEQUENTIAL_OUTPUTS or rows <= (64 if n > NARROW else 128):
        return None
    if quantized:
        return Tile(128, 64, 64, stages=4, sequential=True)
    if rows <= (128 if n > NARROW else 256):
        return Tile(64, 64, 128, sequential=True)
    return Tile(128, 128, 64, warps=8, stages=4, sequential=True)


def _gated_tile(rows: int, n: int, *, quantized: bool) -> Tile | None:
    """Return the tile of the sequential form, or None where the interleaved form is faster."""
    if n < SEQUENTIAL_OUTPUTS:
        return None
    if rows <= 64:
        return Tile(64, 64 if quantized else 32, 64, stages=4, sequential=True) if n > NARROW else None
    if quantized:
        return Tile(128, 32, 64, stages=4, sequential=True)
    if n <= NARROW and rows <= 256:
        return Tile(64, 32, 128, sequential=True) if rows <= 128 else Tile(64, 32, 64, stages=4, sequential=True)
    wide = n > NARROW and rows > 256
    return Tile(128, 64 if wide else 32, 64, warps=8, stages=4, sequential=True)


def _large_m_tile(rows: int, n: int, k_split: int, *, gated: bool) -> Tile:
    # At least two iterations per split: a single one is unrolled, and the compiler then chains the four splits.
    block_k = min(64, max(16, next_power_of_two(k_split) // 2))
    if rows > 64:
        return Tile(64, 32 if gated else 64, block_k)
    if n <= 2048:
        return Tile(64, 16, block_k, stages=4)
    return Tile(64, 32 if gated or n <= 4096 else 64, block_k)


def _small_m_tile(
    rows: int, k_split: int, *, gated: bool, quantized: bool, element_size: int, shared_limit: int
) -> Tile:
    swap_ab = rows <= SWAP_AB_ROWS and (quantized or k_split <= 512)
    if swap_ab and quantized:
        block_n, max_block_k = (16, 64 if gated else 128) if k_split > 512 else (16 if gated else 32, 256)
    elif swap_ab:
        block_n, max_block_k = 16 if gated and rows > 1 else 32, 256
        # All four splits of gate, up and input blocks are in shared memory at once.
        buffer = 4 * max_block_k * element_size * (SWAP_AB_ROWS + 2 * block_n)
        if gated and buffer > shared_limit:
            block_n = 16
    else:
        short = quantized and k_split <= 256
        max_block_k = 256 if short or (not gated and k_split in (512, 768, 1024)) else 64 if k_split > 512 else 128
        block_n = 16 if gated or max_block_k == 256 else 32
    block_k = next((size for size in (256, 128, 64, 32) if size <= max_block_k and k_split % size == 0), 16)
    return Tile(SWAP_AB_ROWS if swap_ab else SMALL_M, block_n, block_k)
