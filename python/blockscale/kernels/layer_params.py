"""A layer's weight and scales, as loaders leave them: found, checked, widened and brought to one grid.

Whatever the checkpoint calls the scale and however it shapes it, a kernel gets float8_e4m3fn codes ``[N, K]`` and a
float32 grid ``[ceil(N/block_n), ceil(K/block_k)]`` of multipliers. Shards that were quantised apart and fused into one
weight keep their own scales: where a shard's border cuts a block, rows of scales are repeated at a finer block_n.

Every refusal names layer and field, what was expected and what was found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks import check_scale_dtype, dtype_name, refuse, scale_grid
from .fields import is_integer, parse_block_size
from .quant_keys import GroupShape

__all__ = [
    "INPUT_SCALE",
    "PREPARED",
    "SCALE_NAMES",
    "WEIGHT",
    "WEIGHT_SCALE",
    "WEIGHT_SCALE_INV",
    "Loaded",
    "fuse_shard_scales",
    "layer_label",
    "prepared",
    "read_layer",
    "replace_parameter",
    "scale_name_of",
]

# Names under which layers hold their tensors. The scale multiplies under any of its names.
WEIGHT = "weight"
WEIGHT_SCALE = "weight_scale"
WEIGHT_SCALE_INV = "weight_scale_inv"
INPUT_SCALE = "input_scale"
PREPARED = "_blockscale_prepared"  # set on a weight parameter that a kernel has brought into its form
_CHECKED_AT_ONCE = 1 << 20  # codes
_LOADER_PROPERTIES = ("weight_loader", "input_dim", "output_dim")
SCALE_NAMES = (WEIGHT_SCALE_INV, WEIGHT_SCALE, "scale")


class Loaded(NamedTuple):
    """A checked layer: codes ``[N, K]``, float32 scale grid, its block size, and the scale's name on the layer."""

    weight: Tensor
    scales: Tensor
    block_size: tuple[int, int]
    scale_name: str


def replace_parameter(layer: nn.Module, name: str, tensor: Tensor) -> None:
    """Put ``tensor`` in the place of ``layer.<name>`` as a frozen ``nn.Parameter``.

    Attributes that a loader has hung on the old parameter (``weight_loader`` and the like) move to the new one, so that
    the layer can be loaded again.

    >>> layer = nn.Linear(2, 2)
    >>> layer.weight.weight_loader = len
    >>> replace_parameter(layer, "weight", torch.zeros(2, 2, dtype=torch.uint8))
    >>> layer.weight.dtype, layer.weight.requires_grad, layer.weight.weight_loader is len
    (torch.uint8, False, True)
    """
    old = getattr(layer, name, None)
    new = nn.Parameter(tensor.detach(), requires_grad=False)
    for key, value in getattr(old, "__dict__", {}).items():
        if key != PREPARED:
            setattr(new, key, value)
    for key in _LOADER_PROPERTIES:  # attributes of plain parameters, properties of the engines' own classes
        if hasattr(old, key) and not hasattr(new, key):
            setattr(new, key, getattr(old, key))
    layer._buffers.pop(name, None)
    layer.__dict__.pop(name, None)
    layer._parameters[name] = new


def layer_label(layer: nn.Module) -> str:
    """How errors name ``layer``: by the name that the engine has given it, else by its class."""
    for attribute in ("prefix", "layer_name"):
        name = getattr(layer, attribute, None)
        if isinstance(name, str) and name:
            return f"layer `{name}`"
    return f"layer {type(layer).__name__}"


def scale_name_of(layer: nn.Module) -> str:
    """The name under which ``layer`` holds its weight scales.

    Raises:
        ValueError: it holds none, or two that differ.
    """
    found = [name for name in SCALE_NAMES if isinstance(getattr(layer, name, None), Tensor)]
    if len(found) > 1 and found[-1] == "scale":  # a name that other things have, too
        del found[-1]
    if not found:
        refuse(layer_label(layer), f"scales beside `{WEIGHT}` ({', '.join(SCALE_NAMES)})", "none")
    tensors = [getattr(layer, name) for name in found]
    if any(other.shape != tensors[0].shape or not torch.equal(other, tensors[0]) for other in tensors[1:]):
        refuse(layer_label(layer), "one tensor of scales", " and ".join(f"`{name}`" for name in found))
    return found[0]


