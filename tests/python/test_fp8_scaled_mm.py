"""fp8_scaled_mm_cpu over shapes, scale grids, dtypes, ranks and strides, against the float64 oracle.

Integer data must come out exactly (rounded once); random data within the derived bound.
"""

import itertools

import cases
import pytest
import torch
from cases import Case, fp8_scaled_mm, integer_inputs, random_inputs, same_bits
from oracle import BF16, F16, F32, FP8, compare, scaled_mm

pytestmark = pytest.mark.isa


def check(case: Case) -> None:
    for draw, exact in ((integer_inputs, True), (random_inputs, False)):
        inputs = draw(case)
        output = fp8_scaled_mm(inputs, case.out, is_vnni=case.is_vnni)
        assert output.dtype == case.out and output.is_contiguous()
        verdict = compare(output, scaled_mm(*inputs.reference_arguments()), exact=exact)
        assert verdict, f"{draw.__name__}: {verdict.message}"


@pytest.mark.parametrize("case", cases.shape_cases(), ids=str)
def test_shapes_and_grids(case, isa):
    check(case)


@pytest.mark.parametrize("scales", cases.SCALE_DTYPES, ids=cases.SHORT.get)
@pytest.mark.parametrize("bias", (None, *cases.FLOATS), ids=cases.SHORT.get)
@pytest.mark.parametrize("x", cases.FLOATS, ids=cases.SHORT.get)
def test_dtypes_are_independent(x, bias, scales, isa):
    for out, is_vnni, m in itertools.product(cases.FLOATS, (True, False), (1, 5)):
        check(Case(m, 33, 161, (32, 32), x, out, bias, scales, is_vnni))


@pytest.mark.parametrize("m", (1, 8, 13, 40))
@pytest.mark.parametrize("n, k", [(576, 192), (192, 576), (1536, 576), (576, 1536), (1, 4097), (300, 1000)])
def test_larger_shapes(m, n, k, isa):
    torch.set_num_threads(2)
    check(Case(m, n, k, (128, 128), BF16, BF16, None))
    check(Case(m, n, k, (64, 128), F16, F32, BF16))


# M, N, K, grid: packed x or the list of k-blocks outgrows a thread's scratch, so K is walked in several stretches; with
# enough columns that the totals carried between them outgrow it too.
LONG = [
    (1, 20, 2100, (128, 1)),
    (13, 33, 5003, (3, 2)),
    (16, 40, 21000, (128, 128)),
    (13, 48, 12001, ("N", "K")),
    (8, 35, 17000, (1, 64)),
    (12, 2900, 2100, (64, 1)),
]


@pytest.mark.parametrize("m, n, k, grid", LONG, ids=lambda value: str(value))
def test_long_k_is_walked_in_stretches(m, n, k, grid, isa):
    torch.set_num_threads(2)
    for x_dtype in (BF16, F32):
        case = Case(m, n, k, grid, x_dtype, bias=F32)
        inputs = integer_inputs(case)
        inputs.x.clamp_(-1, 1)  # keeps sums of thousands of terms below 2^24
        reference = scaled_mm(*inputs.reference_arguments())
        assert compare(fp8_scaled_mm(inputs), reference, exact=True)
        inputs = random_inputs(case)
        assert compare(fp8_scaled_mm(inputs), scaled_mm(*inputs.reference_arguments()))


# ------------------------------------------------------------------------------------------------- shapes that vanish
@pytest.mark.parametrize("is_vnni", (True, False), ids=("packed", "plain"))
@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3, 2)], ids=str)
def test_no_rows(lead, is_vnni, isa):
    inputs = random_inputs(Case(1, 48, 100, bias=F32))
    output = fp8_scaled_mm(inputs, BF16, is_vnni=is_vnni, x=torch.empty(*lead, 100, dtype=BF16))
    assert output.shape == (*lead, 48) and output.dtype == BF16


@pytest.mark.parametrize("is_vnni", (True, False), ids=("packed", "plain"))
def test_no_columns(is_vnni, isa):
    inputs = cases.Inputs(torch.ones(3, 100), torch.empty(0, 100).to(FP8), torch.empty(0, 1), (128, 128), None)
    assert fp8_scaled_mm(inputs, F16, is_vnni=is_vnni).shape == (3, 0)
    inputs.bias = torch.empty(0)
    assert fp8_scaled_mm(inputs, F16, is_vnni=is_vnni).shape == (3, 0)


