"""What vLLM's linear methods do differently for a layer that a kernel of this package runs.

* Block scales of a layer whose shards or ranks are cut inside a block are loaded per row (:mod:`.row_scales`); vLLM would
  put them in the wrong rows without a word. Where another kernel was chosen such a layer is refused.
* A scale that does not fit is named with its layer and checkpoint; vLLM has an assertion without words there.
* Loaded weights go to the kernel as the checkpoint has them: not transposed, and per-tensor shards not requantised.

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
from .row_scales import check_grid, column_step, is_cut, per_row
from .vllm_kernels import ROWS_OF_BLOCK, BlockscaleKernel

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
ONLINE_METHODS = ((f"{_QUANTIZATION}.online.fp8", "Fp8PerBlockOnlineLinearMethod"),)
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
        step = column_step(part[1], whole[1], block_size[1]) if cut else None
        loader = _scale_loader(layer, name, whole, block_size and tuple(block_size), step, kernel.checkpoint)
        if cut:
            _keep_per_row(layer, name, part, (block_size[0], step), loader)
        else:
            with contextlib.suppress(AttributeError):  # a vLLM whose parameters can't be given another loader
                getattr(layer, name).weight_loader = loader


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


def _scale_loader(
    layer: nn.Module,
    name: str,
    whole: tuple[int, int],
    block_size: tuple[int, int] | None,
    step: int | None,
    checkpoint: str,
) -> Callable[..., Any]:
    """The loader of a layer's scales, that says what does not fit, and with ``step`` writes blocks out per row.

    Block scales are looked at as the checkpoint has them: of too large ones vLLM would cut out what it needs.
    """
    load = getattr(layer, name).weight_loader
    where = f"blockscale: {layer_label(layer)}"

    def weight_loader(parameter: nn.Parameter, scales: Tensor, *shard: Any, **kwargs: Any) -> Any:
        label = f"{name}` of shard `{shard[0]}" if shard else name
        try:
            loaded = scales
            if block_size is not None:
                rows = _rows_of_shard(layer, whole[0], *shard, **kwargs)
                check_grid(where, label, scales, rows, whole[1], block_size)
                loaded = scales if step is None else per_row(scales, rows, whole[1], block_size, step)
            return load(parameter, loaded, *shard, **kwargs)
        except (AssertionError, RuntimeError) as error:
            words = f"`{label}` that fits the layer's scales of shape {list(parameter.shape)}"
            got = f"{list(scales.shape)} ({checkpoint}): {error or 'shapes differ'}"
            raise ValueError(f"{where}: expected {words}, got {got}") from error
        except ValueError as error:
            raise ValueError(f"{error} ({checkpoint})") from error

    return weight_loader


def _keep_per_row(
    layer: nn.Module, name: str, part: tuple[int, int], block_size: tuple[int, int], loader: Callable[..., Any]
) -> None:
    """Put a parameter of one scale per row in the place of the grid; vLLM cuts it as it cuts the weight."""
    # NaN: what no load writes is found when the kernel reads the layer.
    blank = torch.full((part[0], (part[1] + block_size[1] - 1) // block_size[1]), torch.nan, dtype=torch.float32)
    parameter = GroupQuantScaleParameter(data=blank, input_dim=1, output_dim=0, weight_loader=loader)
    setattr(parameter, ROWS_OF_BLOCK, block_size)
    delattr(layer, name)
    layer.register_parameter(name, parameter)


def _rows_of_shard(layer: nn.Module, all_rows: int, shard: Any = None, **kwargs: Any) -> int | None:
    """Rows that the tensor in the checkpoint has, or None where a layer of its own kind does not say so."""
    shard = kwargs.get("loaded_shard_id", shard)
    heads = {
        "q": ("total_num_heads", "head_size"),
        "k": ("total_num_kv_heads", "head_size"),
        "v": ("total_num_kv_heads", "v_head_size" if hasattr(layer, "v_head_size") else "head_size"),
    }
    attention = all(hasattr(layer, one) for pair in heads.values() for one in pair)
    sizes = {one: getattr(layer, pair[0]) * getattr(layer, pair[1]) for one, pair in heads.items() if attention}
    if shard is None:
        return sum(sizes.values()) if attention else all_rows  # ranks may repeat heads of k and v
    if isinstance(shard, int) and hasattr(layer, "output_sizes"):
        return layer.output_sizes[shard]
    return sizes.get(shard) if isinstance(shard, str) else None
