"""What vLLM does with FP8 on this CPU without the plugin: when one of these fails, upstream has lifted a gate.

Then the README's table, INTEGRATION of this kernel and the order of the lists want a second look.
"""

from __future__ import annotations

import pytest
import torch
from engines import EngineError, run_engine

ALONE = {"BLOCKSCALE_VLLM": "0"}

no_amx = pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="this CPU has AMX tiles: vLLM has kernels for it"
)


@no_amx
@pytest.mark.parametrize("form", ["block", "ct-block"])
def test_block_fp8_is_refused(models, prompts, form):
    with pytest.raises(
        EngineError, match="Failed to find a kernel that can implement the ScaledMM linear layer"
    ) as error:
        run_engine(models / f"aligned-{form}", prompts.of("aligned")[1:2], 4, ALONE)
    assert "CPUFp8BlockScaledMMKernel requires AMX tile support" in str(error.value)


@no_amx
@pytest.mark.parametrize("form", ["tensor", "ct-tensor"])
def test_per_tensor_fp8_meets_a_stub(models, prompts, form):
    with pytest.raises(EngineError, match=r"static_scaled_fp8_quant\(\) expected at most 0 argument"):
        run_engine(models / f"aligned-{form}", prompts.of("aligned")[1:2], 4, ALONE)


@no_amx
def test_weight_only_fp8_has_no_kernel(models, prompts):
    with pytest.raises(EngineError, match="Failed to find a kernel that can implement the ScaledMM linear layer"):
        run_engine(models / "aligned-ct-weight-only", prompts.of("aligned")[1:2], 4, ALONE)


def test_bf16_is_the_same_with_and_without_the_plugin(models, prompts):
    alone = run_engine(models / "aligned-bf16", prompts.of("aligned"), 16, ALONE)
    beside = run_engine(models / "aligned-bf16", prompts.of("aligned"), 16)
    assert alone.values["ids"] == beside.values["ids"]
    assert alone.values["logprobs"] == beside.values["logprobs"]
    assert beside.values["kernels"] == {}
    assert "blockscale: layer" not in beside.log
