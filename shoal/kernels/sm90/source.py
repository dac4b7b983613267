"""CUDA C++ source of a kernel: its file, the code it shares with others, and wgmma instructions of its width."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "src"
CONV_UNIT = 192  # outputs that a warpgroup of src/conv.cu computes at a time


class Variant(NamedTuple):
    """A kernel for layers of one shape: src/NAME.cu with these numbers of input channels, outputs and taps."""

    name: str
    channels: int
    outputs: int
    taps: int = 7


def source(variant: Variant) -> str:
    """Return the complete source of a kernel."""
    common, kernel = ((SOURCES / each).read_text(encoding="utf-8") for each in ("common.cuh", f"{variant.name}.cu"))
    sizes = {"CHANNELS": variant.channels, "OUTPUTS": variant.outputs, "TAPS": variant.taps}
    defines = (f"#define {name} {value}" for name, value in sizes.items())
    width = CONV_UNIT if variant.name == "conv" else variant.channels
    products = (wgmma(width, a_in_registers=each) for each in (False, True))
    return "\n".join((*defines, common, *products, kernel))


@cache
def wgmma(width: int, *, a_in_registers: bool) -> str:
    """Return a function that multiplies 64 rows of 16 halves with `width` columns and adds to acc if `accumulate`.

    Operand A is a descriptor of shared memory, or four registers of each thread.
    """
    sums = width // 2
    if a_in_registers:
        parameters, inputs, used, options = (
            "u32 a0, u32 a1, u32 a2, u32 a3",
            '"r"(a0), "r"(a1), "r"(a2), "r"(a3)',
            4,
            "",
        )
    else:
        parameters, inputs, used, options = "u64 a", '"l"(a)', 1, ", 0"
    operand = ", ".join(f"%{sums + index}" for index in range(used))
    operand = f"{{{operand}}}" if a_in_registers else operand
    outputs = ", ".join(f"%{index}" for index in range(sums))
    constraints = ", ".join(f'"+f"(acc[{index}])' for index in range(sums))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.f16.f16"
    return f"""
__device__ __forceinline__ void wgmma(float (&acc)[{sums}], {parameters}, u64 b, int accumulate) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{sums + used + 1}, 0;\\n"
                 "{instruction} {{{outputs}}}, {operand}, %{sums + used}, p, 1, 1, 0{options};\\n}}"
                 : {constraints} : {inputs}, "l"(b), "r"(accumulate));
}}
"""
