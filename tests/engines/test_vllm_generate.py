"""Offline generation with vLLM: every format and model against the same weights in float32.

Each run asks for prompts of 1, 7 and 130 rows, alone and together, and watches the rows of every FP8 layer: a row that
comes again in a batch of another size must give the same bits.
"""

from __future__ import annotations

import pytest
from engines import judge, run_engine

FORMATS = ("block", "tensor", "ct-block", "ct-channel", "ct-tensor", "ct-weight-only")
MODELS = ("smollm2", "aligned", "ragged")
# Log-probabilities of the same token, float32 activations against bf16: 0.13 was the largest seen.
LOGPROB_LIMIT = 0.3
TOKENS = 40


def check(folder, prompts, answer, record_property) -> None:
    agreement = judge(folder.with_name(folder.name + "-dequantised"), prompts, answer["ids"], answer["logprobs"])
    record_property("agreement", str(agreement))
    print(f"{folder.name}: {agreement}")
    assert agreement.compared >= 0.9 * agreement.positions
    assert agreement.wrong == 0
    assert agreement.logprob_difference < LOGPROB_LIMIT


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_the_dequantised_model(models, prompts, model, form, record_property):
    folder = models / f"{model}-{form}"
    answer = run_engine(folder, prompts.of(model), TOKENS, together=True, watch_rows=True).values
    check(folder, prompts.of(model), answer, record_property)
    layers = 30 if model == "smollm2" else 3
    assert sum(answer["kernels"].values()) == 4 * layers
    assert all(name.startswith("Blockscale") for name in answer["kernels"])
    assert answer["rows"]["again"] > 500
    assert answer["rows"]["differ"] == 0
    assert answer["batched_ids"] == answer["ids"]


@pytest.mark.parametrize("form", ["block", "ct-block"])
def test_experts(models, prompts, form, record_property):
    folder = models / f"mixture-{form}"
    answer = run_engine(folder, prompts.of("mixture"), TOKENS, together=True)
    check(folder, prompts.of("mixture"), answer.values, record_property)
    assert answer.values["batched_ids"] == answer.values["ids"]
    assert "4 experts of 256 x 256: CPUFp8BlockScaledMMKernel" in answer.log


@pytest.mark.parametrize("form", ["block", "ct-tensor"])
def test_two_ranks_share_the_layers(models, prompts, form, record_property):
    """Each takes q 288, k 96 and v 96 rows, 352 of gate and up, and 288 and 352 columns: no border is one of a block."""
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    folder = models / f"ragged-{form}"
    answer = run_engine(folder, prompts.of("ragged"), TOKENS, options=options)
    check(folder, prompts.of("ragged"), answer.values, record_property)
    assert answer.log.count("layer `model.layers.0.self_attn.qkv_proj`: N=480") == 2


@pytest.mark.parametrize("form", ["block", "ct-channel"])
def test_the_engine_compiles_the_model(models, prompts, form, record_property):
    folder = models / f"aligned-{form}"
    answer = run_engine(folder, prompts.of("aligned"), TOKENS, options={"enforce_eager": False})
    check(folder, prompts.of("aligned"), answer.values, record_property)


@pytest.mark.parametrize("quantization", ["fp8_per_block", "fp8_per_tensor"])
def test_vllm_quantises_a_bf16_model(models, prompts, quantization):
    """The engine's own rounding: only that the text survives it."""
    bf16 = run_engine(models / "ragged-bf16", prompts.of("ragged"), TOKENS).values
    fp8 = run_engine(
        models / "ragged-bf16", prompts.of("ragged"), TOKENS, options={"quantization": quantization}
    ).values
    assert all(name.startswith("Blockscale") for name in fp8["kernels"])
    assert fp8["ids"][2] == bf16["ids"][2]
