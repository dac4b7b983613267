"""Dequantization of int8 and fp8 weights inside a kernel. Exact: every int8 and fp8 value is representable in bf16.

The hardware conversion instructions handle one value at a time and are slower than the memory reads that feed them. For
bf16, four values at a time are assembled from their bits with integer and packed FMA instructions.
"""

from __future__ import annotations

from shoal.kernels.jit import ASSEMBLER, interpreted, jit, tl, triton

# Each 32-bit register holds two values, one in the low byte of each 16-bit half. The bf16 bits of 128 + n are those of
# 128 with n in the mantissa, for n up to 127: a value is (128 + its low seven bits) minus 128, or minus 256 if its sign
# bit is set.
INT8 = """
mov.b32 minus, 0xbf80bf80;
prmt.b32 pair, {bytes}, 0, 0x4140;
lop3.b32 size, pair, 0x007f007f, 0x43004300, 0xea;
lop3.b32 sign, pair, 0x00800080, 0x43004300, 0xea;
fma.rn.bf16x2 {first}, sign, minus, size;
prmt.b32 pair, {bytes}, 0, 0x4342;
lop3.b32 size, pair, 0x007f007f, 0x43004300, 0xea;
lop3.b32 sign, pair, 0x00800080, 0x43004300, 0xea;
fma.rn.bf16x2 {second}, sign, minus, size;
"""

# Each value in the high byte of a 16-bit half, with exponent and mantissa shifted to their bf16 positions. The
# multiplication by 2^120 corrects the difference of the exponent biases.
FP8 = """
mov.b32 bias, 0x7b807b80;
mov.b32 sign, 0x80008000;
prmt.b32 pair, {bytes}, 0, 0x1404;
shr.b32 size, pair, 4;
and.b32 size, size, 0x07f007f0;
lop3.b32 pair, pair, sign, size, 0xea;
fma.rn.bf16x2 {first}, pair, bias, sign;
prmt.b32 pair, {bytes}, 0, 0x3424;
shr.b32 size, pair, 4;
and.b32 size, size, 0x07f007f0;
lop3.b32 pair, pair, sign, size, 0xea;
fma.rn.bf16x2 {second}, pair, bias, sign;
"""

# Input registers (four bytes each) per inline assembly block; it writes twice as many output registers.
WORDS = 4


def assembler(four_bytes: str, *, pinned: bool) -> str:
    """Return PTX that converts WORDS registers of bytes.

    Without `pinned`, ptxas may sink the conversion past a following `grid_dependency_wait`, onto the critical path. It
    does not move a trap, so `pinned` appends one that depends on all results and never fires: it would need infinity in
    every lane, which no int8 or fp8 value converts to.
    """
    lines = [
        four_bytes.format(bytes=f"${2 * WORDS + word}", first=f"${2 * word}", second=f"${2 * word + 1}")
        for word in range(WORDS)
    ]
    if pinned:
        lines += ["and.b32 all, $0, $1;"] + [f"and.b32 all, all, ${number};" for number in range(2, 2 * WORDS)]
        lines += ["setp.eq.b32 never, all, 0x7f807f80;", "@never trap;"]
    return "\n".join(["{ .reg .b32 pair, size, sign, minus, bias, all; .reg .pred never;", *lines, "}"])


if triton is not None:
    INT8_UNPINNED, INT8_PINNED = (tl.constexpr(assembler(INT8, pinned=pinned)) for pinned in (False, True))
    FP8_UNPINNED, FP8_PINNED = (tl.constexpr(assembler(FP8, pinned=pinned)) for pinned in (False, True))
    CONSTRAINTS = tl.constexpr(",".join(["=r"] * (2 * WORDS) + ["r"] * WORDS))
    PACK = tl.constexpr(4 * WORDS)
    # The interpreter cannot run inline assembly, and PTX is NVIDIA's.
    USE_ASM = tl.constexpr(ASSEMBLER and not interpreted())


@jit
def dequantize(w, dtype: tl.constexpr, VOLATILE: tl.constexpr = False, PINNED: tl.constexpr = False):
    """Convert int8 or fp8 values w to `dtype`; values of any other dtype are cast.

    By default the compiler converts loaded values to the operand layout of the dot as early as it can, and so stalls on
    memory between consecutive loads. VOLATILE keeps the conversion at this point of the program. PINNED also keeps it
    ahead of a following `grid_dependency_wait`.
    """
    if USE_ASM and dtype == tl.bfloat16 and w.dtype == tl.int8:
        from_int8: tl.constexpr = INT8_PINNED if PINNED else INT8_UNPINNED
        out = tl.inline_asm_elementwise(from_int8, CONSTRAINTS, [w], dtype=tl.bfloat16, is_pure=not VOLATILE, pack=PACK)
    elif USE_ASM and dtype == tl.bfloat16 and w.dtype == tl.float8e4nv:
        from_fp8: tl.constexpr = FP8_PINNED if PINNED else FP8_UNPINNED
        bits = w.to(tl.int8, bitcast=True)
        out = tl.inline_asm_elementwise(
            from_fp8, CONSTRAINTS, [bits], dtype=tl.bfloat16, is_pure=not VOLATILE, pack=PACK
        )
    elif USE_ASM and VOLATILE and w.dtype == dtype:
        pack: tl.constexpr = 32 // w.dtype.primitive_bitwidth
        out = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=w.dtype, is_pure=False, pack=pack)
    else:
        out = w.to(dtype)
    return out
