"""Which layers a checkpoint's lists mean.

Lists name modules in many ways: with or without the wrapper prefixes that change between a model and its text-only
load (``model.``, ``language_model.``), by a bare last part (``gate``), as a subtree (``model.vision_tower``), as shell
patterns or as ``re:`` expressions. Whole parts of the path are compared, so ``gate`` is not ``gate_proj``.

A layer template may stand for all its copies: ``N`` or ``E`` in the place of an index matches any index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

__all__ = ["FUSED_SHARDS", "entry_error", "is_kept_by_default", "matches", "matching_entry", "shard_names"]

# Parts that wrap a text model's own modules; leading ones say nothing about which module is meant.
_WRAPPERS = frozenset({"model", "language_model", "text_model", "base_model", "module", "thinker"})
_PLACEHOLDERS = frozenset({"N", "E"})

# Fused layer -> the checkpoint's layers that engines concatenate into it.
FUSED_SHARDS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "w13": ("w1", "w3"),
}

# Not linear layers, or never quantised, unless a checkpoint names them: embeddings, heads, norms and router gates.
_KEPT_PART = re.compile(r"embed|embed_.*|.*embeddings?|wte|wpe|lm_head|router|.*norm|ln_\w+")
_KEPT_LAST_PART = re.compile(r"gate|shared_expert_gate")


def is_kept_by_default(name: str) -> bool:
    """Whether the layer stays in its dtype in checkpoints that do not mention it.

    >>> is_kept_by_default("model.layers.3.mlp.gate"), is_kept_by_default("model.layers.3.mlp.gate_proj")
    (True, False)
    """
    parts = name.split(".")
    return any(_KEPT_PART.fullmatch(part) for part in parts) or bool(_KEPT_LAST_PART.fullmatch(parts[-1]))


def matches(entry: str, name: str) -> bool:
    """Whether ``entry`` of a list means the layer ``name``, or a module that holds it.

    >>> matches("model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate")
    True
    >>> matches("gate", "model.layers.0.mlp.gate_proj"), matches("gate", "model.layers.0.mlp.gate")
    (False, True)
    >>> matches("re:.*self_attn.*", "layers.7.self_attn.q_proj"), matches("model.layers.1", "model.layers.11.fc")
    (True, False)
    """
    names = {name, ".".join(_unwrapped(name)), "model." + ".".join(_unwrapped(name))}
    if entry.startswith("re:"):
        pattern = re.compile(entry[3:])
        return any(pattern.match(one) for one in names)
    if any(char in entry for char in "*?["):
        return any(fnmatchcase(one, entry) for one in names)
    parts, wanted = _unwrapped(name), _unwrapped(entry)
    if _run_at(parts, wanted, 0):
        return True
    # Absolute names start where the model does; a bare one may mean a part at any depth.
    absolute = len(wanted) < len(entry.split(".")) or any(part.isdigit() for part in wanted)
    return not absolute and any(_run_at(parts, wanted, start) for start in range(1, len(parts)))


def entry_error(entry: str) -> str | None:
    """Why ``entry`` can't be compared with any name, or None.

    >>> entry_error("re:("), entry_error("lm_head")
    ('missing ), unterminated subpattern at position 0', None)
    """
    try:
        matches(entry, "layer")
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return None


def matching_entry(entries: Iterable[str], name: str) -> str | None:
    """The first of ``entries`` that means ``name``, or None."""
    return next((entry for entry in entries if matches(entry, name)), None)


def shard_names(name: str, fused: dict[str, Sequence[str]] | None = None) -> list[str]:
    """Names in the checkpoint of what the engine's layer ``name`` is made of; [] if it is not fused.

    >>> shard_names("model.layers.0.mlp.gate_up_proj")
    ['model.layers.0.mlp.gate_proj', 'model.layers.0.mlp.up_proj']
    """
    owner, _, last = name.rpartition(".")
    shards = (FUSED_SHARDS if fused is None else fused).get(last, ())
    return [f"{owner}.{shard}" if owner else shard for shard in shards]


def _unwrapped(name: str) -> list[str]:
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part not in _WRAPPERS), len(parts))
    return parts[first:] or parts[-1:]


def _run_at(parts: list[str], wanted: list[str], start: int) -> bool:
    found = parts[start : start + len(wanted)]
    return len(found) == len(wanted) and all(map(_same_part, found, wanted))


def _same_part(part: str, wanted: str) -> bool:
    return part == wanted or (part in _PLACEHOLDERS and wanted.isdigit())
