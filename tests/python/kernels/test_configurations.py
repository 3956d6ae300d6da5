"""Quantisation configurations of published checkpoints, and others of their kind.

configs/*.json holds published ones with layers of theirs; `expect` is what must be decided.
"""

import json
from pathlib import Path

import pytest
import torch
from blockscale.kernels import CPUFp8BlockScaledMMKernel, route
from blockscale.kernels.layer_params import read_layer
from checkpoint_configs import DEEPSEEK, FP8_ARGS, LINEAR, TOKEN, compressed, facts, modelopt
from fp8_layers import codes, make_layer
from oracle import FP8

PUBLISHED = {
    path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "configs").glob("*.json"))
}
ACCEPTED = {name: case for name, case in PUBLISHED.items() if case["expect"]["accept"]}


def wanted_activation(expect) -> str:
    """`scale_fmt: ue8m0` says the same as the suffix."""
    activation = expect["activation"]
    return activation + "_ue8m0" * (expect.get("scale_fmt") == "ue8m0" and not activation.endswith("_ue8m0"))


# ------------------------------------------------------------------------------------------------ published checkpoints
def test_all_published_configurations_are_here():
    assert len(PUBLISHED) == 20 and len(ACCEPTED) == 19


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("index", [None, "0", "38"])
def test_published_configuration(name, index):
    case = ACCEPTED[name]
    expect = case["expect"]
    block = tuple(expect["block"]) if expect["weight"] == "block" else None
    for layer in case["layers"]:
        layer_name = (
            layer["name"] if index is None else layer["name"].replace(".N.", f".{index}.").replace(".E.", ".3.")
        )
        decision = route(case["quantization_config"], layer_name, weight_shape=(layer["N"], layer["K"]))
        if layer.get("quantized", True):
            assert facts(decision) == (expect["weight"], block, wanted_activation(expect)), layer_name
            assert decision.kernel is CPUFp8BlockScaledMMKernel
            assert decision.scheme == ("w8a16_block" if block else "w8a16")
        else:
            assert decision.scheme == "unquantized" and decision.kernel is None and decision.reasons, layer_name


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - ACCEPTED.keys()))
@pytest.mark.parametrize(
    "layer", [LINEAR, "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.3.w1", "lm_head"]
)
def test_published_configuration_that_is_not_fp8(name, layer):
    with pytest.raises(NotImplementedError, match=r"int4 in format pack-quantized"):
        route(PUBLISHED[name]["quantization_config"], layer)


@pytest.mark.parametrize("name", ACCEPTED)
def test_stored_scales_of_the_published_shapes_are_taken(name):
    """K is cut to two blocks, so that the weights stay small; rows keep their number of blocks."""
    case = ACCEPTED[name]
    for layer in case["layers"]:
        if not layer.get("quantized", True):
            continue
        decision = route(case["quantization_config"], layer["name"])
        N, shape = layer["N"], layer["scale_shape"]
        if N > 30000:
            continue
        block = decision.block_size or (1, 1)
        K = 2 * block[1] if decision.block_size else 4
        rows = shape[0] if isinstance(shape, list) else None
        scales = torch.ones((rows, 2) if decision.block_size else (rows, 1) if rows else ())
        widths = {"logical_widths": layer["fused"]} if "fused" in layer else {}
        weight = torch.zeros(N, K, dtype=torch.uint8).view(FP8)
        group = decision.config.weight_quant_key.scale.group_shape
        for dtype in case["scale_dtypes"]:
            stored = scales.to(getattr(torch, dtype))
            assert read_layer(make_layer(weight, stored, **widths), group, (N, K)).scales.dtype == torch.float32


PARTS = [(name, part) for name, case in ACCEPTED.items() for part in case.get("tensor_parallel_cases", [])]


