"""Faults that FP8 linear layers are known to have shipped with, each tested with its whole kind, not one example."""

import itertools
import json
import os

import cases
import oracle
import pytest
import torch
from cases import Case, Inputs, fp8_scaled_mm, integer_inputs, random_inputs, same_bits
from oracle import BF16, F16, F32, FP8, U8, compare, grid_shape, scaled_mm

pytestmark = pytest.mark.isa
ops = torch.ops.blockscale


def exact(inputs, out=F32, **kwargs):
    assert compare(fp8_scaled_mm(inputs, out, **kwargs), scaled_mm(*inputs.reference_arguments()), exact=True)


# --------------------------------------------------------------------------------------------- sizes against blocks
@pytest.mark.parametrize("n, k, grid", [(576, 7168, (5, 56)), (7168, 576, (56, 5))], ids=str)
def test_tensor_parallel_shards_that_are_no_multiple_of_the_block(n, k, grid, isa):
    """18432 columns over 32 processes leave 576 each: refused as no multiple of 128. The last block is 64 wide."""
    assert grid_shape(n, k, (128, 128)) == grid
    for m in (1, 6):
        exact(integer_inputs(Case(m, n, k)))


@pytest.mark.parametrize("parts", (2, 3, 4, 8, 16, 32))
def test_any_even_split_of_a_side(parts, isa):
    """1536 columns, or 1536 k, split over processes: every part keeps its own ceil grid."""
    side = 1536 // parts
    for m in (1, 5):
        exact(integer_inputs(Case(m, side, 200)))
        exact(integer_inputs(Case(m, 200, side)))


@pytest.mark.parametrize("n", range(16, 145, 16))
def test_a_column_count_works_at_every_m_or_at_none(n, isa):
    """N = 48 was packed, ran for M > 4 and raised an error for M <= 4: decoding took 32 columns at a time."""
    inputs = integer_inputs(Case(8, n, 256))
    packed = ops.convert_weight_packed(inputs.weight)
    expected = scaled_mm(*inputs.reference_arguments())
    for m in (5, 1, 2, 3, 4, 6, 7, 8):
        x = inputs.x[:m]
        output = ops.fp8_scaled_mm_cpu(x, packed, inputs.scales, [128, 128], None, F32, True)
        assert torch.equal(output.double(), expected.y[:m])


@pytest.mark.parametrize("n", (1, 8, 17, 64, 127))
@pytest.mark.parametrize("k", (1, 8, 17, 64, 127))
def test_sides_smaller_than_a_block_are_one_block(n, k, isa):
    """side // block == 0 was used as a divisor."""
    for grid, m in itertools.product(((128, 128), (128, 32), (32, 128)), (1, 5)):
        exact(integer_inputs(Case(m, n, k, grid)))
    weight = torch.randn(n, k, generator=cases.generator(n, k))
    codes, scales = ops.quantize_weight_block_fp8(weight, [128, 128])
    assert scales.shape == (1, 1)
    assert ops.dequantize_weight_block_fp8(codes, scales, [128, 128], F32).shape == (n, k)


# ------------------------------------------------------------------------------------------------------------ scales
def test_bf16_scales_are_widened_not_refused(isa):
    """Checkpoints that store scales in bf16 were refused: fp32 was assumed."""
    inputs = random_inputs(Case(3, 2048, 640, scales=BF16))
    output = fp8_scaled_mm(inputs)
    assert compare(output, scaled_mm(*inputs.reference_arguments()))
    inputs.scales = inputs.scales.float()
    assert same_bits(fp8_scaled_mm(inputs), output)


@pytest.mark.parametrize("dtype", cases.SCALE_DTYPES, ids=cases.SHORT.get)
def test_a_scale_multiplies(dtype, isa):
    """Scale 0.5 halves; a quantisation scale taken for a dequantisation scale would double."""
    scales = cases.store_scales(torch.full((1, 1), -1), dtype)
    inputs = Inputs(torch.ones(2, 16), torch.ones(16, 16).to(FP8), scales, (128, 128), None)
    assert (fp8_scaled_mm(inputs) == 8).all()
    assert (ops.dequantize_weight_block_fp8(inputs.weight, scales, [128, 128], F32) == 0.5).all()


