// Quantise and dequantise against the definition in double: ragged and huge blocks, strides, NaN, Inf, subnormals,
// guard pages, any split of the rows, flush modes of the calling thread.
#include "quant/quantize.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "float_mode.h"
#include "guarded_buffer.h"
#include "rounding.h"

namespace blockscale {
namespace {

using test::Guard;
using test::GuardedBuffer;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

int64_t bytes_of(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }

struct Shape {
  int64_t N, K, block_n, block_k;
};

std::string name_of(const Shape& shape) {
  return std::to_string(shape.N) + "x" + std::to_string(shape.K) + ", blocks " + std::to_string(shape.block_n) + "x" +
         std::to_string(shape.block_k);
}

const std::vector<Shape> kShapes = {
    {1, 1, 1, 1},          {1, 1, 128, 128}, {5, 7, 2, 3},      {48, 193, 16, 128}, {17, 300, 128, 128},
    {130, 259, 128, 128},  {9, 513, 1, 513}, {20, 31, 20, 31},  {7, 64, 1, 1},      {33, 130, 64, 128},
    {6, 40, kHuge, kHuge}, {6, 600, 3, 257}, {0, 16, 128, 128}, {16, 0, 128, 128},
};

// A weight (N, K) with chosen strides, in memory that ends or begins at a guard page. NaN and Inf never move to the
// gaps.
struct Weight {
  FloatType type;
  int64_t stride_n, stride_k;
  GuardedBuffer<unsigned char> memory;

  Weight(FloatType t, int64_t N, int64_t K, int64_t sn, int64_t sk, Guard guard)
      : type(t),
        stride_n(sn),
        stride_k(sk),
        memory(N && K ? bytes_of(t) * ((N - 1) * sn + (K - 1) * sk + 1) : 0, guard) {}

