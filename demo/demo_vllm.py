"""SmolLM2-135M-Instruct as a block-FP8 checkpoint in vLLM: refused alone, run with the plugin, compared with bf16.

Run by `make demo-vllm` in an environment with vLLM. Exit status 1 when a check fails.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import make_checkpoints
from report import Gates, heading, note, table

FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "demo-vllm"
TIMEOUT_S = 300
# One process and one thread, with 1 GB for the cache of keys and values: what a small machine has room for.
SMALL_MACHINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


def run(checkpoint: str, **env: str) -> dict:
    """What the engine reports, or {"error": its last words}."""
    command = [sys.executable, str(Path(__file__).with_name("vllm_run.py")), str(FOLDER / checkpoint)]
    done = subprocess.run(
        command,
        env={**os.environ, **SMALL_MACHINE, **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if answers:
        return json.loads(answers[-1].removeprefix("ANSWER "))
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "Error: " in line or "requires" in line]
    return {"error": "\n".join(line.partition("]: ")[2] or line for line in lines[-3:])}


def main() -> int:
    gates = Gates()
    heading("Checkpoints")
    make_checkpoints.make(FOLDER, "smollm2", ("block",))
    print(f"  {FOLDER}/smollm2-bf16, and -block: quant_method fp8, 128 x 128 blocks, as DeepSeek and Qwen publish them")
    note("Sides of 576 and 192: q, k and v are fused into one layer in which k and v begin inside a scale block.")

    heading("vLLM alone (BLOCKSCALE_VLLM=0)")
    alone = run("smollm2-block", BLOCKSCALE_VLLM="0")
    print("  " + alone.get("error", alone.get("answer", "")).replace("\n", "\n  "), flush=True)

    heading("vLLM with blockscale installed, and bf16")
    reports = {"FP8, blockscale": run("smollm2-block"), "bf16, vLLM": run("smollm2-bf16", BLOCKSCALE_VLLM="0")}
    plain = run("smollm2-block-dequantised", BLOCKSCALE_VLLM="0")
    for name, report in reports.items():
        print(f"  {name}: {report.get('answer', report.get('error'))!r}")
    rows = [
        [name, f"{report['tokens_per_second']:.1f}", f"{report['engine_mb']:.0f} MB"]
        for name, report in reports.items()
        if "error" not in report
    ]
    table(["engine", "tokens/s", "resident"], rows)
    gates.check("error" not in reports["FP8, blockscale"], "vLLM runs the FP8 checkpoint with blockscale")
    ours = reports["FP8, blockscale"]
    gates.check("Paris" in ours.get("answer", ""), f"it answers: {ours.get('answer')!r}")
    same = ours.get("counting") == plain.get("counting", "nothing")
    gates.check(same, f"it counts as the dequantised weights do, 48 greedy tokens: {ours.get('counting')!r}")
    return gates.verdict()


if __name__ == "__main__":
    sys.exit(main())
