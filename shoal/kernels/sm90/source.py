"""Assemble the CUDA C++ source of a kernel: its sizes as macros, shared code and its file."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "src"
CONV_UNIT = 192  # outputs that a warpgroup of src/conv.cu computes at a time
WIDE_OUTPUTS = 3072
# Dynamic shared memory of a block of src/few_rows_linear.cu: the limit for wide layers, the limit for narrow layers,
# large inputs and small GPUs (Hopper's maximum), and the minimum. The minimum is half of a multiprocessor's: with less,
# two blocks would share one multiprocessor and leave another idle.
LINEAR_SHARED_BYTES, MAX_SHARED_BYTES, MIN_LINEAR_SHARED_BYTES = 160_000, 232_448, 116_736
LARGE_INPUT_BYTES = 100_000  # inputs of more bytes count as large
SMALL_GPU = 78  # multiprocessors; parts of a GPU (MIG) have fewer, so each block has more outputs and larger sums
MAX_GROUPS = 6  # groups of warps of a block


class ConvVariant(NamedTuple):
    """A convolution of the codec: src/NAME.cu with these numbers of input channels, outputs and taps."""

    name: str
    channels: int
    outputs: int
    taps: int = 7

    def source(self) -> str:
        """Return the complete source, with the wgmma instructions of its width."""
        sizes = {"CHANNELS": self.channels, "OUTPUTS": self.outputs, "TAPS": self.taps}
        width = CONV_UNIT if self.name == "conv" else self.channels
        products = (wgmma(width, a_in_registers=each) for each in (False, True))
        return "\n".join((_defines(sizes), _read("common.cuh", "convolution.cuh"), *products, _read(f"{self.name}.cu")))


class LinearVariant(NamedTuple):
    """A linear layer of few rows: src/few_rows_linear.cu for these sizes.

    With `norm` an RMSNorm precedes the layer, without it the output is added to the residual. `int8` means weights and
    activations.
    """

    rows: int
    columns: int
    outputs: int
    norm: bool
    gated: bool
    int8: bool
    multiprocessors: int

    @property
    def name(self) -> str:
        return "few_rows_linear"

    @property
    def lines(self) -> int:
        """Return the weight rows of a tile. Narrow layers have smaller tiles, which blocks can share evenly."""
        return 8 if self.gated or self.outputs >= WIDE_OUTPUTS else 4

    @property
    def box_blocks(self) -> int:
        """Return the 128-byte blocks per K split of a copy's box: 8 KiB in all, 12 for int8 with eight weight rows."""
        return 4 if self.lines == 4 else 3 if self.int8 else 2

    @property
    def groups(self) -> int:
        """Return the warp groups of a block: narrow layers have one per tile, if they fit with two stages each."""
        return 3 if self.lines == 8 else min(MAX_GROUPS, max(2, self._tiles), self._max_groups)

    @property
    def fits(self) -> bool:
        """Return whether the rings of all groups fit into shared memory beside the inputs."""
        return 0 < self.groups <= self._max_groups

    @property
    def shared_bytes(self) -> int:
        """Return the limit of the shared memory of a block, which the rings fill beside the inputs."""
        large = self.rows * self._row_bytes > LARGE_INPUT_BYTES or self.multiprocessors < SMALL_GPU
        return MAX_SHARED_BYTES if large or self.lines == 4 else LINEAR_SHARED_BYTES

    @property
    def _row_bytes(self) -> int:
        return self.columns * (1 if self.int8 else 2)

    @property
    def _tiles(self) -> int:
        """Return the maximum number of tiles of a block."""
        outputs = self.lines // 2 if self.gated else self.lines
        return -(-self.outputs // (outputs * self.multiprocessors))

    @property
    def _max_groups(self) -> int:
        """Return the number of groups whose rings fit into shared memory, with two stages each.

        Inputs, sums and barriers are counted as in src/few_rows_linear.cu.
        """
        stage = 4 * self.box_blocks * self.lines * 128 + 16
        return (self.shared_bytes - 8 - self.rows * (self._row_bytes + 192 + 128 * self._tiles)) // (2 * stage)

    def source(self) -> str:
        """Return the complete source."""
        sizes = {"R": self.rows, "K": self.columns, "N": self.outputs, "NORM": self.norm, "GATED": self.gated}
        sizes |= {"INT8": self.int8, "LINES": self.lines, "BOX_BLOCKS": self.box_blocks}
        sizes |= {"BLOCKS": self.multiprocessors, "GROUPS": self.groups, "SHARED_BYTES": self.shared_bytes}
        sizes |= {"MIN_SHARED_BYTES": MIN_LINEAR_SHARED_BYTES}
        return "\n".join((_defines(sizes), _read("common.cuh", f"{self.name}.cu")))


Variant = ConvVariant | LinearVariant


def _defines(sizes: Mapping[str, int]) -> str:
    return "\n".join(f"#define {name} {int(value)}" for name, value in sizes.items())


def _read(*names: str) -> str:
    return "\n".join((SOURCES / name).read_text(encoding="utf-8") for name in names)


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
