"""Resident memory of one variant, as the operating system reports it.

Run as a program it loads one variant and prints one line of JSON; `measure` starts it in a process of its own, so that
memory which an earlier model left behind can't be counted or reused.
"""

import json
import subprocess
import sys
from pathlib import Path

FORWARD_TOKENS = 64


def resident_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS (resident now) or VmHWM (the most so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure(variant_name: str, bf16_directory: Path, fp8_directory: Path) -> dict:
    """Loads the variant called `variant_name` in a new process; bytes above what the process took before the model."""
    command = [sys.executable, __file__, variant_name, str(bf16_directory), str(fp8_directory)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"demo: measuring the memory of {variant_name} failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    import model as models
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  (now: its code is no part of the model's memory)

    name, bf16_directory, fp8_directory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    variant = next(v for v in (models.FP32, models.BF16, models.FP8_BF16, models.FP8_FP32) if v.name == name)
    if variant.checkpoint == "fp8":
        import blockscale  # noqa: F401
    torch.ones(512, 512) @ torch.ones(512, 512)  # starts the thread pool and the BLAS buffers
    before = resident_bytes("VmRSS")
    network = models.load(variant, bf16_directory, fp8_directory)
    loaded = resident_bytes("VmRSS")
    with torch.inference_mode():
        network(torch.arange(FORWARD_TOKENS)[None], use_cache=False, logits_to_keep=1)
    result = {
        "loaded": loaded - before,
        "after_forward": resident_bytes("VmRSS") - before,
        "peak": resident_bytes("VmHWM") - before,
        "weights": models.weight_bytes(network),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
