"""Sampling from logits: repetition penalty, top-k, top-p, temperature, and noise derived from (seed, frame, lane).

All functions work on rows: logits [n, size] with one temperature, top-p, top-k, penalty and seed per row. A lane is one
draw of a frame: the semantic token, a residual codebook, or the second semantic draw of S2. Tokens are sampled with the
exponential race argmax(p / e), e ~ Exp(1): the result of a row depends on its own probabilities and noise alone, not on
the rest of the batch or on how a sort breaks ties.

The kernel does not sort. The number of tokens and the probability mass at or above a logit both grow as the threshold
falls, so the lowest threshold within top-k and top-p is found by bisection over the bit patterns of the logits, mapped
to integers in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.jit import jit, tl


def probabilities(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return the probabilities [n, size] after top-k, top-p and temperature, in fp32.

    Top-p is applied before the temperature, and the token that crosses the threshold is dropped; the most likely token
    is always kept. The released models use this order, and changing it is audible.
    """
    logits = logits.float()
    ranked, order = logits.sort(dim=-1, descending=True)
    # On a GPU `cumsum` adds floats in no fixed order, says its documentation. In fp64 the difference does not matter.
    cumulative = ranked.softmax(-1).cumsum(-1, dtype=torch.float64 if logits.is_cuda else torch.float32)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    drop = (cumulative > top_p[:, None]) | (rank >= top_k[:, None])
    drop[:, 0] = False
    kept = torch.empty_like(logits).scatter_(-1, order, ranked.masked_fill(drop, -torch.inf))
    return (kept / temperature.clamp_min(1e-5)[:, None]).softmax(-1)


def apply_repetition_penalty(logits: Tensor, tokens: Tensor, penalty: Tensor) -> Tensor:
    """Make tokens [n, k] less likely, each once; an index equal to the width of logits is ignored."""
    padded = torch.cat((logits, logits.new_zeros(len(logits), 1)), dim=-1)
    score = padded.gather(-1, tokens)
    strength = penalty[:, None].to(logits.dtype)
    padded = padded.scatter(-1, tokens, torch.where(score < 0, score * strength, score / strength))
    return padded[:, :-1]


def exponential_race(probs: Tensor, noise: Tensor) -> Tensor:
    """Sample one token per row [n] from probs [n, size], given noise ~ Exp(1) of the same shape."""
    return (probs / noise).argmax(-1)


def exponential_noise(seed: Tensor, frame: Tensor, lane: int | Tensor, size: int) -> Tensor:
    """Return Exp(1) noise [n, size], a pure function of (seed, frame, lane, token); [n, k, size] for k lanes."""
    if isinstance(lane, Tensor):
        seed, frame = seed[:, None], frame[:, None]
    key = _hash(seed + _hash(frame * 64 + lane + 1))
    token = torch.arange(size, device=seed.device)
    bits = _hash(key[..., None] + token * 0x9E3779B1)
    # 23 bits plus one half: exact in fp32 and never 0 or 1, where the logarithm would decide the race.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -uniform.log()


def _hash(x: Tensor) -> Tensor:
    """Hash 32-bit integers (held in int64) bijectively; adjacent inputs give uncorrelated outputs."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def sample_reference(
    logits: Tensor,
    penalized: Tensor,
    penalty: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    seed: Tensor,
    frame: Tensor,
    lane: int,
) -> Tensor:
    """Sample one token per row [n] from logits [n, size]; penalized [n, k] are token indices, `size` means none."""
    probs = probabilities(apply_repetition_penalty(logits, penalized, penalty), temperature, top_p, top_k)
    return exponential_race(probs, exponential_noise(seed, frame, lane, logits.shape[-1]))


@jit
def _hash_bits(x):
    """Compute `_hash` on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit
def sample_row(logits, size, index, temperature, top_p, top_k, seed, frame, lane):
    """Sample a token from one row of `size` logits as `sample_reference` does; entries beyond `size` are -inf."""
    mask = index < size
    score = logits.to(tl.float32)
    max_score = tl.max(score, axis=0)
    weight = tl.exp(score - max_score)
    # Probabilities in fixed point (units of 2^-30): integer reductions across threads take one instruction, float ten.
    prob = (weight / tl.sum(weight, axis=0) * 1073741824.0).to(tl.int32)
    max_mass = tl.cast(top_p * 1073741824.0, tl.int32)
    # Map the bit patterns to integers in the order of the floats. 16-bit dtypes need half as many bisection steps.
    if logits.dtype == tl.float32:
        bits = logits.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    else:
        bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
        order = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    high = tl.max(order, axis=0) + 1  # as a threshold it keeps no token, so it is always within the limits
    low = tl.min(tl.where(mask, order, high), axis=0)
    # Most requests have no top-k limit; skip the count for them.
    limited = size > top_k
    if (limited == 0) & (tl.sum(prob, axis=0) <= max_mass):
        high = low
    while high - low > 1:
        middle = (high + low) // 2
        above = mask & (order >= middle)
        within = tl.sum(tl.where(above, prob, 0), axis=0) <= max_mass
        if limited:
            within = within & (tl.sum(above.to(tl.int32), axis=0) <= top_k)
        high = tl.where(within, middle, high)
        low = tl.where(within, low, middle)
    kept = mask & ((order >= high) | (score == max_score))
    temperature = tl.maximum(temperature, 1e-5)
    chance = tl.exp(tl.where(kept, score / temperature, float("-inf")) - max_score / temperature)
    key = _hash_bits((frame * 64 + lane + 1).to(tl.uint32))
    key = _hash_bits(seed.to(tl.uint32) + key)
    noise = _hash_bits(key + index.to(tl.uint32) * 0x9E3779B1)
    uniform = ((noise >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return tl.argmax(chance / -tl.log(uniform), axis=0).to(tl.int64)


@jit
def penalize(logits, chosen, penalty):
    """Apply `apply_repetition_penalty` to the logits where `chosen` is true."""
    penalty = penalty.to(logits.dtype)
    return tl.where(chosen, tl.where(logits < 0, logits * penalty, logits / penalty).to(logits.dtype), logits)


@jit
def penalize_in_place(logits, tokens, chosen, penalty):
    """Penalize a few tokens of a large row in memory; a token that occurs twice is penalized once."""
    value = tl.load(logits + tokens, mask=chosen, other=0.0)
    tl.debug_barrier()
    tl.store(logits + tokens, penalize(value, chosen, penalty), mask=chosen)
    tl.debug_barrier()
