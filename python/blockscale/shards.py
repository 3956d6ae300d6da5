"""The safetensors side of a checkpoint: which files it has, reading a tensor, writing a file one tensor at a time.

A checkpoint is a directory with ``model.safetensors``, or with ``model.safetensors.index.json`` and the shards that it
names, or one ``.safetensors`` file. What can't be read is refused with a sentence that names the file and the tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Bytes per element of the dtypes that a file may hold, by their safetensors names.
_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class TensorInfo(NamedTuple):
    """What a file's header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return _BYTES[self.dtype] * math.prod(self.shape)


def read_json(path: Path) -> dict[str, Any]:
    """JSON object in ``path``; anything else is a ValueError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {path}, got {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object in {path}, got {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace ``path`` by ``content`` in one step."""
    partial = path.with_name(path.name + ".part")
    # In ASCII: JSON may hold half a surrogate pair, which UTF-8 has no bytes for.
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="ascii")
    os.replace(partial, path)


def checkpoint_path(where: str, name: str, given: str | os.PathLike[str]) -> Path:
    """``given`` as a path; an empty string is an unset variable, not the current directory."""
    if not os.fspath(given):
        raise ValueError(f"{where}: expected `{name}` to be a path, got an empty string")
    return Path(given)


def find_shards(source: Path) -> tuple[list[Path], Path | None]:
    """Files of the checkpoint ``source``, all present, and the index that names them if there is one.

    Raises:
        FileNotFoundError: there is no checkpoint, or the index names a missing shard.
        ValueError: the index can't be read.
    """
    if source.is_file():
        return [source], None
    if not source.is_dir():
        raise FileNotFoundError(f"expected a checkpoint directory or a .safetensors file, got {source}: not found")
    if (source / SINGLE).is_file():
        return [source / SINGLE], None
    if (source / INDEX).is_file():
        paths = [source / shard for shard in sorted(set(read_index(source / INDEX)["weight_map"].values()))]
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"expected shard {path.name} beside {source / INDEX}, which names it, got none")
        return paths, source / INDEX
    paths = sorted(source.glob("*.safetensors"))
    if len(paths) != 1:
        raise FileNotFoundError(f"expected {SINGLE} or {INDEX} in {source}, got neither")
    return paths, None


def read_index(index: Path) -> dict[str, Any]:
    """Content of an index: ``weight_map``, tensor name -> shard (a file beside it), and ``metadata``, {} for none."""
    content = read_json(index)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"expected a `weight_map` of tensor names to shards in {index}, got none")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"expected the shard of `{name}` in {index} to be a file beside it, got {shard!r}")
        if not shard.endswith(".safetensors"):
            raise ValueError(f"expected the shard of `{name}` in {index} to be a .safetensors file, got {shard!r}")
    if not isinstance(metadata, dict | None):
        raise ValueError(f"expected `metadata` of {index} to be an object, got {type(metadata).__name__}")
    return {**content, "metadata": metadata or {}}


class Checkpoint:
    """Tensors of a checkpoint by name; a context manager that holds its files open.

    Args:
        source: directory or ``.safetensors`` file.

    Attributes:
        paths: the files.
        index: the file that names them, or None.
        tensors: name -> :class:`TensorInfo`.
        files: name -> the file that holds it.
        metadata: file -> the string map in its header.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: a file is missing.
        ValueError: a file can't be read, a tensor of the index is missing, two files hold the same tensor, or a dtype
            is none that can be carried over.
    """

    def __init__(self, source: Path) -> None:
        self.paths, self.index = find_shards(source)
        self.tensors: dict[str, TensorInfo] = {}
        self.files: dict[str, Path] = {}
        self.metadata: dict[Path, dict[str, str]] = {}
        self._open: dict[Path, Any] = {}
        with ExitStack() as stack:
            for path in self.paths:
                self._add(path, stack)
            if self.index:
                for name, shard in read_index(self.index)["weight_map"].items():
                    if self.files.get(name) != source / shard:
                        raise ValueError(f"expected tensor `{name}` in {source / shard}, as the index says, got none")
            self._stack = stack.pop_all()

    def _add(self, path: Path, stack: ExitStack) -> None:
        safe_open, SafetensorError = _import_safetensors()
        try:
            handle = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"expected a readable safetensors file, got {path}: {error}") from error
        self._open[path] = handle
        self.metadata[path] = handle.metadata() or {}
        for name in handle.keys():  # noqa: SIM118 (a handle is no dict)
            view = handle.get_slice(name)
            info = TensorInfo(view.get_dtype(), tuple(view.get_shape()))
            if info.dtype not in _BYTES:
                raise ValueError(f"expected `{name}` in {path} of dtype {', '.join(_BYTES)}, got {info.dtype}")
            if name in self.files:
                raise ValueError(f"expected `{name}` in one file, got it in {self.files[name].name} and {path.name}")
            self.tensors[name] = info
            self.files[name] = path

    def load(self, name: str) -> Tensor:
        """The tensor ``name``; it may be a view of the file, so copy what is to live on."""
        return self._open[self.files[name]].get_tensor(name)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def write_shard(
    path: Path, layout: Mapping[str, TensorInfo], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file in one step, holding one tensor at a time.

    The bytes go to ``<name>.part``, which takes the place of ``path`` once it is whole and on disk.

    Args:
        path: file to write.
        layout: every tensor of the file.
        tensors: ``(name, tensor)`` of each, in any order.
        metadata: string map for the header.
    """
    # Wide dtypes first, on a header padded to 8 bytes: readers view the mapped bytes, so each tensor must be aligned.
    names = sorted(layout, key=lambda name: (-_BYTES[layout[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        begin, end = end, end + layout[name].nbytes
        header[name] = {
            "dtype": layout[name].dtype,
            "shape": list(layout[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".part")
    try:
        with open(partial, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in tensors:
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _import_safetensors() -> tuple[Any, type[Exception]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "blockscale: checkpoints need the package safetensors; install it with `pip install blockscale[checkpoint]`"
        ) from error
    return safe_open, SafetensorError
