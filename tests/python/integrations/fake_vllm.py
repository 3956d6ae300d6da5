"""A vLLM of a few lines: what the plugin looks up, in the shapes of several versions, and fused layers over ranks.

:class:`Version` says what a version has. :func:`install` puts its modules in ``sys.modules``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
from blockscale import integrations
from torch import nn

LINEAR = "vllm.model_executor.kernels.linear"
QUANTIZATION = "vllm.model_executor.layers.quantization"
TABLES = ("_POSSIBLE_FP8_BLOCK_KERNELS", "_POSSIBLE_FP8_KERNELS", "_POSSIBLE_WFP8A16_KERNELS")


class PlatformEnum(Enum):
    CPU = 0
    CUDA = 1


class NativeKernel:
    """Stands first in each list until the plugin comes."""


@dataclass
class Version:
    """Attributes: what the version has. ``kinds``: those that its registration function knows."""

    kinds: tuple[str, ...] = ("mp", "int8", "fp8")
    tables: tuple[str, ...] = TABLES
    platform: PlatformEnum = PlatformEnum.CPU
    lacks: tuple[str, ...] = ()  # module.name that does not exist
    registered: dict[str, list[type]] = field(default_factory=dict)


class GroupShape(tuple):
    def __new__(cls, row, col):
        return super().__new__(cls, (row, col))


def key(row: int, col: int, static: bool = True):
    scale = SimpleNamespace(dtype=torch.float32, static=static, group_shape=GroupShape(row, col))
    return SimpleNamespace(dtype=torch.float8_e4m3fn, scale=scale, symmetric=True, scale2=None)


class Parameter(nn.Parameter):
    """With vLLM's attributes for loaders."""

    def __new__(cls, data, weight_loader, input_dim=1, output_dim=0):
        new = super().__new__(cls, data, requires_grad=False)
        new.weight_loader, new.input_dim, new.output_dim = weight_loader, input_dim, output_dim
        return new


class BlockScales(Parameter):
    """Its loader counts in blocks, as vLLM's does: shards that end inside a block overlap."""


