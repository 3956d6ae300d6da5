"""What loading a checkpoint and quantising activations cost, in terms of memory copy speed.

A tool that reads r bytes and writes w moves r + w, memcpy of n bytes moves 2n; "of memcpy" is the tool's rate over that
of memcpy, both on tensors that do not fit in the caches. The tool's result is a new tensor, so memcpy writes to a new
tensor, too. Below 32 MiB the C library hands out the same memory again and again; the larger shape gets fresh pages from
the system in each call, which cost more than copying does. Packed weights are on huge pages and pay less for theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import activations, ops
from .. import roofline
from ..inputs import Weight
from ..measure import interleave, paired
from ..rows import identity, row
from ..settings import Session
from ..shapes import find_shapes
from .base import Column, Table, Verdict

__all__ = ["Tools"]

_COPY, _GROUP = "memcpy", 128
_LIMITS = {"per_token_group_quant": 0.7, "pack": 0.5, "quantise": 0.5, "dequantise": 0.5}


class Tools(Table):
    name = "tools"
    title = "Tools against memory copy speed"
    columns = (
        Column("shape", "shape"),
        Column("threads", "threads"),
        Column("tool", "kernel"),
        Column("µs", "real_time", "{:.0f}"),
        Column("iqr", "iqr", "{:.0f}"),
        Column("GB/s moved", "gbps", "{:.1f}"),
        Column("of memcpy", "of_memcpy", "{:.2f}"),
    )

    def measure(self, session: Session) -> Iterator[dict[str, Any]]:
        for shape in session.shapes(find_shapes("3072x4096") + find_shapes("qwen3-8b.qkv_proj")):
            N, K = shape.N, shape.K
            tools = _tools(session.weight(shape))
            for threads in session.threads():
                roofline.warm_up(threads)
                calls = {name: call for name, (_, call) in tools.items()}
                samples = interleave(calls, session.settings.rounds, seconds=session.settings.seconds)
                for name, (moved, _) in tools.items():
                    measured = {"gbps": moved * N * K / samples[name].median / 1e9}
                    if name != _COPY:
                        measured["of_memcpy"] = paired(samples[_COPY], samples[name]) * moved / tools[_COPY][0]
                    where = identity(self.name, shape, N, N, K, threads)
                    yield row({**where, "kernel": name}, samples[name], **measured)

    def verdicts(self, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
        return [
            Verdict(
                f"{row['kernel']}, {row['shape']}, threads = {row['threads']}: share of memcpy's speed",
                f"{_LIMITS[row['kernel']]:.2f}",
                f"{row['of_memcpy']:.2f}",
                row["of_memcpy"] >= _LIMITS[row["kernel"]],
            )
            for row in rows
            if row["kernel"] in _LIMITS
        ]


def _tools(weight: Weight) -> dict[str, tuple[float, Callable[[int], Any]]]:
    """Bytes moved for each weight, and the call."""
    plain = [torch.randn(weight.N, weight.K).bfloat16() for _ in range(max(2, weight.copies(2.0)))]
    codes = [weight.codes.clone() for _ in range(max(2, weight.copies()))]
    packed = [ops.convert_weight_packed(one) for one in codes]
    scales, block = weight.scales, weight.block_size
    dequantise, quantise_groups = ops.dequantize_weight_block_fp8, activations.per_token_group_quant_fp8
    return {
        _COPY: (4, lambda i: _copy(plain[i % len(plain)])),
        "pack": (2, lambda i: ops.convert_weight_packed(codes[i % len(codes)])),
        "unpack": (2, lambda i: ops.unpack_weight(packed[i % len(packed)])),
        "quantise": (3, lambda i: ops.quantize_weight_block_fp8(plain[i % len(plain)], block)),
        "dequantise": (3, lambda i: dequantise(codes[i % len(codes)], scales, block, torch.bfloat16)),
        "per_token_group_quant": (3, lambda i: quantise_groups(plain[i % len(plain)], _GROUP)),
    }


def _copy(source: Tensor) -> Tensor:
    target = torch.empty_like(source)
    roofline.copy(target, source)
    return target
