// TDPBF16PS from its definition, in 128-bit floats that hold every product and sum exactly, rounded to 24 bits by
// integer arithmetic: shares no instruction and no code with the emulator or with a kernel.
#pragma once

#include <cstdint>
#include <cstring>

namespace amx_emulator::test {

// fp32 bits; a subnormal counts as zero.
inline __float128 flushed(uint32_t bits) {
  if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// The nearest fp32, ties to even; below the normal range zero with the sign.
inline uint32_t round_to_fp32(__float128 value) {
  using Bits = unsigned __int128;
  Bits bits;
  memcpy(&bits, &value, 16);
  const uint32_t sign = static_cast<uint32_t>(bits >> 127) << 31;
  int exponent = static_cast<int>(bits >> 112) & 0x7fff;
  const Bits fraction = bits & ((Bits{1} << 112) - 1);
  if (exponent == 0x7fff) return fraction ? 0x7fc00000 : sign | 0x7f800000;
  if (exponent == 0) return sign;  // sums of fp32 products are zero or far above the subnormals of this type
  const Bits mantissa = fraction | Bits{1} << 112;
  Bits kept = mantissa >> 89;
  const Bits rest = mantissa & ((Bits{1} << 89) - 1), half = Bits{1} << 88;
  if (rest > half || (rest == half && (kept & 1))) ++kept;
  exponent -= 16383;
  if (kept >> 24) {
    kept >>= 1;
    ++exponent;
  }
  if (exponent > 127) return sign | 0x7f800000;
  if (exponent < -126) return sign;
  return sign | static_cast<uint32_t>(exponent + 127) << 23 | (static_cast<uint32_t>(kept) & 0x7fffff);
}

// c[rows][16] (fp32 bits, 64-byte rows) += a[rows][32] * b[pairs][16][2] (bf16 bits, 64-byte rows).
// The 113 bits of the type hold a product of bf16 (16 bits) plus an fp32 exactly unless the two are more than 89 bits
// apart; then the larger one, which fits in 24 bits, is the nearest fp32 whatever the smaller one adds.
inline void exact_dot(uint8_t* c, const uint8_t* a, const uint8_t* b, int rows, int pairs, int columns) {
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < columns; ++n) {
      uint32_t chain[2] = {0, 0};
      for (int k = 0; k < pairs; ++k) {
        for (int j = 0; j < 2; ++j) {
          uint16_t x, w;
          memcpy(&x, a + 64 * m + 4 * k + 2 * j, 2);
          memcpy(&w, b + 64 * k + 4 * n + 2 * j, 2);
          chain[j] = round_to_fp32(flushed(uint32_t{x} << 16) * flushed(uint32_t{w} << 16) + flushed(chain[j]));
        }
      }
      uint32_t sum;
      memcpy(&sum, c + 64 * m + 4 * n, 4);
      sum = round_to_fp32(flushed(sum) + flushed(round_to_fp32(flushed(chain[0]) + flushed(chain[1]))));
      memcpy(c + 64 * m + 4 * n, &sum, 4);
    }
  }
}

inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

}  // namespace amx_emulator::test