@pytest.mark.parametrize("shape", [(0, 100), (2, 0, 100), (0, 3, 100)], ids=str)
def test_no_rows_whatever_their_strides(shape):
    """A strided tensor without elements can't be made contiguous by copying it."""
    codes, scales = torch.zeros(5, 100).to(FP8), torch.ones(1, 1)
    for x in (torch.empty(*shape[:-1], 200)[..., ::2], torch.empty(100, *shape[:-1]).movedim(0, -1)):
        for weight, is_vnni in ((codes, False), (torch.ops.blockscale.convert_weight_packed(codes), True)):
            out = torch.ops.blockscale.fp8_scaled_mm_cpu(x, weight, scales, [128, 128], None, torch.float32, is_vnni)
            assert out.shape == (*shape[:-1], 5)


@pytest.mark.parametrize("out", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("bias", (None, *cases.FLOATS), ids=cases.SHORT.get)
def test_no_k_returns_the_bias(bias, out, isa):
    values = None if bias is None else torch.randn(20, generator=cases.generator("bias")).to(bias)
    for is_vnni, m in itertools.product((True, False), (0, 1, 9)):
        inputs = cases.Inputs(torch.empty(m, 0), torch.empty(20, 0).to(FP8), torch.empty(1, 0), (128, 128), values)
        expected = torch.zeros(m, 20) if bias is None else values.expand(m, 20)
        assert same_bits(fp8_scaled_mm(inputs, out, is_vnni=is_vnni), expected.to(out))


# --------------------------------------------------------------------------------------------------- ranks and strides
RANKS = [(256,), (1, 256), (2, 3, 256), (2, 1, 3, 256), (1, 1, 1, 1, 256)]


@pytest.mark.parametrize("shape", RANKS, ids=str)
def test_any_rank(shape, isa):
    inputs = random_inputs(Case(1, 48, 256, out=BF16, bias=F32))
    x = torch.randn(shape, generator=cases.generator(shape)).to(BF16)
    output = fp8_scaled_mm(inputs, BF16, x=x)
    assert output.shape == (*shape[:-1], 48)
    flat = fp8_scaled_mm(inputs, BF16, x=x.reshape(-1, 256))
    assert same_bits(output.reshape(-1, 48), flat)
    assert compare(flat, scaled_mm(x.reshape(-1, 256), *inputs.reference_arguments()[1:]))


def view_sliced(x):
    return torch.cat([torch.full_like(x, torch.nan), x, torch.full_like(x, torch.inf)], -1)[
        ..., x.shape[-1] : -x.shape[-1]
    ]


def view_odd_row_stride(x):
    rows = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype)
    rows[..., : x.shape[-1]] = x
    return rows[..., : x.shape[-1]]


def view_misaligned(x):
    flat = torch.full((x.numel() + 3,), torch.nan, dtype=x.dtype)
    flat[3:] = x.reshape(-1)
    return flat[3:].view(x.shape)


def view_transposed(x):
    return x.mT.contiguous().mT


def view_every_second_row(x):
    return torch.stack([x, torch.full_like(x, torch.nan)], -2).flatten(-3, -2)[..., ::2, :]


def view_every_second_column(x):
    return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]


def view_expanded(x):
    return x[..., :1, :].expand(x.shape)


def view_outer_dims_swapped(x):
    return x.transpose(0, -2).contiguous().transpose(0, -2)


def view_negated_lazily(x):
    return torch._neg_view(-x)


VIEWS = [
    view_sliced,
    view_odd_row_stride,
    view_misaligned,
    view_transposed,
    view_every_second_row,
    view_every_second_column,
    view_expanded,
    view_outer_dims_swapped,
    view_negated_lazily,
]


@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__.removeprefix("view_"))
def test_views_of_x_give_the_bits_of_their_copies(view, x_dtype, isa):
    for k, shape in itertools.product((64, 193), ((1,), (7,), (2, 3), (2, 1, 5))):
        inputs = random_inputs(Case(1, 37, k, (32, 32), x_dtype))
        x = view(torch.randn(*shape, k, generator=cases.generator(shape, k)).to(x_dtype))
        copy = x.clone(memory_format=torch.contiguous_format)
        output = fp8_scaled_mm(inputs, x=x)
        assert output.is_contiguous()
        assert same_bits(output, fp8_scaled_mm(inputs, x=copy))
        assert compare(output, scaled_mm(copy, *inputs.reference_arguments()[1:]))


