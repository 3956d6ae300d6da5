"""A small Qwen3 that has learnt one text by heart, so that what it writes shows whether its weights are read right.

Trained on the spot in about a minute on one core. Two geometries: one whose linear layers are multiples of 128, and one
whose fused layers end inside scale blocks, also when two processes share them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

TEXT = Path(__file__).parent / "text" / "gettysburg_address.txt"
END = "<|endoftext|>"
WINDOW = 160  # tokens of a training sequence
BATCH = 8
MAX_STEPS = 700
# Mean loss (nats a token, over 20 steps) at which every next token is certain enough to survive a weight error of 3 %.
LEARNT = 0.02


@dataclass(frozen=True)
class Geometry:
    """Sizes of the network; the comments give the rows of q | k | v, gate | up and the columns of o and down."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int = 3
    experts: int = 0  # 0: one feed-forward network; else so many, of which two serve a token


# q 512 | k 256 | v 256, gate 768 | up 768, o 512, down 768: whole blocks of 128, also in halves.
ALIGNED = Geometry(hidden=256, intermediate=768, heads=8, kv_heads=4, head_dim=64)
# Experts of 256 rows: gate 256 | up 256 each.
MIXTURE = Geometry(hidden=256, intermediate=256, heads=4, kv_heads=2, head_dim=64, layers=2, experts=4)
# q 576 | k 192 | v 192, gate 704 | up 704, o 576, down 704; in halves q 288 | k 96 | v 96, gate 352, o 288, down 352.
RAGGED = Geometry(hidden=320, intermediate=704, heads=6, kv_heads=2, head_dim=96)


def train(directory: Path, geometry: Geometry) -> None:
    """Writes a bf16 checkpoint with tokenizer; the directory exists only when complete."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    model = _model(geometry, tokenizer)
    _learn(model, torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]))
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(directory)


def _model(geometry: Geometry, tokenizer) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.intermediate,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "num_hidden_layers": geometry.layers,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if not geometry.experts:
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    experts = {"num_experts": geometry.experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=geometry.intermediate))


def _tokenizer():
    """Byte-level pairs learnt from the text itself: 384 entries keep the embedding small and any text encodable."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(TEXT)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END)


def _learn(model: nn.Module, tokens: torch.Tensor) -> None:
    """Windows of the text at random places, as a continuation is asked for from any place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    recent: list[float] = []
    for _ in range(MAX_STEPS):
        starts = torch.randint(0, len(tokens) - WINDOW, (BATCH,)).tolist()
        rows = torch.stack([tokens[start : start + WINDOW] for start in starts])
        logits = model(rows, use_cache=False).logits
        # The first tokens of a window have too little before them to say where in the text they are.
        loss = nn.functional.cross_entropy(logits[:, 8:-1].flatten(0, 1), rows[:, 9:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = [*recent[-19:], loss.item()]
        if len(recent) == 20 and sum(recent) / 20 < LEARNT:
            return
    raise SystemExit(f"demo: the text was not learnt in {MAX_STEPS} steps: loss {sum(recent) / len(recent):.3f}")
