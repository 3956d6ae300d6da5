"""The table of routes in the README, made by asking `route`.

    python tests/python/kernels/route_table.py        # prints it

Ops of other devices are stood in for, so that the table says what runs where they exist; no device is asked.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch  # noqa: E402
from blockscale.kernels import route  # noqa: E402
from blockscale.kernels.schemes import LINEAR_BACKENDS  # noqa: E402
from contracts import xpu_ops  # noqa: E402

BEGIN, END = "<!-- routes: begin -->", "<!-- routes: end -->"
LAYER = "model.layers.0.mlp.down_proj"
SHAPE = (1024, 2048)
# Platform, capability, and what the table calls them.
MACHINES = [
    ("cpu", None, "CPU"),
    ("xpu", None, "XPU"),
    ("cuda", 90, "CUDA, SM90"),
    ("cuda", 89, "CUDA, SM89"),
    ("cuda", 80, "CUDA, SM80"),
    ("rocm", 94, "ROCm, gfx94x"),
]


def _group(weights: dict, inputs: dict | None) -> dict:
    fp8 = {"type": "float", "num_bits": 8}
    group = {"targets": ["Linear"], "weights": {**fp8, **weights}}
    return {"config_groups": {"group_0": {**group, "input_activations": inputs and {**fp8, "dynamic": True, **inputs}}}}


CHECKPOINTS = {
    ("block", "FP8"): _group({"block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}),
    ("block", "16-bit"): _group({"block_structure": [128, 128]}, None),
    ("channel", "FP8"): _group({"strategy": "channel"}, {"strategy": "token"}),
    ("channel", "16-bit"): _group({"strategy": "channel"}, None),
    ("tensor", "FP8"): _group({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
    ("tensor", "16-bit"): _group({"strategy": "tensor"}, None),
}


def all_routes() -> dict[tuple[str, str, str, str], tuple[str, str]]:
    """(machine, weight, activation asked for, linear_backend) -> (scheme, kernel)."""
    routes = {}
    with xpu_ops(), mock.patch.object(torch.cuda, "is_available", return_value=False):
        for (platform, capability, machine), (parts, config), backend in itertools.product(
            MACHINES, CHECKPOINTS.items(), LINEAR_BACKENDS
        ):
            decision = route(
                config, LAYER, platform=platform, capability=capability, weight_shape=SHAPE, linear_backend=backend
            )
            kernel = decision.kernel.__name__ if decision.kernel else "none"
            routes[(machine, *parts, backend)] = decision.scheme, kernel
    return routes


def markdown() -> str:
    """The table: rows that agree on scheme and kernel are one; a backend that leaves no kernel is not listed."""
    rows: dict[tuple, list[str]] = {}
    routes = all_routes()
    for (machine, weight, activation, backend), (scheme, kernel) in routes.items():
        if kernel == "none" and backend != "auto" and routes[machine, weight, activation, "auto"][1] != "none":
            continue
        rows.setdefault((machine, weight, activation, scheme, kernel), []).append(backend)
    merged: dict[tuple, list[tuple[str, str]]] = {}
    for (machine, weight, activation, scheme, kernel), backends in rows.items():
        shown = "any" if len(backends) == len(LINEAR_BACKENDS) else ", ".join(f"`{backend}`" for backend in backends)
        merged.setdefault((machine, scheme, kernel, shown), []).append((weight, activation))
    lines = [
        "| platform | weight scales | activations asked for | `linear_backend` | scheme | kernel |",
        "|" + "---|" * 6,
    ]
    for (machine, scheme, kernel, shown), parts in merged.items():
        weights = ", ".join(dict.fromkeys(weight for weight, _ in parts))
        activations = ", ".join(dict.fromkeys(activation for _, activation in parts))
        assert len(parts) == len({w for w, _ in parts}) * len({a for _, a in parts}), "the row would say too much"
        name = "none" if kernel == "none" else f"`{kernel}`"
        lines.append(f"| {machine} | {weights} | {activations} | {shown} | `{scheme}` | {name} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
