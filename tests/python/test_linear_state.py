"""BlockScaledLinear: state dicts, dtype conversions, copies, pickles, fork."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle

import pytest
import torch
from blockscale import BlockScaledLinear, unpack_weight
from layers import BLOCKS, K, N, make
from torch import nn


@pytest.mark.parametrize("block_size", BLOCKS, ids=lambda b: f"{b[0]}x{b[1]}")
def test_state_dict_is_plain(block_size):
    layer = make(block_size)
    state = layer.state_dict()
    assert list(state) == ["weight", "weight_scale_inv", "bias"]
    assert state["weight"].dtype == torch.float8_e4m3fn and state["weight"].shape == (N, K)
    assert state["weight_scale_inv"].is_contiguous() and state["weight_scale_inv"].dtype == torch.float32
    assert layer.weight_scale_inv.stride(0) == 1 or block_size[0] >= 16


@pytest.mark.parametrize("device, assign", [("cpu", False), ("cpu", True), ("meta", True)])
@pytest.mark.parametrize("block_size", BLOCKS, ids=lambda b: f"{b[0]}x{b[1]}")
def test_state_dict_round_trip_through_a_file(block_size, device, assign):
    layer = make(block_size)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = BlockScaledLinear(K, N, block_size=block_size, device=device)
    loaded.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    x = torch.randn(5, K)
    assert torch.equal(loaded(x), layer(x))
    assert loaded.weight.dtype == torch.uint8 and not loaded.weight.requires_grad
    assert loaded.weight_scale_inv.stride() == layer.weight_scale_inv.stride()


def test_state_dict_inside_a_model_and_twice():
    a, b = (nn.Sequential(make(seed=seed), nn.ReLU(), nn.Linear(N, 3)) for seed in (1, 2))
    x, state_a, state_b = torch.randn(2, K), copy.deepcopy(a.state_dict()), b.state_dict()
    want = a(x)
    a.load_state_dict(state_b)
    a.load_state_dict(state_a)
    assert torch.equal(a(x), want)
    assert list(state_a)[:2] == ["0.weight", "0.weight_scale_inv"]


def test_load_accepts_scales_in_other_dtypes():
    layer = BlockScaledLinear.from_fp8(unpack_weight(make().weight.detach()), torch.tensor([[0.5, 4.0]]))
    state = layer.state_dict()
    state["weight_scale_inv"] = state["weight_scale_inv"].to(torch.float8_e8m0fnu)
    loaded = BlockScaledLinear(K, N, bias=False)
    loaded.load_state_dict(state)
    assert torch.equal(loaded(torch.ones(K)), layer(torch.ones(K)))


BAD_STATES = {
    "packed": (lambda s, layer: s.update(weight=layer.weight.detach()), "packed bytes live in memory only"),
    "bf16": (lambda s, layer: s.update(weight=torch.zeros(N, K, dtype=torch.bfloat16)), "float8_e4m3fn, got bfloat16"),
    "e5m2": (lambda s, layer: s.update(weight=torch.zeros(N, K).to(torch.float8_e5m2)), "got float8_e5m2"),
    "fnuz": (lambda s, layer: s.update(weight=torch.zeros(N, K).to(torch.float8_e4m3fnuz)), "got float8_e4m3fnuz"),
    "weight-shape": (lambda s, layer: s.update(weight=s["weight"][:, 1:]), r"\[N, K\] = \[48, 193\], got \[48, 192\]"),
    "scale-shape": (lambda s, layer: s.update(weight_scale_inv=torch.ones(2, 2)), r"= \[1, 2\].*, got \[2, 2\]"),
    "scale-block": (lambda s, layer: s.update(weight_scale_inv=torch.ones(N)), "scales of block size"),
    "scale-dtype": (lambda s, layer: s.update(weight_scale_inv=torch.ones(1, 2).half()), "got float16"),
    "no-scale": (lambda s, layer: s.pop("weight_scale_inv"), "scales beside a float8_e4m3fn `weight`, got none"),
    "no-weight": (lambda s, layer: s.pop("weight"), "`weight` beside `weight_scale_inv`, got none"),
    "bias-shape": (lambda s, layer: s.update(bias=torch.ones(N + 1)), r"`bias` of shape \[N\] = \[48\], got \[49\]"),
    "weight-list": (lambda s, layer: s.update(weight=[1.0]), "`weight` to be a tensor, got list"),
    "scale-number": (lambda s, layer: s.update(weight_scale_inv=1.0), "`scales` to be a tensor, got float"),
    "bias-list": (lambda s, layer: s.update(bias=[1.0]), "`bias` to be a tensor, got list"),
    "bias-dtype": (lambda s, layer: s.update(bias=torch.ones(N).double()), "got float64"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", BAD_STATES)
def test_bad_state_is_refused_and_changes_nothing(case, strict):
    spoil, words = BAD_STATES[case]
    layer, other = make(seed=1), make(seed=2)
    before = copy.deepcopy(layer.state_dict())
    state = other.state_dict()
    spoil(state, other)
    with pytest.raises(RuntimeError, match="expected .*" + words):
        layer.load_state_dict(state, strict=strict)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.parametrize("missing", [("bias",), ("weight", "weight_scale_inv"), ("weight", "weight_scale_inv", "bias")])
def test_missing_keys(missing):
    layer, other = make(seed=1), make(seed=2)
    before = copy.deepcopy(layer.state_dict())
    state = {name: tensor for name, tensor in other.state_dict().items() if name not in missing}
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict(state)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))
    result = layer.load_state_dict(state, strict=False)
    assert sorted(result.missing_keys) == sorted(missing)


def test_unexpected_key_is_reported():
    state = {**make().state_dict(), "extra": torch.ones(1)}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        make().load_state_dict(state)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        make(bias=False).load_state_dict(make().state_dict())


# ---- conversions and copies
CONVERSIONS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "double-and-back": lambda m: m.double().float(),
    "to-dtype": lambda m: m.to(torch.float16),
    "to-both": lambda m: m.to("cpu", torch.bfloat16),
    "type": lambda m: m.type(torch.float16),
    "share_memory": lambda m: m.share_memory(),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}


@pytest.mark.parametrize("swap", [False, True], ids=["set-data", "swap-tensors"])
@pytest.mark.parametrize("block_size", [(128, 128), (1, K)], ids=lambda b: f"{b[0]}x{b[1]}")
@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_leave_codes_and_scales(name, block_size, swap):
    layer = make(block_size)
    x = torch.randn(3, K)
    with torch.no_grad():
        want = layer(x) - layer.bias
        codes, scales = layer.weight.clone(), layer.weight_scale_inv.clone()
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            converted = CONVERSIONS[name](nn.Sequential(layer))[0]
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert torch.equal(converted.weight, codes) and converted.weight.dtype == torch.uint8
        assert torch.equal(converted.weight_scale_inv, scales) and converted.weight_scale_inv.dtype == torch.float32
        assert converted.weight_scale_inv.stride() == scales.stride()
        converted.bias = None
        assert torch.allclose(converted(x), want, atol=1e-4)


def test_conversion_reaches_the_bias():
    assert make().half().bias.dtype == torch.float16


@pytest.mark.parametrize("swap", [False, True], ids=["set-data", "swap-tensors"])
def test_double_leaves_a_layer_that_works(swap):
    layer, x = make().half(), torch.randn(3, K)
    layer(x).sum().backward()
    want, grad = layer(x).detach(), layer.bias.grad.clone()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        layer.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert layer.bias.dtype == torch.float16 and torch.equal(layer(x), want)
    assert layer.bias.grad.dtype == torch.float16 and torch.equal(layer.bias.grad, grad)


def test_requires_grad_sets_the_bias_alone():
    layer = make()
    assert not layer.requires_grad_(False).bias.requires_grad
    assert layer.requires_grad_().bias.requires_grad
    assert not layer.weight.requires_grad and not layer.weight_scale_inv.requires_grad
    assert make(bias=False).requires_grad_(True).bias is None


def test_pickle_holds_plain_codes():
    layer = make()
    state = layer.__getstate__()
    assert state["_parameters"]["weight"] is None
    codes = unpack_weight(layer.weight.detach()).view(torch.uint8)
    assert torch.equal(state["codes"], codes)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).weight, layer.weight)


def test_copies_own_their_memory():
    layer = make()
    other = copy.deepcopy(layer)
    other.weight.zero_()
    other.weight_scale_inv.zero_()
    assert layer.weight.any() and layer.weight_scale_inv.all()


def test_from_fp8_copies_its_inputs():
    codes, scales, bias = torch.ones(N, K).to(torch.float8_e4m3fn), torch.ones(1, 2), torch.ones(N)
    layer = BlockScaledLinear.from_fp8(codes, scales, bias)
    for tensor in (codes.view(torch.uint8), scales, bias):
        tensor.zero_()
    assert layer(torch.ones(K)).eq(K + 1).all()


def _child(layer, x, want, queue):
    torch.set_num_threads(1)
    queue.put(torch.equal(layer(x), want))


def test_fork():
    layer, x = make(), torch.randn(3, K)
    torch.set_num_threads(1)  # a forked child can't use the parent's pool
    with torch.no_grad():
        want = layer(x)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child, args=(layer.requires_grad_(False), x, want, queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and queue.get()
