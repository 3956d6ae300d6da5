"""From how a layer is quantised to how it is computed: pure functions, no device is asked.

A checkpoint's description of one layer comes down to two parts: how the weight's scales are shared, and what it asks of
the activations. :mod:`blockscale.kernels.configurations` reads the parts from a checkpoint; here they become a scheme
(``w8a8_block``, ``w8a16_block``, ``w8a8``, ``w8a16`` or ``unquantized``) and the keys that kernels understand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..checks import refuse
from .fields import LARGEST_SIDE, Fields, is_integer, parse_block_size, shown
from .quant_keys import GroupShape, QuantKey, ScaleDesc

__all__ = [
    "LINEAR_BACKENDS",
    "PLATFORMS",
    "InputQuant",
    "WeightQuant",
    "capability_number",
    "check_backend",
    "get_scheme_from_parts",
    "read_input_args",
    "read_weight_args",
]

PLATFORMS = ("cpu", "xpu", "cuda", "rocm")
LINEAR_BACKENDS = ("auto", "cpu", "xpu", "xpu_woq", "torch")

# Dtypes in which checkpoints store scales: numbers, and codes of powers of two.
_FLOAT_SCALES = ("float32", "bfloat16", "float16")
_E8M0_SCALES = ("float8_e8m0fnu", "uint8")

# Least capability whose tensor cores multiply FP8: Ada (8.9), CDNA 3 (9.4).
_FP8_CAPABILITY = {"cuda": 89, "rocm": 94}


@dataclass(frozen=True)
class WeightQuant:
    """``strategy`` ``block`` (then with ``block_size``), ``channel`` or ``tensor``."""

    strategy: str
    block_size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.strategy not in ("block", "channel", "tensor"):
            refuse("WeightQuant", "`strategy` block, channel or tensor", shown(self.strategy))
        if self.strategy == "block":
            parse_block_size("WeightQuant", "block_size", self.block_size)
        elif self.block_size is not None:
            refuse("WeightQuant", f"no `block_size` beside `strategy` {self.strategy}", shown(self.block_size))

    def key(self, scale_dtype: torch.dtype = torch.float32) -> QuantKey:
        """The key of such a weight, [N, K]."""
        shapes = {"channel": GroupShape.PER_CHANNEL, "tensor": GroupShape.PER_TENSOR}
        shape = GroupShape(*self.block_size) if self.block_size else shapes[self.strategy]
        return QuantKey(torch.float8_e4m3fn, ScaleDesc(scale_dtype, True, shape))


@dataclass(frozen=True)
class InputQuant:
    """What the checkpoint asks of activations.

    Attributes:
        strategy: ``group``, ``token`` or ``tensor``.
        group_size: of a ``group``.
        static: one scale that the checkpoint stores.
        ue8m0: scales are powers of two.
        bounded: amax has an upper bound that the checkpoint stores.
    """

    strategy: str
    group_size: int | None = None
    static: bool = False
    ue8m0: bool = False
    bounded: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in ("group", "token", "tensor"):
            refuse("InputQuant", "`strategy` group, token or tensor", shown(self.strategy))
        if self.strategy == "group":
            if not (is_integer(self.group_size) and 0 < self.group_size <= LARGEST_SIDE):
                refuse("InputQuant", "`group_size` positive", shown(self.group_size))
        elif self.group_size is not None:
            refuse("InputQuant", f"no `group_size` beside `strategy` {self.strategy}", shown(self.group_size))

    def __str__(self) -> str:
        if self.static:
            return "tensor_static"
        if self.strategy == "group":
            # Groups of 32 are microscaling groups: their scales are powers of two by definition, so that is not said.
            return f"group{self.group_size}" + ("_ue8m0" if self.ue8m0 and self.group_size != 32 else "")
        return "token_ub" if self.bounded else "token"

    def key(self, weight: WeightQuant) -> QuantKey:
        """The key of such activations beside ``weight``; with block weights tokens are cut into the weight's blocks."""
        if self.static:
            shape = GroupShape.PER_TENSOR
        elif self.strategy == "group":
            shape = GroupShape(1, self.group_size or 0)
        else:
            shape = GroupShape(1, weight.block_size[1]) if weight.block_size else GroupShape.PER_TOKEN
        dtype = torch.float8_e8m0fnu if self.ue8m0 else torch.float32
        return QuantKey(torch.float8_e4m3fn, ScaleDesc(dtype, self.static, shape))


