"""How much of a GPU the engine may take, and what is left of it for keys and values.

Nothing is guessed: the engine is built with hardly any KV memory and made to do the most it will ever do at once; what
it then holds is what it needs. The rest of the budget becomes blocks.
"""

import gc
import logging
from dataclasses import dataclass, replace

import torch

from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore, block_bytes
from shoal.engine.kv_cache import AttentionMetadata, PrefillSegment
from shoal.engine.memory.limit import parse_memory_limit
from shoal.errors import GenerationFailed, InvalidRequest

logger = logging.getLogger(__name__)

# Blocks of the rehearsal, which speaks one short sentence.
FEW_BLOCKS = 8
# The allocator rounds up, and two runs of it do not leave the same gaps.
SLACK = 0.01


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of a device, all of them measured but the first."""

    cap: int
    needed: int  # weights, graphs, the codec's streams and the largest step, as torch holds them
    outside: int  # what the driver took besides, since the engine was built

    @property
    def for_kv(self) -> int:
        return int(self.cap * (1 - SLACK)) - self.needed - self.outside


def device_memory_limit(config: EngineConfig, device: torch.device) -> int:
    """What the engine may take of a GPU. Raises InvalidRequest."""
    return parse_memory_limit(config.gpu_memory, torch.cuda.get_device_properties(device).total_memory)


def plan_memory(checkpoint: Checkpoint, config: EngineConfig) -> EngineConfig:
    """The configuration with `kv_bytes` filled in, and torch held to the cap. Raises InvalidRequest if nothing is left.

    Only for GPUs; a size that was asked for is kept.
    """
    device = checkpoint.model.device
    # What others hold on the card is not ours to plan with.
    cap = min(
        device_memory_limit(config, device), torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    )
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(device).total_memory, device)
    if config.kv_bytes is not None:
        return config
    budget = measure(checkpoint, config, cap)
    logger.info(
        "of %.2f GB: %.2f for weights, graphs and work, %.2f outside of torch, %.2f for keys and values",
        *(size / 1e9 for size in (cap, budget.needed, budget.outside, budget.for_kv)),
    )
    if budget.for_kv <= 0:
        raise InvalidRequest(
            f"{cap / 1e9:.1f} GB do not hold this model and {config.slots} voices: {budget.needed / 1e9:.1f} GB are "
            "needed before keys and values. Lower slots, quantise (--quantize int8,codec=int8), or raise gpu_memory"
        )
    return replace(config, kv_bytes=budget.for_kv)


def measure(checkpoint: Checkpoint, config: EngineConfig, cap: int) -> MemoryBudget:
    """Build an engine with hardly any KV memory, let it do its most, and look."""
    device = checkpoint.model.device
    # What reading the weights left in the allocator is nobody's need.
    _let_go()
    outside = _outside(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        core = EngineCore(checkpoint, with_few_blocks(checkpoint, config))
        rehearse(core)
    except (torch.OutOfMemoryError, GenerationFailed) as problem:
        if isinstance(problem, GenerationFailed) and not core.stats.out_of_memory:
            raise
        raise InvalidRequest(
            f"{cap / 1e9:.1f} GB do not hold this model at work with {config.slots} voices: lower slots, quantise "
            "(--quantize int8,codec=int8), or raise gpu_memory"
        ) from problem
    torch.cuda.synchronize(device)
    needed = torch.cuda.max_memory_reserved(device) - core.host_cache.kv.nbytes
    budget = MemoryBudget(cap, needed, max(0, _outside(device) - outside))
    del core
    _let_go()
    return budget


def with_few_blocks(checkpoint: Checkpoint, config: EngineConfig) -> EngineConfig:
    few = FEW_BLOCKS * block_bytes(checkpoint, config)
    return replace(config, kv_bytes=few, host_kv_bytes=0, guard=False)


@torch.inference_mode()
def rehearse(core: EngineCore) -> None:
    """The most that can happen at once: a last piece of the longest prompt, all slots decoded, a recording encoded."""
    core.warm_up()
    model, kv, config = core.checkpoint.model, core.host_cache.kv, core.config
    device, end, size = model.device, model.config.slow.max_seq_len, config.block_size
    count = min(config.token_budget, end)
    tokens = torch.zeros(count, 1 + model.config.num_codebooks, dtype=torch.long, device=device)
    spare = torch.full((-(-end // size),), kv.spare, device=device)
    nobody = torch.zeros(0, len(spare), dtype=torch.long, device=device)
    where = kv.spare * size + torch.arange(count, device=device) % size
    # Every block of this prompt is the spare one: what it reads is nonsense, what it takes is not.
    kv.begin_pass(AttentionMetadata(where, [PrefillSegment(0, count, end, spare)], nobody, nobody[:, 0]))
    model.slow(tokens, torch.arange(end - count, end, device=device), kv)
    core.audio_decoder.rehearse()
    codec = core.checkpoint.codec
    if codec.can_encode:
        codec.encode(torch.zeros(1, codec.CHUNK_FRAMES * codec.config.frame_length, device=device))


def _let_go() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _outside(device: torch.device) -> int:
    """Memory of the device that torch does not hold: the driver's, and other processes'."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
