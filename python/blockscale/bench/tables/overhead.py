"""What one call costs where there is nothing to compute: M = 1, N = K = 64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ... import ops
from ...linear import BlockScaledLinear
from ..inputs import activations, dense
from ..rows import identity
from ..settings import Session
from ..shapes import find_shapes
from .base import Table, Verdict
from .paired import PAIRED_COLUMNS, time_against

__all__ = ["Overhead"]

_CALLS = 2000  # in one sample: 5 ms at 2.5 us each, for which a clock that costs 0.1 us is nothing
_MODES = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}
_LIMITS = {"inference_mode": 1.5, "no_grad": 2.0}


class Overhead(Table):
    name = "overhead"
    title = "Call overhead: M = 1, N = K = 64, one thread"
    columns = PAIRED_COLUMNS

    def measure(self, session: Session) -> Iterator[dict[str, Any]]:
        torch.set_num_threads(1)
        weight = session.weight(find_shapes("64x64")[0])
        x, block_size = activations(weight, 1, torch.bfloat16), list(weight.block_size)
        packed = ops.convert_weight_packed(weight.codes)
        layer = BlockScaledLinear.from_fp8(weight.codes, weight.scales, block_size=weight.block_size)
        plain = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        plain.weight.data = dense(weight, torch.bfloat16)
        op, linear = torch.ops.blockscale.fp8_scaled_mm_cpu, torch.nn.functional.linear
        calls: dict[str, Callable[[], Any]] = {
            "op": lambda: op(x, packed, weight.scales, block_size, None, torch.bfloat16, True),
            "function": lambda: ops.fp8_scaled_mm_cpu(x, packed, weight.scales, block_size),
            "BlockScaledLinear": lambda: layer(x),
            "F.linear bf16": lambda: linear(x, plain.weight),
            "nn.Linear bf16": lambda: plain(x),
        }
        against = {"op": "F.linear bf16", "function": "F.linear bf16", "BlockScaledLinear": "nn.Linear bf16"}
        count = 20 if session.settings.quick else _CALLS
        for mode, guard in _MODES.items():
            with guard():
                candidates = {name: _repeated(call, count) for name, call in calls.items()}
                where = identity(self.name, mode, 1, 64, 64, 1)
                for row in time_against(where, candidates, against, session.settings):
                    for field in ("real_time", "cpu_time", "iqr"):
                        row[field] /= count
                    yield row

    def verdicts(self, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
        return [
            Verdict(
                f"{row['kernel']}, {row['shape']}: time over that of {row['against']}, at most",
                f"{_LIMITS[row['shape']]:.2f}",
                f"{row['time_ratio']:.2f}",
                row["time_ratio"] <= _LIMITS[row["shape"]],
            )
            for row in rows
            if "against" in row
        ]


def _repeated(call: Callable[[], Any], count: int) -> Callable[[int], None]:
    def run(_: int) -> None:
        for _ in range(count):
            call()

    return run
