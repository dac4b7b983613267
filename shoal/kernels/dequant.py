"""Bytes as numbers of a wider type, for a kernel to multiply with. Exact: every byte of either sort is a bf16 number.

A GPU converts bytes one at a time, slower than it reads them from memory. In bf16 four can be made at once of their
bits, in integer operations that every lane has.
"""

from __future__ import annotations

from shoal.kernels.jit import jit, tl, triton

# Two bytes per register, each in the low half of sixteen bits. The bits of 128 + n are those of 128 with n below, for
# n up to 127: a byte is 128 and its seven low bits, less 128 or, if its sign is set, 256.
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

# Each byte in the high half of sixteen bits, its exponent and mantissa moved to where bf16 has them: the number, but
# for the difference of the two biases, 2^120.
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

# Registers of four bytes that one piece of assembler takes; it fills twice as many.
WORDS = 4


def assembler(four_bytes: str, *, pinned: bool) -> str:
    """For WORDS registers of bytes. With `pinned`, what is written before a wait is also done before it.

    The assembler would move it behind, to where it is used and everybody waits for it. A trap it does not move; this
    one asks for infinite numbers in every lane, and no byte is one.
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
    INT8_LATE, INT8_PINNED = (tl.constexpr(assembler(INT8, pinned=pinned)) for pinned in (False, True))
    FP8_LATE, FP8_PINNED = (tl.constexpr(assembler(FP8, pinned=pinned)) for pinned in (False, True))
    PLACES = tl.constexpr(",".join(["=r"] * (2 * WORDS) + ["r"] * WORDS))
    PACK = tl.constexpr(4 * WORDS)
    # The interpreter has no assembler.
    BY_BITS = tl.constexpr(not triton.knobs.runtime.interpret)


@jit
def dequantize(w, kind: tl.constexpr, HERE: tl.constexpr = False, PINNED: tl.constexpr = False):
    """Bytes w in `kind`; anything else as it is.

    Left alone, the compiler brings what was loaded into the order a product wants as soon as it can, and so waits for
    memory between any two loads. HERE lets it wait here, and not before. PINNED: not after a wait that follows, either.
    """
    if BY_BITS and kind == tl.bfloat16 and w.dtype == tl.int8:
        from_int8: tl.constexpr = INT8_PINNED if PINNED else INT8_LATE
        out = tl.inline_asm_elementwise(from_int8, PLACES, [w], dtype=tl.bfloat16, is_pure=not HERE, pack=PACK)
    elif BY_BITS and kind == tl.bfloat16 and w.dtype == tl.float8e4nv:
        from_fp8: tl.constexpr = FP8_PINNED if PINNED else FP8_LATE
        bits = w.to(tl.int8, bitcast=True)
        out = tl.inline_asm_elementwise(from_fp8, PLACES, [bits], dtype=tl.bfloat16, is_pure=not HERE, pack=PACK)
    elif BY_BITS and HERE and w.dtype == kind:
        pack: tl.constexpr = 32 // w.dtype.primitive_bitwidth
        out = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=w.dtype, is_pure=False, pack=pack)
    else:
        out = w.to(kind)
    return out
