"""transformers: FP8 checkpoints stay FP8 on the CPU, where transformers alone writes them out in bf16, twice the memory.

    from blockscale.integrations.transformers import load
    model = load("./model-fp8")                     # AutoModelForCausalLM.from_pretrained, FP8 layers kept

or once ``enable()``, after which ``from_pretrained`` of any model class does it. Checkpoints of ``quant_method`` ``fp8``
(DeepSeek, Qwen; block or per tensor) and ``compressed-tensors`` (FP8 block, channel, tensor, weight-only); linear layers
become :class:`blockscale.BlockScaledLinear`. ``save_pretrained`` writes the tensors of the checkpoint again, byte for byte.
Models on a GPU, other quantisations, and models with FP8 tensors that are no linear layers (fused experts) go
transformers' own way.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..linear import BlockScaledLinear
from ..model_loading import ACTIVATION_SCALE_NAMES, TORCH_DTYPES, Layers, read_config
from ..shards import Checkpoint
from .weight_arena import WeightArena

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

__all__ = ["disable", "enable", "load"]

logger = logging.getLogger("blockscale")

METHODS = ("fp8", "compressed-tensors")

_replaced: dict[str, type] = {}  # method -> transformers' own quantizer


def enable() -> None:
    """Let ``from_pretrained`` keep FP8 layers on the CPU, in this process, until :func:`disable`.

    Raises:
        ImportError: transformers is not installed, or has no quantizers for FP8 where they are known to be.
    """
    mapping = _mapping()
    for method in METHODS:
        own = mapping.get(method)
        if own is not None and not issubclass(own, _KeepsFP8):
            _replaced[method] = own
            mapping[method] = type(f"Blockscale{own.__name__}", (_KeepsFP8, own), {})


def disable() -> None:
    """Undo :func:`enable`. Models that were loaded stay as they are."""
    for method, own in _replaced.items():
        _mapping()[method] = own
    _replaced.clear()


def load(path: str | PathLike[str], *, auto_class: Any = None, **kwargs: Any) -> Any:
    """Load a checkpoint with its FP8 linear layers kept in FP8.

    Args:
        path: of the checkpoint, as ``from_pretrained`` takes it.
        auto_class: transformers class with ``from_pretrained``; None is ``AutoModelForCausalLM``.
        kwargs: further arguments of ``from_pretrained``.

    Returns:
        The model, in evaluation mode.

    Raises:
        ImportError: transformers, or compressed-tensors where the checkpoint needs it, is not installed.
        NotImplementedError: the checkpoint is quantised by a method that transformers does not know.
        ValueError: an FP8 tensor has no scales, or scales of a wrong shape; the message names file and tensor.
    """
    mapping = _mapping()
    source = Path(path)
    if source.is_dir():
        quantization = read_config(source).get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if quantization and method not in mapping:
            raise NotImplementedError(
                f"load: expected `quant_method` of {source / 'config.json'} to be one of {', '.join(METHODS)} or another "
                f"that transformers knows, got {method!r}"
            )
    if auto_class is None:
        from transformers import AutoModelForCausalLM as auto_class
    with _enabled():
        return auto_class.from_pretrained(path, **kwargs)


@contextmanager
def _enabled() -> Iterator[None]:
    before = bool(_replaced)
    enable()
    try:
        yield
    finally:
        if not before:
            disable()


def _mapping() -> dict[str, type]:
    """transformers' table of quantizers."""
    try:
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    except ImportError as error:
        raise ImportError(
            f"blockscale: expected transformers with quantizers.auto.AUTO_QUANTIZER_MAPPING ({error}); "
            "install or upgrade it with `pip install --upgrade transformers`"
        ) from error
    if not any(method in AUTO_QUANTIZER_MAPPING for method in METHODS):
        raise ImportError("blockscale: this transformers has no quantizer for fp8 or compressed-tensors; upgrade it")
    return AUTO_QUANTIZER_MAPPING


class _Stored(nn.Module):
    """In the place of a linear layer while a checkpoint is read: its tensors as they are stored, on meta."""

    def __init__(self, linear: nn.Linear, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        for name, (shape, dtype) in tensors.items():
            blank = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(blank, requires_grad=False))
        self.bias = linear.bias


