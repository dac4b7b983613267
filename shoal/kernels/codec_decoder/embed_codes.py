"""Latent vectors of code frames: the sum of all codebook lookups of a frame in one launch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import kernel, next_power_of_two, tl


def embed_codes_reference(codes: Tensor, sizes: Tensor, table: Tensor) -> Tensor:
    """Embed codes [F, codebooks] -> [F, dim]; codes beyond the end of their codebook count as its last entry.

    `table` [sum of sizes, dim] has the vectors of all codebooks, which have `sizes` [codebooks] entries.
    """
    rows = torch.minimum(codes.long(), sizes - 1) + sizes.cumsum(0) - sizes
    return F.embedding(rows, table).float().sum(1).to(table.dtype)


@kernel("frame_stride", "book_stride")
def _embed_codes_kernel(
    codes,
    sizes,
    table,
    out,
    frame_stride,
    book_stride,
    BOOKS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    frame = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < DIM
    first = tl.full((), 0, tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for book in tl.static_range(BOOKS):
        size = tl.load(sizes + book)
        row = first + tl.minimum(tl.load(codes + frame * frame_stride + book * book_stride), size - 1)
        total += tl.load(table + row * DIM + d, mask=mask, other=0.0).to(tl.float32)
        first += size
    tl.store(out + frame * DIM + d, total.to(out.dtype.element_ty), mask=mask)


def embed_codes(codes: Tensor, sizes: Tensor, table: Tensor) -> Tensor:
    """Compute `embed_codes_reference` in one launch; codes may have any strides.

    This is the first kernel of a call and launched without PDL, so it starts when the previous call has ended. Later
    kernels may therefore read the state of earlier calls before their grid dependency wait.
    """
    (frames, books), dim = codes.shape, table.shape[1]
    block = min(512, next_power_of_two(dim))
    out = table.new_empty(frames, dim)
    _embed_codes_kernel[(frames, -(-dim // block))](
        codes, sizes, table, out, *codes.stride(), BOOKS=books, DIM=dim, BLOCK=block, num_warps=2
    )
    return out
