"""GPU memory profiling: measures what the engine needs and gives the rest of the limit to the KV cache.

An engine is built with a minimal KV cache and runs its peak load; the memory it then holds is what it needs.
"""

import gc
import logging
from dataclasses import dataclass, replace

import torch

from shoal.checkpoint.load import Checkpoint
from shoal.config import DEFAULT_TOKEN_BUDGET, EngineConfig
from shoal.engine.core import EngineCore, block_bytes
from shoal.engine.kv_cache import AttentionMetadata, PrefillSegment
from shoal.engine.memory.limit import parse_memory_limit
from shoal.engine.memory.stats import free_memory
from shoal.engine.scheduling.scheduler import prefill_budget
from shoal.errors import DeviceFailed, GenerationFailed, InvalidRequest
from shoal.quantize.apply import modes_of

logger = logging.getLogger(__name__)

# KV blocks while profiling, which runs one short prompt.
PROFILE_BLOCKS = 8
# Share of the limit that stays free, because allocator rounding and fragmentation differ between runs.
SLACK = 0.01
# Tokens of KV cache that a slot should have, about 24 s of reference and speech: with fewer, sequences preempt each
# other, so that fewer slots are faster.
MIN_SLOT_TOKENS = 512
INT4 = "slow=int4,fast=int8"


class SlotsDoNotFit(Exception):
    """The device's memory limit does not hold the engine with this many slots. Caught in this module."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Device memory in bytes: the configured limit, and what was measured."""

    limit: int
    needed: int  # weights, graphs, codec streams and the largest step, as reserved by torch
    outside: int  # taken by the driver since the engine was built

    @property
    def for_kv(self) -> int:
        return int(self.limit * (1 - SLACK)) - self.needed - self.outside


def device_memory_limit(config: EngineConfig, device: torch.device) -> int:
    """Return the `gpu_memory` limit of a GPU in bytes. Raises InvalidRequest."""
    return parse_memory_limit(config.gpu_memory, torch.cuda.get_device_properties(device).total_memory)


