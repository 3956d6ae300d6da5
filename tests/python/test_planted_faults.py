"""The judge must reject wrong results: zeros, one code step in one weight, a neighbouring block's scale.

Each fault is planted in the op's arguments; the faulty output is compared with the reference of the right ones.
"""

import cases
import pytest
import torch
from cases import Case, Inputs, fp8_scaled_mm, random_inputs
from oracle import BF16, F32, FP8, U8, compare, decode_scales, encode, grid_shape, scaled_mm

pytestmark = pytest.mark.isa


def unit_inputs(m, n, k, grid, x_dtype=BF16, scales=F32) -> Inputs:
    """Weights and x of magnitude 1/2 to 2 and random signs: every weight matters about as much as the others."""
    case = Case(m, n, k, grid, x_dtype, scales=scales)
    rng = cases.generator("unit", case)

    def draw(*shape):
        return torch.empty(*shape).uniform_(0.5, 2.0, generator=rng) * (torch.randint(2, shape, generator=rng) * 2 - 1)

    weight = encode(draw(n, k).double()).view(FP8)
    exponents = cases.block_exponents(*grid_shape(n, k, case.block_size))
    return Inputs(draw(m, k).to(x_dtype), weight, cases.store_scales(exponents, scales), case.block_size, None)


@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("k", (1, 2, 5, 31, 64, 127, 128))
def test_one_code_step_in_one_weight_is_rejected(k, x_dtype, isa):
    inputs = unit_inputs(4, 33, k, (32, 32), x_dtype)
    reference = scaled_mm(*inputs.reference_arguments())
    assert compare(fp8_scaled_mm(inputs), reference)
    codes = inputs.weight.view(U8)
    for row in range(33):
        for depth in {0, k // 2, k - 1, row * 7 % k}:
            for step in (1, -1):
                codes[row, depth] += step
                output = fp8_scaled_mm(inputs)
                codes[row, depth] -= step
                assert not compare(output, reference), f"a step of {step} at [{row}, {depth}] passes"


@pytest.mark.parametrize("out", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("k", (130, 256, 1024, 5000, 30000))
def test_a_neighbouring_blocks_scale_is_rejected(k, out, isa):
    inputs = unit_inputs(2, 48, k, (32, 128))
    reference = scaled_mm(*inputs.reference_arguments())
    assert compare(fp8_scaled_mm(inputs, out), reference)
    rows, columns = inputs.scales.shape
    for i, j in {(0, 0), (0, columns // 2), (1, columns - 1), (1, 1)}:
        for neighbour in ((i, j - 1), (i, j + 1), (1 - i, j)):
            if neighbour[1] < columns:
                right = inputs.scales[i, j].clone()
                inputs.scales[i, j] = inputs.scales[neighbour]
                output = fp8_scaled_mm(inputs, out)
                inputs.scales[i, j] = right
                assert not compare(output, reference), f"the scale of {neighbour} at [{i}, {j}] passes"


@pytest.mark.parametrize("grid", cases.GRIDS, ids=lambda grid: "x".join(map(str, grid)))
def test_shifted_scale_grids_are_rejected(grid, isa):
    inputs = unit_inputs(3, 130, 390, grid)
    reference = scaled_mm(*inputs.reference_arguments())
    assert compare(fp8_scaled_mm(inputs), reference)
    right = inputs.scales
    for dim in (0, 1):
        if right.shape[dim] > 1:
            inputs.scales = right.roll(1, dim)
            assert not compare(fp8_scaled_mm(inputs), reference)
    inputs.scales = 1 / right  # scales multiply, they do not divide
    if not torch.equal(inputs.scales, right):
        assert not compare(fp8_scaled_mm(inputs), reference)


@pytest.mark.parametrize("out", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("scale", (1.0, 2.0**-20))
def test_zeros_are_rejected(scale, out, isa):
    """Outputs near 1e-6 as well: an absolute tolerance of 0.05 would take zeros for them."""
    inputs = random_inputs(Case(3, 40, 200, (32, 32)))
    inputs.scales *= scale
    reference = scaled_mm(*inputs.reference_arguments())
    output = fp8_scaled_mm(inputs, out)
    assert compare(output, reference)
    assert not compare(torch.zeros_like(output), reference)
    one_missing = output.clone()
    one_missing[1, 7] = 0
    assert not compare(one_missing, reference)


def test_a_scale_read_as_a_number_is_rejected(isa):
    """Codes of e8m0 scales are exponents: 127 means 1, not 127."""
    inputs = unit_inputs(2, 33, 70, (32, 32), scales=U8)
    reference = scaled_mm(*inputs.reference_arguments())
    assert compare(fp8_scaled_mm(inputs), reference)
    misread = Inputs(inputs.x, inputs.weight, inputs.scales.float(), inputs.block_size, None)
    assert not compare(fp8_scaled_mm(misread), reference)
    assert decode_scales(inputs.scales).max() <= 4


def test_transposed_output_is_rejected(isa):
    inputs = random_inputs(Case(32, 32, 64, (32, 32)))
    reference = scaled_mm(*inputs.reference_arguments())
    assert not compare(fp8_scaled_mm(inputs).T.contiguous(), reference)


def test_plain_codes_taken_for_packed_ones_are_rejected(isa):
    inputs = unit_inputs(2, 32, 64, (32, 32))
    reference = scaled_mm(*inputs.reference_arguments())
    output = torch.ops.blockscale.fp8_scaled_mm_cpu(
        inputs.x, inputs.weight.view(U8), inputs.scales, [32, 32], None, F32, True
    )
    assert not compare(output, reference)
