"""What every peer is: found or missing, named with its version, and loaded with one weight at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..inputs import Weight

__all__ = ["Loaded", "Peer", "PeerMissing"]


class PeerMissing(Exception):
    """A peer is not on this machine; the message says how to get it."""


@dataclass
class Loaded:
    """A peer that holds ``copies`` of one weight: ``call(x, copy)`` is the product, (M, N)."""

    copies: int
    call: Callable[[Tensor, int], Tensor]


class Peer(ABC):
    """Something that multiplies by a weight.

    Args:
        path: the file that the user named, or None to look in the usual places.

    Raises:
        PeerMissing: it is not there.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # what is timed, in a few words
    bytes_per_weight: ClassVar[float]  # that one call reads

    def __init__(self, path: str | None = None) -> None:
        self.path = path

    @property
    def version(self) -> str:
        return ""

    def refusal(self, weight: Weight, x: torch.dtype, M: int) -> str:
        """Why it can't take this product; empty if it can."""
        return ""

    @abstractmethod
    def load(self, weight: Weight, x: torch.dtype) -> Loaded: ...
