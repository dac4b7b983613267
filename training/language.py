"""Language model of `nano` in training: sizes, teacher-forced pass and losses.

The modules are those of `shoal.model`. Only attention differs: it runs over whole rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.model.cache import by_row
from shoal.model.config import BlockConfig, DualARConfig
from shoal.model.dual_ar import DualAR
from shoal.model.family import NANO
from shoal.model.fast import FastTransformer
from shoal.model.layers import Attention, GatedFeedForward
from training.packing import SEMANTIC_BEGIN, STOP_ID

CONTEXT = 2048
ROPE_BASE, NORM_EPS = 10_000.0, 1e-6


@dataclass(frozen=True)
class Shape:
    """Sizes of both transformers: layers, width, heads, key-value heads and feed-forward width."""

    slow: tuple[int, int, int, int, int]
    fast: tuple[int, int, int, int, int]
    head_dim: int = 64


SHAPES = {
    "nano": Shape(slow=(6, 384, 6, 2, 1024), fast=(2, 256, 4, 2, 768)),
    "nano-24k": Shape(slow=(8, 384, 6, 2, 1024), fast=(2, 256, 4, 2, 768)),
    # A larger fast transformer, which samples all codes but the first.
    "deep": Shape(slow=(8, 384, 6, 2, 1024), fast=(4, 256, 4, 2, 768)),
    # The same number of parameters with one fast layer fewer, which a CPU runs once per codebook.
    "lean": Shape(slow=(6, 384, 6, 2, 1024), fast=(1, 384, 6, 2, 1024)),
    "tiny": Shape(slow=(2, 64, 4, 2, 128), fast=(1, 48, 2, 1, 96), head_dim=16),
}


def model_config(shape: Shape, codebooks: int, codebook_size: int) -> DualARConfig:
    """Return the sizes: S1 family over bytes, scaled code embeddings, final norm before the fast transformer."""

    def block(sizes: tuple[int, int, int, int, int], qk_norm: bool, length: int) -> BlockConfig:
        layers, dim, heads, kv_heads, inner = sizes
        return BlockConfig(
            layers, dim, heads, kv_heads, shape.head_dim, inner, ROPE_BASE, NORM_EPS, qk_norm, max_seq_len=length
        )

    end = SEMANTIC_BEGIN + codebook_size
    return DualARConfig(
        family=NANO,
        slow=block(shape.slow, True, CONTEXT),
        fast=block(shape.fast, False, codebooks),
        vocab_size=end,
        codebook_size=codebook_size,
        num_codebooks=codebooks,
        semantic_begin_id=SEMANTIC_BEGIN,
        semantic_end_id=end - 1,
        stop_id=STOP_ID,
        tie_word_embeddings=False,
        scale_codebook_embeddings=True,
        norm_fastlayer_input=NANO.norm_fast_input,
    )


class WholeRows:
    """Causal attention over whole rows in the layout of the fast kernels; equivalent to `NoKVCache`."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (by_row(x.to(v.dtype), self.rows) for x in (q, k, v))
        shared = q.shape[1] // k.shape[1]
        k, v = (x[:, :, None].expand(-1, -1, shared, -1, -1).flatten(1, 2) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)


@torch.no_grad()
def initialise(model: DualAR) -> None:
    """Initialise residual branches and heads to zero: uniform logits, and layers that are the identity."""
    for name, weight in model.named_parameters():
        if name.endswith(("wo.weight", "w2.weight", "output.weight", "bias")):
            weight.zero_()
        elif "embeddings" in name:
            weight.normal_(0, 0.5)
        elif weight.dim() == 2:
            weight.normal_(0, weight.shape[1] ** -0.5)


def add_dropout(model: DualAR, share: float) -> None:
    """Add dropout to the output of every attention and feed-forward module, which have none themselves."""

    def drop(module: nn.Module, _: object, out: Tensor) -> Tensor:
        return F.dropout(out, share, training=module.training)

    for module in model.modules():
        if isinstance(module, Attention | GatedFeedForward):
            module.register_forward_hook(drop)