class _KeepsFP8:
    """What a quantizer of transformers does differently for FP8 checkpoints on the CPU; mixed in before it."""

    _layers: dict[str, str]  # module in the model -> name of its scales
    _kept: bool

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        self._kept, self._layers = False, {}
        self._cpu = _on_cpu(kwargs.get("device_map"))
        if not self._cpu or not self.pre_quantized or getattr(self.quantization_config, "dequantize", False) is True:
            self._cpu = False
            super().validate_environment(*args, **kwargs)

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        if self._cpu and checkpoint_files:
            self._kept = self._put_placeholders(model, Path(checkpoint_files[0]))
        if self._kept:
            return model
        super().validate_environment(device_map="cpu" if self._cpu else kwargs.get("device_map"))
        return super()._process_model_before_weight_loading(model, checkpoint_files=checkpoint_files, **kwargs)

    def _put_placeholders(self, model: nn.Module, file: Path) -> bool:
        """Replace the linear layers that the checkpoint of ``file`` holds in FP8; False where it holds others, too."""
        source = file.parent
        with Checkpoint(source) as checkpoint:
            layers = Layers(checkpoint, read_config(source))
            self._block_size = layers.block_size
            places = {name: _module_name(model, name.removesuffix(".weight")) for name in layers.weights}
            strange = [name for name, place in places.items() if place is None]
            strange += [
                name
                for name, info in checkpoint.tensors.items()
                if info.dtype.startswith("F8_E4") and name not in places
            ]
            if strange or not places:
                if strange:
                    words = "goes transformers' own way: `%s` in %s is in FP8 and is no linear layer of the model"
                    logger.warning(f"blockscale: the checkpoint {words}", strange[0], checkpoint.files[strange[0]])
                return False
            for name, place in places.items():
                layers.skeleton(name)  # dtypes and shapes, before anything is read
                scale_name = layers.scale_name(name)
                prefix = name.removesuffix("weight")
                stored = [name, scale_name, *(prefix + one for one in ACTIVATION_SCALE_NAMES)]
                infos = {
                    one.removeprefix(prefix): checkpoint.tensors[one] for one in stored if one in checkpoint.tensors
                }
                tensors = {one: (info.shape, TORCH_DTYPES[info.dtype]) for one, info in infos.items()}
                linear = model.get_submodule(place)
                if list(infos["weight"].shape) != [linear.out_features, linear.in_features]:
                    raise ValueError(
                        f"expected `{name}` in {checkpoint.files[name]} of shape "
                        f"{[linear.out_features, linear.in_features]}, got {list(infos['weight'].shape)}"
                    )
                model.set_submodule(place, _Stored(linear, tensors))
                self._layers[place] = scale_name.removeprefix(prefix)
        return True

    def update_weight_conversions(self, weight_conversions: Any) -> Any:
        # The tensors are taken as they are: nothing to rename, nothing to dequantise.
        return weight_conversions if self._kept else super().update_weight_conversions(weight_conversions)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> Any:
        if not self._kept:
            return super()._process_model_after_weight_loading(model, **kwargs)
        arena = WeightArena()
        for place, scale_name in self._layers.items():
            stored = model.get_submodule(place)
            tensors = {name: getattr(stored, name).detach() for name in stored._parameters if name != "bias"}
            layer = BlockScaledLinear.from_fp8(
                tensors.pop("weight"), tensors[scale_name], stored.bias, self._block_size
            )
            layer.weight.data = arena.place(layer.weight.data)
            layer.stored_scales = {name: tensor.clone() for name, tensor in tensors.items()}
            model.set_submodule(place, layer.train(stored.training))
        logger.info("blockscale: %d linear layers keep their FP8 weights", len(self._layers))
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[Any, dict[str, str]]:
        """The checkpoint's own tensors: plain codes, and scales under the names and in the dtypes that it has."""
        if not self._kept:
            return super().get_state_dict_and_metadata(model)
        state: dict[str, Tensor] = model.state_dict()
        for place, scale_name in self._layers.items():
            layer = model.get_submodule(place)
            if scale_name != "weight_scale_inv":
                state.pop(f"{place}.weight_scale_inv")
            state.update({f"{place}.{name}": tensor for name, tensor in layer.stored_scales.items()})
        return state, {}


def _on_cpu(device_map: Any) -> bool:
    """Whether all of the model goes to the CPU; without a map everything does."""
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    if device_map is None or all(str(place) == "cpu" for place in places):
        return True
    return device_map == "auto" and not (torch.cuda.is_available() or torch.xpu.is_available())


def _module_name(model: Any, name: str) -> str | None:
    """The linear layer of ``model`` that a checkpoint calls ``name``: with or without the prefix of the base model."""
    prefix = getattr(model, "base_model_prefix", "")
    for candidate in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        try:
            module = model.get_submodule(candidate)
        except AttributeError:
            continue
        if type(module) is nn.Linear:
            return candidate
    return None
