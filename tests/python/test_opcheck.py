"""torch.library.opcheck on every op, and fakes against real results.

opcheck's test_schema compares inputs before and after with torch.allclose, which float8 does not have; with float8
inputs or outputs the other three run. isa_info returns no tensor and is exempt.
"""

import itertools

import cases
import pytest
import torch
from cases import Case, random_inputs
from oracle import BF16, F16, F32, FP8, U8
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.blockscale
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ALL = ("test_schema", *WITHOUT_SCHEMA)


def codes(*shape):
    """Finite codes: opcheck compares outputs of two runs, and NaN differs from NaN."""
    return torch.randint(0x7F, shape, generator=cases.generator("opcheck", shape)).to(U8)


def check(op, *arguments, schema: bool):
    assert set(torch.library.opcheck(op.default, arguments, test_utils=ALL if schema else WITHOUT_SCHEMA).values()) == {
        "SUCCESS"
    }


@pytest.mark.parametrize("shape", [(16, 8), (37, 21), (3, 20, 10), (0, 4), (4, 0)], ids=str)
def test_convert_and_unpack(shape):
    check(ops.convert_weight_packed, codes(*shape).view(FP8), schema=False)
    check(ops.unpack_weight, codes(*shape), schema=False)


@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("shape", [(192,), (1, 192), (5, 192), (2, 3, 192), (0, 192)], ids=str)
def test_fp8_scaled_mm(shape, x_dtype):
    n, k = 576, 192
    for out, bias, scales in ((BF16, None, F32), (F32, F32, BF16), (F16, BF16, U8)):
        case = Case(1, n, k, (128, 128), x_dtype, out, bias, scales)
        inputs = random_inputs(case)
        x = torch.randn(shape, generator=cases.generator(shape)).to(x_dtype)
        packed = ops.convert_weight_packed(inputs.weight)
        check(ops.fp8_scaled_mm_cpu, x, packed, inputs.scales, [128, 128], inputs.bias, out, True, schema=True)
    check(ops.fp8_scaled_mm_cpu, x, inputs.weight, inputs.scales, [128, 128], None, out, False, schema=False)


def test_fp8_scaled_mm_with_strided_arguments():
    inputs = random_inputs(Case(6, 40, 70, (1, 32), bias=F32))
    packed = ops.convert_weight_packed(inputs.weight)
    x, scales = inputs.x.T.contiguous().T, inputs.scales.T.contiguous().T
    bias = inputs.bias.repeat_interleave(2)[::2]
    check(ops.fp8_scaled_mm_cpu, x, packed, scales, [1, 32], bias, F32, True, schema=True)
    check(ops.fp8_scaled_mm_cpu, x[::2], packed, scales, [1, 32], bias, F32, True, schema=True)
    e8m0 = torch.full((40, 3), 127, dtype=U8).view(cases.E8M0)
    check(ops.fp8_scaled_mm_cpu, x, packed, e8m0, [1, 32], bias, F32, True, schema=False)


@pytest.mark.parametrize("dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("shape", [(37, 21), (3, 20, 10), (0, 4)], ids=str)
def test_quantize_and_dequantize(shape, dtype):
    weight = torch.randn(shape, generator=cases.generator(shape)).to(dtype)
    check(ops.quantize_weight_block_fp8, weight, [16, 8], schema=False)
    quantized, scales = ops.quantize_weight_block_fp8(weight, [16, 8])
    check(ops.dequantize_weight_block_fp8, quantized, scales, [16, 8], dtype, schema=False)


def description(tensor) -> tuple:
    return tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.storage_offset()


def assert_fake_matches(op, *arguments):
    real = op(*arguments)
    mode = FakeTensorMode()
    fake_arguments = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in arguments]
    with mode:
        fake = op(*fake_arguments)
    meta_arguments = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments]
    meta = op(*meta_arguments)
    for results in (fake, meta):
        pairs = zip(real, results, strict=True) if isinstance(real, tuple) else [(real, results)]
        for a, b in pairs:
            assert description(a) == description(b)


@pytest.mark.parametrize("shape", [(70,), (3, 70), (0, 70), (2, 0, 70), (2, 3, 70), (1, 1, 1, 70)], ids=str)
def test_fake_shapes_dtypes_and_strides_equal_the_real_ones(shape):
    inputs = random_inputs(Case(1, 40, 70, (16, 32), bias=F16))
    packed = ops.convert_weight_packed(inputs.weight)
    for x_dtype, out, bias in itertools.product(cases.FLOATS, cases.FLOATS, (None, inputs.bias)):
        x = torch.zeros(shape, dtype=x_dtype)
        views = [x, x.expand(2, *shape), x.expand(2, *shape).mT] if shape[0] == 70 and len(shape) > 1 else [x]
        for view in views:
            assert_fake_matches(ops.fp8_scaled_mm_cpu, view, packed, inputs.scales, [16, 32], bias, out, True)
            assert_fake_matches(ops.fp8_scaled_mm_cpu, view, inputs.weight, inputs.scales, [16, 32], bias, out, False)


@pytest.mark.parametrize("shape", [(40, 70), (0, 5), (5, 0), (3, 40, 70), (0, 40, 70)], ids=str)
def test_fakes_of_the_weight_tools(shape):
    weight = torch.zeros(shape, dtype=F32)
    assert_fake_matches(ops.quantize_weight_block_fp8, weight, [16, 32])
    assert_fake_matches(ops.quantize_weight_block_fp8, weight.mT, [16, 32])
    quantized, scales = ops.quantize_weight_block_fp8(weight, [16, 32])
    for out in cases.FLOATS:
        assert_fake_matches(ops.dequantize_weight_block_fp8, quantized, scales, [16, 32], out)
    assert_fake_matches(ops.convert_weight_packed, quantized)
    assert_fake_matches(ops.unpack_weight, ops.convert_weight_packed(quantized))


def test_strided_weights_have_contiguous_fakes():
    weight = torch.zeros(70, 40, dtype=U8).view(FP8)
    strided = weight.as_strided((40, 70), (1, 40))
    assert_fake_matches(ops.convert_weight_packed, strided)
    assert_fake_matches(ops.dequantize_weight_block_fp8, strided, torch.ones(3, 3), [16, 32], BF16)


@pytest.mark.parametrize("name", ("convert_weight_packed", "unpack_weight", "fp8_scaled_mm_cpu", "isa_info"))
def test_schemas_declare_no_mutation_and_no_alias(name):
    schema = getattr(ops, name).default._schema
    assert not schema.is_mutable
    assert all(argument.alias_info is None for argument in (*schema.arguments, *schema.returns))


def test_schema_strings():
    expected = {
        "convert_weight_packed": "(Tensor weight) -> Tensor",
        "unpack_weight": "(Tensor packed) -> Tensor",
        "fp8_scaled_mm_cpu": "(Tensor mat1, Tensor mat2, Tensor scales2, int[] block_size, Tensor? bias, "
        "ScalarType out_dtype, bool is_vnni) -> Tensor",
        "quantize_weight_block_fp8": "(Tensor weight, int[] block_size) -> (Tensor, Tensor)",
        "dequantize_weight_block_fp8": "(Tensor weight, Tensor scales, int[] block_size, "
        "ScalarType out_dtype) -> Tensor",
        "isa_info": "() -> str",
    }
    for name, text in expected.items():
        assert str(getattr(ops, name).default._schema) == f"blockscale::{name}{text}"
