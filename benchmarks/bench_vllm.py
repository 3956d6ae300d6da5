"""Times vLLM at Qwen3-0.6B's sizes: bf16, FP8 with blockscale, and vLLM's own op with its AMX gate lifted.

    python benchmarks/bench_vllm.py FOLDER [--rounds 5] [--candidates bf16 block ...] [--eager] [--json FILE]

Each candidate is an engine in a process of its own, one thread on one core; all stay loaded and are asked in turn, so
that the machine's drift meets them alike. FOLDER keeps the checkpoints (random weights, 1 to 2.5 GB). Columns: decode
(tokens/s, one sequence and eight, without the prefill), prefill (tokens/s of a prompt of 256), the ratio to bf16 from
the same rounds, and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import qwen3_checkpoints

PREFILL = 256
REQUESTS = {"decode 1": {"decode": 1}, "decode 8": {"decode": 8}, "prefill": {"prefill": PREFILL}}
TOKENS = {"decode 1": 1, "decode 8": 8, "prefill": PREFILL}


@dataclass(frozen=True)
class Candidate:
    """A checkpoint's format, variables of the process, and whether vLLM's own op is let in."""

    form: str
    env: dict[str, str] = field(default_factory=dict)
    own_op: bool = False


CANDIDATES = {
    "bf16": Candidate("bf16", {"BLOCKSCALE_VLLM": "0"}),
    "block": Candidate("block"),
    "channel": Candidate("ct-channel"),
    "tensor": Candidate("ct-tensor"),
    "vllm-op": Candidate("block", {"BLOCKSCALE_VLLM": "0"}, own_op=True),
    "block-avx2": Candidate("block", {"BLOCKSCALE_MAX_ISA": "avx2"}),
    "channel-alone": Candidate("ct-channel", {"BLOCKSCALE_VLLM": "0"}),
}
DEFAULT = ["bf16", "block", "vllm-op"]


class Process:
    """An engine that waits for requests."""

    def __init__(self, name: str, candidate: Candidate, model: Path, compiled: bool) -> None:
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        request = json.dumps({"model": str(model), "own_op": candidate.own_op, "compiled": compiled})
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("vllm_engine.py")), request],
            env={**os.environ, **settings, **candidate.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def ask(self, request: dict[str, Any]) -> Any:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)

    def _answer(self) -> Any:
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise SystemExit(f"bench_vllm: the engine {self.name} ended, see its messages above")


def start(folder: Path, names: list[str], compiled: bool) -> dict[str, Process]:
    forms = list(dict.fromkeys(CANDIDATES[name].form for name in names if CANDIDATES[name].form != "bf16"))
    paths = qwen3_checkpoints.write(folder, forms)
    engines = {}
    for name in names:
        print(f"  starting {name} ...", flush=True)
        engines[name] = Process(name, CANDIDATES[name], paths[CANDIDATES[name].form], compiled)
        for request in REQUESTS.values():  # the first call allocates
            engines[name].ask(request)
    return engines


def measure(engines: dict[str, Process], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by engine and request, each request of a round asked of every engine in turn."""
    seconds = {name: {request: [] for request in REQUESTS} for name in engines}
    for _ in range(rounds):
        for key, request in REQUESTS.items():
            for name, engine in engines.items():
                seconds[name][key].append(engine.ask(request))
    return seconds


def report(seconds: dict[str, dict[str, list[float]]], memory: dict[str, dict[str, int]]) -> None:
    base = "bf16" if "bf16" in seconds else next(iter(seconds))
    print(f"{'':14}" + "".join(f"{key + ' tok/s':>17} {'x ' + base:>7}" for key in REQUESTS), end="")
    print(f"{'linear MB':>11} {'weights MB':>11} {'resident MB':>12}")
    for name, requests in seconds.items():
        cells = ""
        for key, times in requests.items():
            ratio = statistics.median(b / t for b, t in zip(seconds[base][key], times, strict=True))
            cells += f"{TOKENS[key] / statistics.median(times):17.1f} {ratio:7.2f}"
        used = memory[name]
        print(f"{name:14}{cells}{used['linear'] / 1e6:11.1f} {used['all'] / 1e6:11.1f} {used['resident'] / 1e6:12.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=DEFAULT)
    parser.add_argument("--eager", action="store_true", help="without the engine's default, to compile the model")
    parser.add_argument("--json", type=Path, help="write seconds and bytes there")
    options = parser.parse_args()
    engines = start(options.folder, options.candidates, not options.eager)
    seconds = measure(engines, options.rounds)
    memory = {name: engine.ask({"memory": True}) for name, engine in engines.items()}
    for engine in engines.values():
        engine.end()
    report(seconds, memory)
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "memory": memory}, indent=2))


if __name__ == "__main__":
    main()
