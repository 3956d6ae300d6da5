// 16-bit floats against their definition in double: every 16-bit input, and 32-bit inputs around every rounding border.
#include "formats/floats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "float_mode.h"
#include "rounding.h"

namespace blockscale {
namespace {

using test::round_to;
using test::value_of_16_bits;

float widen(uint16_t bits, FloatType type) {
  return type == FloatType::kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

uint16_t narrow(float value, FloatType type) {
  return type == FloatType::kBf16 ? float_to_bf16(value) : float_to_fp16(value);
}

bool is_nan_bits(uint16_t bits, FloatType type) {
  return (bits & 0x7fff) > (type == FloatType::kBf16 ? 0x7f80 : 0x7c00);
}

// Compares as bits, so that the sign of a zero counts; a NaN must stay one, quiet, with its sign.
void expect_narrowed(float value, FloatType type) {
  const uint16_t bits = narrow(value, type);
  if (std::isnan(value)) {
    const uint16_t quiet = type == FloatType::kBf16 ? 0x0040 : 0x0200;
    ASSERT_TRUE(is_nan_bits(bits, type) && (bits & quiet) && (bits >> 15) == (float_bits(value) >> 31))
        << std::hex << float_bits(value) << " -> " << bits;
    return;
  }
  const double expected = round_to(value, type);
  ASSERT_EQ(value_of_16_bits(bits, type), expected) << std::hex << float_bits(value) << " -> " << bits;
  ASSERT_EQ(bits >> 15, float_bits(value) >> 31) << std::hex << float_bits(value);
}

class SixteenBits : public testing::TestWithParam<FloatType> {};

TEST_P(SixteenBits, EveryInputWidensExactly) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = widen(static_cast<uint16_t>(bits), GetParam());
    const double expected = value_of_16_bits(static_cast<uint16_t>(bits), GetParam());
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << std::hex << bits;
    } else {
      ASSERT_EQ(value, expected) << std::hex << bits;
    }
    ASSERT_EQ(float_bits(value) >> 31, bits >> 15) << std::hex << bits;
  }
}

TEST_P(SixteenBits, EveryInputSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const uint16_t quiet = GetParam() == FloatType::kBf16 ? 0x0040 : 0x0200;
    const uint16_t expected = is_nan_bits(half, GetParam()) ? half | quiet : half;
    ASSERT_EQ(narrow(widen(half, GetParam()), GetParam()), expected) << std::hex << bits;
  }
}

TEST_P(SixteenBits, NarrowsToNearestEvenAroundEveryBorder) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const uint32_t here = float_bits(widen(static_cast<uint16_t>(half), GetParam()));
    const uint32_t next = float_bits(widen(static_cast<uint16_t>(half + 1), GetParam()));
    const uint32_t middle = here + (next - here) / 2;  // a tie where both are finite and of one sign
    for (uint32_t bits : {here - 1, here, here + 1, middle - 1, middle, middle + 1}) {
      expect_narrowed(bits_float(bits), GetParam());
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(SixteenBits, NarrowsADenseSampleOfAllFloats) {
  for (uint64_t bits = 0; bits < (1ull << 32); bits += 509) {  // a prime: every low byte and exponent is met
    expect_narrowed(bits_float(static_cast<uint32_t>(bits)), GetParam());
    if (HasFatalFailure()) return;
  }
}

TEST_P(SixteenBits, FlushModesChangeNothing) {
  std::vector<uint32_t> inputs;
  for (uint32_t bits = 0; bits < 0x01000000; bits += 509) inputs.push_back(bits);           // fp32 subnormals
  for (uint32_t bits = 0x33000000; bits < 0x38800000; bits += 509) inputs.push_back(bits);  // fp16 subnormals
  std::vector<uint16_t> narrowed(inputs.size());
  std::vector<uint32_t> widened(0x10000);
  {
    const test::FlushDenormals flush;
    for (size_t i = 0; i < inputs.size(); ++i) narrowed[i] = narrow(bits_float(inputs[i]), GetParam());
    for (uint32_t i = 0; i < 0x10000; ++i) widened[i] = float_bits(widen(static_cast<uint16_t>(i), GetParam()));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(narrowed[i], narrow(bits_float(inputs[i]), GetParam())) << std::hex << inputs[i];
  }
  for (uint32_t i = 0; i < 0x10000; ++i) {
    ASSERT_EQ(widened[i], float_bits(widen(static_cast<uint16_t>(i), GetParam()))) << std::hex << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, SixteenBits, testing::Values(FloatType::kBf16, FloatType::kF16),
                         [](const testing::TestParamInfo<FloatType>& type) {
                           return type.param == FloatType::kBf16 ? "bf16" : "fp16";
                         });

TEST(Floats, KnownValues) {
  EXPECT_EQ(float_to_bf16(1.0f), 0x3f80);
  EXPECT_EQ(float_to_bf16(1.00390625f), 0x3f80);  // 1 + 2^-8, a tie: down to even
  EXPECT_EQ(float_to_bf16(1.01171875f), 0x3f82);  // 1 + 3 * 2^-8, a tie: up to even
  EXPECT_EQ(float_to_bf16(3.3961775e38f), 0x7f80);
  EXPECT_EQ(float_to_fp16(65504.0f), 0x7bff);
  EXPECT_EQ(float_to_fp16(65519.996f), 0x7bff);
  EXPECT_EQ(float_to_fp16(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_fp16(5.9604645e-8f), 0x0001);  // 2^-24
  EXPECT_EQ(float_to_fp16(2.9802322e-8f), 0x0000);  // 2^-25, a tie with zero
  EXPECT_EQ(float_to_fp16(-0.0f), 0x8000);
}

TEST(Floats, LoadAndStoreAgreeWithTheirType) {
  uint16_t halves[2] = {0, 0};
  float floats[2] = {0, 0};
  store_float(halves, FloatType::kBf16, 1, -2.5f);
  EXPECT_EQ(halves[1], 0xc020);
  EXPECT_EQ(load_float(halves, FloatType::kBf16, 1), -2.5f);
  store_float(halves, FloatType::kF16, 1, -2.5f);
  EXPECT_EQ(halves[1], 0xc100);
  EXPECT_EQ(load_float(halves, FloatType::kF16, 1), -2.5f);
  store_float(floats, FloatType::kF32, 1, 0.1f);
  EXPECT_EQ(load_float(floats, FloatType::kF32, 1), 0.1f);
  EXPECT_EQ(halves[0], 0);
  EXPECT_EQ(floats[0], 0.0f);
}

}  // namespace
}  // namespace blockscale
