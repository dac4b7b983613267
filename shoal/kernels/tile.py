"""Tile of a matrix product, and the numbers of rows and outputs at which kernels and tiles change."""

from typing import NamedTuple

# Up to this many rows a program prefetches its weights before it waits for its inputs.
SMALL_M = 16
# Up to this many rows the operands are swapped (swap-AB): weights are operand A, activations operand B. Tensor core
# instructions have M = 16 and N = 8, so eight rows or fewer take half the work.
SWAP_AB_ROWS = 8
# Up to this many outputs a layer counts as narrow: the layers of S1-mini, not those of S2-Pro.
NARROW = 4608


class Tile(NamedTuple):
    """Block sizes and launch parameters of a matrix product."""

    block_m: int
    block_n: int
    block_k: int  # per K split
    warps: int = 4
    stages: int = 3
    sequential: bool = False  # K splits one after the other instead of interleaved; `linear` only
