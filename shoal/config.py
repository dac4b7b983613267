"""Frozen engine configuration, without pydantic so that a bare GPU host can import it. `shoal/settings` builds it."""

import os
from dataclasses import dataclass, field
from typing import Literal, get_args

from shoal.errors import InvalidRequest

Policy = Literal["continuous", "dynamic", "static"]
# Instruction sets of the native backend, widest first; auto: the fastest by measurement.
CpuIsa = Literal["auto", "amx", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "dotprod", "baseline"]
ISA_VARIABLE = "SHOAL_CPU_ISA"

# Default token budget, in prompt tokens per step, on devices whose prefill speed is not measured.
DEFAULT_TOKEN_BUDGET = 512


def default_isa() -> str:
    """Return the instruction set that the environment sets, or auto. Raises InvalidRequest for an unknown one."""
    isa, known = os.environ.get(ISA_VARIABLE) or "auto", get_args(CpuIsa)
    if isa not in known:
        raise InvalidRequest(f"{ISA_VARIABLE} must be one of {', '.join(known)}, not {isa[:64]!r}")
    return isa


@dataclass(frozen=True)
class EngineConfig:
    """Batch size, memory, scheduling and execution of one engine."""

    slots: int = 16  # sequences generated at the same time
    block_size: int = 16  # tokens per block of the KV cache
    quantize: str = "auto"  # weights: none, int8, int4, fp8, or per part; auto: chosen for the device
    gpu_memory: str = "0.9"  # GPU memory the engine may use: a fraction of the device or a size such as 4GB
    kv_dtype: str = "auto"  # dtype of the KV cache: auto (the model's dtype), fp8 or int8
    # Maximum bytes of the KV cache; less is allocated if all slots together need less. None: what remains of
    # `gpu_memory`; on a CPU, 1 GiB.
    kv_bytes: int | None = None
    host_kv_bytes: int = 256 << 20  # host tier for shared blocks that were evicted from the device
    prefix_cache: bool = True
    # Prompt tokens computed per step: bounds the delay that prompts add to running sequences. A step of many sequences
    # may compute more, in proportion to its own duration (`Scheduler.prefill_budget`). None: what a GPU computes in
    # 12 ms (`graphs.affordable_tokens`), and 512 elsewhere.
    token_budget: int | None = None
    policy: Policy = "continuous"
    batch_size: int = 4  # maximum batch of the dynamic and static policies
    batch_seconds: float = 0.05  # maximum seconds that those policies wait for a batch to fill
    max_waiting: int = 256  # queued requests before new ones are rejected
    # Frames of a stream's first chunk. None: 1 if a step with all slots takes at most a sixth of a frame and samples do
    # not depend on how audio is cut into chunks, else 2 (`output/chunks.py`).
    first_chunk_frames: int | None = None
    max_chunk_frames: int = 32
    context_tokens: int = 0  # maximum prompt with earlier turns as context, in tokens; 0: the model's limit
    # Batch sizes with a CUDA graph; values above `slots` are ignored and `slots` is always included. Empty: chosen for
    # `slots` (`fixed_size.batch_sizes`).
    buckets: tuple[int, ...] = ()
    # Execution backend to start with: graph, fused, plain-graph, native or eager; auto: the fastest that works here.
    backend: str = "auto"
    # Instruction set of the native backend. The default is read from the environment here, because `shoal say`,
    # `shoal bench` and `shoal.load` do not read the settings.
    cpu_isa: str = field(default_factory=default_isa)
    clear_on_oom: bool = True  # release cached GPU memory after an out-of-memory error
    reference_seconds: float = 90.0  # maximum duration of a voice recording
    cached_voices: int = 1_000  # encoded voices kept in memory
    guard: bool = True  # check that the output is speech; off for random weights, which do not speak
    retries: int = 1  # retries with another seed when the output is not speech
    turn_retries: int = 3  # retries of one turn, with another seed, when it is too short for its text
