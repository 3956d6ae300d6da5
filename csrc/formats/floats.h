// The 16-bit float types of activations, bias and outputs, converted in software.
// Baseline code and every ISA file share these, so a stored value has the same bits whichever kernel wrote it:
// widening is exact, narrowing is one round-to-nearest-even, a NaN keeps its sign and becomes quiet.
// Included by csrc/isa/*.cpp: only <stdint.h>, everything in an anonymous namespace (no weak symbols).
#pragma once

#include <stdint.h>

namespace blockscale {

enum class FloatType : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

namespace {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline float bf16_to_float(uint16_t half) { return bits_float(static_cast<uint32_t>(half) << 16); }

inline uint16_t float_to_bf16(float value) {
  uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  // Adding just under half of the last kept bit, plus that bit, rounds ties to even; a carry moves into the exponent.
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float fp16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u;
  uint32_t mantissa = half & 0x3ffu;
  if (exponent == 31) {  // Inf or NaN; the conversion instruction makes a NaN quiet, so this does too
    return bits_float(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  }
  if (exponent) return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  if (!mantissa) return bits_float(sign);
  const int shift = __builtin_clz(mantissa) - 21;  // left shifts that bring the leading one to bit 10
  mantissa = (mantissa << shift) & 0x3ffu;
  return bits_float(sign | static_cast<uint32_t>(113 - shift) << 23 | (mantissa << 13));
}

inline uint16_t float_to_fp16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to Inf
  if (magnitude >= 0x38800000u) {                                              // normal in fp16: at least 2^-14
    const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | (rounded >> 13));
  }
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);  // below 2^-25: half of the smallest subnormal
  const int shift = 126 - static_cast<int>(magnitude >> 23);        // 14..24: bits dropped to reach units of 2^-24
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t half = 1u << (shift - 1);
  uint32_t result = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1);
  if (rest > half || (rest == half && (result & 1u))) ++result;
  return static_cast<uint16_t>(sign | result);
}

// One element at `index` of an array of `type`.
inline float load_float(const void* data, FloatType type, int64_t index) {
  if (type == FloatType::kF32) return static_cast<const float*>(data)[index];
  const uint16_t half = static_cast<const uint16_t*>(data)[index];
  return type == FloatType::kBf16 ? bf16_to_float(half) : fp16_to_float(half);
}

inline void store_float(void* data, FloatType type, int64_t index, float value) {
  if (type == FloatType::kF32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] = type == FloatType::kBf16 ? float_to_bf16(value) : float_to_fp16(value);
  }
}

}  // namespace
}  // namespace blockscale
