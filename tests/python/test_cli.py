"""The commands: text, --json, exit status, errors as one sentence on stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import safetensors.torch as safetensors_torch
import torch
from blockscale import diagnostics
from blockscale.__main__ import main

ISAS = ["scalar", "avx2", "avx512", "avx512_vbmi", "avx512_bf16", "amx_bf16"]


def command(*arguments, **env):
    """(exit status, stdout, stderr) of `python -m blockscale`."""
    done = subprocess.run(
        [sys.executable, "-m", "blockscale", *map(str, arguments)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def in_process(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def source(tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    torch.manual_seed(0)
    tensors = {"up_proj.weight": torch.randn(200, 300).bfloat16(), "lm_head.weight": torch.randn(10, 200).bfloat16()}
    safetensors_torch.save_file(tensors, src / "model.safetensors")
    (src / "config.json").write_text("{}")
    return src


def test_info_text(capsys):
    status, out, err = in_process(capsys, "info")
    lines = out.splitlines()
    assert status == 0 and not err
    assert lines[0].startswith("blockscale ") and f"torch {torch.__version__}" in lines[0] and "threads" in lines[0]
    assert [line.split()[0] for line in lines[4:10]] == ISAS
    assert sum(line.split()[3] == "yes" for line in lines[4:10]) == 1
    assert "verified under emulation, never run on hardware" in out


def test_info_json(capsys):
    status, out, _ = in_process(capsys, "info", "--json")
    report = json.loads(out)
    assert status == 0 and [isa["name"] for isa in report["isas"]] == ISAS
    assert {"blockscale", "torch", "python", "threads", "max_isa", "active"} <= report.keys()
    for isa in report["isas"]:
        assert isa["usable"] or isa["reason"]


def test_cap():
    status, out, _ = command("info", "--json", BLOCKSCALE_MAX_ISA="scalar")
    report = json.loads(out)
    assert status == 0 and report["max_isa"] == report["active"] == "scalar"
    assert [isa["name"] for isa in report["isas"] if isa["usable"]] == ["scalar"]


@pytest.mark.parametrize("arguments", [("info",), ("selftest", "--json")], ids=lambda a: a[0])
def test_misspelt_cap_is_one_sentence(arguments):
    status, out, err = command(*arguments, BLOCKSCALE_MAX_ISA="avx3")
    assert status == 1 and not out
    assert err == (
        "blockscale: expected `BLOCKSCALE_MAX_ISA` to be one of "
        "scalar, avx2, avx512, avx512_vbmi, avx512_bf16, amx_bf16, got avx3\n"
    )


def test_quantize_and_inspect_text(capsys, source, tmp_path):
    dst = tmp_path / "dst"
    status, out, err = in_process(capsys, "quantize", source, dst, "--block-size", 64, 32, "--ignore", "a", "re:b")
    assert status == 0 and "100%" in err
    assert out.splitlines()[1] == "1 weights to FP8 in blocks of 64 x 32, 1 tensors kept"
    status, out, _ = in_process(capsys, "inspect", dst)
    assert status == 0 and "1 FP8 linear layers, block size 64 x 32" in out and "F8_E4M3  1 tensors" in out


def test_quantize_and_inspect_json(capsys, source, tmp_path):
    dst = tmp_path / "dst"
    status, out, err = in_process(capsys, "quantize", "--json", "--ignore", "up_proj", "--", source, dst)
    report = json.loads(out)
    assert status == 0 and not err and report["converted"] == 0
    assert report["modules_to_not_convert"] == ["lm_head", "up_proj"]
    status, out, _ = in_process(capsys, "inspect", "--json", source)
    assert status == 0 and json.loads(out)["fp8_layers"] == 0


@pytest.mark.parametrize(
    "arguments", [("inspect", "/no/where"), ("quantize", "/no/where", "/no/dst")], ids=lambda a: a[0]
)
def test_a_missing_source_is_one_sentence(capsys, arguments):
    status, out, err = in_process(capsys, *arguments)
    assert status == 1 and not out
    assert err == "blockscale: expected a checkpoint directory or a .safetensors file, got /no/where: not found\n"


def test_refused_conversions_are_one_sentence(capsys, source, tmp_path):
    (source / "model.safetensors").write_bytes(b"nonsense")
    for arguments in (("quantize", source, tmp_path / "dst"), ("inspect", source)):
        status, out, err = in_process(capsys, *arguments)
        assert status == 1 and not out
        assert err.startswith("blockscale: expected a readable safetensors file, got") and err.count("\n") == 1
    status, _, err = in_process(capsys, "quantize", source, tmp_path / "dst", "--block-size", 0, 1)
    assert status == 1 and "positive integers [block_n, block_k], got [0, 1]" in err


def test_inspect_reports_problems(capsys, tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors_torch.save_file({"up.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, path)
    status, out, _ = in_process(capsys, "inspect", path)
    assert status == 1 and "problem: expected a scale beside the float8_e4m3fn weight `up.weight`" in out
    status, out, _ = in_process(capsys, "inspect", path, "--json")
    assert status == 1 and len(json.loads(out)["problems"]) == 1


@pytest.mark.parametrize(
    "arguments", [(), ("unknown",), ("quantize", "a"), ("quantize", "a", "b", "--block-size", "x", "1")]
)
def test_wrong_usage(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2 and "usage: python -m blockscale" in capsys.readouterr().err


REPORTS = {
    "pass": ({"ok": True, "checks": [{"isa": "avx2", "name": "a", "ok": True, "detail": ""}]}, 0),
    "fail": ({"ok": False, "checks": [{"isa": "avx2", "name": "a", "ok": False, "detail": "wrong"}]}, 1),
}


@pytest.mark.parametrize("case", REPORTS)
def test_selftest_text_and_json(capsys, monkeypatch, case):
    report, want = REPORTS[case]
    monkeypatch.setattr(diagnostics, "selftest", lambda: report)
    status, out, _ = in_process(capsys, "selftest")
    assert status == want and out.splitlines()[-1] == ("ok" if report["ok"] else "FAILED")
    assert ("    a: wrong" in out) == (not report["ok"])
    status, out, _ = in_process(capsys, "selftest", "--json")
    assert status == want and json.loads(out) == report


def run_into(stdout, *arguments):
    """(exit status, stderr) of a command whose output can't be written."""
    done = subprocess.run(
        [sys.executable, "-m", "blockscale", *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("json_option", [(), ("--json",)], ids=["text", "json"])
def test_a_full_disk_is_one_sentence(json_option):
    with open("/dev/full", "w") as full:
        status, err = run_into(full, "info", *json_option)
    assert status == 1 and err == "blockscale: [Errno 28] No space left on device\n"


def test_a_reader_that_leaves_is_no_error_to_print():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run_into(writing, "info") == (1, "")
    finally:
        os.close(writing)


def test_block_size_beyond_int64_is_refused_before_anything_is_written(capsys, source, tmp_path):
    status, out, err = in_process(capsys, "quantize", source, tmp_path / "dst", "--block-size", 10**20, 5)
    assert status == 1 and not out and err.startswith("blockscale: quantize_checkpoint: expected `block_size` of")
    assert err.count("\n") == 1 and not (tmp_path / "dst").exists()


def test_odd_configurations_are_one_sentence(capsys, source):
    for config in ({"quantization_config": "fp8"}, {"quantization_config": {"config_groups": [1]}}):
        (source / "config.json").write_text(json.dumps(config))
        status, out, err = in_process(capsys, "inspect", source)
        assert status == 1 and not out and err.startswith("blockscale: quantization_config: expected `")
        assert err.count("\n") == 1


def test_help_needs_no_arguments():
    status, out, _ = command("--help")
    assert status == 0 and all(word in out for word in ("info", "selftest", "quantize", "inspect"))
