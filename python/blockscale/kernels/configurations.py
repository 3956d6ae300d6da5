"""Quantisation configurations of checkpoints, read by rule.

    compressed-tensors    config_groups with targets and arguments; ignore
    fp8                   DeepSeek, Qwen and many others: weight_block_size, activation_scheme; lists of layers to leave
    fbgemm_fp8, ptpc_fp8  one scale per output channel, one per token
    modelopt              quant_algo, or quantized_layers with one per layer; exclude_modules

What is not FP8 is refused by its name; what contradicts itself is refused with the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checks import refuse
from .arguments import check_layer_name
from .fields import Fields, shown
from .layer_names import is_kept_by_default, matches, matching_entry
from .schemes import InputQuant, WeightQuant, read_input_args, read_weight_args

__all__ = ["LayerParts", "layer_parts"]

_IGNORE_FIELDS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
# Fields of a file that hold the configuration; the last one is modelopt's own file.
_HOLDERS = ("quantization_config", "compression_config", "quantization")
_KEPT = "embeddings, heads, norms and router gates are quantised only where named"
_FP8_ARGS: dict[str, Any] = {"type": "float", "num_bits": 8}

# Groups of compressed-tensors may be a preset's name with a list of targets.
_PRESETS: dict[str, dict[str, Any]] = {
    "FP8": {
        "weights": {**_FP8_ARGS, "strategy": "tensor"},
        "input_activations": {**_FP8_ARGS, "strategy": "tensor", "dynamic": False},
    },
    "FP8_DYNAMIC": {
        "weights": {**_FP8_ARGS, "strategy": "channel"},
        "input_activations": {**_FP8_ARGS, "strategy": "token", "dynamic": True},
    },
    "FP8_BLOCK": {
        "weights": {**_FP8_ARGS, "strategy": "block", "block_structure": [128, 128]},
        "input_activations": {**_FP8_ARGS, "strategy": "group", "group_size": 128, "dynamic": True},
    },
}

_MODELOPT: dict[str, tuple[WeightQuant, InputQuant | None]] = {
    "FP8": (WeightQuant("tensor"), InputQuant("tensor", static=True)),
    "FP8_PER_CHANNEL_PER_TOKEN": (WeightQuant("channel"), InputQuant("token")),
    "FP8_PB_WO": (WeightQuant("block", (128, 128)), None),
    "FP8_PB_REAL": (WeightQuant("block", (128, 128)), InputQuant("group", 128)),
    "MXFP8": (WeightQuant("block", (1, 32)), InputQuant("group", 32, ue8m0=True)),
}


@dataclass(frozen=True)
class LayerParts:
    """One layer: the weight's and the activations' part (None: not quantised), and why it is left alone, if it is.

    ``named`` says that a list names the layer itself, rather than that nothing means it.
    """

    weight: WeightQuant | None
    input: InputQuant | None
    reason: str | None = None
    named: bool = False


def layer_parts(config: Mapping[str, Any] | None, name: str, *, quantized: bool | None = None) -> LayerParts:
    """How ``config`` quantises the layer ``name``.

    Args:
        config: a ``quantization_config``, or what holds one (``config.json``, ``hf_quant_config.json``).
        name: as the checkpoint spells it.
        quantized: whether its weight is stored in FP8, where that is known; it beats every list.

    Raises:
        NotImplementedError: the format is not FP8; the message names it.
        ValueError: the configuration contradicts itself or misses a field.

    >>> layer_parts({"quant_method": "fp8", "weight_block_size": [128, 128]}, "model.layers.0.mlp.up_proj").weight
    WeightQuant(strategy='block', block_size=(128, 128))
    """
    check_layer_name("layer_parts", name)
    where = f"layer `{name}`"
    fields = _unwrap(where, config)
    if fields is None:
        return LayerParts(None, None, "the checkpoint is not quantised")
    method = (fields.text("quant_method") or _guess_method(fields)).lower()
    if method not in _READERS:
        raise NotImplementedError(
            f"{where}: expected quant_method {', '.join(_READERS)}, got {shown(method) or 'none'}"
        )
    # Read first, so that what is not FP8 is refused whichever layer is asked for.
    ignored = [entry for field in _IGNORE_FIELDS for entry in fields.names(field) or []]
    parts = _READERS[method](fields, name, quantized)
    _check_agreement(fields, method, parts.weight)
    if quantized is False:
        return LayerParts(None, None, "its weight is not stored in FP8")
    if quantized is None:
        entry = matching_entry(ignored, name)
        if entry is not None:
            return LayerParts(None, None, f"left alone by the entry `{entry}`", named=True)
    return parts


def _unwrap(where: str, config: Mapping[str, Any] | None) -> Fields | None:
    """The part of ``config`` that says how weights are quantised; None where there is none."""
    fields, inside = _mapping(where, "quantization_config", config), False
    while fields is not None:
        held = [field for field in _HOLDERS if fields.has(field)]
        if any(fields.values[field] != fields.values[held[0]] for field in held[1:]):
            refuse(where, f"one of {', '.join(f'`{field}`' for field in held)}", "some that differ")
        if not held:
            break
        inner, inside = _mapping(where, held[0], fields.values[held[0]]), True
        if inner is not None and held[0] == "quantization":  # modelopt's own file
            producer = fields.fields("producer")
            method = producer.text("name") if producer is not None else None
            if method is None and ("quant_algo" in inner.values or "quantized_layers" in inner.values):
                method = "modelopt"
            if method is not None and not inner.has("quant_method"):
                inner = Fields(where, "", {**inner.values, "quant_method": method})
        fields = inner
    if fields is None or not fields.values:
        return None
    if not inside and "model_type" in fields.values and not fields.has("quant_method"):  # a config.json without any
        text_model = fields.fields("text_config")
        return None if text_model is None else _unwrap(where, {"model_type": "", **text_model.values})
    return fields


def _mapping(where: str, field: str, value: Mapping[str, Any] | None) -> Fields | None:
    if value is not None and not isinstance(value, Mapping):
        refuse(where, f"`{field}` to be a mapping", type(value).__name__)
    return None if value is None else Fields(where, "", value)


def _guess_method(config: Fields) -> str:
    if "config_groups" in config.values:
        return "compressed-tensors"
    return "modelopt" if "quant_algo" in config.values or "quantized_layers" in config.values else ""


def _check_agreement(config: Fields, method: str, weight: WeightQuant | None) -> None:
    """Fields that another method reads do not say otherwise."""
    if config.has("config_groups") and method not in ("compressed-tensors", "modelopt", "modelopt_fp8"):
        words = "`config_groups` only beside quant_method compressed-tensors or modelopt"
        refuse(config.where, words, f"quant_method {method}")
    block_size = config.block_size("weight_block_size")
    if block_size is not None and weight is not None and block_size != weight.block_size:
        words = f"to be the blocks of {method}: {weight.block_size or f'none, one scale per {weight.strategy}'}"
        config.refuse("weight_block_size", words)


def _default(name: str, quantized: bool | None, weight: WeightQuant, activation: InputQuant | None) -> LayerParts:
    """Parts of a layer that the configuration does not name: those of linear layers, none for the others."""
    if quantized is None and is_kept_by_default(name):
        return LayerParts(None, None, _KEPT)
    return LayerParts(weight, activation)


def _read_fp8(config: Fields, name: str, quantized: bool | None) -> LayerParts:
    fmt = config.text("fmt", "e4m3").lower().removeprefix("torch.").removeprefix("float8_")
    if fmt not in ("e4m3", "e4m3fn"):
        raise NotImplementedError(f"{config.where}: expected `fmt` e4m3, got {shown(fmt)}")
    scheme = config.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        config.refuse("activation_scheme", "dynamic or static")
    scale_fmt = config.text("scale_fmt", "float32").lower()
    if scale_fmt not in ("ue8m0", "e8m0", "float32", "fp32", "float"):
        config.refuse("scale_fmt", "ue8m0 or float32")
    block_size, ue8m0 = config.block_size("weight_block_size"), scale_fmt.endswith("e8m0")
    if block_size is None:
        activation = InputQuant("tensor", static=True) if scheme == "static" else InputQuant("token")
        return _default(name, quantized, WeightQuant("tensor"), activation)
    if scheme == "static":
        config.refuse("activation_scheme", "dynamic beside `weight_block_size`")
    return _default(name, quantized, WeightQuant("block", block_size), InputQuant("group", block_size[1], ue8m0=ue8m0))


def _read_channel(config: Fields, name: str, quantized: bool | None) -> LayerParts:
    bound = config.positive_number("activation_scale_ub")
    return _default(name, quantized, WeightQuant("channel"), InputQuant("token", bounded=bound is not None))


def _read_modelopt(config: Fields, name: str, quantized: bool | None) -> LayerParts:
    algo, layers = config.text("quant_algo"), config.fields("quantized_layers")
    mixed = algo is not None and algo.upper() == "MIXED_PRECISION"
    if config.has("config_groups") and (algo is None or (mixed and layers is None)):
        return _read_compressed(config, name, quantized)
    if mixed and (layers is None or not layers.values):
        config.refuse("quantized_layers", "beside `quant_algo` MIXED_PRECISION")
    if layers is None or not layers.values:
        if "quant_algo" not in config.values:
            config.refuse("quant_algo", f"to be one of {', '.join(_MODELOPT)}, or null for no weights")
        if algo is None:
            return LayerParts(None, None, "`quant_algo` is null: no weights are quantised")
        return _default(name, quantized, *_modelopt_parts(config, algo))
    config.check_entries("quantized_layers", layers.values.keys())
    each = {entry: layers.fields(entry) for entry in layers.values}
    for entry, layer in each.items():
        if layer is None or layer.text("quant_algo") is None:
            refuse(config.where, f"`quantized_layers.{entry}.quant_algo`", "none")
    entry = matching_entry(each, name)
    if entry is None:
        return LayerParts(None, None, "not among `quantized_layers`")
    return LayerParts(*_modelopt_parts(each[entry], each[entry].text("quant_algo")))


def _modelopt_parts(config: Fields, algo: str) -> tuple[WeightQuant, InputQuant | None]:
    if algo.upper() not in _MODELOPT:
        expected = f"`{config.path_of('quant_algo')}` {', '.join(_MODELOPT)}"
        raise NotImplementedError(f"{config.where}: expected {expected}, got {shown(algo)}")
    return _MODELOPT[algo.upper()]


def _read_compressed(config: Fields, name: str, quantized: bool | None) -> LayerParts:
    groups = config.values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        config.refuse("config_groups", "with at least one group")
    sparsity = config.fields("sparsity_config")
    sparsity_format = "dense" if sparsity is None else sparsity.text("format", "dense")
    if sparsity_format != "dense":
        got = f"sparsity format {shown(sparsity_format)}"
        raise NotImplementedError(f"{config.where}: expected dense weights, got {got}")
    outer_format = config.text("format", "none")
    found = []
    for title in groups:
        group = _group(config, title)
        targets = group.names("targets")
        if targets is None:
            group.refuse("targets", "to be a list of names")
        weights, activations = group.fields("weights"), group.fields("input_activations")
        if weights is None:  # a group of other modules may have activations alone (attention); linear layers may not
            if activations is not None and any(target == "Linear" or matches(target, name) for target in targets):
                refuse(config.where, f"`{group.path_of('weights')}` beside `input_activations`", "none")
            continue
        parts: LayerParts | NotImplementedError
        inner_format = group.text("format", outer_format)
        try:
            weight = read_weight_args(config.where, weights.path, weights.values)
            inputs = activations and activations.values
            parts = LayerParts(
                weight, read_input_args(config.where, group.path_of("input_activations"), inputs, weight)
            )
        except NotImplementedError as error:
            parts = NotImplementedError(f"{error} in format {shown(inner_format)}")
        found.append((targets, parts))
    _check_targets(config.where, found)
    decided = _targeted(name, found, quantized)
    others = [parts for _, parts in found if isinstance(parts, NotImplementedError)]
    if isinstance(decided, NotImplementedError) or (others and len(others) == len(found)):
        # A checkpoint without any FP8 is refused whichever layer is asked for; in a mixed one, its other layers are.
        raise others[0] if not isinstance(decided, NotImplementedError) else decided
    return decided or LayerParts(None, None, "no target of `config_groups` means it")


def _group(config: Fields, title: str) -> Fields:
    """A group of ``config_groups``; one that is a list of targets alone is the preset of its title."""
    field = f"config_groups.{title}"
    group = config.values["config_groups"][title]
    if not isinstance(group, (list, tuple)):
        return Fields(config.where, field, group)
    if title not in _PRESETS:
        refuse(config.where, f"`{field}` to name a preset ({', '.join(_PRESETS)})", shown(title))
    return Fields(config.where, field, {**_PRESETS[title], "targets": group})


def _check_targets(where: str, groups: list[tuple[list[str], LayerParts | NotImplementedError]]) -> None:
    """No target stands in two groups that differ: neither could be preferred."""
    seen: dict[str, LayerParts | NotImplementedError] = {}
    for targets, parts in groups:
        for target in targets:
            both_refused = all(isinstance(one, NotImplementedError) for one in (parts, seen.get(target)))
            if seen.setdefault(target, parts) != parts and not both_refused:
                words = f"`config_groups` with the target `{shown(target)}` in one group"
                refuse(where, words, "two groups that differ")


def _targeted(
    name: str, groups: list[tuple[list[str], LayerParts | NotImplementedError]], quantized: bool | None
) -> LayerParts | NotImplementedError | None:
    """What the group says whose targets mean the layer: by its name before its class, as the more exact one."""
    for targets, parts in groups:
        if any(target != "Linear" and matches(target, name) for target in targets):
            return parts
    for targets, parts in groups:
        if "Linear" in targets:
            kept = quantized is None and is_kept_by_default(name)
            return LayerParts(None, None, _KEPT) if kept else parts
    return None


_READERS = {
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_channel,
    "ptpc_fp8": _read_channel,
    "modelopt": _read_modelopt,
    "modelopt_fp8": _read_modelopt,
}
