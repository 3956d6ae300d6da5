// Quantising activations on every ISA: against the definition in double where that is readable, and bit by bit against
// the scalar kernel on every 16-bit value, random and tied fp32 bit patterns, groups of any size, both orders of
// scales.
#include "quant/quant_case.h"

namespace blockscale {
namespace {

using test::bytes_of;
using test::ceil_div;
using test::Guard;
using test::GuardedBuffer;

class Activations : public test::QuantPerIsa {};

struct Case {
  int64_t M, K, group;
  FloatType type = FloatType::kF32;
  bool column_major = false, power_of_two = false;
  float eps = 1e-10f;
};

std::string name_of(const Case& c) {
  return std::to_string(c.M) + "x" + std::to_string(c.K) + ", groups of " + std::to_string(c.group) + ", type " +
         std::to_string(static_cast<int>(c.type)) + (c.column_major ? ", column-major" : "") +
         (c.power_of_two ? ", ue8m0" : "");
}

struct Result {
  std::vector<uint8_t> codes;
  std::vector<uint32_t> scales;  // by row, then group
};

// x is (M, K) with rows x_stride apart; codes and scales lie before guard pages. Rows go in pieces of `step`.
Result quantise(const Case& c, const void* x, int64_t x_stride, Isa isa, int64_t step) {
  const int64_t groups = ceil_div(c.K, c.group);
  GuardedBuffer<uint8_t> codes(c.M * c.K, Guard::kAfter);
  GuardedBuffer<float> scales(c.M * groups, Guard::kAfter);
  const int64_t stride_m = c.column_major ? 1 : groups, stride_g = c.column_major ? c.M : 1;
  ActivationTask task{x,        c.type,  x_stride,     {c.K, c.group, c.eps, c.power_of_two},
                      0,        0,       codes.data(), scales.data(),
                      stride_m, stride_g};
  for (task.begin = 0; task.begin < c.M; task.begin += step) {
    task.end = std::min(c.M, task.begin + step);
    quantize_activations(task, isa);
  }
  Result result{{codes.begin(), codes.end()}, {}};
  for (int64_t m = 0; m < c.M; ++m) {
    for (int64_t g = 0; g < groups; ++g) result.scales.push_back(float_bits(scales[m * stride_m + g * stride_g]));
  }
  return result;
}

void expect_bits_of_scalar(const Case& c, const void* x, int64_t x_stride, int64_t step) {
  const Result expected = quantise(c, x, x_stride, Isa::kScalar, c.M);
  const Result actual = quantise(c, x, x_stride, test::quant_isa, step);
  ASSERT_EQ(actual.scales, expected.scales) << name_of(c);
  ASSERT_EQ(actual.codes, expected.codes) << name_of(c);
}

// The definition: only the divisions are in fp32.
TEST_P(Activations, EqualTheDefinition) {
  std::mt19937 random(21);
  std::normal_distribution<float> normal;
  for (FloatType type : {FloatType::kF32, FloatType::kBf16, FloatType::kF16}) {
    for (bool power_of_two : {false, true}) {
      Case c{3, 300, 64, type, true, power_of_two};
      std::vector<unsigned char> x(c.M * c.K * bytes_of(type));
      for (int64_t i = 0; i < c.M * c.K; ++i) {
        store_float(x.data(), type, i, i < 64 ? 0.0f : std::ldexp(normal(random), static_cast<int>(i / 64 % 9) - 4));
      }
      const Result result = quantise(c, x.data(), c.K, test::quant_isa, c.M);
      for (int64_t m = 0; m < c.M; ++m) {
        for (int64_t g = 0; g < 5; ++g) {
          double amax = 0;
          const int64_t end = std::min<int64_t>(c.K, 64 * g + 64);
          for (int64_t k = 64 * g; k < end; ++k) {
            amax = std::fmax(amax, std::fabs(test::load_double(x.data(), type, m * c.K + k)));
          }
          float scale = std::fmax(static_cast<float>(amax), c.eps) / 448.0f;
          if (power_of_two) scale = static_cast<float>(std::exp2(std::ceil(std::log2(static_cast<double>(scale)))));
          ASSERT_EQ(bits_float(result.scales[m * 5 + g]), scale) << name_of(c);
          for (int64_t k = 64 * g; k < end; ++k) {
            const float value = static_cast<float>(test::load_double(x.data(), type, m * c.K + k));
            ASSERT_EQ(result.codes[m * c.K + k], test::e4m3_nearest(value / scale))
                << name_of(c) << ", " << m << ", " << k;
          }
        }
      }
    }
  }
}

TEST_P(Activations, EverySixteenBitValueInGroupsOfManySizes) {
  std::vector<uint16_t> x(1 << 16);
  std::mt19937 random(22);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint16_t>(i);
  for (bool shuffled : {false, true}) {
    if (shuffled) std::shuffle(x.begin(), x.end(), random);
    for (FloatType type : {FloatType::kBf16, FloatType::kF16}) {
      for (int64_t group : {1, 3, 8, 16, 31, 33, 64, 100, 128, 200, 1000, 1 << 15, 1 << 16}) {
        for (bool power_of_two : {false, true}) {
          Case c{1, 1 << 16, group, type, false, power_of_two};
          expect_bits_of_scalar(c, x.data(), c.K, 1);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// amax 448 * 2^e makes the scale a power of two: then every tie between neighbouring codes, and the fp32 numbers beside
// it, is a quotient.
TEST_P(Activations, TiesBetweenCodesAndTheirNeighbours) {
  for (int exponent : {-20, 0, 1, 60}) {
    std::vector<float> x;
    for (int code = 0; code < 0x7e; ++code) {
      const double tie =
          (test::e4m3_value(static_cast<uint8_t>(code)) + test::e4m3_value(static_cast<uint8_t>(code + 1))) / 2;
      const float value = static_cast<float>(std::ldexp(tie, exponent));
      for (int step : {-1, 0, 1}) {
        for (uint32_t sign : {0u, 0x80000000u}) {
          x.push_back(bits_float((float_bits(value) + static_cast<uint32_t>(step)) | sign));
        }
      }
    }
    x.push_back(std::ldexp(448.0f, exponent));
    Case c{1, static_cast<int64_t>(x.size()), static_cast<int64_t>(x.size())};
    expect_bits_of_scalar(c, x.data(), c.K, 1);
    const Result result = quantise(c, x.data(), c.K, test::quant_isa, 1);
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(result.codes[i], test::e4m3_nearest(std::ldexp(static_cast<double>(x[i]), -exponent))) << x[i];
    }
  }
}

TEST_P(Activations, RandomBitPatterns) {
  std::mt19937 random(23);
  for (int round = 0; round < 40; ++round) {
    Case c{17, 1 + static_cast<int64_t>(random() % 900), 0};
    const int64_t groups[] = {1, 5, 32, 128, 200, c.K};
    const int64_t x_stride = c.K + round % 3 * 5;
    GuardedBuffer<float> x((c.M - 1) * x_stride + c.K, Guard::kAfter);
    // All exponents; or a range, so that groups are not ruled by one value; few or no NaN and infinities.
    const uint32_t low = round % 2 ? 0 : random() % 200, span = round % 2 ? 256 : 1 + random() % 40;
    for (float& value : x) {
      value = bits_float((random() & 0x807fffffu) |
                         std::min(low + static_cast<uint32_t>(random()) % span, round % 4 == 1 ? 255u : 254u) << 23);
    }
    for (int64_t group : groups) {
      c.group = std::min(group, c.K);
      c.column_major = random() % 2;
      c.power_of_two = random() % 2;
      c.eps = random() % 2 ? 1e-10f : 0x1p-149f;
      expect_bits_of_scalar(c, x.data(), x_stride, 1 + random() % 20);
      if (HasFatalFailure()) return;
    }
  }
}

// A NaN or an infinity changes the codes of its own group alone.
TEST_P(Activations, NonfiniteValuesStayInTheirGroups) {
  for (FloatType type : {FloatType::kF32, FloatType::kBf16, FloatType::kF16}) {
    Case c{2, 1300, 100, type};
    std::vector<unsigned char> x(c.M * c.K * bytes_of(type));
    for (int64_t i = 0; i < c.M * c.K; ++i) store_float(x.data(), type, i, static_cast<float>(i % 97) - 40.0f);
    const Result clean = quantise(c, x.data(), c.K, test::quant_isa, c.M);
    const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    store_float(x.data(), type, 105, nan);
    store_float(x.data(), type, 399, -nan);
    store_float(x.data(), type, 700, -inf);
    expect_bits_of_scalar(c, x.data(), c.K, c.M);
    const Result result = quantise(c, x.data(), c.K, test::quant_isa, c.M);
    EXPECT_EQ(result.codes[105], 0x7f);
    EXPECT_EQ(result.codes[399], 0xff);
    EXPECT_EQ(result.codes[700] & 0x7f, 0x7f);
    EXPECT_EQ(result.scales[7], 0x7f800000u);
    for (int64_t k = 0; k < c.M * c.K; ++k) {
      if (k / 100 == 7 || k == 105 || k == 399) continue;
      ASSERT_EQ(result.codes[k], clean.codes[k]) << k;
    }
  }
}

// More groups than are kept before their scales are written column by column, in tiles that end inside.
TEST_P(Activations, ColumnMajorScalesOfManyRowsAndGroups) {
  std::mt19937 random(24);
  std::normal_distribution<float> normal;
  for (int64_t K : {1000, 770, 513}) {
    for (int64_t group : {1, 2, 3}) {
      Case c{35, K, group};
      std::vector<float> x(c.M * c.K);
      for (float& value : x) value = normal(random);
      const Result row_major = quantise(c, x.data(), c.K, test::quant_isa, c.M);
      c.column_major = true;
      for (int64_t step : {int64_t{1}, int64_t{16}, int64_t{7}, c.M}) {
        const Result column_major = quantise(c, x.data(), c.K, test::quant_isa, step);
        ASSERT_EQ(column_major.scales, row_major.scales);
        ASSERT_EQ(column_major.codes, row_major.codes);
      }
    }
  }
}

BLOCKSCALE_INSTANTIATE_PER_ISA(Activations);

}  // namespace
}  // namespace blockscale
