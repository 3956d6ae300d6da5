"""Experts beside a vLLM that looks its own up by name: replaced once, and their sum against float64."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import blockscale
import pytest
import torch
from fake_vllm import Version, install

E, H, INNER, M, TOP = 4, 192, 128, 5, 2
BLOCK = (128, 128)


@pytest.fixture
def experts(monkeypatch):
    """The module of vLLM's experts, hooked."""
    install(monkeypatch, Version())
    hooks = importlib.import_module("blockscale.integrations.vllm_experts")
    module = ModuleType(hooks.MODULE)
    monkeypatch.setitem(sys.modules, hooks.MODULE, module)
    assert not hooks.hook()  # nothing of that name

    class CPUExpertsFp8:
        @staticmethod
        def _supports_current_device():
            return False

    module.CPUExpertsFp8, module.prepare_fp8_moe_layer_for_cpu = CPUExpertsFp8, None
    assert hooks.hook()
    replaced = module.CPUExpertsFp8
    assert hooks.hook()
    assert module.CPUExpertsFp8 is replaced
    assert issubclass(replaced, CPUExpertsFp8)
    assert replaced._supports_current_device()
    return module


def quantised(rows, columns):
    weights = [blockscale.quantize_weight_block_fp8(torch.randn(rows, columns), BLOCK) for _ in range(E)]
    return torch.stack([codes.view(torch.uint8) for codes, _ in weights]), torch.stack([scale for _, scale in weights])


def run(module, x, w13, w2, scales, weights, ids, expert_map=None, **more):
    instance = module.CPUExpertsFp8()
    instance.quant_config = SimpleNamespace(block_shape=list(BLOCK))
    instance.w1_scale, instance.w2_scale = scales
    packed = module.prepare_fp8_moe_layer_for_cpu(w13.view(torch.float8_e4m3fn), w2.view(torch.float8_e4m3fn))
    output = torch.full((x.shape[0], H), torch.nan)
    instance.apply(output, x, *packed, weights, ids, None, E, expert_map, *[None] * 5, more.get("on_input", False))
    return output


def expected(x, w13, w2, scales, weights, ids, kept=range(E)):
    out = torch.zeros(x.shape[0], H, dtype=torch.float64)
    plain = [
        [blockscale.dequantize_weight_block_fp8(w[e].view(torch.float8_e4m3fn), s[e], BLOCK).double() for e in range(E)]
        for w, s in zip((w13, w2), scales, strict=True)
    ]
    for row in range(x.shape[0]):
        for slot in range(TOP):
            expert = int(ids[row, slot])
            if expert in kept:
                gate, up = (x[row].double() @ plain[0][expert].t()).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                out[row] += weights[row, slot].double() * (inner @ plain[1][expert].t())
    return out


@pytest.fixture
def case():
    torch.manual_seed(0)
    (w13, s13), (w2, s2) = quantised(2 * INNER, H), quantised(H, INNER)
    ids = torch.stack([torch.randperm(E - 1)[:TOP] for _ in range(M)])  # the last expert gets nothing
    return torch.randn(M, H), w13, w2, (s13, s2), torch.rand(M, TOP), ids


def test_sum_over_the_experts_of_a_row(experts, case):
    out, wanted = run(experts, *case), expected(*case)
    assert (out.double() - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert wanted.abs().max() > 1


def test_rows_do_not_depend_on_each_other(experts, case):
    x, w13, w2, scales, weights, ids = case
    out = run(experts, *case)
    for row in range(M):
        one = slice(row, row + 1)
        assert torch.equal(run(experts, x[one], w13, w2, scales, weights[one], ids[one]), out[one])


def test_no_rows(experts, case):
    x, w13, w2, scales, weights, ids = case
    assert run(experts, x[:0], w13, w2, scales, weights[:0], ids[:0]).shape == (0, H)


def test_experts_of_another_rank(experts, case):
    x, w13, w2, scales, weights, ids = case
    expert_map = torch.tensor([1, 0, -1, 2])
    mine = [1, 0, 3]  # this rank's experts in its own order
    local = (w13[mine], w2[mine], tuple(scale[mine] for scale in scales))
    out = run(experts, x, *local, weights, ids, expert_map)
    wanted = expected(*case, kept=mine)
    assert (out.double() - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_weights_on_the_input_are_refused(experts, case):
    with pytest.raises(NotImplementedError, match="whose router weighs their input"):
        run(experts, *case, on_input=True)
