"""The kernel over ``torch._scaled_mm``, which multiplies FP8 blocks on Hopper GPUs (cuBLASLt 12.9 or later).

    torch._scaled_mm(A [M, K] row-major, B [K, N] column-major, scale_a=, scale_b=, out_dtype=)

K and N are multiples of 16; scale_a is ``[M, ceil(K/128)]`` with strides (1, M), M a multiple of 4; scale_b is
``[ceil(K/128), ceil(N/128)]`` with strides (1, ceil(K/128)) in recent torch, and (1, that rounded up to a multiple of
4) in torch 2.9 and inside cuBLASLt. Here K is padded with zeros to a multiple of 512 = 4 · 128, which makes the two
rules one. Sides are padded once, at load; rows at each call. Nothing waits for the device, so a call can be captured
in a CUDA graph.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checks import dtype_name, refuse
from .base import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearLayerConfig, build_platform, rows_of
from .layer_params import PREPARED, WEIGHT, layer_label, prepared, read_layer, replace_parameter
from .quant_keys import GroupShape, QuantFP8

__all__ = ["BlockWiseTorchFP8ScaledMMLinearKernel"]

_BLOCK = 128
_TOKENS = 4  # rows of scale_a start at multiples of 16 bytes
_ALIGN_N = 16  # bytes
_ALIGN_K = 4 * _BLOCK


class BlockWiseTorchFP8ScaledMMLinearKernel(Fp8BlockScaledMMLinearKernel):
    """W8A8: activations in groups of 1 x 128, weights in blocks of 128 x 128, any N and K."""

    linear_backend: ClassVar[str] = "torch"

    @classmethod
    def is_supported(cls, compute_capability: int | tuple[int, int] | None = None) -> tuple[bool, str | None]:
        if not hasattr(torch, "_scaled_mm"):
            return False, f"torch {torch.__version__} has no torch._scaled_mm"
        if build_platform() in ("rocm", "xpu"):
            return _probe(build_platform())
        if compute_capability is None:
            if not torch.cuda.is_available():
                return False, "no CUDA device, and no compute capability is given"
            compute_capability = torch.cuda.get_device_capability()
        if isinstance(compute_capability, tuple):
            compute_capability = 10 * compute_capability[0] + compute_capability[1]
        if compute_capability != 90:
            major, minor = divmod(compute_capability, 10)
            return False, f"compute capability 9.0 (SM90) only, not {major}.{minor}"
        if torch.version.cuda is not None and tuple(map(int, torch.version.cuda.split(".")[:2])) < (12, 9):
            return False, f"cuBLASLt 12.9 or later only, not that of CUDA {torch.version.cuda}"
        return True, None

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        able, reason = super().can_implement(config)
        if not able:
            return able, reason
        group = GroupShape(*config.weight_quant_key.scale.group_shape)
        if group != (_BLOCK, _BLOCK):
            return False, f"weight blocks of 128 x 128 with activation groups of 1 x 128 only, not {group}"
        if config.out_dtype not in (None, torch.bfloat16, torch.float16):
            return False, f"output of dtype bfloat16 or float16 only, not {dtype_name(config.out_dtype)}"
        if (config.platform or build_platform()) in ("rocm", "xpu"):
            return _probe(config.platform or build_platform())
        return True, None

    def _make_quant(self, config: FP8ScaledMMLinearLayerConfig) -> QuantFP8:
        quant = super()._make_quant(config)
        quant.column_major_scales = (config.platform or build_platform()) != "xpu"
        return quant

    def get_output_padding(self) -> int | None:
        return _TOKENS

    def process_weights_after_loading(self, layer: Any) -> None:
        if hasattr(getattr(layer, WEIGHT, None), PREPARED):
            return
        loaded = read_layer(layer, self.weight_group_shape, self.config.weight_shape)
        if loaded.block_size != (_BLOCK, _BLOCK):
            block = "{} x {}".format(*loaded.block_size)
            refuse(
                layer_label(layer), "shards that end at multiples of 128 rows", f"borders that need blocks of {block}"
            )
        N, K = loaded.weight.shape
        # Zero codes add nothing. 16 divides 128: padding N never adds a row of blocks.
        padding = (0, -K % _ALIGN_K, 0, -N % _ALIGN_N)
        codes = torch.nn.functional.pad(loaded.weight.view(torch.uint8), padding).view(torch.float8_e4m3fn)
        columns = codes.shape[1] // _BLOCK
        scales = torch.nn.functional.pad(loaded.scales, (0, columns - loaded.scales.shape[1]), value=1.0)
        replace_parameter(layer, WEIGHT, codes.contiguous())
        replace_parameter(layer, loaded.scale_name, scales.contiguous())
        setattr(layer.weight, PREPARED, True)
        layer.blockscale_features = (N, K)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        weight, scales = prepared(layer)
        N, K = layer.blockscale_features
        if x.dim() == 0 or x.shape[-1] != K:
            refuse(layer_label(layer), f"`x` of shape [..., K] with K = {K}", list(x.shape))
        rows = rows_of(layer, x)
        out_dtype = self._out_dtype(x)
        if rows.numel() == 0 or N == 0:
            return self._bias_alone(x, N, bias)
        if weight.shape[1] != K:
            rows = torch.nn.functional.pad(rows, (0, weight.shape[1] - K))
        A, As = self.quant_fp8(rows)
        out = self.apply_block_scaled_mm(A, weight, As, scales)[: rows.shape[0], :N]
        if bias is not None:
            out = out + bias
        return out.to(out_dtype).reshape(*x.shape[:-1], N)

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """Any M and strides of As; sides of B as :meth:`process_weights_after_loading` leaves them."""
        M = A.shape[0]
        missing = -M % _TOKENS
        if missing:
            A = torch.nn.functional.pad(A.view(torch.uint8), (0, 0, 0, missing)).view(torch.float8_e4m3fn)
            As = torch.nn.functional.pad(As, (0, 0, 0, missing), value=1.0)
        if self.quant_fp8.column_major_scales and As.stride(0) != 1:
            As = As.t().contiguous().t()
        out = torch._scaled_mm(A, B.t(), scale_a=As, scale_b=Bs.t(), out_dtype=self.config.out_dtype or torch.bfloat16)
        out = out[0] if isinstance(out, tuple) else out  # torch < 2.5 returns (output, amax)
        return out[:M] if missing else out


@cache
def _probe(platform: str) -> tuple[bool, str | None]:
    """Whether torch multiplies blocks on this ROCm or XPU device: asked by doing it, once."""
    device = "cuda" if platform == "rocm" else "xpu"
    available = torch.cuda.is_available() if platform == "rocm" else torch.xpu.is_available()
    if not available or platform != build_platform():
        return False, f"torch {torch.__version__} sees no {platform} device to ask for block scales"
    codes = torch.zeros(_ALIGN_K, _ALIGN_K, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    grid = torch.ones(4, 4, device=device)
    row_scales = torch.ones(4, _ALIGN_K, device=device).t()
    try:
        torch._scaled_mm(
            codes,
            codes.t(),
            scale_a=row_scales.contiguous() if platform == "xpu" else row_scales,
            scale_b=grid.t(),
            out_dtype=torch.bfloat16,
        )
    except (RuntimeError, ValueError) as error:
        return False, f"torch._scaled_mm takes no block scales on {platform}: {str(error).splitlines()[0]}"
    return True, None
