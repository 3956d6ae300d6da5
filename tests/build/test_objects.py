"""What the compiler made of the instruction-set files, and what the library asks of the system.

A file compiled for AVX-512 must not hand the linker a function that baseline code could be bound to: no weak symbols,
one exported data symbol (its kernel table), nothing that runs when the library is loaded. Proved with nm and readelf on
objects compiled with the flags of the CMake build, at -O0, where nothing is inlined by chance, and at -O2.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import blockscale
import pytest

ROOT = Path(__file__).resolve().parents[2]
ISA_FOLDER = ROOT / "csrc" / "isa"
KERNEL_FILES = sorted(path for path in ISA_FOLDER.glob("*.cpp") if path.name != "isa.cpp")
LIBRARY = Path(blockscale.__file__).with_name("_C.so")
BENCH_LIBRARY = LIBRARY.with_name("_bench.so")
RUNTIMES = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libdl.so.2", "ld-linux-x86-64.so.2"}
TORCH_LIBRARIES = {"libtorch_cpu.so", "libtorch.so", "libc10.so"}
MEMORY_FUNCTIONS = {"memcpy", "memset", "memmove", "memcmp"}  # what a compiler may call on its own

for tool in ("nm", "readelf", "cmake"):
    if shutil.which(tool) is None:
        pytest.skip(f"needs `{tool}`", allow_module_level=True)


def output_of(*command) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def compile_commands(tmp_path_factory) -> dict[Path, list[str]]:
    """The compiler's command line of each source of the core, from a fresh configuration without torch."""
    build = tmp_path_factory.mktemp("configure")
    output_of("cmake", "-S", ROOT, "-B", build, "-DBLOCKSCALE_BUILD_OPS=OFF", "-DCMAKE_BUILD_TYPE=Release")
    entries = json.loads((build / "compile_commands.json").read_text())
    return {Path(entry["file"]): shlex.split(entry["command"]) for entry in entries}


@pytest.fixture(scope="module")
def compiled(compile_commands, tmp_path_factory):
    """compiled(source, level) -> the object file, compiled once per level."""
    folder, objects = tmp_path_factory.mktemp("objects"), {}

    def compile_(source: Path, level: str) -> Path:
        key = source, level
        if key not in objects:
            objects[key] = folder / f"{source.stem}{level}.o"
            command = [part for part in compile_commands[source] if not re.fullmatch(r"-O\d?", part)]
            command[command.index("-o") + 1] = str(objects[key])
            output_of(*command, level)
        return objects[key]

    return compile_


def symbols(object_file: Path) -> list[tuple[str, str]]:
    """(type letter, name) of each symbol of an object."""
    lines = output_of("nm", object_file).splitlines()
    return [tuple(line.split()[-2:]) for line in lines]


each_object = pytest.mark.parametrize("level", ("-O0", "-O2"))
each_file = pytest.mark.parametrize("source", KERNEL_FILES, ids=lambda path: path.stem)


@each_object
@each_file
def test_no_symbol_that_the_linker_may_share(source, level, compiled):
    shared = [symbol for symbol in symbols(compiled(source, level)) if symbol[0] in "WwVvu"]
    assert shared == []


@each_object
@each_file
def test_exactly_one_exported_symbol_and_it_is_data(source, level, compiled):
    exported = [symbol for symbol in symbols(compiled(source, level)) if symbol[0].isupper() and symbol[0] != "U"]
    assert len(exported) == 1, exported
    assert exported[0][0] in "RDB", exported


@each_object
@each_file
def test_nothing_runs_at_load_time(source, level, compiled):
    sections = output_of("readelf", "-S", "-W", compiled(source, level))
    assert not re.search(r"\.(init_array|ctors|fini_array|dtors|gcc_except_table)", sections)


@each_object
@each_file
def test_nothing_is_called_but_memory_functions(source, level, compiled):
    """scalar needs fmaf, since baseline x86-64 has no fused multiply-add instruction."""
    undefined = {name for kind, name in symbols(compiled(source, level)) if kind == "U"}
    allowed = MEMORY_FUNCTIONS | {"_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail"}
    assert undefined <= (allowed | {"fmaf"} if source.stem == "scalar" else allowed)


