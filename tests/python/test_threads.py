"""Threads, processes and the floating-point environment: torch's pool is used as it stands, nothing is left changed."""

import concurrent.futures
import os

import cases
import pytest
import torch
from cases import Case, cancelling_inputs, fp8_scaled_mm, integer_inputs, random_inputs, same_bits
from isa_worker import IsaWorker
from oracle import BF16, F16, F32, FP8, compare, scaled_mm

pytestmark = pytest.mark.isa

ops = torch.ops.blockscale


@pytest.fixture(scope="module")
def layer():
    """Enough work for every thread, in fp32 output that shows the order of summation."""
    return cancelling_inputs(40, 1040, 512, BF16)


def arguments(layer, m):
    return layer.x[:m], ops.convert_weight_packed(layer.weight), layer.scales, list(layer.block_size), None, F32, True


def this_cap() -> dict[str, str]:
    name = os.environ.get("BLOCKSCALE_MAX_ISA")
    return {} if name is None else {"BLOCKSCALE_MAX_ISA": name}


@pytest.mark.parametrize(
    "threads, environment",
    [
        (2, {"OMP_THREAD_LIMIT": "1"}),
        (None, {"OMP_NUM_THREADS": "1"}),
        (None, {"OMP_NUM_THREADS": "2"}),
        (None, {"OMP_NUM_THREADS": "17"}),
        (4, {"OMP_DYNAMIC": "true"}),
        (2, {"OMP_WAIT_POLICY": "passive"}),
    ],
    ids=lambda value: "=".join(*value.items()) if isinstance(value, dict) else f"threads_{value}",
)
def test_fewer_or_more_threads_than_asked_give_the_same_bits(threads, environment, layer, isa):
    """OMP_THREAD_LIMIT=1 gives one thread where torch announces two: work split by that count would be lost."""
    with IsaWorker(threads=threads, **this_cap(), **environment) as worker:
        for m in (1, 4, 13, 40):
            expected = ops.fp8_scaled_mm_cpu(*arguments(layer, m))
            assert same_bits(worker.call("fp8_scaled_mm_cpu", *arguments(layer, m)), expected)
        weight = torch.randn(1000, 300, generator=cases.generator("quantize"))
        codes, scales = worker.call("quantize_weight_block_fp8", weight, [64, 64])
        assert same_bits(codes, ops.quantize_weight_block_fp8(weight, [64, 64])[0])
        assert same_bits(worker.call("convert_weight_packed", codes), ops.convert_weight_packed(codes))
        restored = worker.call("dequantize_weight_block_fp8", codes, scales, [64, 64], F32)
        assert same_bits(restored, ops.dequantize_weight_block_fp8(codes, scales, [64, 64], F32))


def test_thread_count_is_read_at_call_time(layer, isa):
    """With one torch thread no thread is started; two threads are used once asked for, in the same process."""
    with IsaWorker(threads=1, **this_cap()) as worker:
        before = worker.task_count()
        worker.call("fp8_scaled_mm_cpu", *arguments(layer, 40))
        assert worker.task_count() == before
        worker.set_threads(3)
        expected = worker.call("fp8_scaled_mm_cpu", *arguments(layer, 40))
        assert worker.task_count() >= before + 2
        worker.set_threads(1)
        assert same_bits(worker.call("fp8_scaled_mm_cpu", *arguments(layer, 40)), expected)


def test_affinity_environment_and_thread_count_are_left_alone(layer, isa):
    torch.set_num_threads(2)
    before = os.sched_getaffinity(0), dict(os.environ), torch.get_num_threads()
    for m in (1, 40):
        ops.fp8_scaled_mm_cpu(*arguments(layer, m))
    assert (os.sched_getaffinity(0), dict(os.environ), torch.get_num_threads()) == before


def test_other_cpu_capabilities_of_torch_change_nothing(layer, isa):
    """ATEN_CPU_CAPABILITY speaks to torch's own kernels, not to these."""
    with IsaWorker(**this_cap(), ATEN_CPU_CAPABILITY="avx2") as worker:
        assert worker.isa_info()["active"] == isa
        expected = ops.fp8_scaled_mm_cpu(*arguments(layer, 5))
        assert same_bits(worker.call("fp8_scaled_mm_cpu", *arguments(layer, 5)), expected)


@pytest.mark.parametrize("threads", (1, 2))
def test_several_python_threads_at_once(threads, isa):
    torch.set_num_threads(threads)
    jobs = [random_inputs(Case(m, 200, 300, grid, x)) for m, grid, x in
            ((1, (32, 32), BF16), (5, (1, 128), F32), (13, (128, 128), F16), (40, (64, 128), BF16))]  # fmt: skip
    expected = [fp8_scaled_mm(job) for job in jobs]

    def run(number):
        torch.set_num_threads(threads)
        return all(same_bits(fp8_scaled_mm(jobs[i % 4]), expected[i % 4]) for i in range(number, number + 25))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(8)))