@pytest.mark.parametrize("padding", (1, 3, 56))
@pytest.mark.parametrize("dtype", cases.SCALE_DTYPES, ids=cases.SHORT.get)
def test_scales_are_read_with_their_own_strides(dtype, padding, isa):
    """A slice of a wider table: the row stride is not ceil(K/block_k)."""
    for m, grid in itertools.product((1, 5), ((128, 128), (16, 32), (1, 128))):
        inputs = integer_inputs(Case(m, 200, 300, grid, scales=dtype))
        rows, columns = inputs.scales.shape
        stored = inputs.scales.view(U8) if dtype == cases.E8M0 else inputs.scales
        bank = torch.full((rows, columns + padding), 255).to(stored.dtype)  # as e8m0 codes: NaN
        if dtype in (F32, BF16):
            bank.fill_(torch.nan)
        bank[:, :columns] = stored
        inputs.scales = bank[:, :columns].view(dtype) if dtype == cases.E8M0 else bank[:, :columns]
        assert inputs.scales.stride(0) == columns + padding
        exact(inputs)


# ------------------------------------------------------------------------------------------------------------ views
@pytest.mark.parametrize("dtype", cases.FLOATS, ids=cases.SHORT.get)
def test_a_transposed_x_does_not_transpose_the_output(dtype, isa):
    """Output was allocated with the strides of x."""
    for m, k in ((48, 48), (5, 70), (1, 33), (70, 5)):
        inputs = integer_inputs(Case(m, 48, k, x=dtype))
        inputs.x = inputs.x.T.contiguous().T
        output = fp8_scaled_mm(inputs)
        assert output.is_contiguous()
        exact(inputs)


@pytest.mark.parametrize("start, width", [(0, 512), (512, 512), (1, 511), (7, 250), (1023, 1)])
def test_column_slices_of_a_fused_projection(start, width, isa):
    """A slice with a contiguous last dimension, as attention layers split their fused projections."""
    fused = torch.randint(-8, 9, (9, 1024), generator=cases.generator("fused")).to(BF16)
    inputs = integer_inputs(Case(9, 40, width))
    for rows in (slice(None), slice(4, 5), slice(0, 9, 2)):
        inputs.x = fused[rows, start : start + width]
        exact(inputs)


@pytest.mark.parametrize("lead", [(2, 3), (3, 1), (1, 4), (2, 2, 3)], ids=str)
def test_a_three_dimensional_x_uses_the_stride_of_its_rows(lead, isa):
    """stride(0) was taken for the distance of tokens."""
    inputs = integer_inputs(Case(1, 40, 256))
    whole = torch.randint(-8, 9, (*lead, 512), generator=cases.generator(lead)).to(BF16)
    for view in (whole[..., :256], whole[..., 256:], whole[..., :256].contiguous(), whole[..., 1:257]):
        inputs.x = view
        exact(inputs)
    inputs.x = whole[..., :256].transpose(0, 1)
    exact(inputs)


# -------------------------------------------------------------------------------------------------------- the format
def test_subnormal_codes_are_not_read_with_the_normal_formula(isa):
    """Code 0x01 came out as 0.0087890625; it is 2^-9 = 0.001953125."""
    for sign in (0, 0x80):
        codes = torch.arange(8).to(U8) | sign
        inputs = Inputs(torch.ones(1, 1), codes.view(FP8)[:, None], torch.ones(1, 1), (128, 128), None)
        expected = torch.arange(8) * 2.0**-9 * (-1 if sign else 1)
        for m in (1, 8):
            inputs.x = torch.ones(m, 1)
            assert torch.equal(fp8_scaled_mm(inputs), expected.expand(m, 8))


@pytest.mark.parametrize("dtype", cases.FLOATS, ids=cases.SHORT.get)
def test_an_all_zero_block_is_not_divided_by_zero(dtype, isa):
    """0 / 0 put 49152 NaN into a converted file."""
    weight = torch.zeros(256, 256, dtype=dtype)
    weight[0, 0] = 1
    codes, scales = ops.quantize_weight_block_fp8(weight, [128, 128])
    assert torch.isfinite(scales).all() and (scales > 0).all()
    values = ops.dequantize_weight_block_fp8(codes, scales, [128, 128], F32)
    assert torch.equal(values, weight.float())
    assert (codes.view(U8).flatten()[1:] == 0).all()


