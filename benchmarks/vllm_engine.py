"""One vLLM engine that bench_vllm.py asks for timings: JSON lines in and out. argv[1]: model, candidate's own settings.

Requests: {"decode": batch}, {"prefill": tokens}, {"memory": true}. Answers: seconds a token step, seconds, or bytes.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

PROMPT, STEPS = 16, 12
VOCABULARY = 50000


def lift_amx_gate() -> None:
    """Let vLLM's own block kernel, which runs on AVX512-BF16 too, be chosen on a CPU without AMX."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    cpu.CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, capability=None: (True, None))


def weights(model: Any) -> dict[str, int]:
    """Bytes of all parameters, each once, and of the linear layers' weights and scales.

    vLLM hands bf16 weights of linear layers to oneDNN, which keeps a copy of the same size that is no parameter.
    """
    whole = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    linear = {
        parameter.data_ptr(): parameter.nbytes for name, parameter in model.named_parameters() if "_proj." in name
    }
    handed_over = 0
    if not sum(linear.values()):
        layers = [module for name, module in model.named_modules() if name.endswith("_proj")]
        handed_over = sum(2 * layer.input_size_per_partition * layer.output_size_per_partition for layer in layers)
    return {"all": sum(whole.values()) + handed_over, "linear": sum(linear.values()) + handed_over}


class Engine:
    def __init__(self, model: str, own_op: bool, compiled: bool) -> None:
        if own_op:
            lift_amx_gate()
        from vllm import LLM

        self.engine = LLM(
            model,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=1024,
            enforce_eager=not compiled,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            distributed_executor_backend="uni",
        )
        self.random = random.Random(0)

    def answer(self, request: dict[str, Any]) -> Any:
        if "decode" in request:
            longer, shorter = (self._seconds(request["decode"], PROMPT, steps) for steps in (STEPS + 1, 1))
            return (longer - shorter) / STEPS
        if "prefill" in request:
            return self._seconds(1, request["prefill"], 1)
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status if ":" in line)
        resident, peak = (1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM"))
        return {**self.engine.apply_model(weights)[0], "resident": resident, "peak": peak}

    def _seconds(self, batch: int, length: int, tokens: int) -> float:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [
            {"prompt_token_ids": [self.random.randrange(VOCABULARY) for _ in range(length)]} for _ in range(batch)
        ]
        begin = time.perf_counter()
        self.engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin


if __name__ == "__main__":
    candidate = json.loads(sys.argv[1])
    engine = Engine(candidate["model"], candidate["own_op"], candidate["compiled"])
    print("ANSWER null", flush=True)
    for line in sys.stdin:
        print("ANSWER " + json.dumps(engine.answer(json.loads(line))), flush=True)
