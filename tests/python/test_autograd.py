"""Gradients to x and bias, in eager and compiled; no autograd where nothing asks for it."""

from __future__ import annotations

import pytest
import torch
from blockscale import (
    BlockScaledLinear,
    fp8_w8a8_block_scaled_mm_cpu,
    linear,
    ops,
    per_token_group_quant_fp8,
    quantize_weight_block_fp8,
    reference,
)
from torch import nn

N, K, BLOCK = 37, 193, (16, 64)


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def weight(request):
    """(weight as the op takes it, scales, dequantised float64)."""
    torch.manual_seed(0)
    codes, scales = quantize_weight_block_fp8(torch.randn(N, K), BLOCK)
    scales = scales * 2.0 ** (torch.arange(scales.numel()).reshape(scales.shape) % 7)
    stored = ops.convert_weight_packed(codes) if request.param else codes
    return stored, scales, reference.dequantize(codes, scales, BLOCK)


@pytest.mark.isa
@pytest.mark.parametrize(
    "dtype, unit", [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)]
)
def test_gradients_match_the_formula(weight, dtype, unit):
    stored, scales, w = weight
    x = torch.randn(2, 3, K).to(dtype).requires_grad_()
    bias = torch.randn(N).to(dtype).requires_grad_()
    out = linear(x, stored, scales, bias, block_size=BLOCK)
    grad = torch.randn(2, 3, N).to(dtype)
    out.backward(grad)
    for got, want, magnitude, terms in (
        (x.grad, grad.double() @ w, grad.double().abs() @ w.abs(), N),
        (bias.grad, grad.double().sum((0, 1)), grad.double().abs().sum((0, 1)), 6),
    ):
        assert got.dtype == dtype
        bound = (terms + 2) * 2.0**-24 * magnitude
        assert ((got.double() - want).abs() <= bound + unit * (want.abs() + bound) + 2.0**-25).all()


def test_value_is_the_same_with_and_without_gradient(weight):
    stored, scales, _ = weight
    x = torch.randn(5, K)
    want = linear(x, stored, scales, block_size=BLOCK)
    got = linear(x.clone().requires_grad_(), stored, scales, block_size=BLOCK)
    assert got.requires_grad and torch.equal(got, want)


def test_out_dtype_differs_from_x(weight):
    stored, scales, w = weight
    x = torch.randn(4, K, dtype=torch.bfloat16, requires_grad=True)
    out = linear(x, stored, scales, block_size=BLOCK, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert torch.allclose(x.grad.double(), w.sum(0).expand(4, K), rtol=2.0**-7, atol=1e-3)


def test_only_what_asks_gets_a_gradient(weight):
    stored, scales, _ = weight
    bias = torch.zeros(N, requires_grad=True)
    linear(torch.randn(3, K), stored, scales, bias, block_size=BLOCK).sum().backward()
    assert torch.equal(bias.grad, torch.full((N,), 3.0))
    x = torch.randn(3, K, requires_grad=True)
    linear(x, stored, scales, torch.zeros(N), block_size=BLOCK).sum().backward()
    assert x.grad is not None


def test_no_autograd_where_nothing_asks(weight, monkeypatch):
    stored, scales, _ = weight

    def never(*arguments):
        raise AssertionError("the autograd route was taken")

    monkeypatch.setattr(ops._ScaledMM, "apply", never)
    x = torch.randn(3, K)
    assert linear(x, stored, scales, block_size=BLOCK).grad_fn is None
    with torch.no_grad():
        assert not linear(
            x.requires_grad_(), stored, scales, torch.zeros(N, requires_grad=True), block_size=BLOCK
        ).requires_grad
    with torch.inference_mode():
        linear(x, stored, scales, block_size=BLOCK)


def test_no_rows(weight):
    stored, scales, _ = weight
    x = torch.empty(0, K, requires_grad=True)
    bias = torch.zeros(N, requires_grad=True)
    linear(x, stored, scales, bias, block_size=BLOCK).sum().backward()
    assert x.grad.shape == (0, K) and torch.equal(bias.grad, torch.zeros(N))


def test_one_row_vector(weight):
    stored, scales, w = weight
    x = torch.randn(K, requires_grad=True)
    linear(x, stored, scales, block_size=BLOCK).sum().backward()
    assert torch.allclose(x.grad.double(), w.sum(0), rtol=1e-5, atol=1e-4)


def test_no_columns():
    layer = BlockScaledLinear(5, 0)
    x = torch.zeros(3, 5, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 5)) and layer.bias.grad.shape == (0,)


