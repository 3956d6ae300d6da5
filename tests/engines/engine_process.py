"""One vLLM engine in a process of its own: a JSON request in argv[1], a JSON answer in the line of stdout that begins with ANSWER.

Request: ``model``, ``prompts`` (lists of token ids), ``max_tokens``, ``options`` (of vllm.LLM), ``together`` (one batch
of all prompts, after each alone), ``watch_rows`` (look at what goes in and out of each FP8 layer).
Answer: ``ids`` and ``logprobs`` of each prompt alone, ``batched_ids``, ``kernels`` (class names), ``rows`` (how often a
row came again in another batch, and how often its bits then differed), ``resident_mb``, ``peak_mb``.

Not a test and imports vLLM: tests start it with :func:`engines.run_engine`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

SMALL = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "seed": 0,
}


class Rows:
    """Rows of x that a layer has seen, and the bits that it made of them, whatever else was in the batch."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, bytes], tuple[int, bytes]] = {}
        self.again = self.differ = 0

    def watch(self, kernel_class: type) -> None:
        apply = kernel_class.apply_weights

        def apply_weights(kernel: Any, layer: Any, x: torch.Tensor, bias: Any = None, **kwargs: Any) -> torch.Tensor:
            out = apply(kernel, layer, x, bias, **kwargs)
            rows = x.reshape(-1, x.shape[-1])
            for row, result in zip(rows, out.reshape(rows.shape[0], -1), strict=True):
                self._add((id(layer), _bytes(row)), (rows.shape[0], _bytes(result)))
            return out

        kernel_class.apply_weights = apply_weights

    def _add(self, key: tuple[int, bytes], value: tuple[int, bytes]) -> None:
        before = self.seen.setdefault(key, value)
        if before[0] != value[0]:
            self.again += 1
            self.differ += before[1] != value[1]


def _bytes(row: torch.Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()


def _memory() -> dict[str, float]:
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    return {
        "resident_mb": int(fields["VmRSS"].split()[0]) / 1024,
        "peak_mb": int(fields["VmHWM"].split()[0]) / 1024,
    }


def _kernels(model: Any) -> dict[str, int]:
    """Class names of the kernels of the model's linear layers."""
    counts: dict[str, int] = {}
    for module in model.modules():
        method = getattr(module, "scheme", None) or getattr(module, "quant_method", None)
        kernel = getattr(method, "fp8_linear", None) or getattr(method, "linear_kernel", None)
        if kernel is not None:
            name = type(kernel).__name__
            counts[name] = counts.get(name, 0) + 1
    return counts


def run(request: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    rows = Rows()
    if request.get("watch_rows"):
        from blockscale.integrations.vllm_kernels import BlockscaleKernel

        rows.watch(BlockscaleKernel)
    options = {**SMALL, **request.get("options", {})}
    engine = LLM(request["model"], **{key: value for key, value in options.items() if value is not None})
    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], logprobs=2, ignore_eos=True)
    answer: dict[str, Any] = {"ids": [], "logprobs": []}
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    for prompt in prompts:
        (done,) = engine.generate([prompt], sampling, use_tqdm=False)
        ids = list(done.outputs[0].token_ids)
        answer["ids"].append(ids)
        answer["logprobs"].append([step[one].logprob for step, one in zip(done.outputs[0].logprobs, ids, strict=True)])
    if request.get("together"):
        answer["batched_ids"] = [
            list(done.outputs[0].token_ids) for done in engine.generate(prompts, sampling, use_tqdm=False)
        ]
    if options.get("tensor_parallel_size", 1) == 1:
        answer["kernels"] = engine.apply_model(_kernels)[0]
    return {**answer, "rows": {"again": rows.again, "differ": rows.differ}, **_memory()}


if __name__ == "__main__":
    print("\nANSWER " + json.dumps(run(json.loads(sys.argv[1]))), flush=True)
