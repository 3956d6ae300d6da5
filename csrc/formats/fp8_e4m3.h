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

// The same bytes as 16-entry tables for CPUs whose byte shuffle looks up 4 bits (AVX2, AVX-512 without VBMI). Codes
// follow from shifts, bits = (code << 4) + 0x3c00, but for zero, the subnormals and NaN, which are corrected by XOR:
//
//   high byte = sign_high[code >> 4]  ^  special_high[index]       index = (2 (code + 1) mod 256 + 0xed + 1) / 2
//   low byte  = (code << 4) & 0xf0    ^  special_low[index]
//
//   magnitude of the code   0x7f    0x00 .. 0x07   0x08 .. 0x7e
//   index                   0x77    0x78 .. 0x7f   0x80 .. 0xf6     a shuffle looks up bits 0..3, or gives 0 for bit 7
struct E4m3NibbleTables {
  alignas(16) uint8_t sign_high[16];
  alignas(16) uint8_t special_high[16];
  alignas(16) uint8_t special_low[16];
};
constexpr E4m3NibbleTables e4m3_nibble_tables() {
  E4m3NibbleTables tables{};
  for (int i = 0; i < 16; ++i) tables.sign_high[i] = static_cast<uint8_t>((0x3c + (i & 7)) | (i & 8) << 4);
  for (int i = 7; i < 16; ++i) {
    const int code = i == 7 ? 0x7f : i - 8;
    const uint16_t bits = e4m3_bf16_bits(static_cast<uint8_t>(code));
    tables.special_high[i] = static_cast<uint8_t>((bits >> 8) ^ tables.sign_high[code >> 4]);
    tables.special_low[i] = static_cast<uint8_t>((bits & 0xff) ^ ((code << 4) & 0xff));
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
