"""Bytes as numbers of a wider type, for a kernel to multiply with. Exact: every byte of either sort is a bf16 number.

A GPU converts bytes one at a time, slower than it reads them from memory. In bf16 four can be made at once of their
bits, in integer operations that every lane has.
"""

from __future__ import annotations

from shoal.kernels.jit import jit, tl, triton

# Two bytes per register, each in the low half of sixteen bits. The bits of 128 + n are those of 128 with n below, for
# n up to 127: a byte is 128 and its seven low bits, less 128 or, if its sign is set, 256.
INT8 = """{
.reg .b32 pair, low, sign, minus;
mov.b32 minus, 0xbf80bf80;
prmt.b32 pair, $2, 0, 0x4140;
lop3.b32 low, pair, 0x007f007f, 0x43004300, 0xea;
lop3.b32 sign, pair, 0x00800080, 0x43004300, 0xea;
fma.rn.bf16x2 $0, sign, minus, low;
prmt.b32 pair, $2, 0, 0x4342;
lop3.b32 low, pair, 0x007f007f, 0x43004300, 0xea;
lop3.b32 sign, pair, 0x00800080, 0x43004300, 0xea;
fma.rn.bf16x2 $1, sign, minus, low;
}"""

# Each byte in the high half of sixteen bits, its exponent and mantissa moved to where bf16 has them: the number, but
# for the difference of the two biases, 2^120.
FP8 = """{
.reg .b32 pair, size, bias, zero;
mov.b32 bias, 0x7b807b80;
mov.b32 zero, 0x80008000;
prmt.b32 pair, $2, 0, 0x1404;
shr.b32 size, pair, 4;
and.b32 size, size, 0x07f007f0;
lop3.b32 pair, pair, zero, size, 0xea;
fma.rn.bf16x2 $0, pair, bias, zero;
prmt.b32 pair, $2, 0, 0x3424;
shr.b32 size, pair, 4;
and.b32 size, size, 0x07f007f0;
lop3.b32 pair, pair, zero, size, 0xea;
fma.rn.bf16x2 $1, pair, bias, zero;
}"""

if triton is not None:
    INT8, FP8 = tl.constexpr(INT8), tl.constexpr(FP8)
    # The interpreter has no assembler.
    BY_BITS = tl.constexpr(not triton.knobs.runtime.interpret)


@jit
def widened(w, kind: tl.constexpr, HERE: tl.constexpr = False):
    """Bytes w in `kind`; anything else as it is.

    Left alone, the compiler brings what was loaded into the order a product wants as soon as it can, and so waits for
    memory between any two loads. HERE lets it wait here, and not before.
    """
    if BY_BITS and kind == tl.bfloat16 and w.dtype == tl.int8:
        out = tl.inline_asm_elementwise(INT8, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=not HERE, pack=4)
    elif BY_BITS and kind == tl.bfloat16 and w.dtype == tl.float8e4nv:
        bits = w.to(tl.int8, bitcast=True)
        out = tl.inline_asm_elementwise(FP8, "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=not HERE, pack=4)
    elif BY_BITS and HERE and w.dtype == kind:
        pack: tl.constexpr = 32 // w.dtype.primitive_bitwidth
        out = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=w.dtype, is_pure=False, pack=pack)
    else:
        out = w.to(kind)
    return out
