"""FP8 activations: the compiled ops that quantise rows in groups, and multiply FP8 by FP8, with their fakes.

    out[M, N] = (decode(A[M, K]) · As[m, k // block_k]) · (decode(B[N, K]) · Bs[n // block_n, k // block_k])ᵀ + bias[N]

On a CPU a layer is faster and more exact with 16-bit activations (:func:`blockscale.fp8_scaled_mm_cpu`); these exist
to compute what a GPU computes from the same checkpoint. No gradients flow through quantised activations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks
from .ops import has_op

__all__ = ["fp8_w8a8_block_scaled_mm_cpu", "per_token_group_quant_fp8"]

_ops = torch.ops.blockscale


def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    column_major_scales: bool = False,
    use_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantise each row of ``x`` in groups of ``group_size`` neighbours, each with a scale of its own.

    ``scale = max(amax, eps) / 448`` in float32, at least 2^-126, rounded up to a power of two with ``use_ue8m0``;
    ``code = nearest(x / scale)``, ties to even, saturating. The last group of a row may be shorter. NaN becomes a NaN
    code and does not touch its scale; an infinity makes its group's scale infinite.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32, any strides.
        group_size: positive.
        eps: least amax, so that a group of zeros has a positive scale.
        column_major_scales: scales with unit stride over the rows (``(1, M)`` for two dimensions).
        use_ue8m0: powers of two; the dtype stays float32.

    Returns:
        Codes, float8_e4m3fn of the shape of ``x``, and scales, float32 ``[..., ceil(K/group_size)]``.

    Raises:
        ValueError: an argument has a wrong dtype, shape or value.

    >>> codes, scales = per_token_group_quant_fp8(torch.tensor([[448.0, 1.0, 896.0]]), 2)
    >>> codes.float().tolist(), scales.tolist()
    ([[448.0, 1.0, 448.0]], [[1.0, 2.0]])
    """
    return _ops.per_token_group_quant_fp8.default(x.detach(), group_size, eps, column_major_scales, use_ue8m0)


def fp8_w8a8_block_scaled_mm_cpu(
    A: Tensor,
    B: Tensor,
    As: Tensor,
    Bs: Tensor,
    block_size: Sequence[int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    is_vnni: bool = True,
) -> Tensor:
    """FP8 by FP8 linear layer: ``dequant(A) · dequant(B)ᵀ + bias``.

    The sum of a k-block is multiplied by ``As · Bs`` in float32; everything is summed in float32 and rounded once.

    Args:
        A: float8_e4m3fn ``[M, K]``, from :func:`per_token_group_quant_fp8` with ``group_size = block_k``.
        B: weight ``[N, K]``: uint8 from ``convert_weight_packed`` (``is_vnni=True``), or plain float8_e4m3fn.
        As: float32 ``[M, ceil(K/block_k)]``, any strides.
        Bs: ``[ceil(N/block_n), ceil(K/block_k)]``, float32, bfloat16 or e8m0, any strides.
        block_size: ``[block_n, block_k]``, both positive.
        bias: ``[N]``, float32, bfloat16 or float16, or None.
        out_dtype: bfloat16, float16 or float32.
        is_vnni: whether ``B`` is packed.

    Returns:
        ``[M, N]`` of ``out_dtype``, contiguous.

    Raises:
        ValueError: an argument has a wrong dtype, shape, device or layout.

    >>> A, As = per_token_group_quant_fp8(torch.ones(1, 4), 4)
    >>> B = torch.ones(2, 4).to(torch.float8_e4m3fn)
    >>> fp8_w8a8_block_scaled_mm_cpu(A, B, As, torch.tensor([[0.5]]), [2, 4], out_dtype=torch.float32, is_vnni=False)
    tensor([[2., 2.]])
    """
    A, B, As, Bs = A.detach(), B.detach(), As.detach(), Bs.detach()
    bias = None if bias is None else bias.detach()
    return _ops.fp8_w8a8_block_scaled_mm_cpu.default(A, B, As, Bs, block_size, bias, out_dtype, is_vnni)


def _fake_per_token_group_quant_fp8(
    x: Tensor, group_size: int, eps: float, column_major_scales: bool, use_ue8m0: bool
) -> tuple[Tensor, Tensor]:
    where = "blockscale::per_token_group_quant_fp8"
    checks.check_float_dtype(where, "x", x.dtype)
    if x.dim() == 0:
        checks.refuse(where, "`x` of shape [..., K]", [])
    if group_size <= 0:
        checks.refuse(where, "`group_size` positive", group_size)
    if not 0 < eps <= torch.finfo(torch.float32).max:  # beyond that it is infinite in the kernel
        checks.refuse(where, "`eps` positive and finite", f"{eps:g}")
    shape = [*x.shape[:-1], (x.shape[-1] + group_size - 1) // group_size]
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    if not column_major_scales:
        return codes, x.new_empty(shape, dtype=torch.float32)
    # As torch lays out [G, ...]: rows are neighbours, groups are a whole table of rows apart.
    return codes, x.new_empty([shape[-1], *shape[:-1]], dtype=torch.float32).movedim(0, -1)


def _fake_fp8_w8a8_block_scaled_mm_cpu(
    A: Tensor,
    B: Tensor,
    As: Tensor,
    Bs: Tensor,
    block_size: Sequence[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    is_vnni: bool,
) -> Tensor:
    where = "blockscale::fp8_w8a8_block_scaled_mm_cpu"
    checks.check_devices(where, A=A, B=B, As=As, Bs=Bs, bias=bias)
    checks.check_dtype(where, "A", A.dtype, (torch.float8_e4m3fn,), "float8_e4m3fn")
    if A.dim() != 2:
        checks.refuse(where, "`A` of shape [M, K]", list(A.shape))
    checks.check_weight(where, "B", B, is_vnni)
    N, K = B.shape
    if A.shape[1] != K:
        checks.refuse(where, f"`A` of shape [M, K] with K = B.size(1) = {K}", list(A.shape))
    checks.check_block_size(where, block_size)
    checks.check_dtype(where, "As", As.dtype, (torch.float32,), "float32")
    groups = [A.shape[0], (K + block_size[1] - 1) // block_size[1]]
    if list(As.shape) != groups:
        checks.refuse(where, f"`As` of shape [M, ceil(K/block_k)] = {groups}", list(As.shape))
    checks.check_scales(where, "Bs", Bs, B, block_size)
    checks.check_bias(where, bias, N)
    checks.check_out_dtype(where, out_dtype)
    return A.new_empty([A.shape[0], N], dtype=out_dtype)


# A library built without the FP8-activation kernels still serves 16-bit activations.
for _name, _fake in (
    ("per_token_group_quant_fp8", _fake_per_token_group_quant_fp8),
    ("fp8_w8a8_block_scaled_mm_cpu", _fake_fp8_w8a8_block_scaled_mm_cpu),
):
    if has_op(_name):
        torch.library.register_fake(f"blockscale::{_name}", _fake)
