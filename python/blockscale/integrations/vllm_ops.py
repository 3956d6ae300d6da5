"""FP8 quantisation for vLLM builds whose op is an empty stub: ``scaled_fp8_quant``, which per-tensor layers need at load.

Imports vLLM, like :mod:`.vllm_kernels`. The stub itself can't be redefined, so the Python function in front of it is
replaced; its callers look it up in its module at each call.
"""

from __future__ import annotations

import torch
import vllm._custom_ops as custom_ops
from torch import Tensor

from ..kernels import GroupShape, QuantFP8

__all__ = ["replace_missing_quantiser"]


def replace_missing_quantiser() -> bool:
    """Replace ``scaled_fp8_quant`` where the op behind it is a stub; returns whether it is replaced."""
    if not hasattr(custom_ops, "scaled_fp8_quant"):
        return False
    if custom_ops.scaled_fp8_quant is not scaled_fp8_quant and _is_stub("static_scaled_fp8_quant"):
        custom_ops.scaled_fp8_quant = scaled_fp8_quant
    return custom_ops.scaled_fp8_quant is scaled_fp8_quant


def _is_stub(name: str) -> bool:
    op = getattr(torch.ops._C, name, None)
    return op is None or not op.default._schema.arguments


def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """vLLM's function of that name: ``input[M, K]`` as float8_e4m3fn codes and their float32 scales.

    Raises:
        ValueError: ``scale`` is neither one number nor, with ``group_shape``, one per row, column or group.
    """
    M, K = input.shape
    if scale is None:
        group = GroupShape.PER_TOKEN if use_per_token_if_dynamic else GroupShape.PER_TENSOR
        codes, scale = QuantFP8(static=False, group_shape=group)(input, None, scale_ub)
    else:
        divisor = _per_element(scale, group_shape, M, K)
        codes = (input.float() / divisor).clamp(-448, 448).to(torch.float8_e4m3fn)
    if output is not None:
        return output.copy_(codes), scale
    if num_token_padding is not None and num_token_padding > M:
        padded = codes.new_zeros((num_token_padding, K), dtype=torch.uint8).view(torch.float8_e4m3fn)
        padded[:M] = codes
        return padded, scale
    return codes, scale


def _per_element(scale: Tensor, group_shape: tuple[int, int] | None, M: int, K: int) -> Tensor:
    """``scale`` so that it divides an ``[M, K]`` tensor."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if group_shape is not None and scale.dim() == 1:
        scale = scale[:, None] if tuple(group_shape) == (1, -1) else scale[None, :]
    if scale.dim() != 2 or M % scale.shape[0] or K % scale.shape[1]:
        raise ValueError(
            f"scaled_fp8_quant: expected `scale` of one number or of groups of [{M}, {K}], got {list(scale.shape)}"
        )
    return scale.repeat_interleave(M // scale.shape[0], 0).repeat_interleave(K // scale.shape[1], 1)
