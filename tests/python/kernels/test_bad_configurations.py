"""Configurations that are refused: other formats by their names, contradictions and fields of a wrong type by the field.

Each is somebody's JSON: one sentence names the layer, the field, what was expected and what was found.
"""

import json

import pytest
from blockscale.kernels import get_scheme_from_parts, route
from checkpoint_configs import DEEPSEEK, FP8_ARGS, LINEAR, TOKEN, compressed, modelopt

# -------------------------------------------------------------------------------------------------------- other formats
NOT_FP8 = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "gptq"),
    "awq": ({"quant_method": "awq"}, "awq"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}, "mxfp4"),
    "torchao": ({"quant_method": "torchao"}, "torchao"),
    "quark": ({"quant_method": "quark"}, "quark"),
    "no method": ({"weight_block_size": [128, 128]}, "none"),
    "e5m2": ({**DEEPSEEK, "fmt": "e5m2"}, "e5m2"),
    "fnuz": ({**DEEPSEEK, "fmt": "float8_e4m3fnuz"}, "e4m3fnuz"),
    "int8": (compressed({"type": "int", "strategy": "channel"}, TOKEN, format="int-quantized"),
             "int8 in format int-quantized"),
    "nvfp4": (compressed({"num_bits": 4, "strategy": "tensor_group"}, format="nvfp4-pack-quantized"),
              "float4 in format nvfp4-pack-quantized"),
    "int8 activations": (compressed({"strategy": "channel"}, {"type": "int", **TOKEN}), "int8"),
    "asymmetric": (compressed({"strategy": "channel", "symmetric": False}), "zero points"),
    "sparse": (compressed({"strategy": "channel"}, sparsity_config={"format": "sparse-24-bitmask"}),
               "sparse-24-bitmask"),
    "modelopt NVFP4": (modelopt("NVFP4"), "NVFP4"),
    "modelopt W4A8": (modelopt("W4A8_AWQ"), "W4A8_AWQ"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FP8)
def test_other_formats_are_refused_by_name(name):
    config, word = NOT_FP8[name]
    with pytest.raises(NotImplementedError) as error:
        route(config, LINEAR)
    assert str(error.value).startswith(f"layer `{LINEAR}`: expected ") and word in str(error.value)