def get_scheme_from_parts(
    weight_quant: WeightQuant | Mapping[str, Any] | None,
    input_quant: InputQuant | Mapping[str, Any] | None,
    *,
    platform: str = "cpu",
    capability: int | tuple[int, int] | None = None,
    linear_backend: str = "auto",
) -> str:
    """The scheme of a layer.

    Args:
        weight_quant, input_quant: the two parts, or the arguments of a compressed-tensors group; None where the
            checkpoint has none.
        platform: ``cpu``, ``xpu``, ``cuda`` or ``rocm``.
        capability: of the device, (major, minor) or 10 · major + minor; None where the platform has no such number.
        linear_backend: what the user asks for.

    Returns:
        ``w8a8_block``, ``w8a16_block``, ``w8a8``, ``w8a16`` or ``unquantized``.

    Raises:
        NotImplementedError: the weight or the activations are not FP8.
        ValueError: an argument has no meaning, or the arguments of a group contradict each other.

    >>> block = WeightQuant("block", (128, 128))
    >>> get_scheme_from_parts(block, InputQuant("group", 128), platform="xpu")
    'w8a8_block'
    >>> get_scheme_from_parts(WeightQuant("channel"), InputQuant("token"), platform="cpu")
    'w8a16'
    """
    where = "get_scheme_from_parts"
    if platform not in PLATFORMS:
        refuse(where, f"`platform` {', '.join(PLATFORMS)}", shown(platform))
    check_backend(where, linear_backend)
    capability = capability_number(where, capability)
    if isinstance(weight_quant, Mapping):
        weight_quant = read_weight_args(where, "weight_quant", weight_quant)
    if not (weight_quant is None or isinstance(weight_quant, WeightQuant)):
        refuse(where, "`weight_quant` to be a WeightQuant, a mapping or None", shown(weight_quant))
    if not (input_quant is None or isinstance(input_quant, (InputQuant, Mapping))):
        refuse(where, "`input_quant` to be an InputQuant, a mapping or None", shown(input_quant))
    if weight_quant is None:
        if input_quant is not None:
            refuse(where, "`weight_quant` beside `input_quant`", "none")
        return "unquantized"
    if isinstance(input_quant, Mapping):
        input_quant = read_input_args(where, "input_quant", input_quant, weight_quant)
    block = weight_quant.strategy == "block"
    w8a8, w8a16 = ("w8a8_block", "w8a16_block") if block else ("w8a8", "w8a16")
    if platform == "cpu":
        return w8a16  # more exact than W8A8 and faster
    if platform == "xpu":
        # The XPU has no capability number. Its 16-bit kernel takes no blocks, its FP8 kernel does.
        if block:
            return w8a8
        return w8a8 if linear_backend in ("xpu", "torch") and input_quant is not None else w8a16
    if input_quant is None:
        return w8a16
    # Without a number kernels decide, and those registered here for GPUs multiply FP8 by FP8.
    return w8a8 if capability is None or capability >= _FP8_CAPABILITY[platform] else w8a16


def check_backend(where: str, linear_backend: str) -> None:
    """``linear_backend`` is one of those that exist."""
    if linear_backend not in LINEAR_BACKENDS:
        refuse(where, f"`linear_backend` {', '.join(LINEAR_BACKENDS)}", shown(linear_backend))


def capability_number(where: str, capability: int | tuple[int, int] | None) -> int | None:
    """(9, 0) or 90 -> 90."""
    if capability is None:
        return None
    pair = isinstance(capability, tuple) and len(capability) == 2
    numbers: tuple[int, ...] = capability if pair else (0, capability)
    if not all(is_integer(number) and number >= 0 for number in numbers):
        refuse(where, "`capability` (major, minor), 10 · major + minor, or None", shown(capability))
    return 10 * int(numbers[0]) + int(numbers[1])


