"""Quantisation configurations as checkpoints have them, for tests to vary."""

from __future__ import annotations

import copy

LINEAR = "model.layers.0.mlp.down_proj"
FP8_ARGS = {"type": "float", "num_bits": 8, "symmetric": True}


def compressed(weights, inputs=None, *, group="group_0", targets=("Linear",), **more):
    weights = {**FP8_ARGS, "dynamic": False, **weights}
    inputs = inputs if inputs is None else {**FP8_ARGS, **inputs}
    scheme = {"targets": list(targets), "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {group: scheme},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        **more,
    }


TOKEN = {"strategy": "token", "dynamic": True}
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELOPT = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {"exclude_modules": ["lm_head"]}}


def modelopt(algo, **more):
    config = copy.deepcopy(MODELOPT)
    config["quantization"].update(quant_algo=algo, **more)
    return config


def facts(decision):
    """What a route says of the checkpoint, apart from the machine."""
    return decision.weight_strategy, decision.block_size, decision.activation
