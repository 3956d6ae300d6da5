"""The kernels that multiply in fp32, each instruction set in a process of its own, for every dtype of x."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .. import roofline
from ..peers.own import Blockscale
from ..peers.torch_linear import TorchFp32
from ..products import Products
from ..settings import Session
from ..shapes import find_shapes
from .base import Table, Verdict

__all__ = ["Fp32"]

# Required of each instruction set: GB/s of weight at M = 1 on a machine that reads 30 GB/s, in proportion below that;
# and the share of the FMA peak by M.
_GBPS = {"avx512_vbmi": 22.0, "avx512": 17.0, "avx2": 14.0}
_READ_OF_THE_REQUIREMENT = 30.0
_OF_PEAK = {
    "avx512_vbmi": {8: 0.92, 16: 0.92, 64: 0.92, 512: 0.92},
    "avx512": {8: 0.85, 16: 0.85, 64: 0.85, 512: 0.90},
    "avx2": {8: 0.72, 16: 0.72, 64: 0.83, 512: 0.87},
}


class Fp32(Table):
    name = "fp32"
    title = "The fp32 kernels, by instruction set and dtype of x"
    isas = ("avx512_vbmi", "avx512", "avx2")

    def measure(self, session: Session) -> Iterator[dict[str, Any]]:
        peers = session.only(Blockscale.name, TorchFp32.name)
        for shape in session.shapes(find_shapes("6144x4096")):
            weight = session.weight(shape)
            for x in session.x_types(("fp32", "fp16", "bf16")):
                products = Products(session, weight, x, peers, self.name, shape)
                for threads in session.threads((1,)):
                    roofline.warm_up(threads)
                    for M in session.rows([1, 8, 16, 64, 512]):
                        yield from products.time(M, threads)

    def verdicts(self, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
        found = []
        for row in rows:
            if row["kernel"] != Blockscale.name or row["threads"] != 1 or row["isa"] not in _OF_PEAK:
                continue
            where = f"{row['isa']}, {row['x']} x, M = {row['M']}"
            if row["M"] == 1:
                read = row["gbps"] / row["of_dram_read"]
                wanted = _GBPS[row["isa"]] * min(1.0, read / _READ_OF_THE_REQUIREMENT)
                found.append(Verdict(f"{where}: GB/s", f"{wanted:.1f}", f"{row['gbps']:.1f}", row["gbps"] >= wanted))
            share = _OF_PEAK[row["isa"]].get(row["M"])
            if share and "of_peak" in row:
                got = row["of_peak"]
                found.append(Verdict(f"{where}: share of the FMA peak", f"{share:.2f}", f"{got:.2f}", got >= share))
        return found
