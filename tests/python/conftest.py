"""Fixtures of the Python tests.

Tests marked `isa` depend on the instruction set: run them once per cap with BLOCKSCALE_MAX_ISA set and `-m isa`.
The fixture `isa` names the instruction set this process runs, and ends the ids: M3-N96-K320-bf16-avx2.
"""

from __future__ import annotations

import blockscale  # noqa: F401  registers torch.ops.blockscale
import pytest
import torch
from isa_worker import IsaWorker, isa_table


def pytest_configure(config):
    config.addinivalue_line("markers", "isa: depends on the instruction set; run once per BLOCKSCALE_MAX_ISA")


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", [isa_table()["active"]])


@pytest.fixture(autouse=True)
def one_thread():
    """Each test starts from one torch thread, so that small references do not wait for a pool; tests of threads and of
    larger shapes ask for more."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def workers():
    """workers(name) -> a live process capped at that instruction set, or a skip with its own reason."""
    running = {}

    def worker(name: str) -> IsaWorker:
        if name not in running:
            running[name] = IsaWorker(BLOCKSCALE_MAX_ISA=name)
            row = next(row for row in running[name].isa_info()["isas"] if row["name"] == name)
            running[name].unusable = None if row["active"] else row["reason"]
        if running[name].unusable is not None:
            pytest.skip(f"{name}: {running[name].unusable}")
        return running[name]

    yield worker
    for process in running.values():
        process.close()
