"""Instruction sets against each other, on inputs that hypothesis draws; scalar is the judge.

The fp32 kernels must agree to the bit (any NaN equals any NaN). The bf16 dot product of avx512_bf16 must stay within
the error bound. Each instruction set runs in a process of its own that stays alive between examples.
"""

import itertools
import json
import os

import cases
import oracle
import pytest
import torch
from cases import Inputs, same_bits
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import BF16, F16, F32, FP8, U8, grid_shape

FP32_KERNELS = ("avx2", "avx512", "avx512_vbmi")
REPRODUCIBLE = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)

block_sides = st.one_of(st.sampled_from((1, 3, 16, 32, 64, 128, 192, 10**6)), st.integers(1, 300))


@st.composite
def layers(draw):
    """(inputs, output dtype, is_vnni): any shape up to 40 x 70 x 400, any grid, values of one of several kinds."""
    m, n, k = draw(st.integers(0, 40)), draw(st.integers(1, 70)), draw(st.integers(1, 400))
    block = draw(block_sides), draw(block_sides)
    x_dtype, out = draw(st.sampled_from(cases.FLOATS)), draw(st.sampled_from(cases.FLOATS))
    bias_dtype = draw(st.sampled_from((None, *cases.FLOATS)))
    scale_dtype = draw(st.sampled_from(cases.SCALE_DTYPES))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(m, k, generator=rng)
    kind = draw(st.sampled_from(("normal", "wide", "tiny", "huge", "nonfinite", "sparse")))
    if kind == "wide":
        x = torch.ldexp(x, torch.randint(-40, 40, (m, k), generator=rng))
    elif kind == "tiny":
        x = torch.ldexp(x, torch.randint(-149, -100, (m, k), generator=rng))
    elif kind == "huge":
        x = torch.ldexp(x, torch.randint(100, 127, (m, k), generator=rng))
    elif kind == "sparse":
        x = x * (torch.rand(m, k, generator=rng) < 0.02)
    elif kind == "nonfinite" and m:
        for value in (torch.inf, -torch.inf, torch.nan):
            x[torch.rand(m, k, generator=rng) < draw(st.sampled_from((0.0, 0.003, 0.02)))] = value
    all_codes = draw(st.booleans())
    codes = torch.randint(256, (n, k), generator=rng).to(U8)
    if not all_codes:
        codes[(codes & 0x7F) == 0x7F] = 0
    shape = grid_shape(n, k, block)
    low, high = draw(st.sampled_from(((-6, 3), (-120, 100))))
    exponents = torch.randint(low, high, shape, generator=rng)
    scales = cases.store_scales(exponents, scale_dtype)
    if scale_dtype in (F32, BF16):
        scales = (scales.float() * (torch.rand(shape, generator=rng) + 0.5)).to(scale_dtype)
    bias = None if bias_dtype is None else torch.randn(n, generator=rng).to(bias_dtype)
    return Inputs(x.to(x_dtype), codes.view(FP8), scales, block, bias), out, draw(st.booleans())


def run(worker, inputs: Inputs, out, is_vnni) -> torch.Tensor:
    weight = torch.ops.blockscale.convert_weight_packed(inputs.weight) if is_vnni else inputs.weight
    arguments = inputs.x, weight, inputs.scales, list(inputs.block_size), inputs.bias, out, is_vnni
    return worker.call("fp8_scaled_mm_cpu", *arguments)


@pytest.mark.parametrize("name", FP32_KERNELS)
def test_fp32_kernels_give_the_bits_of_scalar(name, workers):
    scalar, other = workers("scalar"), workers(name)

    @REPRODUCIBLE
    @given(layers())
    def check(layer):
        assert same_bits(run(other, *layer), run(scalar, *layer))

    check()


@pytest.mark.parametrize("x_dtype", (F16, F32), ids=cases.SHORT.get)
def test_fp16_and_fp32_x_stay_in_fp32_under_avx512_bf16(x_dtype, workers):
    scalar, other = workers("scalar"), workers("avx512_bf16")
    for m, grid, seed in itertools.product((1, 5, 13), ((128, 128), (1, 32), (3, 5)), range(2)):
        inputs = cases.random_inputs(cases.Case(m, 50, 261, grid, x_dtype, bias=F32), seed)
        assert same_bits(run(other, inputs, F32, True), run(scalar, inputs, F32, True))


@pytest.mark.parametrize("name", ("scalar", *FP32_KERNELS, "avx512_bf16"))
def test_every_instruction_set_is_within_the_bound(name, workers):
    worker = workers(name)

    @REPRODUCIBLE
    @given(layers())
    def check(layer):
        inputs, out, is_vnni = layer
        verdict = oracle.compare(run(worker, *layer), oracle.scaled_mm(*inputs.reference_arguments()))
        assert verdict, verdict.message

    check()


@pytest.mark.parametrize("name", ("avx2", "avx512", "avx512_vbmi", "avx512_bf16"))
def test_cancelling_data(name, workers):
    """The output is the rounding residue: equal to scalar's for fp32 kernels, within the bound of zero for bf16's."""
    scalar, other = workers("scalar"), workers(name)
    for m, x_dtype in itertools.product((1, 4, 8, 13, 40), cases.FLOATS):
        inputs = cases.cancelling_inputs(m, 40, 777, x_dtype)
        output, expected = run(other, inputs, F32, True), run(scalar, inputs, F32, True)
        assert expected.abs().max() > 0
        if name == "avx512_bf16" and x_dtype == BF16:
            assert oracle.compare(output, oracle.scaled_mm(*inputs.reference_arguments()))
        else:
            assert same_bits(output, expected)


@pytest.mark.parametrize("name", ("scalar", "avx2", "avx512", "avx512_vbmi", "avx512_bf16"))
def test_the_capped_kernel_is_the_one_that_runs(name, workers):
    """Counted inside the library: fp16 and fp32 x under avx512_bf16 are served by avx512_vbmi."""
    worker = workers(name)

    def calls() -> dict[str, int]:
        return {row["name"]: row["calls"] for row in worker.isa_info()["isas"]}

    for x_dtype in cases.FLOATS:
        before = calls()
        run(worker, cases.random_inputs(cases.Case(3, 20, 30, x=x_dtype)), F32, True)
        after = calls()
        serving = "avx512_vbmi" if name == "avx512_bf16" and x_dtype != BF16 else name
        assert {key for key in after if after[key] > before[key]} == {serving}


def test_isa_info_of_every_cap(workers):
    names = ["scalar", "avx2", "avx512", "avx512_vbmi", "avx512_bf16", "amx_bf16"]
    for cap in names[:5]:
        info = workers(cap).isa_info()
        assert info["max_isa"] == cap and info["active"] == cap
        assert [row["name"] for row in info["isas"]] == names
        for row in info["isas"]:
            assert set(row) == {"name", "compiled", "usable", "active", "reason", "calls"}
            assert row["active"] == (row["name"] == cap)
            assert row["usable"] or row["reason"]
            if names.index(row["name"]) > names.index(cap):
                assert not row["usable"]


@pytest.mark.isa
def test_isa_info_of_this_process(isa):
    info = json.loads(torch.ops.blockscale.isa_info())
    assert info["max_isa"] == (os.environ.get("BLOCKSCALE_MAX_ISA") or None)
    assert info["active"] == isa
    assert [row["name"] for row in info["isas"] if row["active"]] == [isa]
