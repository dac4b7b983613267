"""Sliding-window attention of the codec's transformer: every step sees the last `window` steps of its own stream.

Keys and values of a stream are in a ring buffer [slots, heads, ring, d], step p at index p % ring, so a program reads
contiguous memory. The ring holds window - 1 + MAX_STEPS steps, so new steps never overwrite keys that are still
visible. Keys are stored after RoPE, with the even dimensions before the odd ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.codec_decoder.packing import Packing
from shoal.kernels.jit import kernel, launch_dependents_and_wait, supports_pdl, tl
from shoal.kernels.rope import rotate

# Maximum steps of one stream per call. The block size is fixed, because the order of sums follows from it.
MAX_STEPS = 32


def window_attention_reference(
    qkv: Tensor, rope: Tensor, seen: Tensor, packing: Packing, keys: Tensor, values: Tensor, window: int
) -> Tensor:
    """Attend with qkv [F, 3 heads d] of streams that have seen [slots] steps -> [F, heads d].

    Writes the new keys and values to the ring buffers.
    """
    outs = []
    for slot, start, count in packing.streams():
        new, (_, ring, d) = qkv[start : start + max(1, count)], keys.shape[1:]
        position = seen[slot] + torch.arange(len(new), device=qkv.device)
        q, k, v = new.unflatten(-1, (3, -1, d)).unbind(1)
        q, k = rotate(q, rope[position]), rotate(k, rope[position])
        k = k.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        keys[slot, :, position % ring], values[slot, :, position % ring] = k.transpose(0, 1), v.transpose(0, 1)
        key_position = position[0] + torch.arange(1 - window, len(new), device=qkv.device)
        key = keys[slot, :, key_position % ring].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        distance = position[:, None] - key_position[None, :]
        mask = (distance >= 0) & (distance < window) & (key_position >= 0)
        value = values[slot, :, key_position % ring]
        out = F.scaled_dot_product_attention(q.transpose(0, 1), key, value, attn_mask=mask)
        outs.append(out.transpose(0, 1).flatten(1))
    return torch.cat(outs)


@kernel()
def _window_kernel(
    qkv,
    rope,
    seen,
    slots,
    starts,
    counts,
    keys,
    values,
    out,
    scale,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    frame, head = tl.program_id(0), tl.program_id(1)
    # The host uploads the packing, and only `count_steps`, the last kernel of a call, writes `seen`: no need to wait.
    start, length = tl.load(starts + frame), tl.maximum(tl.load(counts + frame), 1)
    slot = tl.load(slots + frame).to(tl.int64)
    first = tl.load(seen + slot).to(tl.int32)
    if PDL:
        launch_dependents_and_wait()
    if start == frame:  # the program of a stream's first frame computes the whole stream
        dtype = qkv.dtype.element_ty
        D: tl.constexpr = 2 * HALF
        new = tl.arange(0, BLOCK_M)
        row_mask = (new < length)[:, None]
        pair, d = tl.arange(0, PAIRS), tl.arange(0, D)
        pair_mask = row_mask & (pair < HALF)[None, :]
        position = first + new
        angle = rope + position[:, None] * D + 2 * pair[None, :]
        cos, sin = tl.load(angle, mask=pair_mask, other=0.0), tl.load(angle + 1, mask=pair_mask, other=0.0)
        qkv_ptrs = qkv + (frame + new)[:, None] * (3 * HEADS * D) + head * D
        even = tl.load(qkv_ptrs + 2 * pair[None, :], mask=pair_mask, other=0.0).to(tl.float32)
        odd = tl.load(qkv_ptrs + 2 * pair[None, :] + 1, mask=pair_mask, other=0.0).to(tl.float32)
        query_even, query_odd = (even * cos - odd * sin).to(dtype), (odd * cos + even * sin).to(dtype)
        qkv_ptrs += HEADS * D
        even = tl.load(qkv_ptrs + 2 * pair[None, :], mask=pair_mask, other=0.0).to(tl.float32)
        odd = tl.load(qkv_ptrs + 2 * pair[None, :] + 1, mask=pair_mask, other=0.0).to(tl.float32)
        ring = (slot * HEADS + head) * RING * D
        offset = ring + (position % RING)[:, None] * D
        tl.store(keys + offset + pair[None, :], (even * cos - odd * sin).to(dtype), mask=pair_mask)
        tl.store(keys + offset + HALF + pair[None, :], (odd * cos + even * sin).to(dtype), mask=pair_mask)
        new_value = tl.load(qkv_ptrs + HEADS * D + d[None, :], mask=row_mask, other=0.0)
        tl.store(values + offset + d[None, :], new_value, mask=row_mask)
        # The same program reads the new keys and values back from the ring.
        tl.debug_barrier()
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, D), tl.float32)
        # Starts at a multiple of BLOCK_N, so that the order of sums does not depend on how the stream is chunked.
        for begin in range(tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N, first + length, BLOCK_N):
            step = begin + tl.arange(0, BLOCK_N)
            step_mask = step < first + length
            key_mask = step_mask[:, None] & (pair < HALF)[None, :]
            key_offset = ring + (step % RING)[:, None] * D
            key_even = tl.load(keys + key_offset + pair[None, :], mask=key_mask, other=0.0)
            key_odd = tl.load(keys + key_offset + HALF + pair[None, :], mask=key_mask, other=0.0)
            score = tl.dot(query_even, tl.trans(key_even), input_precision="ieee")
            score = tl.dot(query_odd, tl.trans(key_odd), score, input_precision="ieee") * scale
            distance = position[:, None] - step[None, :]
            # Padding rows see all steps: their result is not stored, but must not be NaN.
            visible = step_mask[None, :] & (((distance >= 0) & (distance < WINDOW)) | (new >= length)[:, None])
            score = tl.where(visible, score, float("-inf"))
            new_max = tl.maximum(tl.maximum(row_max, tl.max(score, axis=1)), -1e30)
            weight = tl.exp(score - new_max[:, None])
            rescale = tl.exp(row_max - new_max)
            value = tl.load(values + key_offset + d[None, :], mask=step_mask[:, None], other=0.0)
            acc = tl.dot(weight.to(dtype), value, acc * rescale[:, None], input_precision="ieee")
            row_sum = row_sum * rescale + tl.sum(weight, axis=1)
            row_max = new_max
        out_ptrs = out + (frame + new)[:, None] * (HEADS * D) + head * D + d[None, :]
        tl.store(out_ptrs, (acc / row_sum[:, None]).to(dtype), mask=row_mask)


def window_attention(
    qkv: Tensor, rope: Tensor, seen: Tensor, packing: Packing, keys: Tensor, values: Tensor, window: int
) -> Tensor:
    """Compute `window_attention_reference` in one launch, for streams of at most MAX_STEPS steps each."""
    heads, ring, d = keys.shape[1:]
    assert ring >= window - 1 + MAX_STEPS, "the ring buffer is too short for MAX_STEPS new steps"
    out, pdl = qkv.new_empty(len(qkv), heads * d), supports_pdl(qkv.device)
    _window_kernel[(len(qkv), heads)](
        qkv,
        rope,
        seen,
        packing.slots,
        packing.starts,
        packing.counts,
        keys,
        values,
        out,
        d**-0.5,
        WINDOW=window,
        RING=ring,
        HEADS=heads,
        HALF=d // 2,
        PAIRS=max(16, d // 2),
        BLOCK_M=MAX_STEPS,
        BLOCK_N=32,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def count_steps_reference(seen: Tensor, packing: Packing) -> None:
    """Add the frames of every stream to the steps that its slot has seen."""
    seen.index_add_(0, packing.slots.long(), (packing.counts > 0).long())


@kernel("frames")
def _count_steps_kernel(seen, slots, starts, counts, frames, BLOCK: tl.constexpr, PDL: tl.constexpr):
    frame = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = frame < frames
    start, count = tl.load(starts + frame, mask=inside), tl.load(counts + frame, mask=inside, other=0)
    slot, mask = tl.load(slots + frame, mask=inside, other=0), inside & (start == frame) & (count > 0)
    if PDL:
        launch_dependents_and_wait()
    tl.store(seen + slot, tl.load(seen + slot, mask=mask) + count, mask=mask)


def count_steps(seen: Tensor, packing: Packing) -> None:
    """Compute `count_steps_reference` in one launch. A slot has at most one stream per call, the spare slot none."""
    frames, block, pdl = len(packing.slots), 128, supports_pdl(seen.device)
    _count_steps_kernel[(-(-frames // block),)](
        seen,
        packing.slots,
        packing.starts,
        packing.counts,
        frames,
        BLOCK=block,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
