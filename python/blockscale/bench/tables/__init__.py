"""The tables, in the order in which they are printed. A new one is a class in a file of its own and a row here."""

from .base import Column, Grid, Table, Verdict
from .fp32 import Fp32
from .grids import Grids
from .growth import Growth
from .linear import Linear, Peers
from .memory import Memory
from .overhead import Overhead
from .ragged import Ragged
from .subnormal import Subnormal
from .tools import Tools
from .w8a8 import W8A8

__all__ = ["TABLES", "Column", "Grid", "Table", "Verdict"]

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Linear(),
        Peers(),
        Fp32(),
        Grids(),
        W8A8(),
        Tools(),
        Ragged(),
        Overhead(),
        Memory(),
        Growth(),
        Subnormal(),
    )
}
