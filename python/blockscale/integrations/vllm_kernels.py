"""The kernel classes that vLLM's lists get: its vocabulary outside, the kernels of :mod:`blockscale.kernels` inside.

Imports vLLM: only :mod:`.vllm` imports this module, once it knows that vLLM has what is used here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels.linear import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearKernel
from vllm.platforms import current_platform

from ..checks import refuse
from ..kernels import (
    POSSIBLE_FP8_BLOCK_KERNELS,
    POSSIBLE_W8A16_KERNELS,
    FP8ScaledMMLinearLayerConfig,
    GroupShape,
    NoKernelError,
    QuantKey,
    ScaleDesc,
    choose_scaled_mm_linear_kernel,
    supports_cpu_fp8_w8a16,
)
from ..kernels.layer_params import layer_label
from .row_scales import coarsest_grid
from .weight_arena import WeightArena

__all__ = ["BlockscaleFp8BlockLinearKernel", "BlockscaleFp8LinearKernel", "BlockscaleKernel", "checkpoint_label"]

logger = logging.getLogger("blockscale")

_arena = WeightArena()

# On a scale parameter: its block size, while it holds one scale per row of the weight.
ROWS_OF_BLOCK = "_blockscale_rows_of_block"


def checkpoint_label() -> str:
    """``checkpoint PATH`` of the model that is being loaded, for errors; vLLM does not tell layers which file it reads."""
    config = get_current_vllm_config_or_none()
    model = getattr(getattr(config, "model_config", None), "model", None)
    return f"checkpoint {model}" if model else "checkpoint"


class BlockscaleKernel:
    """What both classes do. One instance belongs to one layer."""

    def __init__(self, config: Any, layer_param_names: Sequence[str] = ()) -> None:
        # The engine's own constructors make quantisers of activations, which no kernel here needs.
        self.config = config
        self.layer_param_names = layer_param_names
        self.checkpoint = checkpoint_label()
        # Set by what knows how the scales of a fused layer are loaded: one grid over all its shards, after _gather_rows.
        self.grid_is_whole = False
        own = _own_config(config)
        self.inner = _choose(own)(own)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if not current_platform.is_cpu():
            return False, "requires the CPU platform."
        return (True, None) if supports_cpu_fp8_w8a16() else (False, "blockscale's kernels do not run here.")

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        try:
            _choose(_own_config(config))
        except (NotImplementedError, ValueError) as error:
            return False, str(error)
        return True, None

    def input_quant_key(self) -> None:
        """Activations come as they are."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        try:
            self._gather_rows(layer)
            block_size = getattr(layer, "weight_block_size", None)
            if block_size is not None and tuple(block_size) != self.inner.config.weight_quant_key.scale.group_shape:
                own = _own_config(self.config, GroupShape(*block_size))
                self.inner = _choose(own)(own)
            if block_size is not None and not self.grid_is_whole:
                _check_whole(layer, block_size[0])
            layer.scale_grid_per_shard = False
            self.inner.process_weights_after_loading(layer)
            if layer.weight.dtype == torch.uint8:  # packed
                layer.weight.data = _arena.place(layer.weight.data)
        except ValueError as error:
            raise ValueError(f"{error} ({self.checkpoint})") from error
        skipped = ", left plain for the engine to read" if getattr(layer, "_cpu_skip_gemm_dispatch", False) else ""
        logger.info("blockscale: %s: %s%s", layer_label(layer), self._describe(layer), skipped)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        return self.inner.apply_weights(layer, x, bias)

    def _get_layer_params(self, layer: nn.Module, **kwargs: Any) -> Any:
        raise NotImplementedError("the parameters of a prepared layer are packed")

    def _gather_rows(self, layer: nn.Module) -> None:
        """Scales that were loaded per row become a grid."""
        for name in ("weight_scale_inv", "weight_scale"):
            scales = getattr(layer, name, None)
            block_size = getattr(scales, ROWS_OF_BLOCK, None)
            if block_size is not None:
                grid, block_n = coarsest_grid(scales.detach(), block_size[0])
                setattr(layer, name, nn.Parameter(grid, requires_grad=False))
                layer.weight_block_size = [block_n, block_size[1]]

    def _describe(self, layer: nn.Module) -> str:
        size = getattr(layer, "blockscale_block_size", None)
        scales = "" if size is None else f", scales of {size[0]} x {size[1]}"
        shape = self.inner.config.weight_shape
        return f"N={shape[0]} K={shape[1]}{scales}: {type(self.inner).__name__}"


class BlockscaleFp8BlockLinearKernel(BlockscaleKernel, Fp8BlockScaledMMLinearKernel):
    """For vLLM's list of block kernels: weights with one scale per block, as ``fp8`` and compressed-tensors have them."""

    apply_input_quant = False

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        raise NotImplementedError("x stays in 16 bits: call apply_weights")


class BlockscaleFp8LinearKernel(BlockscaleKernel, FP8ScaledMMLinearKernel):
    """For vLLM's lists of per-tensor, per-channel and weight-only kernels."""

    def apply_scaled_mm(self, **kwargs: Any) -> Tensor:
        raise NotImplementedError("x stays in 16 bits: call apply_weights")


def _check_whole(layer: nn.Module, block_n: int) -> None:
    """Refuse a fused layer whose scales this vLLM has loaded by itself, where it misplaces them."""
    widths = list(getattr(layer, "logical_widths", ()))
    if any(width % block_n for width in widths[:-1]):
        words = f"shards of multiples of block_n = {block_n} rows from a linear method that blockscale has not hooked"
        refuse(layer_label(layer), words, widths)


def _own_config(config: Any, group: GroupShape | None = None) -> FP8ScaledMMLinearLayerConfig:
    """vLLM's description of a layer in this package's words; ``group`` in the place of that of the weight's scales."""
    key = _own_key(config.weight_quant_key)
    if group is not None:
        key = replace(key, scale=replace(key.scale, group_shape=group))
    N, K = config.weight_shape
    # None: the result has the dtype of x, as the engine asks for it (MLA multiplies by an identity in float32).
    return FP8ScaledMMLinearLayerConfig(
        key, _own_key(config.activation_quant_key), (int(N), int(K)), config.input_dtype, None, "cpu"
    )


def _own_key(key: Any) -> QuantKey | None:
    if key is None:
        return None
    if getattr(key, "scale2", None) is not None:
        raise NotImplementedError("one level of scales only, not two")
    scale = ScaleDesc(key.scale.dtype, key.scale.static, GroupShape(*key.scale.group_shape))
    return QuantKey(key.dtype, scale, key.symmetric)


def _choose(config: FP8ScaledMMLinearLayerConfig) -> type:
    """W8A16 unless ``BLOCKSCALE_DISABLED_KERNELS`` takes it out: then block layers may run W8A8."""
    block = config.weight_quant_key.scale.group_shape.is_block()
    lists = POSSIBLE_FP8_BLOCK_KERNELS if block else POSSIBLE_W8A16_KERNELS
    try:
        return choose_scaled_mm_linear_kernel(config, lists)
    except NoKernelError as error:
        raise NotImplementedError("; ".join(error.reasons)) from error
