"""From parts to a scheme, and from the arguments of a compressed-tensors group to parts."""

import itertools

import pytest
from blockscale.kernels import get_scheme_from_parts
from blockscale.kernels.fields import parse_block_size
from blockscale.kernels.schemes import (
    LINEAR_BACKENDS,
    PLATFORMS,
    InputQuant,
    WeightQuant,
    read_input_args,
    read_weight_args,
)

FP8 = {"type": "float", "num_bits": 8}
BLOCK, CHANNEL, TENSOR = WeightQuant("block", (128, 128)), WeightQuant("channel"), WeightQuant("tensor")
GROUP, TOKEN, STATIC = InputQuant("group", 128), InputQuant("token"), InputQuant("tensor", static=True)
CAPABILITIES = (None, 80, 89, (9, 0), 94, 100)


def expected(weight, activation, platform, capability, backend):
    """The rule, in other words than the code's."""
    suffix = "_block" if weight is BLOCK else ""
    if platform == "cpu":
        return "w8a16" + suffix
    if platform == "xpu":
        eight = weight is BLOCK or (activation is not None and backend in {"xpu", "torch"})
        return ("w8a8" if eight else "w8a16") + suffix
    number = capability if not isinstance(capability, tuple) else capability[0] * 10 + capability[1]
    able = number is None or number >= {"cuda": 89, "rocm": 94}[platform]
    return ("w8a8" if able and activation is not None else "w8a16") + suffix


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
def test_every_combination(platform, backend):
    parts = itertools.product((BLOCK, CHANNEL, TENSOR), (None, GROUP, TOKEN, STATIC), CAPABILITIES)
    for weight, activation, capability in parts:
        scheme = get_scheme_from_parts(
            weight, activation, platform=platform, capability=capability, linear_backend=backend
        )
        assert scheme == expected(weight, activation, platform, capability, backend), (weight, activation, capability)
        unquantized = get_scheme_from_parts(None, None, platform=platform, capability=capability)
        assert unquantized == "unquantized"


def test_a_platform_without_a_capability_number_is_not_taken_for_an_old_one():
    """No number on XPU made a block checkpoint weight-only, whose kernel takes channels and tensors alone."""
    weights = {**FP8, "strategy": "block", "block_structure": [128, 128]}
    activations = {**FP8, "strategy": "group", "group_size": 128, "dynamic": True}
    for backend in LINEAR_BACKENDS:
        scheme = get_scheme_from_parts(weights, activations, platform="xpu", capability=None, linear_backend=backend)
        assert scheme == "w8a8_block"
    assert get_scheme_from_parts(weights, activations, platform="cuda", capability=None) == "w8a8_block"
    assert get_scheme_from_parts(weights, None, platform="cuda", capability=90) == "w8a16_block"


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"platform": "tpu"}, "`platform` cpu, xpu, cuda, rocm, got tpu"),
        ({"linear_backend": "marlin"}, "`linear_backend` auto, cpu, xpu, xpu_woq, torch, got marlin"),
        ({"capability": "9.0"}, "`capability` (major, minor), 10 · major + minor, or None, got 9.0"),
        ({"capability": (9,)}, "got (9,)"),
        ({"capability": True}, "got True"),
    ],
)
def test_arguments_without_a_meaning(arguments, words):
    with pytest.raises(ValueError) as error:
        get_scheme_from_parts(BLOCK, GROUP, **arguments)
    assert words in str(error.value)


# -------------------------------------------------------------------------------------------------------------- weights
WEIGHTS = [
    ({"strategy": "block", "block_structure": [128, 128]}, BLOCK),
    ({"strategy": "block"}, BLOCK),  # either signal is enough
    ({"block_structure": [128, 128]}, BLOCK),
    ({"block_structure": "128x128"}, BLOCK),
    ({"strategy": "block", "block_structure": "64 x 128"}, WeightQuant("block", (64, 128))),
    ({"strategy": "block", "block_structure": (32, 32)}, WeightQuant("block", (32, 32))),
    ({"strategy": "channel", "group_size": None, "block_structure": None}, CHANNEL),
    ({"strategy": "channel", "group_size": -1}, CHANNEL),
    ({"group_size": -1}, CHANNEL),
    ({"strategy": "tensor"}, TENSOR),
    ({}, TENSOR),
    ({"strategy": "group", "group_size": 32}, WeightQuant("block", (1, 32))),
    ({"group_size": 128}, WeightQuant("block", (1, 128))),
    ({"strategy": "tensor", "symmetric": True, "dynamic": False, "observer": "minmax", "actorder": None}, TENSOR),
]


@pytest.mark.parametrize("args, weight", WEIGHTS, ids=str)
def test_weight_arguments(args, weight):
    assert read_weight_args("here", "weights", {**FP8, **args}) == weight


