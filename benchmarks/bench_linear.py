"""Times fp8_scaled_mm_cpu against torch's bf16 linear, and any library with the yardstick's two C functions.

    python benchmarks/bench_linear.py                             # 6144 x 4096, bf16 x, one thread
    python benchmarks/bench_linear.py --yardstick libproto.so     # adds proto_pack / proto_mm of that library
    python benchmarks/bench_linear.py --subnormal                 # normal against subnormal data, per x dtype

Every candidate runs in turn on the same inputs in one process, `--rounds` times. Weights rotate through copies that
together exceed the last-level cache several times, so that each call reads its weight from DRAM. Results are checked
against float64 before anything is timed. Columns: median time, its interquartile range, GFLOP/s, GB/s of weight, and
the median of the paired ratios of time to the yardstick's (or torch's).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time

import torch

import blockscale
from blockscale import reference

BLOCK = (128, 128)
ROTATED_BYTES = 384 << 20  # 12 times a 32 MiB last-level cache


def make_weight(N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (N, K) without NaN, and scales that differ from block to block."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (N, K), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x30
    scales = 2.0 ** torch.randint(-8, -2, (-(-N // BLOCK[0]), -(-K // BLOCK[1])), generator=generator).float()
    return codes.view(torch.float8_e4m3fn), scales


def median_iqr(seconds: list[float]) -> tuple[float, float]:
    quartiles = statistics.quantiles(seconds, n=4)
    return quartiles[1], quartiles[2] - quartiles[0]


def interleave(candidates: dict, rounds: int) -> dict[str, list[float]]:
    """Calls every candidate(round) in turn; seconds by name. The first two rounds warm up and are dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(rounds + 2):
        for name, call in candidates.items():
            begin = time.perf_counter()
            call(i)
            elapsed = time.perf_counter() - begin
            if i >= 2:
                seconds[name].append(elapsed)
    return seconds


class Yardstick:
    """A library with proto_pack and proto_mm: bf16 x, 128 x 128 blocks, N a multiple of 16 and K of 128."""

    def __init__(self, path: str, codes: torch.Tensor, scales: torch.Tensor, copies: int, threads: int) -> None:
        self.library = ctypes.CDLL(path)
        self.N, self.K = codes.shape
        self.scales, self.threads = scales, threads
        # Its bytes replace ours in tensors of ours: both libraries then read memory with the same pages.
        self.weights = [blockscale.convert_weight_packed(codes) for _ in range(copies)]
        for weight in self.weights:
            source, target = (ctypes.c_void_p(t.data_ptr()) for t in (codes, weight))
            self.library.proto_pack(source, self.N, self.K, target)

    def __call__(self, x: torch.Tensor, copy: int) -> torch.Tensor:
        out = torch.empty(x.shape[0], self.N, dtype=torch.bfloat16)
        X, W, S, Y = (ctypes.c_void_p(t.data_ptr()) for t in (x, self.weights[copy], self.scales, out))
        self.library.proto_mm(X, x.shape[0], W, self.N, self.K, S, None, Y, self.threads, 0)
        return out


def bench_shape(M: int, args: argparse.Namespace, weight: tuple, peers: dict) -> list[dict]:
    codes, scales = weight
    N, K = codes.shape
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(torch.bfloat16)
    packed = peers["packed"]
    candidates = {
        "blockscale": lambda i: blockscale.fp8_scaled_mm_cpu(x, packed[i % len(packed)], scales, list(BLOCK)),
        "torch bf16": lambda i: torch.nn.functional.linear(x, peers["dense"][i % len(peers["dense"])]),
    }
    if "yardstick" in peers:
        yardstick = peers["yardstick"]
        candidates["yardstick"] = lambda i: yardstick(x, (i + len(packed) // 2) % len(packed))
    want = reference.scaled_mm(x[:4], codes, scales, BLOCK)
    for name, call in candidates.items():
        worst = ((call(0)[:4].double() - want).abs().max() / want.abs().max()).item()
        if not worst < 0.02:
            raise SystemExit(f"bench_linear: {name} is wrong at M = {M}: worst error {worst:.3g} of the largest output")
    seconds = interleave(candidates, args.rounds)
    base = "yardstick" if "yardstick" in seconds else "torch bf16"
    rows = []
    for name, values in seconds.items():
        median, iqr = median_iqr(values)
        ratio = statistics.median(a / b for a, b in zip(values, seconds[base], strict=True))
        rows.append(
            {"M": M, "N": N, "K": K, "kernel": name, "us": median * 1e6, "iqr_us": iqr * 1e6,
             "gflops": 2 * M * N * K / median / 1e9, "gbps": N * K * (2 if name == "torch bf16" else 1) / median / 1e9,
             "ratio": ratio, "base": base}
        )  # fmt: skip
    return rows


def bench_subnormal(args: argparse.Namespace, weight: tuple) -> list[dict]:
    """Time on data whose products, scales and sums are subnormal, over the time on normal data."""
    codes, scales = weight
    packed = blockscale.convert_weight_packed(codes)
    rows = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(16, codes.shape[1]).to(dtype)
        tiny = torch.full_like(x, 1e-39 if dtype != torch.float16 else 1e-7)
        small = torch.full_like(scales, 2.0**-130)
        seconds = interleave(
            {
                "normal": lambda i: blockscale.fp8_scaled_mm_cpu(x, packed, scales, list(BLOCK)),
                "subnormal": lambda i: blockscale.fp8_scaled_mm_cpu(tiny, packed, small, list(BLOCK)),
            },
            args.rounds,
        )
        ratio = statistics.median(a / b for a, b in zip(seconds["subnormal"], seconds["normal"], strict=True))
        rows.append({"x": str(dtype).removeprefix("torch."), "M": 16, "subnormal / normal": ratio})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--N", type=int, default=6144)
    parser.add_argument("--K", type=int, default=4096)
    parser.add_argument("--M", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--yardstick", metavar="PATH", help="library with proto_pack and proto_mm")
    parser.add_argument("--subnormal", action="store_true", help="time subnormal against normal data instead")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    weight = make_weight(args.N, args.K)
    if args.subnormal:
        rows = bench_subnormal(args, weight)
    else:
        codes, scales = weight
        copies = max(2, ROTATED_BYTES // (args.N * args.K))
        dense = blockscale.dequantize_weight_block_fp8(codes, scales, list(BLOCK), torch.bfloat16)
        peers = {
            "packed": [blockscale.convert_weight_packed(codes) for _ in range(copies)],  # on huge pages, as in a layer
            "dense": [dense.clone() for _ in range(max(2, copies // 2))],
        }
        if args.yardstick:
            peers["yardstick"] = Yardstick(args.yardstick, codes, scales, copies, args.threads)
        rows = [row for M in args.M for row in bench_shape(M, args, weight, peers)]
    environment = {"torch": torch.__version__, "threads": args.threads, "isa": blockscale.isa_info()["active"]}
    if args.json:
        print(json.dumps({"context": environment, "benchmarks": rows}, indent=1))
        return
    print("  ".join(f"{key} {value}" for key, value in environment.items()))
    columns = list(rows[0])
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    for line in [columns, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
