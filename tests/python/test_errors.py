"""Wrong arguments: one sentence each, word for word the same from the compiled op, on meta tensors and under
FakeTensorMode; inputs and later results are untouched."""

import os
import subprocess
import sys

import blockscale
import cases
import pytest
import torch
from cases import same_bits
from oracle import BF16, E8M0, F16, F32, F64, FP8, U8
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.blockscale


def empty(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype)


def good_arguments(op: str) -> dict:
    """Arguments that pass every check: N = 40, K = 70, blocks of 16 x 32, so a grid of [3, 3]."""
    rng = cases.generator(op)
    codes = torch.randint(127, (40, 70), generator=rng).to(U8)
    return {
        "convert_weight_packed": {"weight": codes.view(FP8)},
        "unpack_weight": {"packed": codes},
        "fp8_scaled_mm_cpu": {
            "mat1": torch.randn(2, 3, 70, generator=rng),
            "mat2": codes,
            "scales2": torch.rand(3, 3, generator=rng),
            "block_size": [16, 32],
            "bias": torch.randn(40, generator=rng),
            "out_dtype": F32,
            "is_vnni": True,
        },
        "quantize_weight_block_fp8": {"weight": torch.randn(40, 70, generator=rng), "block_size": [16, 32]},
        "dequantize_weight_block_fp8": {
            "weight": codes.view(FP8),
            "scales": torch.rand(3, 3, generator=rng),
            "block_size": [16, 32],
            "out_dtype": F32,
        },
    }[op]


FNUZ = torch.float8_e4m3fnuz
WEIGHT_SHAPE = "`weight` of shape [N, K] or [E, N, K]"
FLOAT_WEIGHT = "`weight` of dtype bfloat16, float16 or float32"
BLOCK = "`block_size` of two positive integers [block_n, block_k]"
SCALES_DTYPE = "of dtype float32, bfloat16, float8_e8m0fnu or uint8 (e8m0 codes)"
GRID = "of shape [ceil(N/block_n), ceil(K/block_k)]"
OUT = "`out_dtype` bfloat16, float16 or float32"
PACKED = "to be contiguous, as convert_weight_packed returns it"
MAT1_K = "`mat1` of shape [..., K] with K = mat2.size(1) = 70"
MAT1_DTYPE = "`mat1` of dtype bfloat16, float16 or float32"
MAT2_SHAPE = "`mat2` of shape [N, K]"
BIAS_DTYPE = "`bias` of dtype float32, bfloat16 or float16"
MAT2_U8 = "`mat2` of dtype uint8 (from convert_weight_packed) with is_vnni=True"
MAT2_F8 = "`mat2` of dtype float8_e4m3fn with is_vnni=False"

