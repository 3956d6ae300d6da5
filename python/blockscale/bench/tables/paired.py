"""Tables whose figure is one candidate's time over another's, taken in the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..measure import interleave, paired
from ..rows import row
from ..settings import Settings
from .base import Column, Row

__all__ = ["PAIRED_COLUMNS", "time_against"]

PAIRED_COLUMNS = (
    Column("shape", "shape"),
    Column("x", "x", only_if_different=True),
    Column("threads", "threads"),
    Column("M", "M"),
    Column("N", "N"),
    Column("K", "K"),
    Column("kernel", "kernel"),
    Column("µs", "real_time", "{:.1f}"),
    Column("iqr", "iqr", "{:.1f}"),
    Column("against", "against"),
    Column("time / time of that", "time_ratio", "{:.2f}"),
)


def time_against(
    identity: Mapping[str, Any],
    candidates: Mapping[str, Callable[[int], Any]],
    against: Mapping[str, str],
    settings: Settings,
    **counters: Mapping[str, float],
) -> Sequence[Row]:
    """A row for each candidate; ``against`` says whose time each one's is divided by.

    ``counters``: by name, the values by candidate, added to the rows.
    """
    samples = interleave(candidates, settings.rounds, seconds=settings.seconds)
    rows = []
    for name, own in samples.items():
        measured = {counter: values[name] for counter, values in counters.items() if name in values}
        if name in against:
            measured["time_ratio"] = paired(own, samples[against[name]])
        entry = row({**identity, "kernel": name}, own, **measured)
        if name in against:
            entry["against"] = against[name]
        rows.append(entry)
    return rows
