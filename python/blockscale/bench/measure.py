"""Timing of several candidates on one machine at one time: interleaved rounds, medians, paired ratios."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Samples", "geometric_mean", "interleave", "paired"]

# The first touches pages and wakes threads, the second finds what the first left in the caches.
DROPPED_ROUNDS = 2


@dataclass
class Samples:
    """Times of one candidate, one for each round."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def iqr(self) -> float:
        """Distance between the quartiles, 0 for a single round."""
        if len(self.seconds) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.seconds, n=4)
        return third - first


def interleave(
    candidates: Mapping[str, Callable[[int], Any]], rounds: int, *, seconds: float = math.inf
) -> dict[str, Samples]:
    """Call every candidate once a round with the number of the round, and time each call.

    The candidate that begins moves on by one each round, so that nobody always follows the same other. Stops after
    ``rounds`` rounds, or sooner, but after at least three, when ``seconds`` have gone by. The second of the rounds that
    are dropped is left out where the first has taken that long: such calls fill the caches by themselves.

    >>> sorted(interleave({"a": lambda i: i, "b": lambda i: None}, 4))
    ['a', 'b']
    """
    samples = {name: Samples() for name in candidates}
    order = list(candidates.items())
    start = time.perf_counter()
    for i in range(-DROPPED_ROUNDS, rounds):
        late = time.perf_counter() - start > seconds
        if i >= 3 and late:
            break
        if i == -1 and late:
            continue
        first = i % len(order)
        for name, call in order[first:] + order[:first]:
            begin_cpu, begin = time.process_time(), time.perf_counter()
            call(i + DROPPED_ROUNDS)
            end, end_cpu = time.perf_counter(), time.process_time()
            if i >= 0:
                samples[name].seconds.append(end - begin)
                samples[name].cpu_seconds.append(end_cpu - begin_cpu)
    return samples


def paired(numerator: Samples, denominator: Samples) -> float:
    """Median over the rounds of one's time over the other's in the same round."""
    return statistics.median(a / b for a, b in zip(numerator.seconds, denominator.seconds, strict=True))


def geometric_mean(values: Iterable[float]) -> float:
    """NaN of nothing.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    logs: Sequence[float] = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
