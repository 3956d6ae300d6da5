"""Conversion and inspection of checkpoints: what is refused, by name and before anything is written."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from blockscale import checkpoint as conversion
from blockscale import inspect_checkpoint, load_checkpoint
from checkpoints import HIDDEN, Model, convert, files, read, safetensors_torch, save


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().to(torch.bfloat16)


# ---- the source
def spoil_config(text):
    return lambda src: (src / "config.json").write_text(text)


def spoil_tensor(name, tensor):
    def spoil(src):
        tensors = read(src)
        tensors[name] = tensor
        safetensors_torch.save_file(tensors, src / "model.safetensors")

    return spoil


def cut(src):
    path = src / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


Q_PROJ = "layers.0.self_attn.q_proj.weight"
BAD_SOURCES = {
    "quantised-config": (
        spoil_config('{"quantization_config": {"quant_method": "gptq"}}'),
        "not quantised, got .*gptq",
    ),
    "broken-config": (spoil_config("{"), "expected JSON in .*config.json"),
    "config-nested": (spoil_config("[" * 100_000), "expected JSON in .*config.json"),
    "config-list": (spoil_config("[]"), "expected a JSON object in .*config.json, got list"),
    "no-config": (lambda src: (src / "config.json").unlink(), "expected config.json in"),
    "no-weights": (lambda src: (src / "model.safetensors").unlink(), "expected model.safetensors or .*, got neither"),
    "cut": (cut, "readable safetensors file, got .*model.safetensors"),
    "empty": (lambda src: (src / "model.safetensors").write_bytes(b""), "readable safetensors file, got"),
    "garbage": (lambda src: (src / "model.safetensors").write_bytes(b"\xff" * 64), "readable safetensors file, got"),
    "float8": (
        spoil_tensor(Q_PROJ, torch.ones(HIDDEN, HIDDEN).to(torch.float8_e4m3fn)),
        f"not quantised, got `{Q_PROJ}` of dtype F8_E4M3 in .*model.safetensors",
    ),
    "scales": (spoil_tensor(Q_PROJ + "_scale_inv", torch.ones(1, 1)), f"not quantised, got `{Q_PROJ}`"),
    "int8": (
        spoil_tensor(Q_PROJ, torch.ones(HIDDEN, HIDDEN, dtype=torch.int8)),
        rf"`{Q_PROJ}` of dtype BF16, F16 or F32 \(or in `ignore`\), got I8 in .*model.safetensors",
    ),
    "float64": (spoil_tensor(Q_PROJ, torch.ones(HIDDEN, HIDDEN).double()), "got F64"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_source_is_refused_by_name(model, tmp_path, case):
    spoil, words = BAD_SOURCES[case]
    src, dst = save(model, tmp_path / "src"), tmp_path / "dst"
    spoil(src)
    before = files(src)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        convert(src, dst)
    assert not dst.exists() and files(src) == before


BAD_INDICES = {
    "missing-shard": (
        lambda m: m.update(a="model-9.safetensors"),
        FileNotFoundError,
        "shard model-9.safetensors beside",
    ),
    "missing-tensor": (lambda m: m.update(a="model-00001-of-00002.safetensors"), ValueError, "tensor `a` in .*00001"),
    "other-folder": (lambda m: m.update(a="../x.safetensors"), ValueError, "shard of `a` .* '../x.safetensors'"),
    "no-map": (lambda m: m.clear(), ValueError, "expected a `weight_map`"),
    "number": (lambda m: m.update(a=3), ValueError, "shard of `a` .*, got 3"),
    "record": (
        lambda m: m.update(a="blockscale_quantize.json"),
        ValueError,
        "shard of `a` .* a .safetensors file, got 'blockscale_quantize.json'",
    ),
    "config": (lambda m: m.update(a="config.json"), ValueError, "a .safetensors file, got 'config.json'"),
}


@pytest.mark.parametrize("case", BAD_INDICES)
def test_bad_index_is_refused_by_name(model, tmp_path, case):
    spoil, error, words = BAD_INDICES[case]
    src = save(model, tmp_path / "src", 2)
    path = src / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    spoil(index["weight_map"])
    path.write_text(json.dumps(index))
    for act in (
        lambda: convert(src, tmp_path / "dst"),
        lambda: inspect_checkpoint(src),
        lambda: load_checkpoint(model, src),
    ):
        with pytest.raises(error, match=words):
            act()
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("metadata", [["x"], "x", 3])
def test_metadata_of_an_index_that_is_no_object_is_refused(model, tmp_path, metadata):
    src = save(model, tmp_path / "src", 2)
    path = src / "model.safetensors.index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "metadata": metadata}))
    for act in (lambda: convert(src, tmp_path / "dst"), lambda: inspect_checkpoint(src)):
        with pytest.raises(ValueError, match=r"`metadata` of .*index.json to be an object, got "):
            act()
    assert not (tmp_path / "dst").exists()


def test_tensor_in_two_shards_is_refused(model, tmp_path):
    src = save(model, tmp_path / "src", 2)
    first, second = sorted(src.glob("*.safetensors"))
    safetensors_torch.save_file(safetensors_torch.load_file(first), second)
    with pytest.raises(ValueError, match="in one file, got it in model-00001-of-00002.* and model-00002"):
        convert(src, tmp_path / "dst")


# ---- destination and options
def test_bad_destination_is_refused(model, tmp_path):
    src = save(model, tmp_path / "src")
    other = save(model, tmp_path / "other")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(src)
    before = files(tmp_path)
    for dst, words in (
        (src, "another directory than `src`"),
        (tmp_path / "link", "another directory than `src`"),
        (tmp_path / "file", "to be a directory, got the file"),
        (other, "new, empty or begun by an earlier call, got a model in"),
    ):
        with pytest.raises(ValueError, match=words):
            convert(src, dst)
    with pytest.raises(ValueError, match="another directory than `src`"):
        convert(src / "model.safetensors", src)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "options,words",
    [
        ({"block_size": (0, 128)}, r"positive integers \[block_n, block_k\], got \[0, 128\]"),
        ({"block_size": (128,)}, r"got \[128\]"),
        ({"block_size": 128}, r"got \[128\]"),
        ({"block_size": (True, 128)}, r"positive integers .*, got \[True, 128\]"),
        ({"block_size": (np.int64(0), 128)}, r"positive integers .*, got \[0, 128\]"),
        ({"block_size": (2**63, 5)}, r"integers below 2\*\*63, got \[9223372036854775808, 5\]"),
        ({"ignore": ["re:("]}, r"names and regular expressions, got 're:\('"),
    ],
)
def test_bad_options_are_refused(model, tmp_path, options, words):
    with pytest.raises(ValueError, match="quantize_checkpoint: expected .*" + words):
        convert(save(model, tmp_path / "src"), tmp_path / "dst", **options)
    assert not (tmp_path / "dst").exists()


def test_an_empty_path_is_not_the_current_directory(model, tmp_path, monkeypatch):
    src = save(model, tmp_path / "src")
    monkeypatch.chdir(tmp_path)
    for act, name in (
        (lambda: convert(src, ""), "dst"),
        (lambda: convert("", tmp_path / "dst"), "src"),
        (lambda: inspect_checkpoint(""), "directory"),
        (lambda: load_checkpoint(model, ""), "directory"),
    ):
        with pytest.raises(ValueError, match=f"expected `{name}` to be a path, got an empty string"):
            act()
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_destination_that_is_being_written_is_refused(model, tmp_path, monkeypatch):
    src, dst = save(model, tmp_path / "src", 2), tmp_path / "dst"
    write, refusals = conversion.write_shard, []

    def write_and_convert_again(*arguments):
        with pytest.raises(ValueError, match="expected `dst` for this call alone, got .*dst, which another one is"):
            convert(src, dst)
        refusals.append(write(*arguments))

    monkeypatch.setattr(conversion, "write_shard", write_and_convert_again)
    assert convert(src, dst)["shards_skipped"] == 0 and len(refusals) == 2
    monkeypatch.setattr(conversion, "write_shard", write)
    assert convert(src, dst)["shards_skipped"] == 2


@pytest.mark.parametrize("done", [None, [1], 5], ids=str)
def test_a_record_that_is_broken_is_refused(model, tmp_path, done):
    src, dst = save(model, tmp_path / "src"), tmp_path / "dst"
    convert(src, dst)
    record = dst / conversion.RECORD
    record.write_text(json.dumps({**json.loads(record.read_text()), "done": done}))
    with pytest.raises(ValueError, match=r"expected `done` of .*blockscale_quantize.json to be an object, got"):
        convert(src, dst)


def test_a_link_to_itself_is_refused(model, tmp_path):
    src = save(model, tmp_path / "src")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FileNotFoundError, match="loop: not found"):
        convert(tmp_path / "loop", tmp_path / "dst")
    with pytest.raises(OSError, match="loop"):
        convert(src, tmp_path / "loop")


def test_missing_source():
    for act in (lambda: convert("/no/where", "/no/dst"), lambda: inspect_checkpoint("/no/where")):
        with pytest.raises(FileNotFoundError, match="directory or a .safetensors file, got /no/where: not found"):
            act()


def test_without_safetensors(model, tmp_path, monkeypatch):
    src = save(model, tmp_path / "src")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for act in (
        lambda: convert(src, tmp_path / "dst"),
        lambda: inspect_checkpoint(src),
        lambda: load_checkpoint(model, src),
    ):
        with pytest.raises(ImportError, match=r"pip install blockscale\[checkpoint\]"):
            act()
