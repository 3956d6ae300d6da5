// Activations to float8_e4m3fn codes with one scale for each row and group of k, and codes back to bf16.
// Torch-free and single-threaded: the caller splits the rows over threads. The thread's MXCSR neither matters nor
// changes.
#pragma once

#include <stdint.h>

#include "formats/floats.h"

namespace blockscale {

// x[m, k] ~ decode(codes[m, k]) * scales[m, k / group]
struct ActivationGroups {
  int64_t K;
  int64_t group;      // k in a group; the last of a row may be shorter
  float eps;          // least amax, so that a group of zeros has a positive scale
  bool power_of_two;  // scales rounded up to a power of two (ue8m0)
};

// Quantises rows [begin, end) of x (M, K), unit stride along K:
//   scale = max(amax, eps) / 448 in fp32, at least 2^-126, then rounded up to a power of two where asked
//   code  = e4m3 nearest to x / scale (fp32 division), ties to even, saturating at 448; NaN gives the NaN code
// NaN does not count in amax. An infinity makes its group's scale infinite, and every product with the group NaN.
// codes is contiguous (M, K); scale of row m and group g goes to scales[m * stride_m + g * stride_g].
void quantize_activation_rows(const void* x, FloatType type, int64_t x_stride, const ActivationGroups& groups,
                              int64_t begin, int64_t end, uint8_t* codes, float* scales, int64_t stride_m,
                              int64_t stride_g);

// bf16[i] = decode(codes[i]) for `count` codes: exact.
void decode_to_bf16(const uint8_t* codes, int64_t count, uint16_t* bf16);

}  // namespace blockscale
