"""What loading a checkpoint and quantising activations cost, in terms of memory copy speed.

A tool that reads r bytes and writes w moves r + w, memcpy of n bytes moves 2n; "of memcpy" is the tool's rate over that
of memcpy, both on tensors that do not fit in the caches. Results are new tensors, memcpy's too. Whether the system gives
them fresh pages, which cost more than copying does, depends on what a process has allocated before, so while this is
measured the C library keeps all memory that is freed; "memcpy, fresh pages" shows what they would add.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
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
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # numbers of mallopt, whose defaults are 128 KiB and 65536
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
        for shape in session.shapes(find_shapes("qwen3-8b.qkv_proj")):
            N, K = shape.N, shape.K
            tools = _tools(session.weight(shape))
            for threads in session.threads():
                roofline.warm_up(threads)
                calls = {name: call for name, (_, call) in tools.items()}
                with _kept_memory():
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
        "memcpy, fresh pages": (4, lambda i: _copy_to_fresh_pages(plain[i % len(plain)])),
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


def _copy_to_fresh_pages(source: Tensor) -> None:
    with mmap.mmap(-1, source.numel() * source.element_size()) as pages:
        target = torch.frombuffer(pages, dtype=source.dtype)
        roofline.copy(target, source)
        del target  # or the pages could not be given back


@contextlib.contextmanager
def _kept_memory() -> Iterator[None]:
    """The C library takes all memory from its heap, and returns none of it to the system."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_MMAP_MAX, 0)
    try:
        yield
    finally:
        libc.mallopt(_TRIM_THRESHOLD, 128 << 10)
        libc.mallopt(_MMAP_MAX, 65536)
