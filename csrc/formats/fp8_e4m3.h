// float8_e4m3fn, the weight format: 1 sign, 4 exponent bits (bias 7), 3 mantissa bits, no infinities.
//
//   code (sign 0)      exponent  mantissa   value
//   0x00               0         0          +0                           (0x80 is -0)
//   0x01 .. 0x07       0         m          m * 2^-9                     (the 14 subnormals, with 0x81 .. 0x87)
//   0x08 .. 0x7e       e         m          (1 + m/8) * 2^(e-7)          (largest: 0x7e = 448)
//   0x7f               15        7          NaN                          (and 0xff)
//
// Every value is exact in bf16 (3 mantissa bits of 7, exponents -9 .. 8). The kernels look bf16 bytes up in the tables
// below; all of them are computed from the definition above at compile time. Included by csrc/isa/*.cpp: only
// <stdint.h> and our own; everything in an anonymous namespace.
#pragma once

#include <stdint.h>

#include "formats/floats.h"

namespace blockscale {
namespace {

// The bf16 bits of a code; NaN becomes the quiet NaN 0x7fc0 with the code's sign.
constexpr uint16_t e4m3_bf16_bits(uint8_t code) {
  const int sign = (code & 0x80) << 8;
  const int exponent = (code >> 3) & 15;
  int mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return static_cast<uint16_t>(sign | 0x7fc0);
  if (exponent) return static_cast<uint16_t>(sign | (exponent + 120) << 7 | mantissa << 4);
  if (!mantissa) return static_cast<uint16_t>(sign);
  int biased = 121;  // m * 2^-9 = (m/8) * 2^-6: normalise to 1.f * 2^(biased-127)
  while (!(mantissa & 8)) {
    mantissa <<= 1;
    --biased;
  }
  return static_cast<uint16_t>(sign | biased << 7 | (mantissa & 7) << 4);
}

template <int Size>
struct ByteTable {
  alignas(64) uint8_t bytes[Size];
};

// Low (shift 0) and high (shift 8) byte of the bf16 value of codes 0x00 .. 0x7f; the sign is OR-ed in from the code.
constexpr ByteTable<128> e4m3_bf16_bytes(int shift) {
  ByteTable<128> table{};
  for (int code = 0; code < 128; ++code) {
    table.bytes[code] = static_cast<uint8_t>(e4m3_bf16_bits(static_cast<uint8_t>(code)) >> shift);
  }
  return table;
}
constexpr ByteTable<128> kE4m3Bf16Low = e4m3_bf16_bytes(0);
constexpr ByteTable<128> kE4m3Bf16High = e4m3_bf16_bytes(8);

// The fp32 bits of all 256 codes, for the kernel without vector registers.
struct E4m3Floats {
  alignas(64) uint32_t bits[256];
};
constexpr E4m3Floats e4m3_floats() {
  E4m3Floats table{};
  for (int code = 0; code < 256; ++code) {
    table.bits[code] = static_cast<uint32_t>(e4m3_bf16_bits(static_cast<uint8_t>(code))) << 16;
  }
  return table;
}
constexpr E4m3Floats kE4m3Floats = e4m3_floats();

// The same bytes as 16-entry tables for CPUs whose byte shuffle looks up 4 bits (AVX-512 without VBMI).
// A code below 16 is looked up by its low nibble; from 16 on the bf16 value follows from the code by shifts:
//   bits = (code << 4) + 0x3c00, so the low byte is code << 4 and the high byte is 0x3c + (code >> 4).
struct E4m3NibbleTables {
  alignas(16) uint8_t sign_high[16];   // [code >> 4]: sign, and the high byte of codes from 16 on
  alignas(16) uint8_t small_high[16];  // [code & 15]: the high byte of codes below 16
  alignas(16) uint8_t small_low[16];   // [code & 15]: their low byte, XOR code << 4
};
constexpr E4m3NibbleTables e4m3_nibble_tables() {
  E4m3NibbleTables tables{};
  for (int i = 0; i < 16; ++i) {
    const uint16_t small = e4m3_bf16_bits(static_cast<uint8_t>(i));
    tables.sign_high[i] = static_cast<uint8_t>(((i & 7) ? 0x3c + (i & 7) : 0) | (i & 8) << 4);
    tables.small_high[i] = static_cast<uint8_t>(small >> 8);
    tables.small_low[i] = static_cast<uint8_t>((small & 0xff) ^ ((i << 4) & 0xff));
  }
  return tables;
}
constexpr E4m3NibbleTables kE4m3Nibbles = e4m3_nibble_tables();

struct Fp8E4m3 {
  static constexpr float kMax = 448.0f;

  // What kernels look up: the bf16 bytes of a code without its sign.
  static const uint8_t* bf16_low_table() { return kE4m3Bf16Low.bytes; }
  static const uint8_t* bf16_high_table() { return kE4m3Bf16High.bytes; }
  static const E4m3NibbleTables& nibble_tables() { return kE4m3Nibbles; }

  static float to_float(uint8_t code) { return bits_float(kE4m3Floats.bits[code]); }

  // Nearest code, ties to the even code, saturating: beyond 448 (infinities too) gives 448. NaN gives the NaN code.
  static uint8_t from_float(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 24) & 0x80u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
    if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448 and above
    if (magnitude < 0x3c800000u) {
      // Below 2^-6 codes are multiples of 2^-9. Adding 2^14 (whose last bit is 2^-9) lets the adder round to nearest
      // even.
      const float shifted = bits_float(magnitude) + 16384.0f;
      return static_cast<uint8_t>(sign | (float_bits(shifted) & 0xfu));
    }
    const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);  // keep 3 mantissa bits
    return static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
  }
};

}  // namespace
}  // namespace blockscale
