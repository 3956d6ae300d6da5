"""Times the kernel over torch._scaled_mm against torch's bf16 linear on a Hopper GPU; tests it first.

    python benchmarks/bench_cuda.py                  # tests, then the table; under 4 minutes
    python benchmarks/bench_cuda.py --no-tests --json results.json

Every candidate runs in turn on the same inputs, as a CUDA graph, `--rounds` times; weights rotate through copies that
together exceed the L2 cache. Columns: median time in µs, interquartile range, TFLOP/s, weight GB/s, and the ratio to
bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from blockscale.kernels import BlockWiseTorchFP8ScaledMMLinearKernel, FP8ScaledMMLinearLayerConfig, route
from torch import nn

CHECKPOINT = {"quant_method": "fp8", "weight_block_size": [128, 128]}
SHAPES = [(576, 7168), (2112, 7168), (7168, 2048), (4096, 7168), (7168, 16384), (1368, 1368)]
ROTATED_BYTES = 256 << 20  # 4 times an H100's L2 cache of 50 MB, and more


def make_layer(N: int, K: int, config: FP8ScaledMMLinearLayerConfig) -> tuple[nn.Module, object]:
    layer = nn.Module()
    codes = torch.randint(0, 0x7F, (N, K), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    layer.weight = nn.Parameter(codes, requires_grad=False)
    scales = torch.rand(-(-N // 128), -(-K // 128), device="cuda") * 0.01
    layer.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
    kernel = BlockWiseTorchFP8ScaledMMLinearKernel(config)
    kernel.process_weights_after_loading(layer)
    return layer, kernel


def captured(call) -> torch.cuda.CUDAGraph:
    """`call` as a graph: what is timed is the device, not Python."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * start.elapsed_time(end)


def bench_shape(M: int, N: int, K: int, rounds: int) -> list[dict]:
    decision = route(CHECKPOINT, "layer", platform="cuda", weight_shape=(N, K))
    if decision.kernel is not BlockWiseTorchFP8ScaledMMLinearKernel:
        raise SystemExit("; ".join(decision.reasons))
    copies = max(2, ROTATED_BYTES // (N * K))
    x = torch.randn(M, K, dtype=torch.bfloat16, device="cuda")
    layers = [make_layer(N, K, decision.config) for _ in range(min(copies, 16))]
    weights = [torch.randn(N, K, dtype=torch.bfloat16, device="cuda") for _ in range(min(copies // 2 + 1, 16))]
    graphs = {
        "blockscale": [captured(partial(kernel.apply_weights, layer, x)) for layer, kernel in layers],
        "torch bf16": [captured(partial(nn.functional.linear, x, weight)) for weight in weights],
    }
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(rounds + 2):
        for name, copies_of in graphs.items():
            elapsed = microseconds(copies_of[i % len(copies_of)])
            if i >= 2:  # the first two warm up
                times[name].append(elapsed)
    rows = []
    for name, measured in times.items():
        low, median, high = statistics.quantiles(measured, n=4)
        weight_bytes = N * K * (1 if name == "blockscale" else 2)
        rows.append(
            {
                "M": M,
                "N": N,
                "K": K,
                "kernel": name,
                "us": median,
                "iqr": high - low,
                "tflops": 2 * M * N * K / median / 1e6,
                "gbs": weight_bytes / median / 1e3,
                "ratio": statistics.median(a / b for a, b in zip(times["torch bf16"], measured, strict=True)),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("-M", type=int, nargs="+", default=[1, 16, 83, 1024])
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    supported, reason = BlockWiseTorchFP8ScaledMMLinearKernel.is_supported()
    if not torch.cuda.is_available() or not supported:
        print(f"bench_cuda: {reason or 'no CUDA device'}", file=sys.stderr)
        return 1
    if not args.no_tests:
        tests = Path(__file__).parents[1] / "tests/python/kernels/test_cuda_device.py"
        status = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "cuda", str(tests)]).returncode
        if status:
            return status
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(f"{'M':>5} {'N':>6} {'K':>6} {'kernel':12} {'µs':>9} {'iqr':>7} {'TFLOP/s':>8} {'GB/s':>7} {'x bf16':>7}")
    rows = []
    for N, K in SHAPES:
        for M in args.M:
            for row in bench_shape(M, N, K, args.rounds):
                rows.append(row)
                print(
                    f"{row['M']:5} {row['N']:6} {row['K']:6} {row['kernel']:12} {row['us']:9.1f} {row['iqr']:7.1f} "
                    f"{row['tflops']:8.1f} {row['gbs']:7.0f} {row['ratio']:7.2f}"
                )
    if args.json:
        context = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}
        Path(args.json).write_text(json.dumps({"context": context, "benchmarks": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