@pytest.mark.parametrize(
    "args, words",
    [
        ({"strategy": "channel", "block_structure": [128, 128]}, "`weights.strategy` block beside `block_structure`"),
        ({"strategy": "tensor", "block_structure": "128x128"}, "`weights.strategy` block beside `block_structure`"),
        ({"strategy": "channel", "group_size": 128}, "`weights.strategy` group beside `group_size` 128, got channel"),
        ({"strategy": "group"}, "`weights.group_size` positive beside strategy group, got None"),
        ({"strategy": "group", "group_size": 0}, "`weights.group_size` positive, got 0"),
        ({"strategy": "token"}, "`weights.strategy` block, channel, tensor or group, got token"),
        ({"strategy": "tensor", "dynamic": True}, "`weights.dynamic` false"),
        ({"strategy": "block", "block_structure": [128]}, "`weights.block_structure` of two positive integers"),
        ({"strategy": "block", "block_structure": "128xK"}, "got 128xK"),
        ({"strategy": "block", "block_structure": [0, 128]}, "got [0, 128]"),
        ({"strategy": "block", "block_structure": [True, 128]}, "got [True, 128]"),
        ({"strategy": "block", "block_structure": [128.0, 128.0]}, "got [128.0, 128.0]"),
    ],
)
def test_weight_arguments_that_contradict_themselves(args, words):
    with pytest.raises(ValueError) as error:
        read_weight_args("layer `x`", "weights", {**FP8, **args})
    assert str(error.value).startswith("layer `x`: expected ") and words in str(error.value)


@pytest.mark.parametrize(
    "args, name",
    [
        ({"type": "int", "num_bits": 4}, "int4"),
        ({"type": "int", "num_bits": 8}, "int8"),
        ({"type": "float", "num_bits": 4}, "float4"),
        ({"num_bits": 8}, "int8"),
        ({**FP8, "symmetric": False}, "zero points"),
    ],
)
def test_formats_that_are_not_fp8_are_named(args, name):
    for read in (
        lambda: read_weight_args("here", "weights", args),
        lambda: read_input_args("here", "input_activations", args, BLOCK),
        lambda: get_scheme_from_parts(args, None),
    ):
        with pytest.raises(NotImplementedError, match=name):
            read()


@pytest.mark.parametrize("text", ["128x128", "128 x 128", "[128, 128]", "128,128", "(128, 128)", "128×128"])
def test_block_sizes_as_text(text):
    assert parse_block_size("here", "block_structure", text) == (128, 128)


# ---------------------------------------------------------------------------------------------------------- activations
INPUTS = [
    ({"strategy": "group", "group_size": 128, "dynamic": True}, BLOCK, "group128"),
    ({"strategy": "group", "dynamic": True}, WeightQuant("block", (64, 64)), "group64"),
    ({"strategy": "group", "dynamic": True}, CHANNEL, "group128"),
    ({"group_size": 32, "dynamic": True, "scale_dtype": "torch.float8_e8m0fnu"}, BLOCK, "group32"),
    ({"group_size": 128, "dynamic": True, "scale_dtype": "torch.float8_e8m0fnu"}, BLOCK, "group128_ue8m0"),
    ({"group_size": 128, "dynamic": True, "scale_dtype": "torch.uint8"}, BLOCK, "group128_ue8m0"),
    ({"group_size": 128, "dynamic": True, "scale_dtype": "torch.bfloat16"}, BLOCK, "group128"),
    ({"strategy": "token", "dynamic": True}, CHANNEL, "token"),
    ({"strategy": "token", "dynamic": True}, BLOCK, "token"),
    ({"strategy": "tensor", "dynamic": True}, TENSOR, "token"),
    ({"strategy": "tensor", "dynamic": False}, TENSOR, "tensor_static"),
    ({"strategy": "tensor"}, TENSOR, "tensor_static"),
    ({"group_size": -1, "dynamic": "local"}, CHANNEL, "token"),
]


@pytest.mark.parametrize("args, weight, activation", INPUTS, ids=str)
def test_activation_arguments(args, weight, activation):
    assert str(read_input_args("here", "input_activations", {**FP8, **args}, weight)) == activation
    assert read_input_args("here", "input_activations", None, weight) is None


@pytest.mark.parametrize(
    "args, words",
    [
        ({"strategy": "token", "dynamic": False}, "`input_activations.dynamic` true beside strategy token"),
        ({"strategy": "group", "group_size": 128}, "`input_activations.dynamic` true beside strategy group"),
        ({"strategy": "token", "group_size": 64, "dynamic": True}, "group beside `group_size` 64, got token"),
        ({"strategy": "channel", "dynamic": True}, "tensor, token or group, got channel"),
        ({"strategy": "group", "group_size": -5, "dynamic": True}, "positive, got -5"),
    ],
)
def test_activation_arguments_that_contradict_themselves(args, words):
    with pytest.raises(ValueError) as error:
        read_input_args("here", "input_activations", {**FP8, **args}, BLOCK)
    assert words in str(error.value)


def test_keys_of_the_parts():
    assert BLOCK.key().scale.group_shape == (128, 128) and CHANNEL.key().scale.group_shape.is_per_channel()
    assert TENSOR.key().scale.static and GROUP.key(BLOCK).scale.group_shape == (1, 128)
    assert TOKEN.key(WeightQuant("block", (32, 64))).scale.group_shape == (1, 64)
    assert TOKEN.key(CHANNEL).scale.group_shape.is_per_token() and STATIC.key(TENSOR).scale.static
    assert InputQuant("group", 128, ue8m0=True).key(BLOCK) != GROUP.key(BLOCK)
