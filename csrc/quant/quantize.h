// Weights to float8_e4m3fn codes with a scale grid, and back:
//
//   w[n, k] ~ decode(codes[n, k]) * scales[n / block_n, k / block_k]
//
// Torch-free and single-threaded: the caller splits the rows over threads, any split gives the same bytes.
// Baseline x86-64 code. The thread's MXCSR (flush modes, rounding) neither changes a result nor is changed.
#pragma once

#include <stdint.h>

#include "formats/floats.h"

namespace blockscale {

// One fp32 scale for each block of block_n rows and block_k columns, at data[row * stride_n + column * stride_k].
struct ScaleGrid {
  const float* data;
  int64_t stride_n, stride_k;
  int64_t block_n, block_k;
};

// Quantises block rows [begin, end), of up to block_n rows each, of weight (N, K) with strides in elements.
//
//   amax  = largest magnitude in the block, NaN ignored
//   scale = max(amax / 448, 2^-126) in fp32; 1 if amax is 0
//   code  = e4m3 nearest to w / scale (fp32 division), ties to even, saturating at 448; NaN gives the NaN code
//
// codes is contiguous (N, K), scales contiguous (ceil(N / block_n), ceil(K / block_k)); rows outside the range are not
// touched. Neither may overlap weight. Block sides may exceed N and K.
//
// An infinity has no scale: returns false with *bad_block = the linear index of the first block that holds one. Blocks
// before it are written, later ones may not be. Else returns true and leaves *bad_block alone.
bool quantize_block_rows(const void* weight, FloatType type, int64_t N, int64_t K, int64_t stride_n, int64_t stride_k,
                         int64_t block_n, int64_t block_k, int64_t begin, int64_t end, uint8_t* codes, float* scales,
                         int64_t* bad_block);

// Writes rows [begin, end) of out, contiguous (N, K) of out_type, from codes (N, K) with strides stride_n, stride_k:
// decode(code) * scale, rounded once from the exact product to out_type, never by way of fp32. No overlap.
void dequantize_rows(const uint8_t* codes, int64_t stride_n, int64_t stride_k, int64_t N, int64_t K,
                     const ScaleGrid& scales, int64_t begin, int64_t end, void* out, FloatType out_type);

}  // namespace blockscale
