"""Layers as engines hand them to a kernel: a module with `weight`, a scale, and whatever else the test sets."""

from __future__ import annotations

import zlib

import torch
from blockscale.kernels import FP8ScaledMMLinearLayerConfig, GroupShape, QuantKey, ScaleDesc
from oracle import BF16, F32, FP8, U8, grid_shape
from torch import nn


def generator(*key) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def codes(N: int, K: int, seed: int = 0) -> torch.Tensor:
    """All finite codes, in random places."""
    drawn = torch.randint(0, 254, (N, K), generator=generator(N, K, seed), dtype=torch.int64)
    return (drawn + (drawn >= 0x7F)).to(U8).view(FP8)


def grid(N: int, K: int, block_size, seed: int = 0) -> torch.Tensor:
    """Powers of two that differ from block to block, so that a misplaced scale shows."""
    shape = grid_shape(N, K, block_size)
    return 2.0 ** torch.randint(-9, -2, shape, generator=generator(*shape, seed)).float()


def make_layer(weight, scales, name="weight_scale_inv", prefix="model.layers.0.mlp.up_proj", **attributes) -> nn.Module:
    layer = nn.Module()
    layer.weight = frozen(weight)
    layer.register_parameter(name, frozen(scales))
    layer.prefix = prefix
    for key, value in attributes.items():
        setattr(layer, key, value)
    return layer


def block_layer(N, K, block_size=(128, 128), seed=0, **attributes) -> nn.Module:
    return make_layer(codes(N, K, seed), grid(N, K, block_size, seed), **attributes)


def config(
    group=(128, 128),
    shape=None,
    activation: tuple[int, int] | None = None,
    *,
    x=BF16,
    out=BF16,
    scale=F32,
    static=False,
    dtype=FP8,
    activation_scale=F32,
    platform=None,
) -> FP8ScaledMMLinearLayerConfig:
    weight_key = QuantKey(dtype, ScaleDesc(scale, True, GroupShape(*group)))
    key = None
    if activation is not None:
        key = QuantKey(FP8, ScaleDesc(activation_scale, static, GroupShape(*activation)))
    return FP8ScaledMMLinearLayerConfig(weight_key, key, shape, x, out, platform)
