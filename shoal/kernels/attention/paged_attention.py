"""Attention over a paged KV cache, with flash-decoding splits of the context.

The cache is [blocks, block_size, kv_heads, d]; a block table lists the blocks of one sequence in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.attention.grouped_attention import grouped_attention
from shoal.kernels.attention.kv_quant import dequantize_kv
from shoal.kernels.dequant import dequantize
from shoal.kernels.jit import (
    HOPPER_SHARED_MEMORY,
    jit,
    kernel,
    launch_dependents_and_wait,
    multiprocessor_count,
    next_power_of_two,
    shared_memory_limit,
    supports_pdl,
    tl,
)

# Tokens per iteration. It and the number of warps decide the order of sums, so neither depends on the batch size.
BLOCK_N = 128
# Maximum number of context splits per row and KV head (flash-decoding).
NUM_SPLITS = 8
# Up to this many rows each split has a program of its own; more rows fill the GPU with one program per row and KV head.
SPLIT_ROWS = 16
# Programs per split when prefetching. Each loads all keys and its D / PARTS columns of the values, which leaves room on
# the multiprocessor for the next linear layer to prefetch its weights.
PARTS = 2
# Minimum columns of a part: narrower ones would have another warp layout, which sums softmax weights in another order.
MIN_PART = 32
# From this many rows on, three programs per multiprocessor (80 registers per thread) are faster than two (108).
HIGH_OCCUPANCY_ROWS = 128
HIGH_OCCUPANCY_REGISTERS = 80


def paged_decode_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend with one new token per sequence: q [n, heads, d], block tables [n, blocks] -> [n, heads, d].

    lengths [n] include the new token. Quantized keys and values have scales [blocks, block_size, kv_heads]. `mask` is
    `decode_mask` of the lengths, for callers that attend more than once.
    """
    k, v = _gather(keys, key_scales, tables, q.dtype), _gather(values, value_scales, tables, q.dtype)
    mask = decode_mask(lengths, k.shape[-2], q.dtype) if mask is None else mask
    if q.device.type != "cpu":
        return grouped_decode(q, k, v, mask)
    out = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(-2)


def decode_mask(lengths: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the mask [n, 1, 1, width] of sequences with `lengths` [n] visible tokens: boolean, or a bias on a GPU."""
    visible = (torch.arange(width, device=lengths.device) < lengths[:, None])[:, None, None]
    if lengths.device.type == "cpu":
        return visible
    # Given a boolean mask, the operator would compute this bias in every layer.
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)


def grouped_decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend with q [n, heads, d] over k, v [n, kv_heads, width, d] -> [n, heads, d].

    The query heads that share a key head become rows of one query, so that keys and values are not repeated.
    """
    groups = q.unflatten(1, (k.shape[1], -1))
    return F.scaled_dot_product_attention(groups, k, v, attn_mask=mask).flatten(1, 2)


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
    """Attend causally with the last T tokens of one sequence, up to position end - 1.

    q [T, heads, d], block table [blocks] -> [T, heads, d]
    """
    mask = torch.ones(len(q), end, dtype=torch.bool, device=q.device).tril(end - len(q))
    return masked_prefill(q, keys, values, table, mask, key_scales=key_scales, value_scales=value_scales)


def masked_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    mask: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Attend with q [T, heads, d] over the first tokens of one sequence that mask [T, width] makes visible."""
    width = mask.shape[1]
    k = _gather(keys, key_scales, table[None], q.dtype)[:, :, :width]
    v = _gather(values, value_scales, table[None], q.dtype)[:, :, :width]
    if q.device.type != "cpu":
        return grouped_prefill(q, k, v, mask)
    q = q.transpose(0, 1)[None]
    return grouped_attention(q, k, v, mask)[0].transpose(0, 1)


def grouped_prefill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend with q [T, heads, d] over k, v [1, kv_heads, width, d], given mask [T, width] -> [T, heads, d].

    As in `grouped_decode`. With a mask, `enable_gqa` falls back to an implementation that stores all scores in fp32,
    except on Hopper and with recent versions of torch: 2 GB for 512 tokens of S2-Pro at the end of its context.
    """
    group = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)[None]
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask.repeat(group, 1))[0]
    return out.unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2)