def test_a_quantisation_that_nobody_names_is_not_taken_for_none():
    """Files with a `quantization` that is no modelopt one, and with one for the text model alone."""
    with pytest.raises(NotImplementedError, match="got none"):
        route({"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}}, LINEAR)
    text = {"model_type": "x", "quantization_config": DEEPSEEK}
    assert route({"model_type": "y", "text_config": text}, LINEAR).block_size == (128, 128)
    assert route({"model_type": "y", "text_config": {"model_type": "x"}}, LINEAR).scheme == "unquantized"


# ------------------------------------------------------------------------------------------------------- contradictions
CONTRADICTIONS = {
    "block and static": ({**DEEPSEEK, "activation_scheme": "static"}, "`activation_scheme` dynamic beside"),
    "scheme": ({**DEEPSEEK, "activation_scheme": "sometimes"}, "`activation_scheme` dynamic or static, got sometimes"),
    "scale format": ({**DEEPSEEK, "scale_fmt": "log2"}, "`scale_fmt` ue8m0 or float32, got log2"),
    "block size": ({**DEEPSEEK, "weight_block_size": [128]}, "`weight_block_size` of two positive integers"),
    "block size 0": ({**DEEPSEEK, "weight_block_size": [0, 128]}, "got [0, 128]"),
    "block size text": ({**DEEPSEEK, "weight_block_size": "large"}, "got large"),
    "ignore text": ({**DEEPSEEK, "modules_to_not_convert": "lm_head"}, "`modules_to_not_convert` to be a list"),
    "bound": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, "`activation_scale_ub` positive and finite, got -1"),
    "no groups": ({"quant_method": "compressed-tensors"}, "`config_groups` with at least one group, got None"),
    "no targets": ({"config_groups": {"a": {"weights": FP8_ARGS}}}, "`config_groups.a.targets` to be a list"),
    "no weights": ({"config_groups": {"a": {"targets": ["Linear"], "input_activations": FP8_ARGS}}},
                   "`config_groups.a.weights` beside `input_activations`, got none"),
    "unknown preset": ({"config_groups": {"FP7": ["Linear"]}}, "got FP7"),
    "static tokens": (compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": False}),
                      "`config_groups.group_0.input_activations.dynamic` true"),
    "channel with a block": (compressed({"strategy": "channel", "block_structure": [128, 128]}),
                             "`config_groups.group_0.weights.strategy` block"),
    "groups with fp8": ({**DEEPSEEK, "config_groups": {"FP8": ["Linear"]}},
                        "`config_groups` only beside quant_method compressed-tensors or modelopt, got quant_method fp8"),
    "blocks with channels": ({"quant_method": "fbgemm_fp8", "weight_block_size": [128, 128]},
                             "`weight_block_size` to be the blocks of fbgemm_fp8: none, one scale per channel, got"),
    "two block sizes": (compressed({"block_structure": [64, 64]}, weight_block_size=[128, 128]),
                        "`weight_block_size` to be the blocks of compressed-tensors: (64, 64), got [128, 128]"),
    "blocks and groups": (compressed({"strategy": "block", "block_structure": [128, 128], "group_size": 32}),
                          "`config_groups.group_0.weights.group_size` null or 128 beside blocks of [128, 128], got 32"),
    "mixed without layers": (modelopt("MIXED_PRECISION"),
                             "`quantized_layers` beside `quant_algo` MIXED_PRECISION, got None"),
    "a layer without its algorithm": (modelopt("MIXED_PRECISION", quantized_layers={LINEAR: {}}),
                                      f"`quantized_layers.{LINEAR}.quant_algo`, got none"),
    "modelopt without algorithm": ({"quant_method": "modelopt"}, "`quant_algo` to be one of FP8"),
    "two groups for a target": ({"config_groups": {"FP8": ["Linear"], "FP8_DYNAMIC": ["Linear"]}},
                                "`config_groups` with the target `Linear` in one group, got two groups that differ"),
    "two configurations": ({"quantization_config": DEEPSEEK, "compression_config": compressed({"strategy": "channel"})},
                           "one of `quantization_config`, `compression_config`, got some that differ"),
    "no mapping": ([1, 2], "`quantization_config` to be a mapping, got list"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_configurations_that_contradict_themselves(name):
    config, words = CONTRADICTIONS[name]
    with pytest.raises(ValueError) as error:
        route(config, LINEAR)
    assert str(error.value).startswith(f"layer `{LINEAR}`: expected ") and words in str(error.value)


# ---------------------------------------------------------------------------------------------------------- wrong types
def group(**fields):
    """A compressed-tensors configuration whose one group has these fields."""
    config = compressed({"strategy": "channel"}, TOKEN)
    config["config_groups"]["group_0"].update(fields)
    return config


DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]
PATH = "config_groups.group_0"
WRONG_TYPES = {
    "configuration in config.json": ({"quantization_config": ["x"], "model_type": "x"},
                                     "`quantization_config` to be a mapping, got list"),
    "configuration as text": ({"quantization_config": "fp8"}, "`quantization_config` to be a mapping, got str"),
    "compression_config": ({"compression_config": [1], "model_type": "x"}, "`compression_config` to be a mapping"),
    "quantization": ({"quantization": "fp8"}, "`quantization` to be a mapping, got str"),
    "text_config": ({"model_type": "x", "text_config": "y"}, "`text_config` to be a mapping, got y"),
    "quant_method": ({"quant_method": 8}, "`quant_method` to be a text, got 8"),
    "quant_method 0": ({"quant_method": 0, "config_groups": {"FP8": ["Linear"]}}, "`quant_method` to be a text, got 0"),
    "fmt": ({**DEEPSEEK, "fmt": ["e4m3"]}, "`fmt` to be a text, got ['e4m3']"),
    "activation_scheme": ({**DEEPSEEK, "activation_scheme": {}}, "`activation_scheme` to be a text, got {}"),
    "activation_scheme empty": ({**DEEPSEEK, "activation_scheme": ""}, "`activation_scheme` dynamic or static, got "),
    "scale_fmt": ({**DEEPSEEK, "scale_fmt": 1}, "`scale_fmt` to be a text, got 1"),
    "block size number": ({**DEEPSEEK, "weight_block_size": 128}, "`weight_block_size` of two positive integers"),
    "block size true": ({**DEEPSEEK, "weight_block_size": [True, 128]}, "got [True, 128]"),
    "block size fraction": ({**DEEPSEEK, "weight_block_size": [128.0, 128]}, "got [128.0, 128]"),
    "block size absurd": ({**DEEPSEEK, "weight_block_size": [2**70, 2**70]}, "below 2^63, got [1180591620717411303424"),
    "block size of digits": ({**DEEPSEEK, "weight_block_size": "1" * 5000 + "x128"}, "below 2^63, got 1111"),
    "block size unprintable": ({**DEEPSEEK, "weight_block_size": 10**5000}, "below 2^63, got int too large to print"),
    "block size with rests": ({**DEEPSEEK, "weight_block_size": "x128x128x"}, "below 2^63, got x128x128x"),
    "block size nested": ({**DEEPSEEK, "weight_block_size": DEEP}, "below 2^63, got list too large to print"),
    "two lines": ({**DEEPSEEK, "activation_scheme": "a\nb"}, "`activation_scheme` dynamic or static, got a\\nb"),
    "bound true": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": True}, "positive and finite, got True"),
    "bound infinite": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": float("inf")}, "got inf"),
    "bound NaN": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": float("nan")}, "got nan"),
    "bound text": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": "1200"}, "positive and finite, got 1200"),
    "bound huge": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 10**400}, "positive and finite, got 1000"),
    "ignore number": ({**DEEPSEEK, "modules_to_not_convert": 5}, "`modules_to_not_convert` to be a list of names, got 5"),
    "ignore zero": ({**DEEPSEEK, "modules_to_not_convert": 0}, "`modules_to_not_convert` to be a list of names, got 0"),
    "ignore mapping": ({**DEEPSEEK, "ignored_layers": {"lm_head": 1}}, "`ignored_layers` to be a list of names"),
    "ignore null in it": ({**DEEPSEEK, "ignore": [None]}, "`ignore` to be a list of names, got [None]"),
    "ignore expression": ({**DEEPSEEK, "modules_to_not_convert": ["re:("]},
                          "`modules_to_not_convert` of names and regular expressions that compile, got re:( (missing )"),
    "ignore expression, huge": ({**DEEPSEEK, "ignore": ["re:a{99999999999999999999}"]},
                                "`ignore` of names and regular expressions that compile, got re:a{"),
    "groups list": ({"config_groups": [1]}, "`config_groups` with at least one group, got [1]"),
    "group text": ({"config_groups": {"a": "x"}}, "`config_groups.a` to be a mapping, got x"),
    "targets number": (group(targets=5), f"`{PATH}.targets` to be a list of names, got 5"),
    "targets text": (group(targets="Linear"), f"`{PATH}.targets` to be a list of names, got Linear"),
    "targets expression": (group(targets=["re:["]), f"`{PATH}.targets` of names and regular expressions that compile"),
    "preset's targets": ({"config_groups": {"FP8": [1]}}, "`config_groups.FP8.targets` to be a list of names, got [1]"),
    "weights text": (group(weights="fp8"), f"`{PATH}.weights` to be a mapping, got fp8"),
    "weights list": (group(weights=[1]), f"`{PATH}.weights` to be a mapping, got [1]"),
    "weights of others": (group(weights=[1], targets=["Conv"]), f"`{PATH}.weights` to be a mapping, got [1]"),
    "activations text": (group(input_activations="x"), f"`{PATH}.input_activations` to be a mapping, got x"),
    "group's format": (group(format=1), f"`{PATH}.format` to be a text, got 1"),
    "format": ({**group(), "format": []}, "`format` to be a text, got []"),
    "sparsity text": ({**group(), "sparsity_config": "x"}, "`sparsity_config` to be a mapping, got x"),
    "sparsity format": ({**group(), "sparsity_config": {"format": 1}}, "`sparsity_config.format` to be a text, got 1"),
    "layers list": (modelopt("MIXED_PRECISION", quantized_layers=[LINEAR]), "`quantized_layers` to be a mapping"),
    "layer text": (modelopt("MIXED_PRECISION", quantized_layers={LINEAR: "FP8"}),
                   f"`quantized_layers.{LINEAR}` to be a mapping, got FP8"),
    "other layer text": (modelopt("MIXED_PRECISION", quantized_layers={"other": "FP8"}),
                         "`quantized_layers.other` to be a mapping, got FP8"),
    "layer expression": (modelopt("MIXED_PRECISION", quantized_layers={"re:(": {"quant_algo": "FP8"}}),
                         "`quantized_layers` of names and regular expressions that compile, got re:("),
    "quant_algo": (modelopt(8), "`quant_algo` to be a text, got 8"),
    "producer": ({**modelopt("FP8"), "producer": "x"}, "`producer` to be a mapping, got x"),
    "producer's name": ({**modelopt("FP8"), "producer": {"name": 1}}, "`producer.name` to be a text, got 1"),
}  # fmt: skip

