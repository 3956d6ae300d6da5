"""BlockScaledLinear: a drop-in for nn.Linear whose weight stays in FP8.

In memory the weight is packed for the kernels (uint8). A state dict holds what a checkpoint on disk holds: plain
float8_e4m3fn ``weight``, contiguous float32 ``weight_scale_inv`` (it multiplies, whatever its name says) and ``bias``;
a pickle holds plain codes too. Packed bytes never leave memory, so they can't be taken for plain codes. The price: a
state dict is no view of the layer, so that of a whole model holds all its codes once more. Loading one packs layer by
layer.

All of it runs on torch's thread pool, which does not survive a fork: a forked child of a process that has used it calls
``torch.set_num_threads(1)`` first, as for any parallel op of torch, also before ``state_dict()`` and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .checks import (
    FLOAT_DTYPES,
    check_bias,
    check_block_size,
    check_dtype,
    check_float_dtype,
    check_scale_dtype,
    refuse,
    scale_grid,
)

__all__ = ["BlockScaledLinear"]

_STRIP = 16  # columns that a kernel walks together


class BlockScaledLinear(nn.Module):
    """``y = x · dequant(weight)ᵀ + bias`` with FP8 weights: bfloat16, float16 or float32 ``x``, ``y`` of its dtype.

    ``.half()``, ``.to(dtype)`` and the like change the bias alone; ``.double()`` leaves it too, as no kernel reads
    float64. Gradients flow to ``x`` and ``bias``; codes and scales are frozen, and ``requires_grad_()`` of the layer
    sets the bias alone. ``requires_grad_(True)`` of a model around it does not come here: it asks each parameter, and
    torch refuses it for one of bytes; unfreeze those of ``model.parameters()`` that are ``is_floating_point()``.

    Args:
        in_features: K.
        out_features: N.
        bias: whether the layer has a bias.
        block_size: ``(block_n, block_k)``: one scale for each block of that many rows and columns of the weight.
        device: where the tensors lie. Codes start as zeros and scales as ones; ``from_float``, ``from_fp8`` or
            ``load_state_dict`` gives them a content.
        dtype: of the bias: bfloat16, float16 or float32; None takes torch's default.

    Attributes:
        weight: uint8 ``[N, K]`` parameter, packed (see :func:`blockscale.ops.convert_weight_packed`).
        weight_scale_inv: float32 ``[ceil(N/block_n), ceil(K/block_k)]`` parameter; column-major when block_n < 16.
        bias: ``[N]`` parameter or None.

    Raises:
        ValueError: a size is negative, ``block_size`` is not a positive pair, or the bias has another dtype.

    >>> layer = BlockScaledLinear.from_float(nn.Linear(256, 48))
    >>> layer
    BlockScaledLinear(in_features=256, out_features=48, bias=True, block_size=(128, 128))
    >>> layer(torch.ones(2, 256, dtype=torch.bfloat16)).shape
    torch.Size([2, 48])
    >>> {name: tensor.dtype for name, tensor in layer.state_dict().items()}
    {'weight': torch.float8_e4m3fn, 'weight_scale_inv': torch.float32, 'bias': torch.float32}
    """

    in_features: int
    out_features: int
    block_size: tuple[int, int]
    weight: nn.Parameter
    weight_scale_inv: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        block_size: Sequence[int] = (128, 128),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where = "BlockScaledLinear"
        if in_features < 0 or out_features < 0:
            refuse(where, "`in_features` and `out_features` not negative", f"{in_features} and {out_features}")
        self.in_features = in_features
        self.out_features = out_features
        self.block_size = check_block_size(where, block_size)
        dtype = dtype or torch.get_default_dtype()
        if bias:
            check_float_dtype(where, "bias", dtype)
        grid = scale_grid((out_features, in_features), self.block_size)
        codes = torch.zeros(out_features, in_features, dtype=torch.uint8, device=device)
        self.weight = _frozen(codes)
        self.weight_scale_inv = _frozen(self._kernel_strides(torch.ones(grid, dtype=torch.float32, device=device)))
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        )

    @classmethod
    def from_float(cls, linear: nn.Linear, block_size: Sequence[int] = (128, 128)) -> BlockScaledLinear:
        """Quantise ``linear``; its tensors are left alone.

        Args:
            linear: layer with a bfloat16, float16 or float32 weight ``[N, K]``.
            block_size: ``(block_n, block_k)``; ``(1, K)`` is per channel, ``(N, K)`` per tensor.

        Raises:
            ValueError: ``linear`` is no nn.Linear, its weight has another dtype or holds an infinity, or
                ``block_size`` is not a positive pair.

        >>> BlockScaledLinear.from_float(nn.Linear(256, 48), block_size=(1, 256)).weight_scale_inv.shape
        torch.Size([48, 1])
        """
        where = "BlockScaledLinear.from_float"
        if not isinstance(linear, nn.Linear):
            refuse(where, "`linear` of type torch.nn.Linear", type(linear).__name__)
        block_size = check_block_size(where, block_size)
        codes, scales = ops.quantize_weight_block_fp8(linear.weight.detach(), block_size)
        layer = cls.from_fp8(codes, scales, linear.bias, block_size)
        return layer.train(linear.training)

    @classmethod
    def from_fp8(
        cls,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        block_size: Sequence[int] = (128, 128),
    ) -> BlockScaledLinear:
        """Build a layer from a checkpoint's tensors; they are copied.

        Args:
            weight: float8_e4m3fn ``[N, K]``, plain (not packed), any strides.
            scales: float32, bfloat16 or e8m0 (float8_e8m0fnu, or its codes in uint8), widened to float32. Of shape
                ``[ceil(N/block_n), ceil(K/block_k)]``; or one scale, ``[]``, ``[1]`` or ``[1, 1]``, for the whole
                weight; or one per output channel, ``[N]``, ``[N, 1]`` or ``[1, N]``. The first that fits is taken.
            bias: ``[N]``, bfloat16, float16 or float32, or None.
            block_size: ``(block_n, block_k)`` of a block grid; the other two set ``(N, K)`` and ``(1, K)``.

        Raises:
            ValueError: a tensor has a wrong dtype or shape, or the scales are missing.

        >>> codes = torch.ones(4, 8).to(torch.float8_e4m3fn)
        >>> layer = BlockScaledLinear.from_fp8(codes, torch.tensor([1.0, 2.0, 3.0, 4.0]))
        >>> layer.block_size, layer(torch.ones(8)).tolist()
        ((1, 8), [8.0, 16.0, 24.0, 32.0])
        """
        where = "BlockScaledLinear.from_fp8"
        block_size = check_block_size(where, block_size)
        _check_codes(where, weight)
        scales, block_size = _scale_grid_of(where, scales, weight.shape, block_size)
        N, K = weight.shape
        check_bias(where, bias, N)
        # On meta first: the tensors that the constructor would fill are replaced at once.
        dtype = None if bias is None else bias.dtype
        layer = cls(K, N, bias is not None, block_size=block_size, device="meta", dtype=dtype)
        layer.weight = _frozen(_pack(weight.detach()))
        layer.weight_scale_inv = _frozen(layer._kernel_strides(scales.detach().clone()))
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """``x[..., K]`` -> ``[..., N]`` of the same dtype.

        Raises:
            ValueError: ``x`` has a wrong dtype or last dimension, or lies on another device than the layer.
            NotImplementedError: ``x`` or the layer lies on a device without a kernel.
        """
        # Each attribute of a module that is a parameter costs a lookup of 0.4 us, together half a small layer's time.
        parameters = self._parameters
        try:
            weight, scales, bias = parameters["weight"], parameters["weight_scale_inv"], parameters["bias"]
        except KeyError:  # taken out by what replaces parameters: torch's parametrisations, sharding wrappers
            weight, scales, bias = self.weight, self.weight_scale_inv, self.bias
        if not (x.is_cpu and weight.is_cpu):
            _check_has_kernel(x.device, weight.device)
        return ops.fp8_scaled_mm_cpu(x, weight, scales, self.block_size, bias)

    def requires_grad_(self, requires_grad: bool = True) -> BlockScaledLinear:
        """Whether the bias asks for a gradient; codes and scales never do."""
        if self.bias is not None:
            self.bias.requires_grad_(requires_grad)
        return self

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, block_size={self.block_size}"
        )

    def _kernel_strides(self, scales: Tensor) -> Tensor:
        # With block_n < 16 the 16 columns of a strip have several scales, which a kernel loads at once if they are
        # neighbours in memory; with larger blocks it broadcasts one, and any strides serve.
        return scales.t().contiguous().t() if self.block_size[0] < _STRIP else scales.contiguous()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockScaledLinear:
        grad = None if self.bias is None else self.bias.grad
        frozen, biases = (self.weight, self.weight_scale_inv), (self.bias, grad)

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            unread = moved.dtype not in FLOAT_DTYPES and any(tensor is one for one in biases)
            if moved.dtype != tensor.dtype and (unread or any(tensor is one for one in frozen)):
                return tensor.to(moved.device)
            return moved

        return super()._apply(move, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = _unpack(self.weight.detach())
        destination[prefix + "weight_scale_inv"] = self.weight_scale_inv.detach().contiguous()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {prefix + name for name, parameter in self._parameters.items() if parameter is not None}
        try:
            loaded = self._checked(prefix, state_dict)
        except ValueError as error:
            error_msgs.append(str(error))
            return
        if strict and not own <= state_dict.keys():  # a load that is going to be refused changes nothing here
            missing_keys.extend(sorted(own - state_dict.keys()))
            return
        state_dict = {**state_dict, **{prefix + name: tensor for name, tensor in loaded.items()}}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _checked(self, prefix: str, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
        """Weight and scales of ``state_dict`` as this layer holds them, or a ValueError before anything has changed."""
        where = f"BlockScaledLinear `{prefix[:-1]}`" if prefix else "BlockScaledLinear"
        weight, scales, bias = (state_dict.get(prefix + name) for name in ("weight", "weight_scale_inv", "bias"))
        if self.bias is not None and bias is not None:
            _check_tensor(where, "bias", bias)
            check_bias(where, bias, self.out_features)
        if weight is None and scales is None:
            return {}
        if weight is None:
            refuse(where, "`weight` beside `weight_scale_inv`", "none")
        _check_codes(where, weight)
        shape = [self.out_features, self.in_features]
        if list(weight.shape) != shape:
            refuse(where, f"`weight` of shape [N, K] = {shape}", list(weight.shape))
        scales, block_size = _scale_grid_of(where, scales, shape, self.block_size)
        if block_size != self.block_size:
            refuse(where, f"scales of block size {list(self.block_size)}", f"scales of {list(block_size)}")
        return {"weight": _pack(weight.detach()), "weight_scale_inv": self._kernel_strides(scales.detach())}

    def __getstate__(self) -> dict[str, Any]:
        # Plain codes as bytes: torch's pickle of float8 storages can't be read back.
        codes = _unpack(self.weight.detach()).view(torch.uint8)
        return {**self.__dict__, "_parameters": {**self._parameters, "weight": None}, "codes": codes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        codes = state["codes"]
        super().__setstate__({name: value for name, value in state.items() if name != "codes"})
        self.weight = _frozen(_pack(codes.view(torch.float8_e4m3fn)))


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _on_cpu(op: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Run ``op`` where it exists: packed bytes may lie on any device, packing itself is done on the CPU (or meta)."""
    if tensor.device.type in ("cpu", "meta"):
        return op(tensor)
    return op(tensor.cpu()).to(tensor.device)


