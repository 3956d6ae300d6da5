"""Times products out = x · weightᵀ of all peers on one weight, beside the limits that bound them.

The roofline of a product is the longer of two times: that of reading the packed weight and its scales from memory, and
that of its multiplications at the peak of the instruction that the active instruction set uses for this x. Both limits
are timed in the same rounds, and every share is a median of paired ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import ops
from . import roofline
from .inputs import Weight, WrongResult, activations, check_result
from .measure import Samples, interleave, paired
from .peers import Loaded, Peer
from .peers.own import Blockscale
from .peers.torch_linear import TorchBf16
from .rows import identity, row
from .settings import X_TYPES, Session

__all__ = ["PEAK", "READ", "Products"]

READ, PEAK = "dram read", "peak"  # the limits among the candidates
_PEAK_SECONDS = 2e-3  # waking the threads and the units is then below 1 %


class Products:
    """All peers with one weight loaded, for one dtype of x.

    Args:
        session: where refusals of wrong results are noted.
        weight: from :func:`blockscale.bench.inputs.make_weight`.
        x: one of ``X_TYPES``.
        peers: those that refuse the weight or x are left out.
        table, shape: for the rows.
    """

    def __init__(
        self, session: Session, weight: Weight, x: str, peers: Sequence[Peer], table: str, shape: object
    ) -> None:
        self.session, self.weight, self.x = session, weight, X_TYPES[x]
        self.peers = [peer for peer in peers if not peer.refusal(weight, self.x, 1)]
        self.loaded: dict[str, Loaded] = {peer.name: peer.load(weight, self.x) for peer in self.peers}
        copies = weight.copies()
        self.read_from = [ops.convert_weight_packed(weight.codes) for _ in range(copies)]
        self.table, self.shape, self.x_name = table, shape, x
        self.block = "x".join(map(str, weight.block_size))

    def time(self, M: int, threads: int) -> Iterator[dict[str, Any]]:
        """A row for each peer whose result is right; the first is the library's.

        Raises:
            WrongResult: the library computes something else. A peer that does is noted and not timed.
        """
        settings = self.session.settings
        torch.set_num_threads(threads)
        x = activations(self.weight, M, self.x)
        candidates: dict[str, Callable[[int], Any]] = {}
        for peer in self.peers:
            if peer.refusal(self.weight, self.x, M):
                continue
            call = self._call(self.loaded[peer.name], x)
            try:
                check_result(peer.name, call, self.weight, M)
            except WrongResult as error:
                if peer.name == Blockscale.name:
                    raise
                self.session.refused.append(str(error).removeprefix("bench: "))
                continue
            candidates[peer.name] = call
        candidates[READ] = lambda i: roofline.read(self.read_from[i % len(self.read_from)])
        peak, peak_flops = roofline.peak_name(self.x), 0
        if peak:
            rate = roofline.rate(peak)
            peak_flops = roofline.multiply(peak, rate * _PEAK_SECONDS)
            candidates[PEAK] = lambda i: roofline.multiply(peak, rate * _PEAK_SECONDS)
        samples = interleave(candidates, settings.rounds, seconds=settings.seconds)
        for peer in self.peers:
            if peer.name in samples:
                yield self._row(peer, M, threads, samples, peak_flops)

    @staticmethod
    def _call(loaded: Loaded, x: torch.Tensor) -> Callable[[int], torch.Tensor]:
        return lambda i: loaded.call(x, i % loaded.copies)

    def _row(self, peer: Peer, M: int, threads: int, samples: dict[str, Samples], peak_flops: int) -> dict[str, Any]:
        own, (N, K) = samples[peer.name], (self.weight.N, self.weight.K)
        flops = 2 * M * N * K
        read_share = 1 + self.weight.scales.numel() * 4 / (N * K)
        memory = [seconds * read_share for seconds in samples[READ].seconds]
        measured: dict[str, float] = {
            "gflops": flops / own.median / 1e9,
            "gbps": N * K * peer.bytes_per_weight / own.median / 1e9,
            "of_dram_read": paired(samples[READ], own),
        }
        if peak_flops:
            compute = [seconds * flops / peak_flops for seconds in samples[PEAK].seconds]
            limit = Samples(list(map(max, memory, compute)))
            measured["of_peak"] = paired(Samples(compute), own)
            measured["of_roofline"] = paired(limit, own)
            measured["roofline_us"] = limit.median * 1e6
        if TorchBf16.name in samples:
            measured["speedup_torch_bf16"] = paired(samples[TorchBf16.name], own)
        if peer.name != Blockscale.name:
            measured["blockscale_speedup"] = paired(own, samples[Blockscale.name])
        where = identity(self.table, self.shape, M, N, K, threads, x=self.x_name, block=self.block)
        return row({**where, "kernel": peer.name}, own, **measured)