def _refuse_format(args: Fields) -> None:
    """Only 8-bit floats without zero points are FP8; anything else is refused by its name."""
    where, kind, bits = args.where, args.text("type", "int"), args.integer("num_bits", 8)
    if (kind, bits) != ("float", 8):
        raise NotImplementedError(f"{where}: expected FP8 (`{args.path}` of type float, 8 bits), got {kind}{bits}")
    if args.flag("symmetric") is False:
        raise NotImplementedError(f"{where}: expected symmetric `{args.path}`, got zero points (asymmetric FP8)")


def _scales_are_powers_of_two(args: Fields) -> bool:
    dtype = args.text("scale_dtype", "float32").removeprefix("torch.")
    if dtype not in (*_FLOAT_SCALES, *_E8M0_SCALES):
        args.refuse("scale_dtype", ", ".join((*_FLOAT_SCALES, *_E8M0_SCALES)))
    return dtype in _E8M0_SCALES


def read_weight_args(where: str, field: str, args: Mapping[str, Any]) -> WeightQuant:
    """The weight's part from the arguments of a compressed-tensors group.

    Raises:
        NotImplementedError: another format than FP8.
        ValueError: the arguments contradict each other, or one has a wrong type.

    >>> read_weight_args("x", "weights", {"type": "float", "num_bits": 8, "block_structure": "128x128"})
    WeightQuant(strategy='block', block_size=(128, 128))
    """
    fields = Fields(where, field, args)
    _refuse_format(fields)
    _scales_are_powers_of_two(fields)  # the stored dtype is the loader's business, what is no dtype of scales is not
    if fields.flag("dynamic", "local"):
        fields.refuse("dynamic", "false: weights are stored quantised")
    strategy, group_size = fields.text("strategy"), fields.integer("group_size")
    if strategy not in (None, "block", "channel", "tensor", "group"):
        fields.refuse("strategy", "block, channel, tensor or group")
    block_size = fields.block_size("block_structure")
    if block_size is not None and strategy not in (None, "block"):
        fields.refuse("strategy", f"block beside `block_structure` {list(block_size)}")
    if block_size is not None or strategy == "block":
        block_size = block_size or (128, 128)  # every published block checkpoint has these
        if group_size not in (None, -1, block_size[1]):
            fields.refuse("group_size", f"null or {block_size[1]} beside blocks of {list(block_size)}")
        return WeightQuant("block", block_size)
    if group_size not in (None, -1):
        if strategy not in (None, "group"):
            fields.refuse("strategy", f"group beside `group_size` {group_size}")
        if group_size <= 0:
            fields.refuse("group_size", "positive")
        return WeightQuant("block", (1, group_size))
    if strategy == "group":
        fields.refuse("group_size", "positive beside strategy group")
    return WeightQuant(strategy or ("channel" if group_size == -1 else "tensor"))


def read_input_args(where: str, field: str, args: Mapping[str, Any] | None, weight: WeightQuant) -> InputQuant | None:
    """The activations' part from the arguments of a compressed-tensors group; None for 16-bit activations.

    Raises:
        NotImplementedError: another format than FP8.
        ValueError: the arguments contradict each other, or one has a wrong type.
    """
    if args is None:
        return None
    fields = Fields(where, field, args)
    _refuse_format(fields)
    ue8m0 = _scales_are_powers_of_two(fields)
    strategy, group_size, dynamic = (
        fields.text("strategy"),
        fields.integer("group_size"),
        fields.flag("dynamic", "local"),
    )
    if strategy is None:
        strategy = "tensor" if group_size is None else "token" if group_size == -1 else "group"
    if strategy not in ("tensor", "token", "group"):
        fields.refuse("strategy", "tensor, token or group")
    if strategy != "group" and group_size not in (None, -1):
        fields.refuse("strategy", f"group beside `group_size` {group_size}")
    if not dynamic:
        if strategy != "tensor":
            fields.refuse("dynamic", f"true beside strategy {strategy}: only one number can be stored")
        return InputQuant("tensor", static=True)
    if strategy != "group":
        return InputQuant("token")  # a scale per token serves where one for the tensor is asked: it is finer
    if group_size is None:
        group_size = weight.block_size[1] if weight.block_size else 128
    if group_size <= 0:
        fields.refuse("group_size", "positive")
    return InputQuant("group", group_size, ue8m0=ue8m0)
