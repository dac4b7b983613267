"""Compile every kernel of an engine for an H200 on a machine without one: `python -m tests.kernels.hopper`.

The interpreter accepts code that the compiler rejects. As long as nothing is launched, Triton needs no more than a
driver that names the target. Prints as JSON the number of compiled variants of each kernel, of the layouts in which
RMSNorm sums a row and attention a softmax, and of products over 8-bit weights by how they group K; a compile error
aborts.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.resolve import resolve_model
from shoal.codec.fused import FusedCall, FusedCodec
from shoal.engine.execution.fused import FusedFrame, FusedPrefill
from shoal.engine.execution.slot_state import SlotStates
from shoal.engine.kv_cache import PagedKV
from shoal.kernels import rms_norm
from shoal.kernels.attention import paged_attention, prefill_attention
from shoal.kernels.attention.paged_attention import paged_decode
from shoal.kernels.attention.prefill_attention import paged_prefill
from shoal.kernels.cuda_graph import Workload, compile_ahead
from shoal.kernels.int8_rows import int8_rows
from shoal.kernels.jit import Kernel, collect_compiled
from shoal.kernels.linear import linear as linear_kernels
from shoal.kernels.linear import split_k_linear as split_k_kernels
from shoal.kernels.linear.int4_linear import int4_linear, int4_split_k_linear
from shoal.kernels.linear.linear import linear
from shoal.kernels.linear.split_k_linear import split_k_linear
from shoal.kernels.rms_norm import fused_rms_norm, int8_rms_norm
from shoal.kernels.word_times.text_attention import Texts, text_attention
from shoal.kernels.word_times.text_path import TILES, text_path
from shoal.kernels.word_times.text_path_numpy import KEPT_FRAMES, MAX_TOKENS
from shoal.model.config import DualARConfig
from shoal.model.dual_ar import DualAR
from shoal.model.family import S2
from shoal.model.slow import Head
from shoal.quantize.apply import quantize_model
from shoal.quantize.modes import WeightModes

SLOTS = 64


class Hopper:
    """Fake Triton driver with the methods that compilation calls."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class RaisingCompileMode(triton.AsyncCompileMode):  # type: ignore[misc]
    """Compile mode that raises compile errors instead of ignoring them."""

    def __init__(self, executor: object, *, ignore_errors: bool) -> None:
        super().__init__(executor, ignore_errors=False)


class Int4Products:
    """Products over int4 weights, which nano is too small for."""

    inputs = torch.zeros(0)

    def padding(self) -> np.ndarray:
        return self.inputs.numpy()

    def run(self) -> None:
        weight, affine = torch.empty(64, 256, dtype=torch.uint8), torch.empty(4, 64, 2, dtype=torch.bfloat16)
        for rows in (1, 16, 64):
            x = torch.empty(rows, 512, dtype=torch.bfloat16)
            int4_linear(x, weight, affine, gated=True)
            int4_split_k_linear(x, weight, affine)


# K that `linear` and `split_k_linear` treat as long, by rows. Their loops over K are unrolled: a larger K adds only
# iterations, and time to compile them.
LONG_K = {1: (4608, 9728), 9: (2560, 9728)}


def eight_bit_products(rows: int) -> None:
    """Launch products of rows over int8 weights, with a short K and, for few rows, a long one."""
    for of_linear, of_split_k in ((1024, 1024), *([LONG_K[rows]] if rows in LONG_K else [])):
        x, weight = torch.empty(rows, of_linear, dtype=torch.bfloat16), torch.empty(6144, of_linear, dtype=torch.int8)
        linear(x, weight, scales=torch.empty(6144, dtype=torch.float32))
        x, weight = x.new_empty(rows, of_split_k), weight.new_empty(6144, of_split_k)
        split_k_linear(x, weight)


class ManyRows:
    """Products of many rows, whose kernels nano is too small for."""

    inputs = torch.zeros(0)

    def padding(self) -> np.ndarray:
        return self.inputs.numpy()

    def run(self) -> None:
        x = torch.empty(256, 1024, dtype=torch.bfloat16)
        for dtype in (torch.bfloat16, torch.int8):
            scales = None if dtype == torch.bfloat16 else torch.empty(6144, dtype=torch.float32)
            weight = torch.empty(6144, 1024, dtype=dtype)
            linear(x, weight, scales=scales)
            linear(x, weight, scales=scales, gated=True)
            split_k_linear(x, weight)
        for rows in (1, 9, 24):
            eight_bit_products(rows)
        weight, scales = torch.empty(6144, 1024, dtype=torch.int8), torch.empty(6144, dtype=torch.float32)
        for rows in (1, 16, 64, 256):
            quantized = int8_rows(torch.empty(rows, 1024, dtype=torch.bfloat16))
            linear(quantized, weight, scales=scales)
            linear(quantized, weight, scales=scales, gated=True)
            split_k_linear(quantized, weight)