# op, changed arguments, "expected ...", "got ..."
WRONG = [
    ("convert_weight_packed", {"weight": empty(4, 4)}, "`weight` of dtype float8_e4m3fn", "float32"),
    ("convert_weight_packed", {"weight": empty(4, 4, dtype=U8)}, "`weight` of dtype float8_e4m3fn", "uint8"),
    ("convert_weight_packed", {"weight": empty(4, dtype=FP8)}, WEIGHT_SHAPE, "[4]"),
    ("convert_weight_packed", {"weight": empty(dtype=FP8)}, WEIGHT_SHAPE, "[]"),
    ("convert_weight_packed", {"weight": empty(1, 2, 3, 4, dtype=FP8)}, WEIGHT_SHAPE, "[1, 2, 3, 4]"),
    ("convert_weight_packed", {"weight": empty(4, dtype=F16)}, "`weight` of dtype float8_e4m3fn", "float16"),
    ("unpack_weight", {"packed": empty(4, 4, dtype=FP8)}, "`packed` of dtype uint8", "float8_e4m3fn"),
    ("unpack_weight", {"packed": empty(4, dtype=U8)}, "`packed` of shape [N, K] or [E, N, K]", "[4]"),
    ("unpack_weight", {"packed": empty(4, 3, dtype=U8).T}, f"`packed` {PACKED}", "strides [1, 3]"),
    ("unpack_weight", {"packed": empty(4, 8, dtype=U8)[:, ::2]}, f"`packed` {PACKED}", "strides [8, 2]"),
    ("unpack_weight", {"packed": empty(2, 8, 4, dtype=U8)[:, ::2]}, f"`packed` {PACKED}", "strides [32, 8, 1]"),
    ("fp8_scaled_mm_cpu", {"mat1": empty(3, 70, dtype=F64)}, MAT1_DTYPE, "float64"),
    ("fp8_scaled_mm_cpu", {"mat1": empty(3, 70, dtype=FP8)}, MAT1_DTYPE, "float8_e4m3fn"),
    ("fp8_scaled_mm_cpu", {"mat1": empty()}, "`mat1` of shape [..., K]", "[]"),
    ("fp8_scaled_mm_cpu", {"mat2": empty(40, 70, dtype=FP8)}, MAT2_U8, "float8_e4m3fn"),
    ("fp8_scaled_mm_cpu", {"mat2": empty(40, 70, dtype=BF16)}, MAT2_U8, "bfloat16"),
    ("fp8_scaled_mm_cpu", {"is_vnni": False}, MAT2_F8, "uint8"),
    ("fp8_scaled_mm_cpu", {"mat2": empty(40, 70, dtype=torch.float8_e5m2), "is_vnni": False}, MAT2_F8, "float8_e5m2"),
    ("fp8_scaled_mm_cpu", {"mat2": empty(40, 70, dtype=FNUZ), "is_vnni": False}, MAT2_F8, "float8_e4m3fnuz"),
    ("fp8_scaled_mm_cpu", {"mat2": empty(70, dtype=U8)}, MAT2_SHAPE, "[70]"),
    ("fp8_scaled_mm_cpu", {"mat2": empty(2, 40, 70, dtype=U8)}, MAT2_SHAPE, "[2, 40, 70]"),
    ("fp8_scaled_mm_cpu", {"mat2": empty(2, 40, 70, dtype=FP8), "is_vnni": False}, MAT2_SHAPE, "[2, 40, 70]"),
    ("fp8_scaled_mm_cpu", {"mat2": empty(70, 40, dtype=U8).T}, f"`mat2` {PACKED}", "strides [1, 40]"),
    ("fp8_scaled_mm_cpu", {"mat2": empty(40, 80, dtype=U8)[:, :70]}, f"`mat2` {PACKED}", "strides [80, 1]"),
    ("fp8_scaled_mm_cpu", {"mat1": empty(3, 71)}, MAT1_K, "[3, 71]"),
    ("fp8_scaled_mm_cpu", {"mat1": empty(71)}, MAT1_K, "[71]"),
    ("fp8_scaled_mm_cpu", {"mat1": empty(0, 69)}, MAT1_K, "[0, 69]"),
    ("fp8_scaled_mm_cpu", {"mat1": empty(70, 3)}, MAT1_K, "[70, 3]"),
    ("fp8_scaled_mm_cpu", {"block_size": [16]}, BLOCK, "[16]"),
    ("fp8_scaled_mm_cpu", {"block_size": []}, BLOCK, "[]"),
    ("fp8_scaled_mm_cpu", {"block_size": [1, 16, 32]}, BLOCK, "[1, 16, 32]"),
    ("fp8_scaled_mm_cpu", {"block_size": [0, 32]}, BLOCK, "[0, 32]"),
    ("fp8_scaled_mm_cpu", {"block_size": [16, -32]}, BLOCK, "[16, -32]"),
    ("fp8_scaled_mm_cpu", {"block_size": [-(2**63), 1]}, BLOCK, f"[{-(2**63)}, 1]"),
    ("fp8_scaled_mm_cpu", {"scales2": empty(3, 3, dtype=F16)}, f"`scales2` {SCALES_DTYPE}", "float16"),
    ("fp8_scaled_mm_cpu", {"scales2": empty(3, 3, dtype=F64)}, f"`scales2` {SCALES_DTYPE}", "float64"),
    ("fp8_scaled_mm_cpu", {"scales2": empty(3, 3, dtype=FP8)}, f"`scales2` {SCALES_DTYPE}", "float8_e4m3fn"),
    ("fp8_scaled_mm_cpu", {"scales2": empty(3, 2)}, f"`scales2` {GRID} = [3, 3]", "[3, 2]"),
    ("fp8_scaled_mm_cpu", {"scales2": empty(2, 3)}, f"`scales2` {GRID} = [3, 3]", "[2, 3]"),
    ("fp8_scaled_mm_cpu", {"scales2": empty(4, 3)}, f"`scales2` {GRID} = [3, 3]", "[4, 3]"),
    ("fp8_scaled_mm_cpu", {"scales2": empty(9)}, f"`scales2` {GRID} = [3, 3]", "[9]"),
    ("fp8_scaled_mm_cpu", {"scales2": empty()}, f"`scales2` {GRID} = [3, 3]", "[]"),
    ("fp8_scaled_mm_cpu", {"scales2": empty(1, 3, 3)}, f"`scales2` {GRID} = [3, 3]", "[1, 3, 3]"),
    ("fp8_scaled_mm_cpu", {"block_size": [2**62, 2**62]}, f"`scales2` {GRID} = [1, 1]", "[3, 3]"),
    ("fp8_scaled_mm_cpu", {"bias": empty(40, dtype=F64)}, BIAS_DTYPE, "float64"),
    ("fp8_scaled_mm_cpu", {"bias": empty(40, dtype=torch.int32)}, BIAS_DTYPE, "int32"),
    ("fp8_scaled_mm_cpu", {"bias": empty(39)}, "`bias` of shape [N] = [40]", "[39]"),
    ("fp8_scaled_mm_cpu", {"bias": empty(1)}, "`bias` of shape [N] = [40]", "[1]"),
    ("fp8_scaled_mm_cpu", {"bias": empty(1, 40)}, "`bias` of shape [N] = [40]", "[1, 40]"),
    ("fp8_scaled_mm_cpu", {"bias": empty()}, "`bias` of shape [N] = [40]", "[]"),
    ("fp8_scaled_mm_cpu", {"out_dtype": F64}, OUT, "float64"),
    ("fp8_scaled_mm_cpu", {"out_dtype": FP8}, OUT, "float8_e4m3fn"),
    ("fp8_scaled_mm_cpu", {"out_dtype": torch.int8}, OUT, "int8"),
    ("quantize_weight_block_fp8", {"weight": empty(4, 4, dtype=F64)}, FLOAT_WEIGHT, "float64"),
    ("quantize_weight_block_fp8", {"weight": empty(4, 4, dtype=FP8)}, FLOAT_WEIGHT, "float8_e4m3fn"),
    ("quantize_weight_block_fp8", {"weight": empty(4)}, WEIGHT_SHAPE, "[4]"),
    ("quantize_weight_block_fp8", {"weight": empty(1, 1, 4, 4)}, WEIGHT_SHAPE, "[1, 1, 4, 4]"),
    ("quantize_weight_block_fp8", {"block_size": [0, 0]}, BLOCK, "[0, 0]"),
    ("quantize_weight_block_fp8", {"block_size": [128]}, BLOCK, "[128]"),
    ("quantize_weight_block_fp8", {"block_size": [-1, 128]}, BLOCK, "[-1, 128]"),
    ("dequantize_weight_block_fp8", {"weight": empty(40, 70, dtype=U8)}, "`weight` of dtype float8_e4m3fn", "uint8"),
    ("dequantize_weight_block_fp8", {"weight": empty(70, dtype=FP8)}, WEIGHT_SHAPE, "[70]"),
    ("dequantize_weight_block_fp8", {"block_size": [16, 0]}, BLOCK, "[16, 0]"),
    ("dequantize_weight_block_fp8", {"scales": empty(3, 3, dtype=F16)}, f"`scales` {SCALES_DTYPE}", "float16"),
    ("dequantize_weight_block_fp8", {"scales": empty(3, 4)}, f"`scales` {GRID} = [3, 3]", "[3, 4]"),
    ("dequantize_weight_block_fp8", {"scales": empty(1, 3, 3)}, f"`scales` {GRID} = [3, 3]", "[1, 3, 3]"),
    (
        "dequantize_weight_block_fp8",
        {"weight": empty(4, 40, 70, dtype=FP8)},
        "`scales` of shape [E, ceil(N/block_n), ceil(K/block_k)] = [4, 3, 3]",
        "[3, 3]",
    ),
    ("dequantize_weight_block_fp8", {"out_dtype": F64}, OUT, "float64"),
    # Several wrong arguments: the first check in the documented order speaks.
    ("fp8_scaled_mm_cpu", {"mat1": empty(dtype=F64), "mat2": empty(1)}, MAT1_DTYPE, "float64"),
    ("fp8_scaled_mm_cpu", {"mat1": empty(), "mat2": empty(1)}, "`mat1` of shape [..., K]", "[]"),
    ("fp8_scaled_mm_cpu", {"mat1": empty(71), "mat2": empty(3, dtype=U8)}, MAT2_SHAPE, "[3]"),
    ("fp8_scaled_mm_cpu", {"mat1": empty(71), "block_size": [0]}, MAT1_K, "[71]"),
    ("fp8_scaled_mm_cpu", {"block_size": [0], "scales2": empty(1, dtype=F16)}, BLOCK, "[0]"),
    ("fp8_scaled_mm_cpu", {"scales2": empty(1, dtype=F16), "bias": empty(1)}, f"`scales2` {SCALES_DTYPE}", "float16"),
    ("fp8_scaled_mm_cpu", {"scales2": empty(1), "bias": empty(1, dtype=F64)}, f"`scales2` {GRID} = [3, 3]", "[1]"),
    ("fp8_scaled_mm_cpu", {"bias": empty(1), "out_dtype": F64}, "`bias` of shape [N] = [40]", "[1]"),
    ("dequantize_weight_block_fp8", {"scales": empty(1), "out_dtype": F64}, f"`scales` {GRID} = [3, 3]", "[1]"),
]  # fmt: skip