def prepared(layer: Any) -> tuple[Tensor, Tensor]:
    """Weight and scales of a layer that its kernel has prepared."""
    # Where replace_parameter has put them: an attribute of a module that is a parameter costs a lookup of 0.4 us.
    parameters = getattr(layer, "_parameters", {})
    weight = parameters.get(WEIGHT)
    for name in SCALE_NAMES if weight is not None else ():
        scales = parameters.get(name)
        if scales is not None:
            return weight, scales
    for name in SCALE_NAMES:
        scales = getattr(layer, name, None)
        if isinstance(scales, Tensor):
            return layer.weight, scales
    refuse(layer_label(layer), f"scales beside `{WEIGHT}`", "none")


def read_layer(layer: nn.Module, group: GroupShape, weight_shape: tuple[int, int] | None) -> Loaded:
    """Weight and scales of a freshly loaded ``layer``.

    Args:
        layer: holds ``weight``, float8_e4m3fn ``[N, K]`` (or ``[K, N]``, as engines keep per-channel and per-tensor
            weights), and a scale under one of ``SCALE_NAMES``. Optional attributes: ``logical_widths``, the rows of
            each fused shard; ``scale_grid_per_shard``, whether the block grid restarts at each shard, needed only where
            the number of scale rows fits both.
        group: of the weight's scales.
        weight_shape: ``(N, K)`` as the engine knows it, or None.

    Raises:
        ValueError: something is missing, has a wrong dtype or shape, or holds scales that the load has not written.
    """
    where = layer_label(layer)
    weight = _codes(where, layer, group, weight_shape)
    name = scale_name_of(layer)
    N, K = weight.shape
    widths = list(getattr(layer, "logical_widths", None) or [N])
    if not all(is_integer(width) and width >= 0 for width in widths) or sum(widths) != N:
        refuse(where, f"`logical_widths` that add up to N = {N}", widths)
    scales, block_size = _grid(
        where, name, getattr(layer, name), (N, K), group, widths, getattr(layer, "scale_grid_per_shard", None)
    )
    _check_written(where, name, weight, scales, block_size)
    return Loaded(weight, scales, block_size, name)


