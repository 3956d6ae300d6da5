"""Inputs of the op tests: shapes, scale grids, and data with known answers, all drawn from seeded generators.

Two kinds of data. "integer": small integers and power-of-two scales that differ from block to block, so every sum is
exact in fp32 and an output must equal the reference rounded once. "random": normal x, all finite codes, scales spread
over three decades, judged by the error bound.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

import torch
from oracle import BF16, E4M3, E8M0, F16, F32, F64, FP8, U8, grid_shape

SHORT = {BF16: "bf16", F16: "fp16", F32: "fp32", E8M0: "e8m0", U8: "uint8", None: "none"}
FLOATS = (BF16, F16, F32)
SCALE_DTYPES = (F32, BF16, E8M0, U8)

M_SIZES = (0, 1, 2, 3, 4, 5, 12, 13, 16, 17, 33, 129)
N_SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 130, 144)
K_SIZES = (1, 2, 3, 4, 5, 7, 8, 31, 63, 64, 65, 127, 128, 129, 161, 192, 193, 255, 256, 257, 320, 385)
GRIDS = (
    (128, 128),
    (64, 128),
    (32, 32),
    (1, "K"),
    ("N", "K"),
    (1, 128),
    (128, 64),
    (3, 5),
    (48, 192),
    (1, 32),
    (128, "K"),
)


@dataclass(frozen=True)
class Case:
    M: int
    N: int
    K: int
    grid: tuple = (128, 128)  # block_n, block_k; "N" and "K" stand for the whole side
    x: torch.dtype = BF16
    out: torch.dtype = F32
    bias: torch.dtype | None = None
    scales: torch.dtype = F32
    is_vnni: bool = True

    @property
    def block_size(self) -> tuple[int, int]:
        sides = {"N": max(self.N, 1), "K": max(self.K, 1)}
        return tuple(sides.get(side, side) for side in self.grid)

    def __str__(self) -> str:
        grid = "x".join(str(side) for side in self.grid)
        parts = [f"M{self.M}", f"N{self.N}", f"K{self.K}", grid, f"{SHORT[self.x]}to{SHORT[self.out]}"]
        parts.append(f"s_{SHORT[self.scales]}")
        if self.bias is not None:
            parts.append(f"b_{SHORT[self.bias]}")
        return "-".join(parts if self.is_vnni else [*parts, "plain"])


def shape_cases() -> list[Case]:
    """Every grid with every M, then every N with every K; the dtypes and the remaining sizes are drawn."""
    draw = random.Random(1)

    def make(m, n, k, grid):
        x, out, bias = draw.choice(FLOATS), draw.choice(FLOATS), draw.choice((None, *FLOATS))
        return Case(m, n, k, grid, x, out, bias, draw.choice(SCALE_DTYPES), draw.random() < 0.7)

    cases = [make(m, draw.choice(N_SIZES), draw.choice(K_SIZES), grid) for m in M_SIZES for grid in GRIDS]
    cases += [make(draw.choice(M_SIZES[1:10]), n, k, draw.choice(GRIDS)) for n in N_SIZES for k in K_SIZES]
    return cases


@dataclass
class Inputs:
    x: torch.Tensor  # [M, K]
    weight: torch.Tensor  # [N, K] float8_e4m3fn, plain
    scales: torch.Tensor  # the grid, in its dtype
    block_size: tuple[int, int]
    bias: torch.Tensor | None

    def reference_arguments(self):
        return self.x, self.weight, self.scales, self.block_size, self.bias


def generator(*seed) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32("/".join(str(part) for part in seed).encode()))


def store_scales(exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2^exponents in any of the scale dtypes."""
    if dtype in (E8M0, U8):
        codes = (exponents + 127).to(U8)
        return codes if dtype == U8 else codes.view(E8M0)
    return torch.ldexp(torch.ones_like(exponents, dtype=F64), exponents).to(dtype)


def block_exponents(rows: int, columns: int, low: int = -2) -> torch.Tensor:
    """Five exponents from `low` up; a block and its neighbours (also diagonal) never share one."""
    i, j = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return low + (2 * j + i) % 5


INTEGER_CODES = torch.tensor([code for code in range(256) if float(E4M3[code]).is_integer() and abs(E4M3[code]) <= 8])
FINITE_CODES = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F])


