"""Gradients to x and bias, in eager and compiled; no autograd where nothing asks for it."""

from __future__ import annotations

import pytest
import torch
from blockscale import BlockScaledLinear, linear, ops, quantize_weight_block_fp8, reference
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
