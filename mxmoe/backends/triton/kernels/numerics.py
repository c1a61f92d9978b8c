"""The contract's arithmetic as Triton functions (docs/numerics.md), the same bits in Triton's interpreter, compiled and on a GPU.

Everything is FP32 right after a load and integers where rounding is promised: BF16 is loaded and stored as its 16 bits, elements
are encoded and decoded by shifts. Kernels are compiled with enable_fp_fusion=False, so that no a * b + c is contracted; no inline
assembly, no conversion to a narrow float but FP32 -> FP16. Maxima of magnitudes are those of their bits, so that NaN > Inf >
finite.
"""

import triton
import triton.language as tl

INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)
NAN_BITS: tl.constexpr = tl.constexpr(0x7FC00000)
MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_float(pointers, mask):
    """FP32 of FP32, FP16, or BF16 given as int16; 0 where masked."""
    raw = tl.load(pointers, mask=mask, other=0)
    if raw.dtype == tl.int16:
        return float_of(raw.to(tl.int32) << 16)
    else:
        return raw.to(tl.float32)


@triton.jit
def bfloat_bits(x):
    """The upper 16 bits (as int32) of FP32 rounded to BF16, nearest even."""
    bits = bits_of(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & MAGNITUDE) > INF_BITS, 0x7FC0, rounded)


@triton.jit
def rounded_to(x, like):
    """FP32 `x` rounded once to the dtype that `like` points to (BF16 as int16), in FP32."""
    if like.dtype.element_ty == tl.int16:
        return float_of(bfloat_bits(x) << 16)
    else:
        return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def store_float(pointers, x, mask):
    """FP32 rounded once to what `pointers` point to: FP32, FP16, or BF16 given as int16."""
    if pointers.dtype.scalar.element_ty == tl.int16:
        tl.store(pointers, bfloat_bits(x).to(tl.int16), mask=mask)
    else:
        tl.store(pointers, x.to(pointers.dtype.scalar.element_ty), mask=mask)


@triton.jit
def encode(x, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, LARGEST: tl.constexpr, BITS: tl.constexpr):
    """Codes (int32) of finite FP32 `x`, nearest even, saturating. Above 2^MIN_EXPONENT the mantissa's own bits are rounded; below,
    adding a power of two whose last bit is the grid's step rounds."""
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    drop: tl.constexpr = 23 - MANTISSA
    half: tl.constexpr = (1 << (drop - 1)) - 1
    first: tl.constexpr = (MIN_EXPONENT + 126) << MANTISSA
    normal = ((magnitude + half + ((magnitude >> drop) & 1)) >> drop) - first
    anchor: tl.constexpr = (127 + 23 + MIN_EXPONENT - MANTISSA) << 23
    anchor_value = float_of(tl.full(x.shape, anchor, tl.int32))
    small = bits_of(float_of(magnitude) + anchor_value) - anchor
    code = tl.where(magnitude < ((MIN_EXPONENT + 127) << 23), small, normal)
    return tl.minimum(code, LARGEST) | ((bits >> 31) & (1 << (BITS - 1)))


@triton.jit
def decode(codes, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, BITS: tl.constexpr):
    """FP32 of codes (int32): the mantissa in place, times a power of two; exact, subnormals too. NaN, and Inf of E5M2."""
    magnitude = codes & ((1 << (BITS - 1)) - 1)
    up: tl.constexpr = (127 + 126 + MIN_EXPONENT) << 23  # 2^(127 - bias)
    value = bits_of(float_of(magnitude << (23 - MANTISSA)) * float_of(tl.full(codes.shape, up, tl.int32)))
    if BITS == 8:
        if MANTISSA == 3:
            value = tl.where(magnitude == 0x7F, NAN_BITS, value)
        else:
            value = tl.where(magnitude == 0x7C, INF_BITS, tl.where(magnitude > 0x7C, NAN_BITS, value))
    return float_of(value | ((codes >> (BITS - 1)) << 31))


@triton.jit
def power_of_scale(byte):
    """FP32 of an E8M0 byte (int32): 2^(byte - 127); byte 0 is a subnormal, 255 NaN."""
    return float_of(tl.where(byte == 0, 0x00400000, tl.where(byte == 255, NAN_BITS, byte << 23)))


@triton.jit
def decode_scale(byte, NVFP4: tl.constexpr):
    """FP32 of a block scale's byte (int32)."""
    if NVFP4:
        return decode(byte, 3, -6, 8)
    else:
        return power_of_scale(byte)


@triton.jit
def mx_scale(amax_bits, MAX: tl.constexpr, FLOOR: tl.constexpr):
    """Scale byte (int32) of blocks whose largest magnitude has these bits; 255 where that is not finite."""
    if FLOOR:
        exponent: tl.constexpr = 8 if MAX == 448.0 else (15 if MAX == 57344.0 else 2)
        byte = tl.minimum(tl.maximum((amax_bits >> 23) - exponent, 0), 254)
    else:
        q = bits_of(float_of(amax_bits) * tl.div_rn(tl.full(amax_bits.shape, 1.0, tl.float32), MAX))
        mantissa, exponent_field = q & 0x7FFFFF, q >> 23
        least = tl.where(exponent_field == 0, 0x400000, 0)
        byte = tl.minimum(exponent_field + (mantissa > least).to(tl.int32), 254)
    return tl.where(amax_bits >= INF_BITS, 255, byte)


@triton.jit
def exp(x):
    """The contract's software form, an operation at a time."""
    shift = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to a whole number, nearest even
    n = (x * 1.44269504 + shift) - shift
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    y = ((p * r) * r + r) + 1.0
    inside = (x >= -87.0) & (x <= 88.7)
    y = float_of(bits_of(y) + (tl.where(inside, n, 0.0).to(tl.int32) << 23))
    y = tl.where(x < -87.0, 0.0, y)
    y = tl.where(x > 88.7, float("inf"), y)
    return tl.where(x != x, float("nan"), y)


@triton.jit
def log(x):
    """The contract's log of a normal positive number, an operation at a time."""
    bits = bits_of(x)
    small = (bits & 0x7FFFFF) < 0x3504F3
    e = ((bits >> 23) - tl.where(small, 127, 126)).to(tl.float32)
    f = float_of((bits & 0x7FFFFF) | tl.where(small, 0x3F800000, 0x3F000000)) - 1.0
    square = f * f
    p = f * 7.0376836292e-2 + -1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f + -1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f + -1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f + -2.4999993993e-1
    p = p * f + 3.3333331174e-1
    y = ((p * f) * square + e * -2.12194440e-4) - square * 0.5
    return tl.where(x != x, float("nan"), (f + y) + e * 0.693359375)


@triton.jit
def sigmoid(x):
    one = tl.full(x.shape, 1.0, tl.float32)
    return tl.div_rn(one, one + exp(-x))


@triton.jit
def halves_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(ROWS, WIDTH) -> (ROWS, WIDTH / 2): element j plus element j + WIDTH / 2."""
    left, right = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))
    return left + right


@triton.jit
def lanes_sum(x, ROWS: tl.constexpr):
    """(ROWS, 32) -> (ROWS,): the tree 16, 8, 4, 2, 1."""
    x = halves_sum(x, ROWS, 32)
    x = halves_sum(x, ROWS, 16)
    x = halves_sum(x, ROWS, 8)
    x = halves_sum(x, ROWS, 4)
    left, right = tl.split(x)
    return left + right
