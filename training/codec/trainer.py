"""One step of training: losses, discriminators, averages, and the state that a checkpoint holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.codec.dac import Codec
from training.codec.augment import augment
from training.codec.networks import decode_excerpts, encode_latent
from training.codec.plan import Mode, Pace, Plan
from training.codec.quantiser import lay_out_codebooks, look_up, quantise
from training.codec.reel import UNKNOWN, CodedReel, Reel
from training.codec_losses import MelLoss, deception_loss, discriminator_loss, feature_loss
from training.discriminators import Discriminators
from training.means import Means
from training.optimisers import adam, clip_to_running_norm, set_rate

MEL_WEIGHT, COMMIT_WEIGHT, BOOK_WEIGHT, FEATURE_WEIGHT = 15.0, 0.25, 1.0, 2.0
BETAS = (0.8, 0.99)
STATS = ("loss", "mel", "commit", "book", "phonemes", "norm", "discriminators", "deceive", "features")
STORED = ("codec", "ema", "discriminators", "classifier", "optimizer", "discriminator_optimizer")
PHONEMES = 178  # tokens of the teacher's vocabulary


def alternate_halves(samples: Tensor) -> Tensor:
    """Return the ends of even rows and the starts of odd ones, [n, N] -> [n, N / 2]: discriminators are slow."""
    half = samples.shape[-1] // 2
    return torch.cat((samples[0::2, half:], samples[1::2, :half]))


def excerpts(samples: Tensor, starts: Tensor, length: int) -> Tensor:
    """Samples [n, N] -> [n, length], row i from starts[i] on."""
    return samples.gather(1, starts[:, None] + torch.arange(length, device=samples.device))


def phoneme_loss(logits: Tensor, phonemes: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [n, T, classes] over frames [n, T] whose phoneme is known."""
    known = phonemes != UNKNOWN
    lost = F.cross_entropy(logits.transpose(1, 2), torch.where(known, phonemes, 0), reduction="none")
    return (lost * known).sum() / known.sum().clamp(min=1)


