"""Fields of a checkpoint's configuration, read by type.

A configuration is somebody's JSON: any field may be missing, null, or of any type. Missing and null are the same here;
whatever else is not of the field's type is refused in one sentence with the field's path. A field's meaning is its
reader's business.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NoReturn

from ..checks import refuse
from .layer_names import entry_error

__all__ = ["LARGEST_SIDE", "Fields", "is_integer", "parse_block_size", "shown"]

LARGEST_SIDE = 2**63 - 1  # ops take int64
_SHOWN = 200  # characters of a refused value
# At most 19 digits, as many as LARGEST_SIDE has: Python converts no text of thousands of digits.
_PAIR = re.compile(r"\s*[\[(]?\s*([0-9]{1,19})\s*[\sx×,]\s*([0-9]{1,19})\s*[\])]?\s*")


def shown(value: object) -> str:
    """``value`` for a sentence, cut to a length that can be read."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, nesting without end
        text = f"{type(value).__name__} too large to print"
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return text if text.isprintable() else repr(text)[1:-1]  # one sentence is one line


def is_integer(value: object) -> bool:
    """Whether ``value`` is an integer, Python's or NumPy's, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class Fields:
    """The mapping at ``path`` of a configuration; ``where`` starts each refusal.

    >>> fields = Fields("layer `fc`", "weights", {"num_bits": 8, "strategy": None})
    >>> fields.integer("num_bits"), fields.text("strategy", "tensor"), fields.flag("dynamic")
    (8, 'tensor', None)
    """

    where: str
    path: str
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            refuse(self.where, f"`{self.path}` to be a mapping", shown(self.values))

    def path_of(self, field: str) -> str:
        """How refusals name ``field``."""
        return f"{self.path}.{field}" if self.path else field

    def refuse(self, field: str, words: str) -> NoReturn:
        """Refuse what ``field`` holds, for it is not as in "expected `field` <words>"."""
        refuse(self.where, f"`{self.path_of(field)}` {words}", shown(self.values.get(field)))

    def has(self, field: str) -> bool:
        """Whether ``field`` is there and not null."""
        return self.values.get(field) is not None

    def text(self, field: str, default: str | None = None) -> Any:
        """A text, or ``default``."""
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, str):
            self.refuse(field, "to be a text")
        return value

    def integer(self, field: str, default: int | None = None) -> Any:
        """An integer that ops can take, or ``default``; true and 1.0 are none."""
        value = self.values.get(field)
        if value is None:
            return default
        if not is_integer(value) or abs(value) > LARGEST_SIDE:
            self.refuse(field, "to be an integer of 64 bits")
        return int(value)

    def positive_number(self, field: str) -> float | None:
        """A finite number above zero, or None."""
        value = self.values.get(field)
        if value is None:
            return None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value <= LARGEST_SIDE or not math.isfinite(value):
            self.refuse(field, "positive and finite")
        return float(value)

    def flag(self, field: str, *also: str) -> Any:
        """True, false, one of the texts in ``also``, or None."""
        value = self.values.get(field)
        if not (value is None or isinstance(value, bool) or (isinstance(value, str) and value in also)):
            self.refuse(field, " or ".join(["to be true, false", *also]))
        return value

    def fields(self, field: str) -> Fields | None:
        """The mapping in ``field``, or None."""
        return Fields(self.where, self.path_of(field), self.values[field]) if self.has(field) else None

    def names(self, field: str) -> list[str] | None:
        """A list of entries that mean layers, or None."""
        value = self.values.get(field)
        if value is None:
            return None
        listed = isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))
        if not listed or not all(isinstance(entry, str) for entry in value):
            self.refuse(field, "to be a list of names")
        self.check_entries(field, value)
        return list(value)

    def check_entries(self, field: str, entries: Collection[str]) -> None:
        """``entries`` are names, shell patterns, or regular expressions that compile."""
        for entry in entries:
            error = entry_error(entry) if isinstance(entry, str) else "not a text"
            if error is not None:
                words = f"`{self.path_of(field)}` of names and regular expressions that compile"
                refuse(self.where, words, f"{shown(entry)} ({error})")

    def block_size(self, field: str) -> tuple[int, int] | None:
        """The two sides of a block, or None."""
        return parse_block_size(self.where, self.path_of(field), self.values[field]) if self.has(field) else None


def parse_block_size(where: str, field: str, value: object) -> tuple[int, int]:
    """A pair of positive integers from a list or from a text like "128x128".

    >>> parse_block_size("config", "block_structure", "128x128")
    (128, 128)
    """
    sizes: Any = value
    if isinstance(value, str):
        found = _PAIR.fullmatch(value)
        sizes = [int(size) for size in found.groups()] if found else None
    if (
        not isinstance(sizes, (list, tuple))
        or len(sizes) != 2
        or not all(is_integer(size) and 0 < size <= LARGEST_SIDE for size in sizes)
    ):
        refuse(where, f"`{field}` of two positive integers [block_n, block_k] below 2^63", shown(value))
    return int(sizes[0]), int(sizes[1])
