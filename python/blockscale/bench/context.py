"""The environment block of a report: what a reader needs to judge its numbers."""

from __future__ import annotations

import datetime
import os
import platform
import re
import socket
from pathlib import Path
from typing import Any

from .. import diagnostics
from .settings import Session

__all__ = ["CROWDED", "describe", "scheduled"]

# Share of its time that a process may wait for a CPU before its numbers say more about its neighbours.
CROWDED = 0.02


def describe(session: Session, limits: dict[int, dict[str, float]], waited: float) -> dict[str, Any]:
    """google-benchmark's fields, then ours.

    Args:
        limits: what the machine can do, by threads, from ``roofline.survey``.
        waited: share of its time that the run waited for a CPU.
    """
    info = diagnostics.isa_info()
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "host_name": socket.gethostname(),
        "executable": "python -m blockscale bench",
        "num_cpus": os.cpu_count(),
        "mhz_per_cpu": round(1000 * max(one["ghz"] for one in limits.values())),
        "cpu_scaling_enabled": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
        not in ("", "performance"),
        "caches": _caches(),
        "load_avg": list(os.getloadavg()),
        "library_build_type": "release",
        "cpu": _cpu_model(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "isa": info["active"],
        "max_isa": info["max_isa"],
        "huge_pages": _huge_pages(),
        "kernel": platform.release(),
        **{key: value for key, value in diagnostics.environment().items() if key != "threads"},
        "threads": list(limits),
        "waited_for_cpu": waited,
        "limits": {str(threads): one for threads, one in limits.items()},
        "peers": {peer.name: {"version": peer.version, "about": peer.about} for peer in session.peers},
        "missing_peers": session.missing,
        "refused": session.refused,
    }


def scheduled() -> tuple[float, float]:
    """Seconds that this process's threads have run, and that they have waited for a CPU while others ran.

    (0, 0) where the kernel keeps no such account.
    """
    ran = waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        fields = _read(path).split()
        if len(fields) == 3:
            ran, waited = ran + int(fields[0]), waited + int(fields[1])
    return ran / 1e9, waited / 1e9


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _cpu_model() -> str:
    words = _read("/proc/cpuinfo")
    fields = {}
    for key in ("model name", "cpu family", "model", "stepping"):
        found = re.search(rf"^{key}\s*:\s*(.*)$", words, re.MULTILINE)
        fields[key] = found[1] if found else "?"
    numbers = ", ".join(f"{key.removeprefix('cpu ')} {fields[key]}" for key in ("cpu family", "model", "stepping"))
    return f"{fields['model name']} ({numbers})"


def _huge_pages() -> str:
    found = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else "unknown"


def _caches() -> list[dict[str, Any]]:
    caches = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        size = re.fullmatch(r"(\d+)([KM]?)", _read(folder / "size"))
        if size:
            scale = {"": 1, "K": 1 << 10, "M": 1 << 20}[size[2]]
            sharing = sum(map(_cpus_in, _read(folder / "shared_cpu_list").split(",")))
            kind, level = _read(folder / "type"), int(_read(folder / "level"))
            caches.append({"type": kind, "level": level, "size": int(size[1]) * scale, "num_sharing": sharing})
    return caches


def _cpus_in(part: str) -> int:
    """CPUs in one part of a list such as 0-3,8."""
    first, _, last = part.partition("-")
    return int(last or first) - int(first) + 1
