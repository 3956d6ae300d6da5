// What quantising and dequantising hand to an ISA's kernels, and the kernels' types.
//
//   x[m, k] ~ decode(codes[m, k]) * scales[m, k / group]                     activations
//   w[n, k] ~ decode(codes[n, k]) * scales[n / block_n, k / block_k]         weights
//
// Every ISA gives the same bytes: the definitions below leave nothing open. Plain data only: this header is included by
// baseline code and by every ISA file. Strides count elements; sizes are positive, block sides may exceed N and K.
#pragma once

#include <stdint.h>

#include "formats/floats.h"

namespace blockscale {

struct ActivationGroups {
  int64_t K;
  int64_t group;      // k in a group; the last of a row may be shorter
  float eps;          // least amax, so that a group of zeros has a positive scale
  bool power_of_two;  // scales rounded up to a power of two (ue8m0)
};

// Rows [begin, end) of x (M, K), unit stride along K, to contiguous codes (M, K):
//   scale = max(amax, eps) / 448 in fp32, at least 2^-126, then rounded up to a power of two where asked
//   code  = e4m3 nearest to x / scale (fp32 division), ties to even, saturating at 448; NaN gives the NaN code
// NaN does not count in amax. An infinity makes its group's scale infinite, and every product with the group NaN.
struct ActivationTask {
  const void* x;
  FloatType type;
  int64_t x_stride;
  ActivationGroups groups;
  int64_t begin, end;
  uint8_t* codes;
  float* scales;  // of row m and group g at scales[m * stride_m + g * stride_g]
  int64_t stride_m, stride_g;
};

// Block rows [begin, end), of up to block_n rows each, of weight (N, K) to contiguous codes (N, K) and scales
// (ceil(N / block_n), ceil(K / block_k)). Rows outside the range are not touched; nothing overlaps.
//   amax  = largest magnitude in the block, NaN ignored
//   scale = max(amax / 448, 2^-126) in fp32; 1 if amax is 0
//   code  = e4m3 nearest to w / scale, as above
struct WeightTask {
  const void* weight;
  FloatType type;
  int64_t N, K;
  int64_t stride_n, stride_k;
  int64_t block_n, block_k;
  int64_t begin, end;
  uint8_t* codes;
  float* scales;
};

// One fp32 scale for each block of block_n rows and block_k columns, at data[row * stride_n + column * stride_k].
struct ScaleGrid {
  const float* data;
  int64_t stride_n, stride_k;
  int64_t block_n, block_k;
};

// Rows [begin, end) of out, contiguous (N, K) of out_type, from codes (N, K): decode(code) * scale, rounded once from
// the exact product to out_type, never by way of fp32. No overlap.
struct DequantizeTask {
  const uint8_t* codes;
  int64_t stride_n, stride_k;
  int64_t N, K;
  ScaleGrid scales;
  int64_t begin, end;
  void* out;
  FloatType out_type;
};

// Called with round to nearest and no flushing of subnormals. Where `quantize_activations` is null, all are, and the
// next lower ISA's serve.
struct QuantKernels {
  void (*quantize_activations)(const ActivationTask& task);
  // An infinity has no scale: false with *bad_block = the linear index of the first block that holds one. Blocks before
  // it are written, later ones may not be. Else true, and *bad_block is left alone.
  bool (*quantize_weight)(const WeightTask& task, int64_t* bad_block);
  void (*dequantize)(const DequantizeTask& task);
  void (*decode_to_bf16)(const uint8_t* codes, int64_t count, uint16_t* bf16);  // exact
};

}  // namespace blockscale
