"""blockscale.reference, the readable definition in the package, against the tests' own oracle."""

import cases
import oracle
import pytest
import torch
from blockscale import reference
from cases import Case, random_inputs, same_bits
from oracle import F32, F64, FP8, U8


def test_table_of_values():
    assert torch.equal(reference.E4M3_VALUES.nan_to_num(999), oracle.E4M3.nan_to_num(999))
    assert torch.equal(torch.signbit(reference.E4M3_VALUES[:-1]), torch.signbit(oracle.E4M3[:-1]))


def test_decode():
    codes = torch.arange(256).to(U8).reshape(2, 8, 16)
    expected = oracle.decode(codes).nan_to_num(999)
    assert torch.equal(reference.decode_e4m3(codes).nan_to_num(999), expected)
    assert torch.equal(reference.decode_e4m3(codes.view(FP8)).nan_to_num(999), expected)
    assert reference.decode_e4m3(codes).dtype == F64


@pytest.mark.parametrize("dtype", cases.SCALE_DTYPES, ids=cases.SHORT.get)
@pytest.mark.parametrize("block", [(128, 128), (3, 5), (1, 7), (40, 70), (1000, 1)], ids=str)
def test_expand_scales(block, dtype):
    scales = cases.store_scales(cases.block_exponents(*oracle.grid_shape(40, 70, block)), dtype)
    expected = oracle.expand_scales(oracle.decode_scales(scales), 40, 70, block)
    assert torch.equal(reference.expand_scales(scales, 40, 70, block), expected)
    codes = torch.randint(0x7F, (40, 70), generator=cases.generator(block)).to(U8).view(FP8)
    assert torch.equal(reference.dequantize(codes, scales, block), oracle.decode(codes) * expected)


@pytest.mark.parametrize("bias", (None, *cases.FLOATS), ids=cases.SHORT.get)
@pytest.mark.parametrize("x", cases.FLOATS, ids=cases.SHORT.get)
def test_scaled_mm(x, bias):
    for m, n, k, grid in ((5, 33, 129, (32, 32)), (1, 1, 1, (128, 128)), (3, 16, 70, ("N", "K"))):
        inputs = random_inputs(Case(m, n, k, grid, x, bias=bias))
        arguments = inputs.reference_arguments()
        torch.testing.assert_close(reference.scaled_mm(*arguments), oracle.scaled_mm(*arguments).y, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("block", [(128, 128), (3, 5), (1, 7)], ids=str)
def test_quantize(block, dtype):
    for shape in ((40, 70), (3, 20, 9)):
        weight = torch.randn(shape, generator=cases.generator(shape, block)).to(dtype)
        weight[..., :3, :5] = 0
        weight[..., 7, 2] = torch.nan
        codes, scales = reference.quantize(weight, block)
        expected_codes, expected_scales = oracle.quantize(weight, block)
        assert same_bits(scales, expected_scales) and scales.dtype == F32
        finite = ~torch.isnan(weight)
        assert torch.equal(codes.view(U8)[finite], expected_codes[finite])
        assert torch.isnan(oracle.decode(codes)[~finite]).all()


def test_the_library_meets_its_own_reference():
    inputs = random_inputs(Case(4, 48, 200, (32, 64)))
    output = cases.fp8_scaled_mm(inputs).double()
    expected = reference.scaled_mm(*inputs.reference_arguments())
    assert (output - expected).abs().max() < 1e-4 * expected.abs().max()
