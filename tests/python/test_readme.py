"""Blocks of the README that say how to use the package do what they say."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def block(heading: str) -> str:
    """The Python block below ``heading``."""
    section = README.read_text(encoding="utf-8").partition(f"### {heading}\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found, heading
    return found[1]


def test_as_torch_ops(capsys):
    exec(compile(block("As torch.ops"), "README.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out.startswith("torch.Size([4, 576]) torch.bfloat16")
