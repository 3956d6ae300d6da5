"""Stand-ins for ops that run on other devices: each checks what the real one documents and computes in float64.

A class that breaks a rule fails here as it would there: by an exception, or, where the real op is silent, by numbers
from the wrong scales.
"""

from __future__ import annotations

import contextlib

import torch
from blockscale import reference
from oracle import BF16, F16, F32, FP8, decode, round_to


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return round_to(values, dtype).to(dtype)


class ScaledMM:
    """torch._scaled_mm in its block mode on an SM90 device.

    Args:
        scale_b_stride: "compact" (recent torch) or "rounded" up to a multiple of 4 (torch 2.9, cuBLASLt).
        returns_tuple: as torch before 2.5.
        multiply: (A, B, scale_a, scale_b) -> float64 [M, N]; None is exact.
    """

    def __init__(self, scale_b_stride="compact", returns_tuple=False, capability=(9, 0), multiply=None):
        self.scale_b_stride = scale_b_stride
        self.returns_tuple = returns_tuple
        self.capability = capability
        self.multiply = multiply or self.exact
        self.calls: list[dict] = []

    def __call__(self, A, B, *, scale_a, scale_b, bias=None, out_dtype=None):
        if self.capability[0] != 9:
            raise NotImplementedError("DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90")
        assert A.dtype == B.dtype == FP8 and A.dim() == B.dim() == 2
        (M, K), N = A.shape, B.shape[1]
        assert B.shape[0] == K
        assert A.stride() == (K, 1), f"A must be row-major, got strides {A.stride()}"
        assert B.stride() == (1, K), f"B must be column-major, got strides {B.stride()}"
        assert K % 16 == 0 and N % 16 == 0, f"K = {K} and N = {N} must be divisible by 16"
        assert M % 4 == 0 and M > 0, f"M = {M} must be a multiple of 4"
        columns, rows = -(-K // 128), -(-N // 128)
        assert scale_a.dtype == scale_b.dtype == F32
        assert tuple(scale_a.shape) == (M, columns) and self.strided(scale_a, 1, M), scale_a.stride()
        stride = columns if self.scale_b_stride == "compact" else -(-columns // 4) * 4
        assert tuple(scale_b.shape) == (columns, rows) and self.strided(scale_b, 1, stride), scale_b.stride()
        assert out_dtype in (BF16, F16), out_dtype
        assert bias is None, "the block mode takes no bias"
        self.calls.append({"A": A, "scale_a": scale_a, "M": M, "N": N, "K": K})
        out = rounded(self.multiply(A, B, scale_a, scale_b), out_dtype)
        return (out, torch.zeros(1)) if self.returns_tuple else out

    @staticmethod
    def strided(tensor, *strides):
        """Whether `tensor` has `strides`, in the dimensions where there is more than one element."""
        return all(
            size <= 1 or got == want for size, got, want in zip(tensor.shape, tensor.stride(), strides, strict=True)
        )

    @staticmethod
    def exact(A, B, scale_a, scale_b):
        return reference.native_w8a8_block_matmul(A, B.t(), scale_a, scale_b.t(), [128, 128])


def fp8_gemm(A, B, out_dtype, A_scale_, B_scale_, bias_):
    out_dtype = out_dtype or F16
    assert A.dtype == B.dtype == FP8 and A.dim() in (2, 3) and B.dim() == 2
    assert A.is_contiguous()
    K, N = B.shape
    rows = A.reshape(-1, K)
    assert rows.shape[0] > 0, "SIGFPE: divides by the number of tokens"
    assert B.stride() in ((1, K), (N, 1)), f"B neither NT nor NN: strides {B.stride()}"
    for scale in (A_scale_, B_scale_):
        assert scale.dtype == F32 and scale.is_contiguous(), "scales are contiguous float32"
    assert out_dtype in (BF16, F16)
    w, x = decode(B), decode(rows)
    if A_scale_.dim() == 2 and A_scale_.shape[1] > 1:
        groups_k, groups_n = B_scale_.shape
        width_k, width_n = K // groups_k, N // groups_n  # integer division, whatever the remainder
        if width_k % 16 or width_n % 16:
            raise RuntimeError(f"could not create a primitive: groups of {width_k} x {width_n}")
        assert tuple(A_scale_.shape) == (rows.shape[0], groups_k)
        columns = (torch.arange(N) // width_n).clamp(max=groups_n - 1)
        depth = (torch.arange(K) // width_k).clamp(max=groups_k - 1)
        w = w * B_scale_.double()[depth[:, None], columns]
        x = x * A_scale_.double()[:, depth]
    else:
        assert B_scale_.numel() in (1, N), "per tensor or per channel"
        assert A_scale_.numel() in (1, rows.shape[0])
        w = w * B_scale_.double().reshape(1, -1)
        x = x * A_scale_.double().reshape(-1, 1)
    out = x @ w
    if bias_ is not None and bias_.numel():
        out = out + bias_.double()
    return rounded(out, out_dtype).reshape(*A.shape[:-1], N)


def fp8_gemm_w8a16(A, B, B_scale_, bias_):
    assert A.dtype in (BF16, F16) and B.dtype == FP8 and B.dim() == 2
    assert A.is_contiguous() and A.numel() > 0
    K, N = B.shape
    assert A.shape[-1] == K and B.stride() in ((1, K), (N, 1))
    assert B_scale_.dtype == F32 and B_scale_.is_contiguous() and B_scale_.numel() in (1, N), "per tensor or channel"
    out = A.reshape(-1, K).double() @ (decode(B) * B_scale_.double().reshape(1, -1))
    if bias_ is not None:
        out = out + bias_.double()
    return rounded(out, A.dtype).reshape(*A.shape[:-1], N)


XPU_SCHEMAS = {
    "fp8_gemm": "(Tensor A, Tensor B, ScalarType? out_dtype, Tensor? A_scale_, Tensor? B_scale_, Tensor? bias_) "
    "-> Tensor",
    "fp8_gemm_w8a16": "(Tensor A, Tensor B, Tensor? B_scale_, Tensor? bias_) -> Tensor",
}


@contextlib.contextmanager
def xpu_ops():
    """torch.ops._xpu_C with the documented schemas, on CPU tensors, for as long as the context lasts."""
    library = torch.library.Library("_xpu_C", "FRAGMENT")
    for name, schema in XPU_SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, globals()[name], "CPU")
    try:
        yield
    finally:
        library._destroy()
        for name in XPU_SCHEMAS:  # a namespace remembers the ops that it has once found
            torch.ops._xpu_C.__dict__.pop(name, None)
