"""Widening of quantized weights to 16 bits in registers, without rounding.

Words of 16 bits hold numbers of several *planes*: runs of inputs that are apart in a chunk. So two neighbouring words
in a register of 32 bits are neighbours in each plane, which is what the tensor cores take, and nothing is moved.

For each format there is plain arithmetic, which Triton's interpreter runs too, and for bfloat16 the same in four
instructions for two numbers, without which unpacking would take longer than reading: a multiprocessor reads 18 bytes
per clock and starts 128 operations. Both give the same bits; tests hold both to all codes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

# In these, `lop3` is (a & b) | c (0xea) or (a & b) ^ c (0x6a), and halves with 0x43 on top are bfloat16 from 128 to
# 255, whose low seven bits count.

# 128 + the low seven bits, less 128, or 256 where the sign is set.
_INT8_ASSEMBLY = tl.constexpr("""
{
    .reg .b32 word<2>, low<2>, sign<2>, minus_one;
    mov.b32 minus_one, 0xbf80bf80;
    mov.b32 word0, $2;
    shr.u32 word1, word0, 8;
    lop3.b32 low0, word0, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 low1, word1, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign0, word0, 0x00800080, 0x43004300, 0xea;
    lop3.b32 sign1, word1, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, sign0, minus_one, low0;
    fma.rn.bf16x2 $1, sign1, minus_one, low1;
}
""")

# The bits of e4m3 are those of a bfloat16 that is 2 ** 120 times as small; the factor is 2 ** 112.
_FP8_ASSEMBLY = tl.constexpr("""
{
    .reg .b32 low<2>, sign, factor, minus_zero;
    mov.b32 factor, 0x77807780;
    mov.b32 minus_zero, 0x80008000;
    shl.b32 low0, $2, 4;
    and.b32 low0, low0, 0x07f007f0;
    shl.b32 sign, $2, 8;
    lop3.b32 low0, sign, 0x80008000, low0, 0xea;
    shr.u32 low1, $2, 4;
    and.b32 low1, low1, 0x07f007f0;
    lop3.b32 low1, $2, 0x80008000, low1, 0xea;
    fma.rn.bf16x2 $0, low0, factor, minus_zero;
    fma.rn.bf16x2 $1, low1, factor, minus_zero;
}
""")

# 128 + (n ^ 8), less 136, times the scale: rounded once, by the last.
_INT4_ASSEMBLY = tl.constexpr("""
{
    .reg .b32 plane<4>, one, minus_136, minus_zero;
    mov.b32 one, 0x3f803f80;
    mov.b32 minus_136, 0xc308c308;
    mov.b32 minus_zero, 0x80008000;
    mov.b32 plane0, $4;
    shr.u32 plane1, plane0, 4;
    shr.u32 plane2, plane0, 8;
    shr.u32 plane3, plane0, 12;
    lop3.b32 plane0, plane0, 0x000f000f, 0x43084308, 0x6a;
    lop3.b32 plane1, plane1, 0x000f000f, 0x43084308, 0x6a;
    lop3.b32 plane2, plane2, 0x000f000f, 0x43084308, 0x6a;
    lop3.b32 plane3, plane3, 0x000f000f, 0x43084308, 0x6a;
    fma.rn.bf16x2 plane0, plane0, one, minus_136;
    fma.rn.bf16x2 plane1, plane1, one, minus_136;
    fma.rn.bf16x2 plane2, plane2, one, minus_136;
    fma.rn.bf16x2 plane3, plane3, one, minus_136;
    fma.rn.bf16x2 $0, plane0, $5, minus_zero;
    fma.rn.bf16x2 $1, plane1, $6, minus_zero;
    fma.rn.bf16x2 $2, plane2, $7, minus_zero;
    fma.rn.bf16x2 $3, plane3, $8, minus_zero;
}
""")

# The bits of e2m1 are those of a bfloat16 that is 2 ** 126 times as small.
_MXFP4_ASSEMBLY = tl.constexpr("""
{
    .reg .b32 plane<4>, sign<3>, factor, minus_zero;
    mov.b32 factor, 0x7e807e80;
    mov.b32 minus_zero, 0x80008000;
    shl.b32 plane0, $4, 6;
    shl.b32 plane1, $4, 2;
    shr.u32 plane2, $4, 2;
    shr.u32 plane3, $4, 6;
    and.b32 plane0, plane0, 0x01c001c0;
    and.b32 plane1, plane1, 0x01c001c0;
    and.b32 plane2, plane2, 0x01c001c0;
    and.b32 plane3, plane3, 0x01c001c0;
    shl.b32 sign0, $4, 12;
    shl.b32 sign1, $4, 8;
    shl.b32 sign2, $4, 4;
    lop3.b32 plane0, sign0, 0x80008000, plane0, 0xea;
    lop3.b32 plane1, sign1, 0x80008000, plane1, 0xea;
    lop3.b32 plane2, sign2, 0x80008000, plane2, 0xea;
    lop3.b32 plane3, $4, 0x80008000, plane3, 0xea;
    fma.rn.bf16x2 $0, plane0, factor, minus_zero;
    fma.rn.bf16x2 $1, plane1, factor, minus_zero;
    fma.rn.bf16x2 $2, plane2, factor, minus_zero;
    fma.rn.bf16x2 $3, plane3, factor, minus_zero;
}
""")


@triton.constexpr_function
def numbers_of_word(weight_format):
    """Numbers in a word of 16 bits, so the parts of a chunk of inputs: each word has a number of every part."""
    return 2 if weight_format in ("int8", "fp8", "fp8_block") else 4


@triton.jit
def unpack_chunk(
    words,  # int16 [BLOCK_OUT, words of a chunk]
    scales,  # those of all chunks, as the format has them
    chunk,
    outs,  # [BLOCK_OUT]
    num_outs,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Each part's numbers in `DTYPE`, and the factors [BLOCK_OUT] in float32 that its weights have beside them.

    Numbers are exact in `DTYPE`. Those of int4 alone are weights, rounded once, whose scales need no further product.
    """
    if FORMAT == "fp8":  # float32 [num_outs]
        scale = tl.load(scales + outs)
        return widen_fp8(words, DTYPE), (scale, scale)
    elif FORMAT == "fp8_block":  # float32 [num_chunks, num_outs]
        scale = tl.load(scales + chunk * num_outs + outs)
        return widen_fp8(words, DTYPE), (scale, scale)
    elif FORMAT == "int8":  # float32 [num_chunks, num_outs]
        scale = tl.load(scales + chunk * num_outs + outs)
        return widen_int8(words, DTYPE), (scale, scale)
    elif FORMAT == "int4":  # int32 [num_chunks, 2, num_outs]: two of bfloat16 each
        own = scales + chunk * 2 * num_outs + outs
        scales0, scales1 = tl.load(own), tl.load(own + num_outs)
        return widen_int4(words, scales0[:, None], scales1[:, None], DTYPE), (scales0, scales1)
    elif FORMAT == "int4_zeros":  # int32 [num_chunks, 5, num_outs]: four float32's bits, four zero points in a word
        own = scales + chunk * 5 * num_outs + outs
        zeros = tl.load(own + 4 * num_outs)[:, None]
        numbers = (
            _widen_int4_less_zero(words, zeros, 0, DTYPE),
            _widen_int4_less_zero(words, zeros, 1, DTYPE),
            _widen_int4_less_zero(words, zeros, 2, DTYPE),
            _widen_int4_less_zero(words, zeros, 3, DTYPE),
        )
        return numbers, (
            tl.load(own).to(tl.float32, bitcast=True),
            tl.load(own + num_outs).to(tl.float32, bitcast=True),
            tl.load(own + 2 * num_outs).to(tl.float32, bitcast=True),
            tl.load(own + 3 * num_outs).to(tl.float32, bitcast=True),
        )
    else:  # mxfp4, int32 [num_chunks, num_outs]: the exponents of four powers of two, a byte each
        exponents = tl.load(scales + chunk * num_outs + outs)
        return widen_mxfp4(words, DTYPE), (
            _power_of_two(exponents, 0),
            _power_of_two(exponents, 1),
            _power_of_two(exponents, 2),
            _power_of_two(exponents, 3),
        )


