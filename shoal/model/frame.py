"""From the slow model's hidden state to a finished column: draw the main token, then the codes behind it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.kernels.sample import apply_repetition_penalty, exponential_noise, exponential_race, probabilities
from shoal.kernels.sample_token import RAS_TEMPERATURE, RAS_TOP_P, SEMANTIC_LANE
from shoal.model.cache import DenseKVCache
from shoal.model.config import DualARConfig
from shoal.model.dual_ar import DualAR
from shoal.model.sampling import S1_WINDOW, S2_WINDOW, SamplingTensors
from shoal.model.slow import Head

# (seed [n], frame [n], lane, size) -> Exp(1) noise [n, size], or [n, k, size] for k lanes
Noise = Callable[[Tensor, Tensor, int | Tensor, int], Tensor]


@dataclass(slots=True)
class FrameState:
    """What drawing the next frame of n sequences depends on, besides the hidden states."""

    settings: SamplingTensors
    frame: Tensor  # [n] frames drawn so far
    window: Tensor  # [n, 1 + codebooks, W] recent columns, filled from the left, then sliding

    @classmethod
    def initial(cls, config: DualARConfig, settings: SamplingTensors) -> "FrameState":
        rows, device = len(settings.seed), settings.seed.device
        length = S1_WINDOW if config.family == "s1" else S2_WINDOW
        return cls(
            settings=settings,
            frame=torch.zeros(rows, dtype=torch.long, device=device),
            window=torch.zeros(rows, 1 + config.num_codebooks, length, dtype=torch.long, device=device),
        )

    def advance(self, column: Tensor) -> None:
        """Count the frame and remember its column [n, 1 + codebooks]; the first frame is never remembered."""
        length = self.window.shape[-1]
        place = torch.arange(length, device=column.device)
        # Frame 1 goes to place 0; from frame length + 1 on everything moves up and the newest goes last.
        full = (self.frame > length)[:, None, None]
        moved = torch.where(full, self.window.roll(-1, dims=-1), self.window)
        here = place == (self.frame - 1).clamp_max(length - 1)[:, None]
        self.window = torch.where(here[:, None], column[:, :, None], moved)
        self.frame = self.frame + 1


class FrameSampler:
    """Draws whole frames for any number of sequences at once, in the recipe of the model's family."""

    def __init__(self, model: DualAR, head: Head, noise: Noise = exponential_noise) -> None:
        self.model, self.head, self.noise = model, head, noise
        self._caches: dict[int, DenseKVCache] = {}

    def sample(self, hidden: Tensor, state: FrameState) -> Tensor:
        """Hidden states [rows, dim] before the final norm -> columns [rows, 1 + codebooks]; advances the state."""
        normed = self.model.slow.norm(hidden)
        column = self.sample_semantic(self.head(normed), state)
        main = self.head.ids[column]
        codes = self._sample_codes(self.model.fast_input(hidden, normed), main, state)
        columns = torch.cat((main[:, None], codes), dim=1)
        state.advance(columns)
        return columns

    def sample_semantic(self, logits: Tensor, state: FrameState) -> Tensor:
        """Columns of the head [rows] drawn from its logits [rows, columns], by the recipe of the family."""
        if self.model.config.family == "s2":
            return self._sample_semantic_ras(logits, state)
        settings = state.settings
        if settings.has_penalty:
            logits = apply_repetition_penalty(logits, penalized_semantic(state, self.head), effective_penalty(state))
        return self._race(
            logits, settings.temperature, settings.top_p, state, self._semantic_noise(state, SEMANTIC_LANE)
        )

    def _sample_semantic_ras(self, logits: Tensor, state: FrameState) -> Tensor:
        """Repetition-aware: a semantic token of the last ten is drawn again from a flatter distribution."""
        settings = state.settings
        noise = self._semantic_noise(state, SEMANTIC_LANE)
        usual = self._race(logits, settings.temperature, settings.top_p, state, noise)
        flat = torch.full_like(settings.temperature, RAS_TEMPERATURE), torch.full_like(settings.top_p, RAS_TOP_P)
        other = self._race(logits, *flat, state, self._semantic_noise(state, self.model.config.num_codebooks))
        main = self.head.ids[usual]
        # The stop token is never in the window: the sequence ends with it.
        repeated = (state.window[:, 0] == main[:, None]).any(-1) & (main != self.head.stop_id)
        return torch.where(repeated & (state.frame > 0), other, usual)

    def _sample_codes(self, hidden: Tensor, main: Tensor, state: FrameState) -> Tensor:
        config, fast, cache = self.model.config, self.model.fast, self._cache(len(hidden))
        codes = [(main - config.semantic_begin_id).clamp(0, config.codebook_size - 1)]
        lanes = torch.arange(1, config.num_codebooks, device=main.device)
        noise = self.noise(state.settings.seed, state.frame, lanes, config.residual_size)
        for codebook in range(1, config.num_codebooks):
            logits = (
                fast.first_logits(hidden, codes[0], cache)
                if codebook == 1
                else fast.next_logits(codes[-1], codebook, cache)
            )
            codes.append(self._sample_code(logits, codebook, state, noise[:, codebook - 1]))
        return torch.stack(codes, dim=1)

    def _cache(self, rows: int) -> DenseKVCache:
        """The fast transformer's memory of one frame, empty; kept by batch size, since few sizes come up."""
        if rows not in self._caches:
            config = self.model.config
            self._caches[rows] = DenseKVCache(
                config.fast, rows, config.num_codebooks, self.model.dtype, self.model.device
            )
        self._caches[rows].reset()
        return self._caches[rows]

    def _sample_code(self, logits: Tensor, codebook: int, state: FrameState, noise: Tensor) -> Tensor:
        settings = state.settings
        if self.model.config.family == "s1" and settings.has_penalty:
            logits = apply_repetition_penalty(
                logits, penalized_codes(state, codebook, logits.shape[-1]), effective_penalty(state)
            )
        return self._race(logits, settings.temperature, settings.top_p, state, noise)

    def _race(self, logits: Tensor, temperature: Tensor, top_p: Tensor, state: FrameState, noise: Tensor) -> Tensor:
        return exponential_race(probabilities(logits, temperature, top_p, state.settings.top_k), noise)

    def _semantic_noise(self, state: FrameState, lane: int) -> Tensor:
        return self.noise(state.settings.seed, state.frame, lane, len(self.head.ids))


