"""A run of the suite: tables measured in this process, or in child processes and then merged.

The instruction set is chosen once per process, so a table under another cap is measured by a child process, and so is
each of several runs, which then differ in where their memory lies as separate runs do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import diagnostics
from . import context, roofline
from .rows import merge_runs
from .settings import Session, Settings
from .tables import TABLES

__all__ = ["measure", "run"]


def run(tables: Sequence[str], settings: Settings, *, isas: Sequence[str] = (), runs: int = 1) -> dict[str, Any]:
    """Measure tables by name.

    Args:
        isas: caps to measure every table under; none: what each table asks for, else the cap of the environment.
        runs: how often, in processes of their own; the numbers are then medians over them.

    Returns:
        ``context`` and ``benchmarks``, google-benchmark's JSON.

    Raises:
        ValueError: ``isas`` names an instruction set that this machine or the cap of the environment rules out, or the
            library's own result is wrong.
    """
    parts = _tables_by_isa(tables, isas)
    reports = []
    for _ in range(runs):
        for isa, names in parts.items():
            alone = isa is None and runs == 1
            reports.append(measure(names, settings) if alone else _measure_in_child(isa, names, settings))
    result = reports[0]
    for key in ("missing_peers", "refused"):
        result["context"][key] = list(dict.fromkeys(line for one in reports for line in one["context"][key]))
    for one in reports[1:]:
        result["context"]["peers"] |= one["context"]["peers"]
    result["context"]["runs"] = runs
    result["context"]["waited_for_cpu"] = max(one["context"]["waited_for_cpu"] for one in reports)
    result["benchmarks"] = merge_runs(one["benchmarks"] for one in reports)
    return result


def measure(tables: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Measure tables in this process, under its instruction set."""
    session = Session(settings)
    ran_before, waited_before = context.scheduled()
    small = {"nbytes": 1 << 20} if settings.quick else {}
    limits = {threads: roofline.survey(threads, **small) for threads in session.threads()}
    rows = []
    for name in tables:
        for row in TABLES[name].measure(session):
            rows.append(row)
            if sys.stderr.isatty():
                print(f"\r\x1b[K{row['name']}: {row['real_time']:.1f} us", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(end="\r\x1b[K", file=sys.stderr, flush=True)
    roofline.bind(1)
    ran, waited = (
        after - before for after, before in zip(context.scheduled(), (ran_before, waited_before), strict=True)
    )
    share = max(0.0, waited / (ran + waited)) if ran + waited > 0 else 0.0
    return {"context": context.describe(session, limits, share), "benchmarks": rows}


def _tables_by_isa(tables: Sequence[str], isas: Sequence[str]) -> dict[str | None, list[str]]:
    states = {isa["name"]: isa for isa in diagnostics.isa_info()["isas"]}
    for isa in isas:
        if isa not in states:
            raise ValueError(f"bench: expected `--isa` to be of {', '.join(states)}, got {isa}")
        if not states[isa]["usable"]:
            raise ValueError(f"bench: {isa} does not run here: {states[isa]['reason']}")
    parts: dict[str | None, list[str]] = {}
    for name in tables:
        own = [isa for isa in TABLES[name].isas if states[isa]["usable"]]
        for isa in isas or own or [None]:
            parts.setdefault(isa, []).append(name)
    return parts


def _measure_in_child(isa: str | None, tables: Sequence[str], settings: Settings) -> dict[str, Any]:
    package_parent = str(Path(__file__).parents[2])
    paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if isa is not None:
        env["BLOCKSCALE_MAX_ISA"] = isa
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "report.json")
        request = json.dumps({"tables": list(tables), "settings": asdict(settings), "out": str(out)})
        command = [sys.executable, "-m", "blockscale.bench.suite"]
        done = subprocess.run(command, env=env, input=request, text=True, stderr=subprocess.PIPE, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise ValueError(f"bench: the run under {isa or 'this instruction set'} failed: {lines[-1]}")
        return json.loads(out.read_text())


if __name__ == "__main__":
    _request = json.load(sys.stdin)
    _report = measure(_request["tables"], Settings(**_request["settings"]))
    Path(_request["out"]).write_text(json.dumps(_report))
