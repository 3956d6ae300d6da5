"""torch.nn.functional.linear on dequantised weights: kept in bf16 or fp32, or dequantised in every call."""

from __future__ import annotations

import torch

from ... import ops
from ..inputs import Weight, dense
from .base import Loaded, Peer

__all__ = ["DequantiseLinear", "TorchBf16", "TorchFp32"]

_linear = torch.nn.functional.linear


class TorchBf16(Peer):
    name = "torch-bf16"
    about = "F.linear, weights kept in bf16, x in bf16"
    bytes_per_weight = 2.0

    @property
    def version(self) -> str:
        return torch.__version__

    def load(self, weight: Weight, x: torch.dtype) -> Loaded:
        weights = _copies(weight, torch.bfloat16)
        return Loaded(len(weights), lambda x, copy: _linear(x.bfloat16(), weights[copy]))


class TorchFp32(TorchBf16):
    name = "torch-fp32"
    about = "F.linear, weights kept in fp32, x in fp32"
    bytes_per_weight = 4.0

    def load(self, weight: Weight, x: torch.dtype) -> Loaded:
        weights = _copies(weight, torch.float32)
        return Loaded(len(weights), lambda x, copy: _linear(x.float(), weights[copy]))


class DequantiseLinear(TorchBf16):
    name = "dequantise"
    about = "dequantize_weight_block_fp8 to bf16, then F.linear, in every call"
    bytes_per_weight = 1.0

    def load(self, weight: Weight, x: torch.dtype) -> Loaded:
        codes = [weight.codes.clone() for _ in range(weight.copies())]
        scales, block_size = weight.scales, weight.block_size
        dequantise = ops.dequantize_weight_block_fp8
        return Loaded(
            len(codes),
            lambda x, copy: _linear(x.bfloat16(), dequantise(codes[copy], scales, block_size, torch.bfloat16)),
        )


def _copies(weight: Weight, dtype: torch.dtype) -> list[torch.Tensor]:
    first = dense(weight, dtype)
    return [first, *(first.clone() for _ in range(weight.copies(dtype.itemsize) - 1))]
