"""The closed formulas of benchmarks/bench_amx_bound.py count what the kernel executes, by the emulator's counters."""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
import sys

import pytest
import torch
from isa_worker import isa_table

pytestmark = pytest.mark.isa

# The enum AmxemuOperation of tests/amx_emulator/amxemu.h.
LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS, OPERATIONS = 0, 2, 3, 4, 6, 7, 8


@pytest.fixture(scope="module")
def bound():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_amx_bound.py"
    spec = importlib.util.spec_from_file_location("bench_amx_bound", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def emulator():
    """The preloaded emulator, while amx_bf16 is the active instruction set."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "amxemu_active") or not process.amxemu_active():
        pytest.skip("the AMX emulator is not preloaded")
    table = isa_table()
    if table["active"] != "amx_bf16":
        pytest.skip(table["isas"]["amx_bf16"]["reason"])
    return process


@pytest.mark.parametrize(
    "K, block_k", [(1, 128), (96, 128), (200, 48), (512, 128), (515, 192), (2304, 128), (4200, 4200)]
)
@pytest.mark.parametrize("N", [16, 40, 96, 112])
@pytest.mark.parametrize("M", [1, 4, 16, 17, 32, 48, 64, 129, 300])
def test_counts(bound, emulator, M, N, K, block_k):
    codes = torch.randint(0, 127, (N, K), dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed = torch.ops.blockscale.convert_weight_packed(codes)
    scales = torch.ones(bound.ceil_div(N, 128), bound.ceil_div(K, block_k))
    x = torch.ones(M, K, dtype=torch.bfloat16)
    emulator.amxemu_reset_counters()
    torch.ops.blockscale.fp8_scaled_mm_cpu(x, packed, scales, [128, block_k], None, torch.float32, True)
    counters = (ctypes.c_uint64 * OPERATIONS)()
    emulator.amxemu_counters(counters)
    expected = bound.counts(M, N, K, block_k)
    assert counters[TDPBF16PS] == expected.tdp
    assert counters[TILELOADD] == expected.load
    assert counters[TILESTORED] == counters[TILEZERO] == expected.store
    assert counters[LDTILECFG] == counters[TILERELEASE] == 1
    assert emulator.amxemu_tiles_configured() == 0


def test_the_kernel_uses_the_tiling_that_the_bound_prefers(bound):
    source = (pathlib.Path(bound.__file__).parents[1] / "csrc/isa/amx_bf16.cpp").read_text()
    assert f"constexpr int kBlockRows = {bound.BLOCK_ROWS};" in source
    for row in bound.tilings():
        best = min(value for key, value in row.items() if key != "M")
        assert row[f"rows<={bound.BLOCK_ROWS}"] == best
        assert row.get("1x4", best) == best
