"""FP8 (float8_e4m3fn) linear layers with scale grids on any x86-64 CPU, as PyTorch ops."""

import platform as _platform
import sys as _sys

if _sys.platform != "linux" or _platform.machine() not in ("x86_64", "AMD64"):
    raise ImportError(
        f"blockscale: expected Linux on x86-64, got {_sys.platform} on {_platform.machine()}; "
        "its kernels are compiled for x86-64 alone"
    )

from . import kernels
from .activations import fp8_w8a8_block_scaled_mm_cpu, per_token_group_quant_fp8
from .checkpoint import inspect_checkpoint, load_checkpoint, quantize_checkpoint
from .diagnostics import isa_info, selftest
from .linear import BlockScaledLinear
from .logs import log_to_stderr as _log_to_stderr
from .ops import (  # `linear` the function takes the name of the module it came after
    convert_weight_packed,
    dequantize_weight_block_fp8,
    fp8_scaled_mm_cpu,
    linear,
    quantize_weight_block_fp8,
    unpack_weight,
)

_log_to_stderr()

__version__ = "0.1.0"

__all__ = [
    "BlockScaledLinear",
    "__version__",
    "convert_weight_packed",
    "dequantize_weight_block_fp8",
    "fp8_scaled_mm_cpu",
    "fp8_w8a8_block_scaled_mm_cpu",
    "inspect_checkpoint",
    "isa_info",
    "kernels",
    "linear",
    "load_checkpoint",
    "per_token_group_quant_fp8",
    "quantize_checkpoint",
    "quantize_weight_block_fp8",
    "selftest",
    "unpack_weight",
]
