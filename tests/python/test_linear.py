"""BlockScaledLinear: values, scale forms, devices, refusals, compile and export."""

from __future__ import annotations

import copy

import pytest
import torch
from blockscale import BlockScaledLinear, reference, unpack_weight
from layers import BLOCKS, K, N, make
from torch import nn


def exact(layer: BlockScaledLinear, x: torch.Tensor) -> torch.Tensor:
    codes = unpack_weight(layer.weight.detach())
    return reference.scaled_mm(x, codes, layer.weight_scale_inv, layer.block_size, layer.bias).detach()


def assert_close(layer: BlockScaledLinear, x: torch.Tensor, unit: float = 2.0**-24):
    """out = x · dequant(W)ᵀ + bias within the bound: K + blocks + 2 roundings over Σ|x·w|, one at the store."""
    codes = unpack_weight(layer.weight.detach())
    w = reference.dequantize(codes, layer.weight_scale_inv, layer.block_size).abs()
    want = exact(layer, x)
    bound = (K + layer.weight_scale_inv.shape[1] + 2) * 2.0**-24 * (x.double().abs() @ w.mT + 1)
    error = (layer(x).detach().double() - want).abs()
    assert (error <= bound + unit * (want.abs() + bound)).all()


@pytest.mark.isa
@pytest.mark.parametrize("block_size", BLOCKS, ids=lambda b: f"{b[0]}x{b[1]}")
@pytest.mark.parametrize(
    "dtype, unit", [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)]
)
def test_forward_matches_the_formula(block_size, dtype, unit):
    layer = make(block_size)
    x = torch.randn(2, 3, K).to(dtype)
    out = layer(x)
    assert out.shape == (2, 3, N) and out.dtype == dtype
    assert_close(layer, x, unit)


def test_from_float_quantises_like_the_reference_and_leaves_its_input_alone():
    torch.manual_seed(0)
    linear = nn.Linear(K, N).to(torch.bfloat16).eval()
    before = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    layer = BlockScaledLinear.from_float(linear, (32, 64))
    codes, scales = reference.quantize(linear.weight.detach(), (32, 64))
    assert torch.equal(unpack_weight(layer.weight).view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(layer.weight_scale_inv, scales)
    assert not layer.training and layer.bias.dtype == torch.bfloat16 and layer.bias is not linear.bias
    for name, tensor in linear.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("mode", (torch.inference_mode, torch.no_grad, torch.enable_grad), ids=lambda m: m.__name__)
@pytest.mark.parametrize("bias", (False, True), ids=("plain", "bias"))
def test_a_call_is_one_dispatched_op(bias, mode):
    """No copy, no allocation through the dispatcher and no autograd: each costs a small layer a tenth of its time."""
    layer = make((128, 128), bias=bias).requires_grad_(False)
    x = torch.randn(1, K)
    with mode():
        layer(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            layer(x)
    names = [event.name for event in profile.events() if "::" in event.name]
    assert names == ["blockscale::fp8_scaled_mm_cpu"]


def test_a_call_looks_no_parameter_up_through_the_module(monkeypatch):
    layer, looked_up = make((128, 128)), []
    lookup = nn.Module.__getattr__

    def counting(module, name):
        looked_up.append(name)
        return lookup(module, name)

    monkeypatch.setattr(nn.Module, "__getattr__", counting)
    layer(torch.randn(1, K))
    assert looked_up == []
    assert layer.weight is not None and looked_up == ["weight"]


class Doubled(nn.Module):
    def forward(self, parameter):
        return 2 * parameter


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_parameters_may_be_replaced_from_outside(compiled):
    """By torch's parametrisations, which take them out of the module, and by functional calls."""
    layer, x = make((128, 128), bias=True), torch.randn(3, K)
    plain, bias = layer(x), layer.bias.detach().clone()
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    shifted = torch.func.functional_call(layer, {"bias": 2 * bias}, (x,))
    nn.utils.parametrize.register_parametrization(layer, "bias", Doubled())
    assert "bias" not in layer._parameters
    assert torch.equal(call(x), shifted) and not torch.equal(shifted, plain)


def test_new_layer_is_zero_and_takes_a_bias_dtype():
    layer = BlockScaledLinear(K, N, dtype=torch.float16)
    assert torch.equal(layer(torch.ones(2, K)), torch.zeros(2, N)) and layer.bias.dtype == torch.float16
    assert BlockScaledLinear(K, N, bias=False).bias is None


# ---- field case 13: the stored number multiplies
def test_scale_multiplies():
    one = torch.ones(1, 1).to(torch.float8_e4m3fn)
    assert BlockScaledLinear.from_fp8(one, torch.tensor([[0.5]]))(torch.ones(1)).item() == 0.5


# ---- field cases 8, 18, 20: dtypes and shapes in which scales are stored
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e8m0fnu", "uint8"])
def test_scale_dtypes_are_widened_once(dtype):
    codes = unpack_weight(make().weight.detach())
    powers = 2.0 ** torch.randint(-100, 100, (2, 7), generator=torch.Generator().manual_seed(0)).float()
    stored = {
        "float32": powers,
        "bfloat16": powers.bfloat16(),
        "float8_e8m0fnu": powers.to(torch.float8_e8m0fnu),
        "uint8": (powers.log2() + 127).to(torch.uint8),
    }[dtype]
    layer = BlockScaledLinear.from_fp8(codes, stored, block_size=(32, 32))
    assert layer.weight_scale_inv.dtype == torch.float32
    assert torch.equal(layer.weight_scale_inv, powers)


def test_e8m0_ends():
    codes = torch.ones(3, 1).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0], [127], [255]], dtype=torch.uint8)
    layer = BlockScaledLinear.from_fp8(codes, scales, block_size=(1, 1))
    want = torch.tensor([[2.0**-127], [1.0], [torch.nan]])
    assert torch.equal(layer.weight_scale_inv.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(N,), (N, 1), (1, N)], ids=str)
