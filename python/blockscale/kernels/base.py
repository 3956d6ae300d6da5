"""The vocabulary of kernel selection: a layer's configuration, the kernel interface, and a layer's parameters.

A kernel class is asked twice before it is made: ``is_supported`` (is the op there, and does this machine run it) and
``can_implement`` (does it take this configuration); a "no" comes with its reason. An instance then prepares a layer's
parameters once after each load and multiplies by them. It keeps nothing of a layer itself: what it derives is a
parameter of the layer, so that it moves, sleeps and reloads with the layer.

:mod:`blockscale.kernels.layer_params` finds and checks a layer's weight and scales.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..checks import FLOAT_DTYPES, SCALE_DTYPES, dtype_name, refuse
from .arguments import check_torch_dtype, read_shape
from .fields import shown
from .layer_params import INPUT_SCALE, WEIGHT, WEIGHT_SCALE, WEIGHT_SCALE_INV, layer_label, prepared, replace_parameter
from .quant_keys import GroupShape, QuantFP8, QuantKey, ScaleDesc

__all__ = [
    "INPUT_SCALE",
    "WEIGHT",
    "WEIGHT_SCALE",
    "WEIGHT_SCALE_INV",
    "FP8ScaledMMLinearLayerConfig",
    "Fp8BlockScaledMMLinearKernel",
    "GroupShape",
    "MMLinearKernel",
    "QuantFP8",
    "QuantKey",
    "ScaleDesc",
    "build_platform",
    "replace_parameter",
    "rows_of",
]


def build_platform() -> str:
    """The platform that this build of torch is for."""
    if torch.version.hip is not None:
        return "rocm"
    if torch.version.xpu is not None:
        return "xpu"
    return "cuda" if torch.version.cuda is not None else "cpu"


@dataclass(frozen=True)
class FP8ScaledMMLinearLayerConfig:
    """What a kernel has to know about a layer.

    Attributes:
        weight_quant_key: of the weight ``[N, K]``.
        activation_quant_key: of the activations; None keeps them in 16 bits.
        weight_shape: ``(N, K)``, or None where it is not known yet.
        input_dtype, out_dtype: of x and of the result; an ``out_dtype`` of None takes that of x.
        platform: ``cpu``, ``xpu``, ``cuda`` or ``rocm``; None is the one of this torch build.
    """

    weight_quant_key: QuantKey
    activation_quant_key: QuantKey | None = None
    weight_shape: tuple[int, int] | None = None
    input_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = torch.bfloat16
    platform: str | None = None

    def __post_init__(self) -> None:
        where = "FP8ScaledMMLinearLayerConfig"
        if not isinstance(self.weight_quant_key, QuantKey):
            refuse(where, "`weight_quant_key` to be a QuantKey", shown(self.weight_quant_key))
        if not (self.activation_quant_key is None or isinstance(self.activation_quant_key, QuantKey)):
            refuse(where, "`activation_quant_key` to be a QuantKey or None", shown(self.activation_quant_key))
        object.__setattr__(self, "weight_shape", read_shape(where, "weight_shape", self.weight_shape))
        check_torch_dtype(where, "input_dtype", self.input_dtype)
        if self.out_dtype is not None:
            check_torch_dtype(where, "out_dtype", self.out_dtype)
        if not (self.platform is None or isinstance(self.platform, str)):
            refuse(where, "`platform` to be the name of a platform or None", shown(self.platform))

    def __str__(self) -> str:
        shape = "" if self.weight_shape is None else f" N={self.weight_shape[0]} K={self.weight_shape[1]}"
        activation = self.activation_quant_key or dtype_name(self.input_dtype)
        return f"weight{shape} {self.weight_quant_key}; activation {activation}"


def rows_of(layer: nn.Module, x: Tensor) -> Tensor:
    """``x[..., K]`` as ``[M, K]``; K may be 0."""
    if x.dim() == 0:
        refuse(layer_label(layer), "`x` of shape [..., K]", "[]")
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class MMLinearKernel(ABC):
    """A way to multiply by a quantised weight.

    Attributes:
        linear_backend: the value of the option of that name that chooses this class.
        takes_quantized_input: whether activations become FP8 (W8A8) or stay in 16 bits (W8A16).
    """

    linear_backend: ClassVar[str]
    takes_quantized_input: ClassVar[bool]

    def __init__(self, config: FP8ScaledMMLinearLayerConfig) -> None:
        able, reason = self.can_implement(config)
        if not able:
            raise NotImplementedError(f"{type(self).__name__}: {reason}")
        self.config = config

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Whether the op exists and the machine runs it, and the reason if not.

        Args:
            compute_capability: 10 · major + minor; None asks the device, if there is one.
        """

    @classmethod
    @abstractmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether the class takes ``config``, and the reason if not."""

    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Bring the layer's parameters into the kernel's form, after the first and after every later load.

        Raises:
            ValueError: a parameter is missing, has a wrong dtype or shape, or was not written by the load.
        """

    @abstractmethod
    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        """``x[..., K]`` -> ``[..., N]`` of ``config.out_dtype``."""

    def get_output_padding(self) -> int | None:
        """Of what M is made a multiple, or None."""
        return None

    def _out_dtype(self, x: Tensor) -> torch.dtype:
        return self.config.out_dtype or x.dtype

    def _bias_alone(self, x: Tensor, N: int, bias: Tensor | None) -> Tensor:
        """The result where there is nothing to add up: no rows, or K = 0."""
        out = x.new_zeros([*x.shape[:-1], N], dtype=self._out_dtype(x))
        return out if bias is None else (out + bias).to(out.dtype)

    @staticmethod
    def _refuse_weight(config: FP8ScaledMMLinearLayerConfig) -> str | None:
        """Why no class here takes the weight of ``config``, or None."""
        key = config.weight_quant_key
        if key.dtype != torch.float8_e4m3fn:
            return f"weights of dtype float8_e4m3fn only, not {dtype_name(key.dtype)}"
        if not key.symmetric:
            return "symmetric weights only, without zero points"
        if not key.scale.static:
            return "weight scales are stored, not dynamic"
        if key.scale.dtype not in SCALE_DTYPES:
            return f"scales of dtype float32, bfloat16 or e8m0 only, not {dtype_name(key.scale.dtype)}"
        if config.input_dtype not in FLOAT_DTYPES:
            return f"x of dtype bfloat16, float16 or float32 only, not {dtype_name(config.input_dtype)}"
        return None


