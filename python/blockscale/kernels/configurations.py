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
from .layer_names import is_kept_by_default, matches, matching_entry
from .schemes import InputQuant, WeightQuant, parse_block_size, read_input_args, read_weight_args

__all__ = ["LayerParts", "layer_parts"]

_IGNORE_FIELDS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
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
    where = f"layer `{name}`"
    config = _unwrap(where, config)
    if not config:
        return LayerParts(None, None, "the checkpoint is not quantised")
    method = str(config.get("quant_method") or _guess_method(config)).lower()
    if method not in _READERS:
        raise NotImplementedError(f"{where}: expected quant_method {', '.join(_READERS)}, got {method or 'none'}")
    # Read first, so that what is not FP8 is refused whichever layer is asked for.
    parts = _READERS[method](where, config, name, quantized)
    if quantized is False:
        return LayerParts(None, None, "its weight is not stored in FP8")
    if quantized is None:
        entry = matching_entry(_ignored(where, config), name)
        if entry is not None:
            return LayerParts(None, None, f"left alone by the entry `{entry}`", named=True)
    return parts


def _unwrap(where: str, config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    for key in ("quantization_config", "compression_config", "quantization"):
        if isinstance(config, Mapping) and isinstance(config.get(key), Mapping):
            inner = dict(config[key])
            if key == "quantization":  # modelopt's own file
                inner.setdefault("quant_method", str((config.get("producer") or {}).get("name", "modelopt")))
            config = inner
    if config is not None and not isinstance(config, Mapping):
        refuse(where, "`quantization_config` to be a mapping", type(config).__name__)
    if config is None or ("model_type" in config and "quant_method" not in config):  # a config.json without any
        return {}
    return config


def _guess_method(config: Mapping[str, Any]) -> str:
    if "config_groups" in config:
        return "compressed-tensors"
    return "modelopt" if "quant_algo" in config or "quantized_layers" in config else ""


def _ignored(where: str, config: Mapping[str, Any]) -> list[str]:
    entries: list[str] = []
    for field in _IGNORE_FIELDS:
        value = config.get(field) or []
        if isinstance(value, str) or not all(isinstance(entry, str) for entry in value):
            refuse(where, f"`{field}` to be a list of names", value)
        entries.extend(value)
    return entries


def _default(name: str, quantized: bool | None, weight: WeightQuant, activation: InputQuant | None) -> LayerParts:
    """Parts of a layer that the configuration does not name: those of linear layers, none for the others."""
    if quantized is None and is_kept_by_default(name):
        return LayerParts(None, None, _KEPT)
    return LayerParts(weight, activation)


def _read_fp8(where: str, config: Mapping[str, Any], name: str, quantized: bool | None) -> LayerParts:
    fmt = str(config.get("fmt") or "e4m3").lower().removeprefix("torch.").removeprefix("float8_")
    if fmt not in ("e4m3", "e4m3fn"):
        raise NotImplementedError(f"{where}: expected `fmt` e4m3, got {fmt}")
    scheme = config.get("activation_scheme") or "dynamic"
    if scheme not in ("dynamic", "static"):
        refuse(where, "`activation_scheme` dynamic or static", scheme)
    scale_fmt = str(config.get("scale_fmt") or "float32").lower()
    if scale_fmt not in ("ue8m0", "e8m0", "float32", "fp32", "float"):
        refuse(where, "`scale_fmt` ue8m0 or float32", scale_fmt)
    sizes, ue8m0 = config.get("weight_block_size"), scale_fmt.endswith("e8m0")
    if sizes is None:
        activation = InputQuant("tensor", static=True) if scheme == "static" else InputQuant("token")
        return _default(name, quantized, WeightQuant("tensor"), activation)
    block_size = parse_block_size(where, "weight_block_size", sizes)
    if scheme == "static":
        refuse(where, "`activation_scheme` dynamic beside `weight_block_size`", scheme)
    return _default(name, quantized, WeightQuant("block", block_size), InputQuant("group", block_size[1], ue8m0=ue8m0))


def _read_channel(where: str, config: Mapping[str, Any], name: str, quantized: bool | None) -> LayerParts:
    bound = config.get("activation_scale_ub")
    if bound is not None and not (isinstance(bound, (int, float)) and bound > 0):
        refuse(where, "`activation_scale_ub` positive", bound)
    return _default(name, quantized, WeightQuant("channel"), InputQuant("token", bounded=bound is not None))


def _read_modelopt(where: str, config: Mapping[str, Any], name: str, quantized: bool | None) -> LayerParts:
    if config.get("config_groups") and not config.get("quant_algo"):
        return _read_compressed(where, config, name, quantized)
    layers = config.get("quantized_layers") or {}
    entry = matching_entry(layers, name)
    algo = config.get("quant_algo") if entry is None else layers[entry].get("quant_algo")
    if entry is None and (layers or str(algo).upper() == "MIXED_PRECISION"):
        return LayerParts(None, None, "not among `quantized_layers`")
    if algo is None:
        return LayerParts(None, None, "`quant_algo` is null: no weights are quantised")
    if str(algo).upper() not in _MODELOPT:
        raise NotImplementedError(f"{where}: expected `quant_algo` {', '.join(_MODELOPT)}, got {algo}")
    weight, activation = _MODELOPT[str(algo).upper()]
    return _default(name, quantized, weight, activation) if entry is None else LayerParts(weight, activation)


def _read_compressed(where: str, config: Mapping[str, Any], name: str, quantized: bool | None) -> LayerParts:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        refuse(where, "`config_groups` with at least one group", groups)
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise NotImplementedError(f"{where}: expected dense weights, got sparsity format {sparsity}")
    found: list[tuple[list[str], LayerParts | NotImplementedError]] = []
    for title, group in groups.items():
        field = f"config_groups.{title}"
        if isinstance(group, (list, tuple)):
            if title not in _PRESETS:
                refuse(where, f"`{field}` to name a preset ({', '.join(_PRESETS)})", title)
            group = {**_PRESETS[title], "targets": list(group)}
        if not isinstance(group, Mapping):
            refuse(where, f"`{field}` to be a mapping", group)
        targets = group.get("targets")
        if not isinstance(targets, (list, tuple)) or not all(isinstance(target, str) for target in targets):
            refuse(where, f"`{field}.targets` to be a list of names", targets)
        weights, activations = group.get("weights"), group.get("input_activations")
        if weights is None:  # a group of other modules may have activations alone (attention); linear layers may not
            if activations is not None and any(target == "Linear" or matches(target, name) for target in targets):
                refuse(where, f"`{field}.weights` beside `input_activations`", "none")
            continue
        try:
            weight = read_weight_args(where, f"{field}.weights", weights)
            activation = read_input_args(where, f"{field}.input_activations", activations, weight)
            found.append((list(targets), LayerParts(weight, activation)))
        except NotImplementedError as error:
            title_of_format = group.get("format") or config.get("format") or "none"
            found.append((list(targets), NotImplementedError(f"{error} in format {title_of_format}")))
    parts = _targeted(name, found, quantized)
    others = [parts for _, parts in found if isinstance(parts, NotImplementedError)]
    if isinstance(parts, NotImplementedError) or (others and len(others) == len(found)):
        # A checkpoint without any FP8 is refused whichever layer is asked for; in a mixed one, its other layers are.
        raise others[0] if not isinstance(parts, NotImplementedError) else parts
    return parts or LayerParts(None, None, "no target of `config_groups` means it")


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
