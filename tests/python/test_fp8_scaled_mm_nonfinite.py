"""NaN, infinities and zeros in x, weights and scales: they reach exactly the outputs that IEEE arithmetic says.

A kernel pads ragged sides with zeros and masks k-blocks; 0 * Inf or 0 * NaN in such padding would turn a finite output,
or an infinite one, into NaN.
"""

import itertools

import cases
import pytest
import torch
from cases import Case, fp8_scaled_mm, integer_inputs, same_bits
from oracle import BF16, F32, FP8, U8, compare, decode, scaled_mm

pytestmark = pytest.mark.isa

INF, NAN = float("inf"), float("nan")


def positive_inputs(case, *seed):
    """Integer data without a zero or a sign: an infinity in x must then reach its whole row as the same infinity."""
    inputs = integer_inputs(case, *seed)
    inputs.x = inputs.x.abs() + 1
    values = decode(inputs.weight).abs().clamp(min=1)
    inputs.weight = values.float().to(FP8)
    return inputs


@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("n, k", [(17, 5), (45, 193), (33, 259)])
def test_nan_codes_reach_exactly_their_columns(n, k, x_dtype, isa):
    for m, column in itertools.product((1, 3, 8, 14), (0, 3, 15, 16, n - 1)):
        for depth, code in ((0, 0x7F), (k - 1, 0xFF), (k // 2, 0x7F)):
            inputs = integer_inputs(Case(m, n, k, (32, 32), x_dtype), column, depth)
            clean = fp8_scaled_mm(inputs)
            inputs.weight.view(U8)[column, depth] = code
            output = fp8_scaled_mm(inputs)
            assert torch.isnan(output[:, column]).all()
            others = [j for j in range(n) if j != column]
            assert same_bits(output[:, others], clean[:, others])


@pytest.mark.parametrize("grid", [(128, 128), (32, 32), (3, 5), (1, "K"), (48, 192)], ids=str)
@pytest.mark.parametrize("value", (INF, -INF, NAN))
@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
def test_nonfinite_x_stays_in_its_row(x_dtype, value, grid, isa):
    """At every place that is special for a k-block of 128, 32 or 5, or for a quad of 4."""
    k = 261
    for m in (1, 2, 5, 8, 13, 18):
        for depth in (0, 1, 2, 3, 4, 5, 31, 32, 127, 128, 129, 192, 255, 256, 259, 260):
            inputs = positive_inputs(Case(m, 35, k, grid, x_dtype), depth)
            row = depth % m
            clean = fp8_scaled_mm(inputs)
            inputs.x[row, depth] = value
            output = fp8_scaled_mm(inputs)
            expected = clean.clone()
            expected[row] = value
            assert same_bits(output, expected), f"M={m} depth={depth}"


@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("k", (1, 2, 3, 5, 6, 7, 65, 129, 130, 131, 193))
def test_what_lies_beyond_k_is_not_read_into_the_sum(k, x_dtype, isa):
    """x is a slice between infinities and NaN; the weight's ragged last quad and strip are padded with zeros."""
    for m, n in itertools.product((1, 4, 8, 13), (1, 15, 17, 32)):
        inputs = positive_inputs(Case(m, n, k, (32, 32), x_dtype))
        for outside in (INF, NAN):
            wide = torch.full((m, k + 9), outside, dtype=x_dtype)
            wide[:, 4 : 4 + k] = inputs.x
            output = fp8_scaled_mm(inputs, x=wide[:, 4 : 4 + k])
            assert compare(output, scaled_mm(*inputs.reference_arguments()), exact=True)


@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
def test_infinity_in_one_k_block_and_zero_weights_in_the_next(x_dtype, isa):
    """0 * Inf is NaN where the infinity really meets a zero weight, and nowhere else."""
    for block_k, m in itertools.product((4, 5, 32, 128), (1, 2, 8, 13)):
        k = 2 * block_k + 1
        inputs = positive_inputs(Case(m, 18, k, (16, block_k), x_dtype))
        codes = inputs.weight.view(U8)
        codes[:9, block_k:] = 0  # columns 0..8: zero beyond the border
        inputs.x[0, block_k - 1] = INF
        output = fp8_scaled_mm(inputs)
        assert (output[0] == INF).all()
        codes[3, block_k - 1] = 0x80
        output = fp8_scaled_mm(inputs)
        assert torch.isnan(output[0]).nonzero().flatten().tolist() == [3]
        assert torch.isfinite(output[1:]).all()


@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
def test_opposite_infinities_make_nan(x_dtype, isa):
    for m, first, second in itertools.product((1, 9), (0, 2), (1, 3, 130, 200)):
        inputs = positive_inputs(Case(m, 20, 201, (128, 128), x_dtype))
        inputs.x[0, first], inputs.x[0, second] = INF, -INF
        output = fp8_scaled_mm(inputs)
        assert torch.isnan(output[0]).all() and torch.isfinite(output[1:]).all()


@pytest.mark.parametrize("dtype", cases.SCALE_DTYPES, ids=cases.SHORT.get)
def test_nan_scale_reaches_exactly_its_block_columns(dtype, isa):
    for m, (i, j) in itertools.product((1, 4, 13), ((0, 0), (1, 1), (2, 2))):
        inputs = integer_inputs(Case(m, 45, 70, (16, 32), BF16, scales=dtype))
        clean = fp8_scaled_mm(inputs)
        if dtype in (U8, cases.E8M0):
            inputs.scales.view(U8)[i, j] = 255
        else:
            inputs.scales[i, j] = NAN
        output = fp8_scaled_mm(inputs)
        inside = torch.arange(45) // 16 == i
        assert torch.isnan(output[:, inside]).all()
        assert same_bits(output[:, ~inside], clean[:, ~inside])


@pytest.mark.parametrize("block_n", (1, 3, 16, 128))
def test_zero_scale_silences_its_block(block_n, isa):
    for m in (1, 5, 13):
        inputs = integer_inputs(Case(m, 40, 70, (block_n, 32)))
        inputs.scales[0] = 0.0
        assert compare(fp8_scaled_mm(inputs), scaled_mm(*inputs.reference_arguments()), exact=True)


@pytest.mark.parametrize("out, largest", [(BF16, 3.3895313892515355e38), (torch.float16, 65504.0), (F32, None)])
def test_results_beyond_the_output_type_become_infinite(out, largest, isa):
    case = Case(2, 20, 16, ("N", "K"), BF16, out)
    inputs = positive_inputs(case)
    inputs.scales.fill_(2.0**127 if out != torch.float16 else 2.0**10)
    inputs.x[1] = -inputs.x[1]
    output = fp8_scaled_mm(inputs, out)
    assert (output[0] == INF).all() and (output[1] == -INF).all()
    if largest is not None:
        inputs.x.zero_()
        inputs.x[0, 0] = 1
        inputs.weight.fill_(1.0)
        inputs.scales.fill_(largest)
        assert (fp8_scaled_mm(inputs, out)[0] == largest).all()


@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
def test_nonfinite_bias_reaches_its_column(x_dtype, isa):
    for bias in cases.FLOATS:
        inputs = integer_inputs(Case(3, 20, 33, (16, 16), x_dtype, bias=bias))
        inputs.bias[4], inputs.bias[17] = INF, NAN
        assert compare(fp8_scaled_mm(inputs), scaled_mm(*inputs.reference_arguments()), exact=True)


@pytest.mark.parametrize("code", (0x00, 0x80), ids=("plus", "minus"))
def test_all_zero_blocks_beside_live_ones(code, isa):
    for m in (1, 4, 13):
        inputs = integer_inputs(Case(m, 64, 256, (32, 128)))
        inputs.weight.view(U8)[:32, 128:] = code
        inputs.weight.view(U8)[32:, :128] = code
        assert compare(fp8_scaled_mm(inputs), scaled_mm(*inputs.reference_arguments()), exact=True)
