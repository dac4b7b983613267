"""CUDA C++ source of a kernel: its file, the code it shares with others, and wgmma instructions of its width."""

from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "src"


def source(name: str, channels: int) -> str:
    """Return the complete source of the kernel in src/NAME.cu for layers of so many channels."""
    common, kernel = ((SOURCES / each).read_text(encoding="utf-8") for each in ("common.cuh", f"{name}.cu"))
    width = channels // 2 if name == "conv" else channels
    products = (wgmma(width, a_in_registers=each) for each in (False, True))
    return "\n".join((f"#define CHANNELS {channels}", common, *products, kernel))


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
