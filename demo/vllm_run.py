"""One question to a vLLM engine in this process: answer, speed and memory as JSON. argv[1]: checkpoint."""

import json
import sys
import time

QUESTION = "What is the capital of France?"
# The model counts without hesitation: greedy tokens are the same for whoever computes right, whatever the rounding.
COUNTING = "1, 2, 3,"
TOKENS = 48


def resident_mb() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    before = resident_mb()
    engine = LLM(sys.argv[1], dtype="bfloat16", max_model_len=256, max_num_seqs=4, enforce_eager=True)
    messages = [{"role": "user", "content": QUESTION}]
    engine.chat(messages, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    (answer,) = engine.chat(messages, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    seconds = []
    for tokens in (1, TOKENS + 1):
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        begin = time.perf_counter()
        (counted,) = engine.generate([COUNTING], sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    report = {
        "answer": answer.outputs[0].text.strip(),
        "counting": COUNTING + counted.outputs[0].text,
        "tokens_per_second": TOKENS / (seconds[1] - seconds[0]),
        "engine_mb": resident_mb() - before,
    }
    print("\nANSWER " + json.dumps(report), flush=True)
