#!/usr/bin/env bash
# The tests with the real engines, two at a time; the last line says what happened. PYTHON as for environment.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
status=0
tests/engines/environment.sh "$1" || status=$?
if [ "$status" = 3 ]; then exit 0; fi
[ "$status" = 0 ] || exit "$status"
# Models are made once; another way of making them is another folder.
BLOCKSCALE_ENGINE_MODELS=$PWD/.cache/engine-models/$(cat demo/fp8_formats.py demo/reciter.py demo/model.py | sha256sum | cut -c1-16)
export BLOCKSCALE_ENGINE_MODELS
.venv-engines/bin/python demo/make_checkpoints.py "$BLOCKSCALE_ENGINE_MODELS"
.venv-engines/bin/python -m pytest -q -n 2 --dist worksteal tests/engines