def hidden_states(model: DualAR, columns: Tensor) -> Tensor:
    """Return hidden states [rows * length, dim] of tokens [rows, length, 1 + codebooks], before the final norm."""
    rows, length = columns.shape[:2]
    positions = torch.arange(length, device=columns.device).repeat(rows)
    return model.slow(columns.flatten(0, 1), positions, WholeRows(rows))


def residual_logits(fast: FastTransformer, hidden: Tensor, codes: Tensor) -> Tensor:
    """Return logits [n, codebooks - 1, codebook_size] of all codes but the first, as `teacher_forced` does."""
    rows, length = codes.shape
    inputs = torch.cat((fast.project_in(hidden)[:, None], fast.embeddings(codes[:, :-1])), dim=1)
    positions = torch.arange(length, device=codes.device).repeat(rows)
    mixed = fast.norm(fast.run(inputs.flatten(0, 1), positions, WholeRows(rows)))
    return fast.output(mixed.unflatten(0, (rows, length))[:, 1:])


def semantic_losses(model: DualAR, normed: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of the semantic token at each position [n], given the next tokens [n, 1 + codebooks]."""
    return F.cross_entropy(model.slow.output(normed).float(), targets[:, 0], reduction="none")


def residual_losses(model: DualAR, hidden: Tensor, frames: Tensor) -> Tensor:
    """Return cross-entropies [n, codebooks - 1] of frames [n, codebooks] given the hidden states before them."""
    logits = residual_logits(model.fast, hidden, frames).float()
    return F.cross_entropy(logits.flatten(0, 1), frames[:, 1:].flatten(), reduction="none").view(len(frames), -1)


def losses(model: DualAR, inputs: Tensor, targets: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of the semantic token and of the residual codes.

    Inputs [rows, length, 1 + codebooks] may be corrupted; targets [rows * length, 1 + codebooks] are what follows each.
    Only audio and the stop behind it are predicted. The residual loss is taken at the positions `chosen`.
    """
    hidden = hidden_states(model, inputs)
    normed = model.slow.norm(hidden)
    wanted = is_predicted(targets[:, 0]).float()
    semantic = (semantic_losses(model, normed, targets) * wanted).sum() / wanted.sum().clamp_min(1)
    frames = targets[chosen]
    audio = is_audio(frames[:, 0]).float()[:, None]
    before = model.fast_input(hidden, normed).index_select(0, chosen)
    each = residual_losses(model, before, frames[:, 1:]) * audio
    return semantic, each.sum() / (audio.sum() * each.shape[1]).clamp_min(1)


def is_audio(ids: Tensor) -> Tensor:
    return ids >= SEMANTIC_BEGIN


def is_predicted(ids: Tensor) -> Tensor:
    """Return which targets are frames or the stop token after them: all that the model has to predict."""
    return is_audio(ids) | (ids == STOP_ID)


@torch.no_grad()
def cross_entropies(model: DualAR, columns: Tensor, at_once: int = 8) -> dict[str, Any]:
    """Return mean cross-entropies in nats over [rows, 1 + length, 1 + codebooks]: semantic, stop, residual."""
    sums = torch.zeros(2, device=columns.device)
    counts = torch.zeros(2, device=columns.device)
    residual: list[Tensor] = []
    for part in columns.split(at_once):
        targets = part[:, 1:].flatten(0, 1)
        hidden = hidden_states(model, part[:, :-1])
        normed = model.slow.norm(hidden)
        audio, stop = is_audio(targets[:, 0]), targets[:, 0] == STOP_ID
        semantic = semantic_losses(model, normed, targets)
        sums += torch.stack([semantic[audio].sum(), semantic[stop].sum()])
        counts += torch.stack([audio.sum(), stop.sum()])
        residual.append(residual_losses(model, model.fast_input(hidden, normed)[audio], targets[audio, 1:]))
    semantic, stopping = (sums / counts.clamp_min(1)).tolist()
    books = torch.cat(residual).mean(0).tolist()
    return {
        "score": round(semantic + sum(books) / len(books), 4),
        "semantic": round(semantic, 4),
        "stop": round(stopping, 4),
        "residual": [round(book, 3) for book in books],
    }
