"""Speed of decoding and of prefill, and how much of it is spent inside the linear layers.

The variants take turns, so that a change of the machine's clock meets all of them; medians. The time inside the layers
is read with hooks in passes of their own, so that the hooks don't slow the passes that give tokens/s.
"""

from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch
from torch import nn
from tqdm import tqdm


@dataclass(frozen=True)
class Plan:
    """How much to measure: `rounds` passes of `decode_steps` single tokens and of one prompt of `prefill_tokens`."""

    rounds: int
    decode_steps: int
    prefill_tokens: int


@dataclass
class Times:
    """Seconds of single passes; `*_linear`: the part spent inside the linear layers."""

    decode: list[float] = field(default_factory=list)
    decode_linear: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    prefill_linear: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        return {name: median(values) for name, values in vars(self).items()}


class LayerClock:
    """Adds up the time inside the given layers while it is open."""

    def __init__(self, layers: list[nn.Module]):
        self.layers = layers
        self.seconds = 0.0

    def __enter__(self) -> "LayerClock":
        def start(module, args):
            self.started = perf_counter()

        def stop(module, args, output):
            self.seconds += perf_counter() - self.started

        self.handles = [layer.register_forward_pre_hook(start) for layer in self.layers]
        self.handles += [layer.register_forward_hook(stop) for layer in self.layers]
        return self

    def __exit__(self, *exception) -> None:
        for handle in self.handles:
            handle.remove()


def decode(model: nn.Module, prompt: torch.Tensor, steps: int) -> list[float]:
    """Seconds of each of `steps` greedy single-token steps after the prompt."""
    output = model(prompt, use_cache=True, logits_to_keep=1)
    seconds = []
    for _ in range(steps):
        token = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        start = perf_counter()
        output = model(token, cache=output.cache, use_cache=True)
        seconds.append(perf_counter() - start)
    return seconds


def prefill(model: nn.Module, prompt: torch.Tensor) -> float:
    """Seconds of one pass over the whole prompt."""
    start = perf_counter()
    model(prompt, use_cache=True, logits_to_keep=1)
    return perf_counter() - start


def decode_linear(model: nn.Module, layers: list[nn.Module], prompt: torch.Tensor, steps: int) -> float:
    """Mean seconds per single-token step inside `layers`."""
    output = model(prompt, use_cache=True, logits_to_keep=1)
    with LayerClock(layers) as clock:
        for _ in range(steps):
            token = output.logits[:, -1].argmax(dim=-1, keepdim=True)
            output = model(token, cache=output.cache, use_cache=True)
    return clock.seconds / steps


@torch.inference_mode()
def measure(models: dict[str, nn.Module], layer_names: list[str], ids: torch.Tensor, plan: Plan) -> dict[str, Times]:
    """Times every model. `ids` `[1, >= prefill_tokens]` gives the prompts, `layer_names` the linear layers."""
    long_prompt, short_prompt = ids[:, : plan.prefill_tokens], ids[:, :8]
    layers = {name: [model.get_submodule(layer) for layer in layer_names] for name, model in models.items()}
    times = {name: Times() for name in models}
    for model in models.values():
        decode(model, short_prompt, 2)
    for name in tqdm([*models] * plan.rounds, desc="  speed", unit="turn", leave=False, disable=None):
        model, result = models[name], times[name]
        result.decode += decode(model, short_prompt, plan.decode_steps)
        result.decode_linear.append(decode_linear(model, layers[name], short_prompt, plan.decode_steps))
        result.prefill.append(prefill(model, long_prompt))
        with LayerClock(layers[name]) as clock:
            prefill(model, long_prompt)
        result.prefill_linear.append(clock.seconds)
    return times
