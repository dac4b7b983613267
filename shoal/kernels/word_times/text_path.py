"""Path through the text of a turn on the device, for word times: one frame of the search of `text_path_numpy`."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.jit import jit, kernel, tl
from shoal.kernels.word_times.text_attention import Texts
from shoal.kernels.word_times.text_path_numpy import FLOOR, INDEX_BITS, KEPT_FRAMES, MAX_TOKENS, SCALE, SKIP_PENALTY

BLOCK_N = 64
# Tiles of the kernel's result: tokens in 64s, and one entry for the end of the path.
TILES = MAX_TOKENS // BLOCK_N + 1
LOWEST = -(1 << 62)


def text_path_reference(weights: Tensor, texts: Texts, frames: Tensor, scores: Tensor, out: Tensor) -> None:
    """Extend the path of each text by the frame that was sampled last; the PyTorch form of `extend_paths`.

    weights [n, heads, width] are the attention of that frame, frames [slots] the frames of the turn so far. scores
    [slots, KEPT_FRAMES, MAX_TOKENS] int32 is updated; out [tiles, n, 64] int16 receives the end of the path, then the
    origin of each token. 1 + width entries fit into the tiles. Rows without a text are undefined.
    """
    slots, lengths = texts.slots.long(), texts.lengths
    frame, width = frames[slots] - 1, weights.shape[2]
    token = torch.arange(width, device=weights.device)
    slope = SKIP_PENALTY * token
    before = scores[slots, (frame - 1) % KEPT_FRAMES, :width].long()
    best = _packed(before + slope, token).cummax(1).values[:, :-1]
    moved = (best >> INDEX_BITS) - slope[:-1]
    arrivals, origins = before.clone(), token.expand_as(before).clone()
    arrivals[:, 1:] = torch.maximum(before[:, 1:], moved)
    origins[:, 1:] = torch.where(moved > before[:, 1:], MAX_TOKENS - 1 - (best & (MAX_TOKENS - 1)), token[1:])
    # A path starts at the first token; a later start leaves out those before it.
    arrivals = torch.where((frame == 0)[:, None], -slope, arrivals)
    after = arrivals + torch.floor((weights.mean(1) + FLOOR).log() * SCALE + 0.5).long()
    scores[slots, frame % KEPT_FRAMES, :width] = after.int()
    ends = _packed(after, token).masked_fill(token >= lengths[:, None], LOWEST).amax(1)
    row = torch.cat(((MAX_TOKENS - 1 - (ends & (MAX_TOKENS - 1)))[:, None], origins), 1)
    padded = torch.nn.functional.pad(row, (0, -row.shape[1] % BLOCK_N))
    out.copy_(padded.unflatten(1, (-1, BLOCK_N)).transpose(0, 1)[: len(out)])


def _packed(score: Tensor, token: Tensor) -> Tensor:
    """Pack score and token into one integer: its maximum has the best score and, of equal scores, the first token."""
    return (score << INDEX_BITS) | (MAX_TOKENS - 1 - token)


@jit
def _larger(one, other):
    return tl.maximum(one, other)


@kernel("rows")
def _text_path_kernel(
    weights,
    slots,
    lengths,
    frames,
    scores,
    out,
    rows,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    INDEX_BITS: tl.constexpr,
    KEPT_FRAMES: tl.constexpr,
    SKIP_PENALTY: tl.constexpr,
    FLOOR: tl.constexpr,
    SCALE: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0)
    length, slot = tl.load(lengths + row), tl.load(slots + row).to(tl.int64)
    if length == 0:
        return
    frame = tl.load(frames + slot) - 1
    before = scores + (slot * KEPT_FRAMES + (frame + KEPT_FRAMES - 1) % KEPT_FRAMES) * MAX_TOKENS
    after = scores + (slot * KEPT_FRAMES + frame % KEPT_FRAMES) * MAX_TOKENS
    # Running maxima over the tokens of earlier tiles: of the scores before this frame, and of those after it.
    reached, ended = tl.full((), LOWEST, tl.int64), tl.full((), LOWEST, tl.int64)
    for start in range(0, length, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        visible = token < length
        weight = tl.zeros((BLOCK_N,), tl.float32)
        for head in tl.static_range(HEADS):
            weight += tl.load(weights + (row * HEADS + head) * WIDTH + token, mask=visible, other=0.0)
        emission = tl.floor(tl.log(weight / HEADS + FLOOR) * SCALE + 0.5).to(tl.int64)
        stay = tl.load(before + token, mask=visible, other=0).to(tl.int64)
        earlier = token - 1
        known = visible & (earlier >= 0)
        score = tl.load(before + earlier, mask=known, other=0).to(tl.int64) + SKIP_PENALTY * earlier
        packed = tl.where(known, (score << INDEX_BITS) | (MAX_TOKENS - 1 - earlier).to(tl.int64), LOWEST)
        best = tl.maximum(tl.associative_scan(packed, 0, _larger), reached)
        reached = tl.maximum(reached, tl.max(packed, axis=0))
        moved = (best >> INDEX_BITS) - SKIP_PENALTY * earlier
        moves = (moved > stay) & (token > 0)
        origin = tl.where(moves, MAX_TOKENS - 1 - (best & (MAX_TOKENS - 1)), token.to(tl.int64))
        arrival = tl.where(frame == 0, (-SKIP_PENALTY * token).to(tl.int64), tl.where(moves, moved, stay))
        result = arrival + emission
        tl.store(after + token, result.to(tl.int32), mask=visible)
        ends = tl.where(visible, (result << INDEX_BITS) | (MAX_TOKENS - 1 - token).to(tl.int64), LOWEST)
        ended = tl.maximum(ended, tl.max(ends, axis=0))
        place = token + 1
        target = out + ((place // BLOCK_N) * rows + row) * BLOCK_N + place % BLOCK_N
        tl.store(target, origin.to(tl.int16), mask=visible)
    tl.store(out + row * BLOCK_N, (MAX_TOKENS - 1 - (ended & (MAX_TOKENS - 1))).to(tl.int16))


def text_path(weights: Tensor, texts: Texts, frames: Tensor, scores: Tensor, out: Tensor) -> None:
    """Compute `text_path_reference` in one launch: one program per text. Rows without a text are not written."""
    _text_path_kernel[(weights.shape[0],)](
        weights,
        texts.slots,
        texts.lengths,
        frames,
        scores,
        out,
        out.shape[1],
        HEADS=weights.shape[1],
        WIDTH=weights.shape[2],
        MAX_TOKENS=MAX_TOKENS,
        INDEX_BITS=INDEX_BITS,
        KEPT_FRAMES=KEPT_FRAMES,
        SKIP_PENALTY=SKIP_PENALTY,
        FLOOR=FLOOR,
        SCALE=SCALE,
        LOWEST=LOWEST,
        BLOCK_N=BLOCK_N,
        num_warps=2,
    )
