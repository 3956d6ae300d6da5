"""What vLLM's linear methods do differently for a layer that a kernel of this package runs.

* Block scales of a layer whose shards or ranks are cut inside a block are loaded per row (:mod:`.row_scales`); vLLM would
  put them in the wrong rows without a word. Where another kernel was chosen such a layer is refused.
* A scale that does not fit is named with its layer and checkpoint; vLLM has an assertion without words there.
* Loaded weights go to the kernel as the checkpoint has them: not transposed, and per-tensor shards not requantised.
* Batch-invariant mode calls the kernel, which is invariant, instead of reading its packed weight.

Imports vLLM, like :mod:`.vllm_kernels`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.parameter import GroupQuantScaleParameter

from ..checks import refuse
from ..kernels.layer_params import layer_label
from .row_scales import column_step, is_cut, per_row
from .vllm_kernels import ROWS_OF_BLOCK, BlockscaleKernel, checkpoint_label

__all__ = ["LINEAR_METHODS", "available", "hook"]

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_SCHEMES = f"{_QUANTIZATION}.compressed_tensors.schemes"
# Checkpoints in FP8: (module, class).
LINEAR_METHODS = (
    (f"{_QUANTIZATION}.fp8", "Fp8LinearMethod"),
    (f"{_SCHEMES}.compressed_tensors_w8a8_fp8", "CompressedTensorsW8A8Fp8"),
    (f"{_SCHEMES}.compressed_tensors_w8a16_fp8", "CompressedTensorsW8A16Fp8"),
)
# Weights that vLLM quantises itself at load, a fused layer as one: its grid does not restart at shards.
ONLINE_METHODS = (
    (f"{_QUANTIZATION}.online.fp8", "Fp8PerBlockOnlineLinearMethod"),
    (f"{_QUANTIZATION}.online.fp8", "Fp8PerTensorOnlineLinearMethod"),
    (f"{_QUANTIZATION}.online.fp8", "Fp8PtpcOnlineLinearMethod"),
)
_HOOKED = "_blockscale_original"


def available() -> list[str]:
    """Names of the methods for FP8 checkpoints that this vLLM has."""
    return [name for module, name in LINEAR_METHODS if _find(module, name) is not None]


def hook() -> tuple[list[str], list[str]]:
    """Wrap the methods that exist; returns the names of the classes that were found and of those that were not."""
    found, missing = [], []
    for module, name in (*LINEAR_METHODS, *ONLINE_METHODS):
        cls = _find(module, name)
        if cls is None:
            missing.append(name)
            continue
        if (module, name) in LINEAR_METHODS:
            _wrap(cls, "create_weights", _create_weights)
            _wrap(cls, "process_weights_after_loading", _process_weights_after_loading)
        else:
            _wrap(cls, "create_weights", _create_online_weights)
        _wrap(cls, "apply" if "apply" in cls.__dict__ else "apply_weights", _apply)
        found.append(name)
    return found, missing


def _find(module: str, name: str) -> type | None:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _wrap(cls: type, name: str, wrapper: Callable[..., Any]) -> None:
    original = cls.__dict__.get(name)
    if original is None or hasattr(original, _HOOKED):
        return

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(method, _HOOKED, original)
    setattr(cls, name, method)


def kernel_of(method: Any) -> Any:
    """The kernel that a linear method or scheme has chosen."""
    return getattr(method, "fp8_linear", None) or getattr(method, "linear_kernel", None)


def _create_weights(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
    layer, widths = arguments["layer"], list(arguments["output_partition_sizes"])
    part = sum(widths), arguments["input_size_per_partition"]
    whole = arguments["output_size"], arguments["input_size"]
    block_size = getattr(self, "weight_block_size", None)
    cut = block_size is not None and is_cut(widths, *part, whole, tuple(block_size))
    if cut:
        layer.allow_fp8_block_shape_mismatch = True  # or vLLM refuses what two ranks cut inside a block
    original(self, *args, **kwargs)
    kernel = kernel_of(self)
    ours = isinstance(kernel, BlockscaleKernel)
    if cut and not ours:
        words = f"shards of multiples of block_n = {block_size[0]} rows for {type(kernel).__name__}"
        refuse(f"blockscale: {layer_label(layer)}", words, f"{widths}: vLLM would misplace their scales")
    if ours:
        kernel.grid_is_whole = True
        name = "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale"
        if cut:
            _load_per_row(layer, name, part, whole, tuple(block_size))
        else:
            _name_misfits(layer, name, kernel.checkpoint)


def _create_online_weights(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if isinstance(kernel_of(self), BlockscaleKernel):
        kernel_of(self).grid_is_whole = True


def _process_weights_after_loading(original: Callable[..., None], self: Any, layer: nn.Module) -> None:
    kernel = kernel_of(self)
    if not isinstance(kernel, BlockscaleKernel) or getattr(layer, "_cpu_skip_gemm_dispatch", False):
        original(self, layer)
        return
    layer.input_scale = None  # activations are not quantised
    kernel.process_weights_after_loading(layer)


def _apply(
    original: Callable[..., Tensor], self: Any, layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    kernel = kernel_of(self)
    if isinstance(kernel, BlockscaleKernel):
        return kernel.apply_weights(layer, x, *args, **kwargs)
    return original(self, layer, x, *args, **kwargs)


def _load_per_row(
    layer: nn.Module, name: str, part: tuple[int, int], whole: tuple[int, int], block_size: tuple[int, int]
) -> None:
    """Put a parameter of one scale per row in the place of the grid; its loader cuts it as it cuts the weight."""
    load = getattr(layer, name).weight_loader
    step = column_step(part[1], whole[1], block_size[1])
    where = f"blockscale: {layer_label(layer)}"
    checkpoint = checkpoint_label()

    def weight_loader(parameter: nn.Parameter, scales: Tensor, *shard: Any, **kwargs: Any) -> Any:
        rows = _rows_of_shard(layer, whole[0], *shard, **kwargs)
        try:
            written_out = per_row(where, _shard_name(name, *shard), scales, rows, whole[1], block_size, step)
        except ValueError as error:
            raise ValueError(f"{error} ({checkpoint})") from error
        return load(parameter, written_out, *shard, **kwargs)

    # NaN: what no load writes is found when the kernel reads the layer.
    blank = torch.full((part[0], (part[1] + step - 1) // step), torch.nan, dtype=torch.float32)
    parameter = GroupQuantScaleParameter(data=blank, input_dim=1, output_dim=0, weight_loader=weight_loader)
    setattr(parameter, ROWS_OF_BLOCK, (block_size[0], step))
    delattr(layer, name)
    layer.register_parameter(name, parameter)


def _rows_of_shard(layer: nn.Module, all_rows: int, shard: Any = None, **kwargs: Any) -> int | None:
    """Rows that the tensor in the checkpoint has, or None where a layer of its own kind does not say so."""
    shard = kwargs.get("loaded_shard_id", shard)
    if shard is None:
        return all_rows
    if isinstance(shard, int) and hasattr(layer, "output_sizes"):
        return layer.output_sizes[shard]
    sizes = {"q": ("total_num_heads", "head_size"), "k": ("total_num_kv_heads", "head_size")}
    sizes["v"] = ("total_num_kv_heads", "v_head_size" if hasattr(layer, "v_head_size") else "head_size")
    if shard in sizes and all(hasattr(layer, one) for one in sizes[shard]):
        heads, size = (getattr(layer, one) for one in sizes[shard])
        return heads * size
    return None


def _shard_name(name: str, shard: Any = None, *others: Any) -> str:
    return name if shard is None else f"{name}` of shard `{shard}"


def _name_misfits(layer: nn.Module, name: str, checkpoint: str) -> None:
    """Let the loader of the scales say what does not fit."""
    parameter = getattr(layer, name)
    load = parameter.weight_loader

    def weight_loader(target: nn.Parameter, scales: Tensor, *shard: Any, **kwargs: Any) -> Any:
        try:
            return load(target, scales, *shard, **kwargs)
        except (AssertionError, RuntimeError) as error:
            words = f"`{_shard_name(name, *shard)}` that fits the layer's scales of shape {list(target.shape)}"
            got = f"{list(scales.shape)} ({checkpoint}): {error or 'shapes differ'}"
            raise ValueError(f"blockscale: {layer_label(layer)}: expected {words}, got {got}") from error

    with contextlib.suppress(AttributeError):  # a vLLM whose parameters can't be given another loader
        parameter.weight_loader = weight_loader
