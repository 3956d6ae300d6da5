"""The class over torch._scaled_mm, run on this machine against the contract of the CUDA op, and once against an
emulation of how a Hopper GPU accumulates."""

import copy

import pytest
import torch
from blockscale import reference
from blockscale.kernels import BlockWiseTorchFP8ScaledMMLinearKernel
from blockscale.kernels import cuda as module
from contracts import ScaledMM
from fp8_layers import block_layer, codes, config, frozen, generator, make_layer
from oracle import BF16, E8M0, F16, F32, FP8, U8, compare, decode, expand_scales, scaled_mm
from torch.utils._python_dispatch import TorchDispatchMode

Kernel = BlockWiseTorchFP8ScaledMMLinearKernel
DEEPSEEK = (83, 576, 7168)


@pytest.fixture
def contract(monkeypatch):
    fake = ScaledMM()
    monkeypatch.setattr(torch, "_scaled_mm", fake)
    return fake


def cuda_config(N, K, **changes):
    return config((128, 128), (N, K), (1, 128), platform="cuda", **changes)


def inputs(M, K, dtype=BF16):
    return torch.randn(M, K, generator=generator("cuda", M, K)).to(dtype)


def expected(kernel, x, weight, scales, bias=None):
    rows = x.reshape(-1, x.shape[-1])
    A, As = torch.ops.blockscale.per_token_group_quant_fp8(rows, 128, 1e-10, False, kernel.quant_fp8.use_ue8m0)
    return scaled_mm(decode(A) * expand_scales(As.double(), *A.shape, (1, 128)), weight, scales, (128, 128), bias)


def prepared(N, K, seed=0, **changes):
    layer = block_layer(N, K, seed=seed)
    tensors = layer.weight.detach().clone(), layer.weight_scale_inv.detach().clone()
    kernel = Kernel(cuda_config(N, K, **changes))
    kernel.process_weights_after_loading(layer)
    return kernel, layer, *tensors


