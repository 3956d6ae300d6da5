"""Quantisation configurations: those of published checkpoints, others of their kind, and what must be refused.

configs/*.json holds published ones with layers of theirs; `expect` is what must be decided.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from blockscale.kernels import CPUFp8BlockScaledMMKernel, route
from blockscale.kernels.layer_names import is_kept_by_default, matches
from blockscale.kernels.layer_params import read_layer
from fp8_layers import codes, make_layer
from oracle import FP8

PUBLISHED = {
    path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "configs").glob("*.json"))
}
ACCEPTED = {name: case for name, case in PUBLISHED.items() if case["expect"]["accept"]}
LINEAR = "model.layers.0.mlp.down_proj"


def wanted_activation(expect) -> str:
    """`scale_fmt: ue8m0` says the same as the suffix."""
    activation = expect["activation"]
    return activation + "_ue8m0" * (expect.get("scale_fmt") == "ue8m0" and not activation.endswith("_ue8m0"))


def facts(decision):
    return decision.weight_strategy, decision.block_size, decision.activation


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


# -------------------------------------------------------------------------------------------------------------- refused
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


CONTRADICTIONS = {
    "block and static": ({**DEEPSEEK, "activation_scheme": "static"}, "`activation_scheme` dynamic beside"),
    "scheme": ({**DEEPSEEK, "activation_scheme": "sometimes"}, "`activation_scheme` dynamic or static, got sometimes"),
    "scale format": ({**DEEPSEEK, "scale_fmt": "log2"}, "`scale_fmt` ue8m0 or float32, got log2"),
    "block size": ({**DEEPSEEK, "weight_block_size": [128]}, "`weight_block_size` of two positive integers"),
    "block size 0": ({**DEEPSEEK, "weight_block_size": [0, 128]}, "got [0, 128]"),
    "block size text": ({**DEEPSEEK, "weight_block_size": "large"}, "got large"),
    "ignore text": ({**DEEPSEEK, "modules_to_not_convert": "lm_head"}, "`modules_to_not_convert` to be a list"),
    "bound": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, "`activation_scale_ub` positive, got -1"),
    "no groups": ({"quant_method": "compressed-tensors"}, "`config_groups` with at least one group, got None"),
    "no targets": ({"config_groups": {"a": {"weights": FP8_ARGS}}}, "`config_groups.a.targets` to be a list"),
    "no weights": ({"config_groups": {"a": {"targets": ["Linear"], "input_activations": FP8_ARGS}}},
                   "`config_groups.a.weights` beside `input_activations`, got none"),
    "unknown preset": ({"config_groups": {"FP7": ["Linear"]}}, "got FP7"),
    "static tokens": (compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": False}),
                      "`config_groups.group_0.input_activations.dynamic` true"),
    "channel with a block": (compressed({"strategy": "channel", "block_structure": [128, 128]}),
                             "`config_groups.group_0.weights.strategy` block"),
    "no mapping": ([1, 2], "`quantization_config` to be a mapping, got list"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_configurations_that_contradict_themselves(name):
    config, words = CONTRADICTIONS[name]
    with pytest.raises(ValueError) as error:
        route(config, LINEAR)
    assert str(error.value).startswith(f"layer `{LINEAR}`: expected ") and words in str(error.value)


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


# ---------------------------------------------------------------------------------------------------------- layer names
MEANT = [
    ("lm_head", "lm_head"),
    ("lm_head", "model.lm_head"),
    ("lm_head", "language_model.lm_head"),
    ("model.lm_head", "lm_head"),
    ("gate", "model.layers.0.block_sparse_moe.gate"),
    ("mlp.gate", "model.layers.0.mlp.gate"),
    ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate"),
    ("model.layers.0.mlp.gate", "layers.0.mlp.gate"),
    ("layers.0.mlp.gate", "model.layers.0.mlp.gate"),
    ("model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate"),
    ("model.language_model.layers.0.mlp.gate", "language_model.model.layers.0.mlp.gate"),
    ("model.layers.0.mlp.gate", "model.language_model.layers.0.mlp.gate"),
    ("model.vision_tower", "model.vision_tower.layers.0.attention.q_proj"),
    ("model.vision_tower", "vision_tower.layers.0.attention.q_proj"),
    ("vision_tower", "model.vision_tower.layers.0.attention.q_proj"),
    ("visual", "model.visual.blocks.1.attn.qkv"),
    ("model.layers.1.mlp", "model.layers.1.mlp.gate_proj"),
    ("self_attn", "model.layers.7.self_attn.o_proj"),
    ("re:.*self_attn.*", "model.layers.7.self_attn.o_proj"),
    ("re:model.layers.7.*", "model.layers.7.self_attn.o_proj"),
    ("re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "model.layers.7.mlp.up_proj"),
    ("model.layers.*.mlp.*", "model.layers.7.mlp.up_proj"),
    ("*.o_proj", "model.layers.7.self_attn.o_proj"),
    ("model.layers.4.mlp.gate", "model.layers.N.mlp.gate"),
]
NOT_MEANT = [
    ("gate", "model.layers.0.mlp.gate_proj"),
    ("gate", "model.layers.0.mlp.gate_up_proj"),
    ("gate", "model.layers.0.mlp.shared_expert_gate"),
    ("model.layers.1", "model.layers.11.mlp.down_proj"),
    ("model.layers.1.mlp.gate", "model.layers.11.mlp.gate"),
    ("model.layers.0.mlp.gate", "mtp.layers.0.mlp.gate"),
    ("layers.0.mlp.fc1", "vision_tower.layers.0.mlp.fc1"),
    ("model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.gate"),
    ("lm_head", "lm_head_norm"),
    ("head", "lm_head"),
    ("proj", "model.layers.0.mlp.gate_proj"),
    ("re:mlp", "model.layers.0.mlp.gate"),
    ("model.layers.*.mlp", "model.layers.0.mlp.up_proj"),
    ("model.layers.4.mlp.gate", "model.layers.N.mlp.gate_proj"),
]


@pytest.mark.parametrize("entry, name", MEANT)
def test_an_entry_means_the_layer(entry, name):
    """Lists are written for one spelling of the prefixes and read under another; bf16 modules were cast to FP8."""
    assert matches(entry, name)


@pytest.mark.parametrize("entry, name", NOT_MEANT)
def test_an_entry_does_not_mean_the_layer(entry, name):
    assert not matches(entry, name)


@pytest.mark.parametrize("field", ["ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules"])
@pytest.mark.parametrize("config", [DEEPSEEK, compressed({"strategy": "channel"}, TOKEN)], ids=["fp8", "ct"])
def test_each_name_of_the_list(field, config):
    config = {**config, field: ["model.layers.3.self_attn.q_proj", "re:.*down_proj", "fc"]}
    left = ("layers.3.self_attn.q_proj", "model.layers.9.mlp.down_proj", "fc", "model.layers.1.fc")
    taken = ("model.layers.13.self_attn.q_proj", "model.layers.9.mlp.up_proj", "model.fc1")
    assert {route(config, name).scheme for name in left} == {"unquantized"}
    assert "unquantized" not in {route(config, name).scheme for name in taken}
    assert "`fc`" in route(config, "fc").reasons[0]


def test_what_no_checkpoint_quantises_unless_it_says_so():
    """Checkpoints without any list have bf16 heads, embeddings, norms and router gates."""
    kept = ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate",
            "model.layers.3.input_layernorm", "model.norm", "transformer.wte", "model.layers.0.ffn.router"]  # fmt: skip
    linear = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.shared_expert.gate_proj", "model.layers.0.fc",
              "model.layers.0.mlp.experts.0.gate_up_proj", "model.layers.0.self_attn.indexer.wk"]  # fmt: skip
    assert all(is_kept_by_default(name) for name in kept) and not any(is_kept_by_default(name) for name in linear)
    assert {route(DEEPSEEK, name).scheme for name in kept} == {"unquantized"}
    assert {route(DEEPSEEK, name).scheme for name in linear} == {"w8a16_block"}


@pytest.mark.parametrize("target", ["re:.*lm_head", "lm_head", "re:^lm_head$", "model.lm_head"])
def test_a_quantised_lm_head(target):
    """The router knew linear layers only, and FP8 codes of the head were used as bf16."""
    config = compressed({"strategy": "channel"}, targets=[target], ignore=[])
    decision = route(config, "lm_head", weight_shape=(248320, 2048))
    assert facts(decision) == ("channel", None, "none") and decision.kernel is CPUFp8BlockScaledMMKernel
    assert route(config, LINEAR).scheme == "unquantized"
    group = decision.config.weight_quant_key.scale.group_shape
    layer = make_layer(codes(320, 16), torch.ones(320, 1), prefix="lm_head")
    assert read_layer(layer, group, (320, 16)).block_size == (1, 16)
    del layer.weight_scale_inv
    with pytest.raises(ValueError, match="layer `lm_head`: expected scales"):
        read_layer(layer, group, (320, 16))


def test_the_stored_dtype_beats_the_lists():
    config = {**DEEPSEEK, "modules_to_not_convert": ["model.layers.0.mlp"]}
    assert route(config, LINEAR).scheme == "unquantized"
    assert route(config, LINEAR, weight_dtype=FP8).scheme == "w8a16_block"
    assert route(config, "lm_head", weight_dtype=FP8).scheme == "w8a16_block"
    other = "model.layers.1.mlp.down_proj"
    assert route(config, other).scheme == "w8a16_block"
    assert route(config, other, weight_dtype=torch.bfloat16).scheme == "unquantized"
    with pytest.raises(ValueError, match="float8_e4m3fn, got float8_e5m2"):
        route(config, other, weight_dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="expected a quantisation of its float8_e4m3fn weight"):
        route(compressed({"strategy": "channel"}, targets=["re:.*q_proj"]), other, weight_dtype=FP8)


# --------------------------------------------------------------------------------------------------------- fused layers
FUSED = [
    ("model.layers.0.self_attn.qkv_proj", ["q_proj", "k_proj", "v_proj"]),
    ("model.layers.0.mlp.gate_up_proj", ["gate_proj", "up_proj"]),
    ("model.layers.0.self_attn.fused_qkv_a_proj", ["q_a_proj", "kv_a_proj_with_mqa"]),
]


@pytest.mark.parametrize("name, shards", FUSED)
@pytest.mark.parametrize("absolute", [True, False])
def test_shards_of_a_fused_layer_agree_or_are_named(name, shards, absolute):
    owner = name.rpartition(".")[0]
    entries = [f"{owner}.{shard}" if absolute else shard for shard in shards]
    assert route(DEEPSEEK, name).scheme == "w8a16_block"
    assert route({**DEEPSEEK, "modules_to_not_convert": entries}, name).scheme == "unquantized"
    assert route({**DEEPSEEK, "modules_to_not_convert": [name]}, name).scheme == "unquantized"
    for entry in entries:
        with pytest.raises(ValueError, match="its shards to be quantised alike") as error:
            route({**DEEPSEEK, "modules_to_not_convert": [entry]}, name)
        assert all(f"`{owner}.{shard}`" in str(error.value) for shard in shards)
        assert "not quantised" in str(error.value) and "block weight, group128 activation" in str(error.value)


def test_shards_in_different_groups():
    config = compressed({"strategy": "channel"}, TOKEN, targets=["re:.*(q|k)_proj$"])
    other = {"targets": ["re:.*\\.v_proj$"], "weights": {**FP8_ARGS, "strategy": "tensor"}}
    config["config_groups"]["group_1"] = other
    with pytest.raises(ValueError, match="channel weight, token activation.*tensor weight, 16-bit activation"):
        route(config, "model.layers.0.self_attn.qkv_proj")
    other["weights"]["strategy"], other["input_activations"] = "channel", {**FP8_ARGS, **TOKEN}
    assert route(config, "model.layers.0.self_attn.qkv_proj").weight_strategy == "channel"


def test_an_engine_may_bring_its_own_fusions():
    config = {**DEEPSEEK, "modules_to_not_convert": ["a", "b"]}
    assert route(config, "x.ab", fused_shards={"ab": ["a", "b"]}).scheme == "unquantized"
    assert route(config, "x.qkv_proj", fused_shards={}).scheme == "w8a16_block"
