"""The formula in float64, readable on one screen: what every kernel is judged against.

    out[..., N] = x[..., K] · (decode(weight[N, K]) · scales[n // block_n, k // block_k])ᵀ + bias[N]

Nothing here uses torch's float8 casts: codes are decoded with a table built from the definition of E4M3FN, and
encoded by search in that table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "E4M3_VALUES",
    "decode_e4m3",
    "dequant_weight_block_fp8",
    "dequantize",
    "expand_scales",
    "native_w8a8_block_matmul",
    "quantize",
    "quantize_weight_block_fp8",
    "ref_fp8_block_scaled_mm",
    "scaled_mm",
]


def _e4m3_value(code: int) -> float:
    sign, exponent, mantissa = (-1.0 if code & 0x80 else 1.0), code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3_VALUES = torch.tensor([_e4m3_value(code) for code in range(256)], dtype=torch.float64)
_E8M0_VALUES = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [math.nan], dtype=torch.float64)
_MIDPOINTS = (E4M3_VALUES[:126] + E4M3_VALUES[1:127]) / 2  # between the codes 0x00 .. 0x7E (448)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Value of each float8_e4m3fn (or uint8) code, any shape, in float64.

    >>> decode_e4m3(torch.tensor([0x00, 0x01, 0x38, 0x7E, 0xFF], dtype=torch.uint8)).tolist()
    [0.0, 0.001953125, 1.0, 448.0, nan]
    """
    return E4M3_VALUES[codes.view(torch.uint8).long()]


def expand_scales(scales: Tensor, N: int, K: int, block_size: Sequence[int]) -> Tensor:
    """Scales ``[..., ceil(N/block_n), ceil(K/block_k)]`` of any op dtype -> float64 ``[..., N, K]``.

    >>> expand_scales(torch.tensor([[1.0, 2.0]]), 1, 3, [128, 2]).tolist()
    [[1.0, 1.0, 2.0]]
    """
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = _E8M0_VALUES[scales.view(torch.uint8).long()]
    rows, columns = torch.arange(N) // block_size[0], torch.arange(K) // block_size[1]
    return scales.double()[..., rows[:, None], columns]


def dequantize(weight: Tensor, scales: Tensor, block_size: Sequence[int]) -> Tensor:
    """``decode(weight) · scale``, float8_e4m3fn ``[..., N, K]`` -> float64, exact.

    >>> dequantize(torch.ones(1, 2).to(torch.float8_e4m3fn), torch.tensor([[0.5]]), [1, 2]).tolist()
    [[0.5, 0.5]]
    """
    N, K = weight.shape[-2:]
    return decode_e4m3(weight) * expand_scales(scales, N, K, block_size)


def scaled_mm(
    x: Tensor, weight: Tensor, scales: Tensor, block_size: Sequence[int], bias: Tensor | None = None
) -> Tensor:
    """``x[..., K] · dequantize(weight[N, K])ᵀ + bias[N]`` -> float64 ``[..., N]``.

    >>> weight, scales = torch.ones(1, 2).to(torch.float8_e4m3fn), torch.tensor([[0.5]])
    >>> scaled_mm(torch.ones(1, 2), weight, scales, [1, 2], bias=torch.ones(1)).tolist()
    [[2.0]]
    """
    out = x.double() @ dequantize(weight, scales, block_size).mT
    return out if bias is None else out + bias.double()


def quantize(weight: Tensor, block_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Codes and float32 scales of ``weight[..., N, K]``: the contract of ``quantize_weight_block_fp8``.

    >>> codes, scales = quantize(torch.tensor([[448.0, 17.0, -0.0]]), [128, 128])
    >>> codes.float().tolist(), scales.tolist()
    ([[448.0, 16.0, -0.0]], [[1.0]])
    """
    (N, K), (block_n, block_k) = weight.shape[-2:], block_size
    weight = weight.float()
    if weight.isinf().any():
        raise ValueError("quantize: expected `weight` without infinities, got one")
    rows, columns = -(-N // block_n), -(-K // block_k)
    amax = torch.nn.functional.pad(weight.abs().nan_to_num(), (0, columns * block_k - K, 0, rows * block_n - N))
    amax = amax.unflatten(-1, (columns, block_k)).unflatten(-3, (rows, block_n)).amax((-3, -1))
    scales = torch.where(amax == 0, 1.0, (amax / 448).clamp(min=2.0**-126))
    scaled = weight / expand_scales(scales, N, K, block_size).float()  # one float32 division, as the contract says
    below = torch.searchsorted(_MIDPOINTS, scaled.abs().double())
    up_to = torch.searchsorted(_MIDPOINTS, scaled.abs().double(), right=True)
    codes = below + (up_to - below) * (below & 1)  # on a midpoint the even code wins; past the last one 448 does
    codes = torch.where(scaled.isnan(), 0x7F, codes) | scaled.signbit().long() << 7
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), scales


def quantize_weight_block_fp8(weight: Tensor, block_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """:func:`quantize` under the name that engines use."""
    return quantize(weight, block_size)


def dequant_weight_block_fp8(
    weight: Tensor, scales: Tensor, block_size: Sequence[int], out_dtype: torch.dtype = torch.float64
) -> Tensor:
    """:func:`dequantize` under the name that engines use.

    >>> dequant_weight_block_fp8(torch.ones(1, 2).to(torch.float8_e4m3fn), torch.tensor([[0.5]]), [1, 2]).dtype
    torch.float64
    """
    return dequantize(weight, scales, block_size).to(out_dtype)


def ref_fp8_block_scaled_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    block_size: Sequence[int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float64,
) -> Tensor:
    """:func:`scaled_mm` (16-bit activations) under the name that engines use; computed in float64."""
    return scaled_mm(x, weight, scales, block_size, bias).to(out_dtype)


def native_w8a8_block_matmul(
    A: Tensor,
    B: Tensor,
    As: Tensor,
    Bs: Tensor,
    block_size: Sequence[int],
    output_dtype: torch.dtype = torch.float64,
) -> Tensor:
    """FP8 activations by FP8 weights in float64: ``(decode(A) · As) · (decode(B) · Bs)ᵀ``.

    Args:
        A: codes ``[..., K]``; As: ``[..., ceil(K/block_k)]``.
        B: codes ``[N, K]``; Bs: ``[ceil(N/block_n), ceil(K/block_k)]``.

    >>> ones = torch.ones(1, 2).to(torch.float8_e4m3fn)
    >>> native_w8a8_block_matmul(ones, ones, torch.tensor([[3.0]]), torch.tensor([[0.5]]), [1, 2]).tolist()
    [[3.0]]
    """
    x = dequantize(A, As, (1, block_size[1]))
    return (x @ dequantize(B, Bs, block_size).mT).to(output_dtype)
