"""The checks of ``selftest`` for the instruction set of this process: ``python -m blockscale.isa_checks`` prints JSON.

Expected values come from :mod:`blockscale.reference`. The ISA is the one that ``BLOCKSCALE_MAX_ISA`` caps, which the
library reads once, so :func:`blockscale.selftest` starts a process for each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import activations, ops, reference
from .checks import dtype_name, scale_grid

X_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}

# M, N, K, block_size: whole and ragged strips of 16 columns, quads of 4 codes, k-units of 128 and blocks.
_SHAPES = (
    (1, 1, 1, (128, 128)),
    (3, 48, 256, (128, 128)),
    (4, 20, 129, (1, 129)),
    (5, 37, 193, (16, 32)),
    (17, 130, 131, (128, 128)),
    (33, 64, 320, (64, 320)),
)
_ROW_COUNTS = (1, 2, 3, 4, 5, 8, 12, 13, 16, 17, 33, 64)


def check_decode(dtype: torch.dtype, M: int) -> str:
    """All 256 codes, bit-exact: each meets a single x that is not zero, at 8 places of the row."""
    columns = torch.tensor([0, 1, 2, 3, 67, 127, 128, 131])
    K = 132
    codes = torch.zeros(256, K, dtype=torch.uint8)
    codes[:, columns] = ((torch.arange(256)[:, None] + 37 * torch.arange(8)) % 256).to(torch.uint8)
    x = torch.zeros(max(M, 8), K, dtype=dtype)
    x[torch.arange(len(x)), columns.repeat(len(x))[: len(x)]] = 1.5
    weight, scales = codes.view(torch.float8_e4m3fn), torch.tensor([[0.25, 2.0], [8.0, 0.5]])
    want = reference.scaled_mm(x, weight, scales, [128, 128])
    got = torch.cat([_linear(rows, weight, scales, (128, 128)) for rows in x.split(M)])
    wrong = ~((got.double() == want) | (got.isnan() & want.isnan()))
    return "" if not wrong.any() else f"{int(wrong.any(0).sum())} of 256 codes decode to another value"


def check_bound(dtype: torch.dtype, M: int, N: int, K: int, block_size: tuple[int, int]) -> str:
    """Random data within the error bound: K + blocks + 2 roundings of 2^-24 over Σ|x·w|, and one at the store."""
    generator = torch.Generator().manual_seed(M * N * K)
    x = torch.randn(M, K, generator=generator).to(dtype)
    codes = torch.randint(0, 255, (N, K), generator=generator, dtype=torch.uint8)
    codes[codes == 0x7F] = 0
    weight = codes.view(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-12, -4, scale_grid((N, K), block_size), generator=generator)
    bias = torch.randn(N, generator=generator)
    want = reference.scaled_mm(x, weight, scales, block_size, bias)
    got = _linear(x, weight, scales, block_size, bias, dtype)
    magnitude = x.double().abs() @ reference.dequantize(weight, scales, block_size).abs().mT + bias.double().abs()
    bound = (K + scales.shape[1] + 2) * 2.0**-24 * magnitude
    bound = bound + _UNIT[dtype] * (want.abs() + bound) + 2.0**-25
    ratio = ((got.double() - want).abs() / bound).nan_to_num(torch.inf).max().item()
    return "" if ratio <= 1 else f"error is {ratio:.3g} times the bound"


def check_invariance(dtype: torch.dtype) -> str:
    """A row whose exact result is 0, so that its output is rounding residue: equal bits at every M and position."""
    generator = torch.Generator().manual_seed(1)
    half = torch.randn(193, generator=generator)
    row = torch.cat([half, -half]).to(dtype)
    codes = torch.randint(0, 0x7F, (48, 193), generator=generator, dtype=torch.uint8)
    weight = torch.cat([codes, codes], 1).view(torch.float8_e4m3fn)
    scales = torch.ones(1, 4)
    packed = ops.convert_weight_packed(weight)
    first = ops.linear(row[None], packed, scales, block_size=(128, 128), out_dtype=torch.float32)
    for M in _ROW_COUNTS:
        got = ops.linear(row.expand(M, -1), packed, scales, block_size=(128, 128), out_dtype=torch.float32)
        if not torch.equal(got, first.expand(M, -1)):
            return f"a row has other bits at M = {M} than at M = 1"
    return ""


def check_quantize() -> str:
    """Quantiser, dequantiser and packing against the reference, bit-exact."""
    weight = torch.randn(50, 203, generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 3, 203)
    weight[:32, :64] = 0
    codes, scales = ops.quantize_weight_block_fp8(weight, (32, 64))
    want_codes, want_scales = reference.quantize(weight, (32, 64))
    if not torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8)):
        return "codes differ from the reference"
    if not torch.equal(scales, want_scales):
        return "scales differ from the reference"
    if not torch.equal(ops.unpack_weight(ops.convert_weight_packed(codes)).view(torch.uint8), codes.view(torch.uint8)):
        return "unpacking does not undo packing"
    every = torch.arange(256, dtype=torch.uint8).reshape(2, 128).view(torch.float8_e4m3fn)
    for scale in (0.5, 2.0**103):  # from 2^102 on every kernel takes its plain path
        scales = torch.full((1, 1), scale)
        got = ops.dequantize_weight_block_fp8(every, scales, (2, 128), torch.float32).double()
        if not torch.equal(got.nan_to_num(1e9), reference.dequantize(every, scales, (2, 128)).nan_to_num(1e9)):
            return "dequantised codes differ from the reference"
    return ""


def check_activation_codes() -> str:
    """All 256 codes as activations, bit-exact: a row of A for each, beside zeros."""
    codes = torch.zeros(256, 4, dtype=torch.uint8)
    codes[torch.arange(256), torch.arange(256) % 4] = torch.arange(256, dtype=torch.uint8)
    A, B = codes.view(torch.float8_e4m3fn), torch.full((5, 4), 0.5).to(torch.float8_e4m3fn)
    As, Bs = 2.0 ** (torch.arange(256)[:, None] % 5), torch.full((1, 1), 0.25)
    got = activations.fp8_w8a8_block_scaled_mm_cpu(
        A, ops.convert_weight_packed(B), As, Bs, (5, 4), out_dtype=torch.float32
    )
    want = (reference.decode_e4m3(A) * As).sum(1, keepdim=True).expand(-1, 5) / 8
    wrong = ~((got.double() == want) | (got.isnan() & want.isnan()))
    return "" if not wrong.any() else f"{int(wrong.any(1).sum())} of 256 codes decode to another value"


def check_activation_quantize() -> str:
    """Activation groups against the quantiser's reference with blocks of one row, bit-exact."""
    x = torch.randn(7, 203, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 3, 203)
    codes, scales = activations.per_token_group_quant_fp8(x, 64)
    want_codes, want_scales = reference.quantize(x, (1, 64))
    same = torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8)) and torch.equal(scales, want_scales)
    return "" if same else "codes or scales differ from the reference"


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    """Name of each check and the check: a call that returns what is wrong, or an empty string."""
    for dtype in X_DTYPES:
        name = dtype_name(dtype)
        for M in (1, 8, 40):
            yield f"256 codes, {name}, M={M}", partial(check_decode, dtype, M)
        for M, N, K, block in _SHAPES:
            shape = f"M={M} N={N} K={K} block={block[0]}x{block[1]}"
            yield f"error bound, {name}, {shape}", partial(check_bound, dtype, M, N, K, block)
        yield f"batch invariance, {name}", partial(check_invariance, dtype)
    yield "quantise, pack and back", check_quantize
    yield "256 codes, activations", check_activation_codes
    yield "quantise activations", check_activation_quantize


def run(isa: str) -> list[dict[str, Any]]:
    """Run the checks on ``isa``, which must be the active one; the last says whether its kernel served them."""
    results = [{"isa": isa, "name": name, "detail": check()} for name, check in checks()]
    info = json.loads(ops.isa_info())
    calls = next(row["calls"] for row in info["isas"] if row["name"] == isa)
    served = "" if info["active"] == isa and calls else f"active is {info['active']}, {calls} calls on {isa}"
    results.append({"isa": isa, "name": "its kernel ran", "detail": served})
    return [{**result, "ok": not result["detail"]} for result in results]


def _linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    block_size: tuple[int, int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    return ops.linear(x, ops.convert_weight_packed(weight), scales, bias, block_size=block_size, out_dtype=out_dtype)


if __name__ == "__main__":
    print(json.dumps(run(json.loads(ops.isa_info())["active"])))
