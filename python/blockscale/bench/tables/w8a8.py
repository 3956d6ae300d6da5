"""FP8 activations against 16-bit ones on the same weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import activations as w8a8
from ... import ops, reference
from .. import roofline
from ..inputs import Weight, activations, check_result, checked_places, product
from ..rows import identity
from ..settings import Session
from ..shapes import find_shapes
from .base import Table, Verdict
from .paired import PAIRED_COLUMNS, time_against

__all__ = ["W8A8"]

_LIMIT = 1.10


class W8A8(Table):
    name = "w8a8"
    title = "FP8 activations (W8A8) against 16-bit ones (W8A16)"
    columns = PAIRED_COLUMNS

    def measure(self, session: Session) -> Iterator[dict[str, Any]]:
        for shape in session.shapes(find_shapes("6144x4096") + find_shapes("qwen3-8b.down_proj")):
            weight = session.weight(shape)
            packed = [ops.convert_weight_packed(weight.codes) for _ in range(max(2, weight.copies()))]
            for threads in session.threads():
                roofline.warm_up(threads)
                for M in session.rows([1, 4, 16, 64, 512]):
                    candidates = _candidates(weight, packed, M)
                    where = identity(self.name, shape, M, shape.N, shape.K, threads)
                    yield from time_against(where, candidates, {"w8a8": "w8a16"}, session.settings)

    def verdicts(self, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
        return [
            Verdict(
                f"{row['shape']}, M = {row['M']}, threads = {row['threads']}: time of W8A8 over W8A16, at most",
                f"{_LIMIT:.2f}",
                f"{row['time_ratio']:.2f}",
                row["time_ratio"] <= _LIMIT,
            )
            for row in rows
            if row["kernel"] == "w8a8"
        ]


def _candidates(weight: Weight, packed: list[Tensor], M: int) -> dict[str, Callable[[int], Tensor]]:
    """Both calls, checked; they never read the same copy in one round."""
    x, scales, block_size = activations(weight, M, torch.bfloat16), weight.scales, list(weight.block_size)
    A, As = w8a8.per_token_group_quant_fp8(x, block_size[1])
    copies, half = len(packed), len(packed) // 2
    multiply, multiply_codes = ops.fp8_scaled_mm_cpu, w8a8.fp8_w8a8_block_scaled_mm_cpu
    candidates = {
        "w8a16": lambda i: multiply(x, packed[i % copies], scales, block_size),
        "w8a8": lambda i: multiply_codes(A, packed[(i + half) % copies], As, scales, block_size),
    }
    check_result("w8a16", candidates["w8a16"], weight, M)
    rows = reference.dequantize(A, As, (1, block_size[1]))[checked_places(M)]
    want = product(rows, weight.codes, scales, weight.block_size)
    check_result("w8a8", candidates["w8a8"], dataclasses.replace(weight, want=want), M)
    return candidates
