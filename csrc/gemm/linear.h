// The driver of fp8_scaled_mm: out = x * dequant(weight)^T + bias over any parallel_for. Torch-free; ops.cpp has made
// the checks.
#pragma once

#include <array>
#include <cstdint>

#include "formats/format.h"
#include "gemm/plan.h"
#include "isa/isa.h"

namespace blockscale {

// Shapes and strides count elements; x and out have unit stride along their last dimension.
struct LinearProblem {
  int64_t M = 0, N = 0, K = 0;
  const void* x = nullptr;  // (M, K)
  FloatType x_type = FloatType::kF32;
  int64_t x_stride = 0;
  const float* x_scales = nullptr;  // [M, ceil(K / block_k)], or null: 1
  int64_t x_scale_stride_m = 0, x_scale_stride_k = 0;
  const uint8_t* weight = nullptr;  // packed (N, K), gemm/pack.h
  WeightFormat format = WeightFormat::kFp8E4m3;
  const float* scales = nullptr;  // [ceil(N / block_n), ceil(K / block_k)]
  int64_t scale_stride_n = 0, scale_stride_k = 0;
  int64_t block_n = 1, block_k = 1;
  const void* bias = nullptr;  // [N] or null
  FloatType bias_type = FloatType::kF32;
  void* out = nullptr;  // (M, N)
  FloatType out_type = FloatType::kF32;
  int64_t out_stride = 0;
};

// Calls body(begin, end, context) over any partition of [0, count), on any threads, `grain` items or more at a time.
using ParallelFor = void (*)(int64_t count, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);

// Computes `problem` as `plan` says. Allocates at most a thread's scratch, once for each thread's life.
// Returns false if that allocation failed, in which case `out` is incomplete. Never throws.
bool linear(const LinearProblem& problem, const Plan& plan, ParallelFor parallel_for);

// Kernel calls that each ISA has served in this process.
std::array<uint64_t, kIsaCount> kernel_calls();

}  // namespace blockscale
