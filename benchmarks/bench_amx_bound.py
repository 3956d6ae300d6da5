"""A bound on the time of the amx_bf16 kernel from its instruction counts: no measurement, no tile is executed.

    python benchmarks/bench_amx_bound.py                 # model shapes at M = 1, 4, 16, 64, 512
    python benchmarks/bench_amx_bound.py --rows 32 256   # other M
    python benchmarks/bench_amx_bound.py --tilings       # why row blocks of 128, 2 x 2 and 1 x 4 tiles
    python benchmarks/bench_amx_bound.py --json

Core cycles of one thread, weights in cache:

    cycles >= max(16 TDPBF16PS, 8 TILELOADD, 16 TILESTORED, L2 bytes / 48) + decode of B tiles

16, 8 and 16 are the vendor's throughputs; 48 bytes a cycle from L2 is an assumption. Decoding 512 codes to a B tile
takes 40 cycles, measured on Zen 4 (55 when the tile goes to L2), and overlaps with nothing here. A test holds `counts`
to the emulator's counters.

Columns, in cycles for each 16 x 16 x 32 product that the shape needs (16 is the tile unit's limit):
    amx            the kernel
    panel          a design that decodes the whole K of 32 columns into L2 once and then reads B tiles from there
    avx512_bf16    VDPBF16PS, two a cycle (Zen 4 measures one), in row blocks of 12 that decode again
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

TILE_ROWS, TILE_K, STRIP, UNIT_K = 16, 32, 16, 128
BLOCK_ROWS = 128  # kBlockRows of csrc/isa/amx_bf16.cpp
KIB = 1024
TILE_BYTES = TILE_ROWS * 64
L1_BYTES, L2_BYTES_PER_CYCLE = 48 * KIB, 48  # Sapphire Rapids
TDP_CYCLES, LOAD_CYCLES, STORE_CYCLES = 16, 8, 16
DECODE_CYCLES, DECODE_TO_L2_CYCLES = 40, 55
VDPBF16PS_PER_CYCLE = 2  # a CPU with two full-width units

# (N, K) of one layer's linears.
SHAPES = {
    "Qwen3-8B qkv": (6144, 4096),
    "Qwen3-8B o": (4096, 4096),
    "Qwen3-8B gate_up": (24576, 4096),
    "Qwen3-8B down": (4096, 12288),
    "DeepSeek-V3 q_b": (24576, 1536),
    "DeepSeek-V3 kv_a": (576, 7168),
    "DeepSeek-V3 o": (7168, 16384),
    "DeepSeek-V3 expert gate_up": (4096, 7168),
    "DeepSeek-V3 expert down": (7168, 2048),
}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def unit_depths(K: int, block_k: int) -> list[int]:
    """Lengths of the runs of k that are summed before a scale is applied."""
    return [
        min(UNIT_K, block_end - k)
        for block in range(0, K, block_k)
        for block_end in [min(block + block_k, K)]
        for k in range(block, block_end, UNIT_K)
    ]


def row_blocks(M: int, most: int = BLOCK_ROWS) -> list[int]:
    """Rows of each block, as the plan cuts them: equal blocks, multiples of 16."""
    rows = M if M <= most else ceil_div(ceil_div(M, ceil_div(M, most)), TILE_ROWS) * TILE_ROWS
    return [min(rows, M - row) for row in range(0, M, rows)]


@dataclass
class Counts:
    """Instructions of one call on one thread; `l2_bytes` move between L1 and L2."""

    tdp: int = 0
    load: int = 0
    store: int = 0
    decode: int = 0
    l2_bytes: int = 0

    def cycles(self, decode_cycles: int = DECODE_CYCLES) -> float:
        tiles = max(
            TDP_CYCLES * self.tdp,
            LOAD_CYCLES * self.load,
            STORE_CYCLES * self.store,
            self.l2_bytes / L2_BYTES_PER_CYCLE,
        )
        return tiles + decode_cycles * self.decode


def counts(M: int, N: int, K: int, block_k: int = 128, most_rows: int = BLOCK_ROWS, wide: int = 4) -> Counts:
    """The kernel's counts. 2 x 2 tiles (1 x 2 for an odd row tile) for more than 16 rows, else 1 x `wide`."""
    strips = ceil_div(N, STRIP)
    units = unit_depths(K, block_k)
    steps = sum(ceil_div(depth, TILE_K) for depth in units)
    total = Counts()
    blocks = row_blocks(M, most_rows)
    for rows in blocks:
        row_tiles = ceil_div(rows, TILE_ROWS)
        width = wide if blocks[0] <= TILE_ROWS else 2
        groups = ceil_div(strips, width)
        pairs, odd = divmod(row_tiles, 2) if width == 2 else (0, row_tiles)
        a_loads = row_tiles * groups * steps
        b_loads = (pairs + odd) * strips * steps
        total.tdp += row_tiles * strips * steps
        total.load += a_loads + b_loads
        total.store += row_tiles * strips * len(units)
        total.decode += strips * steps
        # A comes from L2. Totals do too, there and back, once totals, B and C tiles leave no room in L1 for A's stream.
        total.l2_bytes += a_loads * TILE_BYTES
        held = row_tiles * width * TILE_BYTES + width * 4 * TILE_BYTES + 4 * TILE_BYTES
        if held > L1_BYTES - 8 * KIB:
            total.l2_bytes += 2 * row_tiles * strips * len(units) * TILE_BYTES
    return total


