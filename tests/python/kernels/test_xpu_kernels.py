"""The XPU classes, run on this machine against the contracts of the ops that they call."""

import copy

import pytest
import torch
from blockscale.kernels import XPUFp8BlockScaledMMKernel, XPUW8A16FP8LinearKernel, replace_parameter
from contracts import xpu_ops
from fp8_layers import block_layer, codes, config, frozen, generator, make_layer
from oracle import BF16, E8M0, F16, F32, FP8, U8, compare, decode, expand_scales, grid_shape, scaled_mm

Block, Woq = XPUFp8BlockScaledMMKernel, XPUW8A16FP8LinearKernel


@pytest.fixture(autouse=True)
def ops():
    with xpu_ops():
        yield


def xpu_config(N, K, block_size=(128, 128), **changes):
    return config(block_size, (N, K), (1, block_size[1]), platform="xpu", **changes)


def inputs(M, K, dtype=BF16):
    return torch.randn(M, K, generator=generator("xpu", M, K)).to(dtype)


def expected(x, weight, scales, block_size=(128, 128)):
    rows = x.reshape(-1, x.shape[-1])
    A, As = torch.ops.blockscale.per_token_group_quant_fp8(rows, block_size[1], 1e-10, False, False)
    dequantized = decode(A) * expand_scales(As.double(), *A.shape, (1, block_size[1]))
    return scaled_mm(dequantized, weight, scales, block_size)


# -------------------------------------------------------------------------------------------------------- W8A8, blocks
@pytest.mark.parametrize("N", [128, 448, 576, 2112, 2624, 16, 48, 960])
@pytest.mark.parametrize("K", [128, 256, 1024])
def test_scale_groups_are_what_the_division_makes_of_them(N, K):
    """The op divides sides by scale counts: 448 / 4 became groups of 112, 2112 / 17 built nothing, and a single group
    of K = 128 was taken for one scale per token."""
    layer = block_layer(N, K)
    weight, scales = layer.weight.detach().clone(), layer.weight_scale_inv.detach().clone()
    kernel = Block(xpu_config(N, K))
    kernel.process_weights_after_loading(layer)
    stored = layer.weight_scale_inv
    assert stored.t().is_contiguous() and N % stored.shape[0] == 0 and stored.shape[1] > 1
    for M in (1, 5):
        x = inputs(M, K)
        y = kernel.apply_weights(layer, x)
        assert y.dtype == BF16 and compare(y, expected(x, weight, scales))


@pytest.mark.parametrize(
    "N, K, block_size, word",
    [
        (1368, 256, (128, 128), "1368"),
        (520, 256, (128, 128), "520"),
        (8, 256, (128, 128), "8"),
        (256, 192, (128, 128), "192"),
        (256, 1368, (128, 128), "1368"),
        (256, 48, (128, 48), "48"),
        (256, 256, (1, 128), "1 x 128"),
        (256, 256, (8, 128), "8 x 128"),
        (256, 120, (128, 120), "128 x 120"),
    ],
)
def test_shapes_that_no_division_gives_are_refused_by_name(N, K, block_size, word):
    able, reason = Block.can_implement(xpu_config(N, K, block_size))
    assert not able and word in reason
    with pytest.raises(NotImplementedError, match="XPUFp8BlockScaledMMKernel"):
        Block(xpu_config(N, K, block_size))


def test_a_shape_that_is_only_known_at_load_is_refused_there():
    kernel = Block(config((128, 128), None, (1, 128), platform="xpu"))
    with pytest.raises(ValueError, match=r"layer `model.layers.0.mlp.up_proj`: expected N .* got 1368: 8"):
        kernel.process_weights_after_loading(block_layer(1368, 256))


@pytest.mark.parametrize("widths", [(1536, 576), (576, 192, 192), (64, 64)], ids=str)
def test_fused_shards_keep_their_scales(widths):
    K, N = 256, sum(widths)
    parts = [block_layer(width, K, seed=seed) for seed, width in enumerate(widths)]
    weight = torch.cat([part.weight.view(U8) for part in parts]).view(FP8)
    scales = torch.cat([part.weight_scale_inv for part in parts])
    layer = make_layer(weight, scales, logical_widths=list(widths), scale_grid_per_shard=True)
    kernel = Block(xpu_config(N, K))
    kernel.process_weights_after_loading(layer)
    x = inputs(3, K)
    y = kernel.apply_weights(layer, x)
    start = 0
    for part, width in zip(parts, widths, strict=True):
        reference = expected(x, part.weight.detach(), part.weight_scale_inv.detach())
        assert compare(y[:, start : start + width], reference)
        start += width