class Layer(nn.Module):
    """A column-parallel layer fused of ``sizes`` rows, or with one size a row-parallel one where ``split_k``."""

    def __init__(self, prefix, sizes, K, rank=0, ranks=1, split_k=False):
        super().__init__()
        self.prefix, self.output_sizes, self.rank = prefix, list(sizes), rank
        self.row_ranks, self.column_ranks = (1, ranks) if split_k else (ranks, 1)
        self.whole = (sum(sizes), K)
        self.widths = [size // self.row_ranks for size in sizes]
        self.columns = K // self.column_ranks

    def weight_loader(self, parameter, tensor, shard=0):
        start, size = sum(self.widths[:shard]), self.widths[shard]
        columns = parameter.shape[1]
        if isinstance(parameter, BlockScales):
            block_n = self.weight_block_size[0]
            start, size = -(-start // block_n), -(-size // block_n)
        row = self.rank * size if self.row_ranks > 1 else 0
        column = self.rank * columns if self.column_ranks > 1 else 0
        part = tensor[row : row + size, column : column + columns]
        target = parameter.data[start : start + size]
        assert target.shape == part.shape
        target.copy_(part)


def _kernel_list(module, config, version):
    for kernel in getattr(module, TABLES[0], {}).get(version.platform, []) or version.registered.get("fp8_block", []):
        if kernel is not NativeKernel and kernel.is_supported()[0] and kernel.can_implement(config)[0]:
            return kernel
    return NativeKernel


def install(monkeypatch, version: Version) -> dict[str, ModuleType]:
    """Put the modules of ``version`` in place, and forget what the plugin has imported of another."""
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("blockscale.integrations.vllm")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(integrations, name.rpartition(".")[2])
    modules: dict[str, ModuleType] = {}

    def put(name: str, **contents) -> ModuleType:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for attribute, value in contents.items():
            if f"{name}.{attribute}" not in version.lacks:
                setattr(module, attribute, value)
        if name not in version.lacks:
            monkeypatch.setitem(sys.modules, name, module)
        modules[name] = module
        return module

    put("vllm")
    for name in ("model_executor", "model_executor.layers", "model_executor.kernels"):
        put(f"vllm.{name}")
    put(QUANTIZATION)
    put(f"{QUANTIZATION}.compressed_tensors")
    put(f"{QUANTIZATION}.compressed_tensors.schemes")
    put(f"{QUANTIZATION}.online")
    platform = SimpleNamespace(is_cpu=lambda: version.platform is PlatformEnum.CPU)
    put("vllm.platforms", current_platform=platform, PlatformEnum=PlatformEnum)
    model = SimpleNamespace(model_config=SimpleNamespace(model="/models/one"))
    put("vllm.config", get_current_vllm_config_or_none=lambda: model)
    put("vllm.model_executor.parameter", GroupQuantScaleParameter=_group_parameter)
    put("vllm._custom_ops", scaled_fp8_quant=lambda *arguments: 1 / 0)

    def register_linear_kernel(kernel, platform, kind="mp"):
        if kind not in version.kinds:
            raise ValueError(f"Unrecognized kernel type: {kind}")
        version.registered.setdefault(kind, []).append(kernel)
        table = {"fp8_block": TABLES[0], "fp8": TABLES[1], "wfp8a16": TABLES[2]}[kind]
        if hasattr(linear, table):
            getattr(linear, table)[platform].append(kernel)

    bases = {"Fp8BlockScaledMMLinearKernel": type("Block", (), {}), "FP8ScaledMMLinearKernel": type("Tensor", (), {})}
    tables = {name: {version.platform: [NativeKernel]} for name in version.tables}
    linear = put(LINEAR, register_linear_kernel=register_linear_kernel, **bases, **tables)

    class Fp8LinearMethod:
        def __init__(self, block_size):
            self.weight_block_size = block_size

        def create_weights(
            self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, **more
        ):
            layer.logical_widths, layer.weight_block_size = output_partition_sizes, self.weight_block_size
            N, K = sum(output_partition_sizes), input_size_per_partition
            block_n, block_k = self.weight_block_size
            inner = output_partition_sizes if output_size != N else output_partition_sizes[:-1]
            cut = any(width % block_n for width in inner) or (input_size != K and K % block_k)
            if cut and not getattr(layer, "allow_fp8_block_shape_mismatch", False):
                raise ValueError("not divisible by weight quantization block")
            layer.weight = Parameter(torch.zeros(N, K).to(torch.float8_e4m3fn), layer.weight_loader)
            blank = torch.full((-(-N // block_n), -(-K // block_k)), torch.finfo(torch.float32).min)
            layer.weight_scale_inv = BlockScales(blank, layer.weight_loader)
            config = SimpleNamespace(
                weight_quant_key=key(block_n, block_k),
                activation_quant_key=key(1, block_n, static=False),
                weight_shape=(N, K),
                input_dtype=torch.bfloat16,
                out_dtype=torch.bfloat16,
            )
            kernel = _kernel_list(linear, config, version)
            self.fp8_linear = NativeKernel() if kernel is NativeKernel else kernel(config)

        def process_weights_after_loading(self, layer):
            layer.engine_processed = True
            if not isinstance(self.fp8_linear, NativeKernel):
                self.fp8_linear.process_weights_after_loading(layer)

        def apply(self, layer, x, bias=None):
            return self.fp8_linear.apply_weights(layer, x, bias)

    put(f"{QUANTIZATION}.fp8", Fp8LinearMethod=Fp8LinearMethod)
    return modules


def _group_parameter(data, input_dim, output_dim, weight_loader):
    return Parameter(data, weight_loader, input_dim, output_dim)
