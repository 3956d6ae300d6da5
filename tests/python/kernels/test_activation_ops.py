"""The ops of FP8 activations: wrong arguments word for word as in their fakes, opcheck, and their results."""

import pytest
import torch
from blockscale import convert_weight_packed, fp8_w8a8_block_scaled_mm_cpu, per_token_group_quant_fp8
from fp8_layers import codes, generator, grid
from oracle import BF16, E8M0, F16, F32, F64, FP8, U8, compare, decode, expand_scales, scaled_mm
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.blockscale
N, K, BLOCK = 40, 70, [16, 32]
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # test_schema has no float8


def empty(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype)


def good(op):
    if op == "per_token_group_quant_fp8":
        return {"x": torch.ones(3, K), "group_size": 32, "eps": 1e-10, "column_major_scales": False, "use_ue8m0": False}
    A, As = per_token_group_quant_fp8(torch.randn(3, K, generator=generator("A")), 32)
    return {"A": A, "B": convert_weight_packed(codes(N, K)), "As": As, "Bs": grid(N, K, BLOCK), "block_size": BLOCK,
            "bias": torch.ones(N), "out_dtype": F32, "is_vnni": True}  # fmt: skip


QUANT, MM = "per_token_group_quant_fp8", "fp8_w8a8_block_scaled_mm_cpu"
WRONG = [
    (QUANT, {"x": empty(3, 4, dtype=F64)}, "`x` of dtype bfloat16, float16 or float32", "float64"),
    (QUANT, {"x": empty(3, 4, dtype=FP8)}, "`x` of dtype bfloat16, float16 or float32", "float8_e4m3fn"),
    (QUANT, {"x": empty()}, "`x` of shape [..., K]", "[]"),
    (QUANT, {"group_size": 0}, "`group_size` positive", "0"),
    (QUANT, {"group_size": -128}, "`group_size` positive", "-128"),
    (QUANT, {"eps": 0.0}, "`eps` positive and finite", "0"),
    (QUANT, {"eps": -1e-10}, "`eps` positive and finite", "-1e-10"),
    (QUANT, {"eps": float("inf")}, "`eps` positive and finite", "inf"),
    (QUANT, {"eps": 1e39}, "`eps` positive and finite", "1e+39"),
    (QUANT, {"eps": float("nan")}, "`eps` positive and finite", "nan"),
    (MM, {"A": empty(3, K)}, "`A` of dtype float8_e4m3fn", "float32"),
    (MM, {"A": empty(3, K, dtype=U8)}, "`A` of dtype float8_e4m3fn", "uint8"),
    (MM, {"A": empty(3, 1, K, dtype=FP8)}, "`A` of shape [M, K]", f"[3, 1, {K}]"),
    (MM, {"A": empty(K, dtype=FP8)}, "`A` of shape [M, K]", f"[{K}]"),
    (MM, {"B": codes(N, K)}, "`B` of dtype uint8 (from convert_weight_packed) with is_vnni=True", "float8_e4m3fn"),
    (MM, {"is_vnni": False}, "`B` of dtype float8_e4m3fn with is_vnni=False", "uint8"),
    (MM, {"B": empty(1, N, K, dtype=U8)}, "`B` of shape [N, K]", f"[1, {N}, {K}]"),
    (
        MM,
        {"B": empty(K, N, dtype=U8).t()},
        "`B` to be contiguous, as convert_weight_packed returns it",
        f"strides [1, {N}]",
    ),
    (MM, {"A": empty(3, 69, dtype=FP8)}, f"`A` of shape [M, K] with K = B.size(1) = {K}", "[3, 69]"),
    (MM, {"block_size": [16]}, "`block_size` of two positive integers [block_n, block_k]", "[16]"),
    (MM, {"block_size": [16, 0]}, "`block_size` of two positive integers [block_n, block_k]", "[16, 0]"),
    (MM, {"As": empty(3, 3, dtype=BF16)}, "`As` of dtype float32", "bfloat16"),
    (MM, {"As": empty(3, 2)}, "`As` of shape [M, ceil(K/block_k)] = [3, 3]", "[3, 2]"),
    (MM, {"As": empty(3)}, "`As` of shape [M, ceil(K/block_k)] = [3, 3]", "[3]"),
    (
        MM,
        {"Bs": empty(3, 3, dtype=F16)},
        "`Bs` of dtype float32, bfloat16, float8_e8m0fnu or uint8 (e8m0 codes)",
        "float16",
    ),
    (MM, {"Bs": empty(3, 2)}, "`Bs` of shape [ceil(N/block_n), ceil(K/block_k)] = [3, 3]", "[3, 2]"),
    (MM, {"bias": empty(N, dtype=F64)}, "`bias` of dtype float32, bfloat16 or float16", "float64"),
    (MM, {"bias": empty(N + 1)}, f"`bias` of shape [N] = [{N}]", f"[{N + 1}]"),
    (MM, {"out_dtype": F64}, "`out_dtype` bfloat16, float16 or float32", "float64"),
]


def message_of(op, arguments):
    with pytest.raises(ValueError) as error:
        getattr(ops, op)(*arguments.values())
    return str(error.value)


