"""The plain-graph backend: the eager operators at fixed sizes, captured as CUDA graphs.

Uses no custom kernels, so it runs on any GPU that torch supports and with any weights. A frame of S1-mini is some
thousand operators, whose launches take longer than their computation. Attention gathers the whole width of the block
tables it is given, so there is a graph per batch size and context width.
"""

from collections.abc import Sequence as Ordered
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.config import EngineConfig
from shoal.engine.execution.attention_reader import PendingAttention
from shoal.engine.execution.fixed_size import FixedSizeRunner, batch_sizes, frame_inputs
from shoal.engine.execution.runner import EagerRunner, PendingStep
from shoal.engine.execution.text_rows import TextRows
from shoal.engine.kv_cache import PagedKV
from shoal.engine.scheduling.scheduler import Batch, Prefill
from shoal.engine.scheduling.sequence import Sequence
from shoal.kernels.attention.kv_quant import write_kv
from shoal.kernels.attention.paged_attention import decode_mask, masked_prefill, paged_decode_reference
from shoal.kernels.cuda_graph import CaptureContext, GraphSizes

# Context widths in tokens; the maximum of the model is added.
WIDTHS = (512, 2048, 8192)
PROMPTS = (32, 128, 512)  # tokens per prompt graph
# Maximum tokens that the attention of one layer gathers; bounds the memory of a graph: 4 kB per token of S2-Pro.
MAX_GATHERED = 1 << 16

Size = tuple[int, int]  # context width in tokens, rows


