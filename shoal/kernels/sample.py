"""Logits -> tokens: penalty, top-k, top-p, temperature, and a draw whose noise depends only on (seed, frame, lane).

Everything works on rows: logits [n, size] with one temperature, top-p, top-k, penalty and seed per row. Draws are
exponential races, argmax(p / e) with e ~ Exp(1): a row's outcome depends on its own probabilities and noise alone,
never on its neighbours or on how a sort broke a tie.

The kernel does not sort. Which tokens survive depends only on how many of them, and how much probability, lie at or
above a logit; both grow as the bar is lowered, so the lowest bar within top-k and top-p is found by bisection over
the bit patterns of the logits, which are ordered like the logits themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.jit import jit, tl


def probabilities(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Survivors' probabilities [n, size]; fp32.

    The nucleus is taken before the temperature is applied and the token that crosses its edge is dropped; the
    likeliest token always stays. This is the released order, and it is heard.
    """
    logits = logits.float()
    ranked, order = logits.sort(dim=-1, descending=True)
    cumulative = ranked.softmax(-1).cumsum(-1)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    drop = (cumulative > top_p[:, None]) | (rank >= top_k[:, None])
    drop[:, 0] = False
    kept = torch.empty_like(logits).scatter_(-1, order, ranked.masked_fill(drop, -torch.inf))
    return (kept / temperature.clamp_min(1e-5)[:, None]).softmax(-1)


def apply_repetition_penalty(logits: Tensor, columns: Tensor, penalty: Tensor) -> Tensor:
    """Push the logits at columns [n, k] towards less likely; a column equal to the width of logits is ignored."""
    padded = torch.cat((logits, logits.new_zeros(len(logits), 1)), dim=-1)
    score = padded.gather(-1, columns)
    strength = penalty[:, None].to(logits.dtype)
    padded = padded.scatter(-1, columns, torch.where(score < 0, score * strength, score / strength))
    return padded[:, :-1]


def exponential_race(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw one column per row [n] from probs [n, size], given noise ~ Exp(1) of the same shape."""
    return (probs / noise).argmax(-1)


def exponential_noise(seed: Tensor, frame: Tensor, lane: int | Tensor, size: int) -> Tensor:
    """Exp(1) noise [n, size] that is a pure function of (seed, frame, lane, column); [n, k, size] for k lanes."""
    if isinstance(lane, Tensor):
        seed, frame = seed[:, None], frame[:, None]
    key = _mix(seed + _mix(frame * 64 + lane + 1))
    column = torch.arange(size, device=seed.device)
    bits = _mix(key[..., None] + column * 0x9E3779B1)
    # 23 bits and a half: exact in fp32, and never 0 or 1, where the logarithm would decide the race.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -uniform.log()


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) after which neighbours have nothing in common."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def sample_reference(
    logits: Tensor,
    columns: Tensor,
    penalty: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    seed: Tensor,
    frame: Tensor,
    lane: int,
) -> Tensor:
    """One token per row [n] from logits [n, size]; columns [n, k] are penalised, `size` meaning none."""
    probs = probabilities(apply_repetition_penalty(logits, columns, penalty), temperature, top_p, top_k)
    return exponential_race(probs, exponential_noise(seed, frame, lane, logits.shape[-1]))


@jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit
def drawn(value, size, index, temperature, top_p, top_k, seed, frame, lane):
    """The column that a row of `size` logits draws under its settings; the rest of `value` is -inf."""
    inside = index < size
    score = value.to(tl.float32)
    top = tl.max(score, axis=0)
    weight = tl.exp(score - top)
    # Probabilities in parts of 2^30: integers are added up across threads in one instruction, floats in ten.
    part = (weight / tl.sum(weight, axis=0) * 1073741824.0).to(tl.int32)
    most = tl.cast(top_p * 1073741824.0, tl.int32)
    # Bit patterns as integers in the order of the floats: sixteen bits are searched in half the steps of thirty-two.
    if value.dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    else:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32)
        order = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    high = tl.max(order, axis=0) + 1  # nothing at or above: always within bounds
    low = tl.min(tl.where(inside, order, high), axis=0)
    # Most callers do not limit the number of tokens; then nobody has to count them.
    limited = size > top_k
    if (limited == 0) & (tl.sum(part, axis=0) <= most):
        high = low
    while high - low > 1:
        middle = (high + low) // 2
        above = inside & (order >= middle)
        within = tl.sum(tl.where(above, part, 0), axis=0) <= most
        if limited:
            within = within & (tl.sum(above.to(tl.int32), axis=0) <= top_k)
        high = tl.where(within, middle, high)
        low = tl.where(within, low, middle)
    kept = inside & ((order >= high) | (score == top))
    heat = tl.maximum(temperature, 1e-5)
    chance = tl.exp(tl.where(kept, score / heat, float("-inf")) - top / heat)
    key = _mixed((frame * 64 + lane + 1).to(tl.uint32))
    key = _mixed(seed.to(tl.uint32) + key)
    noise = _mixed(key + index.to(tl.uint32) * 0x9E3779B1)
    uniform = ((noise >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return tl.argmax(chance / -tl.log(uniform), axis=0).to(tl.int64)


@jit
def pushed(value, chosen, strength):
    """`apply_repetition_penalty`: logits, those chosen made less likely."""
    strength = strength.to(value.dtype)
    return tl.where(chosen, tl.where(value < 0, value * strength, value / strength).to(value.dtype), value)


@jit
def push(logits, columns, chosen, strength):
    """`apply_repetition_penalty` in place, for a few of very many logits; a column that comes twice is pushed once."""
    value = tl.load(logits + columns, mask=chosen, other=0.0)
    tl.debug_barrier()
    tl.store(logits + columns, pushed(value, chosen, strength), mask=chosen)
    tl.debug_barrier()