@pytest.mark.parametrize("out", [BF16, F16], ids=str)
@pytest.mark.parametrize("lead", [(2, 3), (4,), (0,), (2, 0)], ids=str)
def test_any_rank_and_no_rows(out, lead):
    """The op divides by the number of tokens, and ends the process where there are none."""
    layer = block_layer(64, 256)
    kernel = Block(xpu_config(64, 256, out=out))
    kernel.process_weights_after_loading(layer)
    x = torch.randn(*lead, 256, generator=generator(lead)).to(BF16)
    bias = torch.randn(64, generator=generator("bias")).to(out)
    y = kernel.apply_weights(layer, x, bias)
    assert y.shape == (*lead, 64) and y.dtype == out
    if y.numel():
        assert torch.equal(y, kernel.apply_weights(layer, x) + bias)


@pytest.mark.parametrize("scale", [F32, BF16, E8M0], ids=str)
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_scale_names_and_dtypes(scale, name):
    exponents = torch.randint(-9, -2, grid_shape(576, 256, (128, 128)), generator=generator("xpu scales"))
    stored = (exponents + 127).to(U8).view(E8M0) if scale == E8M0 else (2.0**exponents).to(scale)
    layer = make_layer(codes(576, 256), stored, name)
    kernel = Block(xpu_config(576, 256, scale=scale))
    kernel.process_weights_after_loading(layer)
    x = inputs(2, 256)
    assert compare(kernel.apply_weights(layer, x), expected(x, codes(576, 256), 2.0**exponents))


