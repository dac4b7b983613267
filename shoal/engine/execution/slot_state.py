"""Per-slot sampling state on the device."""

import numpy as np
import torch
from torch import Tensor

from shoal.engine.scheduling.sequence import Sequence
from shoal.kernels.sampling.sample_token import SamplingState
from shoal.model.dual_ar import DualAR
from shoal.model.frame import FrameState
from shoal.model.sampling import TENSOR_FIELDS, SamplingTensors
from shoal.model.sampling_settings import SamplingSettings
from shoal.speech import SamplingParams


class SlotStates:
    """Sampling parameters, frame counters and recent tokens of every slot, on the device.

    One extra slot, `spare`, is for the padding rows of batches of fixed size.
    """

    def __init__(self, model: DualAR, slots: int) -> None:
        self.device = model.device
        self.has_float64 = model.device.type != "mps"
        self.spare = slots
        settings = SamplingTensors.from_settings([SamplingParams()] * (slots + 1), model.device)
        self.state = FrameState.initial(model.config, settings)
        self.last_tokens = torch.zeros(slots + 1, 1 + model.config.num_codebooks, dtype=torch.long, device=model.device)

    @property
    def memory(self) -> SamplingState:
        """Return the same tensors in the form the kernels take."""
        settings = {name: getattr(self.state.settings, name) for name in TENSOR_FIELDS}
        return SamplingState(**settings, frame=self.state.frame, window=self.state.window, last_tokens=self.last_tokens)

    def bind(self, sequences: list[Sequence]) -> None:
        """Load the state of these sequences into their slots; the last known token becomes the last token of the slot.

        One asynchronous copy of float64 rows, which represent every value of a slot exactly.
        """
        if not sequences:
            return
        state, width = self.state, self.last_tokens.shape[1]
        host = torch.from_numpy(np.stack([self._packed(sequence) for sequence in sequences]))
        if self.device.type == "cuda":
            host = host.pin_memory()
        packed = host.to(self.device, non_blocking=True) if self.has_float64 else host
        slots = packed[:, 0].long().to(self.device)
        for column, name in enumerate(TENSOR_FIELDS, start=2):
            target: Tensor = getattr(state.settings, name)
            target[slots] = packed[:, column].to(target.dtype).to(self.device)
        state.frame[slots] = packed[:, 1].long().to(self.device)
        past = packed[:, 2 + len(TENSOR_FIELDS) :].long().to(self.device)
        self.last_tokens[slots] = past[:, :width]
        state.window[slots] = past[:, width:].unflatten(1, (width, -1))

    def _packed(self, sequence: Sequence) -> np.ndarray:
        """Return slot, frame, settings, last token and window as one row."""
        window = np.zeros(self.state.window.shape[1:])
        recent = sequence.recent(window.shape[1])
        window[:, : len(recent)] = recent.T
        numbers = [sequence.slot, sequence.frames, *SamplingSettings.of(sequence.sampling)]
        return np.concatenate((numbers, sequence.tokens[sequence.length - 1], window.reshape(-1)))

    def rows(self, slots: Tensor, *, penalised: bool) -> FrameState:
        """Return a copy of the state of slots [n]; `penalised` if any of them may have a repetition penalty."""
        state = self.state
        return FrameState(state.settings.select(slots, has_penalty=penalised), state.frame[slots], state.window[slots])

    def store(self, slots: Tensor, state: FrameState, tokens: Tensor) -> None:
        """Store the state of slots [n] after a frame, whose tokens [n, 1 + codebooks] become the last ones."""
        self.state.frame[slots] = state.frame
        self.state.window[slots] = state.window
        self.last_tokens[slots] = tokens
