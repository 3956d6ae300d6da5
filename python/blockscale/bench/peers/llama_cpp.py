"""llama.cpp's product with Q8_0 weights, through the shared libraries of ``llama-cpp-python``.

Q8_0 is int8 in groups of 32 with one fp16 scale each, 34 bytes for 32 weights. x is fp32 and is rounded to the same
form inside, so its results are coarser than those of the other peers.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import weakref
from pathlib import Path

import torch
from torch import Tensor

from ..inputs import Weight, dense
from .base import Loaded, Peer, PeerMissing

__all__ = ["LlamaCpp"]

_GET = "pip install llama-cpp-python, or name the folder of libggml-cpu.so: --peers llama.cpp=FOLDER"
_F32, _Q8_0, _GROUP, _GROUP_BYTES = 0, 8, 32, 34  # ggml's numbers of the types, and a group of Q8_0
_GRAPH_NODES = 8


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    """ggml_cplan: the two fields used here, then room for what a release may have after them."""

    _fields_ = (("work_size", ctypes.c_size_t), ("work_data", ctypes.c_void_p), ("rest", ctypes.c_uint64 * 16))


class LlamaCpp(Peer):
    """Takes any x, as fp32; K a multiple of 32."""

    name = "llama.cpp"
    about = "ggml_mul_mat, Q8_0 weights, x rounded to Q8_0 in every call"
    bytes_per_weight = _GROUP_BYTES / _GROUP

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        if path is None:
            spec = importlib.util.find_spec("llama_cpp")
            if spec is None or spec.origin is None:
                raise PeerMissing(f"llama.cpp: {_GET}")
            path = str(Path(spec.origin).with_name("lib"))
        try:
            self._base = ctypes.CDLL(str(Path(path, "libggml-base.so")), ctypes.RTLD_GLOBAL)
            self._cpu = ctypes.CDLL(str(Path(path, "libggml-cpu.so")))
        except OSError as error:
            raise PeerMissing(f"llama.cpp: {error}; {_GET}") from error
        self._declare()
        self._cpu.ggml_cpu_init()

    @property
    def version(self) -> str:
        try:
            return f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"
        except importlib.metadata.PackageNotFoundError:
            return f"ggml {self._base.ggml_version().decode()}"

    def refusal(self, weight: Weight, x: torch.dtype, M: int) -> str:
        return "takes K % 32 == 0" if weight.K % _GROUP else ""

    def _declare(self) -> None:
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        for name, result, arguments in (
            ("ggml_version", ctypes.c_char_p, []),
            ("ggml_init", pointer, [_InitParams]),
            ("ggml_free", None, [pointer]),
            ("ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, integer, integer]),
            ("ggml_get_data", pointer, [pointer]),
            ("ggml_mul_mat", pointer, [pointer, pointer, pointer]),
            ("ggml_new_graph_custom", pointer, [pointer, size, ctypes.c_bool]),
            ("ggml_build_forward_expand", None, [pointer, pointer]),
            ("ggml_tensor_overhead", size, []),
            ("ggml_graph_overhead_custom", size, [size, ctypes.c_bool]),
            ("ggml_quantize_chunk", size, [ctypes.c_int, pointer, pointer, integer, integer, integer, pointer]),
        ):
            function = getattr(self._base, name)
            function.restype, function.argtypes = result, arguments
        self._cpu.ggml_graph_plan.restype = _Plan
        self._cpu.ggml_graph_plan.argtypes = [pointer, ctypes.c_int, pointer]
        self._cpu.ggml_graph_compute.argtypes = [pointer, ctypes.POINTER(_Plan)]

    def _context(self, nbytes: int) -> int:
        return self._base.ggml_init(_InitParams(nbytes, None, False))

    def load(self, weight: Weight, x: torch.dtype) -> Loaded:
        base, (N, K) = self._base, (weight.N, weight.K)
        nbytes = N * K // _GROUP * _GROUP_BYTES
        quantised = torch.empty(nbytes, dtype=torch.uint8)
        plain = dense(weight, torch.float32)
        base.ggml_quantize_chunk(_Q8_0, plain.data_ptr(), quantised.data_ptr(), 0, N, K, None)
        copies = weight.copies(self.bytes_per_weight)
        room = copies * (nbytes + base.ggml_tensor_overhead() + 64) + (1 << 16)
        context = self._context(room)
        weights = [base.ggml_new_tensor_2d(context, _Q8_0, K, N) for _ in range(copies)]
        for tensor in weights:
            ctypes.memmove(base.ggml_get_data(tensor), quantised.data_ptr(), nbytes)
        products = _Products(self, weights, N, K)
        weakref.finalize(products, base.ggml_free, context)
        return Loaded(copies, products)


class _Products:
    """A graph for each number of rows and copy of the weight, with its x and result."""

    def __init__(self, peer: LlamaCpp, weights: list[int], N: int, K: int) -> None:
        self._peer, self._weights, self._sides = peer, weights, (N, K)
        self._rows = self._threads = 0

    def __call__(self, x: Tensor, copy: int) -> Tensor:
        if (self._rows, self._threads) != (x.shape[0], torch.get_num_threads()):
            self._build(x.shape[0], torch.get_num_threads())
        self._x.copy_(x)
        self._peer._cpu.ggml_graph_compute(self._graphs[copy], self._plan)
        return self._out

    def _build(self, M: int, threads: int) -> None:
        peer, base, (N, K) = self._peer, self._peer._base, self._sides
        overhead = base.ggml_tensor_overhead()
        graph_bytes = base.ggml_graph_overhead_custom(_GRAPH_NODES, False) + overhead + 4 * N * M + 256
        context = peer._context(len(self._weights) * graph_bytes + 4 * M * K + overhead + (1 << 16))
        x = base.ggml_new_tensor_2d(context, _F32, K, M)
        results = [base.ggml_mul_mat(context, weight, x) for weight in self._weights]
        self._graphs = []
        for result in results:
            graph = base.ggml_new_graph_custom(context, _GRAPH_NODES, False)
            base.ggml_build_forward_expand(graph, result)
            self._graphs.append(graph)
        self._x = _tensor_at(base.ggml_get_data(x), M, K)
        self._out = _tensor_at(base.ggml_get_data(results[0]), M, N)
        plan = peer._cpu.ggml_graph_plan(self._graphs[0], threads, None)
        self._work = torch.empty(max(plan.work_size, 1), dtype=torch.uint8)
        plan.work_data = self._work.data_ptr()
        self._plan = ctypes.byref(plan)
        self._rows, self._threads = M, threads
        if hasattr(self, "_free"):
            self._free()
        self._free = weakref.finalize(self, base.ggml_free, context)


def _tensor_at(address: int, rows: int, columns: int) -> Tensor:
    memory = (ctypes.c_float * (rows * columns)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).view(rows, columns)
