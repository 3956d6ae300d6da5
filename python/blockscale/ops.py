"""The compiled ops with types and documentation, their fakes, and autograd.

    out[..., N] = x[..., K] · dequant(weight[N, K])ᵀ + bias[N]
    dequant(weight)[n, k] = decode(weight[n, k]) · scales[n // block_n, k // block_k]      (scales multiply)

Importing this module loads the compiled library and registers one fake for each op, which makes the ops work on meta
tensors, in ``torch.compile(fullgraph=True)`` with a dynamic number of rows and in ``torch.export``.

Autograd is a route of its own, taken only when an input asks for a gradient or inside forward-mode differentiation:
inference calls the op directly. Gradients flow to ``x`` and to ``bias``; weights and scales are frozen: what is made of
them does not require a gradient, so that a backward through them alone is an error and not a silent zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import checks

__all__ = [
    "convert_weight_packed",
    "dequantize_weight_block_fp8",
    "fp8_scaled_mm_cpu",
    "isa_info",
    "linear",
    "quantize_weight_block_fp8",
    "unpack_weight",
]

LIBRARY = Path(__file__).with_name("_C.so")


def _load_library() -> None:
    if not LIBRARY.exists():
        raise ImportError(
            f"blockscale: expected the compiled library {LIBRARY.name} beside the package, got none; "
            "build and install it with `pip install .` in the source tree"
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"blockscale: the compiled library does not load under torch {torch.__version__} ({error}); "
            "it needs torch >= 2.11: upgrade torch, or reinstall with `pip install --force-reinstall blockscale`"
        ) from error


_load_library()
_ops = torch.ops.blockscale
_scaled_mm = _ops.fp8_scaled_mm_cpu.default


def has_op(name: str) -> bool:
    """Whether the compiled library holds the op ``name``.

    >>> has_op("fp8_scaled_mm_cpu"), has_op("fp4_scaled_mm_cpu")
    (True, False)
    """
    return hasattr(_ops, name)


def convert_weight_packed(weight: Tensor) -> Tensor:
    """Put FP8 codes into the order in which the kernels stream them.

    Args:
        weight: float8_e4m3fn ``[N, K]`` or ``[E, N, K]``, any sizes and strides. Raw codes in uint8 come as
            ``codes.view(torch.float8_e4m3fn)``; packed bytes are uint8, so packing twice is an error.

    Returns:
        uint8 tensor of the same shape, contiguous: the same bytes, 16 rows (a strip) interleaved by four columns.

    Raises:
        ValueError: ``weight`` has another dtype or rank.

    >>> codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16).view(torch.float8_e4m3fn)
    >>> packed = convert_weight_packed(codes)
    >>> packed.dtype, packed.shape
    (torch.uint8, torch.Size([16, 16]))
    """
    return _ops.convert_weight_packed.default(weight.detach())


def unpack_weight(packed: Tensor) -> Tensor:
    """Undo :func:`convert_weight_packed`, byte for byte.

    Args:
        packed: uint8 ``[N, K]`` or ``[E, N, K]``, contiguous, from :func:`convert_weight_packed`.

    Returns:
        float8_e4m3fn tensor of the same shape, contiguous.

    Raises:
        ValueError: ``packed`` has another dtype or rank, or is strided.

    >>> codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16).view(torch.float8_e4m3fn)
    >>> back = unpack_weight(convert_weight_packed(codes))
    >>> torch.equal(back.view(torch.uint8), codes.view(torch.uint8))
    True
    """
    return _ops.unpack_weight.default(packed)


def fp8_scaled_mm_cpu(
    mat1: Tensor,
    mat2: Tensor,
    scales2: Tensor,
    block_size: Sequence[int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    is_vnni: bool = True,
) -> Tensor:
    """FP8 linear layer: ``mat1 · dequant(mat2)ᵀ + bias``.

    Sums are taken in float32 and rounded once, at the store. The bits of a row depend on the instruction set alone: not
    on the number of rows, on the row's position, or on the number of threads.

    Args:
        mat1: activations ``[..., K]``, bfloat16, float16 or float32, any strides.
        mat2: weight ``[N, K]``: uint8 from :func:`convert_weight_packed` (``is_vnni=True``), or plain float8_e4m3fn
            (``is_vnni=False``; packs at each call).
        scales2: ``[ceil(N/block_n), ceil(K/block_k)]``, float32, bfloat16 or e8m0 (float8_e8m0fnu, or its codes in
            uint8), any strides.
        block_size: ``[block_n, block_k]``, both positive: ``[128, 128]``; ``[1, K]`` per channel, ``[N, K]`` per
            tensor.
        bias: ``[N]``, float32, bfloat16 or float16, or None.
        out_dtype: bfloat16, float16 or float32; None takes the dtype of ``mat1``.
        is_vnni: whether ``mat2`` is packed.

    Returns:
        ``[..., N]`` of ``out_dtype``, contiguous. Gradients flow to ``mat1`` and ``bias``.

    Raises:
        ValueError: an argument has a wrong dtype, shape, device or layout.

    >>> weight = torch.full((48, 256), 0.5).to(torch.float8_e4m3fn)
    >>> scales = torch.full((1, 2), 2.0)
    >>> out = fp8_scaled_mm_cpu(torch.ones(3, 256), convert_weight_packed(weight), scales, [128, 128])
    >>> out.shape, out[0, 0].item()
    (torch.Size([3, 48]), 256.0)
    """
    if out_dtype is None:
        out_dtype = mat1.dtype
    # A Python autograd registration on the op costs 5 µs a call, as much as a small layer, so it is not on the op.
    # `_current_level` is -1 outside of forward-mode differentiation, the one cheap sign of it.
    if forward_ad._current_level >= 0:
        return _ScaledMMForwardMode.apply(mat1, mat2, scales2, block_size, bias, out_dtype, is_vnni)
    if torch.is_grad_enabled():
        if mat1.requires_grad or (bias is not None and bias.requires_grad):
            return _ScaledMM.apply(mat1, mat2, scales2, block_size, bias, out_dtype, is_vnni)
        if mat2.requires_grad or scales2.requires_grad:
            mat2, scales2 = mat2.detach(), scales2.detach()
    return _scaled_mm(mat1, mat2, scales2, block_size, bias, out_dtype, is_vnni)


def linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    block_size: Sequence[int],
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Functional form of :class:`blockscale.BlockScaledLinear`: ``x · dequant(weight)ᵀ + bias``.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32.
        weight: ``[N, K]``, packed uint8 or plain float8_e4m3fn; the dtype says which.
        scales: ``[ceil(N/block_n), ceil(K/block_k)]``, float32, bfloat16 or e8m0.
        bias: ``[N]``, float32, bfloat16 or float16, or None.
        block_size: ``[block_n, block_k]``.
        out_dtype: bfloat16, float16 or float32; None takes the dtype of ``x``.

    Returns:
        ``[..., N]`` of ``out_dtype``.

    Raises:
        ValueError: an argument has a wrong dtype, shape, device or layout.

    >>> codes, scales = quantize_weight_block_fp8(448 * torch.eye(3), [128, 128])
    >>> linear(torch.tensor([1.0, 2.0, 3.0]), codes, scales, block_size=[128, 128])
    tensor([ 448.,  896., 1344.])
    """
    return fp8_scaled_mm_cpu(x, weight, scales, block_size, bias, out_dtype, weight.dtype == torch.uint8)


