"""Starting an engine in a process of its own, and comparing what it generates with the same model in float32.

The judge is transformers on the FP8 checkpoint's weights written out in float32, fed the engine's own tokens: at each
position where its first choice is ahead by more than ``GAP`` the engine must have chosen it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Between logits in bf16 (steps of 0.125 at 16 to 32) and in float32, a lead of two steps is no tie.
GAP = 0.25
TIMEOUT_S = 300

SMALL_MACHINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "BLOCKSCALE_LOG": "info",
}


class EngineError(Exception):
    """The engine's process failed; the message is the end of what it printed."""


@dataclass(frozen=True)
class Answer:
    """What the process answered, and all that it printed."""

    values: dict[str, Any]
    log: str


def environment(**more: str) -> dict[str, str]:
    """Of an engine's process; None removes a variable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BLOCKSCALE_")}
    return {**kept, **SMALL_MACHINE, **more}


def run_engine(
    model: Path | str, prompts: list[list[int]], max_tokens: int, env: dict[str, str] | None = None, **more: Any
) -> Answer:
    """Generate greedily; ``more`` are further fields of the request (see engine_process.py).

    Raises:
        EngineError: the process ended with an error or not in time.
    """
    request = {"model": str(model), "prompts": prompts, "max_tokens": max_tokens, **more}
    command = [sys.executable, str(Path(__file__).with_name("engine_process.py")), json.dumps(request)]
    try:
        done = subprocess.run(
            command, env=environment(**(env or {})), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"no answer within {TIMEOUT_S} s: {str(error.stderr)[-3000:]}") from error
    log = done.stdout + done.stderr
    if done.returncode != 0:
        raise EngineError(log[-6000:])
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return Answer(json.loads(answers[-1].removeprefix("ANSWER ")), log)


class Prompts:
    """What the models are asked to continue: 1, 7 and 130 tokens each, in token ids."""

    # SmolLM2 counts without hesitation; the others recite the text from where it is cut.
    COUNTING = ", ".join(str(number) for number in range(1, 60))

    def __init__(self, models: Path) -> None:
        self._models = models

    def of(self, model: str) -> list[list[int]]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._models / f"{model}-bf16")
        if model == "smollm2":
            ids = tokenizer(self.COUNTING)["input_ids"]
            return [[tokenizer.bos_token_id], ids[:7], ids[:130]]
        ids = tokenizer((ROOT / "demo" / "text" / "gettysburg_address.txt").read_text(encoding="utf-8"))["input_ids"]
        return [ids[:1], ids[20:27], ids[30:160]]


@dataclass(frozen=True)
class Agreement:
    """How generated tokens compare with a judge's choices.

    Attributes:
        positions: generated tokens.
        compared: those where the judge's first choice leads by more than ``GAP``.
        wrong: those of the compared where the engine chose another.
        logprob_difference: largest, over all positions, of the chosen token's log-probability.
    """

    positions: int
    compared: int
    wrong: int
    logprob_difference: float


def judge(plain: Path, prompts: list[list[int]], answers: list[list[int]], logprobs: list[list[float]]) -> Agreement:
    """Compare ``answers`` to ``prompts`` with the float32 model in ``plain``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    positions = compared = wrong = 0
    difference = 0.0
    for prompt, ids, given in zip(prompts, answers, logprobs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]
        first = logits.topk(2).values
        certain = first[:, 0] - first[:, 1] > GAP
        chosen = torch.tensor(ids)
        positions += len(ids)
        compared += int(certain.sum())
        wrong += int((certain & (logits.argmax(-1) != chosen)).sum())
        expected = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        difference = max(difference, (expected - torch.tensor(given)).abs().max().item())
    return Agreement(positions, compared, wrong, difference)
