// Quantising weights against the definition in double, on every ISA: ragged and huge blocks, strides, NaN, Inf,
// subnormals, guard pages, any split of the rows, flush modes of the calling thread.
#include "quant/quantize.h"

#include <array>

#include "float_mode.h"
#include "quant/quant_case.h"

namespace blockscale {
namespace {

using test::ceil_div;
using test::fill;
using test::Guard;
using test::GuardedBuffer;
using test::kHuge;
using test::kShapes;
using test::name_of;
using test::Quantised;
using test::reference;
using test::Shape;
using test::Weight;

class Quantize : public test::QuantPerIsa {};

bool quantize_block_rows(const void* weight, FloatType type, int64_t N, int64_t K, int64_t stride_n, int64_t stride_k,
                         int64_t block_n, int64_t block_k, int64_t begin, int64_t end, uint8_t* codes, float* scales,
                         int64_t* bad_block) {
  return quantize_weight({weight, type, N, K, stride_n, stride_k, block_n, block_k, begin, end, codes, scales},
                         test::quant_isa, bad_block);
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

TEST_P(Quantize, EqualsTheDefinitionForEveryTypeStrideAndSplit) {
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

TEST_P(Quantize, KnownAnswers) {
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

TEST_P(Quantize, ZeroAndNanBlocksHaveScaleOne) {
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

TEST_P(Quantize, TinyBlocksTakeTheFloorOfTheScale) {
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

TEST_P(Quantize, LargestFloatsStayFinite) {
  const float largest = std::numeric_limits<float>::max();
  const Small result = quantize_four(largest, -largest, 1.0f, 0.0f);
  EXPECT_TRUE(std::isfinite(result.scale));
  EXPECT_EQ(result.code[0], 0x7e);
  EXPECT_EQ(result.code[1], 0xfe);
}

TEST_P(Quantize, AnInfinityIsReportedByItsBlock) {
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

TEST_P(Quantize, ModesOfTheThreadNeitherChangeResultsNorAreChanged) {
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

BLOCKSCALE_INSTANTIATE_PER_ISA(Quantize);

}  // namespace
}  // namespace blockscale