def panel_counts(M: int, N: int, K: int, block_k: int = 128) -> Counts:
    """Whole-K panels: every strip is decoded once for all rows, and all B tiles come from L2."""
    total = counts(M, N, K, block_k, most_rows=max(M, 1))
    strips, steps = ceil_div(N, STRIP), sum(ceil_div(depth, TILE_K) for depth in unit_depths(K, block_k))
    row_tiles = ceil_div(M, TILE_ROWS)
    b_loads = ceil_div(row_tiles, 2) * strips * steps
    # Totals of two row tiles stay in L1, because one pair of row tiles walks all of K before the next one starts.
    total.l2_bytes = (row_tiles * ceil_div(strips, 2) * steps + b_loads + strips * steps) * TILE_BYTES
    return total


def avx512_bf16_cycles(M: int, N: int, K: int) -> float:
    """VDPBF16PS multiplies 16 columns by 2 k; blocks of 12 rows (16 where M fits in one) decode each strip again."""
    strips = ceil_div(N, STRIP)
    blocks = 1 if M <= 16 else ceil_div(M, 12)
    return M * strips * ceil_div(K, 2) / VDPBF16PS_PER_CYCLE + blocks * strips * ceil_div(K, TILE_K) * DECODE_CYCLES


def table(rows: list[int]) -> list[dict]:
    result = []
    for name, (N, K) in SHAPES.items():
        for M in rows:
            kernel = counts(M, N, K)
            amx = kernel.cycles()
            result.append(
                {
                    "shape": name,
                    "M": M,
                    "N": N,
                    "K": K,
                    "kcycles": amx / 1000,
                    "amx": amx / kernel.tdp,
                    "panel": panel_counts(M, N, K).cycles(DECODE_TO_L2_CYCLES) / kernel.tdp,
                    "avx512_bf16": avx512_bf16_cycles(M, N, K) / kernel.tdp,
                    "loads_per_tdp": kernel.load / kernel.tdp,
                    "decoded_per_tdp": kernel.decode / kernel.tdp,
                }
            )
    return result


def tilings(N: int = 6144, K: int = 4096) -> list[dict]:
    """Cycles for each product under other row blocks and other shapes for few rows."""
    result = []
    for M in (16, 64, 128, 256, 512):
        ideal = counts(M, N, K).tdp
        row = {"M": M}
        for most in (32, 64, 128, 256, 512):
            row[f"rows<={most}"] = counts(M, N, K, most_rows=most).cycles() / ideal
        if M <= TILE_ROWS:
            row |= {f"1x{wide}": counts(M, N, K, wide=wide).cycles() / ideal for wide in (1, 2, 4)}
        result.append(row)
    return result


def _cell(value: float | str) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def print_table(rows: list[dict]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *text]) for i in range(len(columns))]
    for line in [columns, *text]:
        print("  ".join(value.rjust(width) for value, width in zip(line, widths)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512], metavar="M")
    parser.add_argument("--tilings", action="store_true", help="compare row blocks and tile shapes instead")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = tilings() if args.tilings else table(args.rows)
    if args.json:
        print(json.dumps({"kind": "bound, not a measurement", "unit": "cycles per 16x16x32 product", "rows": rows}))
        return
    print("Bound, not a measurement: core cycles for each 16 x 16 x 32 product, one thread, weights in cache.")
    print_table(rows)


if __name__ == "__main__":
    main()
