"""The OpenAI server: an OpenAI client gets the tokens of the dequantised model, in several processes as it comes."""

from __future__ import annotations

import pytest
from engines import judge
from openai_server import server


FORMATS = ("block", "tensor", "ct-block", "ct-channel", "ct-tensor", "ct-weight-only")


@pytest.mark.parametrize("model, form", [("smollm2", "block"), *(("ragged", form) for form in FORMATS)])
def test_client_gets_the_tokens_of_the_dequantised_model(models, prompts, model, form, record_property):
    folder = models / f"{model}-{form}"
    ids, logprobs = [], []
    with server(folder, "--enforce-eager") as client:
        for prompt in prompts.of(model):
            (choice,) = client.completions.create(
                model="model",
                prompt=prompt,
                max_tokens=40,
                temperature=0,
                logprobs=1,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            ).choices
            ids.append(choice.token_ids)
            logprobs.append(choice.logprobs.token_logprobs)
    agreement = judge(folder.with_name(folder.name + "-dequantised"), prompts.of(model), ids, logprobs)
    record_property("agreement", str(agreement))
    assert agreement.compared >= 0.9 * agreement.positions
    assert agreement.wrong == 0
