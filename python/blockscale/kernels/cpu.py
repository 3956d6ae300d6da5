"""Kernels for CPU tensors, on the compiled ops of this library.

A layer's weight is packed in place: ``layer.weight`` becomes a uint8 parameter of the same shape. The block size of its
scales may become finer than the configuration's (fused shards) and is kept in ``layer.blockscale_block_size``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import ops
from ..activations import fp8_w8a8_block_scaled_mm_cpu
from ..checks import FLOAT_DTYPES, dtype_name, refuse
from ..diagnostics import isa_info
from ..ops import has_op
from .base import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearLayerConfig, rows_of
from .layer_params import PREPARED, WEIGHT, layer_label, prepared, read_layer, replace_parameter
from .quant_keys import GroupShape

__all__ = ["CPUFp8BlockScaledMMKernel", "CPUFp8W8A8BlockScaledMMKernel", "supports_cpu_fp8_w8a16"]

_STRIP = 16  # packed columns; narrower blocks want their scales column-major
_SAMPLES = 4096  # bytes of a packed weight that are remembered, to tell whether it was overwritten


def supports_cpu_fp8_w8a16() -> bool:
    """Whether this process can run FP8 weights with 16-bit activations on the CPU.

    >>> supports_cpu_fp8_w8a16()
    True
    """
    return CPUFp8BlockScaledMMKernel.is_supported()[0]


class _CPUKernel(Fp8BlockScaledMMLinearKernel):
    linear_backend: ClassVar[str] = "cpu"
    _op: ClassVar[str]

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if not has_op(cls._op):
            return False, f"the library is built without the op {cls._op}"
        try:
            active = isa_info()["active"]
        except ValueError as error:  # a misspelt BLOCKSCALE_MAX_ISA
            return False, str(error)
        return (True, None) if active else (False, "no instruction set of this CPU is usable")

    @classmethod
    def _refuse_out_dtype(cls, config: FP8ScaledMMLinearLayerConfig) -> str | None:
        if config.out_dtype in (None, *FLOAT_DTYPES):
            return None
        return f"output of dtype bfloat16, float16 or float32 only, not {dtype_name(config.out_dtype)}"

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_cpu_skip_gemm_dispatch", False):
            return  # the engine reads this weight itself (MLA's kv_b_proj)
        weight = getattr(layer, WEIGHT, None)
        if weight is not None and weight.dtype == torch.uint8:
            _packed_block_size(layer)
            _check_packed(layer, weight)
            return
        loaded = read_layer(layer, self.weight_group_shape, self.config.weight_shape)
        scales = loaded.scales
        if loaded.block_size[0] < _STRIP:
            scales = scales.t().contiguous().t()
        packed = ops.convert_weight_packed(loaded.weight)
        stored = getattr(layer, loaded.scale_name)
        replace_parameter(layer, WEIGHT, packed)
        replace_parameter(layer, loaded.scale_name, scales.clone(memory_format=torch.preserve_format))
        setattr(layer.weight, PREPARED, _sample(packed))
        layer.blockscale_block_size = loaded.block_size
        layer.blockscale_stored_scales = (loaded.scale_name, stored.shape, stored.dtype)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Give a prepared ``layer`` plain parameters again, for a loader that writes into them in place.

        The weight is unpacked; scales get the shape and dtype in which they were loaded and NaN as content, so that
        what the loader leaves out is found by :meth:`process_weights_after_loading`.
        """
        weight = getattr(layer, WEIGHT, None)
        if weight is None or weight.dtype != torch.uint8:
            return
        _packed_block_size(layer)
        name, shape, dtype = layer.blockscale_stored_scales
        blank = torch.full(shape, torch.nan, device=weight.device)
        if dtype == torch.uint8:  # e8m0 codes: 255 is NaN
            blank = torch.full(shape, 255, dtype=dtype, device=weight.device)
        replace_parameter(layer, WEIGHT, ops.unpack_weight(weight.detach()))
        replace_parameter(layer, name, blank.to(dtype))

    def _operands(self, layer: Any) -> tuple[Tensor, Tensor, tuple[int, int], bool]:
        """Weight, scales, their block size and whether the weight is packed."""
        weight, scales = prepared(layer)
        if weight.dtype == torch.uint8:
            return weight, scales, _packed_block_size(layer), True
        loaded = read_layer(layer, self.weight_group_shape, self.config.weight_shape)
        return loaded.weight, loaded.scales, loaded.block_size, False


class CPUFp8BlockScaledMMKernel(_CPUKernel):
    """W8A16: FP8 weight, x as it comes. Block, channel and tensor scales, any N and K, every instruction set."""

    apply_input_quant: ClassVar[bool] = False
    takes_quantized_input: ClassVar[bool] = False
    _op: ClassVar[str] = "fp8_scaled_mm_cpu"

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        reason = cls._refuse_weight(config) or cls._refuse_out_dtype(config)
        group = GroupShape(*config.weight_quant_key.scale.group_shape)
        if reason is None and not (group.is_block() or group.is_per_tensor() or group.is_per_channel()):
            reason = f"scales per block, channel or tensor only, not {tuple(group)}"
        return reason is None, reason

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        weight, scales, block_size, packed = self._operands(layer)
        return ops.fp8_scaled_mm_cpu(x, weight, scales, block_size, bias, self._out_dtype(x), packed)

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        raise NotImplementedError("CPUFp8BlockScaledMMKernel: x stays in 16 bits, call apply_weights")


class CPUFp8W8A8BlockScaledMMKernel(_CPUKernel):
    """W8A8: x quantised in groups of block_k. Slower and less exact than W8A16: for comparison with a GPU's results."""

    _op: ClassVar[str] = "fp8_w8a8_block_scaled_mm_cpu"

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if not has_op("per_token_group_quant_fp8"):
            return False, "the library is built without the op per_token_group_quant_fp8"
        return super().is_supported(compute_capability)

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        able, reason = super().can_implement(config)
        if able:
            reason = cls._refuse_out_dtype(config)
        return reason is None, reason

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        weight, scales, block_size, packed = self._operands(layer)
        A, As = self.quant_fp8(rows_of(layer, x))
        # The bias goes in before the one rounding.
        out = fp8_w8a8_block_scaled_mm_cpu(A, weight, As, scales, block_size, bias, self._out_dtype(x), packed)
        return out.reshape(*x.shape[:-1], weight.shape[0])

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """``B``: packed or plain, with scales of the configuration's block size."""
        packed = B.dtype == torch.uint8
        out_dtype = self.config.out_dtype or torch.bfloat16
        return fp8_w8a8_block_scaled_mm_cpu(A, B, As, Bs, self.weight_group_shape, None, out_dtype, packed)


def _sample(packed: Tensor) -> Tensor:
    flat = packed.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)].clone()


def _packed_block_size(layer: Any) -> tuple[int, int]:
    """Block size of a layer whose uint8 weight this module has packed; other bytes are no weight."""
    block_size = getattr(layer, "blockscale_block_size", None)
    if block_size is None:
        refuse(layer_label(layer), f"`{WEIGHT}` of dtype float8_e4m3fn", "uint8 that no kernel has packed")
    return block_size


def _check_packed(layer: nn.Module, packed: Tensor) -> None:
    """A loader that copies codes into the packed parameter has converted numbers to bytes: nothing can repair that."""
    sample = getattr(packed, PREPARED, None)
    if sample is not None and not packed.is_meta and not torch.equal(_sample(packed), sample):
        words = f"`{WEIGHT}` as packed by the last load, or a new float8_e4m3fn parameter"
        refuse(layer_label(layer), words, "packed bytes that were overwritten in place")
