"""Loading a checkpoint into a model: values, tied weights, scale names and forms, and what is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from blockscale import BlockScaledLinear, load_checkpoint, reference, unpack_weight
from checkpoints import CONVERTED, Model, convert, fp8_tensors, read, safetensors_torch, save
from torch import nn


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().to(torch.bfloat16)


# ---- loading
def expected(model, folder):
    """`model` in float64 with the weights that `folder` holds, dequantised by the reference."""
    block = json.loads((folder / "config.json").read_text())["quantization_config"]["weight_block_size"]
    tensors = read(folder)
    state = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            state[name] = reference.dequantize(tensor, tensors[name + "_scale_inv"], block)
        elif not name.endswith("_scale_inv"):
            state[name] = tensor
    twin = Model(model.lm_head.weight is model.embed_tokens.weight).double()
    twin.load_state_dict(state, strict=False)
    return twin


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_load(tmp_path, shards, device, tied):
    torch.manual_seed(0)
    dst = tmp_path / "dst"
    convert(save(Model(tied).to(torch.bfloat16), tmp_path / "src", shards), dst, block_size=(32, 64))
    with torch.device(device):
        empty = Model(tied).eval()
    embedding, bias = empty.embed_tokens.weight, empty.layers[0].self_attn.q_proj.bias
    loaded = load_checkpoint(empty, dst)
    assert loaded is empty and not loaded.layers[0].mlp.down_proj.training
    fp8 = sorted(name + ".weight" for name, m in loaded.named_modules() if isinstance(m, BlockScaledLinear))
    assert fp8 == CONVERTED
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == tied
    if device == "cpu":  # in place
        assert loaded.embed_tokens.weight is embedding and loaded.layers[0].self_attn.q_proj.bias is bias
    assert loaded.embed_tokens.weight.dtype == torch.float32 and loaded.steps == 3
    ids = torch.arange(7)
    with torch.no_grad():
        got, want = loaded(ids).double(), expected(loaded, dst)(ids)
    assert (got - want).norm() <= 1e-5 * want.norm()


def test_loaded_tensors_do_not_depend_on_the_file(model, tmp_path):
    dst = tmp_path / "dst"
    convert(save(model, tmp_path / "src"), dst)
    with torch.device("meta"):
        empty = Model()
    loaded = load_checkpoint(empty, dst)
    ids = torch.arange(7)
    want = loaded(ids)
    with open(dst / "model.safetensors", "r+b") as file:
        file.write(bytes(file.seek(0, 2)))
        file.seek(0)
        file.write(bytes((dst / "model.safetensors").stat().st_size))
    assert torch.equal(loaded(ids), want)


def test_load_twice_and_another_in_between(model, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    convert(save(model, tmp_path / "src-a"), a)
    torch.manual_seed(5)
    convert(save(Model().bfloat16(), tmp_path / "src-b"), b)
    ids = torch.arange(7)
    fresh = load_checkpoint(Model(), a)(ids)
    reused = load_checkpoint(load_checkpoint(load_checkpoint(Model(), a), b), a)
    assert torch.equal(reused(ids), fresh)


def test_load_state_dict_of_a_loaded_model_is_the_checkpoint(model, tmp_path):
    dst = tmp_path / "dst"
    convert(save(model, tmp_path / "src"), dst)
    state = load_checkpoint(Model().bfloat16(), dst).state_dict()
    for name, tensor in read(dst).items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name].contiguous().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_load_without_fp8_weights_is_a_plain_load(model, tmp_path):
    src = save(model, tmp_path / "src", 2)
    loaded = load_checkpoint(Model().bfloat16(), src)
    ids = torch.arange(7)
    assert torch.equal(loaded(ids), model(ids))


def test_module_used_twice_stays_one(tmp_path):
    linear = nn.Linear(8, 8, bias=False)
    safetensors_torch.save_file(fp8_tensors("a", torch.ones(1, 1)), tmp_path / "m.safetensors")
    for twin in (linear, nn.Linear(8, 8, bias=False)):
        twin.weight = linear.weight
        loaded = load_checkpoint(nn.ModuleDict({"a": linear, "b": twin}), tmp_path / "m.safetensors")
        assert loaded["a"].weight is loaded["b"].weight
        assert (loaded["a"] is loaded["b"]) == (twin is linear)
        linear = nn.Linear(8, 8, bias=False)


def one_layer(n=8, k=8, bias=False):
    return nn.ModuleDict({"a": nn.Linear(k, n, bias=bias)})


def load_tensors(tmp_path, tensors, model=None, config=None):
    folder = tmp_path / "ckpt"
    folder.mkdir(exist_ok=True)
    safetensors_torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    return load_checkpoint(model or one_layer(), folder)


# ---- field cases 8 and 18: names, dtypes and layouts of stored scales
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8], ids=str)
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale", "scale"])
def test_scale_names_and_dtypes(tmp_path, name, dtype):
    scale = torch.full((1, 1), 128, dtype=torch.uint8) if dtype == torch.uint8 else torch.full((1, 1), 2.0).to(dtype)
    loaded = load_tensors(tmp_path, fp8_tensors("a", scale, name))
    assert loaded["a"].weight_scale_inv.dtype == torch.float32
    assert loaded["a"](torch.ones(8)).eq(16).all()


@pytest.mark.parametrize("shape", [(8,), (8, 1), (1, 8)], ids=str)
def test_channel_scales_under_any_group_name(tmp_path, shape):
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"FP8_DYNAMIC": group}}}
    scales = torch.arange(1.0, 9.0).bfloat16().reshape(shape)
    loaded = load_tensors(tmp_path, fp8_tensors("a", scales, "weight_scale"), config=config)
    assert loaded["a"](torch.ones(8)).tolist() == [8.0 * i for i in range(1, 9)]


@pytest.mark.parametrize("structure", [[2, 4], "2x4"])
def test_block_structure_of_compressed_tensors(tmp_path, structure):
    group = {"targets": ["Linear"], "weights": {"strategy": "block", "block_structure": structure}}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"any": group}}}
    loaded = load_tensors(tmp_path, fp8_tensors("a", torch.ones(4, 2).bfloat16(), "weight_scale"), config=config)
    assert loaded["a"].block_size == (2, 4)


def test_activation_scales_are_not_used(tmp_path, caplog):
    tensors = fp8_tensors("a", torch.tensor(0.5), "weight_scale") | {"a.input_scale": torch.tensor(3.0)}
    with caplog.at_level("INFO", "blockscale"):
        assert load_tensors(tmp_path, tensors)["a"](torch.ones(8)).eq(4).all()
    assert [record.message for record in caplog.records] == [
        "blockscale: 1 activation scales are not used: activations are not quantised"
    ]


# ---- field case 17, and everything else that can't be loaded
ONE = torch.ones(1, 1)
UNLOADABLE = {
    "no-scale": (
        lambda: {"a.weight": fp8_tensors("a", ONE)["a.weight"]},
        None,
        "beside the float8_e4m3fn weight `a.weight`",
    ),
    "scale-shape": (
        lambda: fp8_tensors("a", torch.ones(2, 2)),
        None,
        r"\[ceil\(N/block_n\), .* = \[1, 1\], .*got \[2, 2\]",
    ),
    "scale-dtype": (lambda: fp8_tensors("a", ONE.half()), None, "`scales` of dtype float32, bfloat16.*got float16"),
    "scale-int": (lambda: fp8_tensors("a", ONE.int()), None, "`a.weight_scale_inv` of dtype .*, got I32"),
    "shape": (lambda: fp8_tensors("a", ONE, n=9), None, r"`a.weight` of shape \[8, 8\], got \[9, 8\]"),
    "no-module": (lambda: fp8_tensors("b", ONE), None, "a linear layer in the model for `b.weight`, got none"),
    "embedding": (
        lambda: fp8_tensors("a", ONE),
        lambda: nn.ModuleDict({"a": nn.Embedding(8, 8)}),
        "Linear.*`a.weight`.*Embedding",
    ),
    "e5m2": (lambda: {"a.weight": torch.ones(8, 8).to(torch.float8_e5m2)}, None, "`a.weight` of .*, got dtype F8_E5M2"),
    "missing": (lambda: fp8_tensors("a", ONE), lambda: one_layer(bias=True), "tensor in the checkpoint for `a.bias`"),
    "unexpected": (
        lambda: fp8_tensors("a", ONE) | {"c": ONE.clone()},
        None,
        "parameter or buffer in the model for `c` of",
    ),
    "complex": (
        lambda: {"a.weight": torch.ones(8, 8, dtype=torch.complex64)},
        None,
        "`a.weight` of .* of a real dtype, as the model holds it, got C64",
    ),
    "double-bias": (
        lambda: fp8_tensors("a", ONE) | {"a.bias": torch.ones(8)},
        lambda: one_layer(bias=True).double(),
        r"`a.bias` of dtype bfloat16, float16 or float32, got float64",
    ),
    "plain-shape": (lambda: {"a.weight": torch.ones(8, 9)}, None, r"`a.weight` of .*shape \[8, 8\], got \[8, 9\]"),
    "bf16-into-fp8": (
        lambda: {"a.weight": torch.ones(8, 8).bfloat16()},
        lambda: nn.ModuleDict({"a": BlockScaledLinear(8, 8, bias=False)}),
        "`a.weight` of .* in FP8, as the model holds it, got dtype BF16",
    ),
    "bytes-into-fp8": (
        lambda: {"a.weight": torch.ones(8, 8, dtype=torch.uint8)},
        lambda: nn.ModuleDict({"a": BlockScaledLinear(8, 8, bias=False)}),
        "`a.weight` of .* in FP8, as the model holds it, got dtype U8",
    ),
}


@pytest.mark.parametrize("case", UNLOADABLE)
def test_unloadable_is_refused_by_name_and_changes_nothing(tmp_path, case):
    tensors, model, words = UNLOADABLE[case]
    model = model() if model else one_layer()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="expected .*" + words) as refusal:
        load_tensors(tmp_path, tensors(), model)
    assert "`a.weight" in str(refusal.value) or case in ("no-module", "missing", "unexpected", "double-bias")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))


def test_other_quantisation_is_refused_by_name(tmp_path):
    with pytest.raises(NotImplementedError, match="expected quant_method fp8, .*, got awq"):
        load_tensors(tmp_path, {"a.weight": torch.ones(8, 8)}, config={"quantization_config": {"quant_method": "awq"}})


@pytest.mark.parametrize(
    "config, words",
    [
        ({"quantization_config": "fp8"}, "`quantization_config` to be a JSON object, got 'fp8'"),
        ({"quantization_config": ["fp8"]}, r"`quantization_config` to be a JSON object, got \['fp8'\]"),
        ({"compression_config": 3}, "`compression_config` to be a JSON object, got 3"),
        ({"quantization_config": {"config_groups": [1]}}, r"`config_groups` to be a JSON object, got \[1\]"),
        ({"quantization_config": {"config_groups": {"a": "x"}}}, "`a` to be a JSON object, got 'x'"),
        ({"quantization_config": {"config_groups": {"a": {"weights": "x"}}}}, "`weights of a` to be .*, got 'x'"),
        ({"quantization_config": {"weight_block_size": [2**63, 1]}}, r"integers below 2\*\*63"),
    ],
)
def test_odd_configuration_is_refused_by_name(tmp_path, config, words):
    with pytest.raises(ValueError, match="quantization_config: expected " + "(`block_size` of )?" + words):
        load_tensors(tmp_path, fp8_tensors("a", ONE), config=config)


def test_bad_block_size_in_config(tmp_path):
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}
    with pytest.raises(ValueError, match=r"quantization_config: expected `block_size` .*, got \[0, 128\]"):
        load_tensors(tmp_path, fp8_tensors("a", ONE), config=config)


def test_buffers_that_are_not_stored_must_not_lie_on_meta(tmp_path):
    model = one_layer().to("meta")
    model["a"].register_buffer("table", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"off meta .*\(`a.table`\)"):
        load_tensors(tmp_path, fp8_tensors("a", ONE), model)


def test_the_model_itself_may_be_the_layer(tmp_path):
    tensors = {"weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "weight_scale": ONE, "bias": torch.ones(8)}
    loaded = load_tensors(tmp_path, tensors, nn.Linear(8, 8))
    assert isinstance(loaded, BlockScaledLinear) and loaded(torch.ones(8)).eq(9).all()


def test_codes_survive_the_way_through_memory(model, tmp_path):
    dst = tmp_path / "dst"
    convert(save(model, tmp_path / "src"), dst)
    loaded, stored = load_checkpoint(Model(), dst), read(dst)
    for name in CONVERTED:
        codes = unpack_weight(loaded.get_parameter(name).detach())
        assert torch.equal(codes.view(torch.uint8), stored[name].view(torch.uint8))
