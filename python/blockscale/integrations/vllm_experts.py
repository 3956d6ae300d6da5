"""FP8 experts of mixture models in vLLM on the CPU: block scales, activations in 16 bits, one expert after the other.

vLLM chooses experts by names that it imports from one module when a layer is made; there :func:`hook` puts a class that
does not ask for AMX tiles, and the packing that goes with it. A row's result is the sum over its experts in the order
of their numbers, so its bits do not depend on the other rows.

Imports vLLM, like :mod:`.vllm_kernels`.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..kernels import supports_cpu_fp8_w8a16
from .weight_arena import WeightArena

__all__ = ["hook"]

logger = logging.getLogger("blockscale")

MODULE = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
# Class and function that vLLM looks up in MODULE.
EXPERTS, PREPARE = "CPUExpertsFp8", "prepare_fp8_moe_layer_for_cpu"

_arena = WeightArena()


def hook() -> bool:
    """Replace the experts; False where this vLLM has other ones."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError:
        return False
    if not (hasattr(module, EXPERTS) and hasattr(module, PREPARE)):
        return False
    if not hasattr(getattr(module, EXPERTS), "blockscale"):
        setattr(module, EXPERTS, _experts_class(module))
        setattr(module, PREPARE, pack)
    return True


def pack(w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """``w13[E, 2I, H]`` and ``w2[E, H, I]`` as the kernels stream them."""
    logger.info("blockscale: %d experts of %d x %d: CPUFp8BlockScaledMMKernel", *w2.shape)
    return tuple(_arena.place(ops.convert_weight_packed(weight)) for weight in (w13, w2))


def _experts_class(module: ModuleType) -> type:
    class BlockscaleExpertsFp8(getattr(module, EXPERTS)):
        blockscale = True

        @staticmethod
        def _supports_current_device() -> bool:
            return supports_cpu_fp8_w8a16()

        def apply(
            self,
            output: Tensor,
            hidden_states: Tensor,
            w1: Tensor,
            w2: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            activation: Any,
            global_num_experts: int,
            expert_map: Tensor | None,
            a1q_scale: Tensor | None,
            a2_scale: Tensor | None,
            workspace13: Tensor,
            workspace2: Tensor,
            expert_tokens_meta: Any,
            apply_router_weight_on_input: bool,
        ) -> None:
            if apply_router_weight_on_input:
                raise NotImplementedError("blockscale: experts whose router weighs their input are not computed")
            config = self.quant_config
            block_size = list(config.block_shape or (config._w1.shape.row, config._w1.shape.col))
            total = torch.zeros(output.shape, dtype=torch.float32)
            for expert in topk_ids.unique().tolist():
                local = expert if expert_map is None else int(expert_map[expert])
                if local < 0:  # of another rank
                    continue
                rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
                x = hidden_states[rows]
                both = ops.fp8_scaled_mm_cpu(x, w1[local], self.w1_scale[local], block_size)
                gate, up = both.chunk(2, -1)
                inner = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)
                part = ops.fp8_scaled_mm_cpu(inner, w2[local], self.w2_scale[local], block_size, None, torch.float32)
                total.index_add_(0, rows, part * topk_weights[rows, slots, None].float())
            output.copy_(total)

    return BlockscaleExpertsFp8
