"""convert_weight_packed and unpack_weight: the layout byte by byte, and the way back."""

import cases
import pytest
import torch
from oracle import FP8, U8, packed_order

ops = torch.ops.blockscale
SIDES = [(1, 1), (1, 5), (3, 2), (15, 7), (16, 4), (16, 5), (16, 6), (17, 4), (20, 11), (31, 3), (33, 64), (48, 130)]


def random_codes(*shape):
    return torch.randint(256, shape, generator=cases.generator("codes", *shape)).to(U8)


def pack(codes):
    return ops.convert_weight_packed(codes.view(FP8))


@pytest.mark.parametrize("n, k", [(16, 4), (32, 8), (48, 12), (64, 256)])
def test_index_formula_of_whole_strips_and_quads(n, k):
    codes = random_codes(n, k)
    packed = pack(codes).flatten()
    for column in range(n):
        strip, c = divmod(column, 16)
        for depth in range(k):
            quad, within = divmod(depth, 4)
            p, j = divmod(within, 2)
            byte = strip * 16 * k + quad * 64 + 16 * (c // 4) + 8 * p + 2 * (c % 4) + j
            assert packed[byte] == codes[column, depth]


@pytest.mark.parametrize("n, k", SIDES, ids=lambda side: str(side))
def test_ragged_strips_and_quads_skip_what_is_absent(n, k):
    codes = random_codes(n, k)
    assert torch.equal(pack(codes).flatten(), codes.flatten()[packed_order(n, k)])


def test_a_ragged_strip_starts_where_a_whole_one_would():
    """20 columns: the last strip has 4, begins at byte 16 * K, and its quads are 16 bytes apart."""
    codes = random_codes(20, 8)
    packed = pack(codes).flatten()
    assert packed[16 * 8] == codes[16, 0] and packed[16 * 8 + 16] == codes[16, 4]


DRAWING = """
0.0 0.1 1.0 1.1 2.0 2.1 3.0 3.1 | 0.2 0.3 1.2 1.3 2.2 2.3 3.2 3.3
4.0 4.1 5.0 5.1 6.0 6.1 7.0 7.1 | 4.2 4.3 5.2 5.3 6.2 6.3 7.2 7.3
8.0 8.1 9.0 9.1 a.0 a.1 b.0 b.1 | 8.2 8.3 9.2 9.3 a.2 a.3 b.2 b.3
c.0 c.1 d.0 d.1 e.0 e.1 f.0 f.1 | c.2 c.3 d.2 d.3 e.2 e.3 f.2 f.3
"""


def test_drawing_of_one_quad():
    """column.k of the 64 bytes of a quad, four lanes of 16 bytes."""
    packed = pack(torch.arange(64).to(U8).view(16, 4)).flatten().tolist()
    names = [f"{code // 4:x}.{code % 4}" for code in packed]
    lanes = [" ".join(names[i : i + 8]) + " | " + " ".join(names[i + 8 : i + 16]) for i in range(0, 64, 16)]
    assert "\n".join(lanes) == DRAWING.strip()


@pytest.mark.parametrize("lead", [(), (1,), (5,)], ids=("2d", "one_expert", "experts"))
@pytest.mark.parametrize("n, k", SIDES, ids=lambda side: str(side))
def test_round_trip(n, k, lead):
    codes = random_codes(*lead, n, k)
    packed = pack(codes)
    assert packed.dtype == U8 and packed.shape == codes.shape and packed.is_contiguous()
    unpacked = ops.unpack_weight(packed)
    assert unpacked.dtype == FP8 and unpacked.is_contiguous()
    assert torch.equal(unpacked.view(U8), codes)


def test_experts_are_packed_one_by_one():
    codes = random_codes(4, 19, 10)
    packed = pack(codes)
    for expert in range(4):
        assert torch.equal(packed[expert], pack(codes[expert]))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 16, 4), (3, 0, 4), (3, 16, 0)], ids=str)
def test_empty_weights(shape):
    packed = ops.convert_weight_packed(torch.empty(shape, dtype=FP8))
    assert packed.dtype == U8 and packed.shape == shape
    unpacked = ops.unpack_weight(packed)
    assert unpacked.dtype == FP8 and unpacked.shape == shape


def views(shape):
    """float8 tensors of `shape` with other strides than contiguous ones."""
    n, k = shape[-2:]
    flat = torch.arange(4 * 3 * n * k + 3).to(U8).view(FP8)
    yield flat.as_strided((n, k), (1, n))
    yield flat.as_strided((n, k), (2 * k, 2), 3)
    yield flat.as_strided((n, k), (k + 3, 1), 1)
    yield flat.as_strided((n, k), (0, 1))
    yield flat.as_strided((n, k), (1, 0))
    yield flat.as_strided((3, n, k), (k, 3 * k, 1))
    yield flat.as_strided((3, n, k), (1, 3, 3 * n))


@pytest.mark.parametrize("n, k", [(16, 4), (21, 10), (40, 33)])
def test_any_strides_of_the_weight(n, k):
    for weight in views((n, k)):
        copy = weight.view(U8) if weight.is_contiguous() else weight.contiguous()
        assert torch.equal(ops.convert_weight_packed(weight), ops.convert_weight_packed(copy.view(FP8)))


def test_negative_zero_and_nan_codes_survive():
    codes = torch.tensor([0x00, 0x80, 0x7F, 0xFF], dtype=U8).repeat(16, 2)
    assert torch.equal(ops.unpack_weight(pack(codes)).view(U8), codes)


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_threads_do_not_change_the_bytes(threads):
    codes = random_codes(3, 1000, 257)
    torch.set_num_threads(threads)
    packed = pack(codes)
    assert torch.equal(packed[2].flatten(), codes[2].flatten()[packed_order(1000, 257)])
    assert torch.equal(ops.unpack_weight(packed).view(U8), codes)


def test_inputs_are_unchanged_and_outputs_their_own():
    codes = random_codes(32, 8)
    before = codes.clone()
    packed = pack(codes)
    packed.zero_()
    assert torch.equal(codes, before)
    unpacked = ops.unpack_weight(packed)
    unpacked.view(U8).fill_(9)
    assert (packed == 0).all()