def _gather(cache: Tensor, scales: Tensor | None, tables: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather the blocks of tables [n, blocks] -> [n, kv_heads, blocks * block_size, d]."""
    found = cache[tables]
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
    split_out,
    split_sum,
    split_max,
    arrivals,
    out,
    scale,
    QUANTIZED: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    # The parts of a split compute the same softmax weights, each for its own columns of the output.
    split, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    kv_head, row = tl.program_id(1), tl.program_id(2)
    # Positions, slots and block tables are uploaded by the host and written by no kernel: no need to wait for them.
    length = tl.load(positions + row).to(tl.int32) + 1
    table = tables + tl.load(slots + row) * TABLE_WIDTH
    num_blocks = (length + BLOCK_N - 1) // BLOCK_N
    # The split depends on the length alone, never on the batch.
    blocks_per_split = (num_blocks + NUM_SPLITS - 1) // NUM_SPLITS
    num_splits = (num_blocks + blocks_per_split - 1) // blocks_per_split
    first, last = 0, num_blocks
    if SPLIT:
        first, last = split * blocks_per_split, tl.minimum(split * blocks_per_split + blocks_per_split, num_blocks)
    if first < last:  # programs of empty splits exit at once; split 0 is never empty
        member = tl.arange(0, GROUP)
        d = tl.arange(0, D)
        PART: tl.constexpr = D // PARTS
        value_d = part * PART + tl.arange(0, PART)
        start = first
        if PREFETCH:
            # Earlier frames have written all keys and values but the newest: prefetch the first block before the wait.
            position = first * BLOCK_N + tl.arange(0, BLOCK_N)
            visible, newest = position < length, (position == length - 1)[:, None]
            offset = kv_offset(table, position, visible, kv_head, BLOCK_SIZE, KV_HEADS, D)
            newest_offset = kv_offset(table, length - 1, True, kv_head, BLOCK_SIZE, KV_HEADS, D)
            earlier = (position < length - 1)[:, None]
            key = tl.load(keys + offset[:, None] + d[None, :], mask=earlier, other=0.0)
            value = tl.load(values + offset[:, None] + value_d[None, :], mask=earlier, other=0.0)
            start += 1
        if PDL:
            launch_dependents_and_wait()
        head_mask = member < HEADS // KV_HEADS
        head = row * HEADS + kv_head * (HEADS // KV_HEADS) + member
        query = tl.load(q + head[:, None] * D + d[None, :], mask=head_mask[:, None], other=0.0)
        row_max = tl.full((GROUP,), float("-inf"), tl.float32)
        row_sum = tl.zeros((GROUP,), tl.float32)
        acc = tl.zeros((GROUP, PART), tl.float32)
        all_max, all_sum, all_acc = row_max, row_sum, acc
        if PREFETCH:
            key = tl.where(newest, tl.load(keys + newest_offset + d)[None, :], key)
            value = tl.where(newest, tl.load(values + newest_offset + value_d)[None, :], value)
            row_max, row_sum, acc = attend_block(
                query, key, value, key_scales, value_scales, offset, visible, scale, row_max, row_sum, acc, QUANTIZED, D
            )
        for index in range(start, last):
            position = index * BLOCK_N + tl.arange(0, BLOCK_N)
            visible = position < length
            offset = kv_offset(table, position, visible, kv_head, BLOCK_SIZE, KV_HEADS, D)
            key = tl.load(keys + offset[:, None] + d[None, :], mask=visible[:, None], other=0.0)
            value = tl.load(values + offset[:, None] + value_d[None, :], mask=visible[:, None], other=0.0)
            row_max, row_sum, acc = attend_block(
                query, key, value, key_scales, value_scales, offset, visible, scale, row_max, row_sum, acc, QUANTIZED, D
            )
            if not SPLIT:  # noqa: SIM102 - a compile-time condition around a run-time one
                # One program computes all splits and merges them in the order of the split launch.
                if ((index + 1) % blocks_per_split == 0) | (index + 1 == num_blocks):
                    all_max, all_sum, all_acc = merge_softmax(all_max, all_sum, all_acc, row_max, row_sum, acc)
                    row_max = tl.full((GROUP,), float("-inf"), tl.float32)
                    row_sum = tl.zeros((GROUP,), tl.float32)
                    acc = tl.zeros((GROUP, PART), tl.float32)
        done = not SPLIT
        if SPLIT:
            done = num_splits == 1
            if done:
                all_max, all_sum, all_acc = merge_softmax(all_max, all_sum, all_acc, row_max, row_sum, acc)
            else:
                mine = head * NUM_SPLITS + split
                tl.store(split_out + mine[:, None] * D + value_d[None, :], acc, mask=head_mask[:, None])
                tl.store(split_sum + mine, row_sum, mask=head_mask)  # every part stores the same
                tl.store(split_max + mine, row_max, mask=head_mask)
                # The last CTA of a part to arrive reduces its splits in a fixed order, so the result is deterministic.
                # The barrier orders all stores of this CTA before its arrival.
                tl.debug_barrier()
                arrival = arrivals + (row * KV_HEADS + kv_head) * PARTS + part
                arrived = tl.atomic_add(arrival, 1, sem="acq_rel")
                done = arrived == num_splits - 1
                if done:
                    all_max, all_sum, all_acc = reduce_splits(
                        split_out,
                        split_sum,
                        split_max,
                        head,
                        head_mask,
                        value_d,
                        num_splits,
                        all_max,
                        all_sum,
                        all_acc,
                        NUM_SPLITS,
                        D,
                    )
                    tl.store(arrival, 0)
        if done:
            result = (all_acc / all_sum[:, None]).to(out.dtype.element_ty)
            tl.store(out + head[:, None] * D + value_d[None, :], result, mask=head_mask[:, None])


@jit
def kv_offset(table, position, known, kv_head, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr):
    """Return the offsets of the keys at `position`, and of their values, in the cache."""
    block = tl.load(table + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
    return ((block * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + kv_head) * D


@jit
def attend_block(
    query,
    key,
    value,
    key_scales,
    value_scales,
    offset,
    visible,
    scale,
    row_max,
    row_sum,
    acc,
    QUANTIZED: tl.constexpr,
    D: tl.constexpr,
):
    """Add a block of keys and values [BLOCK_N, D] to the online softmax of the query rows."""
    score = score_keys(query, key, key_scales, offset, visible, scale, QUANTIZED, D)
    score = tl.where(visible[None, :], score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, axis=1))
    weight = tl.exp(score - new_max[:, None])
    rescale = tl.exp(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weight, axis=1)
    acc = add_values(acc, rescale, weight, value, value_scales, offset, visible, query.dtype, QUANTIZED, D)
    return new_max, row_sum, acc


@jit
def score_keys(query, key, key_scales, offset, known, scale, QUANTIZED: tl.constexpr, D: tl.constexpr):
    """Return the scores of a block of keys [BLOCK_N, D]."""
    if QUANTIZED:
        key = dequantize(key, query.dtype)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if QUANTIZED:
        score *= tl.load(key_scales + offset // D, mask=known, other=0.0).to(tl.float32)[None, :]
    return score


@jit
def add_values(
    acc,
    rescale,
    weight,
    value,
    value_scales,
    offset,
    known,
    dtype: tl.constexpr,
    QUANTIZED: tl.constexpr,
    D: tl.constexpr,
):
    """Return acc * rescale plus a block of values [BLOCK_N, D], weighted."""
    if QUANTIZED:
        value = dequantize(value, dtype)
        weight *= tl.load(value_scales + offset // D, mask=known, other=0.0).to(tl.float32)[None, :]
    return tl.dot(weight.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")


@jit
def reduce_splits(
    split_out,
    split_sum,
    split_max,
    head,
    head_mask,
    value_d,
    num_splits,
    all_max,
    all_sum,
    all_acc,
    NUM_SPLITS: tl.constexpr,
    D: tl.constexpr,
):
    """Merge the stored partial results of a row's splits in order, in the columns `value_d`."""
    # Unrolled, so that all loads are in flight at once; missing splits contribute nothing.
    nothing = tl.where(head_mask, float("-inf"), 0.0)
    for other in tl.static_range(NUM_SPLITS):
        theirs, mask = head * NUM_SPLITS + other, head_mask & (other < num_splits)
        out_offset = theirs[:, None] * D + value_d[None, :]
        other_max = tl.load(split_max + theirs, mask=mask, other=nothing, cache_modifier=".cg")
        other_sum = tl.load(split_sum + theirs, mask=mask, other=1.0, cache_modifier=".cg")
        other_acc = tl.load(split_out + out_offset, mask=mask[:, None], other=0.0, cache_modifier=".cg")
        all_max, all_sum, all_acc = merge_softmax(all_max, all_sum, all_acc, other_max, other_sum, other_acc)
    return all_max, all_sum, all_acc


@jit
def merge_softmax(row_max, row_sum, acc, other_max, other_sum, other_acc):
    """Merge two partial softmax results (online softmax)."""
    new_max = tl.maximum(row_max, other_max)
    rescale, weight = tl.exp(row_max - new_max), tl.exp(other_max - new_max)
    return new_max, row_sum * rescale + other_sum * weight, acc * rescale[:, None] + other_acc * weight[:, None]


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Scratch memory for the partial results of context splits; reused by every layer and step."""

    split_out: Tensor
    split_sum: Tensor
    split_max: Tensor
    arrivals: Tensor  # all zero between launches

    @classmethod
    def allocate(cls, rows: int, heads: int, kv_heads: int, d: int, device: torch.device) -> DecodeWorkspace:
        split_sum = torch.empty(rows, heads, NUM_SPLITS, dtype=torch.float32, device=device)
        split_out = torch.empty(rows, heads, NUM_SPLITS, d, dtype=torch.float32, device=device)
        arrivals = torch.zeros(rows, kv_heads, PARTS, dtype=torch.int32, device=device)
        return cls(split_out, split_sum, torch.empty_like(split_sum), arrivals)


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    workspace: DecodeWorkspace | None = None,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    block_n: int = BLOCK_N,
) -> Tensor:
    """Attend with q [n, heads, d] over the paged KV cache -> [n, heads, d]. The GPU counterpart of both references.

    Row i is the token at positions[i] of slot slots[i] and sees all positions up to its own through the block tables
    [slots, blocks]; its key and value must already be in the cache.

    The context of a row is split, and the splits are merged in order. Few rows give each split a program of its own,
    many rows compute all splits in one program. The split depends on the row's length alone, so results are batch
    invariant.
    """
    rows, heads, d = q.shape
    block_size, kv_heads = keys.shape[1:3]
    workspace = workspace or DecodeWorkspace.allocate(rows, heads, kv_heads, d, q.device)
    out = torch.empty_like(q)
    pdl, split = supports_pdl(q.device), rows <= SPLIT_ROWS
    # Prefetch only with at most one split (PARTS programs) per multiprocessor: the block takes most of its registers.
    prefetch = split and q.element_size() == 2 and rows * kv_heads * NUM_SPLITS <= multiprocessor_count(q.device)
    parts = PARTS if prefetch and d >= MIN_PART * PARTS else 1
    occupancy = rows >= HIGH_OCCUPANCY_ROWS and shared_memory_limit(q.device) >= HOPPER_SHARED_MEMORY
    _decode_kernel[(NUM_SPLITS * parts if split else 1, kv_heads, rows)](
        q,
        keys,
        values,
        keys if key_scales is None else key_scales,
        values if value_scales is None else value_scales,
        tables,
        slots,
        positions,
        workspace.split_out,
        workspace.split_sum,
        workspace.split_max,
        workspace.arrivals,
        out,
        d**-0.5,
        QUANTIZED=key_scales is not None,
        TABLE_WIDTH=tables.shape[1],
        BLOCK_SIZE=block_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        GROUP=max(16, next_power_of_two(heads // kv_heads)),
        BLOCK_N=block_n,
        NUM_SPLITS=NUM_SPLITS,
        SPLIT=split,
        PARTS=parts,
        PREFETCH=prefetch,
        PDL=pdl,
        num_warps=8 if key_scales is None else 4,
        num_stages=2,
        maxnreg=HIGH_OCCUPANCY_REGISTERS if occupancy and key_scales is None else None,
        launch_pdl=pdl,
    )
    return out
