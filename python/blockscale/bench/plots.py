"""Drawings of a report: products against the roofline, speed against the peers, growth. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .measure import geometric_mean
from .peers.own import Blockscale
from .tables.growth import AXES, points_of

__all__ = ["PLOTS", "draw", "require"]

Rows = Sequence[dict[str, Any]]
_PANEL = (4.6, 3.6)  # inches


def require() -> None:
    """
    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("bench: `--plot` needs matplotlib: pip install matplotlib") from error


def draw(report: dict[str, Any], path: str | Path, names: Sequence[str] = ()) -> None:
    """Draw panels of ``PLOTS`` (all that the report has rows for, or those named) into one file.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the report has nothing to draw, or the file's suffix is unknown.
    """
    require()
    from matplotlib.figure import Figure

    panels = [panel for name, plot in PLOTS.items() if not names or name in names for panel in plot(report)]
    if not panels:
        raise ValueError(f"bench: `--plot` draws the tables {', '.join(PLOTS)}, and none of them was measured")
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(columns * _PANEL[0], lines * _PANEL[1]), layout="constrained")
    for axes, panel in zip(figure.subplots(lines, columns, squeeze=False).flat, panels, strict=False):
        panel(axes)
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    about = report["context"]
    figure.suptitle(f"{about['cpu']}, {about['isa']}, {about['date'][:10]}", fontsize="small")
    # A fixed salt and no date: the same numbers give the same file.
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "blockscale"}):
        metadata = {"Date": None} if str(path).endswith(".svg") else {}
        figure.savefig(path, metadata=metadata)


def _linear(report: dict[str, Any]) -> list[Callable]:
    """By threads: GFLOP/s over M under the roofline, and speed against each peer."""
    rows = [row for row in report["benchmarks"] if row["table"] == "linear"]
    panels = []
    for threads in sorted({row["threads"] for row in rows}):
        mine = [row for row in rows if row["threads"] == threads]
        panels.append(lambda axes, mine=mine, threads=threads: _under_roofline(axes, mine, threads))
        if any("blockscale_speedup" in row for row in mine):
            panels.append(lambda axes, mine=mine, threads=threads: _against_peers(axes, mine, threads))
    return panels


def _means(rows: Rows, kernel: str, field: str) -> tuple[list[int], list[float]]:
    """Geometric means over the shapes by M."""
    by_rows: dict[int, list[float]] = {}
    for row in rows:
        if row["kernel"] == kernel and field in row:
            by_rows.setdefault(row["M"], []).append(row[field])
    return sorted(by_rows), [geometric_mean(by_rows[M]) for M in sorted(by_rows)]


def _under_roofline(axes: Any, rows: Rows, threads: int) -> None:
    own = [row for row in rows if row["kernel"] == Blockscale.name and "roofline_us" in row]
    for row in own:
        row["roofline_gflops"] = 2e-3 * row["M"] * row["N"] * row["K"] / row["roofline_us"]
    axes.loglog(*_means(own, Blockscale.name, "roofline_gflops"), "k--", label="roofline, FP8 weights")
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        style = {"linewidth": 2.2, "marker": "o"} if kernel == Blockscale.name else {"linewidth": 1, "marker": "."}
        axes.loglog(*_means(rows, kernel, "gflops"), label=kernel, **style)
    _finish(axes, f"Linear layers, {threads} thread(s)", "M", "GFLOP/s, geometric mean")


def _against_peers(axes: Any, rows: Rows, threads: int) -> None:
    for kernel in dict.fromkeys(row["kernel"] for row in rows if "blockscale_speedup" in row):
        axes.loglog(*_means(rows, kernel, "blockscale_speedup"), marker="o", label=kernel)
    axes.axhline(1, color="k", linestyle="--", linewidth=1)
    axes.set_yscale("log", base=2)
    _finish(axes, f"Speed against peers, {threads} thread(s)", "M", "their time / blockscale's")


def _growth(report: dict[str, Any]) -> list[Callable]:
    """A panel for each axis: time and roofline by threads."""
    rows = [row for row in report["benchmarks"] if row["table"] == "growth"]
    axes_names = [name for name in AXES if any(row["shape"] == name for row in rows)]
    return [lambda axes, name=name: _one_growth(axes, rows, name) for name in axes_names]


def _one_growth(axes: Any, rows: Rows, name: str) -> None:
    field, held = AXES[name]
    for i, threads in enumerate(sorted({row["threads"] for row in rows if row["shape"] == name})):
        sizes, times, limits = zip(*points_of(rows, name, threads), strict=True)
        axes.loglog(sizes, times, f"C{i}o-", label=f"{threads} thread(s)")
        axes.loglog(sizes, limits, f"C{i}--", linewidth=1, label=f"roofline, {threads} thread(s)")
    _finish(axes, held, field, "µs")


def _finish(axes: Any, title: str, across: str, up: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize="x-small")


PLOTS: dict[str, Callable[[dict[str, Any]], list[Callable]]] = {"linear": _linear, "growth": _growth}
