"""Printing: headings, tables, and the gates whose failure makes the demo fail."""

import os
import platform
import textwrap
from pathlib import Path


def heading(title: str) -> None:
    print(f"\n== {title}", flush=True)


def note(text: str) -> None:
    """A paragraph under a heading."""
    print(textwrap.fill(text, width=118, initial_indent="  ", subsequent_indent="  "), flush=True)


def table(header: list[str], rows: list[list[str]]) -> None:
    """First column flush left, the others flush right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        cells = [
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths))
        ]
        print("  " + "  ".join(cells), flush=True)


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


class Gates:
    """Collects checks; each is printed where it is made, and the failed ones again at the end."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []

    def check(self, holds: bool, claim: str) -> None:
        """`claim` is a sentence with the figures in it, true when `holds`."""
        print(f"  [{'ok' if holds else 'FAILED'}] {claim}", flush=True)
        if holds:
            self.passed += 1
        else:
            self.failed.append(claim)

    def verdict(self) -> int:
        """Prints the outcome; the exit status."""
        heading("Outcome")
        for claim in self.failed:
            print(f"  FAILED: {claim}")
        print(f"  {self.passed} of {self.passed + len(self.failed)} checks passed.", flush=True)
        return 1 if self.failed else 0