class Trainer:
    """Networks, optimisers and buffers of the steps. Only `stats` synchronizes with the device."""

    def __init__(self, plan: Plan, reel: Reel, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.reel, self.device, self.dtype = plan, reel, device, dtype
        self.codec = Codec(plan.config).to(device)
        self.codec.reserve(plan.frames)
        self.discriminators = Discriminators(width=plan.discriminator_width).to(device)
        self.classifier = nn.Linear(plan.config.latent_dim, PHONEMES, device=device)
        self.mel = MelLoss(plan.config.sample_rate).to(device)
        self.encode: Callable[[Codec, Tensor, torch.dtype], Tensor] = encode_latent
        self.decode: Callable[[Codec, Tensor, Tensor, int, torch.dtype], Tensor] = decode_excerpts
        self.coded = isinstance(reel, CodedReel)
        self.pace = Pace()
        self.ema = copy.deepcopy(self.codec)
        self.optimizer = adam(self._trained(), plan.rate, device, BETAS)
        self.discriminator_optimizer = adam(
            list(self.discriminators.parameters()), plan.discriminator_rate, device, BETAS
        )
        books, entries = plan.config.num_codebooks, plan.config.codebook_size
        self.uses = torch.zeros(books, entries, dtype=torch.long, device=device)
        self.queries = torch.zeros(books, plan.batch * plan.frames, plan.config.codebook_dim, device=device)
        self.depths = torch.tensor([min(depth, books) for depth in plan.depths], device=device)
        self.means = Means(STATS, device)
        self.running_norm = torch.zeros((), device=device)
        self.adversary_weight = torch.zeros((), device=device)

    def _trained(self) -> list[nn.Parameter]:
        if not self.plan.freeze_codes:
            return [*self.codec.parameters(), *self.classifier.parameters()]
        self.codec.requires_grad_(False)
        quantizer = self.codec.quantizer
        parts = (quantizer.post_module, quantizer.upsample, self.codec.decoder)
        trained = {name: weight for part in parts for name, weight in part.named_parameters(prefix=str(id(part)))}
        # Snake's parameters keep their shape, which is part of the fingerprint that identifies a codec.
        return [weight.requires_grad_(True) for name, weight in trained.items() if not name.endswith("alpha")]

    def step(self, mode: Mode) -> None:
        """Update codec and discriminators once. No host synchronization, so it can be captured."""
        self.optimizer.zero_grad(set_to_none=True)
        samples, latent, commit, book, phoneme = self._coded_example() if self.coded else self._encoded_example(mode)
        starts = self.choose_starts(len(latent))
        made = self.decode(self.codec, latent, starts, self.plan.heard_frames, self.dtype)
        samples = excerpts(samples, starts * self.plan.config.frame_length, made.shape[1])
        mel = self.mel(made, samples)
        loss = MEL_WEIGHT * mel + COMMIT_WEIGHT * commit + BOOK_WEIGHT * book + self.plan.phoneme_weight * phoneme
        adversarial = [torch.zeros_like(mel)] * 3
        if mode.adversary:
            *adversarial, pull = self._update_discriminators(samples, made)
            torch.autograd.backward([loss, made], [torch.ones_like(loss), pull])
        else:
            loss.backward()
        norm = self._clip()
        self.optimizer.step()
        self._average()
        self.means.note(torch.stack([loss, mel, commit, book, phoneme, norm, *adversarial]))

    def _encoded_example(self, mode: Mode) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        samples, phonemes = self.examples()
        return samples, *self._latent(samples, phonemes, mode)

    @torch.no_grad()
    def _coded_example(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return samples and the latent of stored codes; the losses of the encoding side are zero."""
        assert isinstance(self.reel, CodedReel)
        samples, codes = self.reel.coded_crops(self.plan.batch, self.plan.sampled_share)
        latent = look_up(self.codec, codes)
        zero = latent.new_zeros(())
        return samples, latent, zero, zero, zero

    def choose_starts(self, count: int) -> Tensor:
        """Return the frame at which each decoded excerpt begins [count]."""
        return torch.randint(self.plan.frames - self.plan.heard_frames + 1, (count,), device=self.device)

    def examples(self) -> tuple[Tensor, Tensor]:
        """Return samples [batch, length], some augmented, and phoneme ids [batch, frames]."""
        config, plan = self.plan.config, self.plan
        samples, phonemes = self.reel.labelled_crops(plan.batch, plan.length, config.frame_length)
        if plan.augmented_share > 0:
            samples = augment(samples, config.sample_rate, plan.augmented_share)
        return samples, phonemes

    def _latent(self, samples: Tensor, phonemes: Tensor, mode: Mode) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the latent and the losses of commitment, codebooks and phonemes."""
        with torch.set_grad_enabled(not self.plan.freeze_codes):
            latent = self.encode(self.codec, samples, self.dtype)
            zero = latent.new_zeros(())
            if not mode.codes:
                return latent, zero, zero, zero
            active = self.depths[torch.randint(len(self.depths), (len(samples),), device=self.device)]
            found = quantise(self.codec, latent, active)
        self.uses.scatter_add_(1, found.codes, torch.ones_like(found.codes))
        self.queries.copy_(found.queries)
        phoneme = phoneme_loss(self.classifier(found.semantic), phonemes)
        return found.latent, found.commit, found.book, phoneme

    def _update_discriminators(self, samples: Tensor, made: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Update the discriminators; return their loss, two losses of the codec, its gradient at `made`."""
        leaf = made.detach().requires_grad_()
        view = alternate_halves if self.plan.decoded_frames == 0 else torch.Tensor.contiguous
        real, fake = self.discriminators(view(samples), self.dtype), self.discriminators(view(leaf), self.dtype)
        loss = discriminator_loss(real.logits, fake.logits)
        weights = list(self.discriminators.parameters())
        # One forward pass serves codec and discriminators; each computes only its own gradients.
        gradients = torch.autograd.grad(loss, weights, retain_graph=True)
        deceive, features = deception_loss(fake.logits), feature_loss(real.features, fake.features)
        (pull,) = torch.autograd.grad(self.adversary_weight * (deceive + FEATURE_WEIGHT * features), leaf)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.contiguous()  # convolutions return another memory layout
        nn.utils.clip_grad_norm_(weights, 10.0)
        self.discriminator_optimizer.step()
        return loss.detach(), deceive.detach(), features.detach(), pull

    def _clip(self) -> Tensor:
        """Clip the gradients relative to their running norm and return their norm."""
        gradients = [w.grad for group in self.optimizer.param_groups for w in group["params"] if w.grad is not None]
        # Where silence meets speech the norms amplify by hundreds each, and a gradient can leave fp32 altogether (seen
        # at the fresh codec and again after 16,000 steps). Such a step is skipped, not scaled down:
        # infinity times zero would end the run.
        for gradient in gradients:
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        bounded = torch._foreach_clamp_min(torch._foreach_clamp_max(gradients, 1e9), -1e9)
        norm = nn.utils.get_total_norm(bounded)
        clip_to_running_norm(gradients, norm, self.running_norm, leave_out=30.0)
        return norm

    @torch.no_grad()
    def _average(self) -> None:
        torch._foreach_lerp_(list(self.ema.parameters()), list(self.codec.parameters()), 1 - self.plan.ema)

    def stats(self) -> dict[str, float]:
        """Read the means of the steps, the only host synchronization. Raises Diverged."""
        return self.means.read(self.pace.step)

    @torch.no_grad()
    def begin_codes(self) -> None:
        """Initialise the codebooks from latents of the current codec."""
        batches = self.plan.layout_frames // (self.plan.batch * self.plan.frames)
        crops = (self.examples()[0] for _ in range(batches))
        # Uncompiled: without gradients the compiled function would be compiled again.
        latents = torch.cat([encode_latent(self.codec, crop, self.dtype).flatten(0, 1) for crop in crops])
        lay_out_codebooks(self.codec, latents)
        self.follow()
        self.pace.quantised_from = self.pace.ramp_from = self.pace.step

    @torch.no_grad()
    def follow(self) -> None:
        """Reset the averaged codec to the trained one."""
        for held, weight in zip(self.ema.parameters(), self.codec.parameters(), strict=True):
            held.copy_(weight)

    def set_rate(self, share: float) -> None:
        set_rate(self.optimizer, self.plan.rate * share)
        set_rate(self.discriminator_optimizer, self.plan.discriminator_rate * share)

    def state(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name).state_dict() for name in STORED},
            "pace": vars(self.pace),
            "config": self.plan.config.to_dict(),
            "running_norm": self.running_norm,
        }

    def load(self, state: dict[str, Any]) -> None:
        for name in STORED:
            getattr(self, name).load_state_dict(state[name])
        self.pace = Pace(**state["pace"])
        self.running_norm.copy_(state["running_norm"])
        self.means.clear()