class Fp8BlockScaledMMLinearKernel(MMLinearKernel):
    """A kernel for weights with one scale per block; with ``apply_input_quant`` it quantises x in groups of block_k."""

    apply_input_quant: ClassVar[bool] = True
    takes_quantized_input: ClassVar[bool] = True

    def __init__(self, config: FP8ScaledMMLinearLayerConfig) -> None:
        super().__init__(config)
        self.weight_group_shape = GroupShape(*config.weight_quant_key.scale.group_shape)
        if self.apply_input_quant:
            self.quant_fp8 = self._make_quant(config)

    def _make_quant(self, config: FP8ScaledMMLinearLayerConfig) -> QuantFP8:
        assert config.activation_quant_key is not None
        scale = config.activation_quant_key.scale
        # The stored dtype of activation scales says what values they may have; they are computed in float32.
        use_ue8m0 = scale.dtype == torch.float8_e8m0fnu
        return QuantFP8(scale.static, scale.group_shape, self.get_output_padding(), use_ue8m0=use_ue8m0)

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        reason = cls._refuse_weight(config)
        if reason is not None:
            return False, reason
        weight_group = GroupShape(*config.weight_quant_key.scale.group_shape)
        if not weight_group.is_block():
            return False, f"BLOCK weights only, not {weight_group}"
        key = config.activation_quant_key
        if key is None:
            return False, "quantised activations only, the configuration keeps them in 16 bits"
        if key.dtype != torch.float8_e4m3fn:
            return False, f"activations of dtype float8_e4m3fn only, not {dtype_name(key.dtype)}"
        if key.scale.static:
            return False, "dynamic activation scales only, not static ones"
        group = GroupShape(*key.scale.group_shape)
        if group != (1, weight_group.col):
            return False, f"activation groups of 1 x {weight_group.col}, as the weight's blocks, not {group}"
        return True, None

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        weight, scales = prepared(layer)
        rows = rows_of(layer, x)
        A, As = self.quant_fp8(rows)
        out = self.apply_block_scaled_mm(A, weight, As, scales)
        if bias is not None:
            out = out + bias
        return out.to(self._out_dtype(x)).reshape(*x.shape[:-1], out.shape[-1])

    @abstractmethod
    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """``dequant(A) · dequant(B)ᵀ``: A ``[M, K]`` codes with As, B the layer's prepared weight with Bs."""
