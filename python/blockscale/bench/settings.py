"""What a run of the suite was asked for, and what one process needs to serve it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .inputs import Weight, make_weight
from .peers import Peer, find_peers
from .shapes import Shape, find_shapes

__all__ = ["X_TYPES", "Session", "Settings"]

X_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Settings:
    """The command line. Plain values, so that a child process gets them as JSON; an empty list leaves the choice to
    the table."""

    peers: list[str] = field(default_factory=list)  # NAME or NAME=PATH
    shapes: list[str] = field(default_factory=list)  # what find_shapes takes
    M: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    x: list[str] = field(default_factory=list)  # of X_TYPES
    blocks: list[list[int]] = field(default_factory=list)
    rounds: int = 15
    seconds: float = 1.0  # for the rounds of one group of candidates; three rounds are done in any case
    quick: bool = False  # tiny sizes, to see that everything works


class Session:
    """One process at work: its settings, the peers that are there, and those that computed something else."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.peers, self.missing = find_peers(settings.peers)
        self.refused: list[str] = []
        self._cpus = len(os.sched_getaffinity(0))

    def shapes(self, default: Sequence[Shape]) -> list[Shape]:
        if self.settings.shapes:
            return [shape for name in self.settings.shapes for shape in find_shapes(name)]
        return find_shapes("80x256") if self.settings.quick else list(default)

    def rows(self, default: Sequence[int]) -> list[int]:
        """Values of M."""
        return self.settings.M or ([1, 3] if self.settings.quick else list(default))

    def threads(self, default: Sequence[int] = (1, 2)) -> list[int]:
        """Numbers of threads; of the default those for which there are CPUs."""
        return self.settings.threads or [count for count in default if count <= self._cpus]

    def x_types(self, default: Sequence[str] = ("bf16",)) -> list[str]:
        return self.settings.x or list(default)

    def blocks(self, default: Sequence[tuple[int, int]] = ((128, 128),)) -> list[tuple[int, int]]:
        return [(n, k) for n, k in self.settings.blocks] or list(default)

    def weight(self, shape: Shape, block_size: tuple[int, int] = (128, 128)) -> Weight:
        rotated = {"rotated_bytes": 1 << 16} if self.settings.quick else {}
        return make_weight(shape.N, shape.K, block_size, **rotated)

    def only(self, *names: str) -> list[Peer]:
        """The peers that are there, of these names."""
        return [peer for peer in self.peers if peer.name in names]