@triton.jit
def widen_int8(
    words,  # int16: a number of the chunk's first half of inputs in the low byte, one of its second half in the high
    DTYPE: tl.constexpr,
):
    """Both halves' numbers in `DTYPE`."""
    if DTYPE.is_bf16() and cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise(
            _INT8_ASSEMBLY, "=r,=r,r", [words], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        wide = words.to(tl.int32)
        return ((wide << 24) >> 24).to(DTYPE), (wide >> 8).to(DTYPE)


@triton.jit
def widen_fp8(
    words,  # int16: the bits of float8 e4m3, two as above
    DTYPE: tl.constexpr,
):
    """Both halves' numbers / 256 in `DTYPE`: float16's exponent has one bit more than e4m3's, whose bias is the factor.

    Without the compiler's own type, which compute capability 8.0 and the interpreter's rounding lack.
    """
    if DTYPE.is_bf16() and cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise(
            _FP8_ASSEMBLY, "=r,=r,r", [words], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        wide = words.to(tl.int32)
        low = ((wide << 7) & 0x3F80) | ((wide << 8) & 0x8000)
        high = ((wide >> 1) & 0x3F80) | (wide & 0x8000)
        return _as_float16(low).to(DTYPE), _as_float16(high).to(DTYPE)


@triton.jit
def widen_int4(
    words,  # int16: numbers of the chunk's four quarters of inputs, those of the first in the lowest bits
    first_scales,  # int32: the bits of two bfloat16, for the first quarter in the low bits
    last_scales,  # int32: the same of the last two quarters
    DTYPE: tl.constexpr,
):
    """The four quarters' weights: number times scale, rounded to `DTYPE` once."""
    if DTYPE.is_bf16() and cuda_capability_geq(8, 0):
        scale0, scale1 = _as_bfloat16(first_scales), _as_bfloat16(first_scales >> 16)
        scale2, scale3 = _as_bfloat16(last_scales), _as_bfloat16(last_scales >> 16)
        return tl.inline_asm_elementwise(
            _INT4_ASSEMBLY,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",  # outputs are written before the last input is read
            [words, scale0, scale1, scale2, scale3],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        wide = words.to(tl.int32)
        weight0 = _small_integer(wide) * (first_scales << 16).to(tl.float32, bitcast=True)
        weight1 = _small_integer(wide >> 4) * (first_scales & -65536).to(tl.float32, bitcast=True)
        weight2 = _small_integer(wide >> 8) * (last_scales << 16).to(tl.float32, bitcast=True)
        weight3 = _small_integer(wide >> 12) * (last_scales & -65536).to(tl.float32, bitcast=True)
        return weight0.to(DTYPE), weight1.to(DTYPE), weight2.to(DTYPE), weight3.to(DTYPE)


@triton.jit
def _widen_int4_less_zero(
    words,  # int16: numbers of the chunk's four quarters of inputs, those of the first in the lowest bits
    zeros,  # int32: their zero points, a byte each
    QUARTER: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One quarter's numbers less its zero points, which is exact: 2 ** 23 + n has n in its lowest bits."""
    numbers = (words.to(tl.int32) >> (4 * QUARTER)) & 15
    zero = (zeros >> (8 * QUARTER)) & 15
    raised = (numbers | 0x4B000000).to(tl.float32, bitcast=True)
    return (raised - (zero | 0x4B000000).to(tl.float32, bitcast=True)).to(DTYPE)


@triton.jit
def widen_mxfp4(
    words,  # int16: numbers of e2m1 of the chunk's four quarters of inputs, those of the first in the lowest bits
    DTYPE: tl.constexpr,
):
    """The four quarters' numbers, which are exact: float16's exponent has three bits more than e2m1's."""
    if DTYPE.is_bf16() and cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise(
            _MXFP4_ASSEMBLY,
            "=&r,=&r,=&r,=&r,r",  # outputs are written before the input is read for the last time
            [words],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        wide = words.to(tl.int32)
        return (
            _float_of_four_bits(wide).to(DTYPE),
            _float_of_four_bits(wide >> 4).to(DTYPE),
            _float_of_four_bits(wide >> 8).to(DTYPE),
            _float_of_four_bits(wide >> 12).to(DTYPE),
        )


@triton.jit
def _float_of_four_bits(bits):
    """The value of the four lowest bits as a number of e2m1."""
    return _as_float16(((bits << 9) & 0x0E00) | ((bits << 12) & 0x8000)).to(tl.float32) * 16384.0


@triton.jit
def _power_of_two(exponents, PLACE: tl.constexpr):
    """2 ** (e - 127) in float32, for the exponent e in a byte of a word; 0 for e = 0."""
    return (((exponents >> (8 * PLACE)) & 255) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _small_integer(bits):
    """The value of the four lowest bits, in float32: 2 ** 23 + n has n in its lowest bits.

    A conversion would have a sixteenth of the rate.
    """
    return ((bits & 15) ^ 0x4B000008).to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def _as_float16(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _as_bfloat16(bits):
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
