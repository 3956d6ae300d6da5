"""A layer for the tests of BlockScaledLinear: ragged sides, and rows of very different size."""

from __future__ import annotations

import torch
from blockscale import BlockScaledLinear
from torch import nn

BLOCKS = [(128, 128), (64, 128), (32, 32), (3, 5), (1, 193), (48, 193)]
N, K = 48, 193


def make(block_size=(128, 128), bias=True, seed=0) -> BlockScaledLinear:
    """A quantised layer of sides N, K."""
    torch.manual_seed(seed)
    linear = nn.Linear(K, N, bias)
    # Rows of very different size: a misplaced scale shows.
    linear.weight.data *= 2.0 ** (torch.arange(N)[:, None] % 11 - 5)
    return BlockScaledLinear.from_float(linear, block_size)