def wrong_id(case) -> str:
    op, changed, _, got = case
    return f"{op}-{'-'.join(changed)}-{got}".replace(" ", "")


def message_of(op: str, arguments: dict) -> str:
    with pytest.raises(ValueError) as caught:
        getattr(ops, op)(*arguments.values())
    assert type(caught.value) is ValueError
    return str(caught.value)


def snapshot(arguments: dict) -> list[bytes]:
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    return [bytes(tensor.untyped_storage()) for tensor in tensors]


@pytest.mark.parametrize("case", WRONG, ids=wrong_id)
def test_sentence_of_the_op(case):
    op, changed, expected, got = case
    good = good_arguments(op)
    reference = getattr(ops, op)(*good.values())
    arguments = {**good, **changed}
    before = snapshot(arguments)
    assert message_of(op, arguments) == f"blockscale::{op}: expected {expected}, got {got}"
    assert snapshot(arguments) == before
    for a, b in zip(as_list(getattr(ops, op)(*good.values())), as_list(reference), strict=True):
        assert same_bits(a, b)


def as_list(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def converted(arguments: dict, convert) -> dict:
    return {key: convert(value) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}


def to_meta(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@pytest.mark.parametrize("case", WRONG, ids=wrong_id)
def test_same_sentence_on_meta_tensors(case):
    op, changed, expected, got = case
    arguments = converted({**good_arguments(op), **changed}, to_meta)
    assert message_of(op, arguments) == f"blockscale::{op}: expected {expected}, got {got}"


@pytest.mark.parametrize("case", WRONG, ids=wrong_id)
def test_same_sentence_in_fake_tensor_mode(case):
    op, changed, expected, got = case
    mode = FakeTensorMode()
    arguments = converted({**good_arguments(op), **changed}, mode.from_tensor)
    with mode:
        assert message_of(op, arguments) == f"blockscale::{op}: expected {expected}, got {got}"


@pytest.mark.parametrize("case", WRONG, ids=wrong_id)
def test_same_sentence_from_the_typed_wrapper(case):
    op, changed, expected, got = case
    arguments = {**good_arguments(op), **changed}
    with pytest.raises(ValueError) as caught:
        getattr(blockscale, op)(**arguments)
    assert str(caught.value) == f"blockscale::{op}: expected {expected}, got {got}"


# What torch's stable ABI itself cannot carry into an op is refused there, in its own words.
NOT_IN_STABLE_ABI = ("bits", "float4", "bcomplex", *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)))
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def carried(dtype) -> bool:
    name = str(dtype).removeprefix("torch.")
    return not (name.startswith(NOT_IN_STABLE_ABI[:3]) or name in NOT_IN_STABLE_ABI or name.startswith("q"))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", list(filter(carried, DTYPES)), ids=str)
