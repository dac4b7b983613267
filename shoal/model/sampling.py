"""Logits -> codes: the filters of both families, and noise that depends only on (seed, frame, codebook).

Everything works on rows: logits [n, size] with one temperature, top-p, top-k, penalty and seed per row. Draws are
exponential races, argmax(p / e) with e ~ Exp(1): a row's outcome depends on its own probabilities and noise alone,
never on its neighbours or on how a sort broke a tie.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.speech import Sampling

S1_WINDOW = 16
S2_WINDOW = 10
RAS_TEMPERATURE, RAS_TOP_P = 1.0, 0.9

# Lanes of a frame's noise: the main token, the residual codebooks by number, and S2's second main draw.
MAIN_LANE = 0


@dataclass(slots=True)
class SamplingRows:
    """The sampling settings of n sequences, one row each."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    penalty: Tensor
    whole_window: Tensor  # True where the penalty looks at all main tokens of the window
    seed: Tensor
    penalised: bool  # whether any row has a penalty: known on the host, so that nobody has to ask the device

    @classmethod
    def of(cls, settings: list[Sampling], device: torch.device) -> "SamplingRows":
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=column([s.temperature for s in settings], torch.float32),
            top_p=column([s.top_p for s in settings], torch.float32),
            top_k=column([s.top_k or 2**31 for s in settings], torch.long),
            penalty=column([s.repetition_penalty for s in settings], torch.float32),
            whole_window=column([s.repetition == "window" for s in settings], torch.bool),
            seed=torch.tensor([fold_seed(s.seed) for s in settings], dtype=torch.long, device=device),
            penalised=any(s.repetition_penalty != 1.0 for s in settings),
        )

    def rows(self, index: Tensor, *, penalised: bool) -> "SamplingRows":
        """The settings of some rows, in the order of `index`."""
        return replace(self, penalised=penalised, **{name: getattr(self, name)[index] for name in COLUMNS})

    def put(self, row: int, settings: "SamplingRows") -> None:
        """Overwrite one row with the only row of `settings`."""
        for name in COLUMNS:
            getattr(self, name)[row] = getattr(settings, name)[0]


COLUMNS = ("temperature", "top_p", "top_k", "penalty", "whole_window", "seed")


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


def penalise(logits: Tensor, columns: Tensor, penalty: Tensor) -> Tensor:
    """Push the logits at columns [n, k] towards less likely; a column equal to the width of logits is ignored."""
    padded = torch.cat((logits, logits.new_zeros(len(logits), 1)), dim=-1)
    score = padded.gather(-1, columns)
    strength = penalty[:, None].to(logits.dtype)
    padded = padded.scatter(-1, columns, torch.where(score < 0, score * strength, score / strength))
    return padded[:, :-1]


def race(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw one column per row [n] from probs [n, size], given noise ~ Exp(1) of the same shape."""
    return (probs / noise).argmax(-1)


def exponential_noise(seed: Tensor, frame: Tensor, lane: int, size: int) -> Tensor:
    """Exp(1) noise [n, size] that is a pure function of (seed, frame, lane, column)."""
    key = _mix(seed + _mix(frame * 64 + lane + 1))
    column = torch.arange(size, device=seed.device)
    bits = _mix((key[:, None] + column * 0x9E3779B1) & 0xFFFFFFFF)
    # 23 bits and a half: exact in fp32, and never 0 or 1, where the logarithm would decide the race.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -uniform.log()


def fold_seed(seed: int) -> int:
    """A 64-bit seed in 32 bits."""
    return (seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) after which neighbours have nothing in common."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