def integer_inputs(case: Case, *seed) -> Inputs:
    rng = generator("integer", case, *seed)
    x = torch.randint(-8, 9, (case.M, case.K), generator=rng).to(case.x)
    codes = INTEGER_CODES[torch.randint(len(INTEGER_CODES), (case.N, case.K), generator=rng)].to(U8)
    scales = store_scales(block_exponents(*grid_shape(case.N, case.K, case.block_size)), case.scales)
    bias = None if case.bias is None else torch.randint(-8, 9, (case.N,), generator=rng).to(case.bias)
    return Inputs(x, codes.view(FP8), scales, case.block_size, bias)


def random_inputs(case: Case, *seed) -> Inputs:
    rng = generator("random", case, *seed)
    x = torch.randn(case.M, case.K, generator=rng).to(case.x)
    codes = FINITE_CODES[torch.randint(len(FINITE_CODES), (case.N, case.K), generator=rng)].to(U8)
    shape = grid_shape(case.N, case.K, case.block_size)
    if case.scales in (E8M0, U8):
        scales = store_scales(torch.randint(-10, 3, shape, generator=rng), case.scales)
    else:
        scales = torch.exp(torch.empty(shape).uniform_(-7, 0, generator=rng)).to(case.scales)
    bias = None if case.bias is None else torch.randn(case.N, generator=rng).to(case.bias)
    return Inputs(x, codes.view(FP8), scales, case.block_size, bias)


def cancelling_inputs(m: int, n: int, k: int, x_dtype=F32, block_n=64, seed=0) -> Inputs:
    """Every exact output is 0: the second half of k is the first half permuted inside each block of 128 and negated.

    So the fp32 output is the rounding residue alone and shows any change in the order of summation. `k` counts whole
    pairs of 128-blocks; whatever is left over meets zero codes.
    """
    rng = generator("cancelling", m, n, k, seed)
    half = k // 256 * 128
    x, codes = torch.zeros(m, k, dtype=x_dtype), torch.zeros(n, k, dtype=U8)
    x[:, :half] = torch.randn(m, half, generator=rng).to(x_dtype)
    codes[:, :half] = FINITE_CODES[torch.randint(len(FINITE_CODES), (n, half), generator=rng)].to(U8)
    mirrored = torch.cat([start + torch.randperm(128, generator=rng) for start in range(0, half, 128)])
    x[:, half : 2 * half] = x[:, mirrored]
    codes[:, half : 2 * half] = codes[:, mirrored] ^ 0x80
    x[:, 2 * half :] = torch.randn(m, k - 2 * half, generator=rng).to(x_dtype)
    rows, columns = grid_shape(n, k, (block_n, 128))
    scales = torch.exp(torch.empty(rows, columns).uniform_(-3, 0, generator=rng))
    scales[:, half // 128 : half // 64] = scales[:, : half // 128]
    return Inputs(x, codes.view(FP8), scales, (block_n, 128), None)


def one_hot_weight(n: int, k: int, seed=0) -> torch.Tensor:
    """float8 [n, k] with one non-zero code a row; every k and every finite non-zero code turns up as rows allow."""
    codes = torch.zeros(n, k, dtype=U8)
    live = FINITE_CODES[(FINITE_CODES & 0x7F) != 0]
    row = torch.arange(n)
    codes[row, (row * 7 + seed) % k] = live[(row * 11 + seed) % len(live)].to(U8)
    return codes.view(FP8)


# --------------------------------------------------------------------------------------------------- calling the ops
def fp8_scaled_mm(inputs: Inputs, out_dtype=F32, *, is_vnni=True, x=None) -> torch.Tensor:
    ops = torch.ops.blockscale
    weight = ops.convert_weight_packed(inputs.weight) if is_vnni else inputs.weight
    x = inputs.x if x is None else x
    return ops.fp8_scaled_mm_cpu(x, weight, inputs.scales, list(inputs.block_size), inputs.bias, out_dtype, is_vnni)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, except that any NaN equals any NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = a.contiguous().view(integers) == b.contiguous().view(integers)
    if a.dtype in FLOATS:
        equal |= torch.isnan(a) & torch.isnan(b)
    return bool(equal.all())
