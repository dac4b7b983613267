"""Compile kernels for GPUs that are not present and check their shared memory: `python -m tests.kernels.offline`.

Compiles the matrix products that need the most shared memory for every target, or with `--full` all kernels of S1-mini,
S2-Pro, nano and their codecs at every bucket and prompt size for the given targets (many minutes each). Prints one JSON
line per target with the number of variants, the largest shared memory and the most spilled registers in bytes, and the
variants above a limit, and how products over 8-bit weights group K; exits with 1 if a variant is above a limit or adds
in another order than the others. A compile error aborts.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.random import SIZES
from shoal.checkpoint.resolve import resolve_model
from shoal.codec.config import CodecConfig
from shoal.codec.dac import Codec
from shoal.codec.fused import FRAME_BUCKETS, FusedCall, FusedCodec
from shoal.engine.execution.fixed_size import batch_sizes
from shoal.engine.execution.graphs import LARGE_PROMPTS, PROMPTS
from shoal.kernels import compile_check
from shoal.kernels.compile_check import check_codec_kernels, check_kernels, launch_largest_products
from shoal.kernels.cuda_graph import Workload, compile_ahead
from shoal.kernels.jit import WGMMA_MAJORS, Kernel
from shoal.model.dual_ar import DualAR
from shoal.quantize.apply import quantize_model
from shoal.quantize.modes import WeightModes
from tests.kernels.hopper import RaisingCompileMode, TextWeights, eight_bit_products, frames, k_groups

# Opt-in shared memory per block in bytes, by compute capability.
LIMITS = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448}
LIMITS |= {100: 232_448, 103: 232_448, 110: 232_448, 120: 101_376, 121: 101_376}
# Multiprocessors of an A100, RTX 3060, Jetson Orin NX, L4, H200, B200, B300, Jetson Thor, RTX 5070 Ti and DGX Spark.
MULTIPROCESSORS = {80: 108, 86: 28, 87: 8, 89: 58, 90: 132, 100: 148, 103: 148, 110: 20, 120: 70, 121: 48}
# Without `--full`, products over 8-bit weights and kernels of the codec are compiled for one target of each kind only.
EIGHT_BIT, CODEC = (89, 90, 110), (86, 90)
SUBSET = (80, 86, 89, 90, 100, 110, 120)
# Registers that a variant may spill to local memory, in bytes per thread.
MAX_SPILLS = 512
# Batch sizes of a frame: those of 128 slots, and one for each choice of tiles for more.
ROWS = (*batch_sizes(128), 192, 256, 512)


class OfflineDriver:
    """Fake Triton driver for one target. The architecture is also the device index, so targets do not share caches."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


class LargestProducts:
    """Workload of the products that need the most shared memory."""

    inputs = torch.zeros(0)

    def padding(self) -> np.ndarray:
        return self.inputs.numpy()

    def run(self) -> None:
        launch_largest_products(torch.device("cpu"), torch.bfloat16)


class EightBitProducts:
    """Workload of few and many rows over int8 weights: those of `tests.kernels.hopper`, which Triton's cache has."""

    inputs = torch.zeros(0)

    def padding(self) -> np.ndarray:
        return self.inputs.numpy()

    def run(self) -> None:
        for rows in (1, 64):
            eight_bit_products(rows)


def all_workloads(arch: int) -> Iterator[Workload]:
    """Yield all sizes of S1-mini, S2-Pro and nano with the weight and KV dtypes of the target, and codecs in fp16.

    Kernels of word times are those of nano, the only model that has them.
    """
    modes = {"none": torch.bfloat16, "int8": torch.int8, "int4": torch.bfloat16, "w8a8": torch.bfloat16}
    modes |= {"fp8": torch.float8_e4m3fn} if arch >= 89 else {}
    prompts = (*PROMPTS, *LARGE_PROMPTS)
    for name, (mode, kv_dtype) in product(("s1-mini", "s2-pro"), modes.items()):
        model = released_model(name)
        quantize_model(model, WeightModes.parse(mode))
        yield from frames(model, kv_dtype, ROWS, prompts)
    yield from frames(released_model("s1-mini").half(), torch.float16, ROWS, prompts)
    nano = resolve_model("nano", dtype=torch.bfloat16)
    yield from frames(nano.model, torch.bfloat16, ROWS, prompts)
    with init_empty_weights():
        codec = Codec(CodecConfig(), encoder=False)
    for fused in (FusedCodec(each, 1, torch.float16) for each in (codec.to_empty(device="cpu"), nano.codec)):
        yield from (FusedCall(fused, size) for size in FRAME_BUCKETS)
    yield TextWeights((torch.bfloat16, torch.int8, *((torch.float8_e4m3fn,) if arch >= 89 else ())))


