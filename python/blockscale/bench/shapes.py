"""The linear layers of three public models, fused as engines fuse them: name -> (N, K), out = x[M, K] · weight[N, K]ᵀ.

Numbers come from the models' public config.json:

    Qwen3-0.6B    hidden 1024, intermediate 3072, 16 heads and 8 key-value heads of 128
    Qwen3-8B      hidden 4096, intermediate 12288, 32 heads and 8 key-value heads of 128
    DeepSeek-V3   hidden 7168, intermediate 18432 (dense layers), 2048 (the shared expert), 128 heads, q_lora_rank 1536,
                  kv_lora_rank 512, qk_nope_head_dim 128, qk_rope_head_dim 64, v_head_dim 128

qkv_proj is q, k and v side by side, gate_up_proj gate and up, fused_qkv_a_proj the two down projections of latent
attention (with the shared rotary part of the keys). Routed experts are another op and are not here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["MODELS", "Shape", "find_shapes"]


@dataclass(frozen=True)
class Shape:
    """One weight: ``model`` (or "custom"), the layer's name, and its sides."""

    model: str
    layer: str
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.model}.{self.layer}"


def _grouped_attention(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int) -> dict:
    return {
        "qkv_proj": ((heads + 2 * kv_heads) * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
        "gate_up_proj": (2 * intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }


def _latent_attention(
    hidden: int, intermediate: int, shared: int, heads: int, q_lora: int, kv_lora: int, nope: int, rope: int, v: int
) -> dict:
    return {
        "fused_qkv_a_proj": (q_lora + kv_lora + rope, hidden),
        "q_b_proj": (heads * (nope + rope), q_lora),
        "kv_b_proj": (heads * (nope + v), kv_lora),
        "o_proj": (hidden, heads * v),
        "gate_up_proj": (2 * intermediate, hidden),
        "down_proj": (hidden, intermediate),
        "shared_gate_up_proj": (2 * shared, hidden),
        "shared_down_proj": (hidden, shared),
    }


_LAYERS = {
    "qwen3-0.6b": _grouped_attention(1024, 3072, 16, 8, 128),
    "qwen3-8b": _grouped_attention(4096, 12288, 32, 8, 128),
    "deepseek-v3": _latent_attention(7168, 18432, 2048, 128, 1536, 512, 128, 64, 128),
}
MODELS = {model: [Shape(model, layer, N, K) for layer, (N, K) in layers.items()] for model, layers in _LAYERS.items()}


def find_shapes(name: str) -> list[Shape]:
    """The shapes that ``name`` stands for: a model, ``model.layer``, or ``NxK``.

    Raises:
        ValueError: it is none of them.

    >>> find_shapes("qwen3-8b.o_proj"), find_shapes("576x7168")
    ([Shape(model='qwen3-8b', layer='o_proj', N=4096, K=4096)], [Shape(model='custom', layer='576x7168', N=576, K=7168)])
    """
    if name in MODELS:
        return MODELS[name]
    model, _, layer = name.rpartition(".")
    found = [shape for shape in MODELS.get(model, []) if shape.layer == layer]
    if found:
        return found
    sides = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name)
    if not sides:
        known = ", ".join(MODELS)
        raise ValueError(f"expected {known}, MODEL.LAYER or NxK, got {name}")
    return [Shape("custom", name, int(sides[1]), int(sides[2]))]