def test_every_dtype_is_named_alike_by_op_and_fake(dtype):
    for op in ("convert_weight_packed", "unpack_weight", "quantize_weight_block_fp8", "fp8_scaled_mm_cpu"):
        good = good_arguments(op)
        first = next(iter(good))
        if dtype in (FP8, U8, *cases.FLOATS):
            continue
        arguments = {**good, first: torch.empty(good[first].shape, dtype=dtype)}
        assert message_of(op, arguments) == message_of(op, converted(arguments, to_meta))
    if dtype not in cases.FLOATS:
        arguments = {**good_arguments("fp8_scaled_mm_cpu"), "out_dtype": dtype}
        assert message_of("fp8_scaled_mm_cpu", arguments) == (
            f"blockscale::fp8_scaled_mm_cpu: expected {OUT}, got {str(dtype).removeprefix('torch.')}"
        )


@pytest.mark.parametrize("dtype", (torch.bits8, torch.uint4, torch.int7, torch.float4_e2m1fn_x2), ids=str)
def test_dtypes_beyond_the_stable_abi_are_refused_by_torch(dtype):
    with pytest.raises((RuntimeError, ValueError)):
        ops.convert_weight_packed(torch.empty(4, 4, dtype=dtype))


MIXED = [
    ("fp8_scaled_mm_cpu", "mat1", ["mat2", "scales2", "bias"]),
    ("dequantize_weight_block_fp8", "weight", ["scales"]),
]