def fuse_shard_scales(
    scales: Sequence[Tensor], widths: Sequence[int], K: int, block_size: Sequence[int]
) -> tuple[Tensor, tuple[int, int]]:
    """Scales of a weight that is the concatenation of shards with scales of their own.

    Args:
        scales: one tensor per shard: a grid ``[ceil(width/block_n), ceil(K/block_k)]``, or one number.
        widths: rows of each shard.
        K: columns.
        block_size: ``(block_n, block_k)`` of the grids.

    Returns:
        float32 grid of the whole and its block size; block_n is the largest that divides the old one and every border
        between shards.

    >>> grids = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]        # 192 rows and 64, blocks of 128
    >>> fuse_shard_scales(grids, [192, 64], 128, (128, 128))
    (tensor([[1.],
            [1.],
            [2.],
            [3.]]), (64, 128))
    """
    where = "fuse_shard_scales"
    block_n, block_k = parse_block_size(where, "block_size", tuple(block_size))
    if not all(is_integer(width) and width >= 0 for width in widths) or len(widths) != len(scales):
        refuse(where, f"`widths` of {len(scales)} shards", list(widths))
    columns = (K + block_k - 1) // block_k
    for shard, width in zip(scales, widths, strict=True):
        grid = scale_grid((width, K), (block_n, block_k))
        if shard.numel() != 1 and list(shard.shape) != grid:
            words = f"scales of a shard of {width} rows to be one number or of shape {grid}"
            refuse(where, words, list(shard.shape))
    starts = [0, *accumulate(widths)]
    fine_n = math.gcd(block_n, *starts[:-1])
    parts = []
    for shard, width in zip(scales, widths, strict=True):
        shard = shard.float()
        if shard.numel() == 1:
            shard = shard.reshape(1, 1).expand((width + block_n - 1) // block_n, columns)
        # The last shard may end inside a fine block, which then starts in it.
        rows = torch.arange(0, width, fine_n, device=shard.device) // block_n
        parts.append(shard.index_select(0, rows))
    return torch.cat(parts).contiguous(), (fine_n, block_k)


def _codes(where: str, layer: nn.Module, group: GroupShape, weight_shape: tuple[int, int] | None) -> Tensor:
    weight = getattr(layer, WEIGHT, None)
    if weight is None:
        refuse(where, f"`{WEIGHT}`", "none")
    weight = weight.detach()
    if weight.dtype != torch.float8_e4m3fn:
        refuse(where, f"`{WEIGHT}` of dtype float8_e4m3fn", dtype_name(weight.dtype))
    if weight.dim() != 2:
        refuse(where, f"`{WEIGHT}` of shape [N, K]", list(weight.shape))
    if weight_shape is None:
        return weight
    N, K = weight_shape
    # Square: a transposed view is not contiguous, a weight from a checkpoint is.
    if tuple(weight.shape) == (N, K) and (N != K or group.is_block() or weight.is_contiguous()):
        return weight
    if tuple(weight.shape) == (K, N) and not group.is_block():
        return weight.t()
    refuse(where, f"`{WEIGHT}` of shape [N, K] = {[N, K]}", list(weight.shape))


def _grid(
    where: str,
    name: str,
    scales: Tensor,
    shape: tuple[int, int],
    group: GroupShape,
    widths: list[int],
    per_shard: bool | None,
) -> tuple[Tensor, tuple[int, int]]:
    scales = scales.detach()
    check_scale_dtype(where, name, scales.dtype)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    scales = scales.float()
    if scales.dim() == 4 and scales.shape[1] == scales.shape[3] == 1:  # modelopt: [rows, 1, columns, 1]
        scales = scales[:, 0, :, 0]
    if group.is_block():
        return _block_grid(where, name, scales, shape, group, widths, per_shard)
    N, K = shape
    if scales.numel() == 1 and scales.dim() <= 2:
        return scales.reshape(1, 1), (max(N, 1), max(K, 1))
    if list(scales.shape) in ([N], [N, 1], [1, N]):
        return scales.reshape(N, 1), (1, max(K, 1))
    # One number per fused shard, not their largest: requantising to a common scale would lose what the small ones hold.
    if scales.numel() == len(widths) and scales.dim() <= 2:
        repeats = torch.tensor(widths, device=scales.device)
        return scales.reshape(-1).repeat_interleave(repeats)[:, None].contiguous(), (1, max(K, 1))
    expected = "[], [1], [N], [N, 1] or [1, N]" + (f", or [{len(widths)}] shards" if len(widths) > 1 else "")
    refuse(where, f"`{name}` of shape {expected} with N = {N}", list(scales.shape))


def _block_grid(
    where: str,
    name: str,
    scales: Tensor,
    shape: tuple[int, int],
    group: GroupShape,
    widths: list[int],
    per_shard: bool | None,
) -> tuple[Tensor, tuple[int, int]]:
    block_size = (group.row, group.col)
    whole = scale_grid(shape, block_size)
    shard_rows = [scale_grid((width, shape[1]), block_size)[0] for width in widths]
    apart = [sum(shard_rows), whole[1]]
    cut = any(start % group.row for start in list(accumulate(widths))[:-1])
    found = list(scales.shape)
    if found not in (whole, apart):
        also = f" (or {apart}, a grid for each of the shards {widths})" if apart != whole else ""
        refuse(where, f"`{name}` of shape [ceil(N/block_n), ceil(K/block_k)] = {whole}{also}", found)
    if not cut:
        return scales.contiguous(), block_size
    if whole == apart and per_shard is None:
        words = f"`scale_grid_per_shard` to say whether the grid restarts at each of the shards {widths}"
        refuse(where, words, f"none, and `{name}` of shape {found} fits both")
    if found == whole and not (whole == apart and per_shard):
        return scales.contiguous(), block_size
    return fuse_shard_scales(scales.split(shard_rows), widths, shape[1], block_size)


def _check_written(where: str, name: str, weight: Tensor, scales: Tensor, block_size: tuple[int, int]) -> None:
    """Engines allocate scales before they load them, with NaN, the most negative float, or zeros inside."""
    if scales.is_meta or scales.numel() == 0:
        return
    wrong = ~(torch.isfinite(scales) & (scales >= 0))
    words = f"`{name}` written by the load"
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        refuse(where, f"{words}, finite and not negative", f"{scales[tuple(at)].item():g} at {at}")
    zero = scales == 0
    if not bool(zero.any()) or not weight.numel():  # zero is right for a block of zeros only
        return
    (N, K), (height, width) = weight.shape, map(min, block_size, weight.shape)  # a block may be far larger than both
    # Some rows at a time: masks of a whole layer's codes would be three copies of it.
    step = max(1, _CHECKED_AT_ONCE // max(K, 1))
    block_columns = torch.arange(K, device=scales.device) // width
    for first in range(0, N, step):
        codes = weight[first : first + step].view(torch.uint8)
        under = zero[torch.arange(first, first + codes.shape[0], device=scales.device) // height]
        if not bool(under.any()):
            continue
        wrong = under[:, block_columns] & ((codes & 0x7F) != 0)
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            refuse(
                where,
                f"{words}, above zero where the weight is not zero",
                f"0 at {[(first + row) // height, column // width]}",
            )
