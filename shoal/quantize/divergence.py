"""How far a quantised model is from the original: both are fed the same speech, and their distributions compared."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.cache import NoKVCache
from shoal.model.dual_ar import DualAR
from shoal.model.layers import KVCache
from shoal.model.slow import Head


@dataclass(frozen=True, slots=True)
class Divergence:
    """Mean KL(reference || model) in nats, per frame for the main token and per code for the codebooks behind it."""

    semantic: float
    codes: float
    agreement: float  # share of main tokens whose likeliest is the same
    frames: int


@torch.inference_mode()
def divergence(reference: DualAR, model: DualAR, columns: Tensor, *, cache: KVCache | None = None) -> Divergence:
    """Compare over known columns [T, 1 + codebooks] of one utterance, its prompt and frames, teacher-forced.

    Only predictions of audio columns count. `cache` takes the place of exact attention in `model`, so that keys and
    values in another type can be judged; it must be ready for these columns.
    """
    ids = reference.config
    semantic = (columns[1:, 0] >= ids.semantic_begin_id) & (columns[1:, 0] <= ids.semantic_end_id)
    expected_main, expected_codes = _logits(reference, columns, semantic, NoKVCache(1))
    main, codes = _logits(model, columns, semantic, cache or NoKVCache(1))
    return Divergence(
        semantic=_kl(expected_main, main),
        codes=_kl(expected_codes, codes),
        agreement=float((expected_main.argmax(-1) == main.argmax(-1)).float().mean()),
        frames=int(semantic.sum()),
    )


def mean(parts: list[Divergence]) -> Divergence:
    """Over several utterances, each counted by its frames."""
    frames = sum(part.frames for part in parts)

    def over(name: str) -> float:
        return sum(getattr(part, name) * part.frames for part in parts) / max(1, frames)

    return Divergence(over("semantic"), over("codes"), over("agreement"), frames)


def _logits(model: DualAR, columns: Tensor, predicted: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
    """Of the main token [n, legal] and the codes behind the first [n, codebooks - 1, size] of each predicted column."""
    hidden = model.slow(columns, torch.arange(len(columns), device=columns.device), cache)[:-1][predicted]
    normed = model.slow.norm(hidden)
    codes = columns[1:, 1:][predicted]
    residual = model.fast.teacher_forced(model.fast_input(hidden, normed), codes)
    return Head(model.slow)(normed), residual[:, 1:, : model.config.residual_size]


def _kl(expected: Tensor, found: Tensor) -> float:
    terms = F.kl_div(found.float().log_softmax(-1), expected.float().log_softmax(-1), log_target=True, reduction="none")
    return float(terms.sum(-1).mean())
