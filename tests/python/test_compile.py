"""torch.compile(fullgraph=True) with a dynamic number of rows, and torch.export: equal to eager, to the bit."""

import blockscale
import cases
import pytest
import torch
import torch._dynamo.testing
from cases import Case, random_inputs, same_bits
from oracle import BF16, F16, F32

ops = torch.ops.blockscale
N, K = 576, 192
M_SIZES = (1, 2, 3, 5, 8, 13, 33, 64)


class Layer(torch.nn.Module):
    """One op between two of torch's own, so that a graph has something to fuse around it."""

    def __init__(self, x_dtype, out_dtype, bias_dtype=F32, is_vnni=True):
        super().__init__()
        inputs = random_inputs(Case(1, N, K, (128, 128), x_dtype, bias=bias_dtype))
        weight = ops.convert_weight_packed(inputs.weight) if is_vnni else inputs.weight
        self.register_buffer("weight", weight)
        self.register_buffer("scales", inputs.scales)
        self.register_buffer("bias", inputs.bias)
        self.out_dtype, self.is_vnni = out_dtype, is_vnni

    def forward(self, x):
        y = ops.fp8_scaled_mm_cpu(
            x * 0.5, self.weight, self.scales, [128, 128], self.bias, self.out_dtype, self.is_vnni
        )
        return y + 1


def rows(shape, dtype=BF16):
    return torch.randn(*shape, K, generator=cases.generator("rows", shape)).to(dtype)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("is_vnni", (True, False), ids=("packed", "plain"))
def test_compiled_equals_eager_for_every_m(dtype, is_vnni):
    layer = Layer(dtype, dtype, is_vnni=is_vnni)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for m in M_SIZES:
        x = rows((m,), dtype)
        assert same_bits(compiled(x), layer(x))
    assert counter.frame_count <= 2  # one graph for M = 1, one for all others


def test_marked_dynamic_rows_compile_once():
    layer = Layer(BF16, F32)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for m in (33, 2, 64, 5):
        x = rows((m,))
        torch._dynamo.mark_dynamic(x, 0)
        assert same_bits(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_compiled_with_several_dynamic_leading_dimensions():
    layer = Layer(F16, BF16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for lead in ((2, 3), (4, 5), (3, 7)):
        assert same_bits(compiled(rows(lead, F16)), layer(rows(lead, F16)))


def test_inductor_equals_eager():
    layer = Layer(BF16, BF16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for m in (2, 5, 13):
        x = rows((m,))
        torch.testing.assert_close(
            compiled(x), layer(x), rtol=2**-7, atol=0
        )  # inductor keeps `* 0.5` and `+ 1` in fp32


def test_the_functional_form_compiles():
    layer = Layer(BF16, BF16)

    def call(x):
        return blockscale.linear(x, layer.weight, layer.scales, layer.bias, block_size=[128, 128])

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (2, 5, 13):
        assert same_bits(compiled(rows((m,))), call(rows((m,))))


def test_quantize_pack_and_run_in_one_graph():
    def call(weight, x):
        codes, scales = ops.quantize_weight_block_fp8(weight, [64, 128])
        packed = ops.convert_weight_packed(codes)
        y = ops.fp8_scaled_mm_cpu(x, packed, scales, [64, 128], None, F32, True)
        back = ops.dequantize_weight_block_fp8(ops.unpack_weight(packed), scales, [64, 128], F32)
        return y, back

    weight = torch.randn(N, K, generator=cases.generator("graph"))
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for a, b in zip(compiled(weight, rows((5,))), call(weight, rows((5,))), strict=True):
        assert same_bits(a, b)


def test_errors_inside_a_graph_keep_their_sentence():
    layer = Layer(BF16, BF16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"expected `mat1` of shape \[..., K\] with K = mat2.size\(1\) = 192, got"):
        compiled(torch.zeros(3, K + 1, dtype=BF16))
    assert same_bits(compiled(rows((4,))), layer(rows((4,))))


@pytest.mark.parametrize("is_vnni", (True, False), ids=("packed", "plain"))
@pytest.mark.parametrize("out", cases.FLOATS, ids=cases.SHORT.get)
def test_export_with_dynamic_rows(out, is_vnni):
    layer = Layer(BF16, out, is_vnni=is_vnni)
    exported = torch.export.export(layer, (rows((4,)),), dynamic_shapes={"x": {0: torch.export.Dim("m", max=4096)}})
    assert "blockscale.fp8_scaled_mm_cpu.default" in exported.graph_module.code
    for m in (2, 5, 13, 64):
        assert same_bits(exported.module()(rows((m,))), layer(rows((m,))))


def test_export_of_a_three_dimensional_input():
    layer = Layer(F32, F32)
    dynamic = {"x": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("tokens", max=64)}}
    exported = torch.export.export(layer, (rows((2, 3), F32),), dynamic_shapes=dynamic)
    for lead in ((2, 3), (5, 2), (4, 9)):
        assert same_bits(exported.module()(rows(lead, F32)), layer(rows(lead, F32)))


def test_exported_programs_survive_saving(tmp_path):
    layer = Layer(BF16, BF16)
    exported = torch.export.export(layer, (rows((4,)),), dynamic_shapes={"x": {0: torch.export.Dim("m", max=4096)}})
    torch.export.save(exported, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2")
    assert same_bits(loaded.module()(rows((7,))), layer(rows((7,))))


def test_under_inference_mode_and_no_grad():
    layer = Layer(BF16, BF16)
    expected = layer(rows((3,)))
    with torch.inference_mode():
        assert same_bits(layer(rows((3,))), expected)
    with torch.no_grad():
        assert same_bits(layer(rows((3,))), expected)
