"""Argument checks, in the words and the order of csrc/ops.cpp.

The compiled ops check their own arguments; these serve the fakes, which see shapes, dtypes and devices but no data, and
the Python classes. Sizes may be symbolic: they are compared for equality and divided, never used to choose a result.

Every refusal is a ValueError of the form ``<where>: expected <requirement>, got <what came>``; ``where`` is
``blockscale::<op>`` for an op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import NoReturn

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")


def scale_grid(shape: Sequence[int], block_size: Sequence[int]) -> list[int]:
    """Shape of the scales of a weight of ``shape``: ``[..., ceil(N/block_n), ceil(K/block_k)]``."""
    (N, K), (block_n, block_k) = shape[-2:], block_size
    return [*shape[:-2], (N + block_n - 1) // block_n, (K + block_k - 1) // block_k]


def refuse(where: str, requirement: str, got: object) -> NoReturn:
    """Raise the ValueError of a wrong argument."""
    raise ValueError(f"{where}: expected {requirement}, got {got}")


def check_devices(where: str, **tensors: Tensor | None) -> None:
    """All tensors lie on the device of the first."""
    (first_name, first), *others = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    for name, tensor in others:
        if tensor.device != first.device:
            got = f"`{first_name}` on {first.device} and `{name}` on {tensor.device}"
            refuse(where, "all tensors on one device", got)


def check_dtype(where: str, name: str, dtype: torch.dtype, allowed: Sequence[torch.dtype], words: str) -> None:
    """The argument ``name`` has one of the dtypes that ``words`` describe."""
    if dtype not in allowed:
        refuse(where, f"`{name}` of dtype {words}", dtype_name(dtype))


def check_float_dtype(where: str, name: str, dtype: torch.dtype) -> None:
    """The argument ``name`` is a float tensor that the kernels read."""
    check_dtype(where, name, dtype, FLOAT_DTYPES, "bfloat16, float16 or float32")


def check_scale_dtype(where: str, name: str, dtype: torch.dtype) -> None:
    """The argument ``name`` can hold scales."""
    check_dtype(where, name, dtype, SCALE_DTYPES, "float32, bfloat16, float8_e8m0fnu or uint8 (e8m0 codes)")


def check_out_dtype(where: str, out_dtype: torch.dtype) -> None:
    """The result is a float tensor that the kernels write."""
    if out_dtype not in FLOAT_DTYPES:
        refuse(where, "`out_dtype` bfloat16, float16 or float32", dtype_name(out_dtype))


def check_matrices(where: str, name: str, tensor: Tensor) -> None:
    """The argument ``name`` is one matrix [N, K] or a stack [E, N, K]."""
    if tensor.dim() not in (2, 3):
        refuse(where, f"`{name}` of shape [N, K] or [E, N, K]", list(tensor.shape))


def check_packed_strides(where: str, name: str, packed: Tensor) -> None:
    """Packed bytes have no meaning once they are strided."""
    if not packed.is_contiguous():
        words = f"`{name}` to be contiguous, as convert_weight_packed returns it"
        refuse(where, words, f"strides {list(packed.stride())}")


def check_weight(where: str, name: str, weight: Tensor, is_vnni: bool) -> None:
    """The argument ``name`` is a packed weight, or with ``is_vnni=False`` a plain one."""
    if is_vnni:
        words = "uint8 (from convert_weight_packed) with is_vnni=True"
        check_dtype(where, name, weight.dtype, (torch.uint8,), words)
    else:
        check_dtype(where, name, weight.dtype, (torch.float8_e4m3fn,), "float8_e4m3fn with is_vnni=False")
    if weight.dim() != 2:
        refuse(where, f"`{name}` of shape [N, K]", list(weight.shape))
    if is_vnni:
        check_packed_strides(where, name, weight)


def check_block_size(where: str, block_size: Sequence[int]) -> tuple[int, int]:
    """``block_size`` is a positive pair, of Python's integers or NumPy's; returned as Python's."""
    given = list(block_size) if isinstance(block_size, Iterable) else [block_size]
    sizes = [int(size) if isinstance(size, Integral) and not isinstance(size, bool) else size for size in given]
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        refuse(where, "`block_size` of two positive integers [block_n, block_k]", sizes)
    if max(sizes) >= 2**63:  # the ops take int64
        refuse(where, "`block_size` of integers below 2**63", sizes)
    return sizes[0], sizes[1]


def check_scales(where: str, name: str, scales: Tensor, weight: Tensor, block_size: Sequence[int]) -> None:
    """``scales`` hold one multiplier for each block of ``weight``."""
    check_scale_dtype(where, name, scales.dtype)
    grid = scale_grid(weight.shape, block_size)
    if list(scales.shape) != grid:
        formula = f"[{'E, ' if len(grid) == 3 else ''}ceil(N/block_n), ceil(K/block_k)]"
        refuse(where, f"`{name}` of shape {formula} = {grid}", list(scales.shape))


def check_bias(where: str, bias: Tensor | None, N: int) -> None:
    """``bias`` is None or one number per output column."""
    if bias is not None:
        check_dtype(where, "bias", bias.dtype, FLOAT_DTYPES, "float32, bfloat16 or float16")
        if list(bias.shape) != [N]:
            refuse(where, f"`bias` of shape [N] = [{N}]", list(bias.shape))