class Norms:
    """RMSNorm at the widths of the released models, with and without partial sums of split-K products."""

    inputs = torch.zeros(0)

    def padding(self) -> np.ndarray:
        return self.inputs.numpy()

    def run(self) -> None:
        for dim in (1024, 2560):
            x, weight = torch.empty(2, dim, dtype=torch.bfloat16), torch.empty(dim, dtype=torch.bfloat16)
            fused_rms_norm(x, weight, 1e-6)
            fused_rms_norm(x, weight, 1e-6, partials=torch.empty(4, 2, dim))
            fused_rms_norm(x, weight, 1e-6, partials=torch.empty(4, 2, dim), scales=weight)
            partials, row_scales = torch.empty(4, 2, dim, dtype=torch.int32), torch.empty(2)
            int8_rms_norm(x, weight, 1e-6, partials=partials, scales=weight, row_scales=row_scales)


def norm_layouts() -> dict[str, int]:
    """Return the number of different layouts of the sum of squares of `_norm_kernel`, by the size of the row."""
    found: dict[str, set[str]] = {}
    for variant in rms_norm._norm_kernel.function.device_caches[0][0].values():
        text = variant.asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.M))
        size, layout = re.search(r'"tt\.reduce".*?\}\) : \(tensor<(\d+)xf32, (#\w+)>', text, re.S).groups()  # type: ignore[union-attr]
        found.setdefault(size, set()).add(layouts[layout])
    return {size: len(each) for size, each in found.items()}


def attention_layouts() -> dict[str, int]:
    """Return the number of different layouts of the sums of attention, by head size and KV dtype.

    Rows that prefetch their first block, rows that do not, and the tokens of short and long prompts must add the
    weights of a softmax in the same order.
    """
    decode, prefill = (paged_attention._decode_kernel, paged_decode), (prefill_attention._prefill_kernel, paged_prefill)
    found = {}
    for dim, dtype in product((32, 64, 128), (torch.bfloat16, torch.int8)):
        layouts = set[str]()
        for rows in (1, paged_attention.SPLIT_ROWS + 1):
            layouts |= sum_layouts(attention_code(*decode, rows, dim, dtype))
        for rows in (32, prefill_attention.WIDE_ROWS):
            layouts |= sum_layouts(attention_code(*prefill, rows, dim, dtype))
        found[f"{dim} {dtype}"] = len(layouts)
    return found


def attention_code(kernel: Kernel, launch: Callable[..., torch.Tensor], rows: int, dim: int, dtype: torch.dtype) -> str:
    """Compile attention of so many rows and return its code in Triton's GPU dialect."""
    q, keys = torch.empty(rows, 16, dim, dtype=torch.bfloat16), torch.empty(4, 16, 8, dim, dtype=dtype)
    scales = None if dtype == torch.bfloat16 else torch.empty(4, 16, 8, dtype=torch.float16)
    positions = torch.empty(rows, dtype=torch.int32)
    # Tables of another width than those of the frames, and than those of another number of rows: a new variant.
    tables = torch.empty(rows + 1, 9 + rows, dtype=torch.int32)
    variants = kernel.function.device_caches[0][0]
    before = set(variants)
    with collect_compiled():
        launch(q, keys, keys, tables, positions, positions, key_scales=scales, value_scales=scales)
    (added,) = set(variants) - before
    text: str = variants[added].asm["ttgir"]
    return text


