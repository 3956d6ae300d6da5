"""The oracle against definitions, values computed by hand and rational arithmetic: a wrong judge passes wrong code."""

from fractions import Fraction

import cases
import pytest
import torch
from oracle import (
    BF16,
    E4M3,
    E8M0_TABLE,
    F16,
    F32,
    F64,
    FP8,
    MIN_EXPONENT,
    PRECISION,
    U8,
    Reference,
    compare,
    decode,
    decode_scales,
    documented_bits,
    e4m3_value,
    encode,
    expand_scales,
    fma32,
    k_units,
    packed_order,
    quantize,
    round_to,
    scaled_mm,
)


def test_e4m3_table_against_hand_computed_values():
    known = {0x00: 0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x3C: 1.5, 0x7E: 448.0, 0xB8: -1.0}
    assert {code: e4m3_value(code) for code in known} == known
    assert torch.signbit(E4M3[0x80]) and E4M3[0x80] == 0
    assert torch.isnan(E4M3).nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_e4m3_table_agrees_with_torch_on_all_codes():
    from_torch = torch.arange(256).to(U8).view(FP8).to(F64)
    assert torch.equal(from_torch.nan_to_num(999), E4M3.nan_to_num(999))


def test_e8m0_table_has_no_zero_and_one_nan():
    assert E8M0_TABLE[127] == 1 and E8M0_TABLE[0] == 2.0**-127 and E8M0_TABLE[254] == 2.0**127
    assert torch.isnan(E8M0_TABLE).nonzero().flatten().tolist() == [255]


def test_encode_inverts_decode():
    codes = torch.arange(256).to(U8)
    assert torch.equal(encode(E4M3[codes.long()]), codes)


@pytest.mark.parametrize(
    "value, code",
    [
        (2.0**-10, 0x00),  # half way between 0 and 2^-9: to the even code
        (3 * 2.0**-10, 0x02),
        (1.0625, 0x38),  # half way between 1 and 1.125
        (1.1875, 0x3A),
        (1.0626, 0x39),
        (-1.0625, 0xB8),
        (449.0, 0x7E),
        (465.0, 0x7E),
        (1e30, 0x7E),
        (float("-inf"), 0xFE),
        (-0.0, 0x80),
        (float("nan"), 0x7F),
    ],
)
def test_encode_rounds_to_the_even_code_and_saturates(value, code):
    assert encode(torch.tensor([value], dtype=F64)).item() == code


@pytest.mark.parametrize("dtype", cases.FLOATS, ids=cases.SHORT.get)
def test_round_to_against_rational_arithmetic(dtype):
    values = torch.randn(300, generator=cases.generator("round", dtype), dtype=F64)
    exponents = torch.randint(-150, 13, (300,), generator=cases.generator("exponents", dtype))
    values = torch.cat([torch.ldexp(values, exponents), values])
    for value, rounded in zip(values.tolist(), round_to(values, dtype).tolist(), strict=True):
        exact = Fraction(value)
        step = Fraction(2) ** (MIN_EXPONENT[dtype] - PRECISION[dtype] + 1)  # between subnormals
        while abs(exact) >= step * 2 ** PRECISION[dtype]:
            step *= 2
        assert Fraction(rounded) == round(exact / step) * step


@pytest.mark.parametrize("dtype", cases.FLOATS, ids=cases.SHORT.get)
def test_round_to_agrees_with_torch_from_fp32(dtype):
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=cases.generator("bits", dtype))
    values = bits.to(torch.int32).view(F32)
    assert torch.equal(round_to(values.to(F64), dtype).nan_to_num(7), values.to(dtype).to(F64).nan_to_num(7))


def test_round_to_rounds_once():
    value = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=F64)  # just above half way: via fp32 it becomes a tie
    assert round_to(value, BF16).item() == 1 + 2.0**-7
    assert round_to(torch.tensor([65519.99, 65520.0], dtype=F64), F16).tolist() == [65504.0, float("inf")]


def test_expand_scales_gives_partial_blocks_their_own_scale():
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = torch.tensor([[1.0, 1, 1, 2], [1, 1, 1, 2], [3, 3, 3, 4]])
    assert torch.equal(expand_scales(scales, 3, 4, (2, 3)), expected)


def test_decode_scales_reads_bytes_as_exponents():
    codes = torch.tensor([[126, 127, 130]], dtype=U8)
    assert decode_scales(codes).tolist() == [[0.5, 1, 8]]
    assert decode_scales(codes.view(cases.E8M0)).tolist() == [[0.5, 1, 8]]


def test_scaled_mm_by_hand():
    weight = torch.tensor([[0x38, 0x40, 0x01], [0xB8, 0x00, 0x38]], dtype=U8)  # [[1, 2, 2^-9], [-1, 0, 1]]
    scales = torch.tensor([[0.5, 4.0]])
    reference = scaled_mm(torch.tensor([[3.0, 5.0, 7.0]]), weight, scales, (128, 2), torch.tensor([1.0, 0.0]))
    assert reference.y.tolist() == [[1 + 1.5 + 5 + 28 * 2.0**-9, -1.5 + 28]]
    assert reference.magnitude.tolist() == [[1 + 1.5 + 5 + 28 * 2.0**-9, 29.5]]


