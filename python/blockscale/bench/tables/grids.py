"""Scale grids: the same codes with other block sizes, against 128 x 128."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import ops
from .. import roofline
from ..inputs import Weight, activations, check_result
from ..rows import identity
from ..settings import X_TYPES, Session
from ..shapes import find_shapes
from .base import Column, Grid, Table, Verdict
from .paired import PAIRED_COLUMNS, time_against

__all__ = ["Grids"]

_BASE = "128x128"
_WHOLE = 2**31
# The longest time allowed, in times of 128 x 128.
_LIMITS = {
    "64x128": 1.03,
    "32x128": 1.03,
    "Nx128": 1.03,
    "128xK": 1.03,
    "NxK": 1.03,
    "1xK": 1.03,
    "128x32": 1.15,
    "1x128": 1.10,
}


class Grids(Table):
    name = "grids"
    title = "Scale grids against 128 x 128"
    columns = tuple(Column("block", "kernel") if c.field == "kernel" else c for c in PAIRED_COLUMNS)

    def measure(self, session: Session) -> Iterator[dict[str, Any]]:
        for shape in session.shapes(find_shapes("6144x4096")):
            weights = {name_of(block): session.weight(shape, block) for block in self._blocks(session)}
            first = weights[_BASE]
            # The codes of all grids are the same. Each call takes the next copy, whoever makes it.
            packed = [ops.convert_weight_packed(first.codes) for _ in range(max(first.copies(), len(weights)))]
            for x_name in session.x_types():
                for threads in session.threads():
                    roofline.warm_up(threads)
                    for M in session.rows([1, 4, 16, 64]):
                        x = activations(first, M, X_TYPES[x_name])
                        candidates = {}
                        for place, (name, weight) in enumerate(weights.items()):
                            candidates[name] = _call(x, packed, weight, place, len(weights))
                            check_result(name, candidates[name], weight, M)
                        where = identity(self.name, shape, M, shape.N, shape.K, threads, x=x_name)
                        against = dict.fromkeys(weights, _BASE)
                        yield from time_against(where, candidates, against, session.settings)

    @staticmethod
    def _blocks(session: Session) -> list[tuple[int, int]]:
        default = [
            (128, 128), (64, 128), (32, 128), (_WHOLE, 128), (128, _WHOLE), (_WHOLE, _WHOLE), (1, _WHOLE), (128, 64),
            (128, 32), (1, 128), (1, 32),
        ]  # fmt: skip
        return list(dict.fromkeys([(128, 128), *session.blocks(default)]))

    def summary(self, rows: Sequence[dict[str, Any]]) -> list[Grid]:
        """Time over that of 128 x 128: a line for each grid, a column for each M and number of threads."""
        cases = sorted({(row["threads"], row["M"]) for row in rows})
        blocks = list(dict.fromkeys(row["kernel"] for row in rows))
        ratios = {(row["kernel"], (row["threads"], row["M"])): row["time_ratio"] for row in rows}
        cells = [[block, *(f"{ratios[block, case]:.2f}" for case in cases)] for block in blocks]
        headings = ["block", *(f"M = {M}, {threads} thr." for threads, M in cases)]
        return [Grid(headings, cells, "Time over that of 128x128")]

    def verdicts(self, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
        found = []
        for block, limit in _LIMITS.items():
            for row in rows:
                if row["kernel"] == block:
                    what = f"{block}, M = {row['M']}, threads = {row['threads']}: time over that of {_BASE}, at most"
                    got = row["time_ratio"]
                    found.append(Verdict(what, f"{limit:.2f}", f"{got:.2f}", got <= limit))
        return found


def name_of(block: tuple[int, int]) -> str:
    """128x128; N and K for sides that cover the weight."""
    return "x".join(whole if side == _WHOLE else str(side) for side, whole in zip(block, "NK", strict=True))


def _call(x: Tensor, packed: list[Tensor], weight: Weight, place: int, places: int) -> Callable[[int], torch.Tensor]:
    scales, block_size = weight.scales, list(weight.block_size)
    return lambda i: ops.fp8_scaled_mm_cpu(x, packed[(i * places + place) % len(packed)], scales, block_size)
