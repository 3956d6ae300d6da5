"""Arguments of `route`, `choose_scaled_mm_linear_kernel` and what they take: a wrong one is refused in a sentence."""

import numpy as np
import pytest
import torch
from blockscale.kernels import (
    POSSIBLE_FP8_BLOCK_KERNELS,
    POSSIBLE_W8A16_KERNELS,
    CPUFp8BlockScaledMMKernel,
    FP8ScaledMMLinearLayerConfig,
    GroupShape,
    QuantKey,
    ScaleDesc,
    choose_scaled_mm_linear_kernel,
    get_scheme_from_parts,
    route,
)
from blockscale.kernels import base as base_module
from blockscale.kernels.schemes import InputQuant, WeightQuant
from checkpoint_configs import DEEPSEEK, LINEAR
from fp8_layers import config
from oracle import F32, FP8

ROUTE = [
    ({"platform": "tpu"}, "`platform` cpu, xpu, cuda, rocm, got tpu"),
    ({"platform": None}, "`platform` cpu, xpu, cuda, rocm, got None"),
    ({"platform": []}, "`platform` cpu, xpu, cuda, rocm, got []"),
    ({"linear_backend": None}, "`linear_backend` auto, cpu, xpu, xpu_woq, torch, got None"),
    ({"weight_shape": 5}, "`weight_shape` (N, K) or None, got 5"),
    ({"weight_shape": (5,)}, "`weight_shape` (N, K) or None, got (5,)"),
    ({"weight_shape": (5, 5, 5)}, "`weight_shape` (N, K) or None, got (5, 5, 5)"),
    ({"weight_shape": (True, 5)}, "`weight_shape` (N, K) or None, got (True, 5)"),
    ({"weight_shape": (5.0, 5)}, "`weight_shape` (N, K) or None, got (5.0, 5)"),
    ({"weight_shape": "55"}, "`weight_shape` (N, K) or None, got 55"),
    ({"weight_shape": (-1, 5)}, "`weight_shape` (N, K) of sides from 0 to 2^63 - 1, got (-1, 5)"),
    ({"weight_shape": (5, 2**63)}, "`weight_shape` (N, K) of sides from 0 to 2^63 - 1"),
    ({"weight_dtype": "fp8"}, "`weight_dtype` to be a torch.dtype, got fp8"),
    ({"input_dtype": None}, "`input_dtype` to be a torch.dtype, got None"),
    ({"out_dtype": 16}, "`out_dtype` to be a torch.dtype, got 16"),
    ({"scale_dtype": "float32"}, "`scale_dtype` to be a torch.dtype, got float32"),
    ({"capability": (True, 0)}, "`capability` (major, minor), 10 · major + minor, or None, got (True, 0)"),
    ({"capability": -90}, "`capability` (major, minor), 10 · major + minor, or None, got -90"),
    ({"capability": (90,)}, "`capability` (major, minor), 10 · major + minor, or None, got (90,)"),
    ({"capability": 9.0}, "`capability` (major, minor), 10 · major + minor, or None, got 9.0"),
    ({"force_kernel": int}, "`force_kernel` to be a kernel class, its name, or None, got <class 'int'>"),
    ({"force_kernel": 5}, "`force_kernel` to be a kernel class, its name, or None, got 5"),
    ({"force_kernel": "x"}, "`force_kernel` CPUFp8BlockScaledMMKernel"),
    ({"disabled": [5]}, "`disabled` to be a list of kernel classes or their names, got 5"),
    ({"disabled": [int]}, "`disabled` to be a list of kernel classes or their names, got <class 'int'>"),
    ({"disabled": 5}, "`disabled` to be a list of kernel classes or their names, got 5"),
    ({"disabled": None}, "`disabled` to be a list of kernel classes or their names, got None"),
    ({"disabled": "CPUFp8BlockScaledMMKernel"}, "`disabled` to be a list of kernel classes or their names, got CPUFp8"),
    ({"fused_shards": {"down_proj": 5}}, "`fused_shards` to map the last part of a fused layer's name"),
    ({"fused_shards": {"down_proj": "ab"}}, "got {'down_proj': 'ab'}"),
    ({"fused_shards": {"down_proj": [1]}}, "got {'down_proj': [1]}"),
    ({"fused_shards": {5: ["a"]}}, "got {5: ['a']}"),
    ({"fused_shards": ["down_proj"]}, "got ['down_proj']"),
]


@pytest.mark.parametrize("arguments, words", ROUTE, ids=lambda value: str(value)[:60])
def test_wrong_arguments_of_route(arguments, words):
    with pytest.raises(ValueError, match=": expected ") as error:
        route(DEEPSEEK, LINEAR, **arguments)
    assert words in str(error.value)


@pytest.mark.parametrize("name", [None, 5, "", b"x", ["x"]], ids=repr)
def test_a_layer_has_a_name(name):
    with pytest.raises(ValueError, match="route: expected `layer_name` to be the name of a layer, got "):
        route(DEEPSEEK, name)


def test_shapes_of_other_types_are_the_same_shape():
    shapes = [(576, 256), [576, 256], torch.Size([576, 256]), np.array([576, 256])]
    decisions = {route(DEEPSEEK, LINEAR, weight_shape=shape) for shape in shapes}
    assert len(decisions) == 1 and decisions.pop().config.weight_shape == (576, 256)
    assert route(DEEPSEEK, LINEAR, weight_shape=(0, 5)).kernel is CPUFp8BlockScaledMMKernel
    assert route(DEEPSEEK, LINEAR, out_dtype=None).kernel is CPUFp8BlockScaledMMKernel


