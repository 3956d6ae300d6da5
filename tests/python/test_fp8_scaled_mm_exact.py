"""fp8_scaled_mm_cpu where the answer is known to the bit: all codes, single weights, scales that differ per block."""

import itertools

import cases
import pytest
import torch
from cases import Case, Inputs, fp8_scaled_mm
from oracle import BF16, E4M3, F16, FP8, U8, compare, decode, grid_shape, round_to, scaled_mm

pytestmark = pytest.mark.isa

ALL_CODES = torch.arange(256).to(U8)


def single(weight, x, scale=1.0) -> Inputs:
    """A layer whose weight has one scale."""
    return Inputs(x, weight, torch.full((1, 1), scale), (weight.shape[0], max(weight.shape[1], 1)), None)


@pytest.mark.parametrize("is_vnni", (True, False), ids=("packed", "plain"))
@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("m", (1, 8))
def test_all_codes_as_columns(m, x_dtype, is_vnni, isa):
    """K = 1, one code a column: y is the code's value times x."""
    x = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.25, 8.0, -1.5, 96.0])[:m, None].to(x_dtype)
    output = fp8_scaled_mm(single(ALL_CODES.view(FP8)[:, None], x), is_vnni=is_vnni)
    expected = x.double() * E4M3
    assert torch.equal(output.double().nan_to_num(12345), expected.nan_to_num(12345))