@each_file
def test_flags_follow_the_rules(source, compile_commands):
    flags = compile_commands[source]
    assert {"-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-std=c++17"} <= set(flags)
    forbidden = [
        flag
        for flag in flags
        if re.match(r"-march=|-mtune=native|-ffast-math|-Ofast|-flto|-fopenmp|-funsafe-math", flag)
    ]
    assert forbidden == []


def test_baseline_files_have_no_instruction_set_flags(compile_commands):
    for source, flags in compile_commands.items():
        if source not in KERNEL_FILES or source.stem == "scalar":
            assert not [flag for flag in flags if re.match(r"-m(avx|fma|f16c|sse|arch|bmi|amx)|-fopenmp", flag)], source


def includes(source: Path, seen: set[Path]) -> set[str]:
    """System headers that a file and the headers of ours below it name."""
    names = set()
    for quoted, system in re.findall(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', source.read_text(), re.M):
        if system:
            names.add(system)
        else:
            header = next(path for path in (source.parent / quoted, ROOT / "csrc" / quoted) if path.exists())
            if header not in seen:
                seen.add(header)
                names |= includes(header, seen)
    return names


@each_file
def test_only_headers_without_code_are_included(source):
    assert includes(source, set()) <= {"immintrin.h", "stdint.h", "stddef.h"}


@pytest.mark.parametrize("level", ("-O2",))
def test_baseline_objects_use_no_vector_registers_beyond_sse(level, compiled, compile_commands):
    """Every source that runs before detection, or on any CPU, compiles to baseline instructions."""
    if shutil.which("objdump") is None:
        pytest.skip("needs `objdump`")
    for source in compile_commands:
        if source.is_relative_to(ROOT / "csrc") and (source not in KERNEL_FILES or source.stem == "scalar"):
            assert not re.search(r"%[yz]mm\d", output_of("objdump", "-d", compiled(source, level))), source


# ------------------------------------------------------------------------------------------------------ the library
each_library = pytest.mark.parametrize("library", (LIBRARY, BENCH_LIBRARY), ids=lambda path: path.stem)


def dynamic(library: Path, tag: str) -> list[str]:
    return re.findall(rf"\({tag}\).*\[([^\]]*)\]", output_of("readelf", "-d", "-W", library))


@each_library
def test_needed_libraries(library):
    needed = set(dynamic(library, "NEEDED"))
    assert needed <= TORCH_LIBRARIES | RUNTIMES
    assert "libtorch_cpu.so" in needed


@each_library
def test_no_path_of_the_build_machine_is_recorded(library):
    assert dynamic(library, "RPATH") == [] and dynamic(library, "RUNPATH") == []
    assert str(ROOT).encode() not in library.read_bytes()


@each_library
def test_torch_is_used_through_its_stable_functions_alone(library):
    """Undefined symbols without a version come from torch; those of the C and C++ runtimes carry one."""
    lines = [line.split() for line in output_of("nm", "-D", "--undefined-only", library).splitlines()]
    unversioned = [name for kind, name in lines if kind == "U" and "@" not in name]
    assert unversioned
    assert [name for name in unversioned if not re.match(r"(aoti_)?torch_", name)] == []


def test_nothing_is_exported():
    assert output_of("nm", "-D", "--defined-only", LIBRARY) == ""


def test_the_limits_are_plain_functions():
    """Nothing that could stand for a symbol of torch or of the op library: this one is loaded by ctypes alone."""
    defined = [line.split()[-2:] for line in output_of("nm", "-D", "--defined-only", BENCH_LIBRARY).splitlines()]
    functions = {name for kind, name in defined if kind == "T"}
    assert functions == {f"blockscale_bench_{name}" for name in ("read", "copy", "multiply", "bind", "cycles")}
    assert [name for kind, name in defined if kind in "WVu"] == []


def test_one_openmp_runtime_in_the_process():
    code = """
import blockscale, re, torch
torch.set_num_threads(2)
weight, scales = blockscale.quantize_weight_block_fp8(torch.randn(512, 512), [128, 128])
blockscale.linear(torch.randn(64, 512), weight, scales, block_size=[128, 128])
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(*sorted(path for path in libraries if re.search(r"lib(g|i)?omp[-.\\d]", path)), sep="\\n")
"""
    runtimes = output_of(sys.executable, "-c", code).split()
    assert len(runtimes) == 1, runtimes
