"""Attention of the codec's transformer: every step sees the last `window` steps of its own stream.

Keys and values of a stream lie in a ring [slots, ring, heads, d]: step p at place p % ring. The ring is longer than
the window by the most steps that come at once, so what is written never covers what is still looked at. Keys are kept
rotated, the even dimensions before the odd ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import kernel, launch_dependents_and_wait, supports_pdl, tl
from shoal.kernels.packing import Packing
from shoal.kernels.rope import rotate

# Steps of one stream at once. Of one size for all: how a row is added up follows the shape of the block.
MAX_STEPS = 32


def window_attention_reference(
    qkv: Tensor, rope: Tensor, seen: Tensor, packing: Packing, keys: Tensor, values: Tensor, window: int
) -> Tensor:
    """qkv [F, 3 heads d] of streams that have `seen` [slots] steps -> [F, heads d]; keys and values are kept."""
    outs = []
    for slot, start, count in packing.streams():
        new, ring, d = qkv[start : start + max(1, count)], keys.shape[1], keys.shape[3]
        position = seen[slot] + torch.arange(len(new), device=qkv.device)
        q, k, v = new.unflatten(-1, (3, -1, d)).unbind(1)
        q, k = rotate(q, rope[position]), rotate(k, rope[position])
        keys[slot, position % ring] = k.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        values[slot, position % ring] = v
        before = position[0] + torch.arange(1 - window, len(new), device=qkv.device)
        kept = keys[slot, before % ring].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        apart = position[:, None] - before[None, :]
        mask = (apart >= 0) & (apart < window) & (before >= 0)
        mixed = values[slot, before % ring]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), kept.transpose(0, 1), mixed.transpose(0, 1), attn_mask=mask
        )
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
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    AHEAD: tl.constexpr,
):
    frame, head = tl.program_id(0), tl.program_id(1)
    if AHEAD:
        launch_dependents_and_wait()
    if tl.load(starts + frame) == frame:  # the first of its stream, for all of it
        kind = qkv.dtype.element_ty
        D: tl.constexpr = 2 * HALF
        length = tl.maximum(tl.load(counts + frame), 1)
        slot = tl.load(slots + frame).to(tl.int64)
        first = tl.load(seen + slot).to(tl.int32)
        new = tl.arange(0, BLOCK)
        real = (new < length)[:, None]
        pair, d = tl.arange(0, PAIRS), tl.arange(0, D)
        turned = real & (pair < HALF)[None, :]
        position = first + new
        angle = rope + position[:, None] * D + 2 * pair[None, :]
        cos, sin = tl.load(angle, mask=turned, other=0.0), tl.load(angle + 1, mask=turned, other=0.0)
        mine = qkv + (frame + new)[:, None] * (3 * HEADS * D) + head * D
        a = tl.load(mine + 2 * pair[None, :], mask=turned, other=0.0).to(tl.float32)
        b = tl.load(mine + 2 * pair[None, :] + 1, mask=turned, other=0.0).to(tl.float32)
        query_even, query_odd = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
        mine += HEADS * D
        a = tl.load(mine + 2 * pair[None, :], mask=turned, other=0.0).to(tl.float32)
        b = tl.load(mine + 2 * pair[None, :] + 1, mask=turned, other=0.0).to(tl.float32)
        place = ((slot * RING + position % RING) * HEADS + head)[:, None] * D
        tl.store(keys + place + pair[None, :], (a * cos - b * sin).to(kind), mask=turned)
        tl.store(keys + place + HALF + pair[None, :], (b * cos + a * sin).to(kind), mask=turned)
        value = tl.load(mine + HEADS * D + d[None, :], mask=real, other=0.0)
        tl.store(values + place + d[None, :], value, mask=real)
        # The new keys are looked at like all others: by the same program, once they are written.
        tl.debug_barrier()
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        mix = tl.zeros((BLOCK, D), tl.float32)
        # From a multiple of the step, so that what is added up in which order does not depend on how the stream is cut.
        for begin in range(tl.maximum(first - WINDOW + 1, 0) // STEP * STEP, first + length, STEP):
            step = begin + tl.arange(0, STEP)
            there = step < first + length
            known = there[:, None] & (pair < HALF)[None, :]
            kept = ((slot * RING + step % RING) * HEADS + head)[:, None] * D
            key_even = tl.load(keys + kept + pair[None, :], mask=known, other=0.0)
            key_odd = tl.load(keys + kept + HALF + pair[None, :], mask=known, other=0.0)
            score = tl.dot(query_even, tl.trans(key_even), input_precision="ieee")
            score = tl.dot(query_odd, tl.trans(key_odd), score, input_precision="ieee") * scale
            apart = position[:, None] - step[None, :]
            # Rows that only fill up the block see everything: what comes of them is not stored, but must be a number.
            visible = there[None, :] & (((apart >= 0) & (apart < WINDOW)) | (new >= length)[:, None])
            score = tl.where(visible, score, float("-inf"))
            higher = tl.maximum(tl.maximum(top, tl.max(score, axis=1)), -1e30)
            weight = tl.exp(score - higher[:, None])
            shrink = tl.exp(top - higher)
            mixed = tl.load(values + kept + d[None, :], mask=there[:, None], other=0.0)
            mix = tl.dot(weight.to(kind), mixed, mix * shrink[:, None], input_precision="ieee")
            total = total * shrink + tl.sum(weight, axis=1)
            top = higher
        target = out + (frame + new)[:, None] * (HEADS * D) + head * D + d[None, :]
        tl.store(target, (mix / total[:, None]).to(kind), mask=real)


def window_attention(
    qkv: Tensor, rope: Tensor, seen: Tensor, packing: Packing, keys: Tensor, values: Tensor, window: int
) -> Tensor:
    """`window_attention_reference` in one launch, for streams of at most MAX_STEPS steps each."""
    ring, heads, d = keys.shape[1:]
    assert ring >= window - 1 + MAX_STEPS, "the ring is too short for so many steps at once"
    out, ahead = qkv.new_empty(len(qkv), heads * d), supports_pdl(qkv.device)
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
        BLOCK=MAX_STEPS,
        STEP=32,
        AHEAD=ahead,
        num_warps=4,
        launch_pdl=ahead,
    )
    return out