# Of the arguments of weights and activations alike.
WRONG_ARGUMENTS = {
    "type": (8, "to be a text, got 8"),
    "num_bits": ("8", "to be an integer of 64 bits, got 8"),
    "symmetric": ("yes", "to be true, false, got yes"),
    "strategy": (["channel"], "to be a text, got ['channel']"),
    "group_size": (128.0, "to be an integer of 64 bits, got 128.0"),
    "dynamic": ("maybe", "to be true, false or local, got maybe"),
    "scale_dtype": ("torch.int4", "float32, bfloat16, float16, float8_e8m0fnu, uint8, got torch.int4"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_field_of_a_wrong_type_is_refused_by_its_name(name):
    config, words = WRONG_TYPES[name]
    with pytest.raises(ValueError) as error:
        route(config, LINEAR)
    message = str(error.value)
    assert message.startswith(f"layer `{LINEAR}`: expected ") and words in message, message
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize("part", ["weights", "input_activations"])
@pytest.mark.parametrize("field", WRONG_ARGUMENTS)
def test_an_argument_of_a_wrong_type_is_refused_by_its_path(part, field):
    value, words = WRONG_ARGUMENTS[field]
    config = compressed({"strategy": "channel"}, TOKEN)
    config["config_groups"]["group_0"][part][field] = value
    with pytest.raises(ValueError) as error:
        route(config, LINEAR)
    assert f"`{PATH}.{part}.{field}` {words}" in str(error.value)
    weights = {**FP8_ARGS, "strategy": "channel"}
    parts = {"weights": weights, "input_activations": {**FP8_ARGS, **TOKEN}}
    parts[part][field] = value
    with pytest.raises(ValueError, match="get_scheme_from_parts: expected"):
        get_scheme_from_parts(parts["weights"], parts["input_activations"])


# Each value in the place of each field, at any depth.
ODD = [0, 1, -1, 2**70, 0.5, True, False, "", "x", "re:(", [], [[]], [None], [1], {}, {"x": 1}, {"": None}]
BASES = {
    "fp8": {**DEEPSEEK, "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]},
    "compressed-tensors": {"model_type": "x", "quantization_config": {
        **compressed({"block_structure": [128, 128]}, {"strategy": "group", "group_size": 128, "dynamic": True}),
        "sparsity_config": {"format": "dense"}}},
    "modelopt": {**modelopt("MIXED_PRECISION", quantized_layers={LINEAR: {"quant_algo": "FP8"}})},
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []},
}  # fmt: skip


def places(config, path=()):
    if isinstance(config, (dict, list)):
        for key in list(config) if isinstance(config, dict) else range(len(config)):
            yield (*path, key)
            yield from places(config[key], (*path, key))


@pytest.mark.parametrize("base", BASES)
def test_nothing_in_any_place_gives_another_exception(base):
    for path in places(BASES[base]):
        for value in ODD:
            config = json.loads(json.dumps(BASES[base]))
            holder = config
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = value
            try:
                route(config, LINEAR)
            except (ValueError, NotImplementedError) as error:
                assert str(error).startswith(f"layer `{LINEAR}`: expected "), (path, value, error)