@pytest.mark.parametrize("dtype", cases.FLOATS, ids=cases.SHORT.get)
def test_encoding_saturates_whatever_torchs_cast_does(dtype, isa):
    """torch's cast of 465 was NaN in one version and 448 in another; codes here come from an encoder of our own."""
    magnitudes = torch.tensor([448.0, 464.0, 465.0, 480.0, 1e3, 6e4], dtype=dtype)
    for factor in (1.0, -1.0, 1 - 2.0**-7):
        weight = (magnitudes * factor)[:, None]
        codes, scales = ops.quantize_weight_block_fp8(weight, [1, 1])
        assert ((codes.view(U8) & 0x7F) == 0x7E).all()
        assert torch.equal(scales[:, 0], (weight[:, 0].abs().double() / 448).float())
    weight = torch.full((2, 2), torch.nan, dtype=dtype)
    assert torch.isnan(ops.quantize_weight_block_fp8(weight, [2, 2])[0].float()).all()
    for infinity in (torch.inf, -torch.inf):
        with pytest.raises(ValueError, match="without infinities"):
            ops.quantize_weight_block_fp8(torch.full((1, 1), infinity, dtype=dtype), [1, 1])


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz), ids=str)
def test_other_float8_formats_are_refused_by_name(dtype, isa):
    """Read as e4m3fn, a fnuz checkpoint's values would double and its NaN become -0."""
    codes = torch.arange(256).to(U8).view(16, 16).view(dtype)
    name = str(dtype).removeprefix("torch.")
    x, scales = torch.ones(1, 16), torch.ones(1, 1)
    for call in (
        lambda: ops.convert_weight_packed(codes),
        lambda: ops.fp8_scaled_mm_cpu(x, codes, scales, [16, 16], None, F32, False),
        lambda: ops.fp8_scaled_mm_cpu(x, codes, scales, [16, 16], None, F32, True),
        lambda: ops.dequantize_weight_block_fp8(codes, scales, [16, 16], F32),
    ):
        with pytest.raises(ValueError, match=f", got {name}$"):
            call()


