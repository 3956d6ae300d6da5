"""Checkpoints that vLLM can't run right: refused with file, tensor and rule, also where vLLM says nothing."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from engines import EngineError, run_engine
from safetensors.torch import load_file, save_file

LAYER = "model.layers.1.mlp.down_proj"
FUSED = "model.layers.1.self_attn.k_proj"


def damaged(source, folder, change=None, config=None):
    """A copy of ``source``, its tensors passed through ``change`` and its quantisation through ``config``."""
    shutil.copytree(source, folder)
    if change is not None:
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        whole = json.loads((folder / "config.json").read_text())
        config(whole["quantization_config"])
        (folder / "config.json").write_text(json.dumps(whole))
    return folder


def refusal(folder, env=None) -> str:
    with pytest.raises(EngineError) as error:
        run_engine(folder, [[1, 2, 3]], 2, env)
    return str(error.value)


@pytest.mark.parametrize(
    "form, name", [("block", "weight_scale_inv"), ("ct-channel", "weight_scale"), ("tensor", "weight_scale")]
)
def test_missing_scales(models, tmp_path, form, name):
    folder = damaged(models / f"aligned-{form}", tmp_path / "model", lambda tensors: tensors.pop(f"{LAYER}.{name}"))
    words = refusal(folder)
    assert f"layer `{LAYER}`: expected `{name}` written by the load, finite and not negative" in words
    assert f"(checkpoint {folder})" in words


def test_missing_scales_of_a_fused_shard(models, tmp_path):
    folder = damaged(models / "ragged-block", tmp_path / "model", lambda t: t.pop(f"{FUSED}.weight_scale_inv"))
    words = refusal(folder)
    assert "layer `model.layers.1.self_attn.qkv_proj`: expected `weight_scale_inv` written by the load" in words
    assert f"(checkpoint {folder})" in words


@pytest.mark.parametrize(
    "model, layer, fused", [("aligned", LAYER, LAYER), ("ragged", FUSED, "model.layers.1.self_attn.qkv_proj")]
)
def test_misshapen_scales(models, tmp_path, model, layer, fused):
    def widen(tensors):
        scales = tensors[f"{layer}.weight_scale_inv"]
        tensors[f"{layer}.weight_scale_inv"] = torch.cat([scales, scales], 1)

    folder = damaged(models / f"{model}-block", tmp_path / "model", widen)
    words = refusal(folder)
    assert f"blockscale: layer `{fused}`: expected `weight_scale_inv`" in words
    assert f"checkpoint {folder}" in words


def test_unknown_method_is_refused_by_the_engine(models, tmp_path):
    folder = damaged(models / "aligned-block", tmp_path / "model", config=lambda q: q.update(quant_method="fp7"))
    words = refusal(folder)
    assert "fp7" in words
    assert words.count("blockscale: layer") == 0


def test_ragged_shards_without_the_kernel(models, tmp_path):
    """Where something else would run the layer, vLLM would misplace its scales."""
    folder = models / "ragged-block"
    words = refusal(folder, {"VLLM_DISABLED_KERNELS": "BlockscaleFp8BlockLinearKernel"})
    assert "Failed to find a kernel that can implement" in words