def test_channel_scales_in_every_layout(shape, dtype):
    codes = unpack_weight(make().weight.detach())
    channel = (torch.arange(N) % 5 + 1).to(dtype)
    layer = BlockScaledLinear.from_fp8(codes, channel.reshape(shape))
    assert layer.block_size == (1, K)
    x = torch.randn(4, K)
    want = BlockScaledLinear.from_fp8(codes, channel.float()[:, None], block_size=(1, K))(x)
    assert torch.equal(layer(x), want)
    assert_close(layer, x)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_tensor_scale(shape):
    codes = unpack_weight(make().weight.detach())
    layer = BlockScaledLinear.from_fp8(codes, torch.full(shape, 0.25))
    x = torch.randn(4, K)
    assert torch.equal(layer(x), BlockScaledLinear.from_fp8(codes, torch.full((1, 2), 0.25))(x))


def test_block_grid_wins_over_channel_scales_of_the_same_shape():
    codes = torch.ones(2, 256).to(torch.float8_e4m3fn)
    layer = BlockScaledLinear.from_fp8(codes, torch.tensor([[1.0, 2.0]]))
    assert layer.block_size == (128, 128)
    assert layer(torch.ones(256)).tolist() == [384.0, 384.0]


# ---- field case 36: an all-zero block
def test_zero_block_has_a_finite_scale():
    linear = nn.Linear(256, 256, bias=False)
    linear.weight.data.zero_()
    linear.weight.data[0, 0] = 1
    layer = BlockScaledLinear.from_float(linear)
    assert layer.weight_scale_inv[1:].eq(1).all() and layer.weight_scale_inv.isfinite().all()
    assert torch.equal(layer(torch.ones(256)), torch.eye(256)[0])


# ---- field case 72: bias dtypes
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bias_dtype_is_free(bias_dtype, x_dtype):
    codes, scales = unpack_weight(make().weight.detach()), torch.ones(1, 2)
    bias = torch.randn(N).to(bias_dtype)
    layer = BlockScaledLinear.from_fp8(codes, scales, bias)
    assert layer.bias.dtype == bias_dtype
    assert torch.equal(layer(torch.zeros(2, K, dtype=x_dtype)), bias.to(x_dtype).expand(2, N))


