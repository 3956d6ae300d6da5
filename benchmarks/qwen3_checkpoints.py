"""Checkpoints of Qwen3-0.6B's published sizes with random weights: what an engine takes for them is what it takes for real ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

from fp8_formats import FORMATS, write_fp8_checkpoint

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}


def write(folder: Path, forms: list[str]) -> dict[str, Path]:
    """Writes what is missing of ``bf16`` and the formats ``forms``; name -> checkpoint."""
    paths = {form: folder / f"qwen3-0.6b-{form}" for form in ["bf16", *forms]}
    if not paths["bf16"].exists():
        _write_bf16(paths["bf16"])
    for form in forms:
        if not paths[form].exists():
            print(f"  writing {paths[form].name} ...", flush=True)
            write_fp8_checkpoint(paths["bf16"], paths[form], FORMATS[form])
    return paths


def _write_bf16(path: Path) -> None:
    print(f"  writing {path.name} ...", flush=True)
    generator = torch.Generator().manual_seed(0)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    queries, keys = (CONFIG[heads] * CONFIG["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    tensors = {"model.embed_tokens.weight": normal(CONFIG["vocab_size"], hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for index in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name, shape in shapes.items():
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = normal(*shape)
        for name in ("gate", "up"):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = normal(inner, hidden)
        tensors[f"{layer}.mlp.down_proj.weight"] = normal(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            tensors[f"{layer}.self_attn.{name}.weight"] = torch.ones(CONFIG["head_dim"], dtype=torch.bfloat16)
    partial = path.with_name(path.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    (partial / "config.json").write_text(json.dumps(CONFIG, indent=2))
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    partial.rename(path)
