"""What a table is: rows that it measures, a text for people, and verdicts against what is required."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..settings import Session

__all__ = ["Column", "Grid", "Table", "Verdict"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a printed table: its heading, the row's field, and how it is written ("" for what is missing)."""

    heading: str
    field: str
    format: str = "{}"
    only_if_different: bool = False

    def text(self, row: Row) -> str:
        value = row.get(self.field)
        return "" if value is None else self.format.format(value)


@dataclass(frozen=True)
class Grid:
    """A printed table: headings and cells, with an optional line above."""

    headings: Sequence[str]
    cells: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Verdict:
    """A required figure and the one that was measured."""

    what: str
    wanted: str
    got: str
    ok: bool


class Table(ABC):
    name: ClassVar[str]
    title: ClassVar[str]
    isas: ClassVar[Sequence[str]] = ()  # caps of BLOCKSCALE_MAX_ISA to measure under; none: the one of the environment
    columns: ClassVar[Sequence[Column]] = (
        Column("shape", "shape"),
        Column("isa", "isa", only_if_different=True),
        Column("x", "x", only_if_different=True),
        Column("block", "block", only_if_different=True),
        Column("threads", "threads"),
        Column("M", "M"),
        Column("N", "N"),
        Column("K", "K"),
        Column("kernel", "kernel"),
        Column("µs", "real_time", "{:.1f}"),
        Column("iqr", "iqr", "{:.1f}"),
        Column("GFLOP/s", "gflops", "{:.1f}"),
        Column("GB/s", "gbps", "{:.1f}"),
        Column("% of roofline", "of_roofline", "{:.0%}"),
        Column("x torch bf16", "speedup_torch_bf16", "{:.2f}"),
    )

    @property
    def about(self) -> str:
        """What is measured and how, for BENCHMARKS.md: the documentation of the class, or else of its module."""
        own = type(self).__dict__.get("__doc__") or sys.modules[type(self).__module__].__doc__ or ""
        return "\n".join(line.strip() for line in own.strip().splitlines())

    @abstractmethod
    def measure(self, session: Session) -> Iterator[Row]: ...

    def detail(self, rows: Sequence[Row]) -> Grid:
        """Every row; without the columns that no row has, and those that name the same of all."""
        columns = [column for column in self.columns if self._shown(column, rows)]
        return Grid([c.heading for c in columns], [[c.text(row) for c in columns] for row in rows])

    @staticmethod
    def _shown(column: Column, rows: Sequence[Row]) -> bool:
        values = {row.get(column.field) for row in rows}
        return values != {None} and (not column.only_if_different or len(values) > 1)

    def summary(self, rows: Sequence[Row]) -> list[Grid]:
        """Means over the rows, where there are too many to read."""
        return []

    def verdicts(self, rows: Sequence[Row]) -> list[Verdict]:
        return []
