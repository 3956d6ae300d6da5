"""The command ``python -m blockscale bench``: its options, and where its report goes."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import plots, report, suite
from .peers import PEERS
from .settings import X_TYPES, Settings
from .shapes import MODELS, find_shapes
from .tables import TABLES

__all__ = ["add_options", "run", "text"]

_WHOLE = 2**31  # a block side that covers any weight


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench``. A wrong one is wrong usage: exit status 2."""
    parser.usage = f"{parser.prog} [TABLE ...] [options]"  # tables first: an option that takes several would have them
    names = f"{', '.join(TABLES)}, or all"
    add = parser.add_argument
    add("tables", nargs="*", type=_checked(_table), metavar="TABLE", help=f"{names}; default: linear")
    shapes = f"{', '.join(MODELS)}, MODEL.LAYER or NxK"
    add("--shapes", nargs="+", type=_checked(_shape), default=[], metavar="NAME", help=shapes)
    add("--M", nargs="+", type=_checked(_positive), default=[], help="rows of x")
    add("--threads", nargs="+", type=_checked(_positive), default=[], help="default: 1 2")
    add("--x", nargs="+", choices=X_TYPES, default=[], help="dtypes of x")
    blocks = "block sizes of the scales: 128x128, 1xK, NxK, ..."
    add("--block", nargs="+", type=_checked(_block), default=[], metavar="NxK", help=blocks)
    isas = "measure under these caps, each in a process of its own; default: BLOCKSCALE_MAX_ISA"
    add("--isa", nargs="+", default=[], metavar="NAME", help=isas)
    peers = f"of {', '.join(PEERS)}; default: all that are installed"
    add("--peers", nargs="+", type=_checked(_peer), default=None, metavar="NAME[=PATH]", help=peers)
    add("--yardstick", metavar="PATH", help="a library with proto_pack and proto_mm, as a peer")
    add("--rounds", type=_checked(_positive), default=15, help="of each group of candidates; default: 15")
    add("--seconds", type=float, default=1.0, help="end a group's rounds, from the third on, after these; default: 1")
    add("--runs", type=_checked(_positive), default=1, help="whole runs whose medians are reported; default: 1")
    add("--quick", action="store_true", help="tiny sizes and few rounds, to see that everything works")
    add("--json", nargs="?", const="-", metavar="FILE", help="print JSON, or write it beside the text")
    add("--plot", metavar="FILE", help="draw linear and growth into this file: .png, .svg or .pdf")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Measure what the command line asks for."""
    tables = list(TABLES) if "all" in options.tables else list(dict.fromkeys(options.tables)) or ["linear"]
    peers = list(PEERS) if options.peers is None else options.peers
    if options.yardstick:
        peers = [name for name in peers if name != "yardstick"] + [f"yardstick={options.yardstick}"]
    settings = Settings(
        peers=peers,
        shapes=options.shapes,
        M=options.M,
        threads=options.threads,
        x=options.x,
        blocks=options.block,
        rounds=min(options.rounds, 3) if options.quick else options.rounds,
        seconds=options.seconds,
        quick=options.quick,
    )
    if options.plot:
        plots.require()
    result = suite.run(tables, settings, isas=options.isa, runs=options.runs)
    if options.plot:
        plots.draw(result, options.plot)
    if options.json not in (None, "-"):
        Path(options.json).write_text(json.dumps(result, indent=1))
        options.json = None
    return result, 0


def text(result: dict[str, Any]) -> Iterable[str]:
    return report.as_text(result)


def _checked(function: Callable[[str], Any]) -> Callable[[str], Any]:
    """As argparse wants it: the words of the error are those of the ValueError."""

    def convert(text: str) -> Any:
        try:
            return function(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _table(text: str) -> str:
    if text not in (*TABLES, "all"):
        raise ValueError(f"expected {', '.join(TABLES)} or all, got {text}")
    return text


def _shape(text: str) -> str:
    find_shapes(text)
    return text


def _positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise ValueError(f"expected a positive number, got {text}")
    return int(text)


def _block(text: str) -> list[int]:
    sides = re.fullmatch(r"([1-9]\d{0,8}|N)x([1-9]\d{0,8}|K)", text)
    if not sides:
        raise ValueError(f"expected block sizes like 128x128, 1xK or NxK, got {text}")
    return [int(side) if side.isdigit() else _WHOLE for side in sides.groups()]


def _peer(text: str) -> str:
    if text.partition("=")[0] not in PEERS:
        raise ValueError(f"expected {', '.join(PEERS)}, got {text}")
    return text
