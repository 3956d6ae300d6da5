"""Inputs of the benchmarks, and the check that a candidate computes the formula before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import ops, reference

__all__ = [
    "CHECKED_ROWS",
    "Weight",
    "WrongResult",
    "activations",
    "check_result",
    "checked_places",
    "dense",
    "make_weight",
    "product",
]

# Weights rotate through copies of this many bytes in all, 12 times a last-level cache of 32 MiB, so that each call
# reads its weight from memory.
ROTATED_BYTES = 384 << 20
CHECKED_ROWS = 4
# Of the largest output. Weights rounded to bf16 and x rounded to 8 bits err by less; a misplaced scale, which differs
# by a power of two from its neighbours, by far more.
TOLERANCE = 0.02
_CHUNK = 1024  # rows of the weight that the reference expands to float64 at a time


class WrongResult(ValueError):
    """A candidate's result is not that of the formula; it is not timed."""


@dataclass
class Weight:
    """Codes (N, K) and scales of one layer, and what the check of every candidate compares with."""

    codes: Tensor
    scales: Tensor
    block_size: tuple[int, int]
    rows: Tensor = field(repr=False)  # x of the checked rows, bfloat16 (CHECKED_ROWS, K)
    want: Tensor = field(repr=False)  # their outputs, float64 (CHECKED_ROWS, N)
    rotated_bytes: int

    @property
    def N(self) -> int:
        return self.codes.shape[0]

    @property
    def K(self) -> int:
        return self.codes.shape[1]

    def copies(self, bytes_per_weight: float = 1.0) -> int:
        """How many copies of that size to rotate through."""
        return max(1, round(self.rotated_bytes / (self.N * self.K * bytes_per_weight)))


def make_weight(N: int, K: int, block_size: tuple[int, int] = (128, 128), rotated_bytes: int = ROTATED_BYTES) -> Weight:
    """Every normal code with both signs, and scales that are powers of two and differ from block to block.

    Zero, subnormal and NaN codes are left out: one of the peers decodes those 18 codes wrongly, and the time of no
    candidate depends on codes.
    """
    generator = torch.Generator().manual_seed(N * 31 + K)
    codes = torch.randint(0x08, 0x7F, (N, K), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, (N, K), generator=generator, dtype=torch.uint8) << 7
    codes = codes.view(torch.float8_e4m3fn)
    block_n, block_k = min(block_size[0], N), min(block_size[1], K)
    grid = -(-N // block_n), -(-K // block_k)
    scales = 2.0 ** torch.randint(-8, -2, grid, generator=generator).float()
    if block_n < 16:  # as BlockScaledLinear stores them: the scales of a strip's columns are neighbours
        scales = scales.t().contiguous().t()
    # The same rows for every scale grid.
    rows = torch.randn(CHECKED_ROWS, K, generator=torch.Generator().manual_seed(K)).to(torch.bfloat16)
    want = product(rows, codes, scales, (block_n, block_k))
    return Weight(codes, scales, (block_n, block_k), rows, want, rotated_bytes)


def product(rows: Tensor, codes: Tensor, scales: Tensor, block_size: tuple[int, int]) -> Tensor:
    """``rows (R, K) · dequant(codes)ᵀ`` in float64, a part of the weight at a time."""
    N, block_n = codes.shape[0], block_size[0]
    out = torch.empty(rows.shape[0], N, dtype=torch.float64)
    step = max(1, _CHUNK // block_n) * block_n
    for n in range(0, N, step):
        part = scales[n // block_n : -(-min(n + step, N) // block_n)]
        out[:, n : n + step] = reference.scaled_mm(rows, codes[n : n + step], part, block_size)
    return out


def activations(weight: Weight, M: int, dtype: torch.dtype) -> Tensor:
    """x (M, K): normal, with the checked rows at the beginning, the end and in between."""
    x = torch.randn(M, weight.K, generator=torch.Generator().manual_seed(M)).to(dtype)
    for row, m in zip(weight.rows, checked_places(M), strict=False):
        x[m] = row.to(dtype)
    return x


def checked_places(M: int) -> list[int]:
    """Which rows of M are checked: at most CHECKED_ROWS."""
    return sorted({0, M // 3, 2 * M // 3, M - 1})


def check_result(name: str, call: Callable[[int], Tensor], weight: Weight, M: int) -> None:
    """Compare the checked rows of the candidate's result for copy 0 of the weight with float64.

    Raises:
        WrongResult: an output is off by more than 2 % of the largest one.
    """
    got = call(0)
    places = checked_places(M)
    want = weight.want[: len(places)]
    if tuple(got.shape) != (M, weight.N):
        raise WrongResult(f"bench: {name} returned shape {list(got.shape)}, expected {[M, weight.N]}; it is not timed")
    worst = ((got[places].double() - want).abs().max() / want.abs().max()).item()
    if not worst < TOLERANCE:
        raise WrongResult(
            f"bench: {name} is wrong at M = {M}, N = {weight.N}, K = {weight.K}: an output is off by {worst:.3g} of "
            f"the largest, expected less than {TOLERANCE}; it is not timed"
        )


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight dequantised to ``dtype``, (N, K)."""
    return ops.dequantize_weight_block_fp8(weight.codes, weight.scales, weight.block_size, dtype)
