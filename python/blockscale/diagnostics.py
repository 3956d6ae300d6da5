"""What this machine runs, and whether it runs it right."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from . import ops

__all__ = ["environment", "isa_info", "selftest"]

_TIMEOUT_S = 120  # for one ISA; it takes about 4 s


def isa_info() -> dict[str, Any]:
    """Instruction sets of the library, lowest first.

    Returns:
        ``max_isa`` (the cap that ``BLOCKSCALE_MAX_ISA`` sets, or None), ``active`` (its name), and ``isas``: for each
        ``name``, ``compiled``, ``usable``, ``active``, ``reason`` (why not usable) and ``calls`` (how many its kernel
        has served in this process).

    Raises:
        ValueError: ``BLOCKSCALE_MAX_ISA`` is misspelt.

    >>> [isa["name"] for isa in isa_info()["isas"]]
    ['scalar', 'avx2', 'avx512', 'avx512_vbmi', 'avx512_bf16', 'amx_bf16']
    """
    return json.loads(ops.isa_info())


def environment() -> dict[str, Any]:
    """Versions and threads: ``blockscale``, ``torch``, ``python``, ``threads``.

    >>> sorted(environment())
    ['blockscale', 'python', 'threads', 'torch']
    """
    from . import __version__

    return {
        "blockscale": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def selftest() -> dict[str, Any]:
    """Run the kernels of each usable instruction set, each in a process of its own, against the reference.

    All 256 codes bit-exact, ragged shapes within the error bound, equal bits at every number of rows, quantise and
    pack and back; for bfloat16, float16 and float32 x.

    Returns:
        ``ok``, and ``checks``: for each ``isa``, ``name``, ``ok`` and ``detail`` (what is wrong).

    Raises:
        ValueError: ``BLOCKSCALE_MAX_ISA`` is misspelt.

    >>> selftest()["ok"]  # doctest: +SKIP
    True
    """
    names = [isa["name"] for isa in isa_info()["isas"] if isa["usable"]]
    with ThreadPoolExecutor(2) as pool:  # most of a process's time is the import of torch
        checks = [check for result in pool.map(_run, names) for check in result]
    return {"ok": all(check["ok"] for check in checks), "checks": checks}


def _run(isa: str) -> list[dict[str, Any]]:
    package_parent = str(Path(__file__).parents[1])
    paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "BLOCKSCALE_MAX_ISA": isa, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "blockscale.isa_checks"]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        return json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or ["no message"])[-1]
        detail = f"exit status {error.returncode}: {last_line}"
    except subprocess.TimeoutExpired:
        detail = f"no answer within {_TIMEOUT_S} s"
    return [{"isa": isa, "name": "run", "ok": False, "detail": detail}]
