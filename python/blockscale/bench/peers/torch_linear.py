"""torch.nn.functional.linear on dequantised weights: kept in bf16 or fp32, or dequantised in every call."""

from __future__ import annotations

import torch

from ... import ops
from ..inputs import Weight, dense
from .base import Loaded, Peer

__all__ = ["DequantiseLinear", "TorchBf16", "TorchFp32", "TorchPrepacked"]

_linear = torch.nn.functional.linear


class TorchBf16(Peer):
    name = "torch-bf16"
    about = "F.linear, weights kept in bf16, x in bf16"
    bytes_per_weight = 2.0

    @property
    def version(self) -> str:
        return torch.__version__

    def refusal(self, weight: Weight, x: torch.dtype, M: int) -> str:
        return "" if x == torch.bfloat16 else "takes bf16 x"

    def load(self, weight: Weight, x: torch.dtype) -> Loaded:
        weights = _copies(weight, torch.bfloat16)
        return Loaded(len(weights), lambda x, copy: _linear(x, weights[copy]))


class TorchFp32(TorchBf16):
    name = "torch-fp32"
    about = "F.linear, weights kept in fp32, x converted to fp32"
    bytes_per_weight = 4.0

    def refusal(self, weight: Weight, x: torch.dtype, M: int) -> str:
        return ""

    def load(self, weight: Weight, x: torch.dtype) -> Loaded:
        weights = _copies(weight, torch.float32)
        return Loaded(len(weights), lambda x, copy: _linear(x.float(), weights[copy]))


class TorchPrepacked(TorchBf16):
    """What torch.compile's freezing calls: oneDNN, as torch has it inside, on weights in oneDNN's packed order."""

    name = "torch-prepacked"
    about = "torch's own oneDNN, bf16 weights prepacked as torch.compile's freezing does"

    def load(self, weight: Weight, x: torch.dtype) -> Loaded:
        ops_of_torch, plain = torch.ops.mkldnn, dense(weight, torch.bfloat16)
        packed = [ops_of_torch._reorder_linear_weight(plain, 1) for _ in range(weight.copies(2.0))]
        linear = ops_of_torch._linear_pointwise
        return Loaded(len(packed), lambda x, copy: linear(x, packed[copy], None, "none", [], ""))


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
            lambda x, copy: _linear(x, dequantise(codes[copy], scales, block_size, torch.bfloat16)),
        )


def _copies(weight: Weight, dtype: torch.dtype) -> list[torch.Tensor]:
    first = dense(weight, dtype)
    return [first, *(first.clone() for _ in range(weight.copies(dtype.itemsize) - 1))]