@pytest.mark.parametrize(
    "op, changes, requirement, got", WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_wrong_arguments_in_the_same_words_everywhere(op, changes, requirement, got):
    arguments = {**good(op), **changes}
    expected = f"blockscale::{op}: expected {requirement}, got {got}"
    assert message_of(op, arguments) == expected
    meta = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    assert message_of(op, meta) == expected
    with FakeTensorMode() as mode:
        fake = {key: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for key, v in arguments.items()}
        assert message_of(op, fake) == expected


@pytest.mark.parametrize("name", ["B", "As", "Bs", "bias"])
def test_tensors_on_two_devices(name):
    arguments = good(MM)
    arguments[name] = arguments[name].to("meta")
    expected = f"blockscale::{MM}: expected all tensors on one device, got `A` on cpu and `{name}` on meta"
    assert message_of(MM, arguments) == expected


@pytest.mark.parametrize("shape", [(K,), (3, K), (0, K), (3, 0), (2, 3, K), (1, 1)], ids=str)
@pytest.mark.parametrize("column_major", [False, True])
def test_opcheck_of_the_quantiser(shape, column_major):
    x = torch.randn(shape, generator=generator(shape))
    for group in (32, 128, 1):
        torch.library.opcheck(
            ops.per_token_group_quant_fp8.default, (x, group, 1e-10, column_major, True), test_utils=CHECKS
        )


@pytest.mark.parametrize("M", [0, 1, 5])
@pytest.mark.parametrize("is_vnni", [False, True])
def test_opcheck_of_the_product(M, is_vnni):
    A, As = per_token_group_quant_fp8(torch.randn(M, K, generator=generator(M)), 32, column_major_scales=True)
    B = convert_weight_packed(codes(N, K)) if is_vnni else codes(N, K)
    for bias, out in ((None, BF16), (torch.ones(N), F32)):
        arguments = (A, B, As, grid(N, K, BLOCK), BLOCK, bias, out, is_vnni)
        torch.library.opcheck(ops.fp8_w8a8_block_scaled_mm_cpu.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("shape", [(4, 300), (2, 3, 300), (300,), (0, 300), (2, 0, 300)], ids=str)
def test_leading_dimensions_and_strides(shape):
    x = torch.randn(shape, generator=generator("lead", shape))
    rows, scales = per_token_group_quant_fp8(x.reshape(-1, 300), 128)
    for strided in (x, torch.stack([x, x], -1)[..., 0], x.to(F64).float()):
        for column_major in (False, True):
            got, s = per_token_group_quant_fp8(strided, 128, column_major_scales=column_major)
            assert got.shape == x.shape and s.shape == (*x.shape[:-1], 3)
            assert torch.equal(got.reshape(-1, 300).view(U8), rows.view(U8))
            assert torch.equal(s.reshape(-1, 3), scales)


@pytest.mark.parametrize("block_size", [(128, 128), (16, 32), (3, 5), (1, 300), (48, 192)], ids=str)
@pytest.mark.parametrize("out", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("scale", [F32, BF16, E8M0], ids=str)
def test_the_product_against_float64(block_size, out, scale):
    n, k = 130, 300
    weight, scales = codes(n, k), grid(n, k, block_size).to(scale)
    for M in (1, 4, 17):
        x = torch.randn(M, k, generator=generator("product", M)) * 2.0 ** torch.arange(M)[:, None]
        for column_major in (False, True):
            A, As = per_token_group_quant_fp8(x, block_size[1], column_major_scales=column_major)
            reference = scaled_mm(
                decode(A) * expand_scales(As.double(), M, k, (1, block_size[1])), weight, scales, block_size
            )
            reference.roundings += 2  # the product of the two scales
            y = fp8_w8a8_block_scaled_mm_cpu(A, convert_weight_packed(weight), As, scales, block_size, None, out)
            assert compare(y, reference)
            assert torch.equal(
                y, fp8_w8a8_block_scaled_mm_cpu(A, weight, As, scales, block_size, None, out, is_vnni=False)
            )


def test_a_scale_in_the_wrong_place_is_seen():
    """The bound is a judge only if planted faults fail it."""
    A, As = per_token_group_quant_fp8(torch.randn(4, 256, generator=generator("plant")), 128)
    weight, scales = codes(130, 256), grid(130, 256, (128, 128))
    reference = scaled_mm(decode(A) * expand_scales(As.double(), 4, 256, (1, 128)), weight, scales, (128, 128))
    packed = convert_weight_packed(weight)
    assert not compare(fp8_w8a8_block_scaled_mm_cpu(A, packed, As.flip(1), scales, (128, 128), None, F32), reference)
    assert not compare(fp8_w8a8_block_scaled_mm_cpu(A, packed, As, scales.flip(1), (128, 128), None, F32), reference)


def test_compiles_with_a_dynamic_number_of_rows():
    packed, scales = convert_weight_packed(codes(N, K)), grid(N, K, BLOCK)

    def layer(x):
        A, As = per_token_group_quant_fp8(x, 32, column_major_scales=True)
        return fp8_w8a8_block_scaled_mm_cpu(A, packed, As, scales, BLOCK)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (2, 7, 1):
        x = torch.randn(M, K, generator=generator("compile", M))
        assert torch.equal(compiled(x), layer(x))
