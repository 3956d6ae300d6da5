"""Builds _C.so and _bench.so with CMake and packs them into one py3-none wheel: the libraries link no libpython."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Runs CMake; the results are plain shared libraries, loaded with torch.ops.load_library and ctypes."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        import torch

        build_dir = ROOT / "build" / f"ops-torch{torch.__version__.split('+')[0]}"
        cmake = shutil.which("cmake") or sys.exit("blockscale: expected `cmake` on PATH; pip install cmake ninja")
        configure = [cmake, "-S", str(ROOT), "-B", str(build_dir), f"-DTORCH_ROOT={Path(torch.__file__).parent}"]
        if shutil.which("ninja") and not (build_dir / "Makefile").exists():
            configure += ["-G", "Ninja"]
        subprocess.run(configure, check=True)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
        library = ext.name.rpartition(".")[2]
        subprocess.run([cmake, "--build", str(build_dir), "--target", library, "-j", jobs], check=True)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file, then a rename: a process that has the old library loaded keeps it intact.
        fresh = target.with_suffix(".new")
        shutil.copy2(build_dir / f"{library}.so", fresh)
        os.replace(fresh, target)


class PlatformWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(f"blockscale.{name}", sources=[]) for name in ("_C", "_bench")],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
)
