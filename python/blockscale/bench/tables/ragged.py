"""Sides that fill no strip, quad or row block, against the next ones that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import ops
from .. import roofline
from ..inputs import Weight, activations, check_result
from ..rows import identity
from ..settings import Session
from ..shapes import Shape
from .base import Table, Verdict
from .paired import PAIRED_COLUMNS, time_against

__all__ = ["Ragged"]

_LIMIT = 1.25
# (M, N, K) of the ragged product and of the next full one.
_CASES = (
    ((1, 576, 7168), (1, 640, 7168)),
    ((16, 576, 7168), (16, 640, 7168)),
    ((1, 1, 4096), (1, 16, 4096)),
    ((16, 1, 4096), (16, 16, 4096)),
    ((1, 17, 4096), (1, 32, 4096)),
    ((16, 17, 4096), (16, 32, 4096)),
    ((1, 4096, 193), (1, 4096, 256)),
    ((16, 4096, 193), (16, 4096, 256)),
    ((3, 6144, 4096), (4, 6144, 4096)),
    ((3, 576, 193), (4, 640, 256)),
)
_QUICK = (((3, 17, 33), (4, 32, 128)),)


class Ragged(Table):
    name = "ragged"
    title = "Ragged sides against the next multiples of 16 and 128"
    columns = PAIRED_COLUMNS

    def measure(self, session: Session) -> Iterator[dict[str, Any]]:
        for threads in session.threads():
            roofline.warm_up(threads)
            for ragged, full in _QUICK if session.settings.quick else _CASES:
                candidates = {"ragged": _call(session, *ragged), "full": _call(session, *full)}
                M, N, K = ragged
                where = identity(self.name, f"{M}x{N}x{K} of {'x'.join(map(str, full))}", M, N, K, threads)
                yield from time_against(where, candidates, {"ragged": "full"}, session.settings)

    def verdicts(self, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
        return [
            Verdict(
                f"{row['shape']}, threads = {row['threads']}: time over that of the full one, at most",
                f"{_LIMIT:.2f}",
                f"{row['time_ratio']:.2f}",
                row["time_ratio"] <= _LIMIT,
            )
            for row in rows
            if row["kernel"] == "ragged"
        ]


def _call(session: Session, M: int, N: int, K: int) -> Callable[[int], Tensor]:
    weight: Weight = session.weight(Shape("custom", f"{N}x{K}", N, K))
    packed = [ops.convert_weight_packed(weight.codes) for _ in range(max(1, min(weight.copies(), 4096)))]
    x, block_size = activations(weight, M, torch.bfloat16), list(weight.block_size)

    def call(i: int) -> Tensor:
        return ops.fp8_scaled_mm_cpu(x, packed[i % len(packed)], weight.scales, block_size)

    check_result(weight_name(M, N, K), call, weight, M)
    return call


def weight_name(M: int, N: int, K: int) -> str:
    return f"M = {M}, N = {N}, K = {K}"
