"""quantize_weight_block_fp8 and dequantize_weight_block_fp8, exact against float64 with the contract's roundings."""

import cases
import oracle
import pytest
import torch
from cases import same_bits
from oracle import BF16, E4M3, E8M0, F16, F32, F64, FP8, U8, grid_shape

ops = torch.ops.blockscale
BLOCKS = [(128, 128), (64, 128), (32, 32), (1, 128), (128, 64), (3, 5), (48, 192), (1, 1), (1000, 1000), (1, 1000)]
SHAPES = [(1, 1), (5, 7), (16, 128), (129, 130), (200, 65), (3, 20, 33), (1, 1, 9), (4, 130, 6)]
INF, NAN = float("inf"), float("nan")


def random_weight(shape, dtype, *seed):
    """Normal values whose spread differs from row to row by up to 2^12, a few of them zero."""
    rng = cases.generator("weight", shape, dtype, *seed)
    values = torch.randn(shape, generator=rng)
    values *= torch.ldexp(torch.ones(shape[-2], 1), torch.randint(-10, 3, (shape[-2], 1), generator=rng))
    values[torch.rand(shape, generator=rng) < 0.05] = 0
    return values.to(dtype)


def quantized_equal(weight, block):
    """The op's answer, after checking it against the oracle; a NaN may become either NaN code."""
    codes, scales = ops.quantize_weight_block_fp8(weight, list(block))
    expected_codes, expected_scales = oracle.quantize(weight, block)
    assert codes.dtype == FP8 and codes.shape == weight.shape and codes.is_contiguous()
    assert scales.dtype == F32 and scales.is_contiguous()
    assert same_bits(scales, expected_scales)
    bytes_ = codes.view(U8) if codes.numel() else torch.empty(codes.shape, dtype=U8)
    nan = torch.isnan(weight)
    assert ((bytes_ & 0x7F) == 0x7F)[nan].all()
    assert torch.equal(bytes_[~nan], expected_codes[~nan])
    return codes, scales


