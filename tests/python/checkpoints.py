"""A toy model with the names of a language model, and checkpoints of it as transformers writes them."""

from __future__ import annotations

import json

import safetensors.torch as safetensors_torch
import torch
from blockscale import quantize_checkpoint
from safetensors import safe_open
from torch import nn

HIDDEN, INNER = 96, 200  # ragged against 128 and against the 16 columns of a strip


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=True)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        return self.o_proj(self.q_proj(x))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4, bias=False)
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(torch.relu(self.gate_proj(x))) * self.gate(x).sum(-1, keepdim=True)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.self_attn = Attention()
        self.mlp = Mlp()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    """A model with the names of a language model; `lm_head` is tied to the embedding."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed_tokens = nn.Embedding(50, HIDDEN)
        self.visual = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(HIDDEN, 50, bias=False)
        self.register_buffer("steps", torch.tensor(3))
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


CONVERTED = sorted(
    f"layers.{i}.{name}.weight"
    for i in range(2)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
)


def save(model, folder, shards=1, config=None):
    """Write `model` as transformers does: config.json, one file or numbered shards with an index, other files."""
    folder.mkdir(parents=True)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if getattr(model, "lm_head", None) is not None and model.lm_head.weight is model.embed_tokens.weight:
        del tensors["lm_head.weight"]
    names = sorted(tensors)
    if shards == 1:
        safetensors_torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            part = {name: tensors[name] for name in names[i::shards]}
            weight_map.update(dict.fromkeys(part, file))
            safetensors_torch.save_file(part, folder / file, {"format": "pt"})
        index = {"metadata": {"total_size": 1, "note": "kept"}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "toy", "torch_dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text('{"é": 1}', encoding="utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"not copied")
    (folder / "pooling").mkdir()
    (folder / "pooling" / "config.json").write_text("{}")
    return folder


def read(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors.update((name, file.get_tensor(name).clone()) for name in file.keys())  # noqa: SIM118
    return tensors


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def convert(src, dst, **options):
    return quantize_checkpoint(src, dst, progress=False, **options)


def fp8_tensors(name, scales, scale_name="weight_scale_inv", n=8, k=8):
    return {f"{name}.weight": torch.ones(n, k).to(torch.float8_e4m3fn), f"{name}.{scale_name}": scales}