@pytest.mark.parametrize("name, part", PARTS, ids=lambda value: value if isinstance(value, str) else value["layer"])
def test_tensor_parallel_parts_of_layers(name, part):
    """The part's own ceil grid; a side below a block is one block."""
    case = ACCEPTED[name]
    N, K = part.get("local_N", 192), part.get("local_K", 192)
    decision = route(case["quantization_config"], f"model.layers.0.{part['layer']}", weight_shape=(N, K))
    assert decision.kernel is CPUFp8BlockScaledMMKernel
    layer = make_layer(codes(N, K), torch.ones(-(-N // 128), -(-K // 128)))
    decision.kernel(decision.config).process_weights_after_loading(layer)
    assert layer.weight.shape == (N, K)


# ------------------------------------------------------------------------------------------------- others of their kind
OTHERS = {
    "ct channel, preset as the group's name": (compressed({"strategy": "channel"}, TOKEN, group="FP8_DYNAMIC"),
                                               ("channel", None, "token")),
    "ct preset FP8_DYNAMIC with targets": ({"config_groups": {"FP8_DYNAMIC": ["Linear"]}}, ("channel", None, "token")),
    "ct preset FP8": ({"config_groups": {"FP8": ["Linear"]}}, ("tensor", None, "tensor_static")),
    "ct preset FP8_BLOCK": ({"config_groups": {"FP8_BLOCK": ["Linear"]}}, ("block", (128, 128), "group128")),
    "ct static tensors": (compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
                          ("tensor", None, "tensor_static")),
    "ct tensors, dynamic": (compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": True}),
                            ("tensor", None, "token")),
    "ct weight-only tensor": (compressed({"strategy": "tensor"}), ("tensor", None, "none")),
    "ct weight-only block": (compressed({"strategy": "block", "block_structure": [128, 128]}),
                             ("block", (128, 128), "none")),
    "ct block 64 x 128": (compressed({"block_structure": [64, 128]}, {"strategy": "group", "dynamic": True}),
                          ("block", (64, 128), "group128")),
    "ct structure without strategy": (compressed({"block_structure": "128x128"}, TOKEN),
                                      ("block", (128, 128), "token")),
    "ct strategy without structure": (compressed({"strategy": "block"}, TOKEN), ("block", (128, 128), "token")),
    "ct microscaling": (
        compressed({"strategy": "group", "group_size": 32, "scale_dtype": "torch.float8_e8m0fnu"},
                   {"strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": "torch.float8_e8m0fnu"}),
        ("block", (1, 32), "group32")),
    "ct naive-quantized": (compressed({"strategy": "tensor"}, format="naive-quantized"), ("tensor", None, "none")),
    "ct named target": (compressed({"strategy": "channel"}, TOKEN, targets=["re:.*down_proj"]),
                        ("channel", None, "token")),
    "ct dense sparsity": (compressed({"strategy": "channel"}, TOKEN, sparsity_config={"format": "dense"}),
                          ("channel", None, "token")),
    "ct with a KV-cache scheme": (compressed({"strategy": "channel"}, TOKEN, kv_cache_scheme={"num_bits": 8}),
                                  ("channel", None, "token")),
    "ct under compression_config": ({"compression_config": compressed({"strategy": "channel"}, TOKEN)},
                                    ("channel", None, "token")),
    "fp8 without fmt and scheme": ({"quant_method": "fp8", "weight_block_size": [128, 128]},
                                   ("block", (128, 128), "group128")),
    "fp8 in upper case": ({**DEEPSEEK, "quant_method": "FP8"}, ("block", (128, 128), "group128")),
    "fp8, whole config.json": ({"model_type": "qwen3", "quantization_config": DEEPSEEK},
                               ("block", (128, 128), "group128")),
    "fp8 blocks of 32": ({**DEEPSEEK, "weight_block_size": [32, 32]}, ("block", (32, 32), "group32")),
    "fp8 blocks of 64 x 128": ({**DEEPSEEK, "weight_block_size": [64, 128]}, ("block", (64, 128), "group128")),
    "fp8 block as text": ({**DEEPSEEK, "weight_block_size": "128x128"}, ("block", (128, 128), "group128")),
    "fp8 UE8M0": ({**DEEPSEEK, "scale_fmt": "UE8M0"}, ("block", (128, 128), "group128_ue8m0")),
    "fp8 float scales": ({**DEEPSEEK, "scale_fmt": "float32"}, ("block", (128, 128), "group128")),
    "fp8 ue8m0": ({**DEEPSEEK, "scale_fmt": "ue8m0"}, ("block", (128, 128), "group128_ue8m0")),
    "fp8 microscaling": ({**DEEPSEEK, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
                         ("block", (1, 32), "group32")),
    "fp8 tensor, dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, ("tensor", None, "token")),
    "fp8 tensor, static": ({"quant_method": "fp8", "activation_scheme": "static"}, ("tensor", None, "tensor_static")),
    "fp8 long fmt": ({**DEEPSEEK, "fmt": "torch.float8_e4m3fn"}, ("block", (128, 128), "group128")),
    "fbgemm with a bound": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200}, ("channel", None, "token_ub")),
    "fbgemm without a bound": ({"quant_method": "fbgemm_fp8"}, ("channel", None, "token")),
    "ptpc": ({"quant_method": "ptpc_fp8"}, ("channel", None, "token")),
    "modelopt FP8": (modelopt("FP8"), ("tensor", None, "tensor_static")),
    "modelopt per channel": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), ("channel", None, "token")),
    "modelopt block, weights only": (modelopt("FP8_PB_WO"), ("block", (128, 128), "none")),
    "modelopt block": (modelopt("fp8_pb_real"), ("block", (128, 128), "group128")),
    "modelopt microscaling": (modelopt("MXFP8"), ("block", (1, 32), "group32")),
    "modelopt in config.json": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
                                ("tensor", None, "tensor_static")),
    "modelopt without its name": ({"quant_algo": "FP8"}, ("tensor", None, "tensor_static")),
    "modelopt mixed": (modelopt("MIXED_PRECISION", quantized_layers={LINEAR: {"quant_algo": "FP8"}}),
                       ("tensor", None, "tensor_static")),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_configurations_follow_by_rule(name):
    config, expected = OTHERS[name]
    decision = route(config, LINEAR)
    assert facts(decision) == expected and decision.kernel is CPUFp8BlockScaledMMKernel
    assert route(config, "lm_head").scheme == "unquantized"


def test_no_configuration_is_no_quantisation():
    for config in (None, {}, {"model_type": "llama"}, {"model_type": "llama", "quantization_config": None}):
        decision = route(config, LINEAR)
        assert decision.scheme == "unquantized" and decision.reasons == ("the checkpoint is not quantised",)


def test_groups_of_other_modules_are_no_business_of_linear_layers():
    config = compressed({"strategy": "channel"}, TOKEN)
    attention = {
        "targets": ["LlamaAttention"],
        "weights": None,
        "input_activations": {**FP8_ARGS, "strategy": "tensor"},
    }
    config["config_groups"]["attention"] = attention
    assert facts(route(config, LINEAR)) == ("channel", None, "token")


def test_a_mixed_checkpoint_is_taken_layer_by_layer():
    config = compressed({"strategy": "channel"}, TOKEN, targets=["re:.*self_attn.*"])
    int4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
    config["config_groups"]["group_1"] = {"targets": ["Linear"], "weights": int4, "format": "pack-quantized"}
    assert route(config, "model.layers.0.self_attn.q_proj").weight_strategy == "channel"
    with pytest.raises(NotImplementedError, match="int4 in format pack-quantized"):
        route(config, LINEAR)
