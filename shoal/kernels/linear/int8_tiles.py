"""Tiles of products of int8 rows with int8 weights (mode `w8a8`), measured on an H200 at the released models' sizes.

Sums of integers are exact in any order, so every tile gives the same bits and cards may use different ones.
"""

from __future__ import annotations

from shoal.kernels.tile import NARROW, SMALL_M, SWAP_AB_ROWS, Tile


def int8_tile(rows: int, n: int, k: int, *, gated: bool, shared_limit: int) -> Tile:
    """Return the tile of `linear` for n outputs and k inputs, reduced to `shared_limit` bytes of shared memory."""
    if rows <= SMALL_M and k % 128 == 0 and not (gated and n > NARROW and rows > SWAP_AB_ROWS):
        return _few_rows_tile(rows, n, k // 4, gated=gated)
    tile = _gated_tile(rows, n) if gated else _plain_tile(rows, n)
    sequential = not (rows % tile.block_m or n % tile.block_n or k % tile.block_k)
    return _fit(tile._replace(sequential=sequential), 2 if gated else 1, shared_limit)


def int8_split_k_tile(rows: int, n: int, k_split: int, shared_limit: int) -> Tile:
    """Return the tile of `split_k_linear` for n outputs and k_split inputs per program."""
    if rows <= SMALL_M:
        block_k = next(size for size in (256, 128, 64, 32) if size <= max(32, k_split))
        return Tile(_padded_rows(rows), 32, block_k, warps=2)
    if rows <= 32:
        tile = Tile(32, 32, 128, stages=4) if n <= 1024 else Tile(64, 32, 128, stages=6)
    elif rows <= 64:
        tile = Tile(64, 32, 256, stages=4) if n <= 1024 else Tile(64, 64, 128, stages=5)
    elif rows > 128 and n > 1024:
        tile = Tile(128, 128, 128, warps=8)
    else:
        tile = Tile(64, 64, 128, stages=4)
    return _fit(tile, 1, shared_limit)


def _few_rows_tile(rows: int, n: int, k_split: int, *, gated: bool) -> Tile:
    """Return a tile whose weights are loaded before the program waits for its inputs."""
    if k_split > 512:
        wide = 8 if rows <= SWAP_AB_ROWS and not gated else 4
        return Tile(_padded_rows(rows), 16, _divisor(k_split, 128), warps=wide)
    return Tile(_padded_rows(rows), 32, _divisor(k_split, 256 if rows <= SWAP_AB_ROWS else 128))


def _plain_tile(rows: int, n: int) -> Tile:
    if rows <= 64:
        return Tile(64, 32, 256, stages=4)
    if rows <= 128:
        return Tile(64, 64, 128, stages=4)
    if rows <= 256 or n < 2048:
        return Tile(64, 128 if n >= 2048 else 64, 128, stages=4)
    return Tile(128, 128, 128, warps=8)


def _gated_tile(rows: int, n: int) -> Tile:
    wide = n > NARROW
    if rows <= 64:
        return Tile(64, 32, 128 if wide else 256, stages=4)
    if rows <= 256 and not wide:
        return Tile(64, 32, 128, stages=4)
    if 128 < rows <= 256:
        return Tile(128, 32, 128, warps=8, stages=4)
    return Tile(128, 64, 128, warps=8)


def _padded_rows(rows: int) -> int:
    return SWAP_AB_ROWS if rows <= SWAP_AB_ROWS else SMALL_M


def _divisor(k_split: int, largest: int) -> int:
    return next(size for size in (256, 128, 64, 32) if size <= largest and k_split % size == 0)


def _fit(tile: Tile, matrices: int, shared_limit: int) -> Tile:
    """Reduce the pipeline stages, and then block_k, to the shared memory; a stage holds a block of rows and weights."""
    stage = (tile.block_m + matrices * tile.block_n) * tile.block_k
    if 2 * stage > shared_limit:
        return _fit(tile._replace(block_k=tile.block_k // 2), matrices, shared_limit)
    return tile._replace(stages=min(tile.stages, shared_limit // stage))
