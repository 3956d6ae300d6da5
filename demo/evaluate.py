"""What the model knows: perplexity over the bundled text, and a greedy answer to one question."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

TEXT = Path(__file__).parent / "text"
DOCUMENTS = ("gettysburg_address.txt", "second_inaugural_address.txt", "declaration_of_independence.txt")
WINDOW = 512
QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class Score:
    """Negative log-likelihood of each window: (sum in nats, number of predicted tokens)."""

    windows: tuple[tuple[float, int], ...]

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.windows)

    def perplexity(self, windows: int | None = None) -> float:
        """exp(mean negative log-likelihood), over the first `windows` windows or over all."""
        chosen = self.windows[:windows]
        return math.exp(sum(nats for nats, _ in chosen) / sum(count for _, count in chosen))


def text_windows(tokenizer, at_least: int | None = None) -> list[torch.Tensor]:
    """The documents as rows of token ids `[1, <= WINDOW]`; windows past `at_least` predicted tokens are left out."""
    windows: list[torch.Tensor] = []
    predicted = 0
    for document in DOCUMENTS:
        ids = torch.tensor([tokenizer((TEXT / document).read_text(encoding="utf-8"))["input_ids"]])
        for window in ids.split(WINDOW, dim=1):
            if at_least is not None and predicted >= at_least:
                return windows
            windows.append(window)
            predicted += window.shape[1] - 1
    return windows


@torch.inference_mode()
def score(model: nn.Module, windows: list[torch.Tensor], label: str) -> Score:
    """Scores each token of a window given the ones before it, from the logits on in float64: fp32 is off by 8e-6."""
    results = []
    for ids in tqdm(windows, desc=f"  {label}", unit="window", leave=False, disable=None):
        logits = model(ids, use_cache=False).logits[0, :-1].double()
        nats = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        results.append((nats, ids.shape[1] - 1))
    return Score(tuple(results))


def prompt_ids(tokenizer) -> torch.Tensor:
    """QUESTION in the model's chat template, `[1, tokens]`."""
    chat = [{"role": "user", "content": QUESTION}]
    return tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids


@torch.inference_mode()
def answer(model: nn.Module, tokenizer, tokens: int = 24) -> tuple[list[int], str]:
    """Greedy answer to QUESTION: (token ids, text)."""
    prompt = prompt_ids(tokenizer)
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens)
    ids = output[0, prompt.shape[1] :].tolist()
    return ids, tokenizer.decode(ids, skip_special_tokens=True).strip()


@torch.inference_mode()
def first_choice(model: nn.Module, tokenizer) -> tuple[str, str, float, float]:
    """How sure the answer's first token is: (best, second, difference of logits, bf16's step at the best)."""
    logits = model(prompt_ids(tokenizer), use_cache=False, logits_to_keep=1).logits[0, -1].float()
    (best, second), ids = (part.tolist() for part in logits.topk(2))
    step = 2.0 ** (math.frexp(best)[1] - 8)  # bf16 has 8 significant bits
    return tokenizer.decode(ids[0]), tokenizer.decode(ids[1]), best - second, step
