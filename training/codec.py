"""Train the codec of `nano`: the modules of `shoal.codec` themselves, on shards that may still be being written.

    python -m training.codec --corpus DIR --out DIR --minutes 22

Three stages. First the autoencoder learns without codes; then every codebook is laid out by principal directions and
k-means, since codebooks learned from random starts collapse; then, from a share of the time on, discriminators join.
The wall clock drives the schedule, so a slow machine gets fewer steps but a finished model. `--resume` goes on from a
checkpoint. `--start DIR --freeze-codes` polishes the decoding side only: codes made before stay valid.

The networks run here in another form than at inference: activations lie [batch, time, channels] and each convolution is
one matrix product over shifted copies. The weights are the modules' own, and a test holds both forms equal.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.codec.config import CodecConfig, WindowTransformerConfig
from shoal.codec.dac import Block, Codec
from shoal.codec.layers import CausalConv, CausalUpsample, ConvNeXt, ResidualUnit, Snake, WindowTransformer
from shoal.codec.quantizer import VectorQuantizer
from shoal.codec.streaming import NoPast
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.rope import rotate
from training.codec_losses import MelLoss, deception_loss, discriminator_loss, feature_loss
from training.discriminators import Discriminators

logger = logging.getLogger(__name__)

NANO = CodecConfig(
    sample_rate=16_000,
    encoder_dim=16,
    encoder_rates=(2, 4, 4, 5),
    latent_dim=256,
    decoder_dim=384,
    decoder_rates=(5, 4, 4, 2),
    encoder_transformer_layers=(0, 0, 0, 0),
    downsample_factor=(2, 2),
    semantic_codebook_size=1024,
    codebook_size=1024,
    n_codebooks=9,
    codebook_dim=8,
    transformer=WindowTransformerConfig(
        n_layer=3, n_head=4, dim=256, intermediate_size=768, head_dim=64, window_size=32
    ),
)

MEL_WEIGHT, COMMIT_WEIGHT, BOOK_WEIGHT, FEATURE_WEIGHT = 15.0, 0.25, 1.0, 2.0
BETAS = (0.8, 0.99)
PIECE_BYTES = 15 << 20


class Diverged(RuntimeError):
    """A loss stopped being a number."""


# ---------------------------------------------------------------------------------------------------------------------
# The networks in training form: [batch, time, channels], convolutions as matrix products.


def shifted(x: Tensor, count: int, step: int = 1) -> Tensor:
    """[n, T, C] -> [n, T, count * C]: each place with what came (count - 1) ... 0 times `step` places before it."""
    padded = F.pad(x, (0, 0, (count - 1) * step, 0))
    return torch.cat([padded[:, k * step : k * step + x.shape[1]] for k in range(count)], dim=-1)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer in x's dtype, with rows filled up to 16 bytes so that matrix units take them."""
    short = -x.shape[-1] % 8
    if short:
        x, weight = F.pad(x, (0, short)), F.pad(weight, (0, short))
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def snake(layer: Snake, x: Tensor) -> Tensor:
    alpha, wide = layer.alpha.view(-1), x.float()
    curved: Tensor = wide + torch.sin(alpha * wide).square() / (alpha + 1e-9)
    return curved.to(x.dtype)


