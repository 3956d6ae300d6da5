"""oneDNN's matmul through the module of ``benchmarks/onednn``: bf16 weights, and int8 ones that it decompresses."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

import torch
from torch import Tensor

from ..inputs import Weight, dense
from .base import Loaded, Peer, PeerMissing

__all__ = ["OneDnn", "OneDnnInt8"]

_MODULE = "blockscale_onednn"
_GET = "`make bench-peers` in the source tree builds it, then name its file: --peers onednn=FILE"
_GROUP = 128  # k that share a scale


class OneDnn(Peer):
    """Takes bf16 x. Weights are packed into the layout that oneDNN asks for at the number of rows."""

    name = "onednn"
    about = "oneDNN matmul, bf16 weights in its own packed order"
    bytes_per_weight = 2.0
    kind = "bf16"

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        self._module = _import(path, self.name)

    @property
    def version(self) -> str:
        return self._module.version()

    def refusal(self, weight: Weight, x: torch.dtype, M: int) -> str:
        return "" if x == torch.bfloat16 else "takes bf16 x"

    def load(self, weight: Weight, x: torch.dtype) -> Loaded:
        plain, scales = self._plain(weight)
        copies = weight.copies(self.bytes_per_weight)
        scales_at = 0 if scales is None else scales.data_ptr()
        linear = self._module.Linear(self.kind, plain.data_ptr(), scales_at, weight.N, weight.K, copies)

        def call(x: Tensor, copy: int, _alive=(plain, scales)) -> Tensor:
            out = torch.empty(x.shape[0], weight.N, dtype=torch.bfloat16)
            linear.run(x.data_ptr(), x.shape[0], out.data_ptr(), copy, torch.get_num_threads())
            return out

        return Loaded(copies, call)

    def _plain(self, weight: Weight) -> tuple[Tensor, Tensor | None]:
        return dense(weight, torch.bfloat16), None


class OneDnnInt8(OneDnn):
    """Weights in int8 with one fp32 scale for each 128 k of a column; needs oneDNN 3.5."""

    name = "onednn-s8"
    about = "oneDNN matmul, int8 weights that it decompresses, a scale for each 128 k"
    bytes_per_weight = 1.0
    kind = "s8"

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        if not self._module.has(self.kind):
            raise PeerMissing(f"onednn-s8: weights with grouped scales need oneDNN 3.5, this is {self.version}")

    def refusal(self, weight: Weight, x: torch.dtype, M: int) -> str:
        return super().refusal(weight, x, M) or ("takes K % 128 == 0" if weight.K % _GROUP else "")

    def _plain(self, weight: Weight) -> tuple[Tensor, Tensor | None]:
        values = dense(weight, torch.float32).view(weight.N, -1, _GROUP)
        scales = values.abs().amax(-1) / 127
        return (values / scales[..., None]).round().to(torch.int8).view(weight.N, weight.K), scales


def _import(path: str | None, name: str) -> ModuleType:
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    try:
        if path is None:
            return importlib.import_module(_MODULE)
        loader = importlib.machinery.ExtensionFileLoader(_MODULE, path)
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(_MODULE, loader))
        loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise PeerMissing(f"{name}: {_GET}") from error
    except ImportError as error:
        raise PeerMissing(f"{name}: {path or _MODULE} does not load ({error}); {_GET}") from error
    sys.modules[_MODULE] = module
    return module
