// Float formats from their definition, in double, without any conversion instruction: the judge of the library's own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "formats/floats.h"

namespace blockscale::test {

// precision counts the hidden bit; emin and emax are the exponents of the smallest and the largest normal number.
struct Precision {
  int bits, emin, emax;
};

inline Precision precision_of(FloatType type) {
  switch (type) {
    case FloatType::kBf16:
      return {8, -126, 127};
    case FloatType::kF16:
      return {11, -14, 15};
    default:
      return {24, -126, 127};
  }
}

// Half a unit in the last place of 1: the relative error of one rounding.
inline double unit_roundoff(FloatType type) { return std::ldexp(1.0, -precision_of(type).bits); }

// Nearest representable value, ties to even, beyond the range Inf, subnormals gradual. One rounding; exact in double.
inline double round_to(double value, FloatType type) {
  if (!std::isfinite(value) || value == 0.0) return value;
  const Precision p = precision_of(type);
  int exponent;
  std::frexp(value, &exponent);  // |value| in [2^(exponent-1), 2^exponent)
  const int last = std::max(exponent - p.bits, p.emin - p.bits + 1);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -last)), last);
  const double largest = std::ldexp(2.0 - std::ldexp(1.0, 1 - p.bits), p.emax);
  return std::copysign(std::fabs(rounded) > largest ? std::numeric_limits<double>::infinity() : rounded, value);
}

// sign | exponent | mantissa of an IEEE-style format with 15 bits of exponent and mantissa together.
inline double value_of_16_bits(uint16_t bits, FloatType type) {
  const Precision p = precision_of(type);
  const int mantissa_bits = p.bits - 1;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int all_ones = 0x7fff >> mantissa_bits;
  double value;
  if (exponent == all_ones) {
    value = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent) {
    value = std::ldexp((1 << mantissa_bits) + mantissa, exponent - 1 + p.emin - mantissa_bits);
  } else {
    value = std::ldexp(mantissa, p.emin - mantissa_bits);
  }
  return bits & 0x8000 ? -value : value;
}

// Element `index` of an array of `type`, exactly.
inline double load_double(const void* data, FloatType type, int64_t index) {
  if (type == FloatType::kF32) {
    float value;
    std::memcpy(&value, static_cast<const char*>(data) + 4 * index, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(data) + 2 * index, 2);
  return value_of_16_bits(bits, type);
}

// The value of a float8_e4m3fn code.
inline double e4m3_value(uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  double value = exponent ? std::ldexp(1.0 + mantissa / 8.0, exponent - 7) : std::ldexp(mantissa, -9);
  if (exponent == 15 && mantissa == 7) value = std::numeric_limits<double>::quiet_NaN();
  return code & 0x80 ? -value : value;
}

// The code nearest to a value, by comparing distances; ties to the even code, beyond 448 saturating. NaN gives 0x7f.
inline uint8_t e4m3_nearest(double value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return sign | 0x7f;
  const double magnitude = std::fabs(value);
  if (magnitude >= 448.0) return sign | 0x7e;
  int low = 0, high = 0x7e;  // codes of one sign ascend like their values
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (e4m3_value(static_cast<uint8_t>(middle)) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - e4m3_value(static_cast<uint8_t>(low));
  const double above = e4m3_value(static_cast<uint8_t>(high)) - magnitude;
  const bool up = above < below || (above == below && (low & 1));
  return static_cast<uint8_t>(sign | (up ? high : low));
}

}  // namespace blockscale::test
