"""vLLM plugin: FP8 layers of any checkpoint run on this package's kernels where vLLM runs on a CPU.

vLLM calls :func:`register` (entry point ``vllm.general_plugins``) in each of its processes. It puts the kernels first in
vLLM's lists and corrects what vLLM does around them (:mod:`.vllm_layers`). Whatever it needs of vLLM is looked up, never
inferred from a version; where something is missing nothing is touched, and one warning says what.

``BLOCKSCALE_VLLM=0`` turns it off; ``BLOCKSCALE_LOG=info`` prints what was hooked and which layer got which kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from typing import Any

__all__ = ["KINDS", "Unsupported", "register", "report", "state"]

logger = logging.getLogger("blockscale")

LINEAR = "vllm.model_executor.kernels.linear"
# Kind of kernel -> the kind's name in vLLM's registration function, and its list.
KINDS = {
    "block": ("fp8_block", "_POSSIBLE_FP8_BLOCK_KERNELS"),
    "tensor and channel": ("fp8", "_POSSIBLE_FP8_KERNELS"),
    "weight-only": ("wfp8a16", "_POSSIBLE_WFP8A16_KERNELS"),
}
# What the modules here use of vLLM: (module, names).
_NEEDED = (
    ("vllm.platforms", ("current_platform", "PlatformEnum")),
    (LINEAR, ("Fp8BlockScaledMMLinearKernel", "FP8ScaledMMLinearKernel", "register_linear_kernel")),
    ("vllm.config", ("get_current_vllm_config_or_none",)),
    ("vllm.model_executor.parameter", ("GroupQuantScaleParameter",)),
)

_registered: set[tuple[str, type]] = set()
_state: dict[str, Any] = {"active": False, "reason": "vLLM has not loaded it in this process"}
_said: set[str] = set()


class Unsupported(Exception):
    """This vLLM lacks something that the plugin needs."""


def register() -> None:
    """Hook this process's vLLM, once; never raises: vLLM would not start without its plugins.

    Does nothing where ``BLOCKSCALE_VLLM=0``, where vLLM is not installed, and on other platforms than the CPU.
    """
    if os.environ.get("BLOCKSCALE_VLLM", "1") == "0":
        _idle("turned off by BLOCKSCALE_VLLM=0")
    elif importlib.util.find_spec("vllm") is None:
        _idle("vLLM is not installed")
    else:
        try:
            _register()
        except Unsupported as error:
            _idle(f"this vLLM lacks {error}", logging.WARNING)
        except Exception as error:  # noqa: BLE001  a plugin that raises stops the engine, FP8 or not
            _idle(f"{type(error).__name__}: {error}", logging.WARNING)


def state() -> dict[str, Any]:
    """``active``, and ``reason`` (why not) or ``hooked`` (lists and classes)."""
    return dict(_state)


def report() -> dict[str, Any]:
    """:func:`state` in a sentence, and the names in vLLM's lists for the CPU: ``active``, ``detail``, ``lists``."""
    if not _state["active"]:
        return {"active": False, "detail": f"the plugin changes nothing: {_state['reason']}"}
    linear, cpu = _needed(LINEAR), _needed("vllm.platforms").PlatformEnum.CPU
    tables = {kind: getattr(linear, table, None) for kind, (_, table) in KINDS.items()}
    lists = {kind: [one.__name__ for one in table[cpu]] for kind, table in tables.items() if isinstance(table, dict)}
    return {"active": True, "detail": f"the plugin is active for {', '.join(_state['lists'])} scales", "lists": lists}


def _idle(reason: str, level: int = logging.INFO) -> None:
    _state.clear()
    _state.update(active=False, reason=reason)
    _say(level, f"blockscale: the vLLM plugin changes nothing: {reason}")


def _say(level: int, message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.log(level, message)


def _register() -> None:
    platforms = _needed("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        _idle("vLLM's platform is not the CPU")
        return
    for module, _ in _NEEDED:
        _needed(module)
    from . import vllm_experts, vllm_kernels, vllm_layers, vllm_ops

    if not vllm_layers.available():
        raise Unsupported(f"the linear methods {', '.join(name for _, name in vllm_layers.LINEAR_METHODS)}")
    linear, cpu = _needed(LINEAR), platforms.PlatformEnum.CPU
    kernels = dict.fromkeys(KINDS, vllm_kernels.BlockscaleFp8LinearKernel)
    kernels["block"] = vllm_kernels.BlockscaleFp8BlockLinearKernel
    lists = [kind for kind, kernel in kernels.items() if _put_first(linear, kind, kernel, cpu)]
    if "block" not in lists:
        raise Unsupported(f"a list of block kernels in {LINEAR}")
    hooked, missing = vllm_layers.hook()
    if vllm_ops.replace_missing_quantiser():
        hooked.append("scaled_fp8_quant")
    (hooked if vllm_experts.hook() else missing).append("FP8 experts")
    missing += [f"the list of {kind} kernels" for kind in KINDS if kind not in lists]
    _state.clear()
    _state.update(active=True, lists=lists, hooked=hooked, missing=missing)
    lacking = f"; this vLLM lacks {', '.join(missing)}" if missing else ""
    words = f"first in vLLM's lists of {', '.join(lists)} kernels; hooked {', '.join(hooked)}{lacking}"
    _say(logging.INFO, f"blockscale: vLLM plugin: {words}")


def _needed(module: str) -> Any:
    names = dict(_NEEDED).get(module, ())
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise Unsupported(f"{module} ({error})") from error
    for name in names:
        if not hasattr(loaded, name):
            raise Unsupported(f"{module}.{name}")
    return loaded


def _put_first(linear: Any, kind: str, kernel: type, platform: Any) -> bool:
    """Register ``kernel`` by vLLM's function where it knows the kind, else in its list; False where it has neither."""
    name, table = KINDS[kind]
    lists = getattr(linear, table, None)
    listed = lists.setdefault(platform, []) if isinstance(lists, dict) else None
    if kernel not in (listed or ()) and (kind, kernel) not in _registered:
        try:
            linear.register_linear_kernel(kernel, platform, name)
        except ValueError:  # a kind that this vLLM does not know
            if listed is None:
                return False
            listed.append(kernel)
        _registered.add((kind, kernel))
    if (
        listed is not None
    ):  # the function appends, and before this kernel stand such as take the layer and run it slowly
        listed.sort(key=lambda one: one is not kernel)
    return True
