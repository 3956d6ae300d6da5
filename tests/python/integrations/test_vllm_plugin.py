"""Registration: what is touched in which vLLM, how often, and what is said where nothing is."""

from __future__ import annotations

import importlib
import logging
import sys

import pytest
from fake_vllm import LINEAR, QUANTIZATION, TABLES, NativeKernel, PlatformEnum, Version, install

PARAMETER = "vllm.model_executor.parameter"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("BLOCKSCALE_VLLM", "BLOCKSCALE_DISABLED_KERNELS", "BLOCKSCALE_MAX_ISA"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def plugin(monkeypatch):
    """plugin(version) -> the plugin's module beside a vLLM of that version."""

    def imported(version: Version):
        modules = install(monkeypatch, version)
        return importlib.import_module("blockscale.integrations.vllm"), modules

    return imported


def listed(modules, table=TABLES[0]):
    return [kernel.__name__ for kernel in getattr(modules[LINEAR], table)[PlatformEnum.CPU]]


def test_stands_first_in_every_list(plugin):
    module, modules = plugin(Version())
    module.register()
    assert listed(modules) == ["BlockscaleFp8BlockLinearKernel", "NativeKernel"]
    assert listed(modules, TABLES[1]) == listed(modules, TABLES[2]) == ["BlockscaleFp8LinearKernel", "NativeKernel"]
    assert module.state()["active"]


def test_again_changes_nothing(plugin, caplog):
    module, modules = plugin(Version(kinds=("fp8", "fp8_block", "wfp8a16")))
    with caplog.at_level(logging.INFO, "blockscale"):
        module.register()
        create = modules[f"{QUANTIZATION}.fp8"].Fp8LinearMethod.create_weights
        module.register()
        module.register()
    assert [listed(modules, table).count(listed(modules, table)[0]) for table in TABLES] == [1, 1, 1]
    assert modules[f"{QUANTIZATION}.fp8"].Fp8LinearMethod.create_weights is create
    assert sum("vLLM plugin" in message for message in caplog.messages) == 1


def test_uses_the_registration_function_where_it_knows_the_kind(plugin):
    version = Version(kinds=("fp8", "fp8_block", "wfp8a16"))
    module, modules = plugin(version)
    module.register()
    assert {kind: [one.__name__ for one in kernels] for kind, kernels in version.registered.items()} == {
        "fp8_block": ["BlockscaleFp8BlockLinearKernel"],
        "fp8": ["BlockscaleFp8LinearKernel"],
        "wfp8a16": ["BlockscaleFp8LinearKernel"],
    }
    assert listed(modules)[0] == "BlockscaleFp8BlockLinearKernel"


def test_uses_the_function_alone_where_the_lists_are_gone(plugin):
    version = Version(kinds=("fp8", "fp8_block"), tables=())
    module, _ = plugin(version)
    module.register()
    module.register()
    assert [len(kernels) for kernels in version.registered.values()] == [1, 1]
    assert module.state()["lists"] == ["block", "tensor and channel"]
    assert "the list of weight-only kernels" in module.state()["missing"]


@pytest.mark.parametrize(
    "version, lacking",
    [
        (Version(lacks=(LINEAR,)), LINEAR),
        (Version(lacks=("vllm.platforms",)), "vllm.platforms"),
        (Version(lacks=(f"{LINEAR}.Fp8BlockScaledMMLinearKernel",)), f"{LINEAR}.Fp8BlockScaledMMLinearKernel"),
        (Version(lacks=(f"{PARAMETER}.GroupQuantScaleParameter",)), f"{PARAMETER}.GroupQuantScaleParameter"),
        (Version(lacks=(f"{QUANTIZATION}.fp8",)), "the linear methods Fp8LinearMethod"),
        (Version(tables=(), kinds=("mp",)), f"a list of block kernels in {LINEAR}"),
    ],
    ids=["no-kernels", "no-platforms", "no-base-class", "no-parameter", "no-methods", "no-lists"],
)
def test_other_versions_stay_as_they_are_and_one_warning_says_why(plugin, caplog, version, lacking):
    module, modules = plugin(version)
    with caplog.at_level(logging.INFO, "blockscale"):
        module.register()
        module.register()
    said = [record for record in caplog.records if "changes nothing" in record.message]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING
    assert f"this vLLM lacks {lacking}" in said[0].message
    assert version.registered == {}
    for table in version.tables:
        assert getattr(modules[LINEAR], table)[PlatformEnum.CPU] == [NativeKernel]
    methods = modules[f"{QUANTIZATION}.fp8"].Fp8LinearMethod
    assert not hasattr(methods.create_weights, "_blockscale_original")
    assert module.state() == {"active": False, "reason": f"this vLLM lacks {said[0].message.partition('lacks ')[2]}"}


def test_off_switch(plugin, monkeypatch):
    module, modules = plugin(Version())
    monkeypatch.setenv("BLOCKSCALE_VLLM", "0")
    module.register()
    assert listed(modules) == ["NativeKernel"]
    assert module.state()["reason"] == "turned off by BLOCKSCALE_VLLM=0"


def test_other_platforms(plugin):
    module, modules = plugin(Version(platform=PlatformEnum.CUDA))
    module.register()
    assert getattr(modules[LINEAR], TABLES[0])[PlatformEnum.CUDA] == [NativeKernel]
    assert module.state()["reason"] == "vLLM's platform is not the CPU"


def test_without_vllm(monkeypatch):
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    module = importlib.reload(importlib.import_module("blockscale.integrations.vllm"))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    module.register()
    assert module.state()["reason"] == "vLLM is not installed"


def test_a_fault_does_not_stop_the_engine(plugin, caplog):
    module, modules = plugin(Version())
    modules["vllm.platforms"].current_platform.is_cpu = lambda: 1 // 0
    module.register()
    assert "ZeroDivisionError" in module.state()["reason"]
    assert "changes nothing: ZeroDivisionError" in caplog.text


def test_replaces_the_quantiser_that_is_a_stub(plugin):
    module, modules = plugin(Version())
    module.register()
    import torch

    x = torch.tensor([[448.0, -896.0], [1.0, 3.5]])
    codes, scale = modules["vllm._custom_ops"].scaled_fp8_quant(x, torch.tensor([2.0]))
    assert codes.float().tolist() == [[224.0, -448.0], [0.5, 1.75]]
    codes, scale = modules["vllm._custom_ops"].scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    assert scale.flatten().tolist() == [2.0, 2.0**-7]
    codes, _ = modules["vllm._custom_ops"].scaled_fp8_quant(x, torch.tensor([1.0, 2.0]), group_shape=(1, -1))
    assert codes.float().tolist() == [[448.0, -448.0], [0.5, 1.75]]
    with pytest.raises(ValueError, match=r"expected `scale` of one number or of groups of \[2, 2\], got \[3\]"):
        modules["vllm._custom_ops"].scaled_fp8_quant(x, torch.ones(3))
