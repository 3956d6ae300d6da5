"""Load a checkpoint into a model: its FP8 linear layers stay FP8, everything else is copied in place."""

from __future__ import annotations

import logging
import re
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_block_size, check_float_dtype, refuse
from .linear import BlockScaledLinear
from .shards import Checkpoint, checkpoint_path, read_json

logger = logging.getLogger("blockscale")

# One multiplier, under the names that exporters give it.
_SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale")
# Scales of activations have no use here: activations stay as they come, which is more exact.
ACTIVATION_SCALE_NAMES = ("input_scale", "activation_scale")
# Quantisation methods whose FP8 linear layers are an e4m3 weight and a multiplier.
_METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8", "modelopt")

TORCH_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
}


def read_config(source: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint directory; {} for a single file without one beside it.

    Raises:
        FileNotFoundError: there is no checkpoint, or its directory has no ``config.json``.
        ValueError: it can't be read.
    """
    if not source.exists():
        raise FileNotFoundError(f"expected a checkpoint directory or a .safetensors file, got {source}: not found")
    path = (source.parent if source.is_file() else source) / "config.json"
    if path.is_file():
        return read_json(path)
    if source.is_dir():
        raise FileNotFoundError(f"expected config.json in {source}, got none")
    return {}


class Layers:
    """FP8 linear layers of an open checkpoint.

    Attributes:
        weights: names of the FP8 weights.
        block_size: of their scale grids, from ``quantization_config``; (128, 128) where it names none.

    Raises:
        NotImplementedError: the configuration names another quantisation than FP8.
        ValueError: the block size is not a positive pair, or a part of the configuration is no JSON object.
    """

    def __init__(self, checkpoint: Checkpoint, config: dict[str, Any]) -> None:
        self.checkpoint = checkpoint
        self.block_size = _block_size(config)
        self.weights = [
            name
            for name, info in checkpoint.tensors.items()
            if info.dtype == "F8_E4M3" and name.rpartition(".")[2] == "weight"
        ]

    def scale_name(self, weight: str) -> str:
        """Name of the scales of ``weight``; codes without any have no meaning, which is an error."""
        for name in (weight.removesuffix("weight") + suffix for suffix in _SCALE_NAMES):
            if name in self.checkpoint.tensors:
                return name
        raise ValueError(
            f"expected a scale beside the float8_e4m3fn weight `{weight}` in {self.checkpoint.files[weight]}, got none"
        )

    def skeleton(self, weight: str) -> BlockScaledLinear:
        """The layer of ``weight`` on meta, to check dtypes and shapes before anything is read."""
        return self._build(weight, self._meta(weight), self._meta(self.scale_name(weight)))

    def load(self, weight: str) -> BlockScaledLinear:
        """The layer of ``weight``, without a bias."""
        return self._build(weight, self.checkpoint.load(weight), self.checkpoint.load(self.scale_name(weight)))

    def _build(self, name: str, weight: Tensor, scales: Tensor) -> BlockScaledLinear:
        try:
            return BlockScaledLinear.from_fp8(weight, scales, block_size=self.block_size)
        except ValueError as error:
            raise ValueError(f"`{name}` in {self.checkpoint.files[name]} can't be loaded: {error}") from error

    def _meta(self, name: str) -> Tensor:
        info = self.checkpoint.tensors[name]
        if info.dtype not in TORCH_DTYPES:
            refuse(str(self.checkpoint.files[name]), f"`{name}` of dtype {', '.join(TORCH_DTYPES)}", info.dtype)
        return torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")


def load_checkpoint(model: nn.Module, directory: str | PathLike[str]) -> nn.Module:
    """Load ``directory`` into ``model``; linear layers with FP8 weights become :class:`BlockScaledLinear`.

    Names, dtypes and shapes are checked before anything is changed. Tensors that are not FP8 layers are copied in
    place, into the dtype and device that the model has; parameters on meta get new tensors on the CPU. Tied parameters
    stay tied. Hooks of a replaced layer are not carried over: register them afterwards. One layer is replaced at a time
    and its old weight freed, unless something else holds it: beside the model there are one layer's codes at most, and
    pages of the mapped files, which the kernel takes back when it needs them.

    Args:
        model: with the checkpoint's module names, on the CPU or on meta.
        directory: directory with ``config.json`` and safetensors weights, or one ``.safetensors`` file. Scales may be
            called ``weight_scale_inv``, ``weight_scale`` or ``scale``.

    Returns:
        ``model``; a new layer where ``model`` itself is the linear layer to replace.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: a file is missing.
        NotImplementedError: the checkpoint is quantised in another way than FP8.
        ValueError: a file can't be read, an FP8 weight has no scales or no linear layer, a tensor of the checkpoint or
            of the model has no counterpart, or shapes differ.

    >>> import tempfile, safetensors.torch
    >>> path = Path(tempfile.mkdtemp()) / "tiny.safetensors"
    >>> tensors = {"0.weight": torch.ones(4, 8).to(torch.float8_e4m3fn), "0.weight_scale_inv": torch.ones(1, 1)}
    >>> safetensors.torch.save_file(tensors, path)
    >>> load_checkpoint(nn.Sequential(nn.Linear(8, 4, bias=False)), path)
    Sequential(
      (0): BlockScaledLinear(in_features=8, out_features=4, bias=False, block_size=(128, 128))
    )
    """
    source = checkpoint_path("load_checkpoint", "directory", directory)
    config = read_config(source)
    with Checkpoint(source) as checkpoint:
        layers = Layers(checkpoint, config)
        aliases = _aliases(model)
        plain = _plain_tensors(layers)
        _check_layers(model, layers, aliases)
        _check_plain(model, checkpoint, plain, aliases)
        _check_complete(model, [*layers.weights, *plain], aliases)
        for name in layers.weights:
            model = _replace(model, aliases[name], layers.load(name))
        for name in plain:
            _copy(model, aliases[name], checkpoint.load(name))
    return model


def _block_size(config: dict[str, Any]) -> tuple[int, int]:
    key = "quantization_config" if config.get("quantization_config") else "compression_config"
    quantization = _object(key, config.get(key))
    method = quantization.get("quant_method", "fp8")
    if method not in _METHODS:
        raise NotImplementedError(f"expected quant_method {', '.join(_METHODS)}, got {method}")
    sizes = quantization.get("weight_block_size")
    # compressed-tensors; groups may have any name
    for name, group in _object("config_groups", quantization.get("config_groups")).items():
        weights = _object(f"weights of {name}", _object(name, group).get("weights"))
        sizes = sizes or weights.get("block_structure")
    if isinstance(sizes, str):  # an older spelling, "128x128"
        sizes = [int(size) for size in re.findall(r"\d+", sizes)]
    return check_block_size("quantization_config", sizes or (128, 128))


def _object(name: str, value: Any) -> dict[str, Any]:
    """``value`` of the quantisation configuration, which may be null."""
    if not isinstance(value, dict | None):
        refuse("quantization_config", f"`{name}` to be a JSON object", repr(value))
    return value or {}


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Name of each parameter and persistent buffer -> the names under which the same tensor is found."""
    by_tensor: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                by_tensor.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
    return {name: names for names in by_tensor.values() for name in names}


def _plain_tensors(layers: Layers) -> list[str]:
    """Names of the tensors of the checkpoint that are no part of an FP8 layer."""
    tensors = layers.checkpoint.tensors
    parts = set(layers.weights) | {layers.scale_name(name) for name in layers.weights}
    unused = {
        name.removesuffix("weight") + suffix for name in layers.weights for suffix in ACTIVATION_SCALE_NAMES
    } & tensors.keys()
    if unused:
        logger.info("blockscale: %d activation scales are not used: activations are not quantised", len(unused))
    return [name for name in tensors if name not in parts and name not in unused]


def _check_layers(model: nn.Module, layers: Layers, aliases: dict[str, list[str]]) -> None:
    for name in layers.weights:
        skeleton = layers.skeleton(name)
        if name not in aliases:
            refuse("load_checkpoint", f"a linear layer in the model for `{name}`", "none")
        for alias in aliases[name]:
            linear = model.get_submodule(alias.rpartition(".")[0])
            if type(linear) not in (nn.Linear, BlockScaledLinear):
                words = f"a torch.nn.Linear in the model for `{alias}` of dtype float8_e4m3fn"
                refuse("load_checkpoint", words, type(linear).__name__)
            shape = [linear.out_features, linear.in_features]
            if [skeleton.out_features, skeleton.in_features] != shape:
                refuse("load_checkpoint", f"`{name}` of shape {shape}", list(skeleton.weight.shape))
            if linear.bias is not None:
                check_float_dtype("load_checkpoint", alias.removesuffix("weight") + "bias", linear.bias.dtype)


def _check_plain(model: nn.Module, checkpoint: Checkpoint, plain: list[str], aliases: dict[str, list[str]]) -> None:
    for name in plain:
        info, file = checkpoint.tensors[name], checkpoint.files[name]
        if name not in aliases:
            refuse("load_checkpoint", f"a parameter or buffer in the model for `{name}` of {file}", "none")
        if info.dtype.startswith("F8"):
            words = f"`{name}` of {file} to be the float8_e4m3fn weight of a linear layer, or its scale"
            refuse("load_checkpoint", words, f"dtype {info.dtype}")
        for alias in aliases[name]:
            owner, _, leaf = alias.rpartition(".")
            if leaf != "bias" and isinstance(model.get_submodule(owner), BlockScaledLinear):
                refuse("load_checkpoint", f"`{name}` of {file} in FP8, as the model holds it", f"dtype {info.dtype}")
        target = _get(model, name)
        shape = target.shape
        if info.dtype == "C64" and not target.is_complex():
            refuse("load_checkpoint", f"`{name}` of {file} of a real dtype, as the model holds it", info.dtype)
        if shape != info.shape:
            refuse("load_checkpoint", f"`{name}` of {file} of shape {list(shape)}", list(info.shape))


def _check_complete(model: nn.Module, names: list[str], aliases: dict[str, list[str]]) -> None:
    """Each tensor of the model comes from the checkpoint, or is there already and is never stored."""
    given = {alias for name in names for alias in aliases[name]}
    missing = [
        name
        for name in aliases
        if name not in given and not (name.endswith("weight_scale_inv") and name.removesuffix("_scale_inv") in given)
    ]
    if missing:
        refuse("load_checkpoint", f"a tensor in the checkpoint for {_listed(missing)} of the model", "none")
    unset = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in aliases]
    if unset:
        words = f"buffers off meta where a checkpoint does not store them ({_listed(unset)})"
        refuse("load_checkpoint", words, "meta: build the model on the CPU")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"`{name}`" for name in names[:5]) + more