CHOOSE = [
    ((None, []), "`config` to be an FP8ScaledMMLinearLayerConfig, got None"),
    ((config(), None), "`possible_kernels` to be a list of kernel classes, or such a list per platform, got None"),
    ((config(), CPUFp8BlockScaledMMKernel), "`possible_kernels` to be a list of kernel classes"),
    ((config(), ["CPUFp8BlockScaledMMKernel"]), "`possible_kernels` to be a list of kernel classes"),
    ((config(), {"cpu": None}), "`possible_kernels` to be a list of kernel classes"),
    ((config(platform="tpu"), POSSIBLE_FP8_BLOCK_KERNELS),
     "`platform` of the configuration to be one of cpu, xpu, cuda, rocm, got tpu"),
    ((config(platform=""), POSSIBLE_FP8_BLOCK_KERNELS), "`platform` of the configuration to be one of cpu"),
    ((config(), [CPUFp8BlockScaledMMKernel], "9.0"), "`capability` (major, minor)"),
    ((config(), [CPUFp8BlockScaledMMKernel], None, int), "`force_kernel` to be a kernel class, its name, or None"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, words", CHOOSE, ids=lambda value: str(value)[:40])
def test_wrong_arguments_of_the_choice(arguments, words):
    with pytest.raises(ValueError) as error:
        choose_scaled_mm_linear_kernel(*arguments)
    assert str(error.value).startswith("choose_scaled_mm_linear_kernel: expected ") and words in str(error.value)


@pytest.mark.parametrize("build, platform", [("hip", "rocm"), ("xpu", "xpu"), ("cuda", "cuda"), (None, "cpu")])
def test_no_platform_is_the_one_of_the_build(build, platform, monkeypatch):
    for name in ("hip", "xpu", "cuda"):
        monkeypatch.setattr(torch.version, name, "1.0" if name == build else None)
    assert base_module.build_platform() == platform
    lists = {"rocm": [], "xpu": [], "cuda": [], "cpu": [], platform: [CPUFp8BlockScaledMMKernel]}
    assert choose_scaled_mm_linear_kernel(config(), lists) is CPUFp8BlockScaledMMKernel


KEY = QuantKey(FP8, ScaleDesc(F32, True, GroupShape(128, 128)))
PARTS = [
    (lambda: FP8ScaledMMLinearLayerConfig("fp8"), "`weight_quant_key` to be a QuantKey, got fp8"),
    (lambda: FP8ScaledMMLinearLayerConfig(KEY, "fp8"), "`activation_quant_key` to be a QuantKey or None, got fp8"),
    (lambda: FP8ScaledMMLinearLayerConfig(KEY, None, 5), "`weight_shape` (N, K) or None, got 5"),
    (lambda: FP8ScaledMMLinearLayerConfig(KEY, None, (-1, 5)), "`weight_shape` (N, K) of sides from 0"),
    (lambda: FP8ScaledMMLinearLayerConfig(KEY, input_dtype=None), "`input_dtype` to be a torch.dtype, got None"),
    (lambda: FP8ScaledMMLinearLayerConfig(KEY, out_dtype="bf16"), "`out_dtype` to be a torch.dtype, got bf16"),
    (lambda: FP8ScaledMMLinearLayerConfig(KEY, platform=5), "`platform` to be the name of a platform or None, got 5"),
    (lambda: QuantKey("fp8", KEY.scale), "`dtype` to be a torch.dtype, got fp8"),
    (lambda: QuantKey(FP8, None), "`scale` to be a ScaleDesc, got None"),
    (lambda: ScaleDesc("float32", True, GroupShape(1, 1)), "`dtype` to be a torch.dtype, got float32"),
    (lambda: ScaleDesc(F32, True, 128), "`group_shape` of two sides, each positive or -1 for the whole side, got 128"),
    (lambda: ScaleDesc(F32, True, GroupShape(0, 128)), "`group_shape` of two sides"),
    (lambda: ScaleDesc(F32, True, GroupShape(-2, 128)), "`group_shape` of two sides"),
    (lambda: ScaleDesc(F32, True, GroupShape(2**63, 128)), "`group_shape` of two sides"),
    (lambda: WeightQuant("diagonal"), "`strategy` block, channel or tensor, got diagonal"),
    (lambda: WeightQuant("block"), "`block_size` of two positive integers [block_n, block_k] below 2^63, got None"),
    (lambda: WeightQuant("channel", (1, 1)), "no `block_size` beside `strategy` channel, got (1, 1)"),
    (lambda: InputQuant("block"), "`strategy` group, token or tensor, got block"),
    (lambda: InputQuant("group"), "`group_size` positive, got None"),
    (lambda: InputQuant("group", 0), "`group_size` positive, got 0"),
    (lambda: InputQuant("token", 128), "no `group_size` beside `strategy` token, got 128"),
    (lambda: get_scheme_from_parts("fp8", None), "`weight_quant` to be a WeightQuant, a mapping or None, got fp8"),
    (lambda: get_scheme_from_parts(WeightQuant("tensor"), "x"), "`input_quant` to be an InputQuant, a mapping or None"),
    (lambda: get_scheme_from_parts(None, InputQuant("token")), "`weight_quant` beside `input_quant`, got none"),
]


@pytest.mark.parametrize("make, words", PARTS, ids=[words for _, words in PARTS])
def test_what_a_choice_is_made_of(make, words):
    with pytest.raises(ValueError, match=": expected ") as error:
        make()
    assert words in str(error.value)
    assert choose_scaled_mm_linear_kernel(FP8ScaledMMLinearLayerConfig(KEY), POSSIBLE_W8A16_KERNELS["cpu"])