def quantize_weight_block_fp8(weight: Tensor, block_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Quantise a weight to FP8 codes with one scale per block.

    ``scale = max(amax / 448, 2^-126)`` (1 for a block of zeros), ``code = nearest(weight / scale)``, ties to even,
    saturating. A NaN becomes a NaN code and does not touch its block's scale.

    Args:
        weight: ``[N, K]`` or ``[E, N, K]``, bfloat16, float16 or float32, any strides.
        block_size: ``[block_n, block_k]``, both positive.

    Returns:
        Codes, float8_e4m3fn of the weight's shape, and scales, float32 ``[..., ceil(N/block_n), ceil(K/block_k)]``.

    Raises:
        ValueError: an argument has a wrong dtype or shape, or ``weight`` holds an infinity (the block is named).

    >>> codes, scales = quantize_weight_block_fp8(torch.full((2, 2), 896.0), [1, 2])
    >>> codes.float(), scales
    (tensor([[448., 448.],
            [448., 448.]]), tensor([[2.],
            [2.]]))
    """
    return _ops.quantize_weight_block_fp8.default(weight.detach(), block_size)


def dequantize_weight_block_fp8(
    weight: Tensor, scales: Tensor, block_size: Sequence[int], out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Decode FP8 codes and multiply each block by its scale, with one rounding to ``out_dtype``.

    Args:
        weight: float8_e4m3fn ``[N, K]`` or ``[E, N, K]``, plain (not packed), any strides.
        scales: ``[..., ceil(N/block_n), ceil(K/block_k)]``, float32, bfloat16 or e8m0 (float8_e8m0fnu or uint8 codes).
        block_size: ``[block_n, block_k]``, both positive.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        Tensor of the weight's shape and ``out_dtype``, contiguous.

    Raises:
        ValueError: an argument has a wrong dtype, shape or device.

    >>> codes = torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn)
    >>> dequantize_weight_block_fp8(codes, torch.tensor([[0.5]]), [1, 2])
    tensor([[0.5000, 1.0000]])
    """
    return _ops.dequantize_weight_block_fp8.default(weight.detach(), scales.detach(), block_size, out_dtype)


def isa_info() -> str:
    """Instruction sets of the library as JSON: compiled, usable, active, the reason, and calls served.

    :func:`blockscale.isa_info` returns the same, parsed.

    Raises:
        ValueError: ``BLOCKSCALE_MAX_ISA`` is misspelt.

    >>> '"active"' in isa_info()
    True
    """
    return _ops.isa_info.default()


class _ScaledMM(torch.autograd.Function):
    """Gradient to ``mat1``, ``grad · dequant(mat2)``, and to ``bias``, the sum over rows; both taken in float32."""

    @staticmethod
    def forward(mat1, mat2, scales2, block_size, bias, out_dtype, is_vnni):  # type: ignore[override]
        return _scaled_mm(mat1, mat2, scales2, block_size, bias, out_dtype, is_vnni)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        mat1, mat2, scales2, ctx.block_size, bias, _, ctx.is_vnni = inputs
        ctx.save_for_backward(mat2, scales2)
        ctx.mat1_dtype = mat1.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        mat2, scales2 = ctx.saved_tensors
        grad = grad.float()
        grad_mat1 = grad_bias = None
        if ctx.needs_input_grad[0]:
            codes = _ops.unpack_weight.default(mat2) if ctx.is_vnni else mat2
            weight = _ops.dequantize_weight_block_fp8.default(codes, scales2, ctx.block_size, torch.float32)
            grad_mat1 = (grad @ weight).to(ctx.mat1_dtype)
        if ctx.needs_input_grad[4]:
            grad_bias = grad.sum_to_size(grad.shape[-1]).to(ctx.bias_dtype)
        return grad_mat1, None, None, None, grad_bias, None, None


class _ScaledMMForwardMode(_ScaledMM):
    """With tangents too: the op is affine, so that of its result is the op on those of ``mat1`` and ``bias``.

    A class of its own, as torch.compile takes no Function that has a jvp.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _ScaledMM.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:3])
        ctx.out = output.shape, output.dtype

    @staticmethod
    def jvp(ctx: Any, mat1, _mat2, _scales2, _block_size, bias, _out_dtype, _is_vnni):  # type: ignore[override]
        mat2, scales2 = ctx.saved_tensors
        shape, dtype = ctx.out
        if mat1 is None:
            return bias.to(dtype).expand(shape).contiguous()
        return fp8_scaled_mm_cpu(mat1, mat2, scales2, ctx.block_size, bias, dtype, ctx.is_vnni)


@torch.library.register_fake("blockscale::convert_weight_packed")
def _(weight: Tensor) -> Tensor:
    where = "blockscale::convert_weight_packed"
    checks.check_dtype(where, "weight", weight.dtype, (torch.float8_e4m3fn,), "float8_e4m3fn")
    checks.check_matrices(where, "weight", weight)
    return weight.new_empty(weight.shape, dtype=torch.uint8)


@torch.library.register_fake("blockscale::unpack_weight")
def _(packed: Tensor) -> Tensor:
    where = "blockscale::unpack_weight"
    checks.check_dtype(where, "packed", packed.dtype, (torch.uint8,), "uint8")
    checks.check_matrices(where, "packed", packed)
    checks.check_packed_strides(where, "packed", packed)
    return packed.new_empty(packed.shape, dtype=torch.float8_e4m3fn)


@torch.library.register_fake("blockscale::fp8_scaled_mm_cpu")
def _(
    mat1: Tensor,
    mat2: Tensor,
    scales2: Tensor,
    block_size: Sequence[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    is_vnni: bool,
) -> Tensor:
    where = "blockscale::fp8_scaled_mm_cpu"
    checks.check_devices(where, mat1=mat1, mat2=mat2, scales2=scales2, bias=bias)
    checks.check_float_dtype(where, "mat1", mat1.dtype)
    if mat1.dim() == 0:
        checks.refuse(where, "`mat1` of shape [..., K]", [])
    checks.check_weight(where, "mat2", mat2, is_vnni)
    N, K = mat2.shape
    if mat1.shape[-1] != K:
        checks.refuse(where, f"`mat1` of shape [..., K] with K = mat2.size(1) = {K}", list(mat1.shape))
    checks.check_block_size(where, block_size)
    checks.check_scales(where, "scales2", scales2, mat2, block_size)
    checks.check_bias(where, bias, N)
    checks.check_out_dtype(where, out_dtype)
    return mat1.new_empty([*mat1.shape[:-1], N], dtype=out_dtype)


@torch.library.register_fake("blockscale::quantize_weight_block_fp8")
def _(weight: Tensor, block_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    where = "blockscale::quantize_weight_block_fp8"
    checks.check_float_dtype(where, "weight", weight.dtype)
    checks.check_matrices(where, "weight", weight)
    checks.check_block_size(where, block_size)
    codes = weight.new_empty(weight.shape, dtype=torch.float8_e4m3fn)
    return codes, weight.new_empty(checks.scale_grid(weight.shape, block_size), dtype=torch.float32)


@torch.library.register_fake("blockscale::dequantize_weight_block_fp8")
def _(weight: Tensor, scales: Tensor, block_size: Sequence[int], out_dtype: torch.dtype) -> Tensor:
    where = "blockscale::dequantize_weight_block_fp8"
    checks.check_devices(where, weight=weight, scales=scales)
    checks.check_dtype(where, "weight", weight.dtype, (torch.float8_e4m3fn,), "float8_e4m3fn")
    checks.check_matrices(where, "weight", weight)
    checks.check_block_size(where, block_size)
    checks.check_scales(where, "scales", scales, weight, block_size)
    checks.check_out_dtype(where, out_dtype)
    return weight.new_empty(weight.shape, dtype=out_dtype)
