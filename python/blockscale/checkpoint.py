"""Checkpoints on disk: quantise one to block FP8, describe one. :mod:`blockscale.model_loading` loads one into a model.

A block-FP8 checkpoint is what DeepSeek and Qwen publish: each converted linear layer has ``X.weight`` (float8_e4m3fn)
and ``X.weight_scale_inv`` (float32, one multiplier per block), and ``config.json`` says so in ``quantization_config``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from . import ops
from .checks import check_block_size, scale_grid
from .model_loading import Layers, load_checkpoint, read_config
from .shards import INDEX, Checkpoint, TensorInfo, checkpoint_path, read_index, read_json, write_json, write_shard

__all__ = ["inspect_checkpoint", "load_checkpoint", "quantize_checkpoint"]

RECORD = "blockscale_quantize.json"  # in the destination: settings, sources and finished shards

_FLOATS = ("BF16", "F16", "F32")
_QUANTIZED = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".part"}

# Left in their dtype: a part of the module's path that names an embedding, a head, a router, a vision tower or a norm,
# and a last part that names a router's gate (`gate_proj` is a linear layer like any other).
_KEPT_PART = re.compile(
    r".*embed.*|wte|wpe|lm_head|router|visual|vision.*|multi_modal_projector|mm_projector|.*norm.*|ln_.*"
)
_KEPT_LAST_PART = re.compile(r"gate|shared_expert_gate")


def quantize_checkpoint(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    block_size: Sequence[int] = (128, 128),
    ignore: Iterable[str] = (),
    progress: bool = True,
) -> dict[str, Any]:
    """Quantise the linear layers of a checkpoint to block FP8, shard by shard.

    Every 2-D ``*.weight`` is converted except those of embeddings, ``lm_head``, routers, vision towers and norms, and
    those that ``ignore`` names; the rest is copied. A shard appears under its name once it is whole. A conversion that
    was interrupted goes on where it stopped when it is called again with the same arguments; finished shards are told
    by their names and sizes.

    Args:
        src: directory with ``config.json`` and safetensors weights, or one ``.safetensors`` file.
        dst: directory to write; new, empty, or of an earlier call with the same arguments.
        block_size: ``(block_n, block_k)``.
        ignore: modules to leave: a whole path or a run of its parts (``lm_head``, ``layers.0``, ``down_proj``), or
            ``re:`` and a regular expression that matches from the start of the path.
        progress: show a progress bar (with tqdm installed).

    Returns:
        Report: ``source``, ``destination``, ``block_size``, ``shards``, ``shards_skipped``, ``converted`` and ``kept``
        (numbers of tensors), ``bytes_before``, ``bytes_after``, ``modules_to_not_convert``.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: a file of the source is missing.
        ValueError: the source can't be read or is quantised already, a weight can't be converted (it is named), or
            ``dst`` holds something else or is being written by another call.

    >>> import tempfile, torch, safetensors.torch
    >>> folder = Path(tempfile.mkdtemp())
    >>> weights = {"mlp.up_proj.weight": torch.ones(48, 256), "lm_head.weight": torch.ones(8, 48)}
    >>> safetensors.torch.save_file(weights, folder / "tiny.safetensors")
    >>> report = quantize_checkpoint(folder / "tiny.safetensors", folder / "fp8", progress=False)
    >>> report["converted"], report["kept"], report["modules_to_not_convert"]
    (1, 1, ['lm_head'])
    """
    where = "quantize_checkpoint"
    source, destination = checkpoint_path(where, "src", src), checkpoint_path(where, "dst", dst)
    block_size = check_block_size(where, block_size)
    ignore = [ignore] if isinstance(ignore, str) else sorted(ignore)
    ignored = _compile_ignored(ignore)
    _check_destination(source, destination)
    config = read_config(source)
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            method = config[key].get("quant_method") if isinstance(config[key], dict) else config[key]
            raise ValueError(f"{where}: expected a source that is not quantised, got {key} {method!r} in {source}")
    with Checkpoint(source) as checkpoint, ExitStack() as stack:
        converted = {name for name in checkpoint.tensors if _converts(checkpoint, name, ignored)}
        _lock(destination, stack)
        record = _open_record(checkpoint, destination, block_size, ignore)
        layouts = {path: _layout(checkpoint, path, converted, block_size) for path in checkpoint.paths}
        todo = [path for path in checkpoint.paths if not _is_done(record, destination / path.name)]
        total = sum(info.nbytes for name, info in checkpoint.tensors.items() if checkpoint.files[name] in todo)
        with _progress_bar(total, progress) as bar:
            for path in todo:
                tensors = _quantized(checkpoint, path, converted, block_size, bar)
                write_shard(destination / path.name, layouts[path], tensors, checkpoint.metadata[path])
                record["done"][path.name] = (destination / path.name).stat().st_size
                write_json(destination / RECORD, record)
        kept = {
            name.removesuffix(".weight")
            for name, info in checkpoint.tensors.items()
            if name.endswith(".weight") and len(info.shape) == 2 and name not in converted
        }
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block_size),
            "modules_to_not_convert": sorted(kept | {"lm_head"}),  # tied, it is not stored
        }
        _write_rest(source, destination, checkpoint.index, layouts, config)
        return {
            "source": str(source),
            "destination": str(destination),
            "block_size": list(block_size),
            "shards": len(layouts),
            "shards_skipped": len(layouts) - len(todo),
            "converted": len(converted),
            "kept": len(checkpoint.tensors) - len(converted),
            "bytes_before": sum(info.nbytes for info in checkpoint.tensors.values()),
            "bytes_after": _total_bytes(layouts),
            "modules_to_not_convert": config["quantization_config"]["modules_to_not_convert"],
        }


def inspect_checkpoint(directory: str | PathLike[str]) -> dict[str, Any]:
    """Describe a checkpoint, FP8 or not, from its headers.

    Args:
        directory: directory with safetensors weights, or one ``.safetensors`` file.

    Returns:
        ``path``, ``block_size`` (None without FP8 weights), ``quantization_config`` (or None), ``shards`` (file, bytes,
        tensors), ``dtypes`` (tensors and bytes of each), ``fp8_layers``, and ``problems``: a sentence for each FP8
        weight that could not be loaded.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: a file is missing.
        ValueError: a file can't be read.

    >>> import tempfile, torch, safetensors.torch
    >>> path = Path(tempfile.mkdtemp()) / "tiny.safetensors"
    >>> safetensors.torch.save_file({"up_proj.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)}, path)
    >>> report = inspect_checkpoint(path)
    >>> report["fp8_layers"], len(report["problems"])  # the scales are missing
    (1, 1)
    """
    source = checkpoint_path("inspect_checkpoint", "directory", directory)
    config = read_config(source)
    with Checkpoint(source) as checkpoint:
        layers = Layers(checkpoint, config)
        problems = []
        for name in layers.weights:
            try:
                layers.skeleton(name)
            except ValueError as error:
                problems.append(str(error))
        tensors = Counter(info.dtype for info in checkpoint.tensors.values())
        nbytes: Counter[str] = Counter()
        for info in checkpoint.tensors.values():
            nbytes[info.dtype] += info.nbytes
        in_file = Counter(checkpoint.files.values())
        return {
            "path": str(source),
            "block_size": list(layers.block_size) if layers.weights else None,
            "quantization_config": config.get("quantization_config"),
            "shards": [
                {"file": path.name, "bytes": path.stat().st_size, "tensors": in_file[path]} for path in checkpoint.paths
            ],
            "dtypes": {name: {"tensors": tensors[name], "bytes": nbytes[name]} for name in sorted(tensors)},
            "fp8_layers": len(layers.weights),
            "problems": problems,
        }


def _converts(checkpoint: Checkpoint, name: str, ignored: Sequence[re.Pattern[str]]) -> bool:
    """Whether ``name`` is the weight of a linear layer that is to be quantised; refuses what can't be."""
    where, info, file = "quantize_checkpoint", checkpoint.tensors[name], checkpoint.files[name]
    if info.dtype in _QUANTIZED or name + "_scale_inv" in checkpoint.tensors:
        raise ValueError(
            f"{where}: expected a source that is not quantised, got `{name}` of dtype {info.dtype} in {file}"
        )
    if not name.endswith(".weight") or len(info.shape) != 2:
        return False
    module = name.removesuffix(".weight")
    parts = module.split(".")
    if any(_KEPT_PART.fullmatch(part) for part in parts) or _KEPT_LAST_PART.fullmatch(parts[-1]):
        return False
    if any(pattern.match(module) for pattern in ignored):
        return False
    if info.dtype not in _FLOATS:
        raise ValueError(
            f"{where}: expected `{name}` of dtype BF16, F16 or F32 (or in `ignore`), got {info.dtype} in {file}"
        )
    return True


def _compile_ignored(ignore: Iterable[str]) -> list[re.Pattern[str]]:
    patterns = []
    for text in ignore:
        parts = re.escape(text.removesuffix(".weight"))
        expression = text[3:] if text.startswith("re:") else rf"(.*\.)?{parts}(\..*)?$"
        try:
            patterns.append(re.compile(expression))
        except re.error as error:
            raise ValueError(
                f"quantize_checkpoint: expected `ignore` of names and regular expressions, got {text!r}: {error}"
            ) from error
    return patterns


def _check_destination(source: Path, destination: Path) -> None:
    where = "quantize_checkpoint"
    folder = _real(source).parent if source.is_file() else _real(source)
    if _real(destination) == folder:
        raise ValueError(f"{where}: expected `dst` in another directory than `src`, got {destination}")
    if destination.exists() and not destination.is_dir():
        raise ValueError(f"{where}: expected `dst` to be a directory, got the file {destination}")
    if (destination / RECORD).exists():
        return
    if destination.is_dir() and ((destination / "config.json").exists() or any(destination.glob("*.safetensors"))):
        raise ValueError(
            f"{where}: expected `dst` new, empty or begun by an earlier call, got a model in {destination}"
        )


def _lock(destination: Path, stack: ExitStack) -> None:
    """Make ``destination`` if need be and hold it until ``stack`` is closed: two writers share names of partial files."""
    destination.mkdir(parents=True, exist_ok=True)
    folder = os.open(destination, os.O_RDONLY)
    stack.callback(os.close, folder)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"quantize_checkpoint: expected `dst` for this call alone, got {destination}, which another one is writing"
        ) from error
    except OSError:
        pass  # a file system that can't lock a directory


def _open_record(
    checkpoint: Checkpoint, destination: Path, block_size: tuple[int, int], ignore: list[str]
) -> dict[str, Any]:
    """The record of finished shards in ``destination``, new or of an earlier call with the same arguments."""
    record = {
        "settings": {"block_size": list(block_size), "ignore": ignore},
        "source": {path.name: _fingerprint(path) for path in checkpoint.paths},
        "done": {},
    }
    if (destination / RECORD).exists():
        found = read_json(destination / RECORD)
        for key in ("settings", "source"):
            if found.get(key) != record[key]:
                raise ValueError(
                    f"quantize_checkpoint: expected the {key} of the earlier call recorded in {destination / RECORD}, "
                    f"{found.get(key)}, got {record[key]}"
                )
        record["done"] = found.get("done")
        if not isinstance(record["done"], dict):
            raise ValueError(
                f"quantize_checkpoint: expected `done` of {destination / RECORD} to be an object, got {record['done']!r}"
            )
    write_json(destination / RECORD, record)
    return record


def _is_done(record: dict[str, Any], path: Path) -> bool:
    return path.is_file() and record["done"].get(path.name) == path.stat().st_size


def _fingerprint(path: Path) -> str:
    """Hash of a shard's size and of 64 KiB at its begin, middle and end: tells models apart without reading them."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for offset in (0, size // 2, max(size - 65536, 0)):
            file.seek(offset)
            digest.update(file.read(65536))
    return digest.hexdigest()


def _layout(
    checkpoint: Checkpoint, path: Path, converted: set[str], block_size: tuple[int, int]
) -> dict[str, TensorInfo]:
    layout = {}
    for name in (name for name, file in checkpoint.files.items() if file == path):
        info = checkpoint.tensors[name]
        if name in converted:
            layout[name] = TensorInfo("F8_E4M3", info.shape)
            layout[name + "_scale_inv"] = TensorInfo("F32", tuple(scale_grid(info.shape, block_size)))
        else:
            layout[name] = info
    return layout


def _quantized(
    checkpoint: Checkpoint, path: Path, converted: set[str], block_size: tuple[int, int], bar: Any
) -> Iterator[tuple[str, Tensor]]:
    for name in (name for name, file in checkpoint.files.items() if file == path):
        tensor = checkpoint.load(name)
        if name in converted:
            try:
                codes, scales = ops.quantize_weight_block_fp8(tensor, block_size)
            except ValueError as error:
                raise ValueError(f"quantize_checkpoint: `{name}` in {path} can't be converted: {error}") from error
            yield name, codes
            yield name + "_scale_inv", scales
            del codes, scales  # else they would be there until the next layer's have been computed
        else:
            yield name, tensor
        bar.update(checkpoint.tensors[name].nbytes)


def _write_rest(
    source: Path,
    destination: Path,
    index: Path | None,
    layouts: dict[Path, dict[str, TensorInfo]],
    config: dict[str, Any],
) -> None:
    """All but the shards; config.json comes last, so that an unfinished conversion can't be loaded."""
    if source.is_dir():
        _copy_files(source, destination)
    if index:
        content = read_index(index)
        content["metadata"] = {**content["metadata"], "total_size": _total_bytes(layouts)}
        content["weight_map"] = {name: path.name for path, layout in layouts.items() for name in sorted(layout)}
        write_json(destination / INDEX, content)
    write_json(destination / "config.json", config)


def _copy_files(source: Path, destination: Path) -> None:
    """Tokenizer, generation_config and the like: every file but weights, their indices and hidden ones."""
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        inside = _real(destination) in _real(path).parents
        if path.is_file() and not (hidden or weights or inside) and relative != Path("config.json"):
            (destination / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, destination / relative)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises on a link to itself


def _total_bytes(layouts: dict[Path, dict[str, TensorInfo]]) -> int:
    return sum(info.nbytes for layout in layouts.values() for info in layout.values())


class _NoBar:
    """Stands in for the progress bar where tqdm is not installed."""

    def update(self, amount: int) -> None:
        pass

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def _progress_bar(total: int, shown: bool) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(total=total, unit="B", unit_scale=True, desc="quantize", disable=not shown)
