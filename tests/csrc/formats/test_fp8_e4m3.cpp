// float8_e4m3fn: all 256 codes and their tables against the definition in double, the encoder against nearest search.
#include "formats/fp8_e4m3.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "float_mode.h"
#include "rounding.h"

namespace blockscale {
namespace {

using test::e4m3_nearest;
using test::e4m3_value;

void expect_code_is(uint32_t bf16, int code, const char* source) {
  const double expected = e4m3_value(static_cast<uint8_t>(code));
  const double value = test::value_of_16_bits(static_cast<uint16_t>(bf16), FloatType::kBf16);
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(value)) << source << ", code " << code;
  } else {
    EXPECT_EQ(value, expected) << source << ", code " << code;
  }
  EXPECT_EQ(bf16 >> 15, static_cast<uint32_t>(code) >> 7) << source << ", code " << code;
}

TEST(Fp8E4m3, EveryCodeDecodesToItsDefinition) {
  for (int code = 0; code < 256; ++code) {
    expect_code_is(e4m3_bf16_bits(static_cast<uint8_t>(code)), code, "bf16 bits");
    expect_code_is(float_to_bf16(Fp8E4m3::to_float(static_cast<uint8_t>(code))), code, "to_float");
  }
}

TEST(Fp8E4m3, KnownValues) {
  EXPECT_EQ(Fp8E4m3::to_float(0x00), 0.0f);
  EXPECT_TRUE(std::signbit(Fp8E4m3::to_float(0x80)));
  EXPECT_EQ(Fp8E4m3::to_float(0x01), 0.001953125f);
  EXPECT_EQ(Fp8E4m3::to_float(0x87), -0.013671875f);
  EXPECT_EQ(Fp8E4m3::to_float(0x08), 0.015625f);
  EXPECT_EQ(Fp8E4m3::to_float(0x38), 1.0f);
  EXPECT_EQ(Fp8E4m3::to_float(0x7e), 448.0f);
  EXPECT_EQ(Fp8E4m3::to_float(0xfe), -448.0f);
  EXPECT_TRUE(std::isnan(Fp8E4m3::to_float(0x7f)));
  EXPECT_TRUE(std::isnan(Fp8E4m3::to_float(0xff)));
}

// The lookups as the kernels do them: 128 entries with the sign from the code, and 16 entries by nibbles.
TEST(Fp8E4m3, ByteTablesHoldEveryCode) {
  for (int code = 0; code < 256; ++code) {
    const uint32_t low = kE4m3Bf16Low.bytes[code & 0x7f], high = kE4m3Bf16High.bytes[code & 0x7f] | (code & 0x80);
    expect_code_is(high << 8 | low, code, "128-entry tables");
  }
}

TEST(Fp8E4m3, NibbleTablesHoldEveryCode) {
  for (int code = 0; code < 256; ++code) {
    const int index = ((2 * (code + 1) & 0xff) + 0xed + 1) / 2;  // the instruction averages in 9 bits
    const bool special = index < 128;                            // a shuffle gives 0 where bit 7 is set
    const uint32_t low = ((code << 4) & 0xf0) ^ (special ? kE4m3Nibbles.special_low[index & 15] : 0);
    const uint32_t high = kE4m3Nibbles.sign_high[code >> 4] ^ (special ? kE4m3Nibbles.special_high[index & 15] : 0);
    expect_code_is(high << 8 | low, code, "nibble tables");
  }
}

TEST(Fp8E4m3, EveryCodeSurvivesTheRoundTrip) {
  for (int code = 0; code < 256; ++code) {
    EXPECT_EQ(Fp8E4m3::from_float(Fp8E4m3::to_float(static_cast<uint8_t>(code))), code);
  }
}

void expect_encoded(uint32_t bits) {
  const float value = bits_float(bits);
  const uint8_t expected = std::isnan(value) ? static_cast<uint8_t>((bits >> 24 & 0x80) | 0x7f) : e4m3_nearest(value);
  ASSERT_EQ(Fp8E4m3::from_float(value), expected) << std::hex << bits << " = " << value;
}

TEST(Fp8E4m3, EncodesToNearestEvenAroundEveryBorder) {
  for (int code = 0; code < 0x7e; ++code) {
    const float here = Fp8E4m3::to_float(static_cast<uint8_t>(code));
    const float next = Fp8E4m3::to_float(static_cast<uint8_t>(code + 1));
    const float middle = (here + next) / 2;  // exact: 5 significant bits
    const uint8_t even = static_cast<uint8_t>(code & 1 ? code + 1 : code);
    ASSERT_EQ(Fp8E4m3::from_float(middle), even);
    for (float border : {here, middle, next}) {
      for (int step = -2; step <= 2; ++step) {
        const uint32_t bits = float_bits(border) + static_cast<uint32_t>(step);
        if (bits > 0x7fffffffu) continue;  // one step below zero
        expect_encoded(bits);
        expect_encoded(bits | 0x80000000u);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Fp8E4m3, EncodesADenseSampleOfAllFloats) {
  for (uint64_t bits = 0; bits < (1ull << 32); bits += 509) {
    expect_encoded(static_cast<uint32_t>(bits));
    if (HasFatalFailure()) return;
  }
}

TEST(Fp8E4m3, SaturatesAndKeepsNan) {
  const float infinity = bits_float(0x7f800000u);
  EXPECT_EQ(Fp8E4m3::from_float(464.0f), 0x7e);  // the tie with the absent 480
  EXPECT_EQ(Fp8E4m3::from_float(465.0f), 0x7e);
  EXPECT_EQ(Fp8E4m3::from_float(1e5f), 0x7e);
  EXPECT_EQ(Fp8E4m3::from_float(infinity), 0x7e);
  EXPECT_EQ(Fp8E4m3::from_float(-infinity), 0xfe);
  EXPECT_EQ(Fp8E4m3::from_float(bits_float(0x7fc00000u)), 0x7f);
  EXPECT_EQ(Fp8E4m3::from_float(bits_float(0xffffffffu)), 0xff);
  EXPECT_EQ(Fp8E4m3::from_float(bits_float(0x7f800001u)), 0x7f);
  EXPECT_EQ(Fp8E4m3::from_float(-0.0f), 0x80);
  EXPECT_EQ(Fp8E4m3::from_float(-1e-30f), 0x80);
}

TEST(Fp8E4m3, FlushModesChangeNothing) {
  std::vector<uint8_t> flushed;
  const auto encode_all = [](std::vector<uint8_t>* codes) {
    for (uint64_t bits = 0; bits < (1ull << 32); bits += 65521) {
      codes->push_back(Fp8E4m3::from_float(bits_float(static_cast<uint32_t>(bits))));
    }
    for (int code = 0; code < 256; ++code) {
      codes->push_back(Fp8E4m3::from_float(Fp8E4m3::to_float(static_cast<uint8_t>(code))));
    }
  };
  {
    const test::FlushDenormals flush;
    encode_all(&flushed);
  }
  std::vector<uint8_t> plain;
  encode_all(&plain);
  EXPECT_EQ(flushed, plain);
}

}  // namespace
}  // namespace blockscale