def sum_layouts(text: str) -> set[str]:
    """Return how warps share the rows of the sums of a kernel: the part of a layout that decides on their order."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.M))
    # Floats of a matrix: the search for the sequences of a tile reduces integers of a vector.
    sums = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<\d+x\d+xf32, ([^>]*(?:<[^>]*>)?[^>]*)>', text, re.S)
    named = (re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), each) for each in sums)
    return {match[0] for each in named if (match := re.search(r"warpsPerCTA = \[[\d, ]+\]", each))}


def k_groups(device: int, *, wgmma: bool) -> dict[str, int]:
    """Return the number of products over 8-bit weights by how they group K, and of those that add in a wrong order.

    An mma instruction with `kWidth = 4` adds other elements than wgmma does, or than one with `kWidth = 2`. With wgmma
    such products must be regrouped; without it all must have the same width.
    """
    found = {"interleaved": 0, "regrouped": 0, "wrong": 0}
    for kernels in (vars(linear_kernels), vars(split_k_kernels)):
        for each in kernels.values():
            for variant in each.function.device_caches[device][0].values() if isinstance(each, Kernel) else ():
                text = variant.asm["ttgir"]
                dots = re.findall(r"tt\.dot .*bf16.*kWidth = (\d)", text)
                if "!tt.ptr<i8>" not in text or not dots:
                    continue
                regrouped, interleaved = "order = array<i32: 0, 3, 2, 1, 4>" in text, "4" in dots
                found["regrouped"] += regrouped
                found["interleaved"] += interleaved
                found["wrong"] += regrouped != interleaved if wgmma else regrouped or not interleaved
    return found


class TextWeights:
    """Attention weights over texts, for some KV dtypes; they are not a part of a frame."""

    inputs = torch.zeros(0)

    def __init__(self, kv_dtypes: Iterable[torch.dtype]) -> None:
        self._kv_dtypes = tuple(kv_dtypes)

    def padding(self) -> np.ndarray:
        return self.inputs.numpy()

    def run(self) -> None:
        q, tables = torch.empty(8, 16, 64, dtype=torch.bfloat16), torch.empty(9, 8, dtype=torch.int32)
        texts = Texts(*torch.empty(3, 8, dtype=torch.int32))
        heads, out = torch.empty(3, dtype=torch.long), torch.empty(8, 3, MAX_TOKENS)
        for dtype in self._kv_dtypes:
            keys = torch.empty(4, 16, 8, 64, dtype=dtype)
            scales = None if dtype == torch.bfloat16 else torch.empty(4, 16, 8, dtype=torch.float16)
            text_attention(q, keys, tables, texts, heads, out, key_scales=scales)
        scores = torch.empty(9, KEPT_FRAMES, MAX_TOKENS, dtype=torch.int32)
        text_path(out, texts, torch.empty(9, dtype=torch.long), scores, torch.empty(TILES, 8, 64, dtype=torch.int16))


def frames(
    model: DualAR, kv_dtype: torch.dtype, rows: Iterable[int], prompts: Iterable[int] = (512,)
) -> Iterator[Workload]:
    """Yield frames for each number of rows, and a prefill for each prompt size."""
    kv = PagedKV(model.config.slow, 4, 16, kv_dtype, "cpu")
    states, head = SlotStates(model, SLOTS), Head(model.slow)
    tables = torch.zeros(SLOTS + 1, 8, dtype=torch.int32)
    for count in rows:
        yield FusedFrame(model, head, kv, states, tables, count)
    for size in prompts:
        yield FusedPrefill(model, kv, tables, size)


def two_layers(config: DualARConfig) -> DualAR:
    """Return an uninitialised model whose products have few different sizes, each of which is compiled.

    Slow and fast blocks are equal, `wo` has the size of `w2`, and `wqkv` that of the fast output. No kernel depends on
    the layer.
    """
    slow = replace(config.slow, n_layer=2, dim=512, n_head=8, n_local_heads=4, head_dim=64, intermediate_size=512)
    fast = replace(slow, attention_qk_norm=False, max_seq_len=config.num_codebooks)
    with init_empty_weights():
        model = DualAR(replace(config, slow=slow, fast=fast))
    return model.to(torch.bfloat16).to_empty(device="cpu")


def workloads() -> Iterator[Workload]:
    """Yield workloads of both families with every weight and KV dtype and every tile branch."""
    nano = resolve_model("nano", dtype=torch.bfloat16)
    config = nano.model.config
    yield from frames(two_layers(replace(config, family=S2, tie_word_embeddings=True)), torch.bfloat16, [1], [])
    modes = {"none": (torch.bfloat16, [1, 8, 16, 64]), "int8": (torch.int8, [8]), "fp8": (torch.float8_e4m3fn, [8])}
    for mode, (kv_dtype, rows) in modes.items():
        model = two_layers(config)
        quantize_model(model, WeightModes.parse(mode))
        yield from frames(model, kv_dtype, rows)
    yield FusedCall(FusedCodec(nano.codec, SLOTS, torch.float16), 256)
    yield Int4Products()
    yield ManyRows()
    yield TextWeights((torch.bfloat16, torch.int8, torch.float8_e4m3fn))
    yield Norms()


def main() -> None:
    triton.runtime.driver.set_active(Hopper())
    modules = [module for name, module in sys.modules.items() if name.startswith("shoal.kernels.")]
    for module in modules:
        for name in ("supports_pdl", "has_wgmma"):
            if hasattr(module, name):
                setattr(module, name, lambda device: True)
    triton.AsyncCompileMode = RaisingCompileMode
    compile_ahead(workloads(), strict=True)
    kernels = {name: each for module in modules for name, each in vars(module).items() if isinstance(each, Kernel)}
    variants = {name: len(each.function.device_caches[0][0]) for name, each in sorted(kernels.items())}
    layouts = {"norm_layouts": norm_layouts(), "attention_layouts": attention_layouts()}
    print(json.dumps({"variants": variants, **layouts, "k_groups": k_groups(0, wgmma=True)}))


if __name__ == "__main__":
    main()
