"""The tables, in the order in which they are printed. A new one is a class in a file of its own and a row here."""

from .base import Column, Grid, Table, Verdict
from .linear import Linear

__all__ = ["TABLES", "Column", "Grid", "Table", "Verdict"]

TABLES: dict[str, Table] = {table.name: table for table in (Linear(),)}