def penalized_semantic(state: FrameState, head: Head) -> Tensor:
    """Columns of the head [n, k] that the S1 penalty falls on."""
    # The released code indexes the wrong axis: it takes the eleven numbers of the window's oldest column as ids.
    oldest, recent = head.logit_index(state.window[:, :, 0]), head.logit_index(state.window[:, 0])
    nowhere, whole = len(head.ids), state.settings.whole_window[:, None]
    chosen = (torch.where(whole, nowhere, oldest), torch.where(whole & _filled(state), recent, nowhere))
    return torch.cat(chosen, dim=1)


def penalized_codes(state: FrameState, codebook: int, nowhere: int) -> Tensor:
    """Codes [n, W] of one codebook that the S1 penalty falls on; the released window counts empty places as code 0."""
    skip = state.settings.whole_window[:, None] & ~_filled(state)
    return torch.where(skip, nowhere, state.window[:, 1 + codebook])


def effective_penalty(state: FrameState) -> Tensor:
    """The first frame comes straight from the prompt and is never penalised."""
    return torch.where(state.frame > 0, state.settings.penalty, 1.0)


def _filled(state: FrameState) -> Tensor:
    """[n, W]: which places of the window hold a column."""
    return torch.arange(state.window.shape[-1], device=state.frame.device) < (state.frame - 1)[:, None]
