"""Float64 oracle of the FP8 linear layer: what the library must compute, built from definitions alone.

Codes are decoded from tables computed from the format's bits and encoded by a nearest-value search; every product and
sum of a reference runs in float64. Nothing here uses torch's float8 casts or the library under test.

    decode, encode, decode_e8m0    the two 8-bit formats
    round_to                       float64 -> bf16 / fp16 / fp32 with one rounding
    scaled_mm -> Reference         y = x @ dequant(weight).T + bias, and what its error bound needs
    compare -> Verdict             judges an output against a Reference, per element, with a derived bound
    documented_bits                the fp32 kernels' order of operations, emulated to the bit
    quantize, dequantize           the checkpoint tools, exact
    packed_order                   the byte order of a packed weight
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

BF16, F16, F32, F64, U8 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu

PRECISION = {BF16: 8, F16: 11, F32: 24}  # significant bits, the hidden one included
MIN_EXPONENT = {BF16: -126, F16: -14, F32: -126}  # of normal numbers
MAX_EXPONENT = {BF16: 127, F16: 15, F32: 127}
FP32_ROUNDOFF = 2.0**-24
TINY = 2.0**-126  # the bf16 dot product takes inputs below this as zero and flushes results below it


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def grid_shape(n: int, k: int, block_size: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scale grid of an [n, k] weight."""
    return ceil_div(n, block_size[0]), ceil_div(k, block_size[1])


# ---------------------------------------------------------------------------------------------------------- formats
def e4m3_value(code: int) -> float:
    """Value of one float8_e4m3fn code: 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = (-1 if code & 0x80 else 1), (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.copysign(math.nan, sign)
    if exponent == 0:
        magnitude = Fraction(mantissa, 512)
    else:
        magnitude = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return math.copysign(float(magnitude), sign)


def e8m0_value(code: int) -> float:
    """Value of one e8m0 scale code: 2^(code - 127); 255 is NaN. There is no zero and no sign."""
    return math.nan if code == 255 else float(Fraction(2) ** (code - 127))


E4M3 = torch.tensor([e4m3_value(code) for code in range(256)], dtype=F64)
E8M0_TABLE = torch.tensor([e8m0_value(code) for code in range(256)], dtype=F64)


def decode(weight: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn tensor, or uint8 codes of one, to float64."""
    return E4M3[weight.view(U8).long()]