@pytest.mark.parametrize("n,k", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("scales", [torch.ones([]), None], ids=["tensor", "block"])
def test_empty_sides(n, k, scales):
    grid = torch.ones(-(-n // 128), -(-k // 128)) if scales is None else scales
    layer = BlockScaledLinear.from_fp8(torch.empty(n, k, dtype=torch.float8_e4m3fn), grid, torch.ones(n))
    assert torch.equal(layer(torch.ones(3, k)), torch.ones(3, n))


def test_no_rows():
    assert make()(torch.empty(0, K)).shape == (0, N)


# ---- devices
def test_meta_and_back():
    layer = make()
    on_meta = copy.deepcopy(layer).to("meta")
    assert on_meta(torch.ones(3, K, device="meta")).shape == (3, N)
    assert on_meta.state_dict()["weight"].dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="one device, got `mat1` on cpu and `mat2` on meta"):
        on_meta(torch.ones(3, K))
    with pytest.raises(ValueError, match="one device, got `mat1` on meta and `mat2` on cpu"):
        layer(torch.ones(3, K, device="meta"))
    back = on_meta.to_empty(device="cpu")
    back.load_state_dict(layer.state_dict())
    x = torch.randn(3, K)
    assert torch.equal(back(x), layer(x))


def test_other_devices_are_refused_by_name():
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = make()
    x = FakeTensorMode().from_tensor(torch.ones(3, K))
    x.fake_device = torch.device("cuda", 0)  # a CUDA tensor, as far as anyone can see
    with pytest.raises(NotImplementedError, match="got cuda:0"):
        layer(x)


# ---- refusals
CODES = torch.ones(N, K).to(torch.float8_e4m3fn)
SCALES = torch.ones(1, 2)
REFUSED = {
    "no-scales": (lambda: BlockScaledLinear.from_fp8(CODES, None), "scales beside a float8_e4m3fn `weight`, got none"),
    "packed": (lambda: BlockScaledLinear.from_fp8(make().weight, SCALES), "got uint8: packed bytes live in memory"),
    "dtype": (
        lambda: BlockScaledLinear.from_fp8(CODES.float(), SCALES),
        "`weight` of dtype float8_e4m3fn, got float32",
    ),
    "rank": (lambda: BlockScaledLinear.from_fp8(CODES[None], SCALES), r"of shape \[N, K\], got \[1, 48, 193\]"),
    "grid": (lambda: BlockScaledLinear.from_fp8(CODES, torch.ones(2, 2)), r"= \[1, 2\], .* N = 48, got \[2, 2\]"),
    "scale-dtype": (lambda: BlockScaledLinear.from_fp8(CODES, SCALES.double()), "or uint8 .*, got float64"),
    "bias": (lambda: BlockScaledLinear.from_fp8(CODES, SCALES, torch.ones(3)), r"\[N\] = \[48\], got \[3\]"),
    "bias-dtype": (lambda: BlockScaledLinear.from_fp8(CODES, SCALES, torch.ones(N).long()), "got int64"),
    "block-one": (lambda: BlockScaledLinear.from_fp8(CODES, SCALES, None, 128), r"\[block_n, block_k\], got \[128\]"),
    "negative": (lambda: BlockScaledLinear(-1, N), f"not negative, got -1 and {N}"),
    "bias-int": (lambda: BlockScaledLinear(K, N, dtype=torch.int32), "`bias` of dtype bfloat16, .*, got int32"),
    "bias-double": (lambda: BlockScaledLinear(K, N, dtype=torch.float64), "got float64"),
    "block-huge": (lambda: BlockScaledLinear.from_float(nn.Linear(K, N), (2**70, 1)), r"integers below 2\*\*63"),
    "block-bool": (lambda: BlockScaledLinear(K, N, block_size=(True, 1)), r"positive integers .*, got \[True, 1\]"),
    "block-zero": (lambda: BlockScaledLinear(K, N, block_size=(0, 1)), r"positive integers .*, got \[0, 1\]"),
    "block-negative": (lambda: BlockScaledLinear.from_float(nn.Linear(2, 2), (-1, 1)), r"got \[-1, 1\]"),
    "block-three": (lambda: BlockScaledLinear(K, N, block_size=(1, 1, 1)), r"got \[1, 1, 1\]"),
    "block-float": (lambda: BlockScaledLinear(K, N, block_size=(1.5, 1)), r"got \[1.5, 1\]"),
    "no-linear": (lambda: BlockScaledLinear.from_float(nn.Embedding(2, 2)), "torch.nn.Linear, got Embedding"),
    "float64": (lambda: BlockScaledLinear.from_float(nn.Linear(2, 2).double()), "float32, got float64"),
    "x-dtype": (lambda: make()(torch.ones(K).double()), "`mat1` of dtype bfloat16, float16 or float32, got float64"),
    "x-shape": (lambda: make()(torch.ones(2, 3)), r"K = mat2.size\(1\) = 193, got \[2, 3\]"),
    "x-scalar": (lambda: make()(torch.ones([])), r"shape \[..., K\], got \[\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_sentences(case):
    call, words = REFUSED[case]
    with pytest.raises(ValueError, match="expected .*" + words):
        call()


def test_default_dtype_does_not_reach_the_scales():
    codes = torch.ones(N, K).to(torch.float8_e4m3fn)
    torch.set_default_dtype(torch.float64)
    try:
        layer = BlockScaledLinear(K, N, dtype=torch.float32)
        other = BlockScaledLinear.from_fp8(codes, torch.ones(1, 2, dtype=torch.float32), torch.ones(N).half())
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.weight_scale_inv.dtype == torch.float32 and other.bias.dtype == torch.float16
    assert layer(torch.ones(K)).eq(0).all() and other(torch.ones(K)).eq(K + 1).all()


def test_infinite_weight_is_refused():
    linear = nn.Linear(K, N)
    linear.weight.data[40, 190] = -torch.inf
    with pytest.raises(ValueError, match=r"without infinities, got an infinity in block \[1, 2\]"):
        BlockScaledLinear.from_float(linear, (32, 64))


def test_compiled_module_with_dynamic_rows():
    layer = make()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for M in (2, 5, 9):
            x = torch.randn(M, K, dtype=torch.bfloat16)
            assert torch.equal(compiled(x), layer(x))


def test_exported_module_with_dynamic_rows():
    layer = make().requires_grad_(False)
    rows = torch.export.Dim("rows")
    program = torch.export.export(layer, (torch.randn(4, K),), dynamic_shapes={"x": {0: rows}})
    x = torch.randn(7, K)
    assert torch.equal(program.module()(x), layer(x))