def test_k_units_cut_at_block_borders_and_every_128():
    assert k_units(5, 3) == [(0, 3), (3, 5)]
    assert k_units(400, 192) == [(0, 128), (128, 192), (192, 320), (320, 384), (384, 400)]
    assert k_units(300, 300) == [(0, 128), (128, 256), (256, 300)]


def test_fma32_against_rational_arithmetic():
    rng = cases.generator("fma")
    a, b, c = (torch.randn(2000, generator=rng) for _ in range(3))
    c = torch.ldexp(c, torch.randint(-40, 10, (2000,), generator=rng))
    a[:3], b[:3], c[:3] = 1 + 2.0**-23, 1 + 2.0**-23, torch.tensor([2.0**-60, -(2.0**-60), -1.0])  # ties, nearly
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), fma32(a, b, c).tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        step = Fraction(2) ** -149
        while abs(exact) >= step * 2**24:
            step *= 2
        assert Fraction(result) == round(exact / step) * step


def test_fma32_of_infinities():
    inf, nan = float("inf"), float("nan")
    result = fma32(torch.tensor([inf, inf, 1.0]), torch.tensor([2.0, 0.0, nan]), torch.tensor([1.0, 1.0, 1.0]))
    assert result[0] == inf and torch.isnan(result[1:]).all()


def test_documented_order_meets_the_bound():
    case = cases.Case(4, 33, 385, (3, 192), F32, F32, F16)
    inputs = cases.random_inputs(case)
    reference = scaled_mm(*inputs.reference_arguments())
    assert compare(documented_bits(*inputs.reference_arguments()), reference)


def test_documented_order_is_exact_on_integers():
    case = cases.Case(4, 33, 385, (3, 192), BF16, BF16, F32)
    inputs = cases.integer_inputs(case)
    output = documented_bits(*inputs.reference_arguments(), out_dtype=BF16)
    assert compare(output, scaled_mm(*inputs.reference_arguments()), exact=True)


def reference_of(values) -> Reference:
    y = torch.tensor(values, dtype=F64)
    size = y.abs().nan_to_num(0, 0, 0)
    return Reference(y, size, 10, 0.0, size)


@pytest.mark.parametrize(
    "output, expected, ok",
    [
        ([1.0], [1.0], True),
        ([1.0 + 5e-7], [1.0], True),
        ([1.0 + 1e-5], [1.0], False),
        ([float("nan")], [1.0], False),
        ([1.0], [float("nan")], False),
        ([float("nan")], [float("nan")], True),
        ([float("inf")], [1.0], False),
        ([1e38], [float("inf")], False),
        ([float("-inf")], [float("inf")], False),
        ([float("inf")], [float("inf")], True),
        ([float("inf")], [1e39], True),
        ([0.0], [5e-7], False),
        ([1.0, 2.0], [1.0], False),
    ],
)
def test_compare_judges(output, expected, ok):
    assert bool(compare(torch.tensor(output), reference_of(expected))) is ok


def test_compare_exact_takes_no_error():
    assert compare(torch.tensor([1.0]), reference_of([1.0]), exact=True)
    assert not compare(torch.tensor([1.0 + 2.0**-23]), reference_of([1.0]), exact=True)


def test_quantize_by_hand():
    weight = torch.tensor([[448.0, -1.0, 0.0, 0.0], [0.0, float("nan"), 0.0, -0.0]])
    codes, scales = quantize(weight, (1, 2))
    assert scales.tolist() == [[1, 1], [1, 1]]
    assert codes.tolist() == [[0x7E, 0xB8, 0, 0], [0, 0x7F, 0, 0x80]]
    codes, scales = quantize(torch.full((1, 1), 2.0**-130), (128, 128))
    assert scales.item() == 2.0**-126 and decode(codes).item() == 2.0**-4


def test_packed_order_of_a_whole_quad():
    order = packed_order(16, 4).tolist()
    assert order[:8] == [0, 1, 4, 5, 8, 9, 12, 13]  # k-pair 0 of columns 0..3
    assert order[8:16] == [2, 3, 6, 7, 10, 11, 14, 15]  # k-pair 1 of columns 0..3
    assert order[16:18] == [16, 17]  # column 4


def test_neighbouring_blocks_never_share_an_exponent():
    exponents = cases.block_exponents(7, 9)
    for di, dj in ((0, 1), (1, 0), (1, 1)):
        assert (exponents[di:, dj:] != exponents[: 7 - di, : 9 - dj]).all()
    assert (exponents[1:, :-1] != exponents[:-1, 1:]).all()


def test_cancelling_data_cancels_exactly():
    for inputs in (cases.cancelling_inputs(3, 20, 512), cases.cancelling_inputs(3, 20, 777, BF16)):
        x = inputs.x.to(F64)
        w = decode(inputs.weight) * expand_scales(inputs.scales.to(F64), *inputs.weight.shape, inputs.block_size)
        terms = x[:, None, :] * w[None]
        for row in terms.reshape(-1, terms.shape[-1])[:30].tolist():
            assert sum(map(Fraction, row)) == 0
