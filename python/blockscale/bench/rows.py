"""One row of a table: a candidate's times at one shape, in the words of google-benchmark's JSON with counters added."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from .. import diagnostics
from .measure import Samples

__all__ = ["IDENTITY", "identity", "merge_runs", "name_of", "row"]

# What tells rows apart; all other fields are measured.
IDENTITY = ("table", "shape", "M", "N", "K", "layers", "x", "block", "isa", "threads", "kernel")


def identity(table: str, shape: object, M: int, N: int, K: int, threads: int, **more: str | int) -> dict[str, Any]:
    """The fields that all rows have, under the active instruction set; ``more``: x, block, layers."""
    isa = diagnostics.isa_info()["active"]
    return {"table": table, "shape": str(shape), "M": M, "N": N, "K": K, "threads": threads, "isa": isa, **more}


def row(identity: Mapping[str, Any], samples: Samples, **measured: float) -> dict[str, Any]:
    """A benchmark entry: real_time and cpu_time are medians in microseconds, ``measured`` are counters."""
    fields = {key: identity[key] for key in IDENTITY if key in identity}
    return {
        "name": name_of(fields),
        "run_name": name_of(fields),
        "run_type": "aggregate",
        "aggregate_name": "median",
        "aggregate_unit": "time",
        "repetitions": 1,
        "iterations": len(samples.seconds),
        "real_time": samples.median * 1e6,
        "cpu_time": statistics.median(samples.cpu_seconds) * 1e6,
        "time_unit": "us",
        "iqr": samples.iqr * 1e6,
        **fields,
        **measured,
    }


def name_of(fields: Mapping[str, Any]) -> str:
    """linear/qwen3-8b.qkv_proj/M:1/N:6144/K:4096/.../blockscale"""
    parts = [str(fields["table"])]
    for key in IDENTITY[1:]:
        if key in fields:
            parts.append(str(fields[key]) if key in ("shape", "kernel") else f"{key}:{fields[key]}")
    return "/".join(parts)


def merge_runs(runs: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of several runs as one row each: the median over the runs of every measured number.

    ``repetitions`` counts the runs, ``real_times`` lists their medians.

    >>> merge_runs([[{"name": "a", "real_time": 1.0, "repetitions": 1}], [{"name": "a", "real_time": 3.0, "repetitions": 1}]])
    [{'name': 'a', 'real_time': 2.0, 'repetitions': 2, 'real_times': [1.0, 3.0]}]
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        for entry in run:
            by_name.setdefault(entry["name"], []).append(entry)
    return [_merged(entries) for entries in by_name.values()]


def _merged(entries: list[Mapping[str, Any]]) -> dict[str, Any]:
    result = dict(entries[0])
    for key, value in result.items():
        if isinstance(value, float):
            result[key] = statistics.median(entry[key] for entry in entries if key in entry)
    result["repetitions"] = sum(entry["repetitions"] for entry in entries)
    result["real_times"] = [time for entry in entries for time in entry.get("real_times", [entry["real_time"]])]
    return result