# ----------------------------------------------------------------------------------------------------------- the result
@pytest.mark.parametrize("M", [1, 2, 3, 4, 5, 8, 83])
@pytest.mark.parametrize("out", [BF16, F16], ids=str)
def test_rows_are_padded_with_zeros_and_sliced_off(contract, M, out):
    """The block mode takes M in multiples of 4, its scales column-major; padding with what memory holds gives NaN."""
    kernel, layer, weight, scales = prepared(576, 1024, out=out)
    x = inputs(M, 1024)
    y = kernel.apply_weights(layer, x)
    assert y.shape == (M, 576) and y.dtype == out
    assert compare(y, expected(kernel, x, weight, scales))
    call = contract.calls[-1]
    assert call["M"] == -(-M // 4) * 4 and call["scale_a"].stride(0) == 1
    assert (decode(call["A"][M:]) == 0).all() and torch.isfinite(call["scale_a"]).all()


@pytest.mark.parametrize("N", [1368, 16, 1, 15, 17, 576, 2112, 520, 448, 128])
@pytest.mark.parametrize("K", [1368, 16, 1, 15, 17, 128, 576])
def test_sides_that_are_no_multiple_of_16_bytes(contract, N, K):
    """ "trailing dimension must be divisible by 16": shards of 10944 / 8 = 1368."""
    kernel, layer, weight, scales = prepared(N, K)
    bias = torch.randn(N, generator=generator("bias", N)).to(BF16)
    for M in (1, 6):
        x = inputs(M, K)
        y = kernel.apply_weights(layer, x)
        assert y.shape == (M, N) and compare(y, expected(kernel, x, weight, scales))
        assert torch.equal(kernel.apply_weights(layer, x, bias), y + bias)
    assert bias.shape == (N,), "the bias is not resized in place"


@pytest.mark.parametrize("K", [128, 384, 576, 640, 1368, 1536, 7168])
@pytest.mark.parametrize("rule", ["compact", "rounded"])
@pytest.mark.parametrize("returns_tuple", [False, True], ids=["tensor", "tuple"])
def test_one_layout_of_scale_b_serves_old_and_new_torch(monkeypatch, K, rule, returns_tuple):
    monkeypatch.setattr(torch, "_scaled_mm", ScaledMM(rule, returns_tuple))
    kernel, layer, weight, scales = prepared(320, K)
    x = inputs(3, K)
    assert compare(kernel.apply_weights(layer, x), expected(kernel, x, weight, scales))


@pytest.mark.parametrize("lead", [(2, 3), (1, 1, 5), ()], ids=str)
def test_any_rank_of_x(contract, lead):
    kernel, layer, weight, scales = prepared(48, 256)
    x = torch.randn(*lead, 256, generator=generator(lead)).to(BF16)
    y = kernel.apply_weights(layer, x)
    assert y.shape == (*lead, 48)
    assert compare(y.reshape(-1, 48), expected(kernel, x.reshape(-1, 256), weight, scales))


@pytest.mark.parametrize("M", [1, 2, 3, 4, 83])
@pytest.mark.parametrize("column_major", [False, True])
def test_codes_that_come_quantised(contract, M, column_major):
    """Engines fuse the quantisation into another op and call the product alone."""
    kernel, layer, weight, scales = prepared(576, 1024)
    x = inputs(M, 1024)
    A, As = torch.ops.blockscale.per_token_group_quant_fp8(x, 128, 1e-10, column_major, False)
    y = kernel.apply_block_scaled_mm(A, layer.weight, As, layer.weight_scale_inv)
    assert torch.equal(y, kernel.apply_weights(layer, x))


def test_no_rows(contract):
    kernel, layer, *_ = prepared(48, 256)
    assert kernel.apply_weights(layer, torch.empty(2, 0, 256, dtype=BF16)).shape == (2, 0, 48)
    assert not contract.calls


@pytest.mark.parametrize("N, K", [(48, 0), (0, 256)])
def test_sides_of_no_length(contract, N, K):
    kernel, layer, *_ = prepared(N, K)
    bias = torch.randn(N, generator=generator("bias")).to(BF16)
    y = kernel.apply_weights(layer, torch.ones(2, 3, K, dtype=BF16), bias)
    assert torch.equal(y, bias.expand(2, 3, N))
    with pytest.raises(ValueError, match=r"expected `x` of shape .* got \[\]"):
        kernel.apply_weights(layer, torch.ones(()))


@pytest.mark.parametrize("scale", [F32, BF16, E8M0], ids=str)
def test_stored_scales_are_widened(contract, scale):
    exponents = torch.randint(-9, -2, (2, 3), generator=generator("cuda scales"))
    stored = (exponents + 127).to(U8).view(E8M0) if scale == E8M0 else (2.0**exponents).to(scale)
    layer = make_layer(codes(200, 300), stored, "weight_scale")
    kernel = Kernel(cuda_config(200, 300, scale=scale))
    kernel.process_weights_after_loading(layer)
    x = inputs(2, 300)
    assert compare(kernel.apply_weights(layer, x), expected(kernel, x, codes(200, 300), 2.0**exponents))


def test_ue8m0_activations(contract):
    kernel, layer, weight, scales = prepared(48, 256, activation_scale=E8M0)
    x = inputs(5, 256)
    assert compare(kernel.apply_weights(layer, x), expected(kernel, x, weight, scales))
    assert (torch.frexp(contract.calls[-1]["scale_a"])[0] == 0.5).all()


def test_bias_is_added_outside(contract):
    kernel, layer, weight, scales = prepared(48, 256)
    x = inputs(5, 256)
    bias = torch.randn(48, generator=generator("bias")).to(BF16)
    plain = kernel.apply_weights(layer, x)
    assert torch.equal(kernel.apply_weights(layer, x, bias), plain + bias)


# ------------------------------------------------------------------------------------------------------------- reloads
def test_load_a_then_b_then_a_equals_a_fresh_load(contract):
    kernel, layer, *a = prepared(520, 1368, seed=1)
    x = inputs(3, 1368)
    result, fresh = kernel.apply_weights(layer, x), [p.detach().clone() for p in layer.parameters()]
    kernel.process_weights_after_loading(layer)  # once more, without a load
    b = block_layer(520, 1368, seed=2)
    for weight, scales in ((b.weight, b.weight_scale_inv), a):
        layer.weight, layer.weight_scale_inv = frozen(weight.clone()), frozen(scales.clone())
        kernel.process_weights_after_loading(layer)
    for parameter, before in zip(layer.parameters(), fresh, strict=True):
        assert parameter.shape == before.shape and torch.equal(parameter.view(U8), before.view(U8))
    assert torch.equal(kernel.apply_weights(layer, x), result)
    assert torch.equal(kernel.apply_weights(copy.deepcopy(layer), x), result)


def test_shards_that_cut_a_block_are_refused():
    layer = block_layer(2112, 256, logical_widths=[576, 1536], scale_grid_per_shard=True)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj`: expected shards that end at multiples of 128"):
        Kernel(cuda_config(2112, 256)).process_weights_after_loading(layer)


# ------------------------------------------------------------------------------------------------------- no host sync
class NoHostSync(TorchDispatchMode):
    """Fails on ops that wait for the device: they break the capture of a CUDA graph."""

    WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ not in self.WAITING, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("N, K", [(576, 1024), (520, 1368)])
def test_a_call_waits_for_nothing(contract, N, K, monkeypatch):
    kernel, layer, *_ = prepared(N, K)
    monkeypatch.setattr("blockscale.kernels.quant_keys.has_op", lambda name: False)  # as on a GPU
    fake_result = torch.zeros(8, layer.weight.shape[0], dtype=BF16)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: fake_result)
    with NoHostSync():
        kernel.apply_weights(layer, inputs(5, K), torch.zeros(N, dtype=BF16))
    with pytest.raises(AssertionError, match="waits for the device"), NoHostSync():
        torch.ones(1).item()


@pytest.mark.parametrize("M", [1, 5])
def test_the_quantiser_of_a_gpu_gives_the_same_result(contract, M, monkeypatch):
    kernel, layer, weight, scales = prepared(64, 640)
    x = inputs(M, 640)
    here = kernel.apply_weights(layer, x)
    monkeypatch.setattr("blockscale.kernels.quant_keys.has_op", lambda name: False)
    assert torch.equal(kernel.apply_weights(layer, x), here)


# ------------------------------------------------------------------------------------------------------------- support
@pytest.mark.parametrize(
    "capability, word",
    [
        (90, None),
        ((9, 0), None),
        (80, "8.0"),
        (89, "8.9"),
        (100, "10.0"),
        (120, "12.0"),
        ((10, 3), "10.3"),
        (70, "7.0"),
    ],
)
def test_only_sm90(capability, word, monkeypatch):
    able, reason = Kernel.is_supported(capability)
    assert able == (word is None) and (able or (word in reason and "SM90" in reason))


def test_the_capability_is_that_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Kernel.is_supported() == (False, "no CUDA device, and no compute capability is given")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, able in (((9, 0), True), ((8, 9), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=device: device)
        assert Kernel.is_supported()[0] == able


@pytest.mark.parametrize("version, able", [("12.8", False), ("12.9", True), ("13.0", True), ("11.8", False)])
def test_cublaslt_of_12_9_is_needed(version, able, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", version)
    assert Kernel.is_supported(90)[0] == able


def test_torch_without_the_op(monkeypatch):
    monkeypatch.delattr(torch, "_scaled_mm")
    assert "no torch._scaled_mm" in Kernel.is_supported(90)[1]


@pytest.mark.parametrize("platform", ["rocm", "xpu"])
def test_elsewhere_a_probe_decides(platform):
    able, reason = Kernel.can_implement(config((128, 128), None, (1, 128), platform=platform))
    assert not able and f"no {platform} device" in reason


@pytest.mark.parametrize("answer", ["takes", "refuses"])
def test_the_probe_asks_torch(answer, monkeypatch):
    def scaled_mm_there(*_, **__):
        if answer == "refuses":
            raise ValueError("Invalid scaling configuration.\nmore")

    module._probe.cache_clear()
    monkeypatch.setattr(module, "build_platform", lambda: "xpu")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm_there)
    real = {name: getattr(torch, name) for name in ("zeros", "ones")}
    for name, function in real.items():
        monkeypatch.setattr(torch, name, lambda *a, function=function, **k: function(*a, **{**k, "device": "cpu"}))
    able, reason = Kernel.is_supported()
    module._probe.cache_clear()
    assert able == (answer == "takes") and (able or reason.endswith("on xpu: Invalid scaling configuration."))


REFUSED = [
    (config((64, 128), None, (1, 128)), "64 x 128"),
    (config((128, 64), None, (1, 64)), "128 x 64"),
    (config((1, 128), None, (1, 128)), "1 x 128"),
    (config((128, 128), None, (1, 64)), "1 x 64"),
    (config((-1, 1), None, (1, -1)), "BLOCK"),
    (config((-1, -1), None, (-1, -1), static=True), "BLOCK"),
    (config((128, 128), None, (-1, -1), static=True), "static"),
    (config((128, 128)), "16 bits"),
    (config((128, 128), None, (1, 128), out=F32), "float32"),
    (config((128, 128), None, (1, 128), dtype=torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
]


@pytest.mark.parametrize("refused, word", REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refusals_name_what_came(refused, word):
    able, reason = Kernel.can_implement(refused)
    assert not able and word in reason


def test_wrong_x_is_named(contract):
    kernel, layer, *_ = prepared(48, 200)
    with pytest.raises(ValueError, match=r"expected `x` of shape \[..., K\] with K = 200, got \[3, 512\]"):
        kernel.apply_weights(layer, inputs(3, 512))


# ---------------------------------------------------------------------------------------------------------- differences
def uniform_layer(N, K):
    """Codes uniform in +-448 and scales uniform in 0..0.01, as the engines' own test of this class draws them."""
    weight = (torch.rand(N, K, generator=generator("B")) * 896 - 448).to(FP8)
    scales = torch.rand(-(-N // 128), -(-K // 128), generator=generator("Bs")) * 0.01
    return make_layer(weight, scales), weight, scales


def relative(y, ref):
    return float((y.double() - ref).abs().mean() / ref.abs().mean())


def test_deepseek_shape_against_the_contract(contract):
    M, N, K = DEEPSEEK
    layer, weight, scales = uniform_layer(N, K)
    kernel = Kernel(cuda_config(N, K))
    kernel.process_weights_after_loading(layer)
    x = (torch.rand(M, K, generator=generator("A")) * 896 - 448).to(BF16)
    y = kernel.apply_weights(layer, x)
    reference_result = expected(kernel, x, weight, scales)
    assert compare(y, reference_result)
    assert relative(y, reference_result.y) <= 2.0**-9  # one rounding to bf16, and nothing else


def emulated_hopper(A, B, scale_a, scale_b):
    """One Hopper accumulation per k-block of 128, promoted with the scales in float32."""
    mmaemu = pytest.importorskip("mmaemu")
    total = torch.zeros(A.shape[0], B.shape[1])
    rows = torch.arange(B.shape[1]) // 128
    for block in range(A.shape[1] // 128):
        part = slice(128 * block, 128 * block + 128)
        chain = mmaemu.accumulate(A[:, part], B[part].t(), use_fast_accum=True, splitk=1)
        total += chain * (scale_a[:, block, None] * scale_b[block, rows])
    return total.double()


def test_deepseek_shape_as_a_hopper_gpu_accumulates(monkeypatch):
    pytest.importorskip("mmaemu")
    M, N, K = DEEPSEEK
    layer, weight, scales = uniform_layer(N, K)
    kernel = Kernel(cuda_config(N, K))
    kernel.process_weights_after_loading(layer)
    x = (torch.rand(M, K, generator=generator("A")) * 896 - 448).to(BF16)
    results = {}
    for name, multiply in (("exact", None), ("hopper", emulated_hopper)):
        monkeypatch.setattr(torch, "_scaled_mm", ScaledMM(multiply=multiply))
        results[name] = kernel.apply_weights(layer, x)
    # The engines' criterion: mean relative difference to the native block product, both rounded to the output dtype.
    A, As = torch.ops.blockscale.per_token_group_quant_fp8(x, 128, 1e-10, False, False)
    native = reference.native_w8a8_block_matmul(A, weight, As, scales, [128, 128], BF16)
    assert relative(results["exact"], native.double()) < 0.001
    assert 0 < relative(results["hopper"], native.double()) < 0.001
