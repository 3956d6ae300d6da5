"""From how a layer is quantised to how it is computed: pure functions, no device is asked.

A checkpoint's description of one layer comes down to two parts: how the weight's scales are shared, and what it asks of
the activations. :mod:`blockscale.kernels.configurations` reads the parts from a checkpoint; here they become a scheme
(``w8a8_block``, ``w8a16_block``, ``w8a8``, ``w8a16`` or ``unquantized``) and the keys that kernels understand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..checks import refuse
from .quant_keys import GroupShape, QuantKey, ScaleDesc

__all__ = [
    "LINEAR_BACKENDS",
    "PLATFORMS",
    "InputQuant",
    "WeightQuant",
    "capability_number",
    "get_scheme_from_parts",
    "parse_block_size",
    "read_input_args",
    "read_weight_args",
]

PLATFORMS = ("cpu", "xpu", "cuda", "rocm")
LINEAR_BACKENDS = ("auto", "cpu", "xpu", "xpu_woq", "torch")

# Least capability whose tensor cores multiply FP8: Ada (8.9), CDNA 3 (9.4).
_FP8_CAPABILITY = {"cuda": 89, "rocm": 94}


@dataclass(frozen=True)
class WeightQuant:
    """``strategy`` ``block`` (then with ``block_size``), ``channel`` or ``tensor``."""

    strategy: str
    block_size: tuple[int, int] | None = None

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
        refuse(where, f"`platform` {', '.join(PLATFORMS)}", platform)
    if linear_backend not in LINEAR_BACKENDS:
        refuse(where, f"`linear_backend` {', '.join(LINEAR_BACKENDS)}", linear_backend)
    capability = capability_number(where, capability)
    if isinstance(weight_quant, Mapping):
        weight_quant = read_weight_args(where, "weight_quant", weight_quant)
    if weight_quant is None:
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


def capability_number(where: str, capability: int | tuple[int, int] | None) -> int | None:
    """(9, 0) or 90 -> 90."""
    if capability is None or (isinstance(capability, int) and not isinstance(capability, bool)):
        return capability
    if isinstance(capability, tuple) and len(capability) == 2 and all(isinstance(n, int) for n in capability):
        return 10 * capability[0] + capability[1]
    refuse(where, "`capability` (major, minor), 10 · major + minor, or None", capability)


def parse_block_size(where: str, field: str, value: object) -> tuple[int, int]:
    """A pair of positive integers from a list or from a text like "128x128".

    >>> parse_block_size("config", "block_structure", "128x128")
    (128, 128)
    """
    sizes: Any = value
    if isinstance(value, str):
        sizes = [int(size) for size in re.findall(r"\d+", value)] if re.fullmatch(r"[\d\s,x×\[\]()]+", value) else None
    if (
        not isinstance(sizes, (list, tuple))
        or len(sizes) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    ):
        refuse(where, f"`{field}` of two positive integers [block_n, block_k]", value)
    return sizes[0], sizes[1]


def _refuse_format(where: str, field: str, args: Mapping[str, Any]) -> None:
    """Only 8-bit floats without zero points are FP8; anything else is refused by its name."""
    kind, bits = args.get("type", "int"), args.get("num_bits", 8)
    if (kind, bits) != ("float", 8):
        raise NotImplementedError(f"{where}: expected FP8 (`{field}` of type float, 8 bits), got {kind}{bits}")
    if args.get("symmetric") is False:
        raise NotImplementedError(f"{where}: expected symmetric `{field}`, got zero points (asymmetric FP8)")


def read_weight_args(where: str, field: str, args: Mapping[str, Any]) -> WeightQuant:
    """The weight's part from the arguments of a compressed-tensors group.

    Raises:
        NotImplementedError: another format than FP8.
        ValueError: the arguments contradict each other.

    >>> read_weight_args("x", "weights", {"type": "float", "num_bits": 8, "block_structure": "128x128"})
    WeightQuant(strategy='block', block_size=(128, 128))
    """
    _refuse_format(where, field, args)
    if args.get("dynamic"):
        refuse(where, f"`{field}.dynamic` false: weights are stored quantised", args["dynamic"])
    strategy, structure, group_size = args.get("strategy"), args.get("block_structure"), args.get("group_size")
    if strategy not in (None, "block", "channel", "tensor", "group"):
        refuse(where, f"`{field}.strategy` block, channel, tensor or group", strategy)
    if structure is not None:
        if strategy not in (None, "block"):
            refuse(where, f"`{field}.strategy` block beside `block_structure` {structure}", strategy)
        return WeightQuant("block", parse_block_size(where, f"{field}.block_structure", structure))
    if strategy == "block":
        return WeightQuant("block", (128, 128))  # every published block checkpoint has these
    if group_size not in (None, -1):
        if strategy not in (None, "group"):
            refuse(where, f"`{field}.strategy` group beside `group_size` {group_size}", strategy)
        if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size <= 0:
            refuse(where, f"`{field}.group_size` positive", group_size)
        return WeightQuant("block", (1, group_size))
    if strategy == "group":
        refuse(where, f"`{field}.group_size` positive beside strategy group", group_size)
    return WeightQuant(strategy or ("channel" if group_size == -1 else "tensor"))


def read_input_args(where: str, field: str, args: Mapping[str, Any] | None, weight: WeightQuant) -> InputQuant | None:
    """The activations' part from the arguments of a compressed-tensors group; None for 16-bit activations.

    Raises:
        NotImplementedError: another format than FP8.
        ValueError: the arguments contradict each other.
    """
    if args is None:
        return None
    _refuse_format(where, field, args)
    strategy, group_size, dynamic = args.get("strategy"), args.get("group_size"), args.get("dynamic", False)
    if strategy is None:
        strategy = "tensor" if group_size is None else "token" if group_size == -1 else "group"
    if strategy not in ("tensor", "token", "group"):
        refuse(where, f"`{field}.strategy` tensor, token or group", strategy)
    if strategy != "group" and group_size not in (None, -1):
        refuse(where, f"`{field}.strategy` group beside `group_size` {group_size}", strategy)
    if not dynamic:
        if strategy != "tensor":
            refuse(where, f"`{field}.dynamic` true beside strategy {strategy}: only one number can be stored", dynamic)
        return InputQuant("tensor", static=True)
    if strategy != "group":
        return InputQuant("token")  # a scale per token serves where one for the tensor is asked: it is finer
    if group_size is None:
        group_size = weight.block_size[1] if weight.block_size else 128
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size <= 0:
        refuse(where, f"`{field}.group_size` positive", group_size)
    ue8m0 = "e8m0" in str(args.get("scale_dtype"))
    return InputQuant("group", group_size, ue8m0=ue8m0)