def released_model(name: str) -> DualAR:
    """Return an uninitialised model of released width with two layers each; no kernel depends on the layer."""
    config, _ = SIZES[name]
    two = {part: replace(getattr(config, part), n_layer=2) for part in ("slow", "fast")}
    with init_empty_weights():
        model = DualAR(replace(config, **two))
    return model.to(torch.bfloat16).to_empty(device="cpu")


def compile_for(arch: int, workloads: Iterator[Workload], limit: int) -> dict[str, Any]:
    """Compile the workloads for one target, with tiles for `limit` bytes of shared memory; return the summary."""
    triton.runtime.driver.set_active(OfflineDriver(arch))
    wgmma = arch // 10 in WGMMA_MAJORS
    modules = [module for name, module in sys.modules.items() if name.startswith("shoal.kernels.")]
    for module in modules:
        if hasattr(module, "supports_pdl"):
            module.supports_pdl = lambda device: arch >= 90
        if hasattr(module, "has_wgmma"):
            module.has_wgmma = lambda device: wgmma
        if hasattr(module, "shared_memory_limit"):
            module.shared_memory_limit = lambda device: limit
        if hasattr(module, "multiprocessor_count"):
            module.multiprocessor_count = lambda device: MULTIPROCESSORS[arch]
    compile_ahead(workloads, strict=True)
    kernels = {name: each for module in modules for name, each in vars(module).items() if isinstance(each, Kernel)}
    compiled = [(name, each) for name in kernels for each in kernels[name].function.device_caches[arch][0].values()]
    variants = [(name, each.metadata.shared, spilled_bytes(each.asm["cubin"])) for name, each in compiled]
    over = [each for each in variants if each[1] > limit or each[2] > MAX_SPILLS]
    _, shared, spills = (max(column) for column in zip(*variants, strict=True))
    spilling = sum(each[2] > 0 for each in variants)
    sizes = {"largest": shared, "spills": spills, "spilling": spilling}
    groups = k_groups(arch, wgmma=wgmma)
    # What `has_wgmma` assumes of the target, and what the compiler does with many rows.
    instructions = {"expected": wgmma, "found": any(uses_wgmma(each.asm["ttgir"]) for _, each in compiled)}
    result = {"arch": arch, "limit": limit, "variants": len(variants), **sizes, "over": over, "k_groups": groups}
    return {**result, "wgmma": instructions}


def uses_wgmma(text: str) -> bool:
    """Return whether code in Triton's GPU dialect multiplies with wgmma or tcgen05."""
    return "ttng.warp_group_dot" in text or "ttng.tc_gen5_mma" in text


def spilled_bytes(cubin: bytes) -> int:
    """Return the local memory per thread of a kernel, which its registers spill to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return max(int(stack) for stack in re.findall(r"STACK:(\d+)", usage.stdout))


def predictions(limit: int, *, codec: bool) -> dict[str, str | None]:
    """Return what `shoal doctor` says about the kernels on this target, and on one with very little shared memory."""
    compile_check.kernels_unavailable = lambda device: None
    parts = {"": partial(check_kernels, torch.device("cpu"), torch.bfloat16)}
    if codec:
        parts["codec_"] = partial(check_codec_kernels, torch.device("cpu"), torch.float16)
    limits = {"predicted": limit, "with_16_kb": 16_384}
    return {part + name: check(size) for part, check in parts.items() for name, size in limits.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="*", type=int, default=list(SUBSET), help="compute capabilities, such as 89")
    parser.add_argument("--full", action="store_true", help="compile all kernels at every size")
    parser.add_argument("--limit", type=int, help="shared memory per block in bytes instead of that of the target")
    arguments = parser.parse_args()
    triton.AsyncCompileMode = RaisingCompileMode
    results = []
    for arch in arguments.arch:
        limit = arguments.limit or LIMITS[arch]
        subset = [LargestProducts(), *([EightBitProducts()] if arch in EIGHT_BIT else [])]
        workloads = all_workloads(arch) if arguments.full else iter(subset)
        results.append(compile_for(arch, workloads, limit) | predictions(limit, codec=arguments.full or arch in CODEC))
        print(json.dumps(results[-1]), flush=True)
    return 1 if any(map(is_wrong, results)) else 0


def is_wrong(result: Mapping[str, Any]) -> bool:
    """Return whether a variant does not fit its target, or products of few and of many rows would differ there."""
    return (
        bool(result["over"] or result["k_groups"]["wrong"]) or result["wgmma"]["expected"] != result["wgmma"]["found"]
    )


if __name__ == "__main__":
    sys.exit(main())
