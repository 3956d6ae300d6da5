// See activations.h.
#include "quant/activations.h"

#include <algorithm>

#include "formats/float_mode.h"
#include "formats/fp8_e4m3.h"
#include "quant/chunks.h"

namespace blockscale {
namespace {

float group_scale(uint32_t amax, const ActivationGroups& groups) {
  float scale = std::max(bits_float(amax), groups.eps) / Fp8E4m3::kMax;
  scale = std::max(scale, bits_float(0x00800000u));  // 2^-126, the smallest normal: x / scale then never overflows
  if (!groups.power_of_two || float_bits(scale) == kInfinity) return scale;
  const uint32_t bits = float_bits(scale);
  return bits_float((bits & 0x7fffffu) ? (bits & 0x7f800000u) + 0x800000u : bits);
}

__attribute__((noinline)) float quantize_group(const void* x, FloatType type, int64_t offset, int64_t count,
                                               const ActivationGroups& groups, uint8_t* codes) {
  float values[kChunk];
  uint32_t amax = 0;
  for (int64_t k = 0; k < count; k += kChunk) {
    const int64_t run = std::min(kChunk, count - k);
    load_chunk(x, type, offset + k, 1, run, values);
    amax = largest_magnitude(values, run, amax);
  }
  const float scale = group_scale(amax, groups);
  for (int64_t k = 0; k < count; k += kChunk) {
    const int64_t run = std::min(kChunk, count - k);
    load_chunk(x, type, offset + k, 1, run, values);
    for (int64_t i = 0; i < run; ++i) codes[k + i] = Fp8E4m3::from_float(values[i] / scale);
  }
  return scale;
}

}  // namespace

void quantize_activation_rows(const void* x, FloatType type, int64_t x_stride, const ActivationGroups& groups,
                              int64_t begin, int64_t end, uint8_t* codes, float* scales, int64_t stride_m,
                              int64_t stride_g) {
  const PlainArithmetic plain;
  for (int64_t m = begin; m < end; ++m) {
    for (int64_t k = 0, g = 0; k < groups.K; k += groups.group, ++g) {
      const int64_t count = std::min(groups.group, groups.K - k);
      scales[m * stride_m + g * stride_g] =
          quantize_group(x, type, m * x_stride + k, count, groups, codes + m * groups.K + k);
    }
  }
}

void decode_to_bf16(const uint8_t* codes, int64_t count, uint16_t* bf16) {
  for (int64_t i = 0; i < count; ++i) bf16[i] = static_cast<uint16_t>(float_bits(Fp8E4m3::to_float(codes[i])) >> 16);
}

}  // namespace blockscale