def convolve(layer: CausalConv, x: Tensor) -> Tensor:
    conv = layer.conv
    kernel, stride, dilation = conv.kernel_size[0], conv.stride[0], conv.dilation[0]
    if conv.groups > 1:
        taps = shifted(x, kernel, dilation).unflatten(-1, (kernel, -1))
        return torch.add((taps * conv.weight.squeeze(1).T.to(x.dtype)).sum(2), cast(Tensor, conv.bias).to(x.dtype))
    if conv.out_channels == 1:
        return _to_one_channel(conv, x)
    matrix = conv.weight.transpose(1, 2).flatten(1)
    if stride > 1:
        x = x.unflatten(1, (-1, stride)).flatten(2)
        return product(shifted(x, kernel // stride), matrix, conv.bias)
    return product(shifted(x, kernel, dilation) if kernel > 1 else x, matrix, conv.bias)


def _to_one_channel(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """Project first and shift then: shifting first would copy every channel seven times for one output."""
    kernel, steps = conv.kernel_size[0], x.shape[1]
    taps = F.pad(x.float() @ conv.weight[0], (0, 0, kernel - 1, 0))  # fp32: this is the waveform
    mixed = torch.stack([taps[:, k : k + steps, k] for k in range(kernel)]).sum(0)
    return (mixed + cast(Tensor, conv.bias))[..., None]


def upsample(layer: CausalUpsample, x: Tensor) -> Tensor:
    conv, stride = layer.conv, layer.stride
    reach = conv.kernel_size[0] // stride
    # Output block t takes kernel part j from input t - j; `shifted` lists the oldest input first.
    matrix = conv.weight.unflatten(2, (reach, stride)).flip(2).permute(3, 1, 2, 0).flatten(2).flatten(0, 1)
    out = product(shifted(x, reach), matrix, cast(Tensor, conv.bias).repeat(stride))
    return torch.flatten(out.unflatten(-1, (stride, -1)), 1, 2)


def residual(layer: ResidualUnit, x: Tensor) -> Tensor:
    return x + run_layers(layer.block, x)


def conv_next(layer: ConvNeXt, x: Tensor) -> Tensor:
    h = F.layer_norm(convolve(layer.dwconv, x).float(), layer.norm.normalized_shape, None, None, layer.norm.eps)
    h = (h * layer.norm.weight + layer.norm.bias).to(x.dtype)
    h = product(F.gelu(product(h, layer.pwconv1.weight, layer.pwconv1.bias)), layer.pwconv2.weight, layer.pwconv2.bias)
    return x + layer.gamma.to(x.dtype) * h


def transform(layer: WindowTransformer, x: Tensor) -> Tensor:
    steps, window = x.shape[1], layer.config.window_size
    at = torch.arange(steps, device=x.device)
    behind = at[:, None] - at[None, :]
    mask = (behind >= 0) & (behind < window)
    table = layer.table[:steps]
    for one in cast("Sequence[Any]", layer.layers):
        x = x + one.attention_layer_scale.gamma.to(x.dtype) * _attend(one, x, table, mask)
        normed = rms_norm(x, one.ffn_norm.weight, one.ffn_norm.eps).to(x.dtype)
        forward = one.feed_forward
        h = F.silu(product(normed, forward.w1.weight, None)) * product(normed, forward.w3.weight, None)
        x = x + one.ffn_layer_scale.gamma.to(x.dtype) * product(h, forward.w2.weight, None)
    return rms_norm(x, layer.norm.weight, layer.norm.eps).to(x.dtype)


def _attend(layer: Any, x: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    attention = layer.attention
    normed = rms_norm(x, layer.attention_norm.weight, layer.attention_norm.eps).to(x.dtype)
    qkv = product(normed, attention.wqkv.weight, None)
    q, k, v = qkv.unflatten(-1, (3, -1, attention.head_dim)).unbind(-3)
    q, k = rotate(q, table), rotate(k, table)
    seen = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return product(seen.transpose(1, 2).flatten(-2), attention.wo.weight, None)


FORMS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    Snake: snake,
    CausalConv: convolve,
    CausalUpsample: upsample,
    ResidualUnit: residual,
    ConvNeXt: conv_next,
    WindowTransformer: transform,
}


def run_layers(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = run_layers(layer.block, x) if isinstance(layer, Block) else FORMS[type(layer)](layer, x)
    return x


def encode_latent(codec: Codec, samples: Tensor, dtype: torch.dtype) -> Tensor:
    """Samples [n, N] -> latent before the codebooks [n, frames, dim], fp32."""
    x = run_layers(codec.encoder.block, samples[..., None].to(dtype))
    for stage in codec.quantizer.downsample:
        x = run_layers(cast(nn.ModuleList, stage), x)
    return transform(codec.quantizer.pre_module, x).float()


def decode_latent(codec: Codec, latent: Tensor, dtype: torch.dtype) -> Tensor:
    """Latent behind the codebooks [n, frames, dim] -> samples [n, N], fp32."""
    x = transform(codec.quantizer.post_module, latent.to(dtype))
    for stage in codec.quantizer.upsample:
        x = run_layers(cast(nn.ModuleList, stage), x)
    return torch.tanh(run_layers(codec.decoder.model, x).float()).squeeze(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Codebooks.


@dataclass
class Quantised:
    """Latent [n, T, dim] with its losses, codes [codebooks, n * T] and lookup queries [codebooks, n * T, 8]."""

    latent: Tensor
    commit: Tensor
    book: Tensor
    codes: Tensor
    queries: Tensor


def codebooks(codec: Codec) -> list[VectorQuantizer]:
    stacks = (codec.quantizer.semantic_quantizer, codec.quantizer.quantizer)
    return [cast(VectorQuantizer, book) for stack in stacks for book in stack.quantizers]


def nearest(queries: Tensor, entries: Tensor) -> Tensor:
    """[m, d], [entries, d] -> [m]: the entry of highest cosine."""
    return (F.normalize(queries, dim=-1) @ F.normalize(entries, dim=-1).T).argmax(-1)


def quantise(codec: Codec, latent: Tensor, active: Tensor) -> Quantised:
    """Pass the latent through the first active[i] codebooks of row i; gradients pass straight through the lookup."""
    left, total = latent, torch.zeros_like(latent)
    commit = book_loss = latent.new_zeros(())
    codes, queries = [], []
    for index, book in enumerate(codebooks(codec)):
        query = F.linear(left, book.in_proj.weight.squeeze(-1), book.in_proj.bias)
        code = nearest(query.detach().flatten(0, 1), book.codebook.weight.detach())
        # index_select rather than embedding: its backward never asks the host how many codes were used.
        entry = book.codebook.weight.index_select(0, code).view_as(query)
        used = (active > index)[:, None, None].to(latent.dtype)
        commit = commit + (used * (query - entry.detach()).square()).mean()
        book_loss = book_loss + (used * (query.detach() - entry).square()).mean()
        through = query + (entry - query).detach()
        part = F.linear(through, book.out_proj.weight.squeeze(-1), book.out_proj.bias)
        left, total = left - part, total + used * part
        codes.append(code)
        queries.append(query.detach().flatten(0, 1))
    return Quantised(total, commit, book_loss, torch.stack(codes), torch.stack(queries))


@torch.no_grad()
def lay_out_codebooks(codec: Codec, latents: Tensor, rounds: int = 10) -> None:
    """Set every codebook from latents [m, dim]: its space is the top principal directions of what is left so far."""
    left = latents.clone()
    for book in codebooks(codec):
        mean = left.mean(0)
        centred = left - mean
        _, vectors = torch.linalg.eigh(centred.T @ centred)
        top = vectors[:, -book.codebook.embedding_dim :]
        queries = centred @ top
        entries = cosine_means(queries, book.codebook.num_embeddings, rounds)
        # In place: a captured graph and the optimiser hold these very tensors.
        book.in_proj.weight.copy_(top.T[..., None])
        cast(Tensor, book.in_proj.bias).copy_(-mean @ top)
        book.out_proj.weight.copy_(top[..., None])
        cast(Tensor, book.out_proj.bias).copy_(mean)
        book.codebook.weight.copy_(entries)
        left = left - entries[nearest(queries, entries)] @ top.T - mean


def cosine_means(queries: Tensor, count: int, rounds: int) -> Tensor:
    """k-means by cosine whose centres keep the mean length of their members; empty ones restart at a random query."""
    entries = random_rows(queries, count)
    for _ in range(rounds):
        code = nearest(queries, entries)
        sums = torch.zeros_like(entries).index_add_(0, code, queries)
        members = torch.bincount(code, minlength=count)[:, None]
        entries = torch.where(members > 0, sums / members.clamp(min=1), random_rows(queries, count))
    return entries


def random_rows(rows: Tensor, count: int) -> Tensor:
    return rows[torch.randint(len(rows), (count,), device=rows.device)]


@torch.no_grad()
def revive(codec: Codec, uses: Tensor, queries: Tensor) -> int:
    """Move entries that were not used [codebooks, entries] onto recent queries [codebooks, m, d]; returns how many."""
    moved = 0
    for book, count, recent in zip(codebooks(codec), uses, queries, strict=True):
        dead = (count == 0).nonzero().squeeze(-1)
        book.codebook.weight[dead] = random_rows(recent, len(dead))
        moved += len(dead)
    return moved


def perplexities(codes: Tensor, entries: int) -> list[float]:
    """How many codes of each codebook are in use, weighed by how often; codes [codebooks, m]."""
    shares = [torch.bincount(row, minlength=entries).float() / len(row) for row in codes]
    return [math.exp(-(share * (share + 1e-10).log()).sum().item()) for share in shares]


# ---------------------------------------------------------------------------------------------------------------------
# Start.

SPREAD, BRANCH_SPREAD, WAVE_SPREAD = 0.4, 0.12, 0.05


@torch.no_grad()
def initialise(codec: Codec, samples: Tensor) -> None:
    """Weights under which samples [n, N] pass at an even level: louder explodes in Snake, softer goes nowhere."""
    for name, weight in codec.named_parameters():
        if name.endswith("bias"):
            weight.zero_()
        elif name.endswith("gamma"):
            weight.fill_(0.1)
        elif weight.ndim >= 2 and "alpha" not in name:
            weight.normal_(0, weight[0].numel() ** -0.5)
    codec.reserve(samples.shape[-1] // codec.config.frame_length)
    hooks = [layer.register_forward_hook(_level(spread)) for layer, spread in _levelled(codec)]
    past = NoPast()
    latent = codec.encoder(samples[:, None], past)
    for resample, mix in cast("Sequence[tuple[nn.Module, nn.Module]]", codec.quantizer.downsample):
        latent = mix(resample(latent, past), past)
    codec.decoder(codec.quantizer.upscale(codec.quantizer.pre_module(latent, past), past), past)
    for hook in hooks:
        hook.remove()


def _levelled(codec: Codec) -> Iterator[tuple[nn.Module, float]]:
    last = cast(CausalConv, codec.decoder.model[-1])
    branches = [cast(CausalConv, unit.block[-1]).conv for unit in codec.modules() if isinstance(unit, ResidualUnit)]
    for layer in codec.modules():
        if isinstance(layer, CausalConv | CausalUpsample):
            inner = layer.conv
            yield inner, WAVE_SPREAD if layer is last else BRANCH_SPREAD if inner in branches else SPREAD


def _level(spread: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
    def scale(layer: nn.Module, _: object, out: Tensor) -> Tensor:
        factor = spread / (out.std() + 1e-8)
        cast(Tensor, layer.weight).mul_(factor)
        return out * factor

    return scale


# ---------------------------------------------------------------------------------------------------------------------
# Sound.


class Reel:
    """The corpus in device memory, int16, end to end; grows as shards are finished. The first shard is held out."""

    HELD_OUT = "shard-00000"

    def __init__(self, folder: Path, hours: float, sample_rate: int, device: torch.device) -> None:
        self.folder, self.rate = folder, sample_rate
        self.samples = torch.zeros(int(hours * 3600 * sample_rate), dtype=torch.int16, device=device)
        self.filled = torch.zeros((), dtype=torch.long, device=device)
        self.held_out = torch.zeros(0, device=device)
        self.count = 0
        self._seen: set[str] = set()

    @property
    def hours(self) -> float:
        return self.count / self.rate / 3600

    def refresh(self) -> None:
        for lines in sorted(self.folder.glob("shard-*.jsonl")):
            if lines.stem not in self._seen:
                self._seen.add(lines.stem)
                self._append(lines.stem)

    def _append(self, stem: str) -> None:
        sound = torch.from_numpy(np.fromfile((self.folder / stem).with_suffix(".pcm"), dtype="<i2"))
        if stem == self.HELD_OUT:
            self.held_out = sound.to(self.samples.device).float() / 32768
            return
        sound = sound[: len(self.samples) - self.count]
        self.samples[self.count : self.count + len(sound)] = sound.to(self.samples.device)
        self.count += len(sound)
        self.filled.fill_(self.count)

    def crops(self, count: int, length: int) -> Tensor:
        """Random stretches [count, length]. They may run from one utterance into the next, as speech does."""
        start = (torch.rand(count, device=self.samples.device, dtype=torch.float64) * (self.filled - length)).long()
        where = start[:, None] + torch.arange(length, device=start.device)
        return self.samples[where].float() / 32768

    def held_out_crops(self, count: int, length: int) -> Tensor:
        """Always the same stretches [count, length], spread over the held-out shard."""
        count = min(count, len(self.held_out) // length)
        starts = [index * (len(self.held_out) - length) // max(count - 1, 1) for index in range(count)]
        return torch.stack([self.held_out[start : start + length] for start in starts])

    def wait(self, least: int, seconds: float) -> None:
        """Until `least` samples and the held-out shard are there."""
        end = time.monotonic() + seconds
        while self.count < least or not len(self.held_out):
            if time.monotonic() > end:
                raise TimeoutError(f"{self.folder}: {self.count} samples after {seconds:.0f} s")
            self.refresh()
            time.sleep(0.2)


# ---------------------------------------------------------------------------------------------------------------------
# Training.


@dataclass(frozen=True)
class Plan:
    """Everything that decides a run besides the corpus."""

    config: CodecConfig = NANO
    minutes: float = 22.0
    batch: int = 16
    frames: int = 64
    seed: int = 0
    rate: float = 6e-4
    judge_rate: float = 3e-4
    final_share: float = 0.02
    warm_up: int = 400
    free_steps: int = 1000
    layout_frames: int = 65_536
    adversary_from: float = 0.42
    adversary_ramp: int = 600
    revive_every: int = 200
    revive_until: float = 0.8
    ema: float = 0.999
    judge_width: int = 32
    max_steps: int = 1 << 40
    freeze_codes: bool = False
    recoveries: int = 2
    # How many codebooks an example uses; the spread makes every prefix of the codebooks a codec of its own.
    depths: tuple[int, ...] = (10, 10, 10, 10, 10, 10, 10, 8, 8, 8, 8, 8, 8, 8, 8, 6, 6, 4, 9, 7)

    @property
    def length(self) -> int:
        return self.frames * self.config.frame_length


@dataclass
class Pace:
    """Where a run stands; all of it goes into the checkpoint."""

    step: int = 0
    spent: float = 0.0
    quantised_from: int = -1
    adversary_since: int = -1
    rate_scale: float = 1.0
    ramp_from: int = 0


@dataclass(frozen=True)
class Mode:
    """Which losses a step has."""

    codes: bool
    adversary: bool


STATS = ("loss", "mel", "commit", "book", "norm", "judges", "deceive", "features")


def alternate_halves(samples: Tensor) -> Tensor:
    """[n, N] -> [n, N / 2]: ends of even rows, starts of odd ones. Judges cost more than the codec."""
    half = samples.shape[-1] // 2
    return torch.cat((samples[0::2, half:], samples[1::2, :half]))


class Trainer:
    """Networks, optimisers and the buffers that steps read and write; nothing here waits for the device but `stats`."""

    def __init__(self, plan: Plan, reel: Reel, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.reel, self.device, self.dtype = plan, reel, device, dtype
        self.codec = Codec(plan.config).to(device)
        self.codec.reserve(plan.frames)
        self.judges = Discriminators(width=plan.judge_width).to(device)
        self.mel = MelLoss(plan.config.sample_rate).to(device)
        self.encode: Callable[[Codec, Tensor, torch.dtype], Tensor] = encode_latent
        self.decode: Callable[[Codec, Tensor, torch.dtype], Tensor] = decode_latent
        self.pace = Pace()
        self.ema = copy.deepcopy(self.codec)
        self.optimizer = self._adam(self._trained(), plan.rate)
        self.judge_optimizer = self._adam(list(self.judges.parameters()), plan.judge_rate)
        books, entries = plan.config.num_codebooks, plan.config.codebook_size
        self.uses = torch.zeros(books, entries, dtype=torch.long, device=device)
        self.queries = torch.zeros(books, plan.batch * plan.frames, plan.config.codebook_dim, device=device)
        self.depths = torch.tensor([min(depth, books) for depth in plan.depths], device=device)
        self.means = torch.zeros(len(STATS), device=device)
        self.usual_norm = torch.zeros((), device=device)
        self.adversary_weight = torch.zeros((), device=device)

    def _trained(self) -> list[nn.Parameter]:
        if not self.plan.freeze_codes:
            return list(self.codec.parameters())
        self.codec.requires_grad_(False)
        quantizer = self.codec.quantizer
        parts = (quantizer.post_module, quantizer.upsample, self.codec.decoder)
        return [weight for part in parts for weight in part.requires_grad_(True).parameters()]

    def _adam(self, weights: list[nn.Parameter], rate: float) -> torch.optim.AdamW:
        if self.device.type != "cuda":
            return torch.optim.AdamW(weights, lr=rate, betas=BETAS, weight_decay=0.0)
        held = torch.tensor(rate, device=self.device)
        return torch.optim.AdamW(weights, lr=held, betas=BETAS, weight_decay=0.0, fused=True, capturable=True)

    def step(self, mode: Mode) -> None:
        """One update of everything. No host reads: a graph can hold all of it."""
        samples = self.reel.crops(self.plan.batch, self.plan.length)
        self.optimizer.zero_grad(set_to_none=True)
        latent, commit, book = self._latent(samples, mode)
        made = self.decode(self.codec, latent, self.dtype)
        mel = self.mel(made, samples)
        loss = MEL_WEIGHT * mel + COMMIT_WEIGHT * commit + BOOK_WEIGHT * book
        judged = [torch.zeros_like(mel)] * 3
        if mode.adversary:
            *judged, pull = self._judge(samples, made)
            torch.autograd.backward([loss, made], [torch.ones_like(loss), pull])
        else:
            loss.backward()
        norm = self._clip()
        self.optimizer.step()
        self._average()
        self._note(torch.stack([loss, mel, commit, book, norm, *judged]))

    def _latent(self, samples: Tensor, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
        with torch.set_grad_enabled(not self.plan.freeze_codes):
            latent = self.encode(self.codec, samples, self.dtype)
            if not mode.codes:
                return latent, latent.new_zeros(()), latent.new_zeros(())
            active = self.depths[torch.randint(len(self.depths), (len(samples),), device=self.device)]
            found = quantise(self.codec, latent, active)
        self.uses.scatter_add_(1, found.codes, torch.ones_like(found.codes))
        self.queries.copy_(found.queries)
        return found.latent, found.commit, found.book

    def _judge(self, samples: Tensor, made: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Update the judges; returns their loss, the two losses of the codec, and its gradient at the samples made."""
        leaf = made.detach().requires_grad_()
        real = self.judges(alternate_halves(samples), self.dtype)
        fake = self.judges(alternate_halves(leaf), self.dtype)
        judging = discriminator_loss(real.logits, fake.logits)
        weights = list(self.judges.parameters())
        # One forward serves both sides: each asks for its own gradients only, so nothing is computed twice.
        gradients = torch.autograd.grad(judging, weights, retain_graph=True)
        deceive, features = deception_loss(fake.logits), feature_loss(real.features, fake.features)
        (pull,) = torch.autograd.grad(self.adversary_weight * (deceive + FEATURE_WEIGHT * features), leaf)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.contiguous()  # convolutions give theirs in their own order of memory
        nn.utils.clip_grad_norm_(weights, 10.0)
        self.judge_optimizer.step()
        return judging.detach(), deceive.detach(), features.detach(), pull

    def _clip(self) -> Tensor:
        """Hold a step's gradient to three times the usual norm; what is usual, the run finds out itself."""
        gradients = [w.grad for group in self.optimizer.param_groups for w in group["params"] if w.grad is not None]
        # Where silence meets speech the norms amplify by hundreds each, and a gradient can leave fp32 altogether (seen
        # at the fresh codec and again after 16,000 steps). Such a step says nothing: it is left out, not scaled down,
        # since infinity times zero would end the run.
        for gradient in gradients:
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        norm = torch.nn.utils.get_total_norm(torch._foreach_clamp_min(torch._foreach_clamp_max(gradients, 1e9), -1e9))
        usual = torch.where(self.usual_norm > 0, self.usual_norm, norm)
        share = torch.where(norm > 30 * usual, torch.zeros_like(norm), (3 * usual / (norm + 1e-6)).clamp(max=1.0))
        torch._foreach_mul_(gradients, share)
        self.usual_norm.copy_(usual.lerp(torch.minimum(norm, 3 * usual), 0.02))
        return norm

    @torch.no_grad()
    def _average(self) -> None:
        torch._foreach_lerp_(list(self.ema.parameters()), list(self.codec.parameters()), 1 - self.plan.ema)

    @torch.no_grad()
    def _note(self, now: Tensor) -> None:
        now = now.detach().float()
        self.means.copy_(torch.where(self.means == 0, now, self.means.lerp(now, 0.02)))

    def stats(self) -> dict[str, float]:
        """Running means; raises Diverged. The one place where a step's numbers reach the host."""
        found = dict(zip(STATS, self.means.tolist(), strict=True))
        if not all(math.isfinite(value) for value in found.values()):
            raise Diverged(f"step {self.pace.step}: {found}")
        return {key: round(value, 4) for key, value in found.items()}

    @torch.no_grad()
    def begin_codes(self) -> None:
        """Lay out the codebooks from the latents of the codec as it is."""
        batches = self.plan.layout_frames // (self.plan.batch * self.plan.frames)
        crops = (self.reel.crops(self.plan.batch, self.plan.length) for _ in range(batches))
        # The plain form: a compiled one would be compiled again, for want of gradients.
        latents = torch.cat([encode_latent(self.codec, crop, self.dtype).flatten(0, 1) for crop in crops])
        lay_out_codebooks(self.codec, latents)
        self.follow()
        self.pace.quantised_from = self.pace.ramp_from = self.pace.step

    @torch.no_grad()
    def follow(self) -> None:
        """Start the averaged codec anew from the trained one."""
        for held, weight in zip(self.ema.parameters(), self.codec.parameters(), strict=True):
            held.copy_(weight)

    @torch.no_grad()
    def validate(self, depths: Sequence[int]) -> dict[str, Any]:
        """Mel loss of the averaged codec by number of codebooks, and their perplexities."""
        crops = self.reel.held_out_crops(64, self.plan.length)
        report: dict[str, Any] = {}
        for depth in depths:
            losses, codes = [], []
            for crop in crops.split(self.plan.batch):
                found = quantise(
                    self.ema,
                    encode_latent(self.ema, crop, self.dtype),
                    torch.full((len(crop),), depth, device=self.device),
                )
                losses.append(self.mel(decode_latent(self.ema, found.latent, self.dtype), crop) * len(crop))
                codes.append(found.codes)
            report[f"mel_{depth}"] = round((torch.stack(losses).sum() / len(crops)).item(), 4)
        report["perplexity"] = [round(p) for p in perplexities(torch.cat(codes, 1), self.plan.config.codebook_size)]
        return report

    def set_rate(self, share: float) -> None:
        for optimizer, rate in ((self.optimizer, self.plan.rate), (self.judge_optimizer, self.plan.judge_rate)):
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * share)
                else:
                    group["lr"] = rate * share

    def state(self) -> dict[str, Any]:
        parts = ("codec", "ema", "judges", "optimizer", "judge_optimizer")
        return {
            **{name: getattr(self, name).state_dict() for name in parts},
            "pace": vars(self.pace),
            "config": self.plan.config.to_dict(),
            "usual_norm": self.usual_norm,
        }

    def load(self, state: dict[str, Any]) -> None:
        for name in ("codec", "ema", "judges", "optimizer", "judge_optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.pace = Pace(**state["pace"])
        self.usual_norm.copy_(state["usual_norm"])
        self.means.zero_()


# ---------------------------------------------------------------------------------------------------------------------
# Speed: compiled networks and captured steps, each with a way back.


def compile_networks(trainer: Trainer) -> None:
    """Compile both halves; on any failure train with the plain ones."""
    plain = (trainer.encode, trainer.decode)
    try:
        # A value read by several shifted copies is written out once, not computed again for each.
        options: dict[str, Any] = {"realize_reads_threshold": 1}
        trainer.encode = torch.compile(encode_latent, dynamic=False, fullgraph=True, options=options)
        trainer.decode = torch.compile(decode_latent, dynamic=False, fullgraph=True, options=options)
        began = time.monotonic()
        with torch.set_grad_enabled(not trainer.plan.freeze_codes):
            noise = 0.1 * torch.randn(trainer.plan.batch, trainer.plan.length, device=trainer.device)
            latent = trainer.encode(trainer.codec, noise, trainer.dtype)
        trainer.decode(trainer.codec, latent, trainer.dtype).square().mean().backward()
        trainer.codec.zero_grad(set_to_none=True)
        logger.info("compiled in %.0f s", time.monotonic() - began)
    except Exception as problem:  # noqa: BLE001 - whatever the compiler raises, plain code still trains
        logger.warning("not compiled: %s", problem)
        trainer.encode, trainer.decode = plain


def make_runner(trainer: Trainer, mode: Mode, *, capture: bool) -> Callable[[], None]:
    """A step of this mode, captured as one graph where that works. Takes a few steps on the way."""

    def plain() -> None:
        trainer.step(mode)

    if not capture or trainer.device.type != "cuda":
        return plain
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            trainer.step(mode)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            trainer.step(mode)
    except Exception as problem:  # noqa: BLE001 - a step that cannot be captured is slow, not wrong
        logger.warning("not captured: %s", problem)
        torch.cuda.synchronize()
        return plain
    return graph.replay


# ---------------------------------------------------------------------------------------------------------------------
# The run.


@dataclass
class Run:
    """The loop around the steps: schedule, log, validation, checkpoints."""

    trainer: Trainer
    out: Path
    began: float
    capture: bool = True
    log_every: int = 200
    validate_seconds: float = 75.0
    checkpoint_seconds: float = 60.0
    refresh_seconds: float = 5.0
    mode: Mode | None = None
    runner: Callable[[], None] | None = None
    recovered: int = 0
    due: dict[str, float] = field(default_factory=dict)
    marked: tuple[int, float] = (0, 0.0)

    @property
    def pace(self) -> Pace:
        return self.trainer.pace

    @property
    def share(self) -> float:
        """Of the whole time, how much is over."""
        return min((time.monotonic() - self.began) / (60 * self.trainer.plan.minutes), 1.0)

    def go(self) -> None:
        """Until the time is over; raises Diverged when recovering did not help."""
        self.due = {name: time.monotonic() + 5 for name in ("validate", "checkpoint", "refresh")}
        while self.share < 1 and self.pace.step < self.trainer.plan.max_steps and not (self.out / "stop").exists():
            try:
                self._advance()
            except Diverged as problem:
                self._recover(problem)
        self.trainer.stats()
        self._validate()
        self._checkpoint()

    def _advance(self) -> None:
        trainer, plan = self.trainer, self.trainer.plan
        if not plan.freeze_codes and self.pace.step >= plan.free_steps and self.pace.quantised_from < 0:
            trainer.begin_codes()
        self._choose_mode()
        if self.pace.step % 10 == 0:
            self._set_weights()
        assert self.runner is not None
        self.runner()
        self.pace.step += 1
        if self.pace.step % self.log_every == 0:
            self._report()
        if self.mode is not None and self.mode.codes and self.pace.step % plan.revive_every == 0:
            self._revive()
        if self.pace.step % 10 == 0:
            self._look_at_the_clock()

    def _choose_mode(self) -> None:
        plan = self.trainer.plan
        coded = self.pace.quantised_from >= 0
        adversary = coded and (self.pace.adversary_since >= 0 or self.share >= plan.adversary_from)
        wanted = Mode(coded, adversary)
        if wanted == self.mode:
            return
        if adversary and self.pace.adversary_since < 0:
            self.pace.adversary_since = self.pace.step
        self.mode, self.runner = wanted, None
        self._set_weights()
        self.runner = make_runner(self.trainer, wanted, capture=self.capture)
        self.marked = (self.pace.step, time.monotonic())
        self.write({"mode": vars(wanted), "step": self.pace.step})

    def _set_weights(self) -> None:
        """Learning rate: a cosine over the whole time, warmed up at the start and after the codebooks are laid out."""
        plan, step = self.trainer.plan, self.pace.step
        cosine = plan.final_share + (1 - plan.final_share) * 0.5 * (1 + math.cos(math.pi * self.share))
        warm = min(1.0, (step - self.pace.ramp_from + 10) / plan.warm_up)
        self.trainer.set_rate(cosine * warm * self.pace.rate_scale)
        if self.pace.adversary_since >= 0:
            self.trainer.adversary_weight.fill_(min(1.0, (step - self.pace.adversary_since) / plan.adversary_ramp))

    def _report(self) -> None:
        stats = self.trainer.stats()
        now = time.monotonic()
        step, then = self.marked
        self.marked = (self.pace.step, now)
        pace = {"step": self.pace.step, "share": round(self.share, 4), "hours": round(self.trainer.reel.hours, 1)}
        self.write({**pace, "ms": round(1000 * (now - then) / max(self.pace.step - step, 1), 2), **stats})

    def _revive(self) -> None:
        trainer = self.trainer
        moved = 0
        if self.share < trainer.plan.revive_until and not trainer.plan.freeze_codes:
            moved = revive(trainer.codec, trainer.uses, trainer.queries)
        if moved:
            self.write({"step": self.pace.step, "revived": moved})
        trainer.uses.zero_()

    def _look_at_the_clock(self) -> None:
        tasks: tuple[tuple[str, float, Callable[[], None]], ...] = (
            ("refresh", self.refresh_seconds, self.trainer.reel.refresh),
            ("validate", self.validate_seconds, self._validate),
            ("checkpoint", self.checkpoint_seconds, self._checkpoint),
        )
        for name, period, work in tasks:
            if time.monotonic() >= self.due[name]:
                work()
                self.due[name] = time.monotonic() + period

    def _validate(self) -> None:
        if self.pace.quantised_from < 0:
            return
        books = self.trainer.plan.config.num_codebooks
        depths = sorted({min(depth, books) for depth in (6, 8)} | {books})
        self.write({"step": self.pace.step, "validation": self.trainer.validate(depths)})

    def _checkpoint(self) -> None:
        """A checkpoint is never half written, and never holds a codec that has diverged."""
        self.trainer.stats()
        self.pace.spent = time.monotonic() - self.began
        temporary = self.out / "state.pt.tmp"
        torch.save(self.trainer.state(), temporary)
        temporary.replace(self.out / "state.pt")
        self.export()  # small beside the state, and all that is left if the machine goes away

    def _recover(self, problem: Diverged) -> None:
        """Go back to the last checkpoint and on with half the learning rate."""
        stored = self.out / "state.pt"
        self.write({"diverged": str(problem)})
        if self.recovered >= self.trainer.plan.recoveries or not stored.exists():
            raise problem
        self.recovered += 1
        scale = self.pace.rate_scale
        self.trainer.load(torch.load(stored, map_location=self.trainer.device, weights_only=True))
        self.pace.rate_scale = scale / 2
        self.pace.ramp_from = self.pace.step
        self.mode = None  # the optimisers hold new tensors, so the step has to be captured again

    def export(self) -> None:
        save_codec(self.trainer.ema, self.out)
        judges = {name: value.half().contiguous() for name, value in self.trainer.judges.state_dict().items()}
        save_whole(judges, self.out / "discriminators.safetensors")

    def write(self, line: dict[str, Any]) -> None:
        line = {"t": round(time.monotonic() - self.began, 1), **line}
        text = json.dumps(line)
        with (self.out / "log.jsonl").open("a") as log:
            log.write(text + "\n")
        print(text, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Files.


def save_codec(codec: Codec, folder: Path, dtype: torch.dtype = torch.float32, piece_bytes: int = PIECE_BYTES) -> None:
    """Write codec.json and the weights, in as many files as their size asks for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "codec.json").write_text(json.dumps(codec.config.to_dict(), indent=1) + "\n")
    pieces: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in codec.state_dict().items():
        stored = value.detach().to("cpu", dtype).contiguous()
        if size + stored.nbytes > piece_bytes:
            pieces.append({})
            size = 0
        pieces[-1][name] = stored
        size += stored.nbytes
    count = len(pieces)
    names = (
        [f"codec-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)] if count > 1 else ["codec.safetensors"]
    )
    for old in folder.glob("codec*.safetensors"):
        if old.name not in names:
            old.unlink()
    for name, piece in zip(names, pieces, strict=True):
        save_whole(piece, folder / name)


def save_whole(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file that is either the old one or the new one, whenever we are stopped."""
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.replace(path)


def load_codec(folder: Path) -> Codec:
    """A codec from what `save_codec` wrote, in fp32."""
    codec = Codec(CodecConfig.from_dict(json.loads((folder / "codec.json").read_text())))
    stored: dict[str, Tensor] = {}
    for piece in sorted(folder.glob("codec*.safetensors")):
        stored |= load_file(piece)
    codec.load_state_dict({name: value.float() for name, value in stored.items()})
    return codec


def keep_codebooks(codec: Codec, count: int) -> Codec:
    """The codec of the first `count` codebooks alone."""
    smaller = Codec(replace(codec.config, n_codebooks=count - 1))
    wanted = smaller.state_dict().keys()
    smaller.load_state_dict({name: value for name, value in codec.state_dict().items() if name in wanted})
    return smaller


# ---------------------------------------------------------------------------------------------------------------------
# Command line.


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.codec", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder of shards; may still be growing")
    parser.add_argument("--out", type=Path, required=True, help="log, checkpoint and the finished codec")
    parser.add_argument("--minutes", type=float, default=Plan.minutes, help="wall clock from start to finished files")
    parser.add_argument("--hours", type=float, default=120.0, help="most speech to keep in device memory")
    parser.add_argument("--batch", type=int, default=Plan.batch)
    parser.add_argument("--frames", type=int, default=Plan.frames, help="frames per example")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=Plan.rate, help="peak learning rate of the codec")
    parser.add_argument("--judge-rate", type=float, default=Plan.judge_rate)
    parser.add_argument("--adversary-from", type=float, default=Plan.adversary_from, help="share of the time")
    parser.add_argument("--max-steps", type=int, default=Plan.max_steps)
    parser.add_argument("--resume", type=Path, help="checkpoint (state.pt) to go on from, on its own schedule")
    parser.add_argument("--start", type=Path, help="folder of a finished codec to begin a new schedule with")
    parser.add_argument("--freeze-codes", action="store_true", help="with --start: train the decoding side only")
    parser.add_argument("--plain", action="store_true", help="neither compile nor capture")
    options = parser.parse_args(arguments)
    if options.freeze_codes and options.start is None and options.resume is None:
        parser.error("--freeze-codes needs the codec whose codes to keep: --start or --resume")
    return options


def make_plan(options: argparse.Namespace) -> Plan:
    plan = Plan(
        minutes=options.minutes,
        batch=options.batch,
        frames=options.frames,
        seed=options.seed,
        rate=options.rate,
        judge_rate=options.judge_rate,
        adversary_from=options.adversary_from,
        max_steps=options.max_steps,
        freeze_codes=options.freeze_codes,
    )
    if options.resume is not None:
        config = torch.load(options.resume, map_location="cpu", weights_only=True)["config"]
        return replace(plan, config=CodecConfig.from_dict(config))
    if options.start is not None:
        return replace(plan, config=load_codec(options.start).config, adversary_from=0.0)
    return plan


def prepare(trainer: Trainer, options: argparse.Namespace) -> float:
    """Give the trainer its weights; returns the seconds that an earlier run already spent."""
    if options.resume is not None:
        trainer.load(torch.load(options.resume, map_location=trainer.device, weights_only=True))
        return trainer.pace.spent
    if options.start is not None:
        trainer.codec.load_state_dict(load_codec(options.start).state_dict())
        judges = options.start / "discriminators.safetensors"
        if judges.exists():
            trainer.judges.load_state_dict({name: value.float() for name, value in load_file(judges).items()})
        trainer.pace.quantised_from = 0
    else:
        initialise(trainer.codec, trainer.reel.crops(trainer.plan.batch, trainer.plan.length))
    trainer.follow()
    return 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    began = time.monotonic()
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    plan = make_plan(options)
    reel = Reel(options.corpus, options.hours, plan.config.sample_rate, device)
    trainer = Trainer(plan, reel, device, dtype)
    if not options.plain:
        compile_networks(trainer)
    reel.wait(20 * plan.batch * plan.length, 60 * plan.minutes)
    spent = prepare(trainer, options)
    Run(trainer, options.out, began - spent, capture=not options.plain).go()


if __name__ == "__main__":
    main()