@pytest.mark.parametrize("op, first, others", MIXED, ids=lambda value: value if isinstance(value, str) else "")
def test_tensors_on_different_devices(op, first, others):
    """x on the CPU with a weight on meta would otherwise return memory that nobody wrote."""
    good = good_arguments(op)
    for name in others:
        mixed = {**good, name: to_meta(good[name])}
        expected = f"blockscale::{op}: expected all tensors on one device, got `{first}` on cpu and `{name}` on meta"
        assert message_of(op, mixed) == expected
    mixed = {**good, first: to_meta(good[first])}
    expected = f"blockscale::{op}: expected all tensors on one device, got `{first}` on meta and `{others[0]}` on cpu"
    assert message_of(op, mixed) == expected


def test_devices_are_checked_before_anything_else():
    mixed = {**good_arguments("fp8_scaled_mm_cpu"), "mat1": empty(dtype=F64), "bias": empty(3).to("meta")}
    assert message_of("fp8_scaled_mm_cpu", mixed) == (
        "blockscale::fp8_scaled_mm_cpu: expected all tensors on one device, got `mat1` on cpu and `bias` on meta"
    )


def test_mixed_devices_without_bias():
    mixed = {**good_arguments("fp8_scaled_mm_cpu"), "bias": None}
    mixed["scales2"] = to_meta(mixed["scales2"])
    assert message_of("fp8_scaled_mm_cpu", mixed).endswith("got `mat1` on cpu and `scales2` on meta")