@pytest.mark.parametrize("out", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("m", (1, 8))
def test_all_codes_at_every_place_of_a_quad(m, x_dtype, out, isa):
    """Every code at every place of the 16 columns x 4 k that a decode step handles, the other weights being zero."""
    for column, depth in itertools.product((0, 3, 4, 7, 9, 15), range(4)):
        codes = torch.zeros(256 * 16, 4, dtype=U8)
        codes[column::16, depth] = ALL_CODES
        x = torch.ones(m, 4, dtype=x_dtype)
        output = fp8_scaled_mm(single(codes.view(FP8), x), out)
        expected = torch.zeros(m, 256 * 16, dtype=torch.float64)
        expected[:, column::16] = E4M3
        assert torch.equal(output.double().nan_to_num(12345), expected.nan_to_num(12345))


@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("m", (1, 2, 5, 8, 12, 17, 40))
def test_all_codes_in_long_rows(m, x_dtype, isa):
    """One non-zero code in a row of K = 300, ragged in both directions, every row another place."""
    codes = torch.zeros(256 + 7, 300, dtype=U8)
    codes[torch.arange(263), torch.arange(263) * 37 % 300] = torch.arange(263).to(U8)
    x = torch.randint(-127, 128, (m, 300), generator=cases.generator("long rows", m)).to(x_dtype)
    inputs = single(codes.view(FP8), x, 0.25)
    assert compare(fp8_scaled_mm(inputs), scaled_mm(*inputs.reference_arguments()), exact=True)


@pytest.mark.parametrize("grid", cases.GRIDS, ids=lambda grid: "x".join(map(str, grid)))
@pytest.mark.parametrize("m", (1, 4, 13))
def test_one_hot_rows_meet_their_own_scale(m, grid, isa):
    """One weight a row times the scale of its block: any other block's scale gives another power of two."""
    for n, k in ((131, 257), (48, 385), (200, 64), (17, 1)):
        case = Case(m, n, k, grid)
        x = torch.randint(1, 128, (m, k), generator=cases.generator("one hot", m, k)).to(BF16)
        for seed, dtype in itertools.product((0, 3), cases.SCALE_DTYPES):
            scales = cases.store_scales(cases.block_exponents(*grid_shape(n, k, case.block_size), -40), dtype)
            inputs = Inputs(x, cases.one_hot_weight(n, k, seed), scales, case.block_size, None)
            assert compare(fp8_scaled_mm(inputs), scaled_mm(*inputs.reference_arguments()), exact=True)


def test_output_is_rounded_once(isa):
    """Ties of bf16 and fp16 that an intermediate rounding to the other type, or a truncation, would turn."""
    for out, ties in ((BF16, [257, 259, 258.5, -257, -259]), (F16, [2049, 2051, 2050.5, -2049])):
        values = torch.tensor(ties)[:, None]
        output = fp8_scaled_mm(single(torch.ones(20, 1).to(FP8), values), out)
        assert torch.equal(output[:, 0].double(), round_to(values[:, 0].double(), out))


def test_scale_is_not_rounded_to_sixteen_bits(isa):
    """scale = 1 + 2^-20: a scale or a weight x scale held in bf16 would lose it."""
    inputs = single(torch.ones(16, 4).to(FP8), torch.tensor([[1.0, 0, 0, 0]]), 1 + 2.0**-20)
    for x in cases.FLOATS:
        inputs.x = inputs.x.to(x)
        assert (fp8_scaled_mm(inputs) == 1 + 2.0**-20).all()


def test_extreme_scales(isa):
    """The largest and smallest normal scales, alone and across blocks: none over- or underflows on the way."""
    weight = torch.full((16, 64), 2.0**-9).to(FP8)
    for exponent in (127, 126, 119, -126):
        x = torch.full((1, 64), 2.0 if exponent < 0 else 1.0)
        for x_dtype in cases.FLOATS:
            inputs = single(weight, x.to(x_dtype), 2.0**exponent)
            assert compare(fp8_scaled_mm(inputs), scaled_mm(*inputs.reference_arguments()), exact=True)


def test_e8m0_codes_from_end_to_end(isa):
    """Every e8m0 code but NaN: 2^(code - 127), the lowest of which is a subnormal of fp32."""
    codes = torch.arange(1, 255).to(U8)
    for dtype, m in itertools.product((U8, cases.E8M0), (1, 9)):
        x = torch.full((m, 1), 1.0, dtype=BF16)
        inputs = Inputs(x, torch.ones(254, 1).to(FP8), codes[:, None].view(dtype), (1, 1), None)
        assert compare(fp8_scaled_mm(inputs), scaled_mm(*inputs.reference_arguments()), exact=True)


def test_fp32_x_is_not_narrowed(isa):
    x = torch.tensor([[1 + 2.0**-20, 1 - 2.0**-20, 3 * 2.0**-22, 1.0]])
    codes = torch.zeros(16, 4)
    codes[torch.arange(16), torch.arange(16) % 4] = 1.0
    output = fp8_scaled_mm(single(codes.to(FP8), x))
    assert torch.equal(output[0], x[0].repeat(4))


def test_fp16_x_keeps_its_eleven_bits(isa):
    x = torch.tensor([[2049.0 / 2, 1 + 2.0**-10, 65504.0, 2.0**-24]], dtype=F16)
    codes = torch.zeros(16, 4)
    codes[torch.arange(16), torch.arange(16) % 4] = 1.0
    assert torch.equal(fp8_scaled_mm(single(codes.to(FP8), x))[0], x[0].float().repeat(4))


def test_zero_weights_give_exactly_zero(isa):
    for m, x in itertools.product((1, 8), cases.FLOATS):
        output = fp8_scaled_mm(single(torch.zeros(128, 256).to(FP8), torch.ones(m, 256, dtype=x)), x)
        assert (output == 0).all()


@pytest.mark.parametrize("code", (*range(0x01, 0x08), *range(0x81, 0x88)), ids=hex)
def test_subnormal_codes(code, isa):
    """Codes with exponent 0 are m * 2^-9; a decoder with only the normal formula reads 2^-7 * (1 + m/8)."""
    weight = torch.full((17, 1), code, dtype=U8).view(FP8)
    value = (code & 7) * 2.0**-9 * (-1 if code & 0x80 else 1)
    assert decode(weight)[0, 0] == value
    for m, x in itertools.product((1, 8), cases.FLOATS):
        output = fp8_scaled_mm(single(weight, torch.full((m, 1), 3.0, dtype=x)))
        assert (output == 3 * value).all()


@pytest.mark.parametrize("n, k", [(48, 128), (1, 128), (128, 1), (1, 1), (16, 193), (48, 193)])
@pytest.mark.parametrize("m", (1, 8, 13))
def test_small_and_odd_sides(m, n, k, isa):
    for x, out, bias in itertools.product(cases.FLOATS, cases.FLOATS, (None, BF16)):
        inputs = cases.integer_inputs(Case(m, n, k, (128, 128), x, out, bias))
        assert compare(fp8_scaled_mm(inputs, out), scaled_mm(*inputs.reference_arguments()), exact=True)