# ------------------------------------------------------------------------------------------------------------- range
@pytest.mark.parametrize("out", cases.FLOATS, ids=cases.SHORT.get)
def test_block_sums_beyond_fp16_do_not_overflow(out, isa):
    """x 30, weight 448, K = 256 with halves that cancel: partial sums reach 1.7e6, the result is 0."""
    weight = torch.full((32, 256), 448.0)
    for half, block_k in itertools.product((64, 128), (32, 128, 256)):
        signs = torch.where(torch.arange(256) // half % 2 == 0, 1.0, -1.0)
        scales = torch.ones(1, 256 // block_k)
        for m, dtype in itertools.product((1, 8), cases.FLOATS):
            inputs = Inputs(torch.full((m, 256), 30.0).to(dtype), (weight * signs).to(FP8), scales, (32, block_k), None)
            assert (fp8_scaled_mm(inputs, out) == 0).all()


@pytest.mark.parametrize("lead", [(0,), (0, 5), (5, 0), (2, 0, 3)], ids=str)
def test_empty_batches_return_empty_results(lead, isa):
    """A division by the number of tokens killed the process."""
    for dtype, out, is_vnni in itertools.product(cases.FLOATS, cases.FLOATS, (True, False)):
        inputs = random_inputs(Case(1, 48, 128, x=dtype, bias=F32))
        output = fp8_scaled_mm(inputs, out, is_vnni=is_vnni, x=torch.empty(*lead, 128, dtype=dtype))
        assert output.shape == (*lead, 48) and output.dtype == out


def test_the_same_prompt_gives_the_same_bits_in_every_batch(isa):
    """A kernel chosen by M, with another order of summation, made the text depend on the batch."""
    for dtype in cases.FLOATS:
        inputs = cases.cancelling_inputs(1, 200, 512, dtype)
        others = torch.randn(64, 512, generator=cases.generator("batch")).to(dtype)
        alone = fp8_scaled_mm(inputs)
        assert (alone != 0).any()
        for m, row in itertools.product((1, 2, 4, 5, 8, 16, 17, 33, 64), (0, -1)):
            batch = others[:m].clone()
            batch[row] = inputs.x[0]
            assert same_bits(fp8_scaled_mm(inputs, x=batch)[row], alone[0])


# ----------------------------------------------------------------------------------------------------------- offsets
def test_rows_of_x_lie_beyond_two_to_the_31(isa):
    """Row offsets are 64-bit: the rows of a view, 2^30 elements apart, of memory that is never touched in between."""
    stride = 2**30 + 3
    storage = torch.empty(3 * stride + 64, dtype=BF16)
    inputs = integer_inputs(Case(4, 33, 50))
    inputs.x = storage.as_strided((4, 50), (stride, 1), 0)
    inputs.x.copy_(torch.randint(-8, 9, (4, 50), generator=cases.generator("far")))
    exact(inputs)


def test_column_offsets_of_a_strided_scale_table_lie_beyond_two_to_the_31(isa):
    storage = torch.empty(2 * (2**30 + 1) + 8, dtype=U8)
    inputs = integer_inputs(Case(3, 40, 90, (16, 32), scales=U8))
    for strides in ((2**30 + 1, 1), (1, 2**30 + 1)):
        far = storage.as_strided((3, 3), strides)
        far.copy_(inputs.scales)
        inputs.scales = far
        exact(inputs)


@pytest.mark.skipif(os.environ.get("BLOCKSCALE_MAX_ISA", "") != "", reason="offsets are computed above the kernels")
def test_outputs_beyond_two_to_the_31(isa):
    """M * N just over 2^31: token * stride in 32 bits was an illegal access. K = 1, so a row is x * weights."""
    m, n = 65537, 32769
    assert 2**31 < m * n < 2**31 + 2**21
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 6 * 2**30:
        pytest.skip("needs 6 GiB of free memory")
    torch.set_num_threads(2)
    codes = (torch.arange(n) % 120).to(U8)[:, None]
    x = (torch.arange(m) % 251 - 125).to(BF16)[:, None]
    output = fp8_scaled_mm(Inputs(x, codes.view(FP8), torch.ones(1, 1), (n, 1), None), BF16)
    values = oracle.decode(codes).T
    for row in (0, 1, 4095, m // 2, 65408, m - 3, m - 2, m - 1, 2**31 // n - 1, 2**31 // n, 2**31 // n + 1):
        expected = oracle.round_to(x[row].double() * values[0], BF16)
        assert torch.equal(output[row].double(), expected)
    for column in (0, n - 1):
        assert torch.equal(output[:, column].double(), oracle.round_to(x[:, 0].double() * values[0, column], BF16))


def test_packed_weights_beyond_two_to_the_31(isa):
    """More than 2^31 bytes of weight: zeros, which cost no memory, and two live strips at the end."""
    n, k = 2**16 + 17, 2**15
    torch.set_num_threads(2)
    tail = torch.randint(0x70, (17, k), generator=cases.generator("tail")).to(U8)
    packed = torch.zeros(n, k, dtype=U8)
    packed[-17:] = ops.convert_weight_packed(
        tail.view(FP8)
    )  # whole strips lie before: the same bytes in the same place
    x = torch.zeros(1, k, dtype=BF16)
    x[0, -100:] = 1
    output = ops.fp8_scaled_mm_cpu(x, packed, torch.ones(1, 1), [n, k], None, F32, True)
    assert (output[0, :-17] == 0).all()
    assert compare(output[:, -17:], scaled_mm(x, tail, torch.ones(1, 1), (17, k)))


def test_rows_of_a_plain_weight_lie_beyond_two_to_the_31(isa):
    storage = torch.empty(36 * (2**26 + 1), dtype=U8)
    codes = torch.randint(0x70, (35, 40), generator=cases.generator("far codes")).to(U8)
    far = storage.as_strided((35, 40), (2**26 + 1, 1))
    far.copy_(codes)
    weight = torch.empty(0, dtype=FP8).set_(storage.untyped_storage()).as_strided(far.shape, far.stride())
    assert torch.equal(ops.convert_weight_packed(weight), ops.convert_weight_packed(codes.view(FP8)))
    scales = torch.rand(2, 1, generator=cases.generator("far scales"))
    values = ops.dequantize_weight_block_fp8(weight, scales, [32, 64], F32)
    assert same_bits(values, oracle.dequantize(codes, scales, (32, 64), F32))


# ------------------------------------------------------------------------------------------------ compiled graphs
@pytest.mark.parametrize("lead", [(2, 3), (1,), (0,), (4, 1, 2)], ids=str)
def test_fake_and_real_results_look_alike(lead, isa):
    """A fake that is never executed in eager tests called a function with arguments that it does not have."""
    n, k = 576, 192
    inputs = random_inputs(Case(1, n, k))
    packed = ops.convert_weight_packed(inputs.weight)
    call = torch.zeros(*lead, k, dtype=BF16), packed, inputs.scales, [128, 128], None, F16, True
    real = ops.fp8_scaled_mm_cpu(*call)
    meta = ops.fp8_scaled_mm_cpu(*(value.to("meta") if isinstance(value, torch.Tensor) else value for value in call))
    assert (real.shape, real.dtype, real.stride()) == (meta.shape, meta.dtype, meta.stride())
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    results = torch.library.opcheck(ops.fp8_scaled_mm_cpu.default, call, test_utils=utilities)
    assert set(results.values()) == {"SUCCESS"}


def test_the_op_is_functional(isa):
    """Undeclared mutation makes a compiled graph differ from eager: inputs keep their bytes, outputs own theirs."""
    inputs = random_inputs(Case(5, 50, 70, (16, 32), bias=F32))
    packed = ops.convert_weight_packed(inputs.weight)
    tensors = [inputs.x, packed, inputs.scales, inputs.bias]
    before = [bytes(tensor.untyped_storage()) for tensor in tensors]
    call = inputs.x, packed, inputs.scales, [16, 32], inputs.bias, F32, True
    first = ops.fp8_scaled_mm_cpu(*call)
    kept = first.clone()
    first.zero_()
    second = ops.fp8_scaled_mm_cpu(*call)
    assert same_bits(second, kept)
    assert [bytes(tensor.untyped_storage()) for tensor in tensors] == before
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert second.untyped_storage().data_ptr() not in storages | {first.untyped_storage().data_ptr()}
    assert second.untyped_storage().nbytes() == second.numel() * second.element_size()


# -------------------------------------------------------------------------------------------------------------- bias
@pytest.mark.parametrize("bias", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("out", cases.FLOATS, ids=cases.SHORT.get)
def test_bias_of_any_float_type(out, bias, isa):
    """bf16 bias beside fp32 arithmetic was read as fp32."""
    for m, n, x in itertools.product((1, 5, 13), (1, 16, 37), cases.FLOATS):
        exact(integer_inputs(Case(m, n, 30, x=x, out=out, bias=bias)), out)


# ------------------------------------------------------------------------------------------------- tests that can fail
@pytest.mark.parametrize("size", (1.0, 1e-3, 5e-7, 1e-20))
def test_zeros_never_pass_for_small_outputs(size, isa):
    """Outputs near 5e-7 judged with an absolute tolerance of 0.05 accept zeros."""
    inputs = random_inputs(Case(4, 40, 300, (32, 32)))
    inputs.scales *= size
    reference = scaled_mm(*inputs.reference_arguments())
    output = fp8_scaled_mm(inputs)
    assert compare(output, reference)
    assert not compare(torch.zeros_like(output), reference)
    assert not compare(output * 1.001, reference)


def test_a_cpu_without_amx_still_runs_a_vector_kernel(isa):
    """A fast path behind the AMX flag left CPUs with AVX-512 BF16 on a scalar loop: each flag opens its own kernel."""
    info = json.loads(ops.isa_info())
    usable = [row["name"] for row in info["isas"] if row["usable"]]
    assert info["active"] == usable[-1]
    before = {row["name"]: row["calls"] for row in info["isas"]}
    exact(integer_inputs(Case(3, 40, 50)))
    after = {row["name"]: row["calls"] for row in json.loads(ops.isa_info())["isas"]}
    assert [name for name in after if after[name] > before[name]] == [info["active"]]
