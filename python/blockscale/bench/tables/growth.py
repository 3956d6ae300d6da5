"""How time grows with M, N, K, threads and the number of layers, and where it grows more steeply than the roofline.

Each point is timed beside its own roofline. The slope of a step is log(time ratio) / log(size ratio); a step whose
slope exceeds that of the roofline by more than 0.15 is marked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...linear import BlockScaledLinear
from .. import roofline
from ..inputs import activations
from ..measure import interleave, paired
from ..peers.own import Blockscale
from ..products import Products
from ..rows import identity, row
from ..settings import Session
from ..shapes import Shape
from .base import Column, Grid, Table

__all__ = ["AXES", "Growth", "points_of", "steep_steps"]

_STEEP = 0.15
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SIDES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_LAYERS = (1, 2, 4, 8, 16, 32)
# Axis by the row's shape: the field that grows, and what is held.
AXES = {
    "over M": ("M", "N = K = 4096"),
    "over N, M = 1": ("N", "M = 1, K = 4096"),
    "over N, M = 64": ("N", "M = 64, K = 4096"),
    "over K, M = 1": ("K", "M = 1, N = 4096"),
    "over K, M = 64": ("K", "M = 64, N = 4096"),
    "over layers": ("layers", "M = 1, layers of 2048 x 2048, one after the other"),
}


class Growth(Table):
    name = "growth"
    title = "Growth over M, N, K, threads and layers"
    columns = (
        Column("axis", "shape"),
        Column("threads", "threads"),
        Column("M", "M"),
        Column("N", "N"),
        Column("K", "K"),
        Column("layers", "layers"),
        Column("µs", "real_time", "{:.1f}"),
        Column("roofline µs", "roofline_us", "{:.1f}"),
        Column("% of roofline", "of_roofline", "{:.0%}"),
    )

    def measure(self, session: Session) -> Iterator[dict[str, Any]]:
        peers = session.only(Blockscale.name)
        side, scale = (64, 64) if session.settings.quick else (4096, 1)
        powers, sides, layers = (p[:3] if scale > 1 else p for p in (_POWERS, _SIDES, _LAYERS))
        cases = [("over M", side, side, powers)]
        for M in (1, 64):
            cases += [(f"over N, M = {M}", N // scale, side, (M,)) for N in sides]
            cases += [(f"over K, M = {M}", side, K // scale, (M,)) for K in sides]
        for axis, N, K, rows in cases:
            weight = session.weight(Shape("custom", f"{N}x{K}", N, K))
            products = Products(session, weight, "bf16", peers, self.name, axis)
            for threads in session.threads():
                roofline.warm_up(threads)
                for M in rows:
                    yield from products.time(M, threads)
        yield from self._layers(session, side // 2, layers)

    def _layers(self, session: Session, side: int, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
        weight = session.weight(Shape("custom", f"{side}x{side}", side, side))
        block = {"block_size": weight.block_size}
        made = max(max(counts), weight.copies())
        stack = [BlockScaledLinear.from_fp8(weight.codes, weight.scales, **block) for _ in range(made)]
        x = activations(weight, 1, torch.bfloat16)

        def run(first: int, count: int) -> None:
            for j in range(count):
                stack[(first + j) % len(stack)](x)

        def read(first: int, count: int) -> None:
            for j in range(count):
                roofline.read(stack[(first + j) % len(stack)].weight)

        for threads in session.threads():
            roofline.warm_up(threads)
            for count in counts:
                # Rounds and the two candidates take turns over the stack, so no layer is still in a cache.
                with torch.inference_mode():
                    samples = interleave(
                        {
                            Blockscale.name: lambda i, n=count: run(2 * i * n, n),
                            "read": lambda i, n=count: read((2 * i + 1) * n, n),
                        },
                        session.settings.rounds,
                        seconds=session.settings.seconds,
                    )
                own, limit = samples[Blockscale.name], samples["read"]
                where = identity(self.name, "over layers", 1, side, side, threads, layers=count)
                measured = {"roofline_us": limit.median * 1e6, "of_roofline": paired(limit, own)}
                yield row({**where, "kernel": Blockscale.name}, own, **measured)

    def summary(self, rows: Sequence[dict[str, Any]]) -> list[Grid]:
        """Slopes of each axis, and the steps that are steeper than the roofline."""
        cells = []
        for axis in AXES:
            for threads in sorted({one["threads"] for one in rows if one["shape"] == axis}):
                points = points_of(rows, axis, threads)
                (first, t0, r0), (last, t1, r1) = points[0], points[-1]
                span = math.log(last / first)
                steep = [f"{a:g} to {b:g} ({own:.2f}, {limit:.2f})" for a, b, own, limit in steep_steps(points)]
                slopes = [f"{math.log(t1 / t0) / span:.2f}", f"{math.log(r1 / r0) / span:.2f}"]
                cells.append([axis, str(threads), *slopes, ", ".join(steep) or "none"])
        headings = ["axis", "threads", "slope", "slope of the roofline", "steeper steps (slope, roofline's)"]
        slopes_grid = Grid(headings, cells, "Slopes of log time over log size, from the first point to the last")
        return [slopes_grid, *_over_threads(rows)]


def _over_threads(rows: Sequence[dict[str, Any]]) -> list[Grid]:
    alone = {one["M"]: one for one in rows if one["shape"] == "over M" and one["threads"] == 1}
    cells = []
    for one in rows:
        if one["shape"] == "over M" and one["threads"] > 1 and one["M"] in alone:
            single = alone[one["M"]]
            gains = [single[field] / one[field] for field in ("real_time", "roofline_us")]
            cells.append([str(one["M"]), str(one["threads"]), *(f"{gain:.2f}" for gain in gains)])
    headings = ["M", "threads", "speed / one thread", "roofline's"]
    return [Grid(headings, cells, "Growth over threads, N = K = 4096")] if cells else []


def points_of(rows: Sequence[dict[str, Any]], axis: str, threads: int) -> list[tuple[float, float, float]]:
    """(size, time in µs, roofline in µs) along an axis of ``AXES``, by size.

    The roofline is the time times its share of the roofline, a median of paired ratios, which is steadier than the
    median of the roofline's own times.
    """
    field = AXES[axis][0]
    chosen = [one for one in rows if (one["shape"], one["threads"]) == (axis, threads)]
    return sorted((one[field], one["real_time"], one["real_time"] * one.get("of_roofline", math.nan)) for one in chosen)


def steep_steps(points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, float, float]]:
    """(from, to, slope, slope of the roofline) of the steps that are steeper than the roofline."""
    found = []
    for (a, t0, r0), (b, t1, r1) in itertools.pairwise(points):
        span = math.log(b / a)
        own, limit = math.log(t1 / t0) / span, math.log(r1 / r0) / span
        if own > limit + _STEEP:
            found.append((a, b, own, limit))
    return found
