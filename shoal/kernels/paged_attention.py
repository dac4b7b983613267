"""Attention over keys and values that lie in blocks.

Memory is [blocks, size, kv_heads, d]; a table names the blocks of one sequence in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.dequant import dequantize
from shoal.kernels.jit import jit, kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl
from shoal.kernels.kv_quant import dequantize_kv

# Columns at a time. They and the number of warps decide the order of sums, and so are the same for any number of rows.
CHUNK = 128
# Shares of the context of one row and one group of heads, and up to how many rows each has a program of its own.
SHARES = 8
SPREAD_ROWS = 16


def paged_decode_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """One new token per sequence: q [n, heads, d], tables [n, blocks] -> [n, heads, d]; lengths [n] count it.

    Quantised keys and values come with their scales [blocks, size, kv_heads].
    """
    k, v = _gather(keys, key_scales, tables, q.dtype), _gather(values, value_scales, tables, q.dtype)
    visible = torch.arange(k.shape[-2], device=q.device) < lengths[:, None]
    mixed = F.scaled_dot_product_attention(
        q[:, :, None], k, v, attn_mask=visible[:, None, None], enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed.squeeze(-2)


def paged_prefill_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    end: int,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """The last columns of one sequence: q [T, heads, d] up to position end - 1, table [blocks] -> [T, heads, d]"""
    k = _gather(keys, key_scales, table[None], q.dtype)[:, :, :end]
    v = _gather(values, value_scales, table[None], q.dtype)[:, :, :end]
    mask = torch.ones(len(q), end, dtype=torch.bool, device=q.device).tril(end - len(q))
    q = q.transpose(0, 1)[None]
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return mixed[0].transpose(0, 1)


def _gather(memory: Tensor, scales: Tensor | None, tables: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, blocks] of block numbers -> [n, kv_heads, blocks * size, d]"""
    found = memory[tables]
    if scales is not None:
        found = dequantize_kv(found, scales[tables], dtype)
    return found.flatten(1, 2).transpose(1, 2)


