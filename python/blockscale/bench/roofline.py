"""What this machine can do at most, measured beside the kernels through the library ``_bench.so``.

A limit is timed in the same rounds as the candidates it judges: on a shared or throttled machine both move together,
and the ratio stays.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import diagnostics

__all__ = ["PEAKS", "bind", "copy", "multiply", "peak_name", "rate", "read", "survey", "warm_up"]

LIBRARY = Path(__file__).parents[1] / "_bench.so"
PEAKS = {"bf16_dot": "bf16 dot product, 512 bits", "fp32_zmm": "fp32 FMA, 512 bits", "fp32_ymm": "fp32 FMA, 256 bits"}
_ALLOWED = os.sched_getaffinity(0)
_FLOPS_OF_TURN = {"bf16_dot": 16 * 64, "fp32_zmm": 16 * 32, "fp32_ymm": 12 * 16}
# By the instruction set whose kernel runs; amx_bf16 has none: no machine with tiles was there to try a loop of them.
_PEAK_OF_ISA = {"avx2": "fp32_ymm", "avx512": "fp32_zmm", "avx512_vbmi": "fp32_zmm", "avx512_bf16": "bf16_dot"}


@functools.cache
def _library() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise ImportError(
            f"blockscale: expected the compiled library {LIBRARY.name} beside the package, got none; "
            "build and install it with `pip install .` in the source tree"
        )
    library = ctypes.CDLL(str(LIBRARY))
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.blockscale_bench_read.argtypes = [pointer, integer, ctypes.c_int]
    library.blockscale_bench_read.restype = None
    library.blockscale_bench_copy.argtypes = [pointer, pointer, integer, ctypes.c_int]
    library.blockscale_bench_copy.restype = None
    library.blockscale_bench_multiply.argtypes = [ctypes.c_char_p, integer, ctypes.c_int]
    library.blockscale_bench_multiply.restype = integer
    library.blockscale_bench_bind.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
    library.blockscale_bench_bind.restype = None
    library.blockscale_bench_cycles.argtypes = [integer]
    library.blockscale_bench_cycles.restype = None
    return library


def read(data: Tensor) -> None:
    """Read a contiguous tensor on all of torch's threads: plain loads, nothing prefetched by hand."""
    _library().blockscale_bench_read(data.data_ptr(), data.numel() * data.element_size(), torch.get_num_threads())


def copy(target: Tensor, source: Tensor) -> None:
    """memcpy between contiguous tensors on all of torch's threads."""
    nbytes = source.numel() * source.element_size()
    _library().blockscale_bench_copy(target.data_ptr(), source.data_ptr(), nbytes, torch.get_num_threads())


def multiply(name: str, flops: float) -> int:
    """Do about ``flops`` operations with one of ``PEAKS`` on all of torch's threads.

    Returns:
        The exact number done, 0 where this CPU lacks the instruction.
    """
    threads = torch.get_num_threads()
    turns = max(1, round(flops / (_FLOPS_OF_TURN[name] * threads)))
    return _library().blockscale_bench_multiply(name.encode(), turns, threads)


@functools.cache
def _rate(name: str, threads: int) -> float:
    flops = multiply(name, 1e7 * threads)
    return 1e9 * _best_rate(lambda: multiply(name, 1e7 * threads), flops) if flops else 0.0


def rate(name: str) -> float:
    """FLOP/s of one of ``PEAKS`` on all of torch's threads, measured once; 0 where this CPU lacks the instruction."""
    return _rate(name, torch.get_num_threads())


def peak_name(x: torch.dtype) -> str | None:
    """Which of ``PEAKS`` bounds a product with x of this dtype on the active instruction set, None if none is known."""
    active = diagnostics.isa_info()["active"]
    if active in ("avx512_bf16", "amx_bf16") and x != torch.bfloat16:
        active = "avx512_vbmi"
    return _PEAK_OF_ISA.get(active)


def warm_up(threads: int, seconds: float = 0.2) -> None:
    """Set torch's thread count, bind several threads to a CPU each, and run them until the clock has risen."""
    torch.set_num_threads(threads)
    bind(threads)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if not multiply("fp32_ymm", 2e7):
            return


def bind(threads: int) -> None:
    """Bind torch's threads to a CPU each, on as many cores as there are; one thread, or more than CPUs, to none."""
    os.sched_setaffinity(0, _ALLOWED)
    if 1 < threads <= len(_ALLOWED):
        cpus = sorted(_ALLOWED, key=lambda cpu: (_place_in_core(cpu), cpu))[:threads]
        _library().blockscale_bench_bind((ctypes.c_int * threads)(*cpus), threads)


def _place_in_core(cpu: int) -> int:
    """0 for the first CPU of a core, 1 for the second."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    siblings = re.findall(r"\d+", path.read_text()) if path.exists() else []
    return siblings.index(str(cpu)) if str(cpu) in siblings else 0


def _best_rate(call: Any, work: float, rounds: int = 7) -> float:
    rates = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        rates.append(work / (time.perf_counter() - begin) / 1e9)
    return statistics.median(rates)


def survey(threads: int, nbytes: int = 512 << 20) -> dict[str, float]:
    """Medians on ``threads`` threads: GB/s of reading and copying ``nbytes``, GFLOP/s of each peak this CPU has, GHz."""
    from .. import ops

    warm_up(threads)
    cycles = 20_000_000
    limits = {"ghz": _best_rate(lambda: _library().blockscale_bench_cycles(cycles), 4 * cycles, 3)}
    for name in PEAKS:
        flops = multiply(name, 2e6)
        if flops:
            work = multiply(name, 1e9 * threads)
            limits[name] = _best_rate(lambda name=name: multiply(name, 1e9 * threads), work)
    # Packed bytes lie on huge pages, as those of a layer do.
    rows = max(16, nbytes >> 14)
    source = ops.convert_weight_packed(torch.ones(rows, 1 << 14, dtype=torch.uint8).view(torch.float8_e4m3fn))
    target = ops.convert_weight_packed(source.view(torch.float8_e4m3fn))
    limits["dram_read"] = _best_rate(lambda: read(source), source.numel())
    limits["memcpy"] = _best_rate(lambda: copy(target, source), source.numel())
    return limits
