"""The CPU classes: W8A16 and W8A8 against the reference, reloads, and what must not be repacked."""

import copy
import pickle

import blockscale
import pytest
import torch
from blockscale.kernels import (
    CPUFp8BlockScaledMMKernel,
    CPUFp8W8A8BlockScaledMMKernel,
    GroupShape,
    supports_cpu_fp8_w8a16,
)
from fp8_layers import block_layer, codes, config, frozen, generator, grid, make_layer
from oracle import BF16, E8M0, F16, F32, FP8, U8, compare, decode, expand_scales, scaled_mm

BLOCKS = [(128, 128), (64, 128), (32, 32), (1, 128), (3, 5)]
needs_w8a8 = pytest.mark.skipif(
    not CPUFp8W8A8BlockScaledMMKernel.is_supported()[0], reason=str(CPUFp8W8A8BlockScaledMMKernel.is_supported()[1])
)


def inputs(M, K, dtype=BF16):
    return torch.randn(M, K, generator=generator(M, K)).to(dtype)


def w8a8_reference(kernel, x, weight, scales, block_size, bias=None):
    A, As = kernel.quant_fp8(x.reshape(-1, x.shape[-1]))
    dequantized = decode(A) * expand_scales(As.double(), *A.shape, (1, block_size[1]))
    reference = scaled_mm(dequantized, weight, scales, block_size, bias)
    reference.roundings += 2  # the product of the two scales
    return reference


@pytest.mark.parametrize("block_size", BLOCKS, ids=str)
@pytest.mark.parametrize("x_dtype, out", [(BF16, BF16), (F16, F32), (F32, F16)], ids=str)
def test_w8a16_block(block_size, x_dtype, out):
    for N, K in ((576, 192), (130, 321), (17, 5), (1, 1)):
        layer = block_layer(N, K, block_size)
        weight, scales = layer.weight.detach(), layer.weight_scale_inv.detach()
        kernel = CPUFp8BlockScaledMMKernel(config(block_size, (N, K), x=x_dtype, out=out))
        kernel.process_weights_after_loading(layer)
        assert layer.weight.dtype == U8 and layer.weight.shape == (N, K)
        bias = torch.randn(N, generator=generator(N))
        for M in (0, 1, 5):
            x = inputs(M, K, x_dtype)
            y = kernel.apply_weights(layer, x, bias)
            assert y.dtype == out and compare(y, scaled_mm(x, weight, scales, block_size, bias))