# --------------------------------------------------------------------------------------------------- W8A16, weight-only
@pytest.mark.parametrize("N, K", [(48, 70), (64, 64), (1368, 33), (1, 5)])
@pytest.mark.parametrize("group", [(-1, 1), (1, -1), (-1, -1)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_only(N, K, group, dtype, transposed):
    weight = codes(N, K)
    scales = torch.rand(1 if group == (-1, -1) else N, generator=generator(N)) + 0.01
    stored = scales if group == (-1, -1) else scales[:, None]
    layer = make_layer(weight.t() if transposed else weight, stored, "weight_scale")
    kernel = Woq(config(group, (N, K), x=dtype, out=dtype, platform="xpu"))
    kernel.process_weights_after_loading(layer)
    assert layer.weight.shape == (K, N)
    x, bias = inputs(6, K, dtype).reshape(2, 3, K), torch.randn(N, generator=generator("b")).to(dtype)
    reference = scaled_mm(x, weight, scales.reshape(-1, 1).expand(N, 1), (1, K), bias)
    y = kernel.apply_weights(layer, x, bias)
    assert y.dtype == dtype and compare(y, reference)
    assert kernel.apply_weights(layer, x[:0], bias).shape == (0, 3, N)


@pytest.mark.parametrize("kind", ["block", "channel"])
def test_no_columns_leave_the_bias(kind):
    layer = block_layer(64, 0) if kind == "block" else make_layer(codes(64, 0), torch.ones(64, 1), "weight_scale")
    kernel = Block(xpu_config(64, 0)) if kind == "block" else Woq(config((-1, 1), (64, 0), platform="xpu"))
    kernel.process_weights_after_loading(layer)
    bias = torch.randn(64, generator=generator("bias")).to(BF16)
    assert torch.equal(kernel.apply_weights(layer, torch.ones(3, 0, dtype=BF16), bias), bias.expand(3, 64))


def test_weight_only_expands_scalars_of_shards():
    layer = make_layer(codes(48, 70), torch.tensor([1.0, 1 / 64, 1 / 4096]), logical_widths=[16, 16, 16])
    kernel = Woq(config((-1, -1), (48, 70), platform="xpu"))
    kernel.process_weights_after_loading(layer)
    rows = torch.tensor([1.0, 1 / 64, 1 / 4096]).repeat_interleave(16)[:, None]
    x = inputs(3, 70)
    assert compare(kernel.apply_weights(layer, x), scaled_mm(x, codes(48, 70), rows, (1, 70)))


REFUSED = [
    (Woq, config((128, 128)), "BLOCK"),
    (Woq, config((1, 32)), "BLOCK"),
    (Woq, config((-1, 1), x=F32), "float32"),
    (Woq, config((-1, 1), out=F32), "float32"),
    (Woq, config((-1, 1), dtype=torch.int8), "int8"),
    (Block, config((-1, 1), None, (1, -1)), "BLOCK"),
    (Block, config((128, 128)), "16 bits"),
    (Block, config((128, 128), None, (-1, -1), static=True), "static"),
    (Block, config((128, 128), None, (1, 128), out=F32), "float32"),
    (Block, config((128, 128), None, (1, 128), scale=torch.int32), "int32"),
]


@pytest.mark.parametrize(
    "cls, refused, word", REFUSED, ids=lambda value: getattr(value, "__name__", None) or str(value)
)
def test_refusals_name_what_came(cls, refused, word):
    able, reason = cls.can_implement(refused)
    assert not able and word in reason


# ------------------------------------------------------------------------------------------------------------- reloads
def same_bytes(one, two):
    return torch.equal(one.detach().contiguous().view(U8), two.contiguous().view(U8))


@pytest.mark.parametrize("case", ["block-576", "block-128-one-group", "channel", "shards"])
def test_load_a_then_b_then_a_equals_a_fresh_load(case):
    N, K = {"block-576": (576, 256), "block-128-one-group": (576, 128)}.get(case, (48, 48))

    def checkpoint(seed):
        if case.startswith("block"):
            source = block_layer(N, K, seed=seed)
            return source.weight.detach(), source.weight_scale_inv.detach()
        scales = torch.rand(N if case == "channel" else 3, generator=generator(case, seed)) + 0.1
        return codes(N, K, seed), scales

    group = {"channel": (-1, 1), "shards": (-1, -1)}.get(case)
    kernel = Block(xpu_config(N, K)) if group is None else Woq(config(group, (N, K), platform="xpu"))
    widths = {"logical_widths": [16, 16, 16]} if case == "shards" else {}
    layer = make_layer(*(tensor.clone() for tensor in checkpoint(1)), **widths)
    kernel.process_weights_after_loading(layer)
    x = inputs(3, K)
    fresh, result = [p.detach().clone() for p in layer.parameters()], kernel.apply_weights(layer, x)
    kernel.process_weights_after_loading(layer)  # once more, without a load
    for seed in (2, 1):
        layer.weight, layer.weight_scale_inv = (frozen(tensor.clone()) for tensor in checkpoint(seed))
        kernel.process_weights_after_loading(layer)
    for parameter, before in zip(layer.parameters(), fresh, strict=True):
        assert parameter.stride() == before.stride() and same_bytes(parameter, before)
    assert torch.equal(kernel.apply_weights(layer, x), result)
    assert torch.equal(kernel.apply_weights(copy.deepcopy(layer), x), result)
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in (layer.weight, layer.weight_scale_inv))


@pytest.mark.parametrize("how", ["assigned", "replaced"])
def test_a_new_weight_is_not_taken_for_the_prepared_one(how):
    """The helper that carries a loader's attributes over must not carry the mark of a prepared weight."""
    layer, other = block_layer(576, 128, seed=1), block_layer(576, 128, seed=2)
    kernel = Block(xpu_config(576, 128))
    kernel.process_weights_after_loading(layer)
    for name in ("weight", "weight_scale_inv"):
        if how == "replaced":
            replace_parameter(layer, name, getattr(other, name).detach().clone())
        else:
            setattr(layer, name, frozen(getattr(other, name).detach().clone()))
    kernel.process_weights_after_loading(layer)
    x = inputs(2, 128)
    reference = expected(x, other.weight.detach(), other.weight_scale_inv.detach())
    assert compare(kernel.apply_weights(layer, x), reference)


def test_support_is_the_presence_of_the_op():
    assert Block.is_supported() == (True, None) and Woq.is_supported() == (True, None)


def test_the_contract_catches_a_class_that_ignores_it():
    """The stand-in is a judge only if the raw call, with the grid as it is stored, fails."""
    layer = block_layer(448, 256)
    x = inputs(2, 256)
    A, As = torch.ops.blockscale.per_token_group_quant_fp8(x, 128, 1e-10, False, False)
    scales = layer.weight_scale_inv.detach().t().contiguous()
    y = torch.ops._xpu_C.fp8_gemm(A, layer.weight.t(), BF16, As, scales, torch.Tensor())
    assert not compare(y, expected(x, layer.weight.detach(), layer.weight_scale_inv.detach()))
    narrow = block_layer(448, 128)
    A, As = torch.ops.blockscale.per_token_group_quant_fp8(inputs(2, 128), 128, 1e-10, False, False)
    with pytest.raises(AssertionError, match="per tensor or per channel"):
        torch.ops._xpu_C.fp8_gemm(A, narrow.weight.t(), BF16, As, narrow.weight_scale_inv.t().contiguous(), None)
