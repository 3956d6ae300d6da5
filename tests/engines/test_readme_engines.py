"""The README's blocks for vLLM and transformers, run as scripts beside a checkpoint ./model-fp8."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from engines import ROOT, TIMEOUT_S, environment


def block(heading: str, language: str) -> str:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"### {heading}\n")[2]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found, heading
    return found[1]


@pytest.mark.parametrize("heading", ["Use it with vLLM", "Use it with transformers"])
def test_block_answers(models, tmp_path, heading):
    (tmp_path / "model-fp8").symlink_to(models / "smollm2-block")
    (tmp_path / "block.py").write_text(block(heading, "python"))
    done = subprocess.run(
        [sys.executable, "block.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "Paris" in done.stdout
    assert "CPUFp8BlockScaledMMKernel" in done.stderr or "keep their FP8 weights" in done.stderr


def test_the_command_of_the_server_is_the_one_that_is_tested():
    assert "python -m vllm.entrypoints.openai.api_server --model ./model-fp8" in block("Use it with vLLM", "bash")
