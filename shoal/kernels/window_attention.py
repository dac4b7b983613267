"""Attention of the codec's transformer: every step sees the last `window` steps of its own stream.

Keys and values of a stream lie in a ring [slots, ring, heads, d]: step p at place p % ring. The ring is longer than
the window by the most steps that come at once, so what is written never covers what is still looked at. Keys are kept
rotated, the even dimensions before the odd ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import await_previous, jit_for_any, next_power_of_two, runs_ahead, tl
from shoal.kernels.rope import rotate


def window_attention_reference(
    qkv: Tensor, rope: Tensor, seen: Tensor, slots: Tensor, keys: Tensor, values: Tensor, window: int
) -> Tensor:
    """qkv [n, T, 3 heads d] of streams that have `seen` [slots] steps -> [n, T, heads d]; keys and values are kept."""
    slots, ring, d = slots.long(), keys.shape[1], keys.shape[3]
    count, length = qkv.shape[:2]
    position = seen[slots][:, None] + torch.arange(length, device=qkv.device)
    q, k, v = qkv.unflatten(-1, (3, -1, d)).unbind(2)
    q, k = rotate(q, rope[position]), rotate(k, rope[position])
    keys[slots[:, None], position % ring] = k.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    values[slots[:, None], position % ring] = v
    before = position[:, :1] + torch.arange(1 - window, length, device=qkv.device)
    kept, mixed = keys[slots[:, None], before % ring], values[slots[:, None], before % ring]
    kept = kept.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    apart = position[:, :, None] - before[:, None, :]
    mask = (apart >= 0) & (apart < window) & (before >= 0)[:, None]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), kept.transpose(1, 2), mixed.transpose(1, 2), attn_mask=mask[:, None]
    )
    return out.transpose(1, 2).reshape(count, length, -1)


@jit_for_any("length")
def _window_kernel(
    qkv,
    rope,
    seen,
    slots,
    keys,
    values,
    out,
    length,
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
    row, head = tl.program_id(0), tl.program_id(1)
    if AHEAD:
        await_previous()
    kind = qkv.dtype.element_ty
    D: tl.constexpr = 2 * HALF
    slot = tl.load(slots + row).to(tl.int64)
    first = tl.load(seen + slot).to(tl.int32)
    new = tl.arange(0, BLOCK)
    real = (new < length)[:, None]
    pair, d = tl.arange(0, PAIRS), tl.arange(0, D)
    turned = real & (pair < HALF)[None, :]
    position = first + new
    angle = rope + position[:, None] * D + 2 * pair[None, :]
    cos, sin = tl.load(angle, mask=turned, other=0.0), tl.load(angle + 1, mask=turned, other=0.0)
    mine = qkv + (row * length + new)[:, None] * (3 * HEADS * D) + head * D
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
    for start in range(tl.maximum(first - WINDOW + 1, 0) // STEP * STEP, first + length, STEP):
        step = start + tl.arange(0, STEP)
        there = step < first + length
        known = there[:, None] & (pair < HALF)[None, :]
        kept = ((slot * RING + step % RING) * HEADS + head)[:, None] * D
        key_even = tl.load(keys + kept + pair[None, :], mask=known, other=0.0)
        key_odd = tl.load(keys + kept + HALF + pair[None, :], mask=known, other=0.0)
        score = tl.dot(query_even, tl.trans(key_even), input_precision="ieee")
        score = tl.dot(query_odd, tl.trans(key_odd), score, input_precision="ieee") * scale
        apart = position[:, None] - step[None, :]
        # Rows that only fill up the block see everything: what comes of them is not stored, but it must be a number.
        visible = there[None, :] & (((apart >= 0) & (apart < WINDOW)) | (new >= length)[:, None])
        score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(tl.maximum(top, tl.max(score, axis=1)), -1e30)
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(top - higher)
        mixed = tl.load(values + kept + d[None, :], mask=there[:, None], other=0.0)
        mix = tl.dot(weight.to(kind), mixed, mix * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weight, axis=1)
        top = higher
    target = out + (row * length + new)[:, None] * (HEADS * D) + head * D + d[None, :]
    tl.store(target, (mix / total[:, None]).to(kind), mask=real)


def window_attention(
    qkv: Tensor, rope: Tensor, seen: Tensor, slots: Tensor, keys: Tensor, values: Tensor, window: int
) -> Tensor:
    """`window_attention_reference` in one launch."""
    count, length = qkv.shape[:2]
    ring, heads, d = keys.shape[1:]
    out, ahead = qkv.new_empty(count, length, heads * d), runs_ahead(qkv.device)
    assert ring >= window - 1 + length, "the ring is too short for so many steps at once"
    _window_kernel[(count, heads)](
        qkv,
        rope,
        seen,
        slots,
        keys,
        values,
        out,
        length,
        d**-0.5,
        WINDOW=window,
        RING=ring,
        HEADS=heads,
        HALF=d // 2,
        PAIRS=max(16, d // 2),
        # Of one size for all short pieces: how a row is added up would follow the shape of the block.
        BLOCK=max(32, next_power_of_two(length)),
        STEP=32,
        AHEAD=ahead,
        num_warps=4,
        launch_pdl=ahead,
    )
    return out
