"""Conversion and inspection of checkpoints: what is written, and resuming."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from blockscale import checkpoint as conversion
from blockscale import inspect_checkpoint, load_checkpoint, quantize_checkpoint, reference
from checkpoints import CONVERTED, Model, convert, files, fp8_tensors, read, safetensors_torch, save
from torch import nn


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().to(torch.bfloat16)


# ---- conversion
@pytest.mark.parametrize("shards", [1, 3])
def test_conversion(model, tmp_path, shards):
    src, dst = save(model, tmp_path / "src", shards), tmp_path / "dst"
    before = files(src)
    report = convert(src, dst, block_size=(32, 64))
    source, result = read(src), read(dst)
    for name, tensor in source.items():
        if name in CONVERTED:
            codes, scales = reference.quantize(tensor, (32, 64))
            assert torch.equal(result[name].view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(result[name + "_scale_inv"], scales)
        else:
            assert result[name].dtype == tensor.dtype and torch.equal(result[name], tensor)
    assert len(result) == len(source) + len(CONVERTED)
    config = json.loads((dst / "config.json").read_text())
    kept = ["embed_tokens", "layers.0.mlp.gate", "layers.1.mlp.gate", "lm_head", "visual"]
    assert config == {
        "model_type": "toy",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 64],
            "modules_to_not_convert": kept,
        },
    }
    assert report["converted"] == len(CONVERTED) and report["kept"] == len(source) - len(CONVERTED)
    assert report["modules_to_not_convert"] == kept and report["shards"] == shards and report["shards_skipped"] == 0
    size = sum(tensor.nbytes for tensor in result.values())
    assert report["bytes_after"] == size < report["bytes_before"] == sum(t.nbytes for t in source.values())
    if shards > 1:
        index = json.loads((dst / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": size, "note": "kept"}
        assert index["weight_map"].keys() == result.keys()
    assert (dst / "tokenizer.json").read_bytes() == (src / "tokenizer.json").read_bytes()
    assert (dst / "pooling" / "config.json").exists() and not (dst / "pytorch_model.bin").exists()
    assert {path.name for path in dst.glob("*.safetensors")} == {path.name for path in src.glob("*.safetensors")}
    assert files(src) == before


def test_header_metadata_is_kept_and_tensors_are_aligned(model, tmp_path):
    dst = tmp_path / "dst"
    convert(save(model, tmp_path / "src"), dst)
    with open(dst / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        assert file.tell() % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    wide = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I64": 8}
    assert all(info["data_offsets"][0] % wide[info["dtype"]] == 0 for info in header.values())


@pytest.mark.parametrize(
    "ignore,left",
    [
        (["down_proj"], {"layers.0.mlp.down_proj", "layers.1.mlp.down_proj"}),
        ("layers.1.mlp", {"layers.1.mlp.gate_proj", "layers.1.mlp.down_proj"}),
        (["layers.0.self_attn.q_proj.weight"], {"layers.0.self_attn.q_proj"}),
        ([r"re:.*\.1\..*_proj$"], {n[:-7] for n in CONVERTED if ".1." in n}),
        (["proj", "re:proj"], set()),
    ],
)
def test_ignore(model, tmp_path, ignore, left):
    report = convert(save(model, tmp_path / "src"), tmp_path / "dst", ignore=ignore)
    assert report["converted"] == len(CONVERTED) - len(left)
    assert left <= set(report["modules_to_not_convert"])


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens",
        "transformer.wte",
        "lm_head",
        "model.layers.3.mlp.gate",
        "model.layers.3.mlp.shared_expert_gate",
        "model.layers.3.feed_forward.router",
        "model.visual.blocks.0.attn.qkv",
        "vision_tower.encoder.layers.0.fc1",
        "model.vision_model.fc1",
        "multi_modal_projector.linear_1",
        "model.norm",
        "transformer.ln_f",
    ],
)
def test_never_converted(name, tmp_path):
    tensors = {
        name + ".weight": torch.ones(4, 4),
        "up.gate_proj.weight": torch.ones(4, 4),
        "up.conv.weight": torch.ones(4, 4, 1),
    }
    safetensors_torch.save_file(tensors, tmp_path / "one.safetensors")
    assert convert(tmp_path / "one.safetensors", tmp_path / "dst")["converted"] == 1
    assert read(tmp_path / "dst")["up.gate_proj.weight"].dtype == torch.float8_e4m3fn


def test_one_file_without_config(tmp_path):
    safetensors_torch.save_file(
        {"up.weight": torch.ones(20, 30).half(), "up.bias": torch.ones(20)}, tmp_path / "a.safetensors"
    )
    convert(tmp_path / "a.safetensors", tmp_path / "dst", block_size=(16, 16))
    loaded = load_checkpoint(nn.ModuleDict({"up": nn.Linear(30, 20)}), tmp_path / "dst")
    assert loaded["up"].block_size == (16, 16)
    assert loaded["up"](torch.ones(30)).eq(31).all()


def test_every_other_dtype_is_copied(tmp_path):
    names = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    tensors = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.ones(0, 5)}
    safetensors_torch.save_file(tensors, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "dst")
    result = read(tmp_path / "dst")
    assert result.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert result[name].dtype == tensor.dtype and torch.equal(result[name], tensor), name


def test_an_index_may_have_no_metadata(model, tmp_path):
    src, dst = save(model, tmp_path / "src", 2), tmp_path / "dst"
    path = src / "model.safetensors.index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "metadata": None}))
    report = convert(src, dst)
    assert json.loads((dst / path.name).read_text())["metadata"] == {"total_size": report["bytes_after"]}


def test_links_that_lead_nowhere_are_not_copied(model, tmp_path):
    src, dst = save(model, tmp_path / "src"), tmp_path / "dst"
    (src / "loop").symlink_to("loop")
    (src / "broken").symlink_to("nothing")
    (src / "link.json").symlink_to("tokenizer.json")
    convert(src, dst)
    assert (dst / "link.json").read_bytes() == (src / "tokenizer.json").read_bytes()
    assert not any((dst / name).is_symlink() for name in ("loop", "broken", "link.json"))


def test_any_text_that_json_can_hold_is_kept_in_config(model, tmp_path):
    src, dst = save(model, tmp_path / "src"), tmp_path / "dst"
    (src / "config.json").write_text('{"half": "\\ud800", "é": "ü"}', encoding="utf-8")
    convert(src, dst)
    config = json.loads((dst / "config.json").read_text(encoding="utf-8"))
    assert config["half"] == "\ud800" and config["é"] == "ü"


def test_numpy_integers_are_block_sizes(model, tmp_path):
    report = convert(save(model, tmp_path / "src"), tmp_path / "dst", block_size=np.array([32, 64]))
    assert json.loads(json.dumps(report))["block_size"] == [32, 64]


# ---- field case 36: zero blocks, as they end up in the file
def test_zero_block_in_a_file(tmp_path):
    weight = torch.zeros(256, 256)
    weight[0, 0] = 1
    safetensors_torch.save_file({"up.weight": weight}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "dst")
    result = read(tmp_path / "dst")
    assert result["up.weight_scale_inv"].flatten().tolist() == pytest.approx([1 / 448, 1, 1, 1])
    codes = result["up.weight"].view(torch.uint8)
    assert codes[0, 0] == 0x7E and not codes.flatten()[1:].any()


def test_nan_stays_nan(tmp_path):
    weight = torch.ones(4, 4)
    weight[1, 2] = torch.nan
    safetensors_torch.save_file({"up.weight": weight}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "dst")
    assert read(tmp_path / "dst")["up.weight"].float().isnan().nonzero().tolist() == [[1, 2]]


# ---- resuming
def test_resumes_by_shard(model, tmp_path, monkeypatch):
    src, dst, whole = save(model, tmp_path / "src", 3), tmp_path / "dst", tmp_path / "whole"
    convert(src, whole)
    write, written = conversion.write_shard, []

    def interrupted(path, *arguments):
        if len(written) == 1:
            raise KeyboardInterrupt
        write(path, *arguments)
        written.append(path.name)

    monkeypatch.setattr(conversion, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(src, dst)
    assert not (dst / "config.json").exists() and len(list(dst.glob("*.safetensors"))) == 1
    monkeypatch.setattr(conversion, "write_shard", write)
    assert convert(src, dst)["shards_skipped"] == 1
    assert files(dst) == files(whole)
    again = convert(src, dst)
    assert again["shards_skipped"] == 3 and files(dst) == files(whole)


def test_a_shard_that_was_cut_is_written_again(model, tmp_path):
    src, dst = save(model, tmp_path / "src", 2), tmp_path / "dst"
    convert(src, dst)
    want = files(dst)
    shard = next(dst.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert convert(src, dst)["shards_skipped"] == 1 and files(dst) == want


def test_a_shard_that_fails_leaves_nothing_half_written(model, tmp_path):
    src, dst = save(model, tmp_path / "src"), tmp_path / "dst"
    tensors = read(src)
    tensors["layers.1.mlp.down_proj.weight"][70, 190] = torch.inf
    safetensors_torch.save_file(tensors, src / "model.safetensors")
    with pytest.raises(ValueError, match=r"`layers.1.mlp.down_proj.weight` in .*: .*infinity in block \[0, 1\]"):
        convert(src, dst)
    assert [path.name for path in dst.iterdir()] == [conversion.RECORD]


@pytest.mark.parametrize("change", ["block", "ignore", "source"])
def test_resuming_with_other_arguments_is_refused(model, tmp_path, change):
    src, dst = save(model, tmp_path / "src"), tmp_path / "dst"
    convert(src, dst)
    before = files(dst)
    options = {"block": {"block_size": (64, 64)}, "ignore": {"ignore": ["q_proj"]}, "source": {}}[change]
    if change == "source":
        with torch.no_grad():
            model.visual.bias += 1
        src = save(model, tmp_path / "other")
    with pytest.raises(ValueError, match="of the earlier call recorded in"):
        convert(src, dst, **options)
    assert files(dst) == before


# ---- progress
def test_without_tqdm(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert quantize_checkpoint(save(model, tmp_path / "src"), tmp_path / "dst")["converted"] == len(CONVERTED)


def test_progress_bar(model, tmp_path, capfd):
    quantize_checkpoint(save(model, tmp_path / "src"), tmp_path / "dst")
    assert "quantize: 100%" in capfd.readouterr().err


# ---- inspection
def test_inspect(model, tmp_path):
    src, dst = save(model, tmp_path / "src", 2), tmp_path / "dst"
    convert(src, dst)
    plain, report = inspect_checkpoint(src), inspect_checkpoint(dst)
    assert plain["fp8_layers"] == 0 and plain["block_size"] is None and plain["quantization_config"] is None
    assert report["fp8_layers"] == len(CONVERTED) and report["block_size"] == [128, 128] and report["problems"] == []
    assert report["quantization_config"]["quant_method"] == "fp8"
    assert [shard["file"] for shard in report["shards"]] == sorted(path.name for path in dst.glob("*.safetensors"))
    assert report["dtypes"]["F8_E4M3"]["tensors"] == report["dtypes"]["F32"]["tensors"] == len(CONVERTED)
    size = sum(tensor.nbytes for tensor in read(dst).values())
    assert sum(dtype["bytes"] for dtype in report["dtypes"].values()) == size
    assert json.loads(json.dumps(report)) == report


def test_inspect_lists_every_problem(tmp_path):
    tensors = (
        fp8_tensors("a", torch.ones(3, 3))
        | fp8_tensors("b", torch.ones(1, 1))
        | {"c.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    )
    safetensors_torch.save_file(tensors, tmp_path / "m.safetensors")
    problems = inspect_checkpoint(tmp_path / "m.safetensors")["problems"]
    assert len(problems) == 2 and "`a.weight`" in problems[0] and "`c.weight`" in problems[1]
