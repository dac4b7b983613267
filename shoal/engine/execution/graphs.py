"""The graph and fused backends: the fused kernels at fixed sizes, captured as CUDA graphs or launched one by one."""

import logging
import math
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shoal.config import DEFAULT_TOKEN_BUDGET, EngineConfig
from shoal.engine.execution.attention_reader import PendingAttention
from shoal.engine.execution.few_rows import few_rows_layers
from shoal.engine.execution.fixed_size import FixedSizeRunner, batch_sizes, frame_inputs
from shoal.engine.execution.fused import FusedFrame, FusedPrefill
from shoal.engine.execution.runner import EagerRunner, PendingStep
from shoal.engine.execution.text_rows import TextRows
from shoal.engine.scheduling.scheduler import Batch, Prefill
from shoal.engine.scheduling.sequence import Sequence
from shoal.errors import describe_error, device_errors
from shoal.kernels.cuda_graph import CaptureContext, GraphSizes, LaunchGraph, compile_ahead
from shoal.kernels.jit import kernels_unavailable
from shoal.model.dual_ar import DualAR
from shoal.model.linear import Quantized, has_fused_kernels
from shoal.model.slow import Head

logger = logging.getLogger(__name__)

PROMPTS = (32, 64, 96, 128, 192, 256, 384, 512)  # tokens per prompt graph
# Captured only if a burst step can fill them. They use the tiles of the 512-token graph, so results are bit-identical.
LARGE_PROMPTS = (1024, 2048)
# Time that the prompts of a step may take: a quarter of a frame of audio, which running streams have in reserve. More
# tokens per step do not start a burst of 64 requests sooner on an H200, and delay those that follow.
PREFILL_SECONDS = 0.012
BURST_SECONDS = 0.024  # maximum seconds of a step without frames (`scheduler.burst_tokens`)
# Minimum fill of a large graph. A full one takes nine tenths of the time of the 512-token graphs that it replaces.
MIN_LARGE_FILL = 7 / 8
MAX_TOKEN_BUDGET = 4096
TIMED_REPLAYS = 3


def prompt_chunks(tokens: int, sizes: Ordered[int]) -> Iterator[tuple[int, int]]:
    """Split the prompt tokens of a step into chunks; yield the graph size and the number of tokens of each.

    `sizes` are ascending.
    """
    largest = ([each for each in sizes if each <= max(PROMPTS)] or sizes[:1])[-1]
    while tokens:
        large = (each for each in sizes if each > largest and tokens > MIN_LARGE_FILL * each)
        count = min(tokens, max(large, default=largest))
        yield next(each for each in sizes if each >= count), count
        tokens -= count


def affordable_tokens(seconds: float, tokens: int) -> int:
    """Return the prompt tokens of a step on a GPU that computes `tokens` in `seconds`.

    As many as take PREFILL_SECONDS, rounded down to a power of two times DEFAULT_TOKEN_BUDGET, so that small
    differences between two starts do not change how prompts are cut.
    """
    multiple = int(PREFILL_SECONDS / seconds * tokens / DEFAULT_TOKEN_BUDGET)
    return min(MAX_TOKEN_BUDGET, DEFAULT_TOKEN_BUDGET << max(0, multiple.bit_length() - 1))


def unsupported(model: DualAR) -> str | None:
    """Return why the fused kernels cannot run this model here; None if they can."""
    reason = kernels_unavailable(model.device)
    if reason is None:
        modes = {each.mode for each in model.modules() if isinstance(each, Quantized) and not has_fused_kernels(each)}
        reason = f"{', '.join(sorted(modes))} weights have no fused kernels" if modes else None
    return reason


