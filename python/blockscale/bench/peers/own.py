"""The library itself, and any library with the two C functions of the yardstick."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from ... import ops
from ..inputs import Weight
from .base import Loaded, Peer, PeerMissing

__all__ = ["Blockscale", "Yardstick"]


class Blockscale(Peer):
    name = "blockscale"
    about = "fp8_scaled_mm_cpu, FP8 weights"
    bytes_per_weight = 1.0

    @property
    def version(self) -> str:
        from ... import __version__

        return __version__

    def load(self, weight: Weight, x: torch.dtype) -> Loaded:
        packed = [ops.convert_weight_packed(weight.codes) for _ in range(weight.copies())]
        scales, block_size = weight.scales, list(weight.block_size)
        return Loaded(len(packed), lambda x, copy: ops.fp8_scaled_mm_cpu(x, packed[copy], scales, block_size))


class Yardstick(Peer):
    """bf16 x, 128 x 128 blocks, N a multiple of 16 and K of 128.

    void proto_pack(const uint8_t* codes, int N, int K, uint8_t* out);
    int proto_mm(const bf16* x, int M, const uint8_t* w, int N, int K, const float* scales, const bf16* bias,
                 bf16* out, int threads, int mode);
    """

    name = "yardstick"
    about = "a library with proto_pack and proto_mm"
    bytes_per_weight = 1.0

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        if path is None:
            raise PeerMissing("yardstick: name the library: --yardstick PATH")
        try:
            self._library = ctypes.CDLL(os.path.abspath(path))
        except OSError as error:
            raise PeerMissing(f"yardstick: {path} does not load ({error})") from error

    def refusal(self, weight: Weight, x: torch.dtype, M: int) -> str:
        if x != torch.bfloat16 or weight.block_size != (128, 128) or weight.N % 16 or weight.K % 128:
            return "takes bf16 x, 128 x 128 blocks, N % 16 == 0 and K % 128 == 0"
        return ""

    def load(self, weight: Weight, x: torch.dtype) -> Loaded:
        # Its bytes replace ours in tensors of ours: both libraries then read memory with the same pages.
        packed = [ops.convert_weight_packed(weight.codes) for _ in range(weight.copies())]
        for target in packed:
            self._library.proto_pack(_pointer(weight.codes), weight.N, weight.K, _pointer(target))

        def call(x: Tensor, copy: int) -> Tensor:
            out = torch.empty(x.shape[0], weight.N, dtype=torch.bfloat16)
            self._library.proto_mm(
                _pointer(x), x.shape[0], _pointer(packed[copy]), weight.N, weight.K, _pointer(weight.scales), None,
                _pointer(out), torch.get_num_threads(), 0,
            )  # fmt: skip
            return out

        return Loaded(len(packed), call)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