@kernel()
def _decode_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    slots,
    positions,
    parts,
    sums,
    tops,
    arrivals,
    out,
    scale,
    QUANTISED: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARES: tl.constexpr,
    SPREAD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    share, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # Where the row is has come from the host, and no kernel touches it.
    length = tl.load(positions + row).to(tl.int32) + 1
    table = tables + tl.load(slots + row) * WIDTH
    chunks = (length + CHUNK - 1) // CHUNK
    each = (chunks + SHARES - 1) // SHARES  # chunks per share, which follow from the length alone
    shares = (chunks + each - 1) // each
    first, last = 0, chunks
    if SPREAD:
        first, last = share * each, tl.minimum(share * each + each, chunks)
    if first < last:  # whoever has nothing to do makes room at once; the first share always has
        if AHEAD:
            launch_dependents_and_wait()
        member = tl.arange(0, GROUP)
        d = tl.arange(0, D)
        mine = member < HEADS // KV_HEADS
        head = row * HEADS + kv_head * (HEADS // KV_HEADS) + member
        query = tl.load(q + head[:, None] * D + d[None, :], mask=mine[:, None], other=0.0)
        top = tl.full((GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        mix = tl.zeros((GROUP, D), tl.float32)
        all_top, all_total, all_mix = top, total, mix
        for chunk in range(first, last):
            column = chunk * CHUNK + tl.arange(0, CHUNK)
            seen = column < length
            block = tl.load(table + column // SIZE, mask=seen, other=0).to(tl.int64)
            place = ((block * SIZE + column % SIZE) * KV_HEADS + kv_head) * D
            key = tl.load(keys + place[:, None] + d[None, :], mask=seen[:, None], other=0.0)
            if QUANTISED:
                key = dequantize(key, query.dtype)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if QUANTISED:
                score *= tl.load(key_scales + place // D, mask=seen, other=0.0).to(tl.float32)[None, :]
            score = tl.where(seen[None, :], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, axis=1))
            weight = tl.exp(score - higher[:, None])
            shrink = tl.exp(top - higher)
            value = tl.load(values + place[:, None] + d[None, :], mask=seen[:, None], other=0.0)
            total = total * shrink + tl.sum(weight, axis=1)
            if QUANTISED:
                value = dequantize(value, query.dtype)
                weight *= tl.load(value_scales + place // D, mask=seen, other=0.0).to(tl.float32)[None, :]
            mix = tl.dot(weight.to(value.dtype), value, mix * shrink[:, None], input_precision="ieee")
            top = higher
            if not SPREAD:  # noqa: SIM102 - known when compiled, the other only when run
                # One program goes through all shares, and adds them up as the last of several would.
                if ((chunk + 1) % each == 0) | (chunk + 1 == chunks):
                    all_top, all_total, all_mix = _merged(all_top, all_total, all_mix, top, total, mix)
                    top = tl.full((GROUP,), float("-inf"), tl.float32)
                    total = tl.zeros((GROUP,), tl.float32)
                    mix = tl.zeros((GROUP, D), tl.float32)
        done = not SPREAD
        if SPREAD:
            done = shares == 1
            if done:
                all_top, all_total, all_mix = _merged(all_top, all_total, all_mix, top, total, mix)
            else:
                part = head * SHARES + share
                tl.store(parts + part[:, None] * D + d[None, :], mix, mask=mine[:, None])
                tl.store(sums + part, total, mask=mine)
                tl.store(tops + part, top, mask=mine)
                # Whoever comes last adds up, always in the same order. All of this program has to be written before it
                # says that it came.
                tl.debug_barrier()
                arrived = tl.atomic_add(arrivals + row * KV_HEADS + kv_head, 1, sem="acq_rel")
                done = arrived == shares - 1
                if done:
                    # All are asked for at once; those that are not there add nothing.
                    nothing = tl.where(mine, float("-inf"), 0.0)
                    for other in tl.static_range(SHARES):
                        found, there = head * SHARES + other, mine & (other < shares)
                        where = found[:, None] * D + d[None, :]
                        its_top = tl.load(tops + found, mask=there, other=nothing, cache_modifier=".cg")
                        its_total = tl.load(sums + found, mask=there, other=1.0, cache_modifier=".cg")
                        its_mix = tl.load(parts + where, mask=there[:, None], other=0.0, cache_modifier=".cg")
                        all_top, all_total, all_mix = _merged(all_top, all_total, all_mix, its_top, its_total, its_mix)
                    tl.store(arrivals + row * KV_HEADS + kv_head, 0)
        if done:
            mixed = (all_mix / all_total[:, None]).to(out.dtype.element_ty)
            tl.store(out + head[:, None] * D + d[None, :], mixed, mask=mine[:, None])


@jit
def _merged(top, total, mix, its_top, its_total, its_mix):
    """Two parts of a softmax as one."""
    higher = tl.maximum(top, its_top)
    shrink, weight = tl.exp(top - higher), tl.exp(its_top - higher)
    return higher, total * shrink + its_total * weight, mix * shrink[:, None] + its_mix * weight[:, None]


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Where the programs that share a row's context leave what they found; reused by every layer and step."""

    parts: Tensor
    sums: Tensor
    tops: Tensor
    arrivals: Tensor  # all zero between two launches

    @classmethod
    def allocate(cls, rows: int, heads: int, kv_heads: int, d: int, device: torch.device) -> DecodeWorkspace:
        sums = torch.empty(rows, heads, SHARES, dtype=torch.float32, device=device)
        parts = torch.empty(rows, heads, SHARES, d, dtype=torch.float32, device=device)
        arrivals = torch.zeros(rows, kv_heads, dtype=torch.int32, device=device)
        return cls(parts, sums, torch.empty_like(sums), arrivals)


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    space: DecodeWorkspace | None = None,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """`paged_decode_reference` on a GPU, for any columns whose keys and values are in memory: row i is column
    positions[i] of slot slots[i], and sees all columns up to itself by way of tables [slots, blocks].

    A row's context is cut into shares, which are added up in order. Few rows give each share to a program of its own,
    many rows one program to all of them; how it is cut depends on the row's length alone, so its result does not
    depend on who is in the batch.
    """
    rows, heads, d = q.shape
    size, kv_heads = keys.shape[1:3]
    space = space or DecodeWorkspace.allocate(rows, heads, kv_heads, d, q.device)
    out = torch.empty_like(q)
    ahead, spread = supports_pdl(q.device), rows <= SPREAD_ROWS
    _decode_kernel[(SHARES if spread else 1, kv_heads, rows)](
        q,
        keys,
        values,
        keys if key_scales is None else key_scales,
        values if value_scales is None else value_scales,
        tables,
        slots,
        positions,
        space.parts,
        space.sums,
        space.tops,
        space.arrivals,
        out,
        d**-0.5,
        QUANTISED=key_scales is not None,
        WIDTH=tables.shape[1],
        SIZE=size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        GROUP=max(16, next_power_of_two(heads // kv_heads)),
        CHUNK=chunk,
        SHARES=SHARES,
        SPREAD=spread,
        AHEAD=ahead,
        num_warps=8 if key_scales is None else 4,
        num_stages=2,
        launch_pdl=ahead,
    )
    return out
