"""The parts of the benchmark suite: shapes, inputs and their check, measuring, merging, limits. Nothing asserts a time."""

from __future__ import annotations

import math
import os

import pytest
import torch
from blockscale import ops, reference
from blockscale.bench import inputs, measure, roofline, rows, shapes


# ---------------------------------------------------------------------------------------------------------- shapes
def test_shapes_of_the_models():
    assert [(s.layer, s.N, s.K) for s in shapes.MODELS["qwen3-0.6b"]] == [
        ("qkv_proj", 4096, 1024),
        ("o_proj", 1024, 2048),
        ("gate_up_proj", 6144, 1024),
        ("down_proj", 1024, 3072),
    ]
    assert [(s.N, s.K) for s in shapes.MODELS["qwen3-8b"]] == [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
    assert {s.layer: (s.N, s.K) for s in shapes.MODELS["deepseek-v3"]} == {
        "fused_qkv_a_proj": (2112, 7168),
        "q_b_proj": (24576, 1536),
        "kv_b_proj": (32768, 512),
        "o_proj": (7168, 16384),
        "gate_up_proj": (36864, 7168),
        "down_proj": (7168, 18432),
        "shared_gate_up_proj": (4096, 7168),
        "shared_down_proj": (7168, 2048),
    }


@pytest.mark.parametrize("name", ["foo", "12x", "0x5", "qwen3-8b.foo", "-1x2", ""])
def test_unknown_shapes_are_refused(name):
    with pytest.raises(ValueError, match="expected qwen3-0.6b, qwen3-8b, deepseek-v3, MODEL.LAYER or NxK, got"):
        shapes.find_shapes(name)


# ---------------------------------------------------------------------------------------------------------- inputs
@pytest.mark.parametrize("block_size", [(128, 128), (1, 2**31), (2**31, 2**31), (1, 32), (64, 48)])
@pytest.mark.parametrize("N, K", [(1, 1), (17, 33), (1500, 160)])
def test_the_expected_result_is_the_references(N, K, block_size):
    weight = inputs.make_weight(N, K, block_size)
    want = reference.scaled_mm(weight.rows, weight.codes, weight.scales, weight.block_size)
    torch.testing.assert_close(weight.want, want, rtol=1e-14, atol=0)
    codes = weight.codes.view(torch.uint8) & 0x7F
    assert codes.min() >= 0x08 and codes.max() <= 0x7E  # normal numbers alone


@pytest.mark.parametrize("M", [1, 2, 3, 4, 5, 64])
def test_checked_rows_are_where_they_are_looked_for(M):
    weight = inputs.make_weight(20, 24)
    x = inputs.activations(weight, M, torch.float32)
    places = inputs.checked_places(M)
    assert {0, M - 1} <= set(places) and len(places) <= inputs.CHECKED_ROWS
    assert torch.equal(x[places], weight.rows[: len(places)].float())


def right(weight, M):
    x = inputs.activations(weight, M, torch.bfloat16)
    return ops.fp8_scaled_mm_cpu(x, ops.convert_weight_packed(weight.codes), weight.scales, list(weight.block_size))


FAULTS = {
    "another scale": lambda out, weight: out.index_fill_(1, torch.arange(128, 144), 0.0),
    "one column": lambda out, weight: out[:, 77].mul_(1.5),
    "the last row": lambda out, weight: out[-1].mul_(2),
    "a NaN": lambda out, weight: out[0, 3].fill_(math.nan),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("M", [1, 7])
def test_a_wrong_result_is_refused(M, fault):
    weight = inputs.make_weight(144, 256)
    out = right(weight, M)
    inputs.check_result("right", lambda i: out, weight, M)
    FAULTS[fault](out, weight)
    with pytest.raises(inputs.WrongResult, match="bench: wrong is wrong at M = .*; it is not timed"):
        inputs.check_result("wrong", lambda i: out, weight, M)


def test_a_wrong_shape_is_refused():
    weight = inputs.make_weight(16, 16)
    with pytest.raises(inputs.WrongResult, match=r"returned shape \[2, 15\], expected \[2, 16\]"):
        inputs.check_result("p", lambda i: torch.zeros(2, 15), weight, 2)


def test_copies_exceed_the_caches():
    assert inputs.make_weight(16, 16).copies() * 256 >= 300 << 20
    assert inputs.make_weight(16, 16, rotated_bytes=1 << 10).copies(2.0) == 2
    assert inputs.make_weight(16, 16, rotated_bytes=1).copies() == 1


# --------------------------------------------------------------------------------------------------------- measure
def test_candidates_take_turns():
    order = []
    calls = {name: lambda i, name=name: order.append((i, name)) for name in "abc"}
    samples = measure.interleave(calls, 4)
    assert [i for i, _ in order] == [i for i in range(4 + measure.DROPPED_ROUNDS) for _ in "abc"]
    by_round = ["".join(name for i, name in order if i == r) for r in range(6)]
    assert set(by_round) == {"abc", "bca", "cab"} and all(map(str.__ne__, by_round, by_round[1:]))
    assert all(len(one.seconds) == len(one.cpu_seconds) == 4 for one in samples.values())


def test_rounds_end_after_the_time_but_three_are_done():
    samples = measure.interleave({"a": lambda i: None}, 100, seconds=0.0)
    assert len(samples["a"].seconds) == 3


def test_paired_ratios_and_quartiles():
    slow, fast = measure.Samples([2.0, 8.0, 3.0]), measure.Samples([1.0, 2.0, 3.0])
    assert measure.paired(slow, fast) == 2.0  # the median of 2, 4 and 1: not the ratio of the medians, 1.5
    assert measure.Samples([1.0]).iqr == 0 and measure.Samples([1.0, 2.0, 3.0, 4.0, 5.0]).iqr == 3.0
    assert math.isnan(measure.geometric_mean([])) and measure.geometric_mean([2.0, 8.0]) == pytest.approx(4)


def test_runs_are_merged_by_name():
    def run(time, shape="s", **more):
        where = rows.identity("linear", shape, 1, 2, 3, 1)
        return rows.row({**where, "kernel": "k"}, measure.Samples([time], [time]), **more)

    one, other, third = [run(1.0, gflops=5.0), run(9.0, "t")], [run(2.0, gflops=7.0)], [run(6.0, gflops=6.0)]
    merged = rows.merge_runs([one, other, third])
    assert [row["real_time"] for row in merged] == [2e6, 9e6]
    assert merged[0]["gflops"] == 6.0 and merged[0]["real_times"] == [1e6, 2e6, 6e6]
    assert [row["repetitions"] for row in merged] == [3, 1] and merged[0]["M"] == 1


# -------------------------------------------------------------------------------------------------------- roofline
@pytest.mark.parametrize("threads", [1, 2])
def test_limits_are_positive(threads):
    limits = roofline.survey(threads, 1 << 20)
    assert {"ghz", "dram_read", "memcpy"} <= limits.keys() and all(value > 0 for value in limits.values())
    assert torch.get_num_threads() == threads
    roofline.bind(1)


def test_threads_are_bound_to_a_cpu_each_and_freed_again():
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two CPUs")
    roofline.warm_up(2, 0.01)
    masks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
    bound = [cpu for mask in masks if len(mask) == 1 for cpu in mask]
    assert len(set(bound)) == 2 and len(os.sched_getaffinity(0)) == 1
    roofline.warm_up(1, 0.01)
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize("name", roofline.PEAKS)
def test_multiply_counts_what_it_does(name):
    torch.set_num_threads(1)
    flops = roofline.multiply(name, 1e6)
    if flops:
        assert flops == pytest.approx(1e6, rel=0.01)
    else:
        assert roofline.rate(name) == 0


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [0, 1, 100, 4096, 4097, 1 << 20, (1 << 20) + 12345])
def test_copy_copies_every_byte_and_no_more(nbytes, threads):
    torch.set_num_threads(threads)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    target = torch.zeros(nbytes + 64, dtype=torch.uint8)
    roofline.copy(target, source)
    assert torch.equal(target[:nbytes], source) and not target[nbytes:].any()
    roofline.read(source)


@pytest.mark.isa
def test_the_peak_is_that_of_the_active_instruction_set(isa):
    bf16 = {"scalar": None, "avx2": "fp32_ymm", "avx512_bf16": "bf16_dot", "amx_bf16": None}.get(isa, "fp32_zmm")
    fp32 = "fp32_zmm" if isa.startswith(("avx512", "amx")) else bf16
    assert roofline.peak_name(torch.bfloat16) == bf16
    assert roofline.peak_name(torch.float32) == roofline.peak_name(torch.float16) == fp32
