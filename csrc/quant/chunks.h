// Rows of floats in chunks that fit L1: what quantising weights and activations share.
#pragma once

#include <stdint.h>

#include "formats/floats.h"

namespace blockscale {
namespace {

constexpr int64_t kChunk = 256;  // elements: 1 KiB of fp32, and few enough calls per row that their cost does not show

constexpr uint32_t kInfinity = 0x7f800000u;

// `count` elements of `data`, `stride` apart from `offset` on, as fp32.
inline void load_chunk(const void* data, FloatType type, int64_t offset, int64_t stride, int64_t count, float* values) {
  if (type == FloatType::kF32) {
    const float* source = static_cast<const float*>(data) + offset;
    for (int64_t i = 0; i < count; ++i) values[i] = source[i * stride];
    return;
  }
  const uint16_t* source = static_cast<const uint16_t*>(data) + offset;
  if (type == FloatType::kBf16) {
    for (int64_t i = 0; i < count; ++i) values[i] = bf16_to_float(source[i * stride]);
  } else {
    for (int64_t i = 0; i < count; ++i) values[i] = fp16_to_float(source[i * stride]);
  }
}

// The bits of the largest magnitude, `so_far` included. Magnitudes compare as integers; a NaN is above Inf.
inline uint32_t largest_magnitude(const float* values, int64_t count, uint32_t so_far) {
  int32_t largest = static_cast<int32_t>(so_far);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = static_cast<int32_t>(float_bits(values[i]) & 0x7fffffffu);
    const int32_t number = magnitude > static_cast<int32_t>(kInfinity) ? 0 : magnitude;
    largest = number > largest ? number : largest;
  }
  return static_cast<uint32_t>(largest);
}

}  // namespace
}  // namespace blockscale
