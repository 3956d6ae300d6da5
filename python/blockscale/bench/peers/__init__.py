"""The peers, each of which may be missing: found on this machine, or named with a path.

A new peer is a class in a file of its own here and a row in ``PEERS``.
"""

from __future__ import annotations

from collections.abc import Iterable

from .base import Loaded, Peer, PeerMissing
from .llama_cpp import LlamaCpp
from .onednn import OneDnn, OneDnnInt8
from .own import Blockscale, Yardstick
from .torch_linear import DequantiseLinear, TorchBf16, TorchFp32, TorchPrepacked
from .vllm_cpu import VllmCpu
from .zentorch import Zentorch

__all__ = ["PEERS", "Loaded", "Peer", "PeerMissing", "find_peers"]

PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        Blockscale,
        Yardstick,
        TorchBf16,
        TorchPrepacked,
        VllmCpu,
        OneDnn,
        OneDnnInt8,
        Zentorch,
        LlamaCpp,
        TorchFp32,
        DequantiseLinear,
    )
}


def find_peers(names: Iterable[str]) -> tuple[list[Peer], list[str]]:
    """The peers of these names (``NAME`` or ``NAME=PATH``) that are there, and a sentence for each that is not.

    The library itself comes first whether it is named or not.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = dict.fromkeys([Blockscale.name])
    for name in names:
        name, _, path = name.partition("=")
        if name not in PEERS:
            raise ValueError(f"bench: expected `--peers` to be of {', '.join(PEERS)}, got {name}")
        wanted[name] = path or None
    found, missing = [], []
    for name, path in wanted.items():
        try:
            found.append(PEERS[name](path))
        except PeerMissing as error:
            missing.append(str(error))
    return found, missing
