"""What the device has to know of every slot between two frames."""

import numpy as np
import torch
from torch import Tensor

from shoal.engine.sequence import Sequence
from shoal.model.dual_ar import DualAR
from shoal.model.frame import FrameState
from shoal.model.sampling import SamplingRows
from shoal.speech import Sampling


class SlotStates:
    """Sampling settings, frame counters and recent columns of every slot, on the device.

    There is one more than asked for: rows that only fill up a batch of fixed size work on the spare one.
    """

    def __init__(self, model: DualAR, slots: int) -> None:
        self.device = model.device
        self.spare = slots
        settings = SamplingRows.of([Sampling()] * (slots + 1), model.device)
        self.state = FrameState.fresh(model.config, settings)
        self.newest = torch.zeros(slots + 1, 1 + model.config.num_codebooks, dtype=torch.long, device=model.device)

    def bind(self, sequence: Sequence) -> None:
        """Make a slot continue `sequence`, wherever that stands."""
        slot, state = sequence.slot, self.state
        state.settings.put(slot, SamplingRows.of([sequence.sampling], self.device))
        state.frame[slot] = sequence.frames
        state.window[slot] = 0
        recent = torch.from_numpy(sequence.recent(state.window.shape[-1]).T.astype(np.int64)).to(self.device)
        state.window[slot, :, : recent.shape[1]] = recent

    def rows(self, slots: Tensor, *, penalised: bool) -> FrameState:
        state = self.state
        return FrameState(state.settings.rows(slots, penalised=penalised), state.frame[slots], state.window[slots])

    def put(self, slots: Tensor, drawn: FrameState, columns: Tensor) -> None:
        self.state.frame[slots] = drawn.frame
        self.state.window[slots] = drawn.window
        self.newest[slots] = columns
