"""zentorch's linear on prepacked bf16 weights, from its library alone: the package's compiler hooks stay out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import torch

from ..inputs import Weight, dense
from .base import Loaded, Peer, PeerMissing

__all__ = ["Zentorch"]

_GET = "pip install zentorch==2.13.0.2 (the release must match torch's), or name libzentorch.so: --peers zentorch=FILE"


class Zentorch(Peer):
    """Takes bf16 x."""

    name = "zentorch"
    about = "zentorch_linear_unary, bf16 weights prepacked"
    bytes_per_weight = 2.0

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        if path is None:
            spec = importlib.util.find_spec("zentorch")
            if spec is None or spec.origin is None:
                raise PeerMissing(f"zentorch: {_GET}")
            path = str(Path(spec.origin).with_name("libzentorch.so"))
        try:
            torch.ops.load_library(path)
            ops = torch.ops.zentorch
            self._linear, self._pack = ops.zentorch_linear_unary, ops.zentorch_weight_prepack_for_linear
        except (OSError, AttributeError) as error:
            words = str(error).splitlines()[0]
            raise PeerMissing(f"zentorch: {path} does not load under torch {torch.__version__} ({words})") from error
        self._folder = Path(path).resolve().parents[1]

    @property
    def version(self) -> str:
        for found in importlib.metadata.distributions(name="zentorch", path=[str(self._folder)]):
            return found.version
        return "unknown"

    def refusal(self, weight: Weight, x: torch.dtype, M: int) -> str:
        return "" if x == torch.bfloat16 else "takes bf16 x"

    def load(self, weight: Weight, x: torch.dtype) -> Loaded:
        plain = dense(weight, torch.bfloat16)
        packed = [self._pack(plain) for _ in range(weight.copies(2.0))]
        return Loaded(len(packed), lambda x, copy: self._linear(x, packed[copy], None, is_weight_prepacked=True))
