"""float8_e4m3fn read and written by bits, inside Triton kernels.

A code is a sign, 4 bits of exponent with bias 7 and 3 bits of mantissa; all ones but the sign is NaN, nothing is
infinite, the largest magnitude is 448. Triton's own type for it does not compile for NVIDIA's compute capabilities
below 8.9, nor does it mean the same on every AMD card; where the hardware converts, ``native`` lets it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode(codes, native: tl.constexpr):
    """Values, float32, of codes, uint8.

    The bits of a code are those of a float16 with another bias of the exponent, so that float16's conversion reads
    subnormal codes too.
    """
    if native:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    word = codes.to(tl.int32)
    half = ((word & 0x80) << 8) | ((word & 0x7F) << 7)
    values = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((word & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def encode(values, native: tl.constexpr):
    """Codes, uint8, of float32 values: rounded to nearest, ties to even, beyond 448 to 448; NaN stays NaN."""
    if native:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    word = values.to(tl.int32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    # Half of the last place that stays is added, less one bit where that place is even: then what is beyond it is cut.
    normal = (magnitude + ((magnitude >> 20) & 1) + (0x7FFFF - (120 << 23))) >> 20
    # Below 2**-6 codes count in steps of 2**-9, the last place of 2**14: adding that rounds to it.
    subnormal = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    code = tl.minimum(tl.where(magnitude < (121 << 23), subnormal, normal), 0x7E)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((word >> 24) & 0x80)).to(tl.uint8)