def test_empty_sides_have_empty_grids():
    arguments = good_arguments("fp8_scaled_mm_cpu")
    arguments |= {"mat1": empty(3, 0), "mat2": empty(40, 0, dtype=U8)}
    expected = f"blockscale::fp8_scaled_mm_cpu: expected `scales2` {GRID} = [3, 0], got [3, 3]"
    assert message_of("fp8_scaled_mm_cpu", arguments) == expected
    assert message_of("fp8_scaled_mm_cpu", converted(arguments, to_meta)) == expected


def test_blocks_larger_than_any_weight():
    """Block sides near 2^63 must not overflow on the way to the grid."""
    weight = torch.randn(40, 70, generator=cases.generator("huge blocks"))
    for block in ([2**62, 2**62], [2**63 - 1, 2**63 - 1], [1, 2**63 - 1], [2**63 - 1, 1]):
        fitting = [min(block[0], 40), min(block[1], 70)]
        codes, scales = ops.quantize_weight_block_fp8(weight, block)
        expected = ops.quantize_weight_block_fp8(weight, fitting)
        assert same_bits(codes, expected[0]) and same_bits(scales, expected[1])
        restored = ops.dequantize_weight_block_fp8(codes, scales, block, F32)
        assert same_bits(restored, ops.dequantize_weight_block_fp8(codes, scales, fitting, F32))
        for x in (torch.randn(1, 70), torch.randn(5, 70, dtype=BF16), torch.randn(20, 70)):
            packed = ops.convert_weight_packed(codes)
            output = ops.fp8_scaled_mm_cpu(x, packed, scales, block, None, F32, True)
            assert same_bits(output, ops.fp8_scaled_mm_cpu(x, packed, scales, fitting, None, F32, True))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", (torch.sparse_coo, torch.sparse_csr), ids=str)
def test_other_layouts_are_refused_and_the_process_lives(layout):
    arguments = {**good_arguments("fp8_scaled_mm_cpu"), "mat1": torch.eye(70).to_sparse(layout=layout)}
    with pytest.raises((NotImplementedError, RuntimeError, ValueError)):
        ops.fp8_scaled_mm_cpu(*arguments.values())


def test_e8m0_scales_under_both_names_pass():
    arguments = good_arguments("fp8_scaled_mm_cpu")
    arguments["scales2"] = torch.full((3, 3), 127, dtype=U8)
    expected = ops.fp8_scaled_mm_cpu(*arguments.values())
    arguments["scales2"] = arguments["scales2"].view(E8M0)
    assert same_bits(ops.fp8_scaled_mm_cpu(*arguments.values()), expected)


# ------------------------------------------------------------------------------------------------- the environment
NAMES = "scalar, avx2, avx512, avx512_vbmi, avx512_bf16, amx_bf16"
ISA_SENTENCE = f"blockscale: expected `BLOCKSCALE_MAX_ISA` to be one of {NAMES}, got "

MISSPELT = """
import torch, blockscale
ops = torch.ops.blockscale
weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
packed = ops.convert_weight_packed(weight)  # uses no instruction set: works
calls = [ops.isa_info, blockscale.isa_info,
         lambda: ops.fp8_scaled_mm_cpu(torch.ones(1, 4), packed, torch.ones(1, 1), [4, 4], None, torch.float32, True)]
for call in calls * 2:
    try:
        call()
        print("passed")
    except ValueError as error:
        print(error)
"""


NOT_UTF8 = os.fsdecode(b"avx2\xff")


@pytest.mark.parametrize("name", ("avx3", "AVX2", "avx512_bf16 ", "avx2,scalar", NOT_UTF8), ids=ascii)
def test_misspelt_instruction_set(name):
    """An error at each use, never at import; the check of arguments and of packing does not need the name."""
    environment = {**os.environ, "BLOCKSCALE_MAX_ISA": name}
    result = subprocess.run([sys.executable, "-c", MISSPELT], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:-1] == [ISA_SENTENCE + name.replace(NOT_UTF8[-1], "?")] * 6