def encode(values: torch.Tensor) -> torch.Tensor:
    """float64 to uint8 e4m3 codes: nearest, ties to the even code, saturating at 448; NaN to the NaN code."""
    finite, magnitude = E4M3[:127], values.abs().to(F64)
    clamped = magnitude.nan_to_num(0).clamp(max=448)
    above = torch.searchsorted(finite, clamped.contiguous())
    below = (above - 1).clamp(min=0)
    to_below, to_above = clamped - finite[below], finite[above] - clamped
    even = torch.where(below % 2 == 0, below, above)
    code = torch.where(to_above < to_below, above, torch.where(to_below < to_above, below, even))
    code = torch.where(torch.isnan(values), torch.full_like(code, 0x7F), code)
    return torch.where(torch.signbit(values), code | 0x80, code).to(U8)


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One round-to-nearest-even of float64 values to `dtype`, kept in float64 (torch's cast to a 16-bit type goes
    through float32 and rounds twice)."""
    precision, low, high = PRECISION[dtype], MIN_EXPONENT[dtype], MAX_EXPONENT[dtype]
    exponent = torch.frexp(values)[1].to(torch.int64)  # |value| in [2^(e-1), 2^e)
    last = (exponent - precision).clamp(min=low - precision + 1)
    rounded = torch.ldexp(torch.round(torch.ldexp(values, -last)), last)  # torch.round: ties to even
    largest = (2.0 - 2.0 ** (1 - precision)) * 2.0**high
    rounded = torch.where(rounded.abs() > largest, torch.full_like(rounded, math.inf), rounded)
    return torch.where(torch.isfinite(values), torch.copysign(rounded, values), values)


# ----------------------------------------------------------------------------------------------------------- scales
def decode_scales(scales: torch.Tensor) -> torch.Tensor:
    """Stored scales (fp32, bf16, e8m0, or uint8 read as e8m0 codes) to float64 multipliers."""
    if scales.dtype in (U8, E8M0):
        return E8M0_TABLE[scales.view(U8).long()]
    return scales.to(F64)


def expand_scales(scales: torch.Tensor, n: int, k: int, block_size: tuple[int, int]) -> torch.Tensor:
    """[.., ceil(n/block_n), ceil(k/block_k)] -> [.., n, k]; partial last blocks keep a scale of their own."""
    assert tuple(scales.shape[-2:]) == grid_shape(n, k, block_size), (scales.shape, n, k, block_size)
    rows = scales.repeat_interleave(block_size[0], -2)[..., :n, :]
    return rows.repeat_interleave(block_size[1], -1)[..., :k]


# -------------------------------------------------------------------------------------------------- scaled_mm, bound
@dataclass
class Reference:
    y: torch.Tensor  # [..., N] float64, unrounded
    magnitude: torch.Tensor  # [..., N] sum of |x w| over k, plus |bias|; non-finite operands count as zero
    roundings: int  # fp32 roundings that a term can meet on its way into y
    floor: float  # absolute allowance for flushed subnormals
    peak: torch.Tensor  # [..., N] the largest that a sum can become on the way, before or after its scale


def scaled_mm(x, weight, scales, block_size, bias=None) -> Reference:
    """y = x @ (decode(weight) * scales).T + bias in float64. `weight`: plain codes [N, K], float8 or uint8."""
    n, k = weight.shape
    multipliers = decode_scales(scales)
    w = decode(weight) * expand_scales(multipliers, n, k, block_size)
    x64 = x.to(F64).reshape(-1, k)
    y = x64 @ w.T
    x_size, w_size = (t.abs().nan_to_num(0, 0, 0) for t in (x64, w))
    magnitude = x_size @ w_size.T
    peak = torch.maximum(magnitude, x_size @ decode(weight).abs().nan_to_num(0, 0, 0).T)
    if bias is not None:
        y, magnitude = y + bias.to(F64), magnitude + bias.to(F64).abs().nan_to_num(0, 0, 0)
    # A term is summed within its unit of at most 128 k, the unit is folded by one fused multiply-add, later units are
    # added to it, then the two chains are added, then the bias.
    unit = min(block_size[1], 128, max(k, 1))
    units = sum(ceil_div(min(block_size[1], k - start), 128) for start in range(0, k, block_size[1]))
    largest = [float(t.max()) if t.numel() else 0.0 for t in (x_size, w_size, multipliers.abs().nan_to_num(0, 0, 0))]
    shape = (*x.shape[:-1], n)
    floor = k * TINY * (1 + sum(largest))
    return Reference(y.reshape(shape), magnitude.reshape(shape), unit + units + 2, floor, peak.reshape(shape))


def error_bound(reference: Reference, dtype: torch.dtype) -> torch.Tensor:
    """|output - y| <= gamma * magnitude + floor, in fp32 before the store, then one rounding to `dtype`.

    gamma = n u / (1 - n u) for n roundings of unit u = 2^-24, whatever the order inside a chain. The products are
    exact or fused into an addition, and the scale is applied to the sum of a unit in fp32, never to a 16-bit weight.
    """
    gamma = reference.roundings * FP32_ROUNDOFF / (1 - reference.roundings * FP32_ROUNDOFF)
    before_store = gamma * reference.magnitude + reference.floor
    store = 2.0 ** -PRECISION[dtype] * (reference.y.abs() + before_store)
    return before_store + store + 2.0 ** (MIN_EXPONENT[dtype] - PRECISION[dtype])


@dataclass
class Verdict:
    ok: bool
    worst: float  # largest error / bound
    message: str

    def __bool__(self) -> bool:
        return self.ok


def compare(output: torch.Tensor, reference: Reference, *, exact: bool = False) -> Verdict:
    """NaN exactly where the reference has NaN, infinities where it has them, everything else within `error_bound`, or
    with `exact` equal to the reference rounded once. Where finite operands can leave fp32's range on the way, any
    non-finite output is legal."""
    if output.shape != reference.y.shape:
        return Verdict(False, math.inf, f"shape {list(output.shape)} instead of {list(reference.y.shape)}")
    if output.numel() == 0:
        return Verdict(True, 0.0, "empty")
    dtype, got, y = output.dtype, output.to(F64), reference.y
    overflow = ~torch.isfinite(got) & (reference.peak > 2.0**127)
    misplaced = (torch.isnan(got) != torch.isnan(y)) & ~overflow
    if misplaced.any():
        return Verdict(False, math.inf, f"NaN misplaced in {int(misplaced.sum())} of {got.numel()}")
    live = ~torch.isnan(y) & ~overflow
    if exact:
        wrong = live & (got != round_to(y, dtype))
        count = int(wrong.sum())
        return Verdict(count == 0, math.inf if count else 0.0, f"{count} of {got.numel()} not exact")
    bound = error_bound(reference, dtype)
    largest = (2.0 - 2.0 ** (1 - PRECISION[dtype])) * 2.0 ** MAX_EXPONENT[dtype]
    may_be_infinite = torch.isinf(y) | (y.abs() + bound > largest)
    right_infinity = torch.isinf(got) & may_be_infinite & (torch.sign(got) == torch.sign(y))
    error = torch.where(right_infinity, torch.zeros_like(got), (got - y).abs())
    ratio = torch.where(live, error / bound, torch.zeros_like(got))
    worst = float(ratio.nan_to_num(math.inf).max())
    return Verdict(worst <= 1.0, worst, f"worst error / bound = {worst:.3g}")


# ----------------------------------------------------------------------------------- the order of the fp32 kernels
def fma32(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """fp32 fused multiply-add: the product of two fp32 is exact in float64; the sum is rounded to odd there, which
    keeps the following rounding to fp32 correct."""
    product, addend = a.to(F64) * b.to(F64), c.to(F64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    inexact = torch.isfinite(total) & (error != 0)
    even = (total.view(torch.int64) & 1) == 0
    toward = torch.copysign(torch.full_like(total, math.inf), error)
    return torch.where(inexact & even, torch.nextafter(total, toward), total).to(F32)


def k_units(k: int, block_k: int) -> list[tuple[int, int]]:
    """The stretches of k that are summed before a scale is applied: cut at block borders and every 128 inside."""
    units = []
    for start in range(0, k, block_k):
        stop = min(start + block_k, k)
        units += [(at, min(at + 128, stop)) for at in range(start, stop, 128)]
    return units


def documented_bits(x, weight, scales, block_size, bias=None, out_dtype=F32) -> torch.Tensor:
    """What every fp32 kernel returns, to the bit: per output and unit two chains (even k, odd k) of fused
    multiply-adds from zero, each folded by total = fma(chain, scale, total); even + odd; + bias; one rounding."""
    n, k = weight.shape
    x32, w32 = x.reshape(-1, k).to(F32), decode(weight).to(F32)
    multipliers = decode_scales(scales).to(F32).repeat_interleave(block_size[0], 0)[:n]
    totals = [torch.zeros(x32.shape[0], n) for _ in range(2)]
    for start, stop in k_units(k, block_size[1]):
        chains = [torch.zeros_like(totals[0]) for _ in range(2)]
        for at in range(start, stop):
            chains[at % 2] = fma32(x32[:, at, None], w32[None, :, at], chains[at % 2])
        scale = multipliers[None, :, start // block_size[1]]
        totals = [fma32(chain, scale, total) for chain, total in zip(chains, totals, strict=True)]
    y = totals[0] + totals[1]
    if bias is not None:
        y = y + bias.to(F32)
    return round_to(y.to(F64), out_dtype).to(out_dtype).reshape(*x.shape[:-1], n)


# ------------------------------------------------------------------------------------------- quantise and dequantise
def quantize(weight: torch.Tensor, block_size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., n, k] finite or NaN weight -> (uint8 codes of the same shape, fp32 scales [.., grid]).

    scale = max(amax / 448, 2^-126) in fp32, 1 for a block without a non-zero number; code = encode(w / scale) with the
    division rounded to fp32. float64 division rounded to fp32 equals fp32 division.
    """
    n, k = weight.shape[-2:]
    rows, columns = grid_shape(n, k, block_size)
    padded = torch.zeros(*weight.shape[:-2], rows * block_size[0], columns * block_size[1], dtype=F64)
    padded[..., :n, :k] = weight.to(F64)
    blocks = padded.reshape(*weight.shape[:-2], rows, block_size[0], columns, block_size[1])
    amax = blocks.abs().nan_to_num(0).amax((-3, -1))
    scales = round_to(amax / 448, F32).clamp(min=2.0**-126)
    scales = torch.where(amax == 0, torch.ones_like(scales), scales)
    return encode(round_to(weight.to(F64) / expand_scales(scales, n, k, block_size), F32)), scales.to(F32)


def dequantize(weight, scales, block_size, out_dtype) -> torch.Tensor:
    """decode(weight) * scale, exact in float64, rounded once."""
    n, k = weight.shape[-2:]
    exact = decode(weight) * expand_scales(decode_scales(scales), n, k, block_size)
    return round_to(exact, out_dtype).to(out_dtype)


# ------------------------------------------------------------------------------------------------------ packed layout
def packed_order(n: int, k: int) -> torch.Tensor:
    """[n*k] positions: byte i of a packed weight is the code of flat element packed_order[i] of the plain one.

    Strips of 16 columns; in a strip quads of 4 k; in a quad groups of 4 columns; in a group two k-pairs; in a pair the
    4 columns, each with its two k. Absent columns and k are skipped.
    """
    column, depth = torch.meshgrid(torch.arange(n), torch.arange(k), indexing="ij")
    keys = (column // 16, depth // 4, column % 16 // 4, depth % 4 // 2, column % 4, depth % 2)
    radix = (1, k // 4 + 1, 4, 2, 4, 2)
    rank = torch.zeros(n, k, dtype=torch.int64)
    for key, base in zip(keys, radix, strict=True):
        rank = rank * base + key
    return torch.argsort(rank.reshape(-1))
