"""selftest passes on this machine, and fails once a byte of a decode table in the library is flipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import blockscale
import pytest
import torch
from blockscale import diagnostics, isa_checks, reference

PACKAGE = Path(blockscale.__file__).parent


def bf16_bits() -> list[int]:
    """bf16 bits of the codes 0x00 .. 0x7f, as the kernels' tables hold them."""
    bits = reference.E4M3_VALUES[:128].bfloat16().view(torch.int16).tolist()
    return [*bits[:127], 0x7FC0]


def tables() -> dict[str, bytes]:
    """Decode tables of csrc/formats/fp8_e4m3.h, byte for byte."""
    bits = bf16_bits()
    # High bytes of NaN at 7, zero and subnormals at 8 .. 15, XOR what shifts give. Compilers keep copies of 16 bytes.
    special = [0x7F ^ 0x43, *((value >> 8) ^ 0x3C for value in bits[:8])]
    return {
        "low": bytes(value & 0xFF for value in bits),
        "high": bytes(value >> 8 for value in bits),
        "nibbles": bytes([*[0] * 7, *special]),
        "floats": b"".join((value << 16).to_bytes(4, "little") for value in bits),
    }


def occurrences(data: bytes, table: bytes) -> list[int]:
    found, start = [], data.find(table)
    while start >= 0:
        found.append(start)
        start = data.find(table, start + 1)
    return found


def copy_package(folder: Path, flips: list[int]) -> Path:
    """A copy of the package whose library has the lowest bit flipped at the offsets `flips`."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(PACKAGE, folder / "blockscale", ignore=shutil.ignore_patterns("__pycache__"))
    library = folder / "blockscale" / "_C.so"
    data = bytearray(library.read_bytes())
    for offset in flips:
        data[offset] ^= 1
    library.write_bytes(data)
    return folder


def run_python(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def usable() -> list[str]:
    return [isa["name"] for isa in diagnostics.isa_info()["isas"] if isa["usable"]]


def test_selftest_passes_on_every_usable_isa():
    report = diagnostics.selftest()
    assert report["ok"], [check for check in report["checks"] if not check["ok"]]
    assert list(dict.fromkeys(check["isa"] for check in report["checks"])) == usable()
    names = {check["name"] for check in report["checks"]}
    for dtype in ("bfloat16", "float16", "float32"):
        assert {f"256 codes, {dtype}, M=1", f"256 codes, {dtype}, M=8", f"batch invariance, {dtype}"} <= names


# The ISAs that read a table; a flip in any of its copies in the library must be seen by one of them.
READERS = {
    "low": ("avx512_vbmi", "avx512_bf16"),
    "high": ("avx512_vbmi", "avx512_bf16"),
    "nibbles": ("avx2", "avx512"),
    "floats": ("scalar",),
}


@pytest.mark.parametrize("table,reader", [(t, isa) for t, isas in READERS.items() for isa in isas])
def test_a_flipped_table_byte_fails(table, reader, tmp_path):
    if reader not in usable():
        pytest.skip(f"{reader} is not usable here")
    found = occurrences((PACKAGE / "_C.so").read_bytes(), tables()[table])
    assert found, f"the library has no table {table!r}: this test looks for the wrong bytes"
    position = {"low": 0x35, "high": 0x35, "nibbles": 11, "floats": 4 * 0x35 + 2}[table]
    folder = copy_package(tmp_path, [offset + position for offset in found])
    done = run_python(folder, "-m", "blockscale.isa_checks", BLOCKSCALE_MAX_ISA=reader)
    failed = [check["name"] for check in json.loads(done.stdout) if not check["ok"]]
    for M in (1, 8):
        assert any(name.startswith("256 codes") and name.endswith(f"M={M}") for name in failed), failed


def test_every_copy_of_the_baseline_table_is_read(tmp_path):
    """Each object that falls back on it has a copy: a flip in one alone is seen by the checks of some instruction set."""
    found = occurrences((PACKAGE / "_C.so").read_bytes(), tables()["floats"])
    assert found
    for offset in found:
        folder = copy_package(tmp_path / hex(offset), [offset + 4 * 0x35 + 2])
        runs = (run_python(folder, "-m", "blockscale.isa_checks", BLOCKSCALE_MAX_ISA=isa) for isa in usable())
        assert not all(check["ok"] for done in runs for check in json.loads(done.stdout)), hex(offset)


def test_the_command_fails_on_a_flipped_byte(tmp_path):
    found = occurrences((PACKAGE / "_C.so").read_bytes(), tables()["floats"])
    folder = copy_package(tmp_path, [offset + 2 for offset in found])  # code 0x00 becomes 2^-126
    done = run_python(folder, "-m", "blockscale", "selftest", "--json", BLOCKSCALE_MAX_ISA="scalar")
    assert done.returncode == 1 and json.loads(done.stdout)["ok"] is False


def test_a_crash_is_a_failed_check(monkeypatch):
    monkeypatch.setattr(diagnostics.sys, "executable", "/bin/false")
    report = diagnostics.selftest()
    assert not report["ok"] and report["checks"][0]["detail"].startswith("exit status 1")


def test_checks_name_what_is_wrong(monkeypatch):
    real = isa_checks.ops.linear
    monkeypatch.setattr(isa_checks.ops, "linear", lambda x, *a, **k: real(x, *a, **k) + (x.shape[0] == 8) * 2.0**-9)
    assert isa_checks.check_decode(torch.float32, 1) == ""
    assert "of 256 codes decode to another value" in isa_checks.check_decode(torch.float32, 8)
    assert isa_checks.check_invariance(torch.float32) == "a row has other bits at M = 8 than at M = 1"


def test_library_that_is_missing_names_the_cure(tmp_path):
    folder = copy_package(tmp_path, [])
    (folder / "blockscale" / "_C.so").unlink()
    done = run_python(folder, "-c", "import blockscale")
    assert done.returncode == 1 and "ImportError: blockscale: expected the compiled library _C.so" in done.stderr
    assert "pip install ." in done.stderr


def test_library_that_does_not_load_names_the_cure(tmp_path):
    folder = copy_package(tmp_path, [])
    (folder / "blockscale" / "_C.so").write_bytes(b"no library")
    done = run_python(folder, "-c", "import blockscale")
    assert done.returncode == 1 and "ImportError: blockscale: the compiled library does not load" in done.stderr
    assert "it needs torch >= 2.11" in done.stderr


@pytest.mark.parametrize("system,machine", [("darwin", "x86_64"), ("linux", "aarch64")])
def test_other_platforms_are_refused(tmp_path, system, machine):
    code = f"import sys, platform; sys.platform = {system!r}; platform.machine = lambda: {machine!r}; import blockscale"
    done = run_python(PACKAGE.parent, "-c", code)
    assert done.returncode == 1
    assert f"ImportError: blockscale: expected Linux on x86-64, got {system} on {machine}" in done.stderr
