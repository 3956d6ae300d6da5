"""Kernels for Intel GPUs, on the ops that the XPU kernel package registers under ``torch.ops._xpu_C``.

    fp8_gemm(A, B, out_dtype, A_scale, B_scale, bias) -> Tensor          FP8 x FP8
    fp8_gemm_w8a16(A, B, B_scale, bias) -> Tensor                        16-bit x FP8

``B`` is ``[K, N]``; a transposed view of a row-major ``[N, K]`` says so by its strides. fp8_gemm works in blocks only
if ``A_scale`` has more than one column, and finds its block sizes by integer division, K / B_scale.size(0) by
N / B_scale.size(1), which must be multiples of 16. It takes whatever it is given: shapes that the division would get
wrong are brought to one that it gets right, or refused here.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..checks import dtype_name
from .base import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearLayerConfig, MMLinearKernel, rows_of
from .layer_params import PREPARED, WEIGHT, layer_label, prepared, read_layer, replace_parameter
from .quant_keys import GroupShape

__all__ = ["XPUFp8BlockScaledMMKernel", "XPUW8A16FP8LinearKernel"]

_GROUP = 16  # oneDNN's scale groups are multiples of this


def _has_xpu_op(name: str) -> tuple[bool, str | None]:
    if hasattr(torch.ops._xpu_C, name):
        return True, None
    return False, f"torch.ops._xpu_C.{name} is not registered"


class XPUFp8BlockScaledMMKernel(Fp8BlockScaledMMLinearKernel):
    """W8A8 with block weights. N that no block divides is taken at a finer block; K must be whole blocks."""

    linear_backend: ClassVar[str] = "xpu"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return _has_xpu_op("fp8_gemm")

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        able, reason = super().can_implement(config)
        if not able:
            return able, reason
        if config.out_dtype not in (None, torch.bfloat16, torch.float16):
            return False, f"output of dtype bfloat16 or float16 only, not {dtype_name(config.out_dtype)}"
        block_n, block_k = config.weight_quant_key.scale.group_shape
        if block_n % _GROUP or block_k % _GROUP:
            return False, f"blocks of multiples of {_GROUP} only, not {block_n} x {block_k}"
        if config.weight_shape is not None:
            reason = _refuse_shape(*config.weight_shape, block_n, block_k)
        return reason is None, reason

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if hasattr(getattr(layer, WEIGHT, None), PREPARED):
            return
        loaded = read_layer(layer, self.weight_group_shape, self.config.weight_shape)
        N, K = loaded.weight.shape
        block_n, block_k = loaded.block_size
        reason = _refuse_shape(N, K, block_n, block_k)
        if reason is not None:
            raise ValueError(f"{layer_label(layer)}: {reason}")
        scales = loaded.scales
        fine_n = math.gcd(N, block_n)
        scales = scales.index_select(0, torch.arange(0, N, fine_n, device=scales.device) // block_n)
        if scales.shape[1] == 1:  # one group of k would be taken for one scale per token
            scales = scales.expand(-1, 2)
        replace_parameter(layer, WEIGHT, loaded.weight.contiguous())
        # The transpose of a contiguous [K/block_k, N/block_n]: what the op wants after .t().
        replace_parameter(layer, loaded.scale_name, scales.t().contiguous().t())
        setattr(layer.weight, PREPARED, True)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        if x.numel() == 0:  # the op divides by the number of tokens
            return self._bias_alone(x, prepared(layer)[0].shape[0], bias)
        return super().apply_weights(layer, x, bias, **kwargs)

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        groups = Bs.shape[1]
        if As.shape[1] != groups:
            As = As.expand(-1, groups)
        out_dtype = self.config.out_dtype or torch.bfloat16
        # An empty tensor is the op's way to say that there is no bias.
        no_bias = torch.empty(0, dtype=torch.float32, device=A.device)
        return torch.ops._xpu_C.fp8_gemm(A, B.t(), out_dtype, As.contiguous(), Bs.t(), no_bias)


class XPUW8A16FP8LinearKernel(MMLinearKernel):
    """W8A16 with one scale per output channel or for the tensor."""

    linear_backend: ClassVar[str] = "xpu_woq"
    takes_quantized_input: ClassVar[bool] = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return _has_xpu_op("fp8_gemm_w8a16")

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        reason = cls._refuse_weight(config)
        group = GroupShape(*config.weight_quant_key.scale.group_shape)
        if reason is None and not (group.is_per_tensor() or group.is_per_channel()):
            reason = f"CHANNEL and TENSOR weights only, not BLOCK ({group})"
        for name, dtype in (("x", config.input_dtype), ("output", config.out_dtype or config.input_dtype)):
            if reason is None and dtype not in (torch.bfloat16, torch.float16):
                reason = f"{name} of dtype bfloat16 or float16 only, not {dtype_name(dtype)}"
        return reason is None, reason

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if hasattr(getattr(layer, WEIGHT, None), PREPARED):
            return
        group = GroupShape(*self.config.weight_quant_key.scale.group_shape)
        loaded = read_layer(layer, group, self.config.weight_shape)
        scales = loaded.scales.t().contiguous()  # [1, N], or [1, 1] for the tensor
        replace_parameter(layer, WEIGHT, loaded.weight.contiguous().t())
        replace_parameter(layer, loaded.scale_name, scales.reshape(1) if scales.numel() == 1 else scales)
        setattr(layer.weight, PREPARED, True)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        weight, scales = prepared(layer)
        shape = [*x.shape[:-1], weight.shape[1]]
        if x.numel() == 0:
            return self._bias_alone(x, weight.shape[1], bias)
        out = torch.ops._xpu_C.fp8_gemm_w8a16(rows_of(layer, x).contiguous(), weight, scales, bias)
        return out.to(self._out_dtype(x)).reshape(shape)


def _refuse_shape(N: int, K: int, block_n: int, block_k: int) -> str | None:
    """Why a weight of N x K in these blocks can't be expressed by dividing its sides, or None."""
    if K % block_k:
        return f"expected K a multiple of block_k = {block_k}, got {K}"
    width = math.gcd(N, block_n)
    if width % _GROUP:
        return f"expected N with a common divisor with block_n = {block_n} that {_GROUP} divides, got {N}: {width}"
    if K == block_k and K % (2 * _GROUP):
        return f"expected K of two blocks or more, or a multiple of {2 * _GROUP}, got {K}"
    return None
