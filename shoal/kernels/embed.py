"""A column of the prompt grid -> the slow transformer's input: eleven look-ups and their sum in one launch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl


def embed_tokens_reference(
    newest: Tensor, slots: Tensor, main_table: Tensor, code_table: Tensor, first: int, last: int, scaled: bool
) -> Tensor:
    """The newest columns [slots, 1 + codebooks] of slots [n] -> [n, dim].

    Codes count only where the main id is a semantic one, in [first, last]; some models scale such columns back.
    """
    columns = newest[slots.long()].long()
    main, codes = columns[:, 0], columns[:, 1:]
    semantic = ((main >= first) & (main <= last))[:, None]
    offset = torch.arange(codes.shape[1], device=codes.device) * (len(code_table) // codes.shape[1])
    x = F.embedding(main, main_table) + F.embedding(codes + offset, code_table).sum(1) * semantic
    return torch.where(semantic, x / math.sqrt(codes.shape[1] + 1), x) if scaled else x


@kernel()
def _embed_kernel(
    newest,
    slots,
    main_table,
    code_table,
    out,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    row = tl.program_id(0)
    if AHEAD:
        launch_dependents_and_wait()
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < DIM
    column = newest + tl.load(slots + row).to(tl.int64) * WIDTH
    main = tl.load(column).to(tl.int64)
    x = tl.load(main_table + main * DIM + d, mask=inside, other=0.0)
    kind = x.dtype
    if (main >= FIRST) & (main <= LAST):
        total = tl.zeros((BLOCK,), tl.float32)
        for codebook in range(0, WIDTH - 1):
            code = tl.load(column + 1 + codebook).to(tl.int64) + codebook * ENTRIES
            total += tl.load(code_table + code * DIM + d, mask=inside, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + total.to(kind).to(tl.float32)).to(kind)
        if SCALED:
            x = (x.to(tl.float32) / tl.sqrt(WIDTH + 0.0)).to(kind)
    tl.store(out + row * DIM + d, x, mask=inside)


def embed_tokens(
    newest: Tensor, slots: Tensor, main_table: Tensor, code_table: Tensor, first: int, last: int, scaled: bool
) -> Tensor:
    """`embed_tokens_reference` in one launch."""
    width, dim, ahead = newest.shape[1], main_table.shape[1], supports_pdl(newest.device)
    block = min(512, next_power_of_two(dim))
    out = main_table.new_empty(len(slots), dim)
    _embed_kernel[(len(slots), -(-dim // block))](
        newest,
        slots,
        main_table,
        code_table,
        out,
        FIRST=first,
        LAST=last,
        ENTRIES=len(code_table) // (width - 1),
        WIDTH=width,
        DIM=dim,
        BLOCK=block,
        SCALED=scaled,
        AHEAD=ahead,
        num_warps=4,
        launch_pdl=ahead,
    )
    return out