@pytest.mark.parametrize("dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize(shape, dtype):
    for block in BLOCKS:
        quantized_equal(random_weight(shape, dtype, block), block)


@pytest.mark.parametrize("dtype", cases.FLOATS, ids=cases.SHORT.get)
def test_quantize_any_strides(dtype):
    weight = random_weight((40, 70), dtype)
    wide = random_weight((80, 211), dtype)
    for view in (weight.T, wide[::2, ::3], wide[3:43, 5:75], weight[:1].expand(40, 70), weight.flip(0)):
        quantized_equal(view, (16, 32))
    experts = random_weight((3, 40, 70), dtype)
    for view in (experts.transpose(0, 1), experts.mT, experts[::2], experts.permute(2, 0, 1)):
        quantized_equal(view, (16, 32))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_empty_weights(shape):
    codes, scales = ops.quantize_weight_block_fp8(torch.empty(shape), [2, 2])
    assert codes.shape == shape and codes.dtype == FP8
    assert scales.shape == (*shape[:-2], *grid_shape(*shape[-2:], (2, 2)))
    back = ops.dequantize_weight_block_fp8(codes, scales, [2, 2], BF16)
    assert back.shape == shape and back.dtype == BF16


def test_every_float16_value_quantizes_to_the_nearest_code():
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(F16)
    values = values[torch.isfinite(values)]
    for block_k in (1024, 17):
        quantized_equal(values[None], (1, block_k))


def test_halves_between_codes_go_to_the_even_code():
    """amax 448 makes the scale 1, so the middles between neighbouring codes stay exact ties."""
    ladder = E4M3[:127]
    middles = (ladder[1:] + ladder[:-1]) / 2
    for values in (middles, middles * (1 + 2.0**-20), middles * (1 - 2.0**-20), -middles):
        weight = torch.cat([values, torch.tensor([448.0], dtype=F64)]).to(F32)[None]
        codes, scales = quantized_equal(weight, (1, 1000))
        assert scales.item() == 1


def test_zero_block_gets_scale_one_and_zero_codes():
    weight = torch.zeros(5, 6, 7)
    weight[2, 0, 0] = 3.0
    weight[3, 5, 6] = -0.0
    codes, scales = quantized_equal(weight, (3, 4))
    assert (scales == 1).sum() == scales.numel() - 1
    assert scales[2, 0, 0] == torch.tensor(3.0) / 448
    assert codes[3, 5, 6].view(U8) in (0x00, 0x80)


@pytest.mark.parametrize("dtype", cases.FLOATS, ids=cases.SHORT.get)
def test_nan_stays_nan_and_leaves_its_block_alone(dtype):
    weight = random_weight((6, 8), dtype)
    _, clean = ops.quantize_weight_block_fp8(weight, [3, 4])
    largest = weight[:3, :4].abs().flatten().argmax().item()
    place = (0, 0) if largest != 0 else (0, 1)
    weight[place] = NAN
    weight[3:, 4:] = NAN  # a block without a number
    codes, scales = quantized_equal(weight, (3, 4))
    assert scales[0, 0] == clean[0, 0] and scales[1, 1] == 1
    assert torch.isnan(codes.float()).sum() == 13


@pytest.mark.parametrize("dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("value", (INF, -INF))
def test_an_infinity_is_an_error_that_names_its_block(value, dtype):
    weight = random_weight((6, 9), dtype)
    weight[4, 8] = value
    weight[5, 2] = value
    before = weight.clone()
    with pytest.raises(ValueError) as caught:
        ops.quantize_weight_block_fp8(weight, [2, 4])
    assert str(caught.value) == (
        "blockscale::quantize_weight_block_fp8: expected `weight` without infinities, got an infinity in block [2, 0]"
    )
    assert same_bits(weight, before)
    experts = torch.zeros(3, 6, 9, dtype=dtype)
    experts[2, 0, 8] = value
    experts[1, 5, 5] = NAN
    with pytest.raises(ValueError) as caught:
        ops.quantize_weight_block_fp8(experts, [4, 4])
    assert str(caught.value).endswith("got an infinity in block [2, 0, 2]")
    experts[2] = 0
    quantized_equal(experts, (4, 4))


@pytest.mark.parametrize("threads", (1, 2))
def test_the_first_infinite_block_is_named_whatever_the_threads(threads):
    torch.set_num_threads(threads)
    weight = torch.zeros(1024, 512)
    weight[1000, 0] = weight[130, 500] = weight[129, 400] = INF
    with pytest.raises(ValueError, match=r"block \[1, 3\]$"):
        ops.quantize_weight_block_fp8(weight, [128, 128])


def test_the_largest_element_never_exceeds_the_largest_code():
    """w / scale may come out a rounding above 448: it saturates, it does not become NaN."""
    rng = cases.generator("largest")
    mantissas = torch.empty(20000).uniform_(1, 2, generator=rng)
    weight = torch.ldexp(mantissas, torch.randint(-100, 100, (20000,), generator=rng))[:, None]
    codes, _ = quantized_equal(weight, (1, 1))
    assert (codes.view(U8) == 0x7E).all()


@pytest.mark.parametrize("exponent", (-149, -140, -130, -126, -120, -118, -117, -110))
def test_tiny_blocks_stop_at_the_smallest_normal_scale(exponent):
    weight = torch.ldexp(torch.randn(4, 6, generator=cases.generator(exponent)), torch.tensor(exponent))
    weight[0, 0] = 2.0**exponent
    codes, scales = quantized_equal(weight, (2, 3))
    assert (scales >= 2.0**-126).all()


def test_largest_finite_weights():
    for dtype in cases.FLOATS:
        weight = torch.full((2, 3), torch.finfo(dtype).max, dtype=dtype)
        codes, scales = quantized_equal(weight, (2, 3))
        assert (codes.view(U8) == 0x7E).all() and torch.isfinite(scales).all()


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_threads_do_not_change_the_bytes(threads):
    torch.set_num_threads(threads)
    weight = random_weight((2, 500, 300), BF16)
    codes, scales = quantized_equal(weight, (64, 128))
    back = ops.dequantize_weight_block_fp8(codes, scales, [64, 128], F32)
    assert same_bits(back, oracle.dequantize(codes, scales, (64, 128), F32))


# --------------------------------------------------------------------------------------------------------- dequantise
def random_scales(shape, dtype, *seed):
    rng = cases.generator("scales", shape, dtype, *seed)
    if dtype in (U8, E8M0):
        return torch.randint(255, shape, generator=rng).to(U8).view(dtype)
    return torch.ldexp(torch.rand(shape, generator=rng) + 0.5, torch.randint(-30, 10, shape, generator=rng)).to(dtype)


@pytest.mark.parametrize("out", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("scales_dtype", cases.SCALE_DTYPES, ids=cases.SHORT.get)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantize(shape, scales_dtype, out):
    for block in BLOCKS:
        codes = torch.randint(256, shape, generator=cases.generator(shape, block)).to(U8).view(FP8)
        scales = random_scales((*shape[:-2], *grid_shape(*shape[-2:], block)), scales_dtype, block)
        values = ops.dequantize_weight_block_fp8(codes, scales, list(block), out)
        assert values.dtype == out and values.is_contiguous()
        assert same_bits(values, oracle.dequantize(codes, scales, block, out))


def test_dequantize_rounds_once():
    """Products within a rounding of fp32 above a middle between two 16-bit values: through fp32 they would become ties
    and go to the even neighbour below."""
    for out, precision in ((BF16, 8), (F16, 11)):
        steps = torch.arange(2**precision, dtype=F64)
        middles = 1 + (steps + 0.5) * 2.0 ** (1 - precision)
        for code in (0x39, 0x3B, 0x3D, 0x3F):
            scales = (middles / E4M3[code]).to(F32)  # 24 bits that come closest to a middle
            products = scales.to(F64) * E4M3[code]
            through_fp32 = oracle.round_to(oracle.round_to(products, F32), out)
            assert (through_fp32 != oracle.round_to(products, out)).sum() > 10
            codes = torch.full((len(scales), 1), code, dtype=U8).view(FP8)
            values = ops.dequantize_weight_block_fp8(codes, scales[:, None], [1, 1], out)
            assert same_bits(values, oracle.dequantize(codes, scales[:, None], (1, 1), out))


def test_dequantize_subnormal_results_are_exact():
    codes = torch.arange(256).to(U8)[None].view(FP8)
    for exponent in (-126, -120, -117, -127):
        scales = cases.store_scales(torch.full((1, 1), exponent), E8M0 if exponent == -127 else F32)
        values = ops.dequantize_weight_block_fp8(codes, scales, [1, 256], F32)
        assert same_bits(values, oracle.dequantize(codes, scales, (1, 256), F32))


def test_dequantize_any_strides():
    codes = torch.randint(256, (60, 90), generator=cases.generator("strided")).to(U8).view(FP8)
    scales = torch.rand(20, 10, generator=cases.generator("strided scales"))
    for weight, grid in (
        (codes[:20, :32], scales[:5, :4]),
        (codes.as_strided((20, 32), (1, 60)), scales.T[:5, :4]),
        (codes.as_strided((20, 32), (180, 2), 1), scales[::2, ::3][:5]),
        (codes.as_strided((20, 32), (0, 1)), scales[:1, :4].expand(5, 4)),
        (codes.as_strided((3, 20, 32), (32, 96, 1)), scales.as_strided((3, 5, 4), (1, 12, 3))),
    ):
        expected = oracle.dequantize(weight.contiguous(), grid, (4, 8), F32)
        assert same_bits(ops.dequantize_weight_block_fp8(weight, grid, [4, 8], F32), expected)


def test_dequantize_of_quantized_is_within_half_a_step():
    weight = random_weight((100, 200), F32)
    codes, scales = ops.quantize_weight_block_fp8(weight, [32, 64])
    back = ops.dequantize_weight_block_fp8(codes, scales, [32, 64], F32)
    step = oracle.expand_scales(scales, 100, 200, (32, 64)) * 2.0**-10
    assert ((back - weight).abs() <= torch.maximum(weight.abs() * 2.0**-4, step) * (1 + 2.0**-20)).all()


def test_zero_times_nonfinite_scales():
    codes = torch.tensor([[0x00, 0x38, 0x7F]], dtype=U8).view(FP8)
    values = ops.dequantize_weight_block_fp8(codes, torch.tensor([[NAN]]), [1, 3], F32)
    assert torch.isnan(values).all()
    values = ops.dequantize_weight_block_fp8(codes, torch.tensor([[INF]]), [1, 3], F32)
    assert torch.isnan(values[0, [0, 2]]).all() and values[0, 1] == INF


def test_inputs_are_unchanged_and_outputs_their_own():
    weight = random_weight((20, 30), BF16)
    before = weight.clone()
    codes, scales = ops.quantize_weight_block_fp8(weight, [7, 9])
    kept = codes.view(U8).clone(), scales.clone()
    values = ops.dequantize_weight_block_fp8(codes, scales, [7, 9], BF16)
    values.zero_()
    assert torch.equal(codes.view(U8), kept[0]) and torch.equal(scales, kept[1])
    codes.view(U8).zero_()
    scales.zero_()
    assert same_bits(weight, before)