@pytest.mark.parametrize("offset", range(1, 8))
def test_x_at_any_byte_offset_that_its_dtype_allows(offset, isa):
    inputs = random_inputs(Case(5, 33, 130))
    flat = torch.full((5 * 130 + offset,), torch.nan, dtype=BF16)
    flat[offset:] = inputs.x.reshape(-1)
    assert same_bits(fp8_scaled_mm(inputs, x=flat[offset:].view(5, 130)), fp8_scaled_mm(inputs))


def scales_column_major(s):
    return s.T.contiguous().T


def scales_padded_rows(s):
    wide = torch.cat([s, s[:, :1], s[:, :1]], 1)
    return wide[:, : s.shape[1]]


def scales_every_second(s):
    return s.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]


def scales_expanded(s):
    return s[:1].expand(s.shape)


SCALE_VIEWS = [scales_column_major, scales_padded_rows, scales_every_second, scales_expanded]


@pytest.mark.parametrize("dtype", cases.SCALE_DTYPES, ids=cases.SHORT.get)
@pytest.mark.parametrize("view", SCALE_VIEWS, ids=lambda view: view.__name__.removeprefix("scales_"))
def test_views_of_scales_give_the_bits_of_their_copies(view, dtype, isa):
    for grid, m in itertools.product(((128, 128), (32, 32), (1, 32), (3, 5), (1, 128)), (1, 6)):
        inputs = integer_inputs(Case(m, 150, 261, grid, F16, scales=dtype))
        inputs.scales = view(inputs.scales.view(torch.uint8) if dtype == cases.E8M0 else inputs.scales)
        if dtype == cases.E8M0:
            inputs.scales = inputs.scales.view(cases.E8M0)
        output = fp8_scaled_mm(inputs)
        assert compare(output, scaled_mm(*inputs.reference_arguments()), exact=True)


@pytest.mark.parametrize("m", (1, 6))
def test_plain_weight_may_have_any_strides(m, isa):
    inputs = integer_inputs(Case(m, 50, 70, (32, 32)))
    expected = fp8_scaled_mm(inputs, is_vnni=False)
    codes = inputs.weight.view(torch.uint8)
    wide = torch.zeros(100, 140, dtype=torch.uint8)
    wide[::2, ::2] = codes
    for view in (codes.T.contiguous().T, wide[::2, ::2], torch.cat([codes, codes], 1)[:, 70:]):
        inputs.weight = view.view(FP8) if view.is_contiguous() else as_float8(view)
        assert not inputs.weight.is_contiguous()
        assert same_bits(fp8_scaled_mm(inputs, is_vnni=False), expected)
        assert same_bits(fp8_scaled_mm(inputs, is_vnni=True), expected)


def as_float8(codes):
    """The same bytes and strides under the float8 dtype."""
    whole = torch.empty(0, dtype=FP8).set_(codes.untyped_storage())
    return whole.as_strided(codes.shape, codes.stride(), codes.storage_offset())


def test_strided_bias(isa):
    inputs = integer_inputs(Case(3, 40, 64, bias=F16))
    expected = fp8_scaled_mm(inputs)
    inputs.bias = inputs.bias.repeat_interleave(3)[::3]
    assert same_bits(fp8_scaled_mm(inputs), expected)
    inputs.bias = torch.tensor(2.0, dtype=BF16).expand(40)
    assert compare(fp8_scaled_mm(inputs), scaled_mm(*inputs.reference_arguments()), exact=True)


def test_packed_and_plain_weights_give_the_same_bits(isa):
    for k, m, x in itertools.product((64, 193), (1, 7, 20), cases.FLOATS):
        inputs = random_inputs(Case(m, 45, k, (32, 32), x))
        assert same_bits(fp8_scaled_mm(inputs, is_vnni=True), fp8_scaled_mm(inputs, is_vnni=False))


def test_autocast_changes_nothing(isa):
    inputs = random_inputs(Case(4, 40, 70, (32, 32), F32, bias=F16))
    expected = fp8_scaled_mm(inputs)
    with torch.autocast("cpu", dtype=BF16):
        assert same_bits(fp8_scaled_mm(inputs), expected)


def test_results_do_not_depend_on_what_memory_held_before(isa):
    """Outputs are written whole: freed memory full of NaN, handed out again, leaves no trace."""
    inputs = random_inputs(Case(9, 61, 133, (32, 32), F16))
    expected = fp8_scaled_mm(inputs)
    for _ in range(5):
        torch.full((9, 61), torch.nan)
        assert same_bits(fp8_scaled_mm(inputs), expected)
