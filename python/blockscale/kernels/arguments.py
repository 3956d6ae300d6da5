"""Arguments of a choice of kernel, checked by type.

What a configuration holds is read by :mod:`blockscale.kernels.fields`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..checks import refuse
from .fields import LARGEST_SIDE, shown

__all__ = ["check_layer_name", "check_route_arguments", "check_shards", "check_torch_dtype", "read_shape"]


def read_shape(where: str, field: str, value: Any) -> tuple[int, int] | None:
    """The shape of a weight as an argument: a pair of integers, or None."""
    if value is None:
        return None
    try:
        N, K = (operator.index(side) for side in value if not isinstance(side, bool))
    except (TypeError, ValueError):
        refuse(where, f"`{field}` (N, K) or None", shown(value))
    if not (0 <= N <= LARGEST_SIDE and 0 <= K <= LARGEST_SIDE):
        refuse(where, f"`{field}` (N, K) of sides from 0 to 2^63 - 1", shown(value))
    return N, K


def check_torch_dtype(where: str, field: str, value: object) -> None:
    """The argument ``field`` is a torch.dtype."""
    if not isinstance(value, torch.dtype):
        refuse(where, f"`{field}` to be a torch.dtype", shown(value))


def check_layer_name(where: str, name: object) -> None:
    """The name of a layer is a text."""
    if not isinstance(name, str) or not name:
        refuse(where, "`layer_name` to be the name of a layer", shown(name) or "an empty text")


def check_shards(where: str, fused: Mapping[str, Sequence[str]] | None) -> None:
    """``fused_shards`` maps last parts of names to lists of them."""
    if fused is None:
        return
    words = "`fused_shards` to map the last part of a fused layer's name to those of its shards"
    if not isinstance(fused, Mapping):
        refuse(where, words, shown(fused))
    for last, shards in fused.items():
        listed = isinstance(shards, (list, tuple)) and all(isinstance(shard, str) and shard for shard in shards)
        if not isinstance(last, str) or not listed:
            refuse(where, words, shown({last: shards}))


def check_route_arguments(
    layer_name: str,
    input_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    weight_dtype: torch.dtype | None,
    scale_dtype: torch.dtype,
    fused_shards: Mapping[str, Sequence[str]] | None,
) -> None:
    """What :func:`route` checks itself; platform, backend, capability and classes are the choice's."""
    check_layer_name("route", layer_name)
    where = f"layer `{layer_name}`"
    check_torch_dtype(where, "input_dtype", input_dtype)
    check_torch_dtype(where, "scale_dtype", scale_dtype)
    for field, dtype in (("out_dtype", out_dtype), ("weight_dtype", weight_dtype)):
        if dtype is not None:
            check_torch_dtype(where, field, dtype)
    check_shards(where, fused_shards)