def _get(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def _replace(model: nn.Module, names: list[str], loaded: BlockScaledLinear) -> nn.Module:
    """Layers like ``loaded`` in the place of those whose weights have ``names``; at once, so that theirs are freed.

    Returns ``model``, or the new layer where it is the model itself.
    """
    layers: dict[nn.Module, BlockScaledLinear] = {}
    places = []
    for name in names:
        path = name.rpartition(".")[0]
        linear: Any = model.get_submodule(path)
        if linear not in layers:  # it may be found under several names
            layers[linear] = _in_place_of(linear, loaded)
        owner, _, child = path.rpartition(".")
        if child:
            places.append((model.get_submodule(owner), child, layers[linear]))
    for module, child, layer in places:
        setattr(module, child, layer)
    return layers.get(model, model)


def _in_place_of(linear: nn.Linear | BlockScaledLinear, loaded: BlockScaledLinear) -> BlockScaledLinear:
    """A layer with the codes and scales of ``loaded`` (shared) and the bias, device and mode of ``linear``."""
    layer = BlockScaledLinear(
        loaded.in_features, loaded.out_features, bias=False, block_size=loaded.block_size, device="meta"
    )
    layer.weight, layer.weight_scale_inv = loaded.weight, loaded.weight_scale_inv
    if not linear.weight.is_meta:
        layer.to(linear.weight.device)
    layer.bias = linear.bias
    return layer.train(linear.training)


def _copy(model: nn.Module, names: list[str], source: Tensor) -> None:
    """Copy ``source`` into the tensor that the model has under ``names``; a new one takes its place on meta."""
    target = _get(model, names[0])
    if not target.is_meta:
        with torch.no_grad():
            target.copy_(source)
        return
    tensor = source.to(target.dtype, copy=True)
    if isinstance(target, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=target.requires_grad)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, tensor)
