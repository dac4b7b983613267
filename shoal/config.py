"""Each room's settings, frozen. Built by hand in Python; flags, files and the environment are read elsewhere."""

from dataclasses import dataclass
from typing import Literal

Policy = Literal["continuous", "dynamic", "static"]


@dataclass(frozen=True)
class EngineConfig:
    """How much runs at once, on how much memory."""

    slots: int = 16  # live voices
    block_size: int = 16  # columns per block of KV memory
    quantize: str = "auto"  # the weights: none, int8, int4, fp8, or by parts; auto is what suits the device
    gpu_memory: str = "0.9"  # what the engine may take of a GPU: a share of it, or bytes as 4GB
    kv_dtype: str = "auto"  # keys and values: auto (the model's type), fp8 or int8
    # Most memory for keys and values, never more than all slots can fill. None: what everything else leaves of
    # `gpu_memory`; on a CPU, 1 GiB.
    kv_bytes: int | None = None
    host_kv_bytes: int = 256 << 20  # host memory for shared blocks that had to leave the device
    prefix_cache: bool = True
    token_budget: int = 512  # columns computed per step: what a long prompt may take from the running voices
    policy: Policy = "continuous"
    batch_size: int = 4  # of the policies that collect
    batch_seconds: float = 0.05
    max_waiting: int = 256  # requests that may queue before new ones are refused
    first_chunk_frames: int = 2
    max_chunk_frames: int = 32
    carried_columns: int = 0  # longest prompt that keeps earlier turns of a long text; 0: what the model takes
    # Batch sizes that a GPU has a graph for, as far as there are slots; all slots are always one of them.
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
    rung: str = "auto"  # how a step is run: graph, fused or eager; auto is the highest that works here
    clear_on_oom: bool = True  # give the device's unused memory back before going on after it ran out
    reference_seconds: float = 90.0  # longest recording of a voice
    cached_voices: int = 1_000  # encoded voices kept in memory
    guard: bool = True  # judge what comes out; random weights do not speak, so they go without
    retries: int = 1  # with another seed, when what came out is not speech