def test_calls_from_a_backward_pass(layer, isa):
    """Autograd may call from a thread of its own; a call nested there runs with the threads that it gets."""
    torch.set_num_threads(2)
    expected = ops.fp8_scaled_mm_cpu(*arguments(layer, 13))

    class CallsInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            outputs.append(ops.fp8_scaled_mm_cpu(*arguments(layer, 13)))
            return grad

    outputs: list[torch.Tensor] = []
    x = torch.ones(3, requires_grad=True)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for job in [pool.submit(lambda: CallsInBackward.apply(x).sum().backward()) for _ in range(6)]:
            job.result()
    assert len(outputs) == 6 and all(same_bits(output, expected) for output in outputs)


def test_after_a_fork_calls_still_work(layer, isa):
    """Data loaders fork. The child computes with one thread and the bits of the parent."""
    torch.set_num_threads(1)
    call = arguments(layer, 5)
    expected = ops.fp8_scaled_mm_cpu(*call)
    child = os.fork()
    if child == 0:
        same = same_bits(ops.fp8_scaled_mm_cpu(*call), expected)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


# ------------------------------------------------------------------------------------------- floating-point environment
def subnormal_inputs(x_dtype):
    """x, scales and results in and around the subnormal range of fp32."""
    inputs = random_inputs(Case(5, 40, 200, (32, 32), x_dtype))
    inputs.x[:, ::3] = (inputs.x[:, ::3].float() * 2.0 ** (-12 if x_dtype == F16 else -128)).to(x_dtype)
    inputs.scales[::2] = inputs.scales[::2] * 2.0**-126
    inputs.scales[0, 0] = 2.0**-127
    return inputs


@pytest.mark.parametrize("x_dtype", cases.FLOATS, ids=cases.SHORT.get)
@pytest.mark.parametrize("threads", (1, 2))
def test_flush_denormal_changes_no_result(threads, x_dtype, isa):
    torch.set_num_threads(threads)
    inputs = subnormal_inputs(x_dtype)
    packed = ops.convert_weight_packed(inputs.weight)
    for m, out in ((1, F32), (5, F32), (5, BF16), (5, F16)):
        call = inputs.x[:m], packed, inputs.scales, list(inputs.block_size), None, out, True
        expected = ops.fp8_scaled_mm_cpu(*call)
        assert compare(expected, scaled_mm(call[0], *inputs.reference_arguments()[1:]))
        assert torch.set_flush_denormal(True)
        try:
            flushed = ops.fp8_scaled_mm_cpu(*call)
        finally:
            torch.set_flush_denormal(False)
        integers = torch.int32 if out == F32 else torch.int16
        assert torch.equal(flushed.view(integers), expected.view(integers))


@pytest.mark.parametrize("threads", (1, 2))
def test_flush_denormal_changes_no_quantized_weight(threads, isa):
    torch.set_num_threads(threads)
    weight = torch.ldexp(torch.randn(64, 64, generator=cases.generator("tiny")), torch.tensor(-127))
    codes, scales = ops.quantize_weight_block_fp8(weight, [8, 8])
    restored = ops.dequantize_weight_block_fp8(codes, scales, [8, 8], F32)
    torch.set_flush_denormal(True)
    try:
        flushed = ops.quantize_weight_block_fp8(weight, [8, 8])
        flushed_restored = ops.dequantize_weight_block_fp8(codes, scales, [8, 8], F32)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(flushed[0], codes) and same_bits(flushed[1], scales)
    assert torch.equal(flushed_restored.view(torch.int32), restored.view(torch.int32))


@pytest.mark.parametrize("flush", (True, False))
def test_the_floating_point_mode_is_restored(flush, layer, isa):
    """Whatever a kernel sets for itself, torch's arithmetic behaves afterwards as before."""
    torch.set_flush_denormal(flush)
    for m in (1, 13):
        ops.fp8_scaled_mm_cpu(*arguments(layer, m))
    weight = torch.ones(8, 8)
    codes, scales = ops.quantize_weight_block_fp8(weight, [4, 4])
    ops.dequantize_weight_block_fp8(codes, scales, [4, 4], F32)
    smallest_normal = torch.tensor(2.0**-126)
    flushed = (smallest_normal * 0.5).view(torch.int32).item() == 0
    assert flushed is flush


def test_integer_data_is_exact_on_any_thread_count(isa):
    inputs = integer_inputs(Case(33, 700, 400, (128, 128), BF16))
    reference = scaled_mm(*inputs.reference_arguments())
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert compare(fp8_scaled_mm(inputs), reference, exact=True)
        assert inputs.weight.dtype == FP8
