"""FP8 checkpoints in the formats in which they are published, made from a bf16 one, and back to plain weights.

Scales of neighbouring blocks (channels, tensors) differ by powers of two beyond what the weights need, so that a scale
that an engine puts in the wrong place changes the result by that factor and not by a few percent.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blockscale
import torch
from model import dequantise, tensors_of
from safetensors.torch import save_file
from torch import Tensor

# Extra powers of two in neighbouring scales. At 3 the largest code is 56, 3600 times the smallest normal one.
MOST_EXTRA = 3
# Activations beyond 44.8 would saturate in an engine that quantises them; here none does.
INPUT_SCALE = 0.1


@dataclass(frozen=True)
class Format:
    """How a checkpoint stores a linear layer.

    Attributes:
        strategy: ``block``, ``channel`` or ``tensor``: who shares a scale.
        scale_name: what comes after ``weight`` in the name of the scales.
        scale_dtype: in which they are stored.
        input_scale: whether a static scale of the activations is stored, too.
        config: the entry ``quantization_config`` of config.json.
    """

    strategy: str
    scale_name: str
    scale_dtype: torch.dtype
    input_scale: bool
    config: dict[str, Any]


def _fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"], **more}


def _compressed_tensors(strategy: str, input_activations: dict[str, Any] | None) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**number, "strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": input_activations and {**number, **input_activations},
        "output_activations": None,
        "format": "float-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_GROUP = {"strategy": "group", "group_size": 128, "dynamic": True}
_TOKEN = {"strategy": "token", "dynamic": True}
_STATIC = {"strategy": "tensor", "dynamic": False}

FORMATS = {
    "block": Format(
        "block",
        "_scale_inv",
        torch.float32,
        False,
        _fp8(activation_scheme="dynamic", weight_block_size=[128, 128]),
    ),
    "tensor": Format("tensor", "_scale", torch.float32, False, _fp8(activation_scheme="dynamic")),
    "ct-block": Format("block", "_scale", torch.bfloat16, False, _compressed_tensors("block", _GROUP)),
    "ct-channel": Format("channel", "_scale", torch.bfloat16, False, _compressed_tensors("channel", _TOKEN)),
    "ct-tensor": Format("tensor", "_scale", torch.float32, True, _compressed_tensors("tensor", _STATIC)),
    "ct-weight-only": Format("channel", "_scale", torch.bfloat16, False, _compressed_tensors("channel", None)),
}


def write_fp8_checkpoint(source: Path, destination: Path, form: Format) -> None:
    """Quantises the layers ``*_proj`` of the bf16 checkpoint ``source``."""
    tensors = tensors_of(source)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes, scales, _ = quantise(tensors[name], form, generator)
        tensors[name], tensors[name + form.scale_name] = codes, scales
        if form.input_scale:
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor([INPUT_SCALE])
    routers = sorted(name.removesuffix(".weight") for name in tensors if name.endswith(".mlp.gate.weight"))
    left = "ignore" if "ignore" in form.config else "modules_to_not_convert"
    config = {**form.config, left: ["lm_head", *routers]}
    _write(source, destination, tensors, {"quantization_config": config})


def write_dequantised_checkpoint(source: Path, destination: Path, form: Format) -> None:
    """The FP8 checkpoint ``source`` as plain float32 weights, with torch alone."""
    tensors = tensors_of(source)
    for name in [name for name in tensors if name.endswith("weight" + form.scale_name)]:
        weight = name.removesuffix(form.scale_name)
        scales = tensors.pop(name)
        tensors.pop(weight.removesuffix("weight") + "input_scale", None)
        block_n, block_k = block_size(form, tensors[weight].shape)
        tensors[weight] = dequantise(tensors[weight], scales.reshape(-1, scales.shape[-1]), block_n, block_k)
    plain = {name: tensor.float() for name, tensor in tensors.items()}
    _write(source, destination, plain, {"quantization_config": None, "dtype": "float32"})


def quantise(weight: Tensor, form: Format, generator: torch.Generator) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Codes, scales as they are stored, and their block size."""
    block_n, block_k = block_size(form, weight.shape)
    _, fitting = blockscale.quantize_weight_block_fp8(weight.float(), [block_n, block_k])
    extra = torch.randint(0, MOST_EXTRA + 1, fitting.shape, generator=generator)
    # Rounded to its stored dtype before the codes are made, and upwards, so that the largest code stays below 448.
    stored = (fitting * 2.0**extra * (1 + 2.0**-7)).to(form.scale_dtype)
    grid = stored.float().repeat_interleave(block_n, 0)[: weight.shape[0]]
    grid = grid.repeat_interleave(block_k, 1)[:, : weight.shape[1]]
    codes = (weight.float() / grid).clamp(-448, 448).to(torch.float8_e4m3fn)
    if form.strategy == "tensor":
        stored = stored.reshape(1)
    return codes, stored, (block_n, block_k)


def block_size(form: Format, shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a weight of ``shape`` that share one scale."""
    return {"block": (128, 128), "channel": (1, shape[1]), "tensor": (shape[0], shape[1])}[form.strategy]


def _write(source: Path, destination: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copyfile(path, partial / path.name)
    whole = {**json.loads((source / "config.json").read_text()), **config}
    whole = {key: value for key, value in whole.items() if value is not None or key not in config}
    (partial / "config.json").write_text(json.dumps(whole, indent=2))
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial / "model.safetensors", {"format": "pt"})
    partial.rename(destination)
