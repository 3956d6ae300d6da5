#!/usr/bin/env bash
# Everything about AMX without AMX: the emulator's conformance, the C++ suites with emulated tiles, both again under
# AddressSanitizer, and the Python suite (`-m isa`) with emulated tiles. Where the CPU lacks AVX-512 VBMI or BF16, which
# amx_bf16 needs besides tiles, tests skip with that reason.
#
#   tests/amx_emulator/run_tests.sh [PYTHON]      PYTHON has torch, pytest and blockscale; default: python3
#
# Builds into build/csrc-tests and build/csrc-tests-sanitized, which other C++ test runs share.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
jobs=${JOBS:-$(nproc)}
failed=()

# build_and_test FOLDER [CMAKE ARGUMENTS]
build_and_test() {
  local folder=build/$1
  shift
  mkdir -p build
  if ! { cmake -G Ninja -S . -B "$folder" -DBLOCKSCALE_BUILD_TESTS=ON -DBLOCKSCALE_BUILD_OPS=OFF "$@" &&
    cmake --build "$folder" -j "$jobs"; } >"$folder.log" 2>&1; then
    cat "$folder.log" >&2
    return 1
  fi
  ctest --test-dir "$folder" -L amx --output-on-failure
}

echo "== AMX: C++ tests under the emulator"
build_and_test csrc-tests || failed+=("C++")
echo "== AMX: C++ tests under the emulator and AddressSanitizer"
build_and_test csrc-tests-sanitized -DBLOCKSCALE_SANITIZE=address,undefined || failed+=("C++ with AddressSanitizer")

echo "== AMX: Python tests under the emulator"
emulator=$PWD/build/csrc-tests/tests/amx_emulator/libamxemu.so
emulated() { env -u BLOCKSCALE_MAX_ISA LD_PRELOAD="$emulator" BLOCKSCALE_TEST_ASSUME_AMX=1 "$@"; }
reason=$(emulated "$python" -c '
import json, torch, blockscale
row = json.loads(torch.ops.blockscale.isa_info())["isas"][-1]
print("" if row["active"] else row["reason"])') || reason="isa_info failed"
case $reason in
  # Outputs and weights of 2^31 elements would take millions of emulated products: minutes.
  "") emulated "$python" -m pytest -q -m isa -k "not beyond_two_to_the_31" tests/python || failed+=("Python") ;;
  *AVX512*) echo "skipped: $reason" ;;
  *) failed+=("Python: amx_bf16 is not active: $reason") ;;
esac

if [ ${#failed[@]} -gt 0 ]; then
  printf 'AMX tests failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
echo "AMX tests passed"