class FixedWidthKV:
    """KV cache of a pass with fixed shapes: row i is the token at positions[i] of slot slots[i].

    Lengths stay on the device; every row attends over the whole width of the block tables, masked.
    """

    def __init__(self, kv: PagedKV, tables: Tensor, slots: Tensor, positions: Tensor) -> None:
        self.kv, self.positions, size = kv, positions, kv.keys.shape[2]
        self.width = tables.shape[1] * size
        self._where = tables[slots, positions // size].long() * size + positions % size

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        scales = self.kv.scales(layer)
        write_kv(self.kv.keys[layer], scales["key_scales"], self._where, k)
        write_kv(self.kv.values[layer], scales["value_scales"], self._where, v)


class FrameKV(FixedWidthKV):
    """One token per sequence."""

    def __init__(
        self,
        kv: PagedKV,
        tables: Tensor,
        slots: Tensor,
        positions: Tensor,
        dtype: torch.dtype,
        recorded: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(kv, tables, slots, positions)
        self._recorded = recorded
        self.queries: dict[int, Tensor] = {}  # [rows, heads, d] by recorded layer
        self._tables, self._lengths = tables[slots].long(), positions + 1
        self._mask = decode_mask(self._lengths, self.width, dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._write(layer, k, v)
        if layer in self._recorded:
            self.queries[layer] = q
        memory = self.kv.keys[layer], self.kv.values[layer], self._tables, self._lengths
        return paged_decode_reference(q, *memory, mask=self._mask, **self.kv.scales(layer))


class PromptKV(FixedWidthKV):
    """Consecutive tokens of the first row's sequence, then padding."""

    def __init__(self, kv: PagedKV, tables: Tensor, slots: Tensor, positions: Tensor) -> None:
        super().__init__(kv, tables, slots, positions)
        self._table = tables[slots[:1]][0].long()
        self._mask = torch.arange(self.width, device=positions.device) <= positions[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._write(layer, k, v)
        memory = self.kv.keys[layer], self.kv.values[layer], self._table
        return masked_prefill(q, *memory, self._mask, **self.kv.scales(layer))


class PlainWorkload:
    """Workload over the eager model at one size. Input rows: slots, positions, then `height - 2` rows of tokens."""

    def __init__(self, eager: EagerRunner, tables: Tensor, size: Size, height: int) -> None:
        width, rows = size
        self._eager, self._spare = eager, len(tables) - 1
        self._tables = tables[:, : -(-width // eager.size)]
        self.inputs = torch.zeros(height, rows, dtype=torch.int32, device=eager.model.device)

    def padding(self) -> np.ndarray:
        """Return inputs of padding rows only: position 0 of the spare slot."""
        inputs = np.zeros(self.inputs.shape, np.int32)
        inputs[0] = self._spare
        return inputs


class PlainFrame(PlainWorkload):
    """Decode step over the newest token of every row; samples the next frame."""

    def __init__(self, eager: EagerRunner, tables: Tensor, size: Size) -> None:
        super().__init__(eager, tables, size, 2)
        model = eager.model
        self.tokens = torch.zeros(size[1], 1 + model.config.num_codebooks, dtype=torch.long, device=model.device)
        # Queries of the last run, kept so that no later operator of the same graph reuses their memory.
        self.queries: dict[int, Tensor] = {}

    def run(self) -> None:
        model, states = self._eager.model, self._eager.slots
        slots, positions = self.inputs.long()
        recorded = self._eager.attention_reader.layers
        cache = FrameKV(self._eager.kv, self._tables, slots, positions, model.dtype, recorded)
        self.queries = cache.queries
        hidden = model.slow(states.last_tokens[slots], positions, cache)
        # Always penalised: a graph does not know which rows have a penalty, and a penalty of 1 changes nothing.
        state = states.rows(slots, penalised=True)
        tokens = self._eager.decoder.sample(hidden, state)
        states.store(slots, state, tokens)
        self.tokens.copy_(tokens)


class PlainPrefill(PlainWorkload):
    """Prefill of consecutive tokens of one sequence: only writes their keys and values."""

    def __init__(self, eager: EagerRunner, tables: Tensor, size: Size) -> None:
        super().__init__(eager, tables, size, 3 + eager.model.config.num_codebooks)

    def run(self) -> None:
        slots, positions, *_ = inputs = self.inputs.long()
        cache = PromptKV(self._eager.kv, self._tables, slots, positions)
        self._eager.model.slow(inputs[2:].T, positions, cache)


class PlainGraphRunner(FixedSizeRunner):
    """Launches steps through graphs of the eager operators; without `capture` they run one by one.

    Raises RuntimeError if no size works.
    """

    def __init__(
        self,
        eager: EagerRunner,
        *,
        capture: bool,
        buckets: Ordered[int] = EngineConfig.buckets,
        widths: Ordered[int] = WIDTHS,
        prompts: Ordered[int] = PROMPTS,
    ) -> None:
        super().__init__(eager)
        slots, tables = len(eager.tables), self._tables.target
        longest = tables.shape[1] * eager.size
        widths = [*(width for width in widths if width < longest), longest]
        rows = batch_sizes(slots, buckets)
        sizes = [size for size in product(widths, rows) if size[0] * size[1] <= MAX_GATHERED or size[1] == rows[0]]
        self._frames = GraphSizes("plain frame graph", {size: PlainFrame(eager, tables, size) for size in sizes})
        prefills = {size: PlainPrefill(eager, tables, size) for size in product(widths, sorted(prompts))}
        self._prompts = GraphSizes("plain prompt graph", prefills)
        if capture:
            self._tables.upload(self._padded)
            context = CaptureContext()
            self._prompts.build(context)
            self._frames.build(context)

    @property
    def graphs(self) -> tuple[GraphSizes[Size, PlainFrame], GraphSizes[Size, PlainPrefill]]:
        return self._frames, self._prompts

    def _launch_frames(self, batch: Batch, sequences: list[Sequence]) -> PendingStep:
        """Launch the sequences in groups of similar length: one long context must not widen all rows."""
        order = np.argsort([sequence.computed for sequence in sequences], kind="stable")
        parts, attention, done = [], list[PendingAttention](), 0
        while done < len(order):
            size, count = self._next_group([sequences[index].computed for index in order[done:]])
            group = [sequences[index] for index in order[done : done + count]]
            workload = self._frames.run(size, frame_inputs(self._frames[size].workload, group))
            # The next group may run the same graph, which overwrites its tokens.
            parts.append(workload.tokens[:count] if count == len(order) else workload.tokens[:count].clone())
            if texts := TextRows.of(group, order[done : done + count].tolist()):
                queries = {layer: q[:count] for layer, q in workload.queries.items()}
                attention.append(self.eager.attention_reader.read(queries, self._tables.target, texts))
            done += count
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        return PendingStep.of(batch, tokens, np.argsort(order), attention)

    def _next_group(self, lengths: list[int]) -> tuple[Size, int]:
        """Return the size for the first of these ascending lengths, and how many of them it holds."""
        width = _context_width(self._frames, lengths[0])
        fitting = sum(length <= width for length in lengths)
        rows = [rows for each, rows in self._frames if each == width]
        chosen = next((each for each in rows if each >= fitting), max(rows))
        return (width, chosen), min(fitting, chosen)

    def _launch_prompts(self, prefills: list[Prefill]) -> None:
        """Prefill one prompt after the other, in chunks of at most the largest size of its width."""
        for prefill in prefills:
            start = prefill.start
            while start < prefill.end:
                start += self._launch_prompt(prefill.sequence, start, prefill.end)

    def _launch_prompt(self, sequence: Sequence, start: int, end: int) -> int:
        """Launch the next tokens of a prompt; return how many."""
        width = _context_width(self._prompts, end)
        sizes = [rows for each, rows in self._prompts if each == width]
        rows = next((each for each in sizes if each >= end - start), max(sizes))
        count = min(rows, end - start)
        inputs = self._prompts[width, rows].workload.padding()
        inputs[0, :count], inputs[1, :count] = sequence.slot, np.arange(start, start + count)
        inputs[2:, :count] = sequence.tokens[start : start + count].T
        self._prompts.run((width, rows), inputs)
        return count


def _context_width(sizes: GraphSizes[Size, Any], tokens: int) -> int:
    """Return the smallest context width of at least `tokens`. Raises RuntimeError if every such size has failed."""
    widths = [width for width, _ in sizes if width >= tokens]
    if not widths:
        raise RuntimeError(f"every {sizes.name} for a context of {tokens} tokens has failed")
    return min(widths)