def plan_memory(checkpoint: Checkpoint, config: EngineConfig, *, record_weights: bool = False) -> EngineConfig:
    """Apply the memory limit to torch and return the configuration with `kv_bytes` filled in.

    For GPUs only; an explicit `kv_bytes` is kept. Slots that do not fit with MIN_SLOT_TOKENS each are halved, with a
    warning. Raises InvalidRequest if not even one fits with any tokens. `record_weights` as in `EngineCore`.
    """
    device = checkpoint.model.device
    # Memory of other processes on the card is not available.
    limit = min(device_memory_limit(config, device), free_memory(device) + torch.cuda.memory_reserved(device))
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(device).total_memory, device)
    if config.kv_bytes is not None:
        return config
    while (found := _with_kv_bytes(checkpoint, config, limit, record_weights=record_weights)) is None:
        logger.warning(
            "out of GPU memory: %.1f GB do not hold %d slots of %d tokens beside the weights; trying %d",
            *(limit / 1e9, config.slots, MIN_SLOT_TOKENS, config.slots // 2),
        )
        config = replace(config, slots=config.slots // 2)
    return found


def _with_kv_bytes(
    checkpoint: Checkpoint, config: EngineConfig, limit: int, *, record_weights: bool
) -> EngineConfig | None:
    """Return the configuration with the memory that is left for the KV cache, or None if its slots do not fit.

    Raises InvalidRequest instead of returning None for one slot, the last configuration to try.
    """
    tokens, last = min(MIN_SLOT_TOKENS, checkpoint.model.config.slow.max_seq_len), config.slots == 1
    slot_bytes = tokens * block_bytes(checkpoint, config) // config.block_size
    try:
        budget = measure(checkpoint, config, limit, record_weights=record_weights)
        _require_kv(budget, checkpoint, 0 if last else config.slots * slot_bytes)
    except SlotsDoNotFit as error:
        if last:
            raise InvalidRequest(str(error)) from error
        return None
    logger.info(
        "GPU memory limit %.2f GB: weights, graphs and workspace %.2f GB, outside torch %.2f GB, KV cache %.2f GB",
        *(size / 1e9 for size in (limit, budget.needed, budget.outside, budget.for_kv)),
    )
    if budget.for_kv < slot_bytes:
        logger.warning(
            "the KV cache has room for only %d tokens: longer requests are refused; %s",
            *(budget.for_kv * tokens // slot_bytes, _advice(checkpoint)),
        )
    return replace(config, kv_bytes=budget.for_kv)


def memory_advice(*, smallest: bool) -> str:
    """Return what to do when a model does not fit; `smallest` says that its weights cannot be made smaller."""
    first = "use a smaller model" if smallest else f"use smaller weights (--quantize {INT4})"
    return f"{first}, raise gpu_memory, or stop other processes on the device"


def _advice(checkpoint: Checkpoint) -> str:
    return memory_advice(smallest=modes_of(checkpoint.model, checkpoint.codec).slow == "int4")


def _require_kv(budget: MemoryBudget, checkpoint: Checkpoint, min_bytes: int) -> None:
    if budget.for_kv <= min_bytes:
        raise SlotsDoNotFit(
            f"out of memory: {budget.limit / 1e9:.1f} GB do not hold this model, which needs "
            f"{budget.needed / 1e9:.1f} GB without the KV cache, beside {budget.outside / 1e9:.1f} GB that the driver "
            f"and other processes took; {_advice(checkpoint)}"
        )


def measure(checkpoint: Checkpoint, config: EngineConfig, limit: int, *, record_weights: bool = False) -> MemoryBudget:
    """Build an engine with a minimal KV cache, run its peak load and return the memory that it took.

    Raises SlotsDoNotFit.
    """
    device = checkpoint.model.device
    # Memory cached while the weights were loaded must not count.
    _release_memory()
    outside = _outside(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        # Calibration reads all heads. Without `record_weights`, the path kernel, which unrolls the heads, would be
        # compiled for minutes per batch size.
        core = EngineCore(checkpoint, minimal_kv_config(checkpoint, config), record_weights=record_weights)
        run_peak_load(core)
    except (torch.OutOfMemoryError, DeviceFailed, GenerationFailed) as error:
        # A step that ran out of memory ends as DeviceFailed, a codec call as GenerationFailed.
        oom = torch.OutOfMemoryError
        if not isinstance(error, oom) and not isinstance(error.__cause__, oom) and not core.stats.out_of_memory:
            raise
        raise SlotsDoNotFit(
            f"out of memory: {limit / 1e9:.1f} GB do not hold the peak load of this model with {config.slots} slots; "
            f"{_advice(checkpoint)}"
        ) from error
    torch.cuda.synchronize(device)
    needed = torch.cuda.max_memory_reserved(device) - core.host_cache.kv.nbytes
    budget = MemoryBudget(limit, needed, max(0, _outside(device) - outside))
    del core
    _release_memory()
    return budget


def minimal_kv_config(checkpoint: Checkpoint, config: EngineConfig) -> EngineConfig:
    few = PROFILE_BLOCKS * block_bytes(checkpoint, config)
    return replace(config, kv_bytes=few, host_kv_bytes=0, guard=False)


@torch.inference_mode()
def run_peak_load(core: EngineCore) -> None:
    """Run the largest load: a prefill at the end of the longest context, and the largest calls of the codec."""
    core.warm_up()
    model, kv, config = core.checkpoint.model, core.host_cache.kv, core.config
    device, end, size = model.device, model.config.slow.max_seq_len, config.block_size
    count = min(prefill_budget(config.token_budget or DEFAULT_TOKEN_BUDGET, config.slots), end)
    tokens = torch.zeros(count, 1 + model.config.num_codebooks, dtype=torch.long, device=device)
    spare = torch.full((-(-end // size),), kv.spare, device=device)
    no_decodes = torch.zeros(0, len(spare), dtype=torch.long, device=device)
    where = kv.spare * size + torch.arange(count, device=device) % size
    # All blocks of this prompt are the spare one: the values are meaningless, the memory use is real.
    kv.begin_pass(AttentionMetadata(where, [PrefillSegment(0, count, end, spare)], no_decodes, no_decodes[:, 0]))
    model.slow(tokens, torch.arange(end - count, end, device=device), kv)
    core.audio_decoder.run_largest_batch()
    codec = core.checkpoint.codec
    if codec.can_encode:
        codec.encode(torch.zeros(1, codec.CHUNK_FRAMES * codec.config.frame_length, device=device))
    codec.decode(torch.zeros(1, codec.config.num_codebooks, codec.CHUNK_FRAMES, dtype=torch.long, device=device))


def _release_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _outside(device: torch.device) -> int:
    """Return the device memory held outside torch: by the driver and by other processes."""
    total = torch.cuda.mem_get_info(device)[1]
    return total - free_memory(device) - torch.cuda.memory_reserved(device)
