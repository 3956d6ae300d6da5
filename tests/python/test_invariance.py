"""The bits of a row depend on the instruction set alone: not on M, its position, the threads or the split of work.

The data cancels (`cases.cancelling_inputs`): every exact output is 0, so the fp32 output is the rounding residue and
shows any other order of summation. Random data hides one.
"""

import cases
import pytest
import torch
from cases import Case, cancelling_inputs, fp8_scaled_mm, random_inputs, same_bits
from oracle import BF16, F32, FP8, compare, documented_bits, scaled_mm

pytestmark = pytest.mark.isa

M_SIZES = (1, 2, 3, 4, 5, 8, 12, 13, 16, 17, 33, 64, 129)
# N, K: whole strips and blocks; a ragged strip; a ragged K with an odd number of k-blocks; more rows than a panel.
SHAPES = [(64, 512), (45, 1024), (33, 1301), (192, 256)]


@pytest.fixture(params=cases.FLOATS, ids=cases.SHORT.get)
def x_dtype(request):
    return request.param


@pytest.fixture(params=SHAPES, ids=lambda shape: f"N{shape[0]}-K{shape[1]}")
def inputs(request, x_dtype):
    return cancelling_inputs(129, *request.param, x_dtype, block_n=32)


def row_by_row(inputs):
    """Each row computed alone."""
    return torch.cat([fp8_scaled_mm(inputs, x=inputs.x[i : i + 1]) for i in range(len(inputs.x))])


def test_the_residue_is_there(inputs, isa):
    """Outputs are not all zero, else equal bits would prove nothing; and they are within the bound of zero."""
    output = row_by_row(inputs)
    assert (output != 0).float().mean() > 0.5
    reference = scaled_mm(*inputs.reference_arguments())
    assert compare(output, reference)


def test_bits_do_not_depend_on_m_or_the_row(inputs, isa):
    alone = row_by_row(inputs)
    for m in M_SIZES:
        for start in {0, 3, 129 - m} if m <= 126 else {0}:
            output = fp8_scaled_mm(inputs, x=inputs.x[start : start + m])
            assert same_bits(output, alone[start : start + m]), f"M={m}, rows from {start}"


def test_one_row_at_every_m(inputs, isa):
    """The same row, repeated: every copy, at every M, has the bits of the row alone."""
    row = inputs.x[7]
    alone = fp8_scaled_mm(inputs, x=row)
    for m in M_SIZES:
        output = fp8_scaled_mm(inputs, x=row.expand(m, -1).contiguous())
        assert same_bits(output, alone.expand(m, -1)), f"M={m}"


def test_slices_of_a_larger_tensor(inputs, isa):
    k = inputs.x.shape[1]
    alone = row_by_row(inputs)
    wide = torch.full((140, k + 37), torch.inf, dtype=inputs.x.dtype)
    wide[5:134, 11 : 11 + k] = inputs.x
    for m in M_SIZES:
        assert same_bits(fp8_scaled_mm(inputs, x=wide[5 : 5 + m, 11 : 11 + k]), alone[:m])
    every_third = wide[5:134:3, 11 : 11 + k]
    assert same_bits(fp8_scaled_mm(inputs, x=every_third), alone[::3])


def test_threads_do_not_change_bits(inputs, isa):
    for m in M_SIZES:
        torch.set_num_threads(1)
        expected = fp8_scaled_mm(inputs, x=inputs.x[:m])
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert same_bits(fp8_scaled_mm(inputs, x=inputs.x[:m]), expected), f"M={m}, {threads} threads"


def test_columns_do_not_depend_on_n(inputs, isa):
    """Packing the first columns alone gives their bits of the whole."""
    whole = fp8_scaled_mm(inputs, x=inputs.x[:5])
    for n in (1, 16, 17, 32):
        part = cases.Inputs(inputs.x[:5], inputs.weight[:n], inputs.scales[: -(-n // 32)], inputs.block_size, None)
        assert same_bits(fp8_scaled_mm(part), whole[:, :n])


@pytest.mark.parametrize("n, k, grid", [(40, 12001, (128, 128)), (33, 4100, (16, 1)), (20, 21000, (32, 100))], ids=str)
def test_bits_do_not_depend_on_m_where_k_is_walked_in_stretches(n, k, grid, x_dtype, isa):
    """How far one stretch reaches depends on M; where a k-block ends does not."""
    inputs = random_inputs(Case(17, n, k, grid, x_dtype))
    alone = row_by_row(inputs)
    for m in (2, 6, 8, 12, 13, 16, 17):
        assert same_bits(fp8_scaled_mm(inputs, x=inputs.x[:m]), alone[:m]), f"M={m}"


@pytest.mark.parametrize("grid", cases.GRIDS, ids=lambda grid: "x".join(map(str, grid)))
def test_bits_do_not_depend_on_m_for_any_scale_grid(grid, x_dtype, isa):
    inputs = random_inputs(Case(40, 50, 517, grid, x_dtype, bias=F32))
    alone = row_by_row(inputs)
    for m in (2, 3, 5, 8, 9, 13, 17, 24, 33, 40):
        assert same_bits(fp8_scaled_mm(inputs, x=inputs.x[:m]), alone[:m]), f"M={m}"


@pytest.mark.parametrize("out", cases.FLOATS, ids=cases.SHORT.get)
def test_narrow_outputs_are_the_fp32_output_rounded(out, inputs, isa):
    for m in (1, 5, 13, 64):
        wide = fp8_scaled_mm(inputs, x=inputs.x[:m])
        assert same_bits(fp8_scaled_mm(inputs, out, x=inputs.x[:m]), wide.to(out))


def kernel_is_fp32(x_dtype, isa) -> bool:
    """bf16 x takes the bf16 dot product where there is one; everything else is computed in fp32."""
    return not (x_dtype == BF16 and isa in ("avx512_bf16", "amx_bf16"))


@pytest.mark.parametrize("grid", cases.GRIDS, ids=lambda grid: "x".join(map(str, grid)))
def test_fp32_kernels_follow_the_documented_order(grid, x_dtype, isa):
    if not kernel_is_fp32(x_dtype, isa):
        pytest.skip("the bf16 dot product has an order of its own")
    for m, bias, out in ((1, None, F32), (4, BF16, F32), (13, F32, BF16)):
        inputs = random_inputs(Case(m, 35, 389, grid, x_dtype, out, bias))
        assert same_bits(fp8_scaled_mm(inputs, out), documented_bits(*inputs.reference_arguments(), out_dtype=out))


def test_fp32_kernels_follow_the_documented_order_on_cancelling_data(x_dtype, isa):
    if not kernel_is_fp32(x_dtype, isa):
        pytest.skip("the bf16 dot product has an order of its own")
    inputs = cancelling_inputs(3, 40, 777, x_dtype)
    assert same_bits(fp8_scaled_mm(inputs), documented_bits(*inputs.reference_arguments()))


def test_float8_and_packed_weights_agree_on_cancelling_data(inputs, isa):
    assert inputs.weight.dtype == FP8
    for m in (1, 5, 33):
        x = inputs.x[:m]
        assert same_bits(fp8_scaled_mm(inputs, x=x, is_vnni=False), fp8_scaled_mm(inputs, x=x))
