"""Scale grids of layers that end, or are cut, inside a block: one scale per row while loading, a grid again afterwards.

A tensor-parallel rank, or a layer fused of several, takes rows (and columns) of a weight from the middle of a block.
Written out per row, scales can be cut and put together exactly as the rows of the weight are; equal neighbours then
make the coarsest grid that says the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import check_scale_dtype, refuse, scale_grid

__all__ = ["check_grid", "coarsest_grid", "column_step", "is_cut", "per_row"]


def is_cut(widths: list[int], rows: int, columns: int, whole: tuple[int, int], block_size: tuple[int, int]) -> bool:
    """Whether a layer's part of a weight begins or ends inside a block of it.

    Args:
        widths: rows of each shard of the part; ``rows`` is their sum.
        rows, columns: of the part.
        whole: rows and columns of the weight; what differs from the part is shared out over ranks.
        block_size: of the scales.

    >>> is_cut([576, 192, 192], 960, 576, (960, 576), (128, 128))        # q | k | v, whole: k starts at row 576
    True
    >>> is_cut([576], 576, 192, (576, 192), (128, 128)), is_cut([256, 100], 356, 64, (356, 64), (128, 128))
    (False, False)
    >>> is_cut([288], 288, 576, (576, 576), (128, 128)), is_cut([576], 576, 288, (576, 576), (128, 128))
    (True, True)
    """
    block_n, block_k = block_size
    inner = widths if rows != whole[0] else widths[:-1]
    return any(width % block_n for width in inner) or (columns != whole[1] and columns % block_k != 0)


def column_step(columns: int, whole_columns: int, block_k: int) -> int:
    """Columns that share a scale in a rank's part of a weight: block_k, or less where ranks are cut inside a block.

    >>> column_step(576, 576, 128), column_step(288, 576, 128)
    (128, 32)
    """
    return block_k if columns == whole_columns else math.gcd(block_k, columns)


def check_grid(
    where: str, name: str, scales: Tensor, rows: int | None, columns: int, block_size: tuple[int, int]
) -> None:
    """``scales`` are the block scales of a whole weight as a checkpoint stores it.

    Args:
        where, name: for the error: which layer, which tensor.
        scales: ``[ceil(rows/block_n), ceil(columns/block_k)]``, float32, bfloat16 or e8m0 (or its codes in uint8).
        rows: of the weight, or None where they are not known.
        columns: of the weight.
        block_size: ``(block_n, block_k)``.

    Raises:
        ValueError: the scales have another dtype or shape.
    """
    check_scale_dtype(where, name, scales.dtype)
    if rows is None and scales.dim() == 2:
        rows = scales.shape[0] * block_size[0]
    grid = scale_grid((rows or 0, columns), block_size)
    if list(scales.shape) != grid:
        words = f"`{name}` of shape [ceil(N/block_n), ceil(K/block_k)] = {grid} for N = {rows}, K = {columns}"
        refuse(where, f"{words}, blocks of {block_size[0]} x {block_size[1]}", list(scales.shape))


def per_row(scales: Tensor, rows: int | None, columns: int, block_size: tuple[int, int], step: int) -> Tensor:
    """Block scales written out: one row per row of the weight, one column per ``step`` columns.

    Args:
        scales, rows, columns, block_size: as :func:`check_grid` wants them; with ``rows`` None all blocks are whole.
        step: divides block_k.

    Returns:
        float32 ``[rows, ceil(columns/step)]``.

    >>> per_row(torch.tensor([[1.0], [2.0]]), 3, 4, (2, 4), 2)
    tensor([[1., 1.],
            [1., 1.],
            [2., 2.]])
    """
    block_n, block_k = block_size
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    written_out = scales.float().repeat_interleave(block_n, 0)[:rows]
    return written_out.repeat_interleave(block_k // step, 1)[:, : (columns + step - 1) // step].contiguous()


def coarsest_grid(scales: Tensor, block_n: int) -> tuple[Tensor, int]:
    """One scale per row as a grid again, and its block_n: the largest divisor of ``block_n`` that says the same.

    >>> coarsest_grid(torch.tensor([[1.0], [1.0], [1.0], [2.0]]), 4)
    (tensor([[1.],
            [1.],
            [1.],
            [2.]]), 1)
    >>> coarsest_grid(torch.tensor([[1.0], [1.0], [1.0], [1.0], [2.0]]), 4)[1]
    4
    """
    for divisor in range(block_n, 0, -1):
        if block_n % divisor == 0:
            grid = scales[::divisor].contiguous()
            if divisor == 1 or torch.equal(grid.repeat_interleave(divisor, 0)[: scales.shape[0]], scales):
                return grid, divisor
    raise AssertionError("1 divides every block_n")
