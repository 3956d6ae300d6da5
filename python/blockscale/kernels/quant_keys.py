"""How a tensor is quantised, as engines describe it, and the quantiser of activations.

A key says the codes' dtype and, of the scales, the stored dtype, whether they are static and how many rows and columns
share one. Kernels accept or refuse a layer by its keys alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..checks import dtype_name, refuse
from ..ops import has_op
from .arguments import check_torch_dtype
from .fields import LARGEST_SIDE, is_integer, shown

__all__ = ["GroupShape", "QuantFP8", "QuantKey", "ScaleDesc", "quantize_groups"]

FP8_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: x / scale then never overflows


class _Sides(NamedTuple):
    row: int
    col: int


class GroupShape(_Sides):
    """Rows and columns that share one scale; -1 stands for the whole side.

    ========================  ====================================================
    ``(-1, -1)``              one scale for the tensor
    ``(-1, 1)``, ``(1, -1)``  one per output channel of a weight; one per token of an activation
    ``(1, n)``                one per row and n neighbours
    ``(m, n)``                one per block
    ========================  ====================================================

    >>> GroupShape(128, 128).is_block(), GroupShape.PER_TENSOR.is_block()
    (True, False)
    """

    __slots__ = ()

    PER_TENSOR: ClassVar[GroupShape]
    PER_TOKEN: ClassVar[GroupShape]
    PER_CHANNEL: ClassVar[GroupShape]

    def is_per_tensor(self) -> bool:
        return self == (-1, -1)

    def is_per_token(self) -> bool:
        return self == (1, -1)

    def is_per_channel(self) -> bool:
        return self in ((-1, 1), (1, -1))

    def is_per_group(self) -> bool:
        return self.row == 1 and self.col > 0

    def is_block(self) -> bool:
        return self.row > 0 and self.col > 0

    def __str__(self) -> str:
        if self.is_block():
            return f"{self.row} x {self.col}"
        return "per tensor" if self.is_per_tensor() else "per row"


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


@dataclass(frozen=True)
class ScaleDesc:
    """Scales: their stored dtype, whether they are fixed at load (``static``), and who shares one."""

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape

    def __post_init__(self) -> None:
        check_torch_dtype("ScaleDesc", "dtype", self.dtype)
        sides = self.group_shape
        pair = isinstance(sides, tuple) and len(sides) == 2
        if not pair or not all(is_integer(side) and (side == -1 or 0 < side <= LARGEST_SIDE) for side in sides):
            refuse("ScaleDesc", "`group_shape` of two sides, each positive or -1 for the whole side", shown(sides))


@dataclass(frozen=True)
class QuantKey:
    """Codes of ``dtype`` with ``scale``; without zero points where ``symmetric``."""

    dtype: torch.dtype
    scale: ScaleDesc
    symmetric: bool = True

    def __post_init__(self) -> None:
        check_torch_dtype("QuantKey", "dtype", self.dtype)
        if not isinstance(self.scale, ScaleDesc):
            refuse("QuantKey", "`scale` to be a ScaleDesc", shown(self.scale))

    def __str__(self) -> str:
        kind = "static" if self.scale.static else "dynamic"
        return f"{dtype_name(self.dtype)} {kind} {self.scale.group_shape}, {dtype_name(self.scale.dtype)} scales"


def quantize_groups(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    column_major_scales: bool = False,
    use_ue8m0: bool = False,
    amax_limit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What :func:`blockscale.per_token_group_quant_fp8` computes, in torch's own ops: any device, no host sync.

    Args:
        x: ``[M, K]``.
        amax_limit: upper bound of amax (a scalar tensor), as fbgemm checkpoints have one; larger values saturate.

    >>> codes, scales = quantize_groups(torch.tensor([[448.0, 1.0, 896.0]]), 2)
    >>> codes.float().tolist(), scales.tolist()
    ([[448.0, 1.0, 448.0]], [[1.0, 2.0]])
    """
    M, K = x.shape
    groups = (K + group_size - 1) // group_size
    padded = torch.nn.functional.pad(x.float(), (0, groups * group_size - K)).reshape(M, groups, group_size)
    magnitude = padded.abs()
    amax = torch.where(magnitude.isnan(), 0.0, magnitude).amax(-1) if K else x.new_zeros((M, 0), dtype=torch.float32)
    if amax_limit is not None:
        amax = torch.minimum(amax, amax_limit)
    # The divisor is a tensor: for a Python number some devices multiply by its reciprocal, one bit off.
    largest = torch.full_like(amax, FP8_MAX)
    scales = (amax.clamp(min=eps) / largest).clamp(min=SMALLEST_SCALE)
    if use_ue8m0:
        mantissa, exponent = torch.frexp(scales)
        power = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).to(exponent.dtype))
        scales = torch.where(scales.isinf(), scales, power)
    # Clamped before the cast: what a cast makes of values above 448 changed between torch versions.
    codes = (padded / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    codes = codes.view(torch.uint8).reshape(M, groups * group_size)[:, :K].contiguous().view(torch.float8_e4m3fn)
    return codes, scales.t().contiguous().t() if column_major_scales else scales


class QuantFP8:
    """Quantises activations ``[M, K]``: ``quant(x, scale=None, scale_ub=None) -> (codes, scales)``.

    Args:
        static: use the ``scale`` given at the call (one for the tensor) instead of measuring.
        group_shape: ``(1, group)``, ``PER_TOKEN``, or ``PER_TENSOR``.
        num_token_padding: pad M to a multiple of this with rows of zeros; codes and scales keep the padding.
        column_major_scales: scales with strides ``(1, M)``.
        use_ue8m0: scales rounded up to a power of two.
        eps: least amax.

    >>> codes, scales = QuantFP8(static=False, group_shape=GroupShape(1, 2), num_token_padding=4)(torch.ones(1, 4))
    >>> codes.shape, scales.shape
    (torch.Size([4, 4]), torch.Size([4, 2]))
    """

    def __init__(
        self,
        static: bool,
        group_shape: GroupShape,
        num_token_padding: int | None = None,
        column_major_scales: bool = False,
        use_ue8m0: bool = False,
        eps: float = 1e-10,
    ) -> None:
        group_shape = GroupShape(*group_shape)
        if not (group_shape.is_per_tensor() or group_shape.is_per_token() or group_shape.is_per_group()):
            refuse("QuantFP8", "`group_shape` (1, group), (1, -1) or (-1, -1)", tuple(group_shape))
        if static and not group_shape.is_per_tensor():
            refuse("QuantFP8", "`group_shape` (-1, -1) with static=True", tuple(group_shape))
        self.static = static
        self.group_shape = group_shape
        self.num_token_padding = num_token_padding
        self.column_major_scales = column_major_scales
        self.use_ue8m0 = use_ue8m0
        self.eps = eps

    def __call__(self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if x.dim() != 2:
            refuse("QuantFP8", "`x` of shape [M, K]", list(x.shape))
        x = self._pad_tokens(x)
        if self.static:
            if scale is None:
                refuse("QuantFP8", "`scale` with static=True", "none")
            codes = (x.float() / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
            return codes, scale.float()
        M, K = x.shape
        if self.group_shape.is_per_tensor():
            codes, scales = self._groups(x.reshape(1, M * K), max(M * K, 1), scale_ub)
            return codes.reshape(M, K), scales.reshape(-1)
        return self._groups(x, self.group_shape.col if self.group_shape.col > 0 else max(K, 1), scale_ub)

    def _groups(self, x: Tensor, group: int, limit: Tensor | None) -> tuple[Tensor, Tensor]:
        if limit is None and x.device.type in ("cpu", "meta") and has_op("per_token_group_quant_fp8"):
            op = torch.ops.blockscale.per_token_group_quant_fp8.default
            return op(x, group, self.eps, self.column_major_scales, self.use_ue8m0)
        return quantize_groups(x, group, self.eps, self.column_major_scales, self.use_ue8m0, limit)

    def _pad_tokens(self, x: Tensor) -> Tensor:
        if self.num_token_padding is None:
            return x
        missing = -x.shape[0] % self.num_token_padding
        # Under compilation always padded, by none as it may be: a branch on a symbolic M would fix M.
        return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing or torch.compiler.is_compiling() else x
