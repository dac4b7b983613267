"""Steps of the native backend over numpy arrays, without torch."""

from collections.abc import Sequence as Ordered
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.engine.execution.text_rows import TextRows
from shoal.engine.scheduling.scheduler import Batch, StepOutput
from shoal.engine.scheduling.sequence import Sequence
from shoal.kernels.word_times.text_path_numpy import extend_paths
from shoal.model.sampling_settings import SamplingSettings
from shoal.native.dual_ar import NativeDualAR, NativeState, SlotArrays, StepRows, TextAttention


class NativeSteps:
    """Runs batches through the native library, over a KV cache and slot states that other backends may share."""

    def __init__(
        self,
        model: NativeDualAR,
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
        tables: NDArray[np.int32],
        slots: SlotArrays,
        text_heads: Ordered[tuple[int, int]] = (),
        scores: NDArray[np.int32] | None = None,
    ) -> None:
        """Keys and values are [layers, blocks, size, kv_heads, d]; `text_heads` as in `EagerRunner`.

        `scores` hold the state of the paths through texts (`new_scores`); without them steps return attention weights.
        """
        self.model, self.keys, self.values, self._slots = model, keys, values, slots
        self.state = NativeState(keys, values, tables, slots)
        self._heads, self._scores = np.array(text_heads, np.int32).reshape(-1, 2), scores

    def run(self, batch: Batch) -> StepOutput:
        """Run a batch. Raises RuntimeError for tokens out of range or when memory runs out."""
        for prefill in batch.prefills:
            if prefill.samples_frame:
                bind(self._slots, prefill.sequence)
        texts = TextRows.of([sequence for sequence, _ in batch.sampled()])
        requested = self._text_attention(texts) if texts else None
        tokens = self.model.step(self.state, self._rows(batch), requested)
        if not len(tokens):
            return StepOutput.empty(batch)
        attention = {} if requested is None else self._by_row(requested, np.array(texts.slots)[requested.samples])
        return StepOutput(batch, tokens.astype(np.int32), attention)

    def _text_attention(self, texts: TextRows) -> TextAttention:
        rows = np.array(texts.with_text, np.int32)
        begins, lengths = (np.array(each, np.int32)[rows] for each in (texts.begins, texts.lengths))
        weights = np.zeros((len(rows), len(self._heads), texts.width), np.float32)
        return TextAttention(self._heads, rows, begins, lengths, weights)

    def _by_row(self, requested: TextAttention, slots: NDArray[np.int64]) -> dict[int, NDArray[Any]]:
        """Return the path or the weights of each row that has a text."""
        if self._scores is None:
            read = zip(requested.samples.tolist(), requested.weights, requested.lengths, strict=True)
            return {row: weights[:, :length] for row, weights, length in read}
        frames = self._slots.frame[slots] - 1
        origins = extend_paths(requested.weights, requested.lengths, slots, frames, self._scores)
        return dict(zip(requested.samples.tolist(), origins, strict=True))

    def _rows(self, batch: Batch) -> StepRows:
        decodes = np.array([sequence.slot for sequence in batch.decodes], np.int32)
        known = [each.sequence.tokens[each.start : each.end] for each in batch.prefills]
        slots = [np.full(each.end - each.start, each.sequence.slot, np.int32) for each in batch.prefills]
        positions = [np.arange(each.start, each.end, dtype=np.int32) for each in batch.prefills]
        newest = np.array([sequence.computed - 1 for sequence in batch.decodes], np.int32)
        return StepRows(
            np.concatenate([*known, self._slots.last_tokens[decodes]], dtype=np.int64),
            np.concatenate([*slots, decodes], dtype=np.int32),
            np.concatenate([*positions, newest], dtype=np.int32),
            sampled_rows(batch),
        )


def sampled_rows(batch: Batch) -> NDArray[np.int32]:
    """Return the rows that sample a frame: the last of each complete prompt, then all decodes."""
    ends = np.cumsum([each.end - each.start for each in batch.prefills], dtype=np.int32)
    last = [end - 1 for end, each in zip(ends, batch.prefills, strict=True) if each.samples_frame]
    begin = int(ends[-1]) if len(ends) else 0
    return np.array([*last, *range(begin, begin + len(batch.decodes))], np.int32)


def bind(slots: SlotArrays, sequence: Sequence) -> None:
    """Load the state of a sequence into its slot; the last known token becomes the last token of the slot."""
    slot, settings = sequence.slot, SamplingSettings.of(sequence.sampling)
    for name, value in settings._asdict().items():
        getattr(slots, name)[slot] = value
    slots.frame[slot] = sequence.frames
    slots.last_tokens[slot] = sequence.tokens[sequence.length - 1]
    recent = sequence.recent(slots.window.shape[2])
    slots.window[slot] = 0
    slots.window[slot, :, : len(recent)] = recent.T
