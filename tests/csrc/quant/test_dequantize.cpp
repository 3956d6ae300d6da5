// Dequantising against the definition in double, on every ISA: every code times scales that make it a tie, subnormal or
// too large for the output, ragged blocks, strides, guard pages, any split of the rows, flush modes of the thread.
#include "float_mode.h"
#include "formats/fp8_e4m3.h"
#include "quant/quant_case.h"

namespace blockscale {
namespace {

using test::bytes_of;
using test::ceil_div;
using test::Guard;
using test::GuardedBuffer;
using test::kHuge;
using test::kShapes;
using test::name_of;
using test::Shape;

class Dequantize : public test::QuantPerIsa {};

void dequantize_rows(const uint8_t* codes, int64_t stride_n, int64_t stride_k, int64_t N, int64_t K,
                     const ScaleGrid& scales, int64_t begin, int64_t end, void* out, FloatType out_type) {
  dequantize({codes, stride_n, stride_k, N, K, scales, begin, end, out, out_type}, test::quant_isa);
}

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

TEST_P(Dequantize, EveryCodeTimesManyScalesIsRoundedOnce) {
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

TEST_P(Dequantize, EveryGridTypeStrideAndSplit) {
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

TEST_P(Dequantize, ModesOfTheThreadNeitherChangeResultsNorAreChanged) {
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

TEST_P(Dequantize, RoundTripOfItsOwnOutputKeepsTheCodes) {
  const Shape shape{64, 256, 32, 64};
  test::Weight weight(FloatType::kF32, shape.N, shape.K, shape.K, 1, Guard::kAfter);
  test::fill(weight, shape, 9);
  const test::Quantised first = test::reference(weight, shape);
  const ScaleGrid grid{first.scales.data(), 4, 1, 32, 64};
  std::vector<float> values(shape.N * shape.K);
  dequantize_rows(first.codes.data(), shape.K, 1, shape.N, shape.K, grid, 0, shape.N, values.data(), FloatType::kF32);
  std::vector<uint8_t> codes(shape.N * shape.K);
  std::vector<float> scales(first.scales.size());
  int64_t bad_block;
  ASSERT_TRUE(quantize_weight(
      {values.data(), FloatType::kF32, shape.N, shape.K, shape.K, 1, 32, 64, 0, 2, codes.data(), scales.data()},
      test::quant_isa, &bad_block));
  EXPECT_EQ(codes, first.codes);
}

// The same bits on every ISA, NaN's sign and payload too, for all codes, lengths of runs and kinds of scales.
TEST_P(Dequantize, BitsOfTheScalarKernel) {
  std::vector<float> scales = {1.0f,
                               -0.75f,
                               0.0f,
                               -0.0f,
                               0x1p101f,
                               0x1p102f,
                               -0x1p110f,
                               0x1.23456p-140f,
                               bits_float(0x7f800000u),
                               bits_float(0xff800000u),
                               bits_float(0x7fc12345u),
                               bits_float(0xffc00000u)};
  std::mt19937 random(11);
  for (int i = 0; i < 300; ++i) scales.push_back(bits_float(random() & 0xff7fffffu));
  for (FloatType type : {FloatType::kF32, FloatType::kBf16, FloatType::kF16}) {
    for (float scale : scales) {
      const bool nan_scale = std::isnan(scale);  // NaN times NaN has the payload of either
      for (int64_t count : {256, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 100}) {
        GuardedBuffer<uint8_t> codes(count, Guard::kAfter);
        GuardedBuffer<unsigned char> out(count * bytes_of(type), Guard::kAfter),
            expected(count * bytes_of(type), Guard::kAfter);
        for (int64_t i = 0; i < count; ++i)
          codes[i] = static_cast<uint8_t>(nan_scale ? i % 127 : count == 256 ? i : random());
        DequantizeTask task{codes.data(), count, 1, 1, count, {&scale, 1, 1, 1, count}, 0, 1, expected.data(), type};
        dequantize(task, Isa::kScalar);
        task.out = out.data();
        dequantize(task, test::quant_isa);
        ASSERT_TRUE(std::equal(out.begin(), out.end(), expected.begin())) << scale << ", " << count << " codes";
      }
    }
  }
}

TEST_P(Dequantize, CodesToBf16AreTheTable) {
  for (int64_t count : {0, 1, 7, 15, 16, 17, 31, 33, 256, 300}) {
    GuardedBuffer<uint8_t> codes(count, Guard::kAfter);
    GuardedBuffer<uint16_t> out(count, Guard::kAfter);
    for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(i * 3);
    decode_to_bf16(codes.data(), count, test::quant_isa, out.data());
    for (int64_t i = 0; i < count; ++i) ASSERT_EQ(out[i], e4m3_bf16_bits(codes[i])) << "code " << +codes[i];
  }
}

BLOCKSCALE_INSTANTIATE_PER_ISA(Dequantize);

}  // namespace
}  // namespace blockscale
