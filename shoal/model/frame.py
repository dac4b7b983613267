"""Hidden state of the slow transformer -> next frame: the semantic token, then the codes of the other codebooks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.kernels.sampling.sample import apply_repetition_penalty, exponential_noise, exponential_race, probabilities
from shoal.kernels.sampling.sample_token import RAS_TEMPERATURE, RAS_TOP_P, SEMANTIC_LANE
from shoal.model.cache import DenseKVCache
from shoal.model.config import DualARConfig
from shoal.model.dual_ar import DualAR
from shoal.model.sampling import SamplingTensors
from shoal.model.slow import Head

# (seed [n], frame [n], lane, size) -> Exp(1) noise [n, size], or [n, k, size] for k lanes
Noise = Callable[[Tensor, Tensor, int | Tensor, int], Tensor]


@dataclass(slots=True)
class FrameState:
    """Sampling state of n sequences."""

    settings: SamplingTensors
    frame: Tensor  # [n] number of frames sampled so far
    window: Tensor  # [n, 1 + codebooks, W] recent tokens, filled from the left, then sliding

    @classmethod
    def initial(cls, config: DualARConfig, settings: SamplingTensors) -> "FrameState":
        rows, device = len(settings.seed), settings.seed.device
        length = config.family.repetition_window
        return cls(
            settings=settings,
            frame=torch.zeros(rows, dtype=torch.long, device=device),
            window=torch.zeros(rows, 1 + config.num_codebooks, length, dtype=torch.long, device=device),
        )

    def advance(self, tokens: Tensor) -> None:
        """Count the frame and append its tokens [n, 1 + codebooks] to the window. As upstream, not those of frame 0."""
        length = self.window.shape[-1]
        index = torch.arange(length, device=tokens.device)
        # Frame 1 goes to index 0; from frame length + 1 on the window slides and the newest token goes last.
        full = (self.frame > length)[:, None, None]
        shifted = torch.where(full, self.window.roll(-1, dims=-1), self.window)
        newest = index == (self.frame - 1).clamp_max(length - 1)[:, None]
        self.window = torch.where(newest[:, None], tokens[:, :, None], shifted)
        self.frame = self.frame + 1


class FrameSampler:
    """Samples one frame per call for a batch of sequences, by the repetition rule of the model's family.

    Not thread-safe: the KV cache of the fast transformer is reused between calls.
    """

    def __init__(self, model: DualAR, head: Head, noise: Noise = exponential_noise, *, max_rows: int = 1) -> None:
        """Create a sampler; its first call allocates a KV cache of `max_rows` rows or more, which grows when needed."""
        self.max_rows = max_rows
        self.model, self.head, self.noise = model, head, noise
        self.family = model.config.family
        self._cache: DenseKVCache | None = None  # sized for the largest batch so far

    def sample(self, hidden: Tensor, state: FrameState) -> Tensor:
        """Sample tokens [n, 1 + codebooks] from hidden states [n, dim] before the final norm. Advances the state."""
        normed = self.model.slow.norm(hidden)
        semantic = self.head.ids[self.sample_semantic(self.head(normed), state)]
        codes = self._sample_codes(self.model.fast_input(hidden, normed), semantic, state)
        tokens = torch.cat((semantic[:, None], codes), dim=1)
        state.advance(tokens)
        return tokens

    def sample_semantic(self, logits: Tensor, state: FrameState) -> Tensor:
        """Sample logit indices [n] of the head from its logits [n, size]."""
        if self.family.uses_ras:
            return self._sample_semantic_ras(logits, state)
        settings = state.settings
        if settings.has_penalty:
            logits = apply_repetition_penalty(logits, penalized_semantic(state, self.head), effective_penalty(state))
        noise = self._semantic_noise(state, SEMANTIC_LANE)
        return self._race(logits, settings.temperature, settings.top_p, state, noise)

    def _sample_semantic_ras(self, logits: Tensor, state: FrameState) -> Tensor:
        """Repetition-aware sampling: a semantic token found in the window is resampled from a flatter distribution."""
        settings = state.settings
        noise = self._semantic_noise(state, SEMANTIC_LANE)
        first = self._race(logits, settings.temperature, settings.top_p, state, noise)
        flat = torch.full_like(settings.temperature, RAS_TEMPERATURE), torch.full_like(settings.top_p, RAS_TOP_P)
        second = self._race(logits, *flat, state, self._semantic_noise(state, self.model.config.num_codebooks))
        semantic = self.head.ids[first]
        # The stop token is never in the window, because it ends the sequence.
        repeated = (state.window[:, 0] == semantic[:, None]).any(-1) & (semantic != self.head.stop_id)
        return torch.where(repeated & (state.frame > 0), second, first)

    def _sample_codes(self, hidden: Tensor, semantic: Tensor, state: FrameState) -> Tensor:
        config, fast, cache = self.model.config, self.model.fast, self._empty_cache(len(hidden))
        codes = [(semantic - config.semantic_begin_id).clamp(0, config.codebook_size - 1)]
        lanes = torch.arange(1, config.num_codebooks, device=semantic.device)
        noise = self.noise(state.settings.seed, state.frame, lanes, config.residual_size)
        for codebook in range(1, config.num_codebooks):
            logits = (
                fast.first_logits(hidden, codes[0], cache)
                if codebook == 1
                else fast.next_logits(codes[-1], codebook, cache)
            )
            codes.append(self._sample_code(logits, codebook, state, noise[:, codebook - 1]))
        return torch.stack(codes, dim=1)

    def _empty_cache(self, rows: int) -> DenseKVCache:
        """Return an empty KV cache for one frame of the fast transformer; the memory is reused between calls."""
        if self._cache is None or self._cache.rows < rows:
            model, length = self.model, self.model.config.num_codebooks
            largest = max(rows, self.max_rows)
            self._cache = DenseKVCache(model.config.fast, largest, length, model.dtype, model.device)
        return self._cache.first_rows(rows)

    def _sample_code(self, logits: Tensor, codebook: int, state: FrameState, noise: Tensor) -> Tensor:
        settings = state.settings
        if self.family.uses_penalty and settings.has_penalty:
            codes = penalized_codes(state, codebook, logits.shape[-1])
            logits = apply_repetition_penalty(logits, codes, effective_penalty(state))
        return self._race(logits, settings.temperature, settings.top_p, state, noise)

    def _race(self, logits: Tensor, temperature: Tensor, top_p: Tensor, state: FrameState, noise: Tensor) -> Tensor:
        return exponential_race(probabilities(logits, temperature, top_p, state.settings.top_k), noise)

    def _semantic_noise(self, state: FrameState, lane: int) -> Tensor:
        return self.noise(state.settings.seed, state.frame, lane, len(self.head.ids))


def penalized_semantic(state: FrameState, head: Head) -> Tensor:
    """Return logit indices [n, k] of the semantic tokens to penalize; `len(head.ids)` marks unused entries."""
    # Upstream indexes the wrong axis: it takes the 1 + codebooks numbers of the window's oldest token as ids.
    oldest, recent = head.logit_index(state.window[:, :, 0]), head.logit_index(state.window[:, 0])
    unused, whole = len(head.ids), state.settings.whole_window[:, None]
    chosen = (torch.where(whole, unused, oldest), torch.where(whole & _filled(state), recent, unused))
    return torch.cat(chosen, dim=1)


def penalized_codes(state: FrameState, codebook: int, unused: int) -> Tensor:
    """Return the codes [n, W] of one codebook to penalize. Upstream counts empty positions of the window as code 0."""
    skip = state.settings.whole_window[:, None] & ~_filled(state)
    return torch.where(skip, unused, state.window[:, 1 + codebook])


def effective_penalty(state: FrameState) -> Tensor:
    """Return the penalty [n] for the next frame; 1 for frame 0, which upstream never penalizes."""
    return torch.where(state.frame > 0, state.settings.penalty, 1.0)


def _filled(state: FrameState) -> Tensor:
    """Return a boolean mask [n, W] of the positions of the window that hold a token."""
    return torch.arange(state.window.shape[-1], device=state.frame.device) < (state.frame - 1)[:, None]
