"""KL divergence of a quantized model from its original, teacher-forced over the same speech."""

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
    """Mean KL(reference || model) in nats."""

    semantic: float  # per frame, of the semantic token
    codes: float  # per code of the other codebooks
    agreement: float  # share of frames in which both models rank the same semantic token first
    frames: int


@torch.inference_mode()
def divergence(reference: DualAR, model: DualAR, tokens: Tensor, *, cache: KVCache | None = None) -> Divergence:
    """Compare two models over the known tokens [T, 1 + codebooks] of one utterance, prompt and frames.

    Only predictions of audio tokens count. `cache` replaces the exact attention of `model`, to judge a quantized KV
    cache; it must be prepared for these tokens.
    """
    ids = reference.config
    semantic = (tokens[1:, 0] >= ids.semantic_begin_id) & (tokens[1:, 0] <= ids.semantic_end_id)
    expected_semantic, expected_codes = _logits(reference, tokens, semantic, NoKVCache(1))
    found_semantic, found_codes = _logits(model, tokens, semantic, cache or NoKVCache(1))
    return Divergence(
        semantic=_kl(expected_semantic, found_semantic),
        codes=_kl(expected_codes, found_codes),
        agreement=float((expected_semantic.argmax(-1) == found_semantic.argmax(-1)).float().mean()),
        frames=int(semantic.sum()),
    )


def mean(parts: list[Divergence]) -> Divergence:
    """Average over several utterances, weighted by their frames."""
    frames = sum(part.frames for part in parts)

    def over(name: str) -> float:
        return sum(getattr(part, name) * part.frames for part in parts) / max(1, frames)

    return Divergence(over("semantic"), over("codes"), over("agreement"), frames)


def _logits(model: DualAR, tokens: Tensor, predicted: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
    """Return logits of the semantic token [n, candidates] and of the other codes [n, codebooks - 1, size]."""
    hidden = model.slow(tokens, torch.arange(len(tokens), device=tokens.device), cache)[:-1][predicted]
    normed = model.slow.norm(hidden)
    codes = tokens[1:, 1:][predicted]
    residual = model.fast.teacher_forced(model.fast_input(hidden, normed), codes)
    return Head(model.slow)(normed), residual[:, 1:, : model.config.residual_size]


def _kl(expected: Tensor, found: Tensor) -> float:
    terms = F.kl_div(found.float().log_softmax(-1), expected.float().log_softmax(-1), log_target=True, reduction="none")
    return float(terms.sum(-1).mean())
