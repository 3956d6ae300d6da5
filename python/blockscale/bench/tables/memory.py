"""Bytes: of a packed weight, of a thread's scratch, and at the peak of loading a checkpoint. Nothing is timed but that.

Scratch is read off the process: pages that the first call of each K makes the process grow by, beyond its result.
Loading is sampled by a thread of its own while ``load_checkpoint`` fills a model on meta; file pages do not count.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import ops
from ...model_loading import load_checkpoint
from ..measure import Samples
from ..rows import identity, row
from ..settings import Session
from ..shapes import Shape
from .base import Column, Table, Verdict

__all__ = ["Memory"]

_SCRATCH_LIMIT = 1 << 20
_SLACK = 1 << 20  # of the allocator and the interpreter


class Memory(Table):
    name = "memory"
    title = "Memory"
    columns = (
        Column("what", "kernel"),
        Column("shape", "shape"),
        Column("bytes", "bytes", "{:,.0f}"),
        Column("limit", "limit", "{:,.0f}"),
        Column("seconds", "seconds", "{:.3f}"),
    )

    def measure(self, session: Session) -> Iterator[dict[str, Any]]:
        torch.set_num_threads(1)
        quick = session.settings.quick
        for shape in [Shape("custom", f"{N}x{K}", N, K) for N, K in ((1024, 1024), (577, 193), (17, 4097))]:
            codes = torch.zeros(shape.N, shape.K, dtype=torch.uint8).view(torch.float8_e4m3fn)
            packed = ops.convert_weight_packed(codes)
            nbytes = packed.numel() * packed.element_size()
            yield self._row("packed weight", shape, nbytes, shape.N * shape.K)
        for K in (1 << 12, 1 << 14 if quick else 1 << 18):
            yield self._row(
                "scratch of a thread", Shape("custom", f"16x{K}", 16, K), _growth_of_a_call(K), _SCRATCH_LIMIT
            )
        side, layers = (128, 2) if quick else (4096, 6)
        peak, seconds = _loading(side, layers)
        shape = Shape("custom", f"{layers} layers {side}x{side}", side, side)
        yield {**self._row("loading, beyond the model", shape, peak, side * side + _SLACK), "seconds": seconds}

    def _row(self, what: str, shape: Shape, nbytes: int, limit: int) -> dict[str, Any]:
        where = identity(self.name, shape.layer, 1, shape.N, shape.K, 1)
        return row({**where, "kernel": what}, Samples([0.0], [0.0]), bytes=float(nbytes), limit=float(limit))

    def verdicts(self, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
        return [
            Verdict(
                f"{row['kernel']}, {row['shape']}: bytes, at most",
                f"{row['limit']:,.0f}",
                f"{row['bytes']:,.0f}",
                row["bytes"] <= row["limit"],
            )
            for row in rows
        ]


def _private_bytes() -> int:
    """Resident memory of this process that no file backs."""
    found = re.search(r"^RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _growth_of_a_call(K: int) -> int:
    """Growth of the process at its first call with this K in a thread that has made none."""
    codes = torch.ones(16, K, dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed, scales = ops.convert_weight_packed(codes), torch.ones(1, -(-K // 128))
    x = torch.ones(16, K, dtype=torch.bfloat16)
    growth = []

    def call() -> None:
        torch.set_num_threads(1)
        before = _private_bytes()
        ops.fp8_scaled_mm_cpu(x, packed, scales, [128, 128])
        growth.append(_private_bytes() - before)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return growth[0]


def _loading(side: int, layers: int) -> tuple[int, float]:
    """The most that loading takes beyond what the loaded model keeps, and how long it takes in seconds."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        tensors = {}
        for i in range(layers):
            tensors[f"{i}.weight"] = torch.full((side, side), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
            tensors[f"{i}.weight_scale_inv"] = torch.ones(-(-side // 128), -(-side // 128))
        save_file(tensors, str(Path(folder, "model.safetensors")))
        quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        Path(folder, "config.json").write_text(json.dumps({"quantization_config": quantization}))
        del tensors
        model = nn.Sequential(*(nn.Linear(side, side, bias=False, device="meta") for _ in range(layers)))
        before = _private_bytes()
        begin = time.perf_counter()
        peak = _peak_while(lambda: load_checkpoint(model, folder))
        seconds = time.perf_counter() - begin
    return peak - before - layers * side * side, seconds


def _peak_while(call: Callable[[], Any]) -> int:
    """The most private memory of the process while ``call`` runs, sampled every 0.5 ms."""
    peak, done = [_private_bytes()], threading.Event()

    def sample() -> None:
        while not done.wait(0.0005):
            peak[0] = max(peak[0], _private_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        call()
    finally:
        peak[0] = max(peak[0], _private_bytes())
        done.set()
        sampler.join()
    return peak[0]
