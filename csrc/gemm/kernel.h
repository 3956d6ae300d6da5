// What the driver hands to an ISA's kernel, and the table in which each csrc/isa/<isa>.cpp offers its kernels.
// Plain data only: this header is included by baseline code and by every ISA file.
#pragma once

#include <stdint.h>

#include "formats/format.h"
#include "quant/kernel.h"

namespace blockscale {

constexpr int kStripColumns = 16;  // packed columns that one 64-byte chunk of 4 k holds
constexpr int kUnitK = 128;        // longest run of k that is summed before its scale is applied

// Scratch of one kernel call, in bytes. The largest part is packed x: 512 KiB leaves half of a 1 MiB L2 to the weight
// stream.
constexpr int64_t kPackedXBytes = 512 << 10;
constexpr int64_t kTotalsBytes = 256 << 10;
constexpr int kMaxUnits = 2048;
constexpr int64_t kUnitBytes = 32;
constexpr int64_t kStagedUnitBytes = (kUnitK / 4 + 1) * 64;  // a unit of 128 k that starts inside a quad
constexpr int64_t kStagedBytes = 4 * kStagedUnitBytes;       // of those that are multiplied side by side
constexpr int64_t kScratchBytes = kPackedXBytes + kTotalsBytes + kMaxUnits * kUnitBytes + kStagedBytes;
static_assert(kScratchBytes <= 1 << 20, "a thread's scratch stays within 1 MiB whatever K is");

// out[m, n] = sum_k x[m, k] * decode(weight[n, k]) * scales[n / block_n, k / block_k] * x_scales[m, k / block_k] +
// bias[n] for rows [row_begin, row_end) and strips [strip_begin, strip_end). Strides count elements.
struct LinearTask {
  const void* x;  // (M, K), unit stride along K; any alignment
  FloatType x_type;
  int64_t x_stride;

  const float* x_scales;  // [M, ceil(K / block_k)], or null: 1
  int64_t x_scale_stride_m;
  int64_t x_scale_stride_k;

  const uint8_t* weight;  // packed (N, K), see gemm/pack.h
  int64_t N;
  int64_t K;

  const float* scales;  // [ceil(N / block_n), ceil(K / block_k)]
  int64_t scale_stride_n;
  int64_t scale_stride_k;
  int64_t block_n;
  int64_t block_k;

  const void* bias;  // [N] or null
  FloatType bias_type;

  void* out;  // (M, N), unit stride along N
  FloatType out_type;
  int64_t out_stride;

  int64_t row_begin;
  int64_t row_end;
  int64_t strip_begin;
  int64_t strip_end;
  int rows_per_block;  // rows that share one pass over a strip; at most the table's max_rows

  unsigned char* scratch;  // kScratchBytes, aligned to 64
};

using LinearKernel = void (*)(const LinearTask& task);

struct KernelTable {
  bool bf16_x_only;         // the kernel multiplies bf16 pairs; fp16 and fp32 x take the next lower ISA
  int max_rows;             // largest rows_per_block; M up to this is one block
  int preferred_rows;       // larger M is cut into equal blocks of at most this
  int row_granule;          // and each a multiple of this
  const char* rows_reason;  // why blocks of that many rows, with the number behind it
  LinearKernel linear[static_cast<int>(WeightFormat::kCount)];
  QuantKernels quant;  // all null: those of the next lower ISA, which need nothing of this one
};

}  // namespace blockscale
