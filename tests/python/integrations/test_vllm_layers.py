"""Layers that the hooked linear methods load: fused and shared out over ranks, each against the whole weight."""

from __future__ import annotations

import importlib

import pytest
import torch
from fake_vllm import QUANTIZATION, Layer, Version, install

BLOCK = (128, 128)
GEOMETRIES = {
    "q576-k192-v192": ([576, 192, 192], 320),
    "gate704-up704": ([704, 704], 320),
    "aligned": ([256, 128, 128], 256),
    "odd": ([130, 66, 34], 200),
}


@pytest.fixture
def method(monkeypatch):
    """The linear method of a vLLM with the plugin."""
    for name in ("BLOCKSCALE_VLLM", "BLOCKSCALE_DISABLED_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    modules = install(monkeypatch, Version())
    importlib.import_module("blockscale.integrations.vllm").register()
    return modules[f"{QUANTIZATION}.fp8"].Fp8LinearMethod


def shard(rows: int, columns: int, seed: int):
    """Codes, and scales that are powers of two: a misplaced one is off by that factor."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(1, 8, (rows, columns), generator=generator).float().to(torch.float8_e4m3fn)
    grid = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    return codes, 2.0 ** torch.randint(-9, 9, grid, generator=generator)


def dequantised(codes, scales):
    rows, columns = codes.shape
    whole = scales.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
    return codes.double() * whole.double()


def load(method, layer, shards):
    linear = method(BLOCK)
    linear.create_weights(layer, layer.columns, layer.widths, layer.whole[1], layer.whole[0], torch.bfloat16)
    for index, (codes, scales) in enumerate(shards):
        layer.weight.weight_loader(layer.weight, codes.view(torch.float8_e4m3fn), index)
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scales, index)
    linear.process_weights_after_loading(layer)
    return linear


def part(weight, layer, size):
    rows, columns = size // layer.row_ranks, layer.columns
    row = layer.rank * rows if layer.row_ranks > 1 else 0
    column = layer.rank * columns if layer.column_ranks > 1 else 0
    return weight[row : row + rows, column : column + columns]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_fused_layers_over_ranks(method, name, ranks):
    sizes, K = GEOMETRIES[name]
    shards = [shard(size, K, index) for index, size in enumerate(sizes)]
    for rank in range(ranks):
        layer = Layer(f"layers.0.{name}", sizes, K, rank, ranks)
        linear = load(method, layer, shards)
        weight = torch.cat([part(dequantised(*one), layer, size) for one, size in zip(shards, sizes, strict=True)])
        out = linear.apply(layer, torch.eye(K))
        assert torch.equal(out.double(), weight.t())


@pytest.mark.parametrize("K", [576, 704, 512])
@pytest.mark.parametrize("rank", [0, 1])
def test_columns_over_ranks(method, K, rank):
    codes, scales = shard(320, K, 7)
    layer = Layer("layers.0.o_proj", [320], K, rank, 2, split_k=True)
    linear = load(method, layer, [(codes, scales)])
    weight = part(dequantised(codes, scales), layer, 320)
    assert torch.equal(linear.apply(layer, torch.eye(layer.columns)).double(), weight.t())


def test_without_the_plugin_the_same_loader_misplaces_scales(monkeypatch):
    """What the tests above would miss if the fake did not do what vLLM does."""
    modules = install(monkeypatch, Version())
    sizes, K = GEOMETRIES["q576-k192-v192"]
    layer = Layer("layers.0.qkv_proj", sizes, K)
    layer.allow_fp8_block_shape_mismatch = True
    shards = [shard(size, K, index) for index, size in enumerate(sizes)]
    load(modules[f"{QUANTIZATION}.fp8"].Fp8LinearMethod, layer, shards)
    assert torch.equal(layer.weight_scale_inv[5], shards[1][1][0])  # k begins in block 4
    assert not torch.equal(layer.weight_scale_inv[6], shards[1][1][1])  # v has overwritten it


def test_a_cut_layer_that_another_kernel_takes_is_refused(method, monkeypatch):
    monkeypatch.setenv("BLOCKSCALE_DISABLED_KERNELS", "CPUFp8BlockScaledMMKernel,CPUFp8W8A8BlockScaledMMKernel")
    sizes, K = GEOMETRIES["q576-k192-v192"]
    layer = Layer("layers.0.qkv_proj", sizes, K)
    with pytest.raises(ValueError, match=r"layer `layers.0.qkv_proj`: expected shards of multiples of block_n = 128"):
        load(method, layer, [shard(size, K, 0) for size in sizes])


def test_missing_and_misshapen_scales(method):
    sizes, K = GEOMETRIES["q576-k192-v192"]
    shards = [shard(size, K, index) for index, size in enumerate(sizes)]
    layer = Layer("layers.0.qkv_proj", sizes, K)
    with pytest.raises(ValueError, match=r"layer `layers.0.qkv_proj`: .*written by the load.*checkpoint /models/one"):
        load(method, layer, shards[:2])
    for wrong in (shards[1][1][:1], shards[1][1].repeat(1, 2), shards[1][1].int(), torch.ones(3)):
        layer = Layer("layers.0.qkv_proj", sizes, K)
        words = r"layer `layers.0.qkv_proj`: expected `weight_scale_inv` of shard `1` .*\(checkpoint /models/one\)"
        with pytest.raises(ValueError, match=words):
            load(method, layer, [shards[0], (shards[1][0], wrong), shards[2]])


def test_too_large_a_grid_is_not_cut_to_fit(method):
    codes, scales = shard(256, 256, 1)
    layer = Layer("layers.0.down_proj", [256], 256)
    with pytest.raises(ValueError, match=r"= \[2, 2\] for N = 256, K = 256, blocks of 128 x 128, got \[2, 4\]"):
        load(method, layer, [(codes, scales.repeat(1, 2))])


def test_a_weight_that_the_engine_reads_itself_stays_plain(method):
    codes, scales = shard(256, 256, 1)
    layer = Layer("layers.0.kv_b_proj", [256], 256)
    layer._cpu_skip_gemm_dispatch = True
    linear = load(method, layer, [(codes, scales)])
    assert layer.engine_processed
    assert torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(linear.apply(layer, torch.eye(256)).double(), dequantised(codes, scales).t())


def test_a_fused_layer_of_a_method_without_hooks_is_refused(method):
    """Its scales were loaded by vLLM alone."""
    from blockscale.integrations.vllm_kernels import BlockscaleFp8BlockLinearKernel

    layer = Layer("layers.0.qkv_proj", [576, 192, 192], 320)
    linear = method(BLOCK)
    linear.create_weights(layer, 320, layer.widths, 320, 960, torch.bfloat16)
    kernel = BlockscaleFp8BlockLinearKernel(linear.fp8_linear.config)
    layer.weight_scale_inv = torch.nn.Parameter(torch.ones(8, 3), requires_grad=False)
    with pytest.raises(
        ValueError, match="expected shards of multiples of block_n = 128 rows from a linear method that"
    ):
        kernel.process_weights_after_loading(layer)
