"""A finished run as text for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .context import CROWDED
from .tables import TABLES, Grid, Table, Verdict

__all__ = ["as_markdown", "as_text", "grid_text", "tables_of", "verdict_grid", "warnings_of"]


def as_text(report: dict[str, Any]) -> Iterable[str]:
    """The whole report for a terminal."""
    about = report["context"]
    yield (
        f"{about['cpu']}, {about['num_cpus']} CPUs at {about['mhz_per_cpu']} MHz; {about['isa']}; "
        f"blockscale {about['blockscale']}, torch {about['torch']}; huge pages: {about['huge_pages']}"
    )
    yield from grid_text(limits_grid(about))
    yield from warnings_of(about)
    for sentence in about["missing_peers"]:
        yield f"not installed: {sentence}"
    for sentence in about["refused"]:
        yield f"refused: {sentence}"
    for table, rows in tables_of(report):
        yield from ["", table.title]
        for grid in [table.detail(rows), *table.summary(rows)]:
            yield from [*grid_text(grid), ""]
        verdicts = table.verdicts(rows)
        if verdicts:
            yield from grid_text(verdict_grid(verdicts))


def warnings_of(about: dict[str, Any]) -> list[str]:
    """What makes the numbers of a report doubtful."""
    if about["waited_for_cpu"] <= CROWDED:
        return []
    share = f"{about['waited_for_cpu']:.0%}"
    return [
        f"warning: the runs waited {share} of their time for a CPU, so other work was running: times are not the machine's"
    ]


def tables_of(report: dict[str, Any]) -> list[tuple[Table, list[dict[str, Any]]]]:
    """The tables that a report has rows of, with these."""
    found = []
    for name, table in TABLES.items():
        rows = [row for row in report["benchmarks"] if row["table"] == name]
        if rows:
            found.append((table, rows))
    return found


_LIMITS = {
    "dram_read": "DRAM read, GB/s",
    "memcpy": "memcpy, GB/s copied",
    "bf16_dot": "bf16 dot, GFLOP/s",
    "fp32_zmm": "fp32 FMA 512 bits, GFLOP/s",
    "fp32_ymm": "fp32 FMA 256 bits, GFLOP/s",
    "ghz": "GHz",
}


def limits_grid(about: dict[str, Any]) -> Grid:
    """What the machine can do, a line for each number of threads."""
    headings = ["threads", *_LIMITS.values()]
    cells = [
        [threads, *(f"{limits[key]:.1f}" if key in limits else "none" for key in _LIMITS)]
        for threads, limits in about["limits"].items()
    ]
    return Grid(headings, cells, "Limits of this machine, measured in this run")


def verdict_grid(verdicts: Sequence[Verdict]) -> Grid:
    """Required figures beside the measured ones."""
    cells = [[one.what, one.wanted, one.got, "pass" if one.ok else "short"] for one in verdicts]
    return Grid(["required", "limit", "measured", "verdict"], cells)


def grid_text(grid: Grid) -> list[str]:
    """Aligned columns for a terminal; the first is flush left."""
    lines = [list(grid.headings), *map(list, grid.cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(grid.headings))]
    text = [grid.caption] if grid.caption else []
    for first, *rest in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        text.append("  ".join(cells).rstrip())
    return text


def as_markdown(grid: Grid) -> list[str]:
    """A table of GitHub's Markdown."""
    text = [grid.caption, ""] if grid.caption else []
    text.append(f"| {' | '.join(grid.headings)} |")
    text.append("|---" * len(grid.headings) + "|")
    return text + [f"| {' | '.join(cells)} |" for cells in grid.cells]