@pytest.mark.parametrize("N, K", [(48, 70), (33, 129), (64, 64)])
@pytest.mark.parametrize(
    "group", [GroupShape(-1, 1), GroupShape(1, -1), GroupShape(-1, -1)], ids=["kn", "nk", "tensor"]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_w8a16_channel_and_tensor(N, K, group, transposed):
    weight = codes(N, K)
    scales = torch.rand(1 if group.is_per_tensor() else N, generator=generator(N)) + 0.01
    layer = make_layer(weight.t() if transposed else weight, scales, "weight_scale")
    kernel = CPUFp8BlockScaledMMKernel(config(group, (N, K)))
    kernel.process_weights_after_loading(layer)
    x = inputs(3, K).reshape(3, 1, K)
    rows = scales.reshape(-1, 1).expand(N, 1)
    assert compare(kernel.apply_weights(layer, x), scaled_mm(x, weight, rows, (1, K)))


@pytest.mark.parametrize("dtype", [F32, BF16, E8M0, U8], ids=str)
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv", "scale"])
def test_scale_names_and_dtypes_give_equal_bits(name, dtype):
    N, K = 200, 300
    exponents = torch.randint(-9, -2, (2, 3), generator=generator("dtypes"))
    stored = (exponents + 127).to(U8) if dtype in (E8M0, U8) else (2.0**exponents).to(dtype)
    layer = make_layer(codes(N, K), stored.view(E8M0) if dtype == E8M0 else stored, name)
    kernel = CPUFp8BlockScaledMMKernel(config((128, 128), (N, K), scale=dtype, out=F32))
    kernel.process_weights_after_loading(layer)
    plain = make_layer(codes(N, K), 2.0**exponents)
    kernel.process_weights_after_loading(plain)
    x = inputs(4, K)
    assert torch.equal(kernel.apply_weights(layer, x), kernel.apply_weights(plain, x))
    assert getattr(layer, name).dtype == F32


@needs_w8a8
@pytest.mark.parametrize("block_size", BLOCKS, ids=str)
@pytest.mark.parametrize("out", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("scale", [F32, E8M0], ids=str)
def test_w8a8_block(block_size, out, scale):
    for N, K in ((576, 192), (130, 321), (17, 5)):
        layer = block_layer(N, K, block_size)
        weight, scales = layer.weight.detach(), layer.weight_scale_inv.detach()
        layer_config = config(block_size, (N, K), (1, block_size[1]), out=out, activation_scale=scale)
        kernel = CPUFp8W8A8BlockScaledMMKernel(layer_config)
        kernel.process_weights_after_loading(layer)
        bias = torch.randn(N, generator=generator(N))
        for M in (0, 1, 5):
            x = inputs(M, K)
            y = kernel.apply_weights(layer, x, bias)
            reference = w8a8_reference(kernel, x, weight, scales, block_size, bias)
            assert y.dtype == out and compare(y, reference)
        packed = kernel.apply_block_scaled_mm(*_operands(kernel, layer, x))
        assert compare(packed, w8a8_reference(kernel, x, weight, scales, block_size))


def _operands(kernel, layer, x):
    A, As = kernel.quant_fp8(x)
    return A, layer.weight, As, layer.weight_scale_inv


@needs_w8a8
def test_deepseek_shape_against_float64():
    """M = 83, N = 576, K = 7168: within the derived bound, and well inside a mean relative difference of 0.001."""
    layer = block_layer(576, 7168)
    weight, scales = layer.weight.detach(), layer.weight_scale_inv.detach()
    kernel = CPUFp8W8A8BlockScaledMMKernel(config((128, 128), (576, 7168), (1, 128), out=F32))
    kernel.process_weights_after_loading(layer)
    x = inputs(83, 7168)
    reference = w8a8_reference(kernel, x, weight, scales, (128, 128))
    y = kernel.apply_weights(layer, x)
    assert compare(y, reference)
    assert (y.double() - reference.y).abs().mean() / reference.y.abs().mean() < 1e-6


# --------------------------------------------------------------------------------------------------------------- reload
CASES = {
    "w8a16-block": (CPUFp8BlockScaledMMKernel, config((128, 128), (960, 576)), {"logical_widths": [576, 192, 192]}),
    "w8a16-channel": (CPUFp8BlockScaledMMKernel, config((-1, 1), (960, 576)), {}),
    "w8a16-shards": (CPUFp8BlockScaledMMKernel, config((-1, -1), (960, 576)), {"logical_widths": [576, 192, 192]}),
    "w8a8-block": (CPUFp8W8A8BlockScaledMMKernel, config((128, 128), (960, 576), (1, 128)), {}),
}


def checkpoint(case, seed):
    group = CASES[case][1].weight_quant_key.scale.group_shape
    if group.is_block():
        scales = grid(960, 576, group, seed)
        if "logical_widths" in CASES[case][2]:
            scales = torch.cat([grid(width, 576, group, seed + width) for width in (576, 192, 192)])
    else:
        scales = torch.rand(960 if group.is_per_channel() else 3, generator=generator(case, seed)) + 0.1
    return codes(960, 576, seed), scales


def bits(layer):
    return layer.weight.detach().clone(), layer.weight_scale_inv.detach().clone(), layer.weight_scale_inv.stride()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["new parameters", "restored, written in place"])
def test_load_a_then_b_then_a_equals_a_fresh_load(case, how):
    """The second load crashed, or served raw scales as packed ones."""
    cls, layer_config, attributes = CASES[case]
    kernel = cls(layer_config)
    x = inputs(5, 576)

    def load(layer, tensors):
        if layer is None:
            layer = make_layer(*(tensor.clone() for tensor in tensors), **attributes)
        elif how == "new parameters":
            layer.weight, layer.weight_scale_inv = (frozen(tensor.clone()) for tensor in tensors)
        else:
            kernel.restore_weights_before_loading(layer)
            for parameter, tensor in zip((layer.weight, layer.weight_scale_inv), tensors, strict=True):
                parameter.data.copy_(tensor)
        kernel.process_weights_after_loading(layer)
        return layer

    a, b = checkpoint(case, 1), checkpoint(case, 2)
    layer = load(None, a)
    fresh, result = bits(layer), kernel.apply_weights(layer, x)
    load(layer, b)
    assert not torch.equal(bits(layer)[0], fresh[0])
    for _ in range(2):
        load(layer, a)
        assert all(torch.equal(one, two) for one, two in zip(bits(layer)[:2], fresh[:2], strict=True))
        assert bits(layer)[2] == fresh[2]
        assert torch.equal(kernel.apply_weights(layer, x), result)


@pytest.mark.parametrize("case", CASES)
def test_preparing_twice_changes_nothing(case):
    cls, layer_config, attributes = CASES[case]
    layer = make_layer(*checkpoint(case, 1), **attributes)
    kernel = cls(layer_config)
    kernel.process_weights_after_loading(layer)
    before = bits(layer)
    kernel.process_weights_after_loading(layer)
    assert all(torch.equal(one, two) for one, two in zip(bits(layer)[:2], before[:2], strict=True))


def test_codes_copied_into_packed_bytes_are_found():
    """copy_ converts numbers: 1.5 becomes the byte 1. Nothing can repair that, so it must not go unseen."""
    layer = block_layer(200, 300)
    kernel = CPUFp8BlockScaledMMKernel(config((128, 128), (200, 300)))
    kernel.process_weights_after_loading(layer)
    layer.weight.data.copy_(codes(200, 300, 7))
    with pytest.raises(
        ValueError, match=r"layer `model.layers.0.mlp.up_proj`: expected .* got packed bytes that were overwritten"
    ):
        kernel.process_weights_after_loading(layer)


def test_discarded_memory_comes_back_with_the_next_load():
    """After a deep sleep everything that is no parameter was lost; here everything is one."""
    layer = block_layer(200, 300)
    kernel = CPUFp8BlockScaledMMKernel(config((128, 128), (200, 300)))
    kernel.process_weights_after_loading(layer)
    x = inputs(3, 300)
    expected = kernel.apply_weights(layer, x)
    names = set(dict(layer.named_parameters()))
    assert names == {"weight", "weight_scale_inv"} and not dict(layer.named_buffers())
    assert not [value for value in vars(kernel).values() if isinstance(value, torch.Tensor)]
    for parameter in layer.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    fresh = block_layer(200, 300)
    layer.weight, layer.weight_scale_inv = fresh.weight, fresh.weight_scale_inv
    kernel.process_weights_after_loading(layer)
    assert torch.equal(kernel.apply_weights(layer, x), expected)


def test_a_restored_layer_that_is_not_loaded_is_an_error():
    layer = block_layer(200, 300)
    kernel = CPUFp8BlockScaledMMKernel(config((128, 128), (200, 300)))
    kernel.process_weights_after_loading(layer)
    kernel.restore_weights_before_loading(layer)
    with pytest.raises(ValueError, match="expected `weight_scale_inv` written by the load"):
        kernel.process_weights_after_loading(layer)


def test_loader_attributes_survive_the_reload():
    layer = block_layer(200, 300)
    layer.weight.weight_loader = layer.weight_scale_inv.weight_loader = len
    kernel = CPUFp8BlockScaledMMKernel(config((128, 128), (200, 300)))
    for step in (kernel.process_weights_after_loading, kernel.restore_weights_before_loading):
        step(layer)
        assert layer.weight.weight_loader is layer.weight_scale_inv.weight_loader is len


def test_copies_of_a_prepared_layer_compute_the_same():
    layer = block_layer(200, 300)
    kernel = CPUFp8BlockScaledMMKernel(config((128, 128), (200, 300)))
    kernel.process_weights_after_loading(layer)
    x = inputs(3, 300)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        kernel.process_weights_after_loading(other)
        assert torch.equal(kernel.apply_weights(other, x), kernel.apply_weights(layer, x))


# ----------------------------------------------------------------------------------------------------- other contracts
@pytest.mark.parametrize("case", ["w8a16-block", "w8a8-block"])
def test_a_weight_that_the_engine_reads_itself_is_not_repacked(case):
    cls, layer_config, attributes = CASES[case]
    layer = make_layer(*checkpoint(case, 1), **attributes)
    packed = copy.deepcopy(layer)
    layer._cpu_skip_gemm_dispatch = True
    kernel = cls(layer_config)
    before = layer.weight
    kernel.process_weights_after_loading(layer)
    assert layer.weight is before and layer.weight.dtype == FP8
    kernel.process_weights_after_loading(packed)
    x = inputs(2, 576)
    assert torch.equal(kernel.apply_weights(layer, x), kernel.apply_weights(packed, x))


def test_the_packed_weight_is_told_from_a_plain_one_of_the_same_bytes():
    layer = block_layer(200, 300)
    kernel = CPUFp8BlockScaledMMKernel(config((128, 128), (200, 300)))
    kernel.process_weights_after_loading(layer)
    x = inputs(1, 300)
    packed_as_plain = make_layer(layer.weight.view(FP8), layer.weight_scale_inv)
    assert torch.equal(blockscale.unpack_weight(layer.weight.detach()).view(U8), codes(200, 300).view(U8))
    assert not torch.equal(kernel.apply_weights(packed_as_plain, x), kernel.apply_weights(layer, x))


def test_a_call_looks_no_parameter_up_through_the_module(monkeypatch):
    kernel, layer = CPUFp8BlockScaledMMKernel(config((128, 128), (200, 300))), block_layer(200, 300)
    kernel.process_weights_after_loading(layer)
    looked_up, lookup = [], torch.nn.Module.__getattr__

    def counting(module, name):
        looked_up.append(name)
        return lookup(module, name)

    monkeypatch.setattr(torch.nn.Module, "__getattr__", counting)
    kernel.apply_weights(layer, inputs(1, 300))
    assert looked_up == []
    assert layer.weight is not None and looked_up == ["weight"]


def test_compiles_with_a_dynamic_number_of_rows():
    layer = block_layer(576, 192)
    kernel = CPUFp8BlockScaledMMKernel(config((128, 128), (576, 192)))
    kernel.process_weights_after_loading(layer)
    compiled = torch.compile(kernel.apply_weights, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (2, 5, 1):
        x = inputs(M, 192)
        assert torch.equal(compiled(layer, x), kernel.apply_weights(layer, x))


@pytest.mark.parametrize("cls", [CPUFp8BlockScaledMMKernel, CPUFp8W8A8BlockScaledMMKernel])
@pytest.mark.parametrize("N, K, lead", [(40, 0, (2, 3)), (40, 0, (0,)), (40, 0, ()), (0, 70, (2, 3)), (40, 70, (2, 0))])
def test_sides_of_no_length(cls, N, K, lead):
    kernel, layer = cls(config((32, 32), (N, K), (1, 32))), block_layer(N, K, (32, 32))
    kernel.process_weights_after_loading(layer)
    bias = torch.randn(N, generator=generator("bias"))
    y = kernel.apply_weights(layer, torch.ones(*lead, K, dtype=BF16), bias)
    assert torch.equal(y, bias.to(BF16).expand(*lead, N))


@pytest.mark.parametrize("cls", [CPUFp8BlockScaledMMKernel, CPUFp8W8A8BlockScaledMMKernel])
def test_bytes_that_no_kernel_has_packed_are_no_weight(cls):
    kernel, layer = cls(config((32, 32), (40, 70), (1, 32))), block_layer(40, 70, (32, 32))
    layer.weight = frozen(layer.weight.detach().view(U8))
    for call in (
        lambda: kernel.process_weights_after_loading(layer),
        lambda: kernel.restore_weights_before_loading(layer),
        lambda: kernel.apply_weights(layer, inputs(3, 70)),
    ):
        with pytest.raises(ValueError, match=r"expected `weight` of dtype float8_e4m3fn, got uint8 that no kernel has"):
            call()
    with pytest.raises(ValueError, match=r"expected .* of shape \[..., K\], got \[\]"):
        layer = block_layer(40, 70, (32, 32))
        kernel.process_weights_after_loading(layer)
        kernel.apply_weights(layer, torch.ones(()))


REFUSED = [
    (CPUFp8BlockScaledMMKernel, config(dtype=torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
    (CPUFp8BlockScaledMMKernel, config(dtype=torch.float8_e5m2), "float8_e5m2"),
    (CPUFp8BlockScaledMMKernel, config(dtype=torch.int8), "int8"),
    (CPUFp8BlockScaledMMKernel, config(scale=torch.int32), "int32"),
    (CPUFp8BlockScaledMMKernel, config(scale=FP8), "float8_e4m3fn"),
    (CPUFp8BlockScaledMMKernel, config(x=torch.float64), "float64"),
    (CPUFp8BlockScaledMMKernel, config(out=torch.int8), "int8"),
    (CPUFp8BlockScaledMMKernel, config((128, -1)), "(128, -1)"),
    (CPUFp8W8A8BlockScaledMMKernel, config(), "keeps them in 16 bits"),
    (CPUFp8W8A8BlockScaledMMKernel, config((-1, 1), None, (1, -1)), "BLOCK weights only"),
    (CPUFp8W8A8BlockScaledMMKernel, config((128, 128), None, (-1, -1), static=True), "static"),
    (CPUFp8W8A8BlockScaledMMKernel, config((128, 128), None, (1, 64)), "1 x 64"),
    (CPUFp8W8A8BlockScaledMMKernel, config((128, 128), None, (1, -1)), "per row"),
    (CPUFp8W8A8BlockScaledMMKernel, config((128, 128), None, (1, 128), out=torch.float64), "float64"),
]


@pytest.mark.parametrize(
    "cls, refused, word", REFUSED, ids=lambda value: getattr(value, "__name__", None) or str(value)
)
def test_refusals_name_what_came(cls, refused, word):
    able, reason = cls.can_implement(refused)
    assert not able and word in reason
    with pytest.raises(NotImplementedError, match=cls.__name__):
        cls(refused)


def test_support_is_that_of_the_op_and_of_this_cpu(monkeypatch):
    """can_implement said yes where the op was compiled out."""
    assert supports_cpu_fp8_w8a16()
    monkeypatch.setattr("blockscale.kernels.cpu.has_op", lambda name: name != "fp8_scaled_mm_cpu")
    assert not supports_cpu_fp8_w8a16()
    assert "without the op fp8_scaled_mm_cpu" in CPUFp8BlockScaledMMKernel.is_supported()[1]
    monkeypatch.setattr("blockscale.kernels.cpu.has_op", lambda name: name != "per_token_group_quant_fp8")
    assert "per_token_group_quant_fp8" in CPUFp8W8A8BlockScaledMMKernel.is_supported()[1]
    monkeypatch.setattr("blockscale.kernels.cpu.has_op", lambda name: True)
    monkeypatch.setattr("blockscale.kernels.cpu.isa_info", lambda: {"active": None})
    assert "no instruction set" in CPUFp8BlockScaledMMKernel.is_supported()[1]

    def misspelt():
        raise ValueError("blockscale: expected `BLOCKSCALE_MAX_ISA` to be one of scalar, got avx3")

    monkeypatch.setattr("blockscale.kernels.cpu.isa_info", misspelt)
    assert CPUFp8BlockScaledMMKernel.is_supported()[1].endswith("got avx3")


@pytest.mark.parametrize("name", ["scalar", "avx2", "avx512", "avx512_vbmi", "avx512_bf16", "amx_bf16"])
@pytest.mark.parametrize("op", ["w8a16", "w8a8"])
def test_64_rows_on_every_instruction_set(name, op, workers):
    N, K = 576, 640
    worker = workers(name)
    layer = block_layer(N, K)
    weight, scales, packed = layer.weight.detach(), layer.weight_scale_inv.detach(), None
    kernel = CPUFp8W8A8BlockScaledMMKernel(config((128, 128), (N, K), (1, 128), out=F32))
    kernel.process_weights_after_loading(layer)
    packed, x = layer.weight.detach(), inputs(64, K)
    if op == "w8a16":
        y = worker.call("fp8_scaled_mm_cpu", x, packed, scales, [128, 128], None, F32, True)
        reference = scaled_mm(x, weight, scales, (128, 128))
    else:
        A, As = kernel.quant_fp8(x)
        y = worker.call("fp8_w8a8_block_scaled_mm_cpu", A, packed, As, scales, [128, 128], None, F32, True)
        reference = w8a8_reference(kernel, x, weight, scales, (128, 128))
    assert compare(y, reference)
