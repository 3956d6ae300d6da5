"""Keys, and QuantFP8: torch's own ops and the compiled op are one definition."""

import pytest
import torch
from blockscale.kernels import GroupShape, QuantFP8, QuantKey, ScaleDesc
from blockscale.kernels.quant_keys import quantize_groups
from fp8_layers import generator
from oracle import BF16, F16, F32, FP8, U8, decode, encode, round_to

compiled = torch.ops.blockscale.per_token_group_quant_fp8


def inputs(M, K, dtype):
    x = torch.randn(M, K, generator=generator(M, K)) * 2.0 ** torch.randint(-20, 9, (M, 1), generator=generator(M))
    if M > 2:
        x[1] = 0
        x[2, K // 2] = torch.nan
    return x.to(dtype)


def test_a_key_is_a_value():
    one, two = (QuantKey(FP8, ScaleDesc(F32, True, GroupShape(128, 128))) for _ in range(2))
    assert one == two and hash(one) == hash(two) and one != QuantKey(FP8, ScaleDesc(BF16, True, GroupShape(128, 128)))
    assert GroupShape.PER_TENSOR == (-1, -1) and GroupShape.PER_TOKEN == (1, -1) and GroupShape.PER_CHANNEL == (-1, 1)
    assert GroupShape(1, 128).is_per_group() and not GroupShape(1, -1).is_per_group()


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("M, K, group", [(1, 128, 128), (5, 300, 128), (4, 64, 32), (3, 7, 128), (6, 129, 64)])
@pytest.mark.parametrize("ue8m0", [False, True], ids=["fp32", "ue8m0"])
def test_the_compiled_op_and_torch_agree_to_the_bit(M, K, group, dtype, ue8m0):
    x = inputs(M, K, dtype)
    for column_major in (False, True):
        here = compiled(x, group, 1e-10, column_major, ue8m0)
        there = quantize_groups(x, group, 1e-10, column_major, ue8m0)
        for one, two in zip(here, there, strict=True):
            assert one.shape == two.shape and one.dtype == two.dtype
            assert torch.equal(one.view(U8) if one.dtype == FP8 else one, two.view(U8) if two.dtype == FP8 else two)
        if M > 1 and here[1].shape[1] > 1:
            assert here[1].stride() == there[1].stride()


@pytest.mark.parametrize("ue8m0", [False, True], ids=["fp32", "ue8m0"])
def test_codes_are_the_nearest_and_scales_cover_amax(ue8m0):
    x = torch.randn(9, 300, generator=generator("nearest")) * 2.0 ** torch.arange(-4, 5)[:, None]
    codes, scales = QuantFP8(False, GroupShape(1, 128), use_ue8m0=ue8m0)(x)
    spread = scales.repeat_interleave(128, 1)[:, :300].double()
    expected = encode(round_to(x.double() / spread, F32))
    assert torch.equal(codes.view(U8), expected)
    amax = torch.stack([part.abs().amax(1) for part in x.split(128, 1)], 1)
    ratio = scales / (amax / 448)
    assert (ratio >= 1 - 2**-23).all() and (ratio < (2 if ue8m0 else 1 + 2**-22)).all()
    if ue8m0:
        assert (torch.frexp(scales)[0] == 0.5).all()


@pytest.mark.parametrize("amax", [0.0, 1e-30, 1e-12, 2.5e-8, 1e-10, 1e-4])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("quantize", [compiled, quantize_groups], ids=["compiled", "torch"])
def test_a_vanishing_group_has_one_scale_whoever_computes_it(quantize, group, amax):
    """Two backends gave 2^-33 and 2^-42 for a group of zeros, as eps was applied before and after rounding up."""
    x = torch.full((2, 2 * group), amax)
    codes, scales = quantize(x, group, 1e-10, False, True)
    exact = max(float(torch.tensor(amax)), float(torch.tensor(1e-10))) / 448
    assert (scales.double() >= exact * (1 - 2**-23)).all() and (scales.double() < 2 * exact).all()
    assert (torch.frexp(scales)[0] == 0.5).all()
    if amax == 0:
        assert (codes.view(U8) == 0).all()


@pytest.mark.parametrize("exponent", [-30, -1, 0, 1, 20])
@pytest.mark.parametrize("quantize", [compiled, quantize_groups], ids=["compiled", "torch"])
def test_a_power_of_two_is_not_rounded_up_further(quantize, exponent):
    _, scales = quantize(torch.full((1, 2), 448 * 2.0**exponent), 2, 1e-10, False, True)
    assert scales.item() == 2.0**exponent


def test_values_that_are_no_numbers():
    x = torch.tensor([[torch.nan, 448.0, torch.inf, 1.0]])
    for codes, scales in (compiled(x, 2, 1e-10, False, False), quantize_groups(x, 2)):
        assert scales.tolist() == [[1.0, torch.inf]]
        assert decode(codes).isnan().tolist() == [[True, False, True, False]]


def test_saturation_does_not_depend_on_the_cast():
    codes, _ = QuantFP8(True, GroupShape.PER_TENSOR)(torch.tensor([[465.0, 1e5, -torch.inf]]), scale=torch.ones(1))
    assert decode(codes).tolist() == [[448.0, 448.0, -448.0]]


def test_tokens_and_tensors():
    x = torch.randn(5, 70, generator=generator("token"))
    codes, scales = QuantFP8(False, GroupShape.PER_TOKEN)(x)
    assert scales.shape == (5, 1) and torch.equal(scales[:, 0], (x.abs().amax(1) / 448))
    codes, scales = QuantFP8(False, GroupShape.PER_TENSOR)(x)
    assert codes.shape == (5, 70) and scales.shape == (1,) and scales.item() == (x.abs().amax() / 448).item()


def test_an_upper_bound_limits_the_scale():
    codes, scales = QuantFP8(False, GroupShape.PER_TOKEN)(torch.tensor([[4480.0, 448.0]]), scale_ub=torch.tensor(448.0))
    assert scales.item() == 1 and decode(codes).tolist() == [[448.0, 448.0]]


@pytest.mark.parametrize("M, padded", [(0, 0), (1, 4), (3, 4), (4, 4), (83, 84)])
def test_padding_rows_are_zeros_with_finite_scales(M, padded):
    x = torch.full((M, 256), 3.0)
    codes, scales = QuantFP8(False, GroupShape(1, 128), num_token_padding=4, column_major_scales=True)(x)
    assert codes.shape == (padded, 256) and (decode(codes[M:]) == 0).all()
    assert torch.isfinite(scales).all() and (scales > 0).all()


@pytest.mark.parametrize(
    "arguments, got",
    [((False, GroupShape(128, 128)), "(128, 128)"), ((True, GroupShape(1, 128)), "(1, 128)")],
)
def test_groups_that_no_activation_has(arguments, got):
    with pytest.raises(ValueError, match=r"QuantFP8: expected `group_shape`") as error:
        QuantFP8(*arguments)
    assert str(error.value).endswith(f"got {got}")
    with pytest.raises(ValueError, match="expected `scale` with static=True, got none"):
        QuantFP8(True, GroupShape.PER_TENSOR)(torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"expected `x` of shape \[M, K\], got \[2\]"):
        QuantFP8(False, GroupShape(1, 2))(torch.ones(2))