class FusedRunner(FixedSizeRunner):
    """Launches steps through the fused kernels; without `capture` one by one instead of as CUDA graphs.

    With `check` every size is launched once. `token_budget` is the setting; no larger prompt graph is captured. Raises
    RuntimeError if the weights have no kernels or no size works.
    """

    def __init__(
        self,
        eager: EagerRunner,
        head: Head,
        *,
        capture: bool,
        check: bool = False,
        buckets: Ordered[int] = EngineConfig.buckets,
        prompts: Ordered[int] = PROMPTS,
        token_budget: int | None = None,
    ) -> None:
        super().__init__(eager)
        if not all(has_fused_kernels(module) for module in (*eager.model.modules(), head.output)):
            raise RuntimeError(unsupported(eager.model) or "the output head has no fused kernels")
        slots, model, kv, tables = len(eager.tables), eager.model, eager.kv, self._tables.target
        sizes = batch_sizes(slots, buckets)
        self._reader, self._reads_by_kernel = eager.attention_reader, True
        self._path_graphs: dict[int, LaunchGraph] = {}  # graphs that read attention after a frame, by rows
        layers = self._reader.layers
        few_rows = few_rows_layers(model)
        frames = {rows: FusedFrame(model, head, kv, eager.slots, tables, rows, layers, few_rows) for rows in sizes}
        self._frames = GraphSizes("frame graph", frames)
        prefills = {rows: FusedPrefill(model, kv, tables, rows) for rows in sorted(prompts)}
        self._prompts = GraphSizes("prompt graph", prefills)
        self._max_tokens = math.inf if token_budget is None else token_budget
        self.token_budget = DEFAULT_TOKEN_BUDGET
        # Seconds per prompt token in the largest graph, and per frame of every slot; infinite: not measured.
        self.token_seconds = self.frame_seconds = math.inf
        if capture or check:
            self._build(capture=capture)

    @property
    def graphs(self) -> tuple[GraphSizes[int, FusedFrame], GraphSizes[int, FusedPrefill]]:
        return self._frames, self._prompts

    def _launch_frames(self, batch: Batch, sequences: list[Sequence]) -> PendingStep:
        parts, attention, largest = [], list[PendingAttention](), max(self._frames)
        for start in range(0, len(sequences), largest):
            group = sequences[start : start + largest]
            rows = next(size for size in self._frames if size >= len(group))
            texts = TextRows.of(group, range(start, start + len(group)))
            workload = self._frames.run(rows, frame_inputs(self._frames[rows].workload, group, texts))
            # The next group may run the same graph, which overwrites its tokens.
            tokens = workload.tokens[: len(group)]
            parts.append(tokens if len(group) == len(sequences) else tokens.clone())
            if texts:
                attention.append(self._read(rows, workload, texts))
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        return PendingStep.of(batch, tokens, attention=attention)

    def _launch_prompts(self, prefills: list[Prefill]) -> None:
        """Prefill the tokens of all prompts, concatenated, in chunks."""
        if not any(each.end > each.start for each in prefills):
            return
        tokens = np.concatenate([each.sequence.tokens[each.start : each.end] for each in prefills])
        slots = np.concatenate([np.full(each.end - each.start, each.sequence.slot) for each in prefills])
        positions = np.concatenate([np.arange(each.start, each.end) for each in prefills])
        start = 0
        for rows, count in prompt_chunks(len(tokens), list(self._prompts)):
            chunk = slice(start, start + count)
            start += count
            inputs = self._prompts[rows].workload.padding()
            inputs[0, :count], inputs[1, :count], inputs[2:, :count] = slots[chunk], positions[chunk], tokens[chunk].T
            self._prompts.run(rows, inputs)

    def _read(self, rows: int, workload: FusedFrame, texts: TextRows) -> PendingAttention:
        """Read the attention of the frames that `workload` ran last; not a part of its graph."""
        if not self._reads_by_kernel:
            queries = {layer: q[: len(texts.slots)] for layer, q in workload.queries.items()}
            return self._reader.read(queries, self._tables.target, texts)
        if (graph := self._path_graphs.get(rows)) is not None:
            return self._reader.start_copy(graph.replay(), texts)
        return self._reader.start_copy(self._launch_reader(workload), texts)

    def _launch_reader(self, workload: FusedFrame) -> Tensor:
        return self._reader.launch(workload.queries, self._tables.target, workload.texts)

    def _build(self, *, capture: bool) -> None:
        self._tables.upload(self._padded)
        compile_ahead(sizes[size].workload for sizes in self.graphs for size in sizes)
        context = CaptureContext() if capture else None
        self._prompts.build(context)
        self._frames.build(context)
        self._build_reader(context)
        if context is not None:
            self._measure_prompts()
            self._measure_frames()
            self._add_large_prompts(context)

    def _measure_prompts(self) -> None:
        """Choose the prompt tokens of a step by the time that the largest prompt graph takes."""
        size = max(self._prompts)
        seconds = self._prompts[size].replay_seconds(TIMED_REPLAYS)
        self.token_budget, self.token_seconds = affordable_tokens(seconds, size), seconds / size
        logger.info("a step computes up to %d prompt tokens; %d take %.1f ms", self.token_budget, size, seconds * 1e3)

    def _measure_frames(self) -> None:
        """Time a decode step of all slots with empty KV caches: the size of first chunks depends on it."""
        slots, largest = len(self.eager.tables), max(self._frames)
        graphs = -(-slots // largest)  # more than one where the largest size failed
        self.frame_seconds = graphs * self._frames[largest].replay_seconds(TIMED_REPLAYS)
        logger.info("a frame of %d sequences takes %.1f ms", slots, self.frame_seconds * 1e3)

    def _add_large_prompts(self, context: CaptureContext) -> None:
        eager, tables = self.eager, self._tables.target
        # `burst_tokens` rounds to multiples of DEFAULT_TOKEN_BUDGET, so up by at most half of it.
        largest = max(self.token_budget, BURST_SECONDS / self.token_seconds + DEFAULT_TOKEN_BUDGET / 2)
        for size in LARGE_PROMPTS:
            if max(self._prompts) < size <= min(largest, self._max_tokens):
                self._prompts.add(size, partial(FusedPrefill, eager.model, eager.kv, tables, size), context)

    def _build_reader(self, context: CaptureContext | None) -> None:
        """Compile and capture the kernels of word times now, so that no request waits for that.

        If they fail, PyTorch operators read the attention.
        """
        frames = {rows: self._frames[rows].workload for rows in self._frames} if self._reader.heads else {}
        with device_errors(self._read_by_operators):
            for rows, workload in frames.items():
                launch = partial(self._launch_reader, workload)
                if context is not None and self._reader.capturable:
                    self._path_graphs[rows] = LaunchGraph.capture(launch, context)
                else:
                    launch()

    def _read_by_operators(self, error: Exception) -> None:
        logger.warning("the kernels for word times failed, using PyTorch operators: %s", describe_error(error))
        self._reads_by_kernel = False