def test_codes_and_scales_are_frozen_whatever_asks(weight):
    stored, scales, _ = weight
    w, scales = nn.Parameter(torch.randn(N, K)), nn.Parameter(scales)
    codes, made = quantize_weight_block_fp8(w, BLOCK)
    plain = nn.Parameter(codes)
    A, As = per_token_group_quant_fp8(w, BLOCK[1])
    bias = nn.Parameter(torch.zeros(N))
    results = {
        "quantize": (codes, made),
        "pack": (ops.convert_weight_packed(plain),),
        "dequantize": (ops.dequantize_weight_block_fp8(plain, nn.Parameter(made), BLOCK),),
        "linear": (linear(torch.randn(2, K), stored, scales, block_size=BLOCK),),
        "activations": (A, As),
        "w8a8": (fp8_w8a8_block_scaled_mm_cpu(A, plain, As, nn.Parameter(made), BLOCK, bias, is_vnni=False),),
    }
    for name, tensors in results.items():
        assert not any(tensor.requires_grad for tensor in tensors), name
    x = torch.randn(2, K, requires_grad=True)
    linear(x, stored, scales, block_size=BLOCK).sum().backward()
    assert x.grad is not None and scales.grad is None


# ---- forward mode
@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize("moving", ["x", "bias", "both"])
@pytest.mark.parametrize("shape", [(2, 3, K), (K,), (0, K)], ids=str)
def test_forward_mode(weight, shape, moving, no_grad):
    stored, scales, w = weight
    x, dx, bias, dbias = torch.randn(shape), torch.randn(shape), torch.randn(N), torch.randn(N)
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(not no_grad):
        dual_x = torch.autograd.forward_ad.make_dual(x, dx) if moving != "bias" else x
        dual_bias = torch.autograd.forward_ad.make_dual(bias, dbias) if moving != "x" else bias
        out = linear(dual_x, stored, scales, dual_bias, block_size=BLOCK, out_dtype=torch.bfloat16)
        value, tangent = torch.autograd.forward_ad.unpack_dual(out)
    want = torch.zeros(*shape[:-1], N, dtype=torch.float64)
    want += dx.double() @ w.T if moving != "bias" else 0
    want += dbias.double() if moving != "x" else 0
    assert torch.equal(value, linear(x, stored, scales, bias, block_size=BLOCK, out_dtype=torch.bfloat16))
    assert tangent.dtype == torch.bfloat16 and tangent.shape == value.shape
    assert torch.allclose(tangent.double(), want, rtol=2.0**-7, atol=1e-3)


def test_forward_mode_through_a_layer_whose_bias_is_frozen():
    layer = BlockScaledLinear.from_float(nn.Linear(K, N), BLOCK).requires_grad_(False)
    x, dx = torch.randn(3, K), torch.randn(3, K)
    value, tangent = torch.func.jvp(layer, (x,), (dx,))
    assert torch.equal(value, layer(x)) and torch.allclose(tangent, layer(dx) - layer.bias, atol=1e-5)


def test_forward_over_reverse(weight):
    stored, scales, w = weight
    x, dx = torch.randn(2, K), torch.randn(2, K)
    gradient = torch.func.grad(lambda x: linear(x, stored, scales, block_size=BLOCK).square().sum())
    _, product = torch.func.jvp(gradient, (x,), (dx,))
    assert torch.allclose(product.double(), 2 * (dx.double() @ w.T) @ w, rtol=1e-3, atol=1e-1)


def test_second_order_forward_mode(weight):
    stored, scales, w = weight
    x, dx = torch.randn(2, K), torch.randn(2, K)

    def directional(x):
        return torch.func.jvp(lambda x: linear(x, stored, scales, block_size=BLOCK).square().sum(), (x,), (dx,))[1]

    _, product = torch.func.jvp(directional, (x,), (dx,))
    assert torch.allclose(product.double(), 2 * (dx.double() @ w.T).square().sum(), rtol=1e-3)


# ---- more of reverse mode
def test_second_order(weight):
    stored, scales, w = weight
    x = torch.randn(2, K, requires_grad=True)
    out = linear(x, stored, scales, block_size=BLOCK)
    (first,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    want = 2 * (w.sum(1) @ w).expand(2, K)
    assert torch.allclose(second.double(), want, rtol=1e-4, atol=1e-2)


def test_functional_grad(weight):
    stored, scales, w = weight
    grad = torch.func.grad(lambda x: linear(x, stored, scales, block_size=BLOCK).sum())(torch.randn(2, K))
    assert torch.allclose(grad.double(), w.sum(0).expand(2, K), rtol=1e-5, atol=1e-4)


def test_compiled_training_step_with_dynamic_rows(weight):
    stored, scales, _ = weight
    bias = torch.zeros(N, requires_grad=True)

    def step(x):
        return linear(x, stored, scales, bias, block_size=BLOCK).square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (2, 5):
        eager, traced = (torch.randn(M, K, generator=torch.Generator().manual_seed(M)).requires_grad_() for _ in "ab")
        step(eager).backward()
        grad_bias, bias.grad = bias.grad, None
        compiled(traced).backward()
        assert torch.allclose(eager.grad, traced.grad) and torch.allclose(grad_bias, bias.grad)
        bias.grad = None


def test_module_trains_its_bias_and_passes_gradients_down():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, K), BlockScaledLinear.from_float(nn.Linear(K, N), BLOCK))
    frozen = {name: tensor.clone() for name, tensor in model[1].state_dict().items() if name != "bias"}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    x, target = torch.randn(16, 8), torch.randn(16, N)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, tensor in frozen.items():
        assert torch.equal(model[1].state_dict()[name].view(torch.uint8), tensor.view(torch.uint8))
