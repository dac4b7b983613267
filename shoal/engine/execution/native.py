"""The native backend: a whole step on the CPU in one call of the native library."""

import logging

import numpy as np
import torch

from shoal.engine.execution.runner import EagerRunner, PendingStep
from shoal.engine.execution.text_weights import TextRows, TextWeights
from shoal.engine.scheduler import Batch
from shoal.model.slow import Head
from shoal.native.dual_ar import NativeDualAR, NativeState, StepRows, TextReading
from shoal.native.library import Context

logger = logging.getLogger(__name__)


class NativeRunner:
    """Runs steps through the native library, over the KV cache and the slot states of the eager runner."""

    def __init__(self, eager: EagerRunner, head: Head, *, isa: str = "auto") -> None:
        """Raises NativeUnavailable if the library cannot be built or does not support this model."""
        self.eager = eager
        self.context = Context(isa)
        self._model = NativeDualAR(eager.model, head, self.context)
        self._state = NativeState(eager.kv.keys, eager.kv.values, eager.tables, eager.slots.memory)
        self._newest = eager.slots.newest.numpy()
        logger.info("native backend: %s, %d threads", self.context.isa, self.context.threads)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        self.eager.slots.bind([prefill.sequence for prefill in batch.prefills if prefill.samples_frame])
        texts = TextRows.of([sequence for sequence, _ in batch.sampled()])
        reading = self._reading(texts) if texts else None
        tokens = self._model.step(self._state, self._rows(batch), reading)
        attention = [TextWeights(texts, torch.from_numpy(reading.weights))] if reading is not None else []
        return PendingStep(batch, torch.from_numpy(tokens) if len(tokens) else None, attention=attention)

    def _reading(self, texts: TextRows) -> TextReading:
        heads = np.array(self.eager.weight_reader.heads, np.int32).reshape(-1, 2)
        rows, begins, lengths = (np.array(each, np.int32) for each in (texts.rows, texts.begins, texts.lengths))
        weights = np.zeros((len(rows), len(heads), texts.width), np.float32)
        return TextReading(heads, rows, begins, lengths, weights)

    def _rows(self, batch: Batch) -> StepRows:
        decodes = np.array([sequence.slot for sequence in batch.decodes], np.int32)
        known = [each.sequence.tokens[each.start : each.end] for each in batch.prefills]
        slots = [np.full(each.end - each.start, each.sequence.slot, np.int32) for each in batch.prefills]
        positions = [np.arange(each.start, each.end, dtype=np.int32) for each in batch.prefills]
        newest = np.array([sequence.computed - 1 for sequence in batch.decodes], np.int32)
        return StepRows(
            np.concatenate([*known, self._newest[decodes]], dtype=np.int64),
            np.concatenate([*slots, decodes], dtype=np.int32),
            np.concatenate([*positions, newest], dtype=np.int32),
            self._sampled(batch),
        )

    def _sampled(self, batch: Batch) -> np.ndarray:
        """Return the rows that sample a frame: the last of each complete prompt, then all decodes."""
        ends = np.cumsum([each.end - each.start for each in batch.prefills], dtype=np.int32)
        last = [end - 1 for end, each in zip(ends, batch.prefills, strict=True) if each.samples_frame]
        begin = int(ends[-1]) if len(ends) else 0
        return np.array([*last, *range(begin, begin + len(batch.decodes))], np.int32)
