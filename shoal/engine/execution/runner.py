"""Step execution: the eager runner, and the pipeline that overlaps host and device."""

from collections import deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.engine.execution.attention_reader import AttentionReader, PathReader, PendingAttention, WeightReader
from shoal.engine.execution.cpu_threads import CPUThreads
from shoal.engine.execution.slot_state import SlotStates
from shoal.engine.execution.text_rows import TextRows
from shoal.engine.kv_cache import AttentionMetadata, PagedKV, PrefillSegment
from shoal.engine.scheduling.scheduler import Batch, Prefill, StepOutput
from shoal.engine.scheduling.sequence import Sequence
from shoal.kernels.cuda_graph import to_host
from shoal.model.dual_ar import DualAR
from shoal.model.frame import FrameSampler
from shoal.model.slow import Head

NO_LAYERS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step; `wait` returns its sampled tokens and the attention over texts."""

    batch: Batch
    tokens: Tensor | None = None  # on the host, valid after the event `ended`
    ended: torch.cuda.Event | None = None
    order: np.ndarray | None = None  # row of `tokens` of each sampled sequence; None: the same order
    attention: Ordered[PendingAttention] = ()
    output: StepOutput | None = None  # set by a backend that has finished the step

    @classmethod
    def of(
        cls,
        batch: Batch,
        tokens: Tensor,
        order: np.ndarray | None = None,
        attention: Ordered[PendingAttention] = (),
    ) -> "PendingStep":
        """Start copying tokens [rows, 1 + codebooks] to the host; the next launch may overwrite them."""
        host = to_host(tokens)
        ended = torch.cuda.current_stream().record_event() if tokens.device.type == "cuda" else None
        return cls(batch, host, ended, order, attention)

    def wait(self) -> StepOutput:
        """Wait for the device and return the output. This is the only synchronization of a step."""
        if self.output is not None:
            return self.output
        if self.ended is not None:
            self.ended.synchronize()
        if self.tokens is None:
            return StepOutput.empty(self.batch)
        tokens = self.tokens.numpy().astype(np.int32)
        attention = {row: found for each in self.attention for row, found in each.by_row()}
        return StepOutput(self.batch, tokens if self.order is None else tokens[self.order], attention)


class Launcher(Protocol):
    def launch(self, batch: Batch) -> PendingStep:
        """Launch a batch without waiting for it."""


class PipelinedRunner:
    """Returns the output of a step after `lag` further steps have been launched.

    Meanwhile the host plans the next step and decodes the audio of the previous one.
    """

    def __init__(self, launcher: Launcher, lag: int) -> None:
        self.launcher, self.lag = launcher, lag
        self.pending: deque[PendingStep] = deque()

    def launch(self, batch: Batch) -> None:
        """Launch a batch without waiting for it; an empty one launches nothing."""
        if batch:
            self.pending.append(self.launcher.launch(batch))

    def wait(self, *, drain: bool) -> StepOutput:
        """Return the oldest step once more than `lag` are in flight, or with `drain`; otherwise an empty output."""
        if self.pending and (len(self.pending) > self.lag or drain):
            output = self.pending[0].wait()
            self.pending.popleft()  # after the wait: the batch of a failed step is needed for recovery
            return output
        return StepOutput.empty(Batch())


class EagerRunner:
    """The eager backend: PyTorch operators, any batch shape, any device."""

    def __init__(
        self,
        model: DualAR,
        head: Head,
        kv: PagedKV,
        tables: np.ndarray,
        slots: int,
        text_heads: Ordered[tuple[int, int]] = (),
        *,
        record_weights: bool = False,
    ) -> None:
        """`text_heads` are the (layer, head) pairs whose attention is read for sequences with a text span.

        With `record_weights` steps return the weights instead of the path through the text.
        """
        self.model, self.kv, self.tables = model, kv, tables
        self.size = kv.keys.shape[2]
        self.slots = SlotStates(model, slots)
        self.attention_reader: AttentionReader = (
            WeightReader(text_heads, kv) if record_weights else PathReader(text_heads, kv, self.slots)
        )
        self.decoder = FrameSampler(model, head, max_rows=slots)
        self.threads = CPUThreads(model)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        self.slots.bind([prefill.sequence for prefill in batch.prefills if prefill.samples_frame])
        tokens, positions, where = self._tokens(batch)
        self.threads.choose(len(tokens))
        sequences = [sequence for sequence, _ in batch.sampled()]
        texts = TextRows.of(sequences)
        self.kv.begin_pass(self._metadata(batch, where, self.attention_reader.layers if texts else NO_LAYERS))
        hidden = self.model.slow(tokens, positions, self.kv)
        if not sequences:
            return PendingStep(batch)
        rows = self._sampled_rows(batch)
        tokens = self._sample(hidden[rows], sequences)
        return PendingStep.of(batch, tokens, attention=[self._read(texts, rows)] if texts else [])

    def _read(self, texts: TextRows, rows: Tensor) -> PendingAttention:
        """Read the attention over the texts; `rows` are the rows of the pass that sample a frame."""
        queries = {layer: q[rows] for layer, q in self.kv.queries.items()}
        return self.attention_reader.read(queries, self._tensor(self.tables), texts)

    def _sample(self, hidden: Tensor, sequences: list[Sequence]) -> Tensor:
        slots = self._tensor([sequence.slot for sequence in sequences])
        penalised = any(sequence.sampling.repetition_penalty != 1.0 for sequence in sequences)
        state = self.slots.rows(slots, penalised=penalised)
        tokens = self.decoder.sample(hidden, state)
        self.slots.store(slots, state, tokens)
        return tokens

    def _tokens(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [n, 1 + codebooks], positions [n] and cache locations [n] of the whole batch."""
        known = [prefill.sequence.tokens[prefill.start : prefill.end] for prefill in batch.prefills]
        slots = [sequence.slot for sequence in batch.decodes]
        tokens = self.slots.last_tokens[self._tensor(slots)]
        if known:
            tokens = torch.cat((torch.from_numpy(np.concatenate(known).astype(np.int64)).to(tokens.device), tokens))
        spans = [(p.sequence.slot, np.arange(p.start, p.end)) for p in batch.prefills]
        spans += [(sequence.slot, np.array([sequence.computed - 1])) for sequence in batch.decodes]
        positions = np.concatenate([span for _, span in spans])
        where = np.concatenate(
            [self.tables[slot, span // self.size] * self.size + span % self.size for slot, span in spans]
        )
        return tokens, self._tensor(positions), self._tensor(where)

    def _metadata(self, batch: Batch, where: Tensor, recorded: frozenset[int] = NO_LAYERS) -> AttentionMetadata:
        segments, first = [], 0
        for prefill in batch.prefills:
            segments.append(self._segment(prefill, first))
            first += prefill.end - prefill.start
        slots = [sequence.slot for sequence in batch.decodes]
        lengths = np.array([sequence.computed for sequence in batch.decodes], np.int64)
        width = -(-int(lengths.max(initial=0)) // self.size)
        tables = self._tensor(self.tables[slots, :width])
        return AttentionMetadata(where, segments, tables, self._tensor(lengths), recorded)

    def _segment(self, prefill: Prefill, first: int) -> PrefillSegment:
        table = self.tables[prefill.sequence.slot, : -(-prefill.end // self.size)]
        return PrefillSegment(first, prefill.end - prefill.start, prefill.end, self._tensor(table))

    def _sampled_rows(self, batch: Batch) -> Tensor:
        ends = np.cumsum([prefill.end - prefill.start for prefill in batch.prefills], dtype=np.int64)
        last = [int(end) - 1 for end, prefill in zip(ends, batch.prefills, strict=True) if prefill.samples_frame]
        begin = int(ends[-1]) if len(ends) else 0
        return self._tensor([*last, *range(begin, begin + len(batch.decodes))])

    def _tensor(self, values: list[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(values, np.int64), device=self.model.device)
