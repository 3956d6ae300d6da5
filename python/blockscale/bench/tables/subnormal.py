"""Data whose products, scales and sums are subnormal, against normal data: nothing may fall into a slow path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ..inputs import Weight, activations, check_result
from ..rows import identity
from ..settings import X_TYPES, Session
from ..shapes import find_shapes
from .base import Table
from .paired import PAIRED_COLUMNS, time_against

__all__ = ["Subnormal"]


class Subnormal(Table):
    name = "subnormal"
    title = "Subnormal data against normal data"
    columns = PAIRED_COLUMNS

    def measure(self, session: Session) -> Iterator[dict[str, Any]]:
        torch.set_num_threads(1)
        for shape in session.shapes(find_shapes("6144x4096")):
            weight = session.weight(shape)
            packed = ops.convert_weight_packed(weight.codes)
            for x_name in session.x_types(tuple(X_TYPES)):
                for M in session.rows([16]):
                    candidates = _candidates(weight, packed, activations(weight, M, X_TYPES[x_name]))
                    check_result("normal", candidates["normal"], weight, M)
                    where = identity(self.name, shape, M, shape.N, shape.K, 1, x=x_name)
                    yield from time_against(where, candidates, {"subnormal": "normal"}, session.settings)


def _candidates(weight: Weight, packed: Tensor, x: Tensor) -> dict[str, Callable[[int], Tensor]]:
    tiny = torch.full_like(x, 1e-7 if x.dtype == torch.float16 else 1e-39)
    small = torch.full_like(weight.scales, 2.0**-130)
    block_size = list(weight.block_size)
    return {
        "normal": lambda i: ops.fp8_scaled_mm_cpu(x, packed, weight.scales, block_size),
        "subnormal": lambda i: ops.fp8_scaled_mm_cpu(tiny, packed, small, block_size),
    }