def _check_has_kernel(*devices: torch.device) -> None:
    for device in devices:
        if device.type not in ("cpu", "meta"):
            raise NotImplementedError(f"BlockScaledLinear: expected the layer and `x` on cpu, got {device}")


def _pack(codes: Tensor) -> Tensor:
    return _on_cpu(ops.convert_weight_packed, codes)


def _unpack(packed: Tensor) -> Tensor:
    return _on_cpu(ops.unpack_weight, packed)


def _check_tensor(where: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        refuse(where, f"`{name}` to be a tensor", type(value).__name__)


def _check_codes(where: str, weight: Tensor) -> None:
    _check_tensor(where, "weight", weight)
    if weight.dtype == torch.uint8:
        words = "`weight` of dtype float8_e4m3fn (codes.view(torch.float8_e4m3fn), or unpack_weight of packed bytes)"
        refuse(where, words, "uint8: packed bytes live in memory only")
    check_dtype(where, "weight", weight.dtype, (torch.float8_e4m3fn,), "float8_e4m3fn")
    if weight.dim() != 2:
        refuse(where, "`weight` of shape [N, K]", list(weight.shape))


def _scale_grid_of(
    where: str, scales: Tensor | None, shape: Sequence[int], block_size: tuple[int, int]
) -> tuple[Tensor, tuple[int, int]]:
    """Float32 scale grid and its block size from block, per-tensor or per-channel scales of a weight of ``shape``."""
    if scales is None:
        refuse(where, "scales beside a float8_e4m3fn `weight`", "none")
    _check_tensor(where, "scales", scales)
    check_scale_dtype(where, "scales", scales.dtype)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    scales = scales.float()
    N, K = shape
    grid = scale_grid(shape, block_size)
    if list(scales.shape) == grid:
        return scales, block_size
    if scales.numel() == 1 and scales.dim() <= 2:
        return scales.reshape(1, 1)[:N, :K], (max(N, 1), max(K, 1))
    if list(scales.shape) in ([N], [N, 1], [1, N]):
        return scales.reshape(N, 1)[:, :K], (1, max(K, 1))
    words = f"`scales` of shape [ceil(N/block_n), ceil(K/block_k)] = {grid}, [], [1], [N], [N, 1] or [1, N]"
    refuse(where, f"{words} with N = {N}", list(scales.shape))
