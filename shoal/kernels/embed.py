"""Embedding of prompt-grid tokens for the slow transformer: the sum of all lookups of a token in one launch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl


def embed_tokens_reference(
    tokens: Tensor, slots: Tensor, token_table: Tensor, code_table: Tensor, first: int, last: int, scaled: bool
) -> Tensor:
    """Embed tokens [slots, 1 + codebooks] of slots [n] -> [n, dim].

    The codes of a token count only if its id is semantic, in [first, last]. With `scaled`, such embeddings are divided
    by sqrt(codebooks + 1).
    """
    rows = tokens[slots.long()].long()
    ids, codes = rows[:, 0], rows[:, 1:]
    semantic = ((ids >= first) & (ids <= last))[:, None]
    offset = torch.arange(codes.shape[1], device=codes.device) * (len(code_table) // codes.shape[1])
    x = F.embedding(ids, token_table) + F.embedding(codes + offset, code_table).sum(1) * semantic
    return torch.where(semantic, x / math.sqrt(codes.shape[1] + 1), x) if scaled else x


@kernel()
def _embed_kernel(
    tokens,
    slots,
    token_table,
    code_table,
    out,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    CODEBOOK_SIZE: tl.constexpr,
    TOKEN_WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        launch_dependents_and_wait()
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < DIM
    token = tokens + tl.load(slots + row).to(tl.int64) * TOKEN_WIDTH
    token_id = tl.load(token).to(tl.int64)
    x = tl.load(token_table + token_id * DIM + d, mask=mask, other=0.0)
    dtype = x.dtype
    if (token_id >= FIRST) & (token_id <= LAST):
        total = tl.zeros((BLOCK,), tl.float32)
        for codebook in range(0, TOKEN_WIDTH - 1):
            code = tl.load(token + 1 + codebook).to(tl.int64) + codebook * CODEBOOK_SIZE
            total += tl.load(code_table + code * DIM + d, mask=mask, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + total.to(dtype).to(tl.float32)).to(dtype)
        if SCALED:
            x = (x.to(tl.float32) / tl.sqrt(TOKEN_WIDTH + 0.0)).to(dtype)
    tl.store(out + row * DIM + d, x, mask=mask)


def embed_tokens(
    tokens: Tensor, slots: Tensor, token_table: Tensor, code_table: Tensor, first: int, last: int, scaled: bool
) -> Tensor:
    """Compute `embed_tokens_reference` in one launch."""
    width, dim, pdl = tokens.shape[1], token_table.shape[1], supports_pdl(tokens.device)
    block = min(512, next_power_of_two(dim))
    out = token_table.new_empty(len(slots), dim)
    _embed_kernel[(len(slots), -(-dim // block))](
        tokens,
        slots,
        token_table,
        code_table,
        out,
        FIRST=first,
        LAST=last,
        CODEBOOK_SIZE=len(code_table) // (width - 1),
        TOKEN_WIDTH=width,
        DIM=dim,
        BLOCK=block,
        SCALED=scaled,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
