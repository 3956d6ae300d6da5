"""Kernel selection: which kernel runs an FP8 layer on a platform, or in one message why none does.

    route(quantization_config, layer_name, platform=...) -> Route       from a checkpoint's configuration
    choose_scaled_mm_linear_kernel(config, possible_kernels) -> class   from a layer's quantisation keys

Kernels of a platform stand in lists, the preferred first. A class is passed over because it is disabled (argument, or
``BLOCKSCALE_DISABLED_KERNELS``), belongs to another ``linear_backend``, lacks its op or machine, or does not take the
layer; every decision is logged once, with the reasons for those passed over.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..checks import check_dtype, refuse
from .arguments import check_route_arguments, read_shape
from .base import (
    INPUT_SCALE,
    WEIGHT,
    WEIGHT_SCALE,
    WEIGHT_SCALE_INV,
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    GroupShape,
    MMLinearKernel,
    QuantFP8,
    QuantKey,
    ScaleDesc,
    build_platform,
    replace_parameter,
)
from .configurations import LayerParts, layer_parts
from .cpu import CPUFp8BlockScaledMMKernel, CPUFp8W8A8BlockScaledMMKernel, supports_cpu_fp8_w8a16
from .cuda import BlockWiseTorchFP8ScaledMMLinearKernel
from .fields import shown
from .layer_names import shard_names
from .layer_params import fuse_shard_scales
from .schemes import capability_number, check_backend, get_scheme_from_parts
from .xpu import XPUFp8BlockScaledMMKernel, XPUW8A16FP8LinearKernel

__all__ = [
    "INPUT_SCALE",
    "POSSIBLE_FP8_BLOCK_KERNELS",
    "POSSIBLE_FP8_KERNELS",
    "POSSIBLE_W8A16_KERNELS",
    "WEIGHT",
    "WEIGHT_SCALE",
    "WEIGHT_SCALE_INV",
    "BlockWiseTorchFP8ScaledMMLinearKernel",
    "CPUFp8BlockScaledMMKernel",
    "CPUFp8W8A8BlockScaledMMKernel",
    "FP8ScaledMMLinearLayerConfig",
    "Fp8BlockScaledMMLinearKernel",
    "GroupShape",
    "MMLinearKernel",
    "NoKernelError",
    "QuantFP8",
    "QuantKey",
    "Route",
    "ScaleDesc",
    "XPUFp8BlockScaledMMKernel",
    "XPUW8A16FP8LinearKernel",
    "choose_scaled_mm_linear_kernel",
    "fuse_shard_scales",
    "get_scheme_from_parts",
    "replace_parameter",
    "route",
    "supports_cpu_fp8_w8a16",
]

logger = logging.getLogger("blockscale")

Kernel = type[MMLinearKernel]

# Ordered, by what a layer's scheme asks for. On the CPU one class serves all three.
POSSIBLE_FP8_BLOCK_KERNELS: dict[str, list[Kernel]] = {
    "cpu": [CPUFp8BlockScaledMMKernel, CPUFp8W8A8BlockScaledMMKernel],
    "xpu": [XPUFp8BlockScaledMMKernel, BlockWiseTorchFP8ScaledMMLinearKernel],
    "cuda": [BlockWiseTorchFP8ScaledMMLinearKernel],
    "rocm": [BlockWiseTorchFP8ScaledMMLinearKernel],
}
POSSIBLE_FP8_KERNELS: dict[str, list[Kernel]] = {
    "cpu": [CPUFp8BlockScaledMMKernel],
    "xpu": [],
    "cuda": [],
    "rocm": [],
}
POSSIBLE_W8A16_KERNELS: dict[str, list[Kernel]] = {
    "cpu": [CPUFp8BlockScaledMMKernel],
    "xpu": [XPUW8A16FP8LinearKernel],
    "cuda": [],
    "rocm": [],
}
_LISTS = {
    "w8a8_block": POSSIBLE_FP8_BLOCK_KERNELS,
    "w8a8": POSSIBLE_FP8_KERNELS,
    "w8a16_block": POSSIBLE_W8A16_KERNELS,
    "w8a16": POSSIBLE_W8A16_KERNELS,
}

_logged: set[str] = set()


class NoKernelError(NotImplementedError, ValueError):
    """No kernel takes a layer; the message lists every class and its reason.

    Attributes:
        reasons: one "class: reason" for each class that was asked.
    """

    def __init__(self, message: str, reasons: Sequence[str]) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


@dataclass(frozen=True)
class Route:
    """How one layer of a checkpoint is computed.

    Attributes:
        scheme: ``w8a8_block``, ``w8a16_block``, ``w8a8``, ``w8a16`` or ``unquantized``.
        weight_strategy: ``block``, ``channel``, ``tensor``, or None.
        block_size: of block weights.
        activation: what the checkpoint asks for: ``none``, ``group128``, ``group128_ue8m0``, ``group32``, ``token``,
            ``token_ub`` or ``tensor_static``. The scheme says whether it is done.
        kernel: class that runs it, or None.
        reasons: why classes were passed over, or why the layer is left alone.
        config: what an instance of ``kernel`` is made with; None for a layer that is left alone.
    """

    scheme: str
    weight_strategy: str | None
    block_size: tuple[int, int] | None
    activation: str
    kernel: Kernel | None
    reasons: tuple[str, ...]
    config: FP8ScaledMMLinearLayerConfig | None = None


def choose_scaled_mm_linear_kernel(
    config: FP8ScaledMMLinearLayerConfig,
    possible_kernels: Sequence[Kernel] | Mapping[str, Sequence[Kernel]],
    compute_capability: int | tuple[int, int] | None = None,
    force_kernel: Kernel | str | None = None,
    *,
    disabled: Iterable[Kernel | str] = (),
    linear_backend: str = "auto",
) -> Kernel:
    """The first of ``possible_kernels`` that runs here and takes ``config``.

    Args:
        config: the layer.
        possible_kernels: classes, the preferred first; or such a list for each platform.
        compute_capability: 10 · major + minor; None asks the device.
        force_kernel: class, or its name, that is to be taken or refused, whatever the list and the backend say.
        disabled: classes or names that are not taken; ``BLOCKSCALE_DISABLED_KERNELS`` (comma-separated) adds to them.
        linear_backend: ``auto``, or the backend of the classes to choose among.

    Raises:
        NoKernelError: none fits (a NotImplementedError, and a ValueError as engines expect it).
        ValueError: an argument or the environment names what does not exist.

    >>> key = QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, True, GroupShape(128, 128)))
    >>> choose_scaled_mm_linear_kernel(FP8ScaledMMLinearLayerConfig(key), POSSIBLE_W8A16_KERNELS["cpu"]).__name__
    'CPUFp8BlockScaledMMKernel'
    """
    kernel, reasons = _choose(config, possible_kernels, compute_capability, force_kernel, disabled, linear_backend)
    if kernel is None:
        raise NoKernelError(f"no kernel for {config}: " + "; ".join(reasons or ["none is registered"]), reasons)
    return kernel


def route(
    quantization_config: Mapping[str, Any] | None,
    layer_name: str,
    *,
    platform: str = "cpu",
    weight_shape: tuple[int, int] | None = None,
    capability: int | tuple[int, int] | None = None,
    linear_backend: str = "auto",
    input_dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype = torch.float32,
    fused_shards: Mapping[str, Sequence[str]] | None = None,
    force_kernel: Kernel | str | None = None,
    disabled: Iterable[Kernel | str] = (),
) -> Route:
    """How the layer ``layer_name`` of a checkpoint is computed on ``platform``.

    Args:
        quantization_config: of the checkpoint's ``config.json``, or the whole file, or modelopt's own.
        layer_name: as the checkpoint or the engine spells it. ``N`` or ``E`` for an index asks for all.
        platform: ``cpu``, ``xpu``, ``cuda`` or ``rocm``.
        weight_shape: ``(N, K)``, where known: some kernels take some shapes only.
        capability: of the device, (major, minor) or 10 · major + minor; None asks it.
        linear_backend: ``auto``, ``cpu``, ``xpu``, ``xpu_woq`` or ``torch``.
        input_dtype, out_dtype: of x and of the result.
        weight_dtype: in which the weight is stored, where known: it beats the configuration's lists.
        scale_dtype: in which its scales are stored.
        fused_shards: last part of a fused layer's name -> those of its shards; None for the usual ones.
        force_kernel, disabled: as in :func:`choose_scaled_mm_linear_kernel`.

    Returns:
        The decision; with ``kernel`` None and ``reasons`` where no kernel fits or the layer is left alone.

    Raises:
        NotImplementedError: the checkpoint's format is not FP8; the message names it.
        ValueError: the configuration contradicts itself, the shards of a fused layer disagree, or an argument names
            what does not exist.

    >>> decision = route({"quant_method": "fp8", "weight_block_size": [128, 128]}, "model.layers.0.mlp.down_proj")
    >>> decision.scheme, decision.kernel.__name__, decision.activation
    ('w8a16_block', 'CPUFp8BlockScaledMMKernel', 'group128')
    """
    check_route_arguments(layer_name, input_dtype, out_dtype, weight_dtype, scale_dtype, fused_shards)
    where = f"layer `{layer_name}`"
    weight_shape = read_shape(where, "weight_shape", weight_shape)
    quantized = None if weight_dtype is None else weight_dtype.itemsize == 1
    if weight_dtype is not None and quantized:
        check_dtype(where, "weight", weight_dtype, (torch.float8_e4m3fn,), "float8_e4m3fn")
    parts = _parts(quantization_config, layer_name, quantized, fused_shards)
    scheme = get_scheme_from_parts(
        parts.weight, parts.input, platform=platform, capability=capability, linear_backend=linear_backend
    )
    if parts.weight is None:
        if quantized:
            refuse(where, "a quantisation of its float8_e4m3fn weight in the configuration", f"none ({parts.reason})")
        return Route(scheme, None, None, "none", None, (parts.reason or "not quantised",))
    activation = parts.input
    activation_key = activation.key(parts.weight) if activation is not None else None
    if activation_key is None and scheme == "w8a8_block":  # blocks on XPU, weight-only in the checkpoint
        activation_key = _group_key(parts.weight.block_size)
    config = FP8ScaledMMLinearLayerConfig(
        parts.weight.key(scale_dtype), activation_key, weight_shape, input_dtype, out_dtype, platform
    )
    kernel, reasons = _choose(config, _LISTS[scheme], capability, force_kernel, disabled, linear_backend)
    if kernel is not None and kernel.takes_quantized_input != scheme.startswith("w8a8"):  # forced
        bits = "8" if kernel.takes_quantized_input else "16"
        scheme = f"w8a{bits}" + ("_block" if parts.weight.block_size else "")
    if activation is not None and kernel is not None and not kernel.takes_quantized_input:
        _log_once(f"blockscale: {kernel.__name__} keeps x in {input_dtype}: it does not quantise x as {activation}")
    return Route(
        scheme,
        parts.weight.strategy,
        parts.weight.block_size,
        "none" if activation is None else str(activation),
        kernel,
        tuple(reasons or ([] if kernel else [f"no class is registered for {scheme} on {platform}"])),
        config,
    )


def _parts(
    quantization_config: Mapping[str, Any] | None,
    name: str,
    quantized: bool | None,
    fused_shards: Mapping[str, Sequence[str]] | None,
) -> LayerParts:
    own = layer_parts(quantization_config, name, quantized=quantized)
    shards = shard_names(name, None if fused_shards is None else dict(fused_shards))
    if not shards or own.named:
        return own
    each = {shard: layer_parts(quantization_config, shard, quantized=quantized) for shard in shards}
    decisions = {(parts.weight, parts.input) for parts in each.values()}
    if len(decisions) > 1:
        got = ", ".join(f"`{shard}` {_describe(parts)}" for shard, parts in each.items())
        refuse(f"layer `{name}`", "its shards to be quantised alike", got)
    return each[shards[0]]


def _describe(parts: LayerParts) -> str:
    if parts.weight is None:
        return "not quantised"
    return f"{parts.weight.strategy} weight, {parts.input or '16-bit'} activation"


def _group_key(block_size: tuple[int, int] | None) -> QuantKey:
    assert block_size is not None
    return QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, False, GroupShape(1, block_size[1])))


def _choose(
    config: FP8ScaledMMLinearLayerConfig,
    possible_kernels: Sequence[Kernel] | Mapping[str, Sequence[Kernel]],
    compute_capability: int | tuple[int, int] | None,
    force_kernel: Kernel | str | None,
    disabled: Iterable[Kernel | str],
    linear_backend: str,
) -> tuple[Kernel | None, list[str]]:
    where = "choose_scaled_mm_linear_kernel"
    if not isinstance(config, FP8ScaledMMLinearLayerConfig):
        refuse(where, "`config` to be an FP8ScaledMMLinearLayerConfig", shown(config))
    check_backend(where, linear_backend)
    candidates = _candidates(where, config, possible_kernels)
    known = {kernel.__name__: kernel for kernel in [*_registered(), *candidates]}
    off = _disabled(where, disabled, known)
    if force_kernel is not None:
        if isinstance(force_kernel, str):
            if force_kernel not in known:
                refuse(where, f"`force_kernel` {', '.join(known)}", shown(force_kernel))
            force_kernel = known[force_kernel]
        if not _is_kernel(force_kernel):
            refuse(where, "`force_kernel` to be a kernel class, its name, or None", shown(force_kernel))
        candidates, linear_backend = [force_kernel], "auto"
    capability = capability_number(where, compute_capability)
    reasons: list[str] = []
    for kernel in candidates:
        reason = _why_not(kernel, config, capability, off, linear_backend)
        if reason is None:
            passed_over = f"; passed over: {'; '.join(reasons)}" if reasons else ""
            _log_once(f"blockscale: {kernel.__name__} for {config}{passed_over}")
            return kernel, reasons
        reasons.append(f"{kernel.__name__}: {reason}")
    _log_once(f"blockscale: no kernel for {config}: {'; '.join(reasons) or 'none is registered'}")
    return None, reasons


def _candidates(
    where: str,
    config: FP8ScaledMMLinearLayerConfig,
    possible_kernels: Sequence[Kernel] | Mapping[str, Sequence[Kernel]],
) -> list[Kernel]:
    """The classes of ``possible_kernels`` for the platform of ``config``."""
    listed: Any = possible_kernels
    if isinstance(possible_kernels, Mapping):
        platform = build_platform() if config.platform is None else config.platform
        if platform not in possible_kernels:
            words = f"`platform` of the configuration to be one of {', '.join(map(str, possible_kernels))}"
            refuse(where, words, shown(platform))
        listed = possible_kernels[platform]
    if not isinstance(listed, (list, tuple)) or not all(map(_is_kernel, listed)):
        refuse(where, "`possible_kernels` to be a list of kernel classes, or such a list per platform", shown(listed))
    return list(listed)


def _is_kernel(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, MMLinearKernel)


def _why_not(
    kernel: Kernel, config: FP8ScaledMMLinearLayerConfig, capability: int | None, off: set[str], linear_backend: str
) -> str | None:
    if kernel.__name__ in off:
        return "disabled"
    if linear_backend not in ("auto", getattr(kernel, "linear_backend", "auto")):
        return f"excluded by linear_backend={linear_backend}"
    for answer in (lambda: kernel.is_supported(capability), lambda: kernel.can_implement(config)):
        able, reason = answer()
        if not able:
            return reason or "no reason given"
    return None


def _registered() -> list[Kernel]:
    tables = (POSSIBLE_FP8_BLOCK_KERNELS, POSSIBLE_FP8_KERNELS, POSSIBLE_W8A16_KERNELS)
    return list(dict.fromkeys(kernel for table in tables for kernels in table.values() for kernel in kernels))


def _disabled(where: str, disabled: Iterable[Kernel | str], known: Mapping[str, Kernel]) -> set[str]:
    words = "`disabled` to be a list of kernel classes or their names"
    if isinstance(disabled, str) or not isinstance(disabled, Iterable):
        refuse(where, words, shown(disabled))
    names = []
    for one in disabled:
        if not (isinstance(one, str) or _is_kernel(one)):
            refuse(where, words, shown(one))
        names.append(one if isinstance(one, str) else one.__name__)
    sources = [("`disabled`", names)]
    variable = os.environ.get("BLOCKSCALE_DISABLED_KERNELS", "")
    sources.append(("BLOCKSCALE_DISABLED_KERNELS", [name.strip() for name in variable.split(",") if name.strip()]))
    for source, listed in sources:
        for name in listed:
            if name not in known:
                refuse(where, f"{source} to name classes of {', '.join(known)}", name)
    return {name for _, listed in sources for name in listed}


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.info(message)
