"""Attention of prompt tokens over a paged KV cache, several tokens of a sequence per program.

`paged_decode` reads the context once per row: its tiles of sixteen query rows hold only the few heads of one token that
share a KV head. Here a tile holds these heads for several consecutive rows, so that the context is read once for all of
them. Every row goes through the operations of `paged_decode` in the same order, and blocks beyond a row's own length do
not touch its sums, so a token has the same bits in a prefill and in a decode step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.attention.paged_attention import (
    BLOCK_N,
    NUM_SPLITS,
    add_values,
    kv_offset,
    merge_softmax,
    score_keys,
)
from shoal.kernels.jit import (
    HOPPER_SHARED_MEMORY,
    kernel,
    launch_dependents_and_wait,
    next_power_of_two,
    shared_memory_limit,
    supports_pdl,
    tl,
)

# From this many rows on, a tile holds 32 query rows; fewer rows fill the GPU better with tiles of 16. Both are
# distributed over the warps by columns, so the order of sums is the same; with narrower heads than WIDE_COLUMNS the
# larger ones would be distributed by rows. Measured on Hopper, without a quantized KV cache.
WIDE_ROWS = 256
WIDE_COLUMNS = 64


@kernel("rows")
def _prefill_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    slots,
    positions,
    out,
    scale,
    rows,
    QUANTIZED: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    index, d = tl.arange(0, GROUP), tl.arange(0, D)
    row, member = tl.program_id(1) * (GROUP // MEMBERS) + index // MEMBERS, index % MEMBERS
    valid = (row < rows) & (member < HEADS // KV_HEADS)
    # Positions, slots and block tables are uploaded by the host and written by no kernel: no need to wait for them.
    slot = tl.load(slots + row, mask=valid, other=-1)
    length = tl.load(positions + row, mask=valid, other=-1).to(tl.int32) + 1
    if PDL:
        launch_dependents_and_wait()
    head = row * HEADS + kv_head * (HEADS // KV_HEADS) + member
    query = tl.load(q + head[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
    pending = valid.to(tl.int32)
    # One pass per sequence in the tile; most tiles hold one.
    while tl.sum(pending, axis=0) > 0:
        first = tl.min(tl.where(pending > 0, index, GROUP), axis=0)
        current = tl.sum(tl.where(index == first, slot, 0), axis=0)
        mine = (pending > 0) & (slot == current)
        row_length = tl.where(mine, length, 0)
        num_blocks = (row_length + BLOCK_N - 1) // BLOCK_N
        # The split depends on the length alone, as in `paged_decode`.
        blocks_per_split = tl.maximum((num_blocks + NUM_SPLITS - 1) // NUM_SPLITS, 1)
        longest = tl.max(row_length, axis=0)
        table = tables + current * TABLE_WIDTH
        row_max = tl.full((GROUP,), float("-inf"), tl.float32)
        row_sum = tl.zeros((GROUP,), tl.float32)
        acc = tl.zeros((GROUP, D), tl.float32)
        all_max, all_sum, all_acc = row_max, row_sum, acc
        for step in range(0, (longest + BLOCK_N - 1) // BLOCK_N):
            position = step * BLOCK_N + tl.arange(0, BLOCK_N)
            known = position < longest
            offset = kv_offset(table, position, known, kv_head, BLOCK_SIZE, KV_HEADS, D)
            key = tl.load(keys + offset[:, None] + d[None, :], mask=known[:, None], other=0.0)
            score = score_keys(query, key, key_scales, offset, known, scale, QUANTIZED, D)
            score = tl.where(position[None, :] < row_length[:, None], score, float("-inf"))
            # A row whose context has ended keeps its sums: weights of 0, factors of 1.
            live = step < num_blocks
            new_max = tl.where(live, tl.maximum(row_max, tl.max(score, axis=1)), 0.0)
            weight = tl.where(live[:, None], tl.exp(score - new_max[:, None]), 0.0)
            rescale = tl.where(live, tl.exp(row_max - new_max), 1.0)
            row_sum = row_sum * rescale + tl.sum(weight, axis=1)
            value = tl.load(values + offset[:, None] + d[None, :], mask=known[:, None], other=0.0)
            acc = add_values(acc, rescale, weight, value, value_scales, offset, known, query.dtype, QUANTIZED, D)
            row_max = tl.where(live, new_max, row_max)
            ends = live & (((step + 1) % blocks_per_split == 0) | (step + 1 == num_blocks))
            ended_max = tl.where(ends, row_max, 0.0)  # finite: infinities of the other rows would give NaN
            merged_max, merged_sum, merged_acc = merge_softmax(all_max, all_sum, all_acc, ended_max, row_sum, acc)
            all_max, all_sum = tl.where(ends, merged_max, all_max), tl.where(ends, merged_sum, all_sum)
            all_acc = tl.where(ends[:, None], merged_acc, all_acc)
            row_max, row_sum = tl.where(ends, float("-inf"), row_max), tl.where(ends, 0.0, row_sum)
            acc = tl.where(ends[:, None], 0.0, acc)
        result = (all_acc / tl.where(mine, all_sum, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + head[:, None] * D + d[None, :], result, mask=mine[:, None])
        pending = tl.where(mine, 0, pending)


def paged_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    block_n: int = BLOCK_N,
) -> Tensor:
    """Compute `paged_decode` of the same arguments, with the same bits; fast if neighbouring rows share a slot."""
    rows, heads, d = q.shape
    block_size, kv_heads = keys.shape[1:3]
    members = next_power_of_two(heads // kv_heads)
    wide = rows >= WIDE_ROWS and d >= WIDE_COLUMNS and key_scales is None
    wide = wide and shared_memory_limit(q.device) >= HOPPER_SHARED_MEMORY
    group, out, pdl = max(32 if wide else 16, members), torch.empty_like(q), supports_pdl(q.device)
    _prefill_kernel[(kv_heads, -(-rows // (group // members)))](
        q,
        keys,
        values,
        keys if key_scales is None else key_scales,
        values if value_scales is None else value_scales,
        tables,
        slots,
        positions,
        out,
        d**-0.5,
        rows,
        QUANTIZED=key_scales is not None,
        TABLE_WIDTH=tables.shape[1],
        BLOCK_SIZE=block_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        GROUP=group,
        MEMBERS=members,
        BLOCK_N=block_n,
        NUM_SPLITS=NUM_SPLITS,
        PDL=pdl,
        # As in `paged_decode`: the number of warps decides the order of sums.
        num_warps=8 if key_scales is None else 4,
        num_stages=2,
        launch_pdl=pdl,
    )
    return out
