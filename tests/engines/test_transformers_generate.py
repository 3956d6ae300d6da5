"""transformers with FP8 layers kept, in this process: the same greedy text, the memory, and what it saves."""

from __future__ import annotations

import pytest
import torch
from engines import judge

FORMATS = ("block", "tensor", "ct-block", "ct-channel", "ct-tensor", "ct-weight-only")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def tensors_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def generate(model, prompts):
    """Greedy ids, and the log-probability of each."""
    ids, logprobs = [], []
    for prompt in prompts:
        done = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        chosen = done.sequences[0, len(prompt) :]
        logits = torch.cat(done.logits).float()
        ids.append(chosen.tolist())
        logprobs.append(logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist())
    return ids, logprobs


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", ["smollm2", "aligned", "ragged"])
def test_tokens_are_those_of_the_dequantised_model(models, prompts, model, form, record_property):
    from blockscale import BlockScaledLinear
    from blockscale.integrations.transformers import load

    folder = models / f"{model}-{form}"
    loaded = load(folder)
    layers = [module for module in loaded.modules() if isinstance(module, BlockScaledLinear)]
    assert len(layers) == 7 * loaded.config.num_hidden_layers
    assert all(layer.weight.dtype == torch.uint8 for layer in layers)
    ids, logprobs = generate(loaded, prompts.of(model))
    agreement = judge(folder.with_name(folder.name + "-dequantised"), prompts.of(model), ids, logprobs)
    record_property("agreement", str(agreement))
    assert agreement.compared >= 0.9 * agreement.positions
    assert agreement.wrong == 0
    assert agreement.logprob_difference < 0.3


@pytest.mark.parametrize("form", FORMATS)
def test_saved_model_is_the_loaded_checkpoint(models, prompts, tmp_path, form):
    from blockscale.integrations.transformers import load

    folder = models / f"ragged-{form}"
    model = load(folder)
    model.save_pretrained(tmp_path)
    before, after = tensors_of(folder), tensors_of(tmp_path)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    again = load(tmp_path)
    assert generate(again, prompts.of("ragged")[1:2]) == generate(model, prompts.of("ragged")[1:2])


def test_alone_transformers_dequantises(models):
    from blockscale import BlockScaledLinear
    from blockscale.integrations.transformers import disable, enable
    from transformers import AutoModelForCausalLM

    folder = models / "aligned-block"
    alone = AutoModelForCausalLM.from_pretrained(folder)
    assert alone.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    enable()
    enable()
    try:
        kept = AutoModelForCausalLM.from_pretrained(folder)
        assert isinstance(kept.model.layers[0].mlp.up_proj, BlockScaledLinear)
    finally:
        disable()
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


def test_plain_models_are_unaffected(models):
    from blockscale.integrations.transformers import load

    assert type(load(models / "aligned-bf16").model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_refusals_name_file_tensor_and_rule(models, tmp_path):
    from blockscale.integrations.transformers import load
    from test_vllm_refusals import FUSED, LAYER, damaged

    source = models / "ragged-block"
    missing = damaged(source, tmp_path / "missing", lambda tensors: tensors.pop(f"{FUSED}.weight_scale_inv"))
    with pytest.raises(
        ValueError, match=f"expected a scale beside the float8_e4m3fn weight `{FUSED}.weight`.*safetensors"
    ):
        load(missing)

    def widen(tensors):
        tensors[f"{LAYER}.weight_scale_inv"] = tensors[f"{LAYER}.weight_scale_inv"].repeat(2, 1)

    misshapen = damaged(source, tmp_path / "misshapen", widen)
    with pytest.raises(
        ValueError, match=rf"`{LAYER}.weight` in .*safetensors can't be loaded: .*expected `scales` of shape"
    ):
        load(misshapen)
    unknown = damaged(source, tmp_path / "unknown", config=lambda quantization: quantization.update(quant_method="fp7"))
    with pytest.raises(NotImplementedError, match="`quant_method` of .*config.json .*got 'fp7'"):
        load(unknown)