  int64_t index(int64_t n, int64_t k) const { return n * stride_n + k * stride_k; }
  double value(int64_t n, int64_t k) const { return test::load_double(memory.data(), type, index(n, k)); }
  void set(int64_t n, int64_t k, float value) { store_float(memory.data(), type, index(n, k), value); }
};

// Magnitudes that differ by block, so that a misplaced scale shows; every block holds zeros and both signs.
void fill(Weight& weight, const Shape& shape, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t n = 0; n < shape.N; ++n) {
    for (int64_t k = 0; k < shape.K; ++k) {
      const int64_t block = n / shape.block_n * 3 + k / shape.block_k * 5;
      const float size = std::ldexp(1.0f, static_cast<int>(block % 11) - 5);
      weight.set(n, k, random() % 16 == 0 ? 0.0f : normal(random) * size);
    }
  }
}

struct Quantised {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

// The definition, element by element. Only the divisions are in fp32, because the contract says so.
Quantised reference(const Weight& weight, const Shape& shape) {
  const int64_t columns = ceil_div(shape.K, shape.block_k);
  Quantised result{std::vector<uint8_t>(shape.N * shape.K),
                   std::vector<float>(ceil_div(shape.N, shape.block_n) * columns)};
  std::vector<double> amax(result.scales.size());
  for (int64_t n = 0; n < shape.N; ++n) {
    for (int64_t k = 0; k < shape.K; ++k) {
      double& largest = amax[n / shape.block_n * columns + k / shape.block_k];
      largest = std::fmax(largest, std::fabs(weight.value(n, k)));  // fmax ignores NaN
    }
  }
  for (size_t i = 0; i < amax.size(); ++i) {
    result.scales[i] = amax[i] == 0 ? 1.0f : std::fmax(static_cast<float>(amax[i]) / 448.0f, 0x1p-126f);
  }
  for (int64_t n = 0; n < shape.N; ++n) {
    for (int64_t k = 0; k < shape.K; ++k) {
      const float scale = result.scales[n / shape.block_n * columns + k / shape.block_k];
      result.codes[n * shape.K + k] = test::e4m3_nearest(static_cast<float>(weight.value(n, k)) / scale);
    }
  }
  return result;
}

// Runs the function over block rows [0, rows) in pieces of `step`.
void expect_quantised_as_defined(const Weight& weight, const Shape& shape, int64_t step, Guard guard) {
  const Quantised expected = reference(weight, shape);
  GuardedBuffer<uint8_t> codes(shape.N * shape.K, guard);
  GuardedBuffer<float> scales(static_cast<int64_t>(expected.scales.size()), guard);
  const int64_t rows = ceil_div(shape.N, shape.block_n);
  int64_t bad_block = -7;
  for (int64_t begin = 0; begin < rows; begin += step) {
    ASSERT_TRUE(quantize_block_rows(weight.memory.data(), weight.type, shape.N, shape.K, weight.stride_n,
                                    weight.stride_k, shape.block_n, shape.block_k, begin, std::min(rows, begin + step),
                                    codes.data(), scales.data(), &bad_block));
  }
  EXPECT_EQ(bad_block, -7);
  EXPECT_EQ(std::vector<float>(scales.begin(), scales.end()), expected.scales);
  EXPECT_EQ(std::vector<uint8_t>(codes.begin(), codes.end()), expected.codes);
}

TEST(Quantize, EqualsTheDefinitionForEveryTypeStrideAndSplit) {
  for (const Shape& shape : kShapes) {
    for (FloatType type : {FloatType::kF32, FloatType::kBf16, FloatType::kF16}) {
      for (Guard guard : {Guard::kAfter, Guard::kBefore}) {
        SCOPED_TRACE(name_of(shape) + ", type " + std::to_string(static_cast<int>(type)));
        Weight contiguous(type, shape.N, shape.K, shape.K, 1, guard);
        fill(contiguous, shape, 1);
        expect_quantised_as_defined(contiguous, shape, kHuge / 2, guard);
        expect_quantised_as_defined(contiguous, shape, 1, guard);
        Weight transposed(type, shape.N, shape.K, 1, shape.N, guard);
        fill(transposed, shape, 2);
        expect_quantised_as_defined(transposed, shape, 2, guard);
        Weight gapped(type, shape.N, shape.K, 2 * shape.K + 3, 2, guard);
        fill(gapped, shape, 3);
        expect_quantised_as_defined(gapped, shape, 3, guard);
        Weight repeated(type, shape.N, shape.K, 0, 1, guard);  // an expanded row
        fill(repeated, shape, 4);
        expect_quantised_as_defined(repeated, shape, 1, guard);
      }
    }
  }
}

struct Small {
  uint8_t code[4];
  float scale;
};

Small quantize_four(float a, float b, float c, float d) {
  const float weight[4] = {a, b, c, d};
  Small result;
  int64_t bad_block;
  EXPECT_TRUE(
      quantize_block_rows(weight, FloatType::kF32, 1, 4, 4, 1, 1, 4, 0, 1, result.code, &result.scale, &bad_block));
  return result;
}

TEST(Quantize, KnownAnswers) {
  const Small powers = quantize_four(448.0f, -1.0f, 0.0f, -0.0f);
  EXPECT_EQ(powers.scale, 1.0f);
  EXPECT_EQ(powers.code[0], 0x7e);
  EXPECT_EQ(powers.code[1], 0xb8);
  EXPECT_EQ(powers.code[2], 0x00);
  EXPECT_EQ(powers.code[3], 0x80);
  const Small halves = quantize_four(224.0f, 1.0f, 0.0f, 0.0f);
  EXPECT_EQ(halves.scale, 0.5f);
  EXPECT_EQ(halves.code[1], 0x40);  // 1 / 0.5 = 2: the scale divides here and multiplies on the way back
}

TEST(Quantize, ZeroAndNanBlocksHaveScaleOne) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Small zeros = quantize_four(0.0f, -0.0f, 0.0f, 0.0f);
  EXPECT_EQ(zeros.scale, 1.0f);
  EXPECT_EQ(zeros.code[1], 0x80);
  const Small nans = quantize_four(nan, -nan, nan, nan);
  EXPECT_EQ(nans.scale, 1.0f);
  EXPECT_EQ(nans.code[0], 0x7f);
  EXPECT_EQ(nans.code[1], 0xff);
  const Small mixed = quantize_four(nan, 448.0f * 4, 0.0f, 1.0f);  // NaN counts neither as large nor as zero
  EXPECT_EQ(mixed.scale, 4.0f);
  EXPECT_EQ(mixed.code[0], 0x7f);
  EXPECT_EQ(mixed.code[1], 0x7e);
}

TEST(Quantize, TinyBlocksTakeTheFloorOfTheScale) {
  const auto quantise_tiny_blocks = [] {
    return std::array<Small, 3>{quantize_four(0x1p-149f, 0.0f, 0.0f, 0.0f),
                                quantize_four(0x1p-128f, -0x1p-129f, 0x1p-149f, 0.0f),
                                quantize_four(0x1p-118f, 0x1p-127f, 0.0f, 0.0f)};
  };
  const auto check = [](const std::array<Small, 3>& results) {
    for (const Small& result : results) EXPECT_EQ(result.scale, 0x1p-126f);
    EXPECT_EQ(results[0].code[0], 0x00);  // 2^-23
    EXPECT_EQ(results[1].code[0], test::e4m3_nearest(0.25));
    EXPECT_EQ(results[1].code[1], test::e4m3_nearest(-0.125));
    EXPECT_EQ(results[2].code[0], test::e4m3_nearest(256));
    EXPECT_EQ(results[2].code[1], test::e4m3_nearest(0.5));
  };
  check(quantise_tiny_blocks());
  std::array<Small, 3> flushed;
  {
    const test::FlushDenormals mode;
    flushed = quantise_tiny_blocks();
  }
  check(flushed);
}

TEST(Quantize, LargestFloatsStayFinite) {
  const float largest = std::numeric_limits<float>::max();
  const Small result = quantize_four(largest, -largest, 1.0f, 0.0f);
  EXPECT_TRUE(std::isfinite(result.scale));
  EXPECT_EQ(result.code[0], 0x7e);
  EXPECT_EQ(result.code[1], 0xfe);
}

TEST(Quantize, AnInfinityIsReportedByItsBlock) {
  const Shape shape{70, 300, 32, 128};  // 3 x 3 blocks
  for (FloatType type : {FloatType::kF32, FloatType::kBf16, FloatType::kF16}) {
    for (int64_t block = 0; block < 9; ++block) {
      Weight weight(type, shape.N, shape.K, shape.K, 1, Guard::kAfter);
      fill(weight, shape, 5);
      const float infinity = std::numeric_limits<float>::infinity();
      weight.set(69, 299, infinity);  // always one in the last block: the first one counts
      weight.set(std::min<int64_t>(69, block / 3 * 32 + 31), std::min<int64_t>(299, block % 3 * 128 + 127), -infinity);
      weight.set(block / 3 * 32, block % 3 * 128, std::numeric_limits<float>::quiet_NaN());
      std::vector<uint8_t> codes(shape.N * shape.K);
      std::vector<float> scales(9);
      int64_t bad_block = -1;
      EXPECT_FALSE(quantize_block_rows(weight.memory.data(), type, shape.N, shape.K, shape.K, 1, 32, 128, 0, 3,
                                       codes.data(), scales.data(), &bad_block));
      EXPECT_EQ(bad_block, block);
      bad_block = -1;
      EXPECT_FALSE(quantize_block_rows(weight.memory.data(), type, shape.N, shape.K, shape.K, 1, 32, 128, 2, 3,
                                       codes.data(), scales.data(), &bad_block));
      EXPECT_EQ(bad_block, std::max<int64_t>(block, 6) == block ? block : 8);
    }
  }
}

TEST(Quantize, ModesOfTheThreadNeitherChangeResultsNorAreChanged) {
  const Shape shape{33, 130, 16, 64};
  Weight weight(FloatType::kF32, shape.N, shape.K, shape.K, 1, Guard::kAfter);
  std::mt19937 random(6);
  for (int64_t n = 0; n < shape.N; ++n) {
    for (int64_t k = 0; k < shape.K; ++k) {  // around 2^-126, where both the weights and w / scale may be subnormal
      weight.set(n, k, std::ldexp(static_cast<float>(random() % 4096) - 2048, -150 + static_cast<int>(random() % 30)));
    }
  }
  const Quantised expected = reference(weight, shape);
  std::vector<uint8_t> codes(shape.N * shape.K);
  std::vector<float> scales(expected.scales.size());
  int64_t bad_block;
  unsigned after;
  const unsigned before = _mm_getcsr();
  const unsigned mode = 0x8040 | 0x4000 | 0x1f80;  // flush, round up, all exceptions masked
  _mm_setcsr(mode);
  quantize_block_rows(weight.memory.data(), weight.type, shape.N, shape.K, shape.K, 1, 16, 64, 0, 3, codes.data(),
                      scales.data(), &bad_block);
  after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(after, mode);
  EXPECT_EQ(codes, expected.codes);
  EXPECT_EQ(scales, expected.scales);
}

// ---------------------------------------------------------------------------------------------------------- dequantise

// Bits of decode(code) * scale rounded once. Codes and scales are exact in double and so is their product.
void expect_dequantised(const void* out, FloatType type, int64_t index, uint8_t code, float scale) {
  const double product = test::e4m3_value(code) * static_cast<double>(scale);
  const double actual = test::load_double(out, type, index);
  if (std::isnan(product)) {
    ASSERT_TRUE(std::isnan(actual)) << "code " << +code << ", scale " << scale;
    return;
  }
  ASSERT_EQ(actual, test::round_to(product, type)) << "code " << +code << ", scale " << scale;
  ASSERT_EQ(std::signbit(actual), std::signbit(product)) << "code " << +code << ", scale " << scale;
}

TEST(Dequantize, EveryCodeTimesManyScalesIsRoundedOnce) {
  std::vector<float> scales = {0.0f,
                               1.0f,
                               -1.0f,
                               0.5f,
                               0x1p-126f,
                               0x1p-130f,
                               0x1p-149f,
                               0x1p127f,
                               0x1p120f,
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN(),
                               0x1.fffffep-120f,
                               0x1.fffffep-20f};
  std::mt19937 random(7);
  for (int i = 0; i < 1500; ++i) {
    // All mantissas; exponents where fp16 and bf16 results are subnormal, normal and too large.
    scales.push_back(bits_float((random() & 0x7fffff) | static_cast<uint32_t>(random() % 255) << 23));
    scales.push_back(bits_float((random() & 0x7fffff) | static_cast<uint32_t>(95 + random() % 50) << 23));
    // Ties of the 16-bit formats and their neighbours: short mantissas, one fp32 step to either side.
    const uint32_t tie = (random() & 0x7ff000) | static_cast<uint32_t>(95 + random() % 50) << 23;
    for (uint32_t step : {0u, 1u, ~0u}) scales.push_back(bits_float(tie + step));
  }
  std::vector<uint8_t> codes(256);
  for (int code = 0; code < 256; ++code) codes[code] = static_cast<uint8_t>(code);
  for (FloatType type : {FloatType::kF32, FloatType::kBf16, FloatType::kF16}) {
    for (float scale : scales) {
      uint32_t out[256];
      const ScaleGrid grid{&scale, 1, 1, 1, 256};
      dequantize_rows(codes.data(), 256, 1, 1, 256, grid, 0, 1, out, type);
      for (int code = 0; code < 256; ++code) {
        expect_dequantised(out, type, code, static_cast<uint8_t>(code), scale);
        if (HasFatalFailure()) return;
      }
    }
  }
}

void expect_grid_dequantised(const Shape& shape, FloatType type, int64_t stride_n, int64_t stride_k, bool column_major,
                             int64_t step, Guard guard) {
  const int64_t rows = ceil_div(shape.N, shape.block_n), columns = ceil_div(shape.K, shape.block_k);
  const bool empty = shape.N == 0 || shape.K == 0;
  GuardedBuffer<uint8_t> codes(empty ? 0 : (shape.N - 1) * stride_n + (shape.K - 1) * stride_k + 1, guard);
  GuardedBuffer<float> scales(rows * columns, guard);
  GuardedBuffer<unsigned char> out(shape.N * shape.K * bytes_of(type), guard);
  std::mt19937 random(8);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
  for (int64_t i = 0; i < scales.size(); ++i) scales[i] = std::ldexp(1.0f + 0.001f * static_cast<float>(i), i % 7 - 3);
  const ScaleGrid grid{scales.data(), column_major ? 1 : columns, column_major ? rows : 1, shape.block_n,
                       shape.block_k};
  for (int64_t begin = 0; begin < shape.N; begin += step) {
    dequantize_rows(codes.data(), stride_n, stride_k, shape.N, shape.K, grid, begin, std::min(shape.N, begin + step),
                    out.data(), type);
  }
  for (int64_t n = 0; n < shape.N; ++n) {
    for (int64_t k = 0; k < shape.K; ++k) {
      const float scale = grid.data[n / shape.block_n * grid.stride_n + k / shape.block_k * grid.stride_k];
      expect_dequantised(out.data(), type, n * shape.K + k, codes[n * stride_n + k * stride_k], scale);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Dequantize, EveryGridTypeStrideAndSplit) {
  for (const Shape& shape : kShapes) {
    for (FloatType type : {FloatType::kF32, FloatType::kBf16, FloatType::kF16}) {
      for (Guard guard : {Guard::kAfter, Guard::kBefore}) {
        SCOPED_TRACE(name_of(shape) + ", type " + std::to_string(static_cast<int>(type)));
        expect_grid_dequantised(shape, type, shape.K, 1, false, kHuge / 2, guard);
        expect_grid_dequantised(shape, type, 1, shape.N, true, 1, guard);
        expect_grid_dequantised(shape, type, 2 * shape.K + 5, 2, false, 3, guard);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Dequantize, ModesOfTheThreadNeitherChangeResultsNorAreChanged) {
  std::vector<uint8_t> codes(256);
  for (int code = 0; code < 256; ++code) codes[code] = static_cast<uint8_t>(code);
  for (FloatType type : {FloatType::kF32, FloatType::kBf16, FloatType::kF16}) {
    for (float scale : {0x1.234566p-140f, 0x1.fffffep-127f, 0x1.2p-118f, 0x1.777p-16f}) {
      uint32_t out[256];
      const ScaleGrid grid{&scale, 1, 1, 1, 256};
      const unsigned before = _mm_getcsr();
      const unsigned mode = 0x8040 | 0x2000 | 0x1f80;  // flush, round down
      _mm_setcsr(mode);
      dequantize_rows(codes.data(), 256, 1, 1, 256, grid, 0, 1, out, type);
      const unsigned after = _mm_getcsr();
      _mm_setcsr(before);
      EXPECT_EQ(after, mode);
      for (int code = 0; code < 256; ++code) {
        expect_dequantised(out, type, code, static_cast<uint8_t>(code), scale);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Dequantize, RoundTripOfItsOwnOutputKeepsTheCodes) {
  const Shape shape{64, 256, 32, 64};
  Weight weight(FloatType::kF32, shape.N, shape.K, shape.K, 1, Guard::kAfter);
  fill(weight, shape, 9);
  const Quantised first = reference(weight, shape);
  const ScaleGrid grid{first.scales.data(), 4, 1, 32, 64};
  std::vector<float> values(shape.N * shape.K);
  dequantize_rows(first.codes.data(), shape.K, 1, shape.N, shape.K, grid, 0, shape.N, values.data(), FloatType::kF32);
  std::vector<uint8_t> codes(shape.N * shape.K);
  std::vector<float> scales(first.scales.size());
  int64_t bad_block;
  ASSERT_TRUE(quantize_block_rows(values.data(), FloatType::kF32, shape.N, shape.K, shape.K, 1, 32, 64, 0, 2,
                                  codes.data(), scales.data(), &bad_block));
  EXPECT_EQ(codes, first.codes);
}

}  // namespace
}  // namespace blockscale
