"""Which layers a checkpoint's lists mean, and layers that an engine has fused."""

import pytest
import torch
from blockscale.kernels import CPUFp8BlockScaledMMKernel, route
from blockscale.kernels.layer_names import entry_error, is_kept_by_default, matches
from blockscale.kernels.layer_params import read_layer
from checkpoint_configs import DEEPSEEK, FP8_ARGS, LINEAR, TOKEN, compressed, facts
from fp8_layers import codes, make_layer
from oracle import FP8

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


@pytest.mark.parametrize("entry", ["re:(", "re:[", "re:a{99999999999999999999}", "re:" + "(" * 5000, "re:*"])
def test_an_expression_that_does_not_compile_says_why(entry):
    assert entry_error(entry)
    for other in ("", "[", "re:", "re:.*", "a.b", "*", ".."):
        assert entry_error(other) is None
