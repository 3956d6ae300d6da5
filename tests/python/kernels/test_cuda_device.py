"""The class over torch._scaled_mm on a real GPU of compute capability 9.0 (Hopper).

pytest -m cuda tests/python/kernels/test_cuda_device.py        # under 4 minutes
"""

import pytest
import torch
from blockscale import reference
from blockscale.kernels import BlockWiseTorchFP8ScaledMMLinearKernel as Kernel
from blockscale.kernels import route
from blockscale.kernels.quant_keys import quantize_groups
from fp8_layers import codes, config, generator, grid, make_layer
from oracle import BF16, F16, FP8

_SUPPORTED, _REASON = Kernel.is_supported() if torch.cuda.is_available() else (False, "no CUDA device")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not _SUPPORTED, reason=str(_REASON))]


def device_layer(N, K, out=BF16):
    layer = make_layer(codes(N, K).cuda(), grid(N, K, (128, 128)).cuda())
    kernel = Kernel(config((128, 128), (N, K), (1, 128), out=out, platform="cuda"))
    kernel.process_weights_after_loading(layer)
    return kernel, layer


def native(x, weight, scales, dtype):
    """The float64 product of the same codes, rounded to `dtype`: quantisation itself is not judged here."""
    A, As = quantize_groups(x, 128)
    return reference.native_w8a8_block_matmul(A.cpu(), weight.cpu(), As.cpu(), scales.cpu(), [128, 128], dtype)


def relative(y, ref):
    return float((y.double().cpu() - ref.double()).abs().mean() / ref.double().abs().mean())


def test_the_engines_criterion():
    """M = 83, N = 576, K = 7168: mean relative difference below 0.001."""
    M, N, K = 83, 576, 7168
    weight = (torch.rand(N, K, generator=generator("B")) * 896 - 448).to(FP8)
    scales = torch.rand(5, 56, generator=generator("Bs")) * 0.01
    layer = make_layer(weight.cuda(), scales.cuda())
    kernel = Kernel(config((128, 128), (N, K), (1, 128), platform="cuda"))
    kernel.process_weights_after_loading(layer)
    x = (torch.rand(M, K, generator=generator("A")) * 896 - 448).to(BF16).cuda()
    assert relative(kernel.apply_weights(layer, x), native(x, weight, scales, BF16)) < 0.001


@pytest.mark.parametrize("out", [BF16, F16], ids=str)
@pytest.mark.parametrize("N, K", [(576, 7168), (2112, 7168), (1368, 1368), (16, 128), (520, 576), (7168, 2048)])
@pytest.mark.parametrize("M", [1, 3, 4, 83])
def test_shapes(M, N, K, out):
    """Columns of blocks that no 4 divides (576, 1368) show whether the layout of the scales is right."""
    kernel, layer = device_layer(N, K, out)
    x = torch.randn(M, K, generator=generator(M, K)).to(BF16).cuda()
    y = kernel.apply_weights(layer, x)
    assert y.shape == (M, N) and y.dtype == out
    assert relative(y, native(x, codes(N, K), grid(N, K, (128, 128)), torch.float64)) < 0.004


def test_capture_in_a_graph():
    kernel, layer = device_layer(576, 1024)
    x = torch.randn(5, 1024, generator=generator("graph")).to(BF16).cuda()
    bias = torch.randn(576, device="cuda", dtype=BF16)
    expected = kernel.apply_weights(layer, x, bias)
    static = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kernel.apply_weights(layer, static, bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.apply_weights(layer, static, bias)
    static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_the_route_asks_the_device():
    config_of_checkpoint = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert route(config_of_checkpoint, "model.layers.0.mlp.down_proj", platform="cuda").kernel is Kernel
