"""``python -m blockscale info | selftest | bench | quantize | inspect``: text for people, ``--json`` for programs.

Exit status: 0 all well, 1 a check failed or the request was refused, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from . import checkpoint, diagnostics
from .bench import command as bench
from .integrations import status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    >>> main(["info"])  # doctest: +ELLIPSIS
    blockscale ...
    0
    """
    options = _parser().parse_args(arguments)
    try:
        report, status = options.run(options)
        print(json.dumps(report, indent=2) if options.json else "\n".join(options.text(report)), flush=True)
    except BrokenPipeError:  # the reader, `head` say, has what it wants
        _close_stdout()
        return 1
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        sentence = " ".join(str(error).split()).removeprefix("blockscale: ")
        print(f"blockscale: {sentence}", file=sys.stderr)
        _close_stdout()
        return 1
    return status


def _close_stdout() -> None:
    """Drop what could not be written, or Python would try again at exit and print a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m blockscale", description="FP8 linear layers on x86-64 CPUs.")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Any, text: Any, words: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=words, description=words)
        if name != "bench":  # which has a file for it, too
            one.add_argument("--json", action="store_true", help="print JSON")
        one.set_defaults(run=run, text=text)
        return one

    command("info", _info, _info_text, "Instruction sets, engines and kernels of this machine, and why not the others.")
    command("selftest", _selftest, _selftest_text, "Run every usable kernel against the reference.")
    words = "Time products and tools against peers and against what the machine can do."
    bench.add_options(command("bench", bench.run, bench.text, words))
    quantize = command("quantize", _quantize, _quantize_text, "Quantise a safetensors checkpoint to block FP8.")
    quantize.add_argument("src", help="directory with config.json and safetensors weights, or one .safetensors file")
    quantize.add_argument("dst", help="directory to write")
    quantize.add_argument("--block-size", nargs=2, type=int, default=[128, 128], metavar=("N", "K"))
    quantize.add_argument(
        "--ignore", nargs="+", action="extend", default=[], metavar="NAME", help="modules to leave; re:… is a pattern"
    )
    inspect = command("inspect", _inspect, _inspect_text, "Describe a checkpoint from its headers.")
    inspect.add_argument("path", help="directory with safetensors weights, or one .safetensors file")
    return parser


def _info(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    report = {**diagnostics.environment(), **diagnostics.isa_info()}
    return {**report, "engines": status.engines(), "choices": status.choices()}, 0


def _info_text(report: dict[str, Any]) -> Iterable[str]:
    yield (
        f"blockscale {report['blockscale']}, torch {report['torch']}, "
        f"Python {report['python']}, {report['threads']} threads"
    )
    yield f"BLOCKSCALE_MAX_ISA: {report['max_isa'] or 'not set'}"
    yield ""
    yield f"{'ISA':12} {'compiled':9} {'usable':7} {'active':7} reason"
    for isa in report["isas"]:
        compiled, usable, active = ("yes" if isa[key] else "no" for key in ("compiled", "usable", "active"))
        yield f"{isa['name']:12} {compiled:9} {usable:7} {active:7} {isa['reason']}".rstrip()
    yield ""
    yield "amx_bf16: verified under emulation, never run on hardware. On a Sapphire Rapids or newer, check and time it:"
    yield "    python -m blockscale selftest && python -m blockscale bench"
    yield ""
    for name, engine in report["engines"].items():
        yield f"{name}: {', '.join(filter(None, [engine['version'], engine['detail']]))}"
        for kind, kernels in engine.get("lists", {}).items():
            yield f"    {kind}: {', '.join(kernels)}"
    yield ""
    yield f"{'platform':9} {'scales':12} {'scheme':12} kernel that the lists choose here"
    for platform, decisions in report["choices"].items():
        for scales, choice in decisions.items():
            kernel = choice["kernel"] or f"none ({'; '.join(choice['reasons'])})"
            yield f"{platform:9} {scales:12} {choice['scheme']:12} {kernel}"


def _selftest(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    report = diagnostics.selftest()
    return report, 0 if report["ok"] else 1


def _selftest_text(report: dict[str, Any]) -> Iterable[str]:
    for isa in dict.fromkeys(check["isa"] for check in report["checks"]):
        checks = [check for check in report["checks"] if check["isa"] == isa]
        yield f"{isa:12} {sum(check['ok'] for check in checks)} of {len(checks)} checks passed"
        for check in checks:
            if not check["ok"]:
                yield f"    {check['name']}: {check['detail']}"
    yield "ok" if report["ok"] else "FAILED"


def _quantize(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    report = checkpoint.quantize_checkpoint(
        options.src,
        options.dst,
        block_size=options.block_size,
        ignore=options.ignore,
        progress=not options.json,
    )
    return report, 0


def _quantize_text(report: dict[str, Any]) -> Iterable[str]:
    block_n, block_k = report["block_size"]
    before, after = report["bytes_before"], report["bytes_after"]
    yield f"{report['source']} -> {report['destination']}"
    yield f"{report['converted']} weights to FP8 in blocks of {block_n} x {block_k}, {report['kept']} tensors kept"
    yield f"{report['shards']} shards, {report['shards_skipped']} of them finished earlier"
    yield f"{_size(before)} -> {_size(after)} ({after / max(before, 1):.0%})"


def _inspect(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    report = checkpoint.inspect_checkpoint(options.path)
    return report, 1 if report["problems"] else 0


def _inspect_text(report: dict[str, Any]) -> Iterable[str]:
    yield report["path"]
    for shard in report["shards"]:
        yield f"    {shard['file']}: {_size(shard['bytes'])}, {shard['tensors']} tensors"
    for name, dtype in report["dtypes"].items():
        yield f"{name:8} {dtype['tensors']} tensors, {_size(dtype['bytes'])}"
    if report["fp8_layers"]:
        block_n, block_k = report["block_size"]
        yield f"{report['fp8_layers']} FP8 linear layers, block size {block_n} x {block_k}"
    else:
        yield "no FP8 linear layers"
    for problem in report["problems"]:
        yield f"problem: {problem}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 100_000 else f"{nbytes:,} bytes"


if __name__ == "__main__":
    sys.exit(main())
