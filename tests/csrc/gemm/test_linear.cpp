// The driver with every kernel against the formula in double: ragged shapes, every type and scale grid, guard pages on
// both sides of every buffer, all 256 codes, NaN and Inf that must stay where they belong, and planted faults that the
// bound must catch.
#include "gemm/linear.h"

#include <gtest/gtest.h>
#include <xmmintrin.h>

#include <limits>

#include "gemm/linear_case.h"

namespace blockscale {
namespace {

using test::CaseOptions;
using test::Guard;
using test::LinearCase;

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Grid {
  int64_t block_n, block_k;
};
constexpr Grid kGrids[] = {{128, 128}, {64, 128}, {32, 32},  {1, kAll}, {kAll, kAll}, {1, 128},   {1, 32},
                           {1, 1},     {3, 5},    {16, 192}, {8, 3},    {128, 64},    {24, kAll}, {kAll, 2}};

class Linear : public test::PerIsa {
 protected:
  void expect_right(const CaseOptions& options, ParallelFor parallel_for = test::serial, int threads = 1) {
    SCOPED_TRACE(options.name() + "-" + isa_name(GetParam()));
    LinearCase problem(options);
    problem.run(GetParam(), parallel_for, threads);
    EXPECT_TRUE(problem.within_bound(GetParam()));
    EXPECT_TRUE(problem.gaps_untouched());
  }
};

TEST_P(Linear, RaggedShapesOfEveryKind) {
  const auto types = x_types();
  uint32_t turn = 0;  // types, grids and strides take turns over the shapes, with periods that share no factor
  for (int64_t M : {0, 1, 2, 3, 4, 5, 8, 12, 13, 16, 17, 33}) {
    for (int64_t N : {0, 1, 15, 16, 17, 33, 48, 60, 100}) {
      for (int64_t K : {0, 1, 2, 3, 4, 5, 7, 64, 127, 128, 129, 193, 256, 515}) {
        CaseOptions o;
        o.M = M;
        o.N = N;
        o.K = K;
        o.block_n = kGrids[turn % std::size(kGrids)].block_n;
        o.block_k = kGrids[turn % std::size(kGrids)].block_k;
        o.x_type = types[turn / 2 % types.size()];
        o.out_type = test::kFloatTypes[turn % 3];
        if (turn % 4) o.bias_type = test::kFloatTypes[turn % 4 - 1];
        o.x_gap = turn % 5 == 0 ? 3 : 0;
        o.out_gap = turn % 7 == 0 ? 5 : 0;
        o.column_major_scales = turn % 11 < 5;
        o.guard = turn % 2 ? Guard::kAfter : Guard::kBefore;
        o.seed = ++turn;
        expect_right(o);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Linear, EveryTypeOfXBiasAndOutputWithEveryGrid) {
  for (const Grid& grid : kGrids) {
    for (FloatType x_type : x_types()) {
      for (FloatType out_type : test::kFloatTypes) {
        for (int bias = -1; bias < 3; ++bias) {
          CaseOptions o;
          o.M = 5;
          o.N = 35;
          o.K = 197;
          o.block_n = grid.block_n;
          o.block_k = grid.block_k;
          o.x_type = x_type;
          o.out_type = out_type;
          if (bias >= 0) o.bias_type = test::kFloatTypes[bias];
          o.column_major_scales = bias % 2 == 0;
          o.guard = bias < 1 ? Guard::kAfter : Guard::kBefore;
          expect_right(o);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Guard pages at each width a strip, a quad and a row block can have, before and after every buffer.
TEST_P(Linear, NoByteOutsideIsTouchedAtAnyRaggedSide) {
  for (Guard guard : {Guard::kAfter, Guard::kBefore}) {
    for (FloatType x_type : x_types()) {
      for (int64_t N = 1; N <= 33; ++N) {
        CaseOptions o;
        o.M = N % 13 + 1;
        o.N = N;
        o.K = 2 * N + N % 4;
        o.block_n = N % 3 ? 1 : 7;
        o.block_k = 1 + N % 9;
        o.x_type = o.out_type = x_type;
        o.bias_type = x_type;
        o.x_gap = N % 2;
        o.guard = guard;
        expect_right(o);
        if (HasFailure()) return;
      }
    }
  }
}

// Packed x, or a list of units, that exceeds the scratch: K goes in chunks with the totals carried over.
TEST_P(Linear, LongKIsCarriedOver) {
  for (FloatType x_type : x_types()) {
    CaseOptions o;
    o.x_type = x_type;
    o.M = kernel_table(GetParam())->max_rows;
    o.N = 19;
    o.K = 33000;
    o.bias_type = FloatType::kF32;
    expect_right(o);
    o.M = 2;
    o.N = 37;
    o.K = 2500;
    o.block_n = 2;
    o.block_k = 1;
    expect_right(o);
  }
}

TEST_P(Linear, AllCodesAreExactInEveryPlace) {
  for (FloatType x_type : x_types()) {
    for (int64_t M : {1, 8}) {
      CaseOptions o;
      o.M = M;
      o.N = 256;
      o.K = 9;
      o.x_type = x_type;
      LinearCase problem(o);
      for (int64_t place = 0; place < o.K; ++place) {
        std::fill(problem.codes.begin(), problem.codes.end(), 0);
        for (int64_t m = 0; m < M; ++m) {
          for (int64_t k = 0; k < o.K; ++k) problem.set_x(m, k, k == place ? 1.0f : -3.0f);
        }
        for (int64_t n = 0; n < 256; ++n) problem.code(n, place) = static_cast<uint8_t>(n);
        std::fill(problem.scales.begin(), problem.scales.end(), 1.0f);
        problem.run(GetParam());
        for (int64_t m = 0; m < M; ++m) {
          for (int64_t n = 0; n < 256; ++n) {
            const double expected = test::e4m3_value(static_cast<uint8_t>(n));
            const double actual = problem.out_at(m, n);
            ASSERT_TRUE(std::isnan(expected) ? std::isnan(actual) : actual == expected)
                << "code " << n << " at k = " << place << ", row " << m << ": " << actual;
          }
        }
      }
    }
  }
}

TEST_P(Linear, KnownAnswers) {
  for (FloatType x_type : x_types()) {
    CaseOptions o;
    o.M = 8;
    o.N = 48;
    o.K = 256;
    o.x_type = x_type;
    LinearCase zeros(o);
    std::fill(zeros.codes.begin(), zeros.codes.end(), 0);
    zeros.run(GetParam());
    for (int64_t m = 0; m < o.M; ++m) {
      for (int64_t n = 0; n < o.N; ++n) ASSERT_EQ(zeros.out_at(m, n), 0.0);
    }
    // A scale multiplies. One weight of 1 in each column and powers of two that differ by block show a misplaced one.
    LinearCase scaled(o);
    std::fill(scaled.codes.begin(), scaled.codes.end(), 0);
    for (int64_t n = 0; n < o.N; ++n) scaled.code(n, n * 5) = 0x38;
    for (int64_t i = 0; i < scaled.scales.size(); ++i) scaled.scales[i] = std::ldexp(1.0f, static_cast<int>(i) - 1);
    for (int64_t m = 0; m < o.M; ++m) {
      for (int64_t k = 0; k < o.K; ++k) scaled.set_x(m, k, static_cast<float>(m + 1));
    }
    scaled.run(GetParam());
    for (int64_t m = 0; m < o.M; ++m) {
      for (int64_t n = 0; n < o.N; ++n) {
        ASSERT_EQ(scaled.out_at(m, n), static_cast<double>(m + 1) * (n * 5 < 128 ? 0.5 : 1.0)) << m << ", " << n;
      }
    }
  }
}

TEST_P(Linear, EmptyKGivesTheBias) {
  for (bool with_bias : {false, true}) {
    for (FloatType out_type : test::kFloatTypes) {
      CaseOptions o;
      o.M = 3;
      o.N = 21;
      o.K = 0;
      o.x_type = FloatType::kBf16;
      o.out_type = out_type;
      if (with_bias) o.bias_type = FloatType::kBf16;
      LinearCase problem(o);
      problem.run(GetParam());
      for (int64_t m = 0; m < o.M; ++m) {
        for (int64_t n = 0; n < o.N; ++n) {
          const double expected = with_bias ? test::load_double(problem.bias.data(), FloatType::kBf16, n) : 0.0;
          ASSERT_EQ(problem.out_at(m, n), test::round_to(expected, out_type));
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------ NaN and Inf

// Positive codes everywhere: an Inf in x makes its row Inf. A 0 * Inf from beside a border would make it NaN.
TEST_P(Linear, AnInfinityInXStaysInItsRow) {
  for (FloatType x_type : x_types()) {
    for (const Grid& grid : {Grid{128, 128}, Grid{1, 3}, Grid{16, 5}}) {
      CaseOptions o;
      o.M = 5;
      o.N = 19;
      o.K = 22;
      o.block_n = grid.block_n;
      o.block_k = grid.block_k;
      o.x_type = x_type;
      o.x_gap = 2;
      for (int64_t place = 0; place < o.K; ++place) {
        LinearCase problem(o);
        for (uint8_t& code : problem.codes) code = static_cast<uint8_t>(code & 0x7f) | 0x10;
        for (uint8_t& code : problem.codes) code = std::min<uint8_t>(code, 0x7e);
        problem.set_x(2, place, kInfinity);
        problem.run(GetParam());
        for (int64_t m = 0; m < o.M; ++m) {
          for (int64_t n = 0; n < o.N; ++n) {
            const double actual = problem.out_at(m, n);
            ASSERT_TRUE(m == 2 ? actual == kInfinity : std::isfinite(actual))
                << o.name() << ", Inf at k = " << place << ": out[" << m << ", " << n << "] = " << actual;
          }
        }
      }
    }
  }
}

TEST_P(Linear, ANanStaysInItsRowColumnOrBlock) {
  for (FloatType x_type : x_types()) {
    CaseOptions o;
    o.M = 6;
    o.N = 35;
    o.K = 37;
    o.block_n = 8;
    o.block_k = 6;
    o.x_type = x_type;
    for (int64_t place = 0; place < o.K; place += 3) {
      LinearCase in_x(o);
      in_x.set_x(3, place, kNan);
      in_x.run(GetParam());
      LinearCase in_weight(o);
      in_weight.code(place % o.N, place) = place % 2 ? 0x7f : 0xff;
      in_weight.run(GetParam());
      LinearCase in_scale(o);
      in_scale.scale(17, place) = kNan;  // columns 16 to 23
      in_scale.run(GetParam());
      for (int64_t m = 0; m < o.M; ++m) {
        for (int64_t n = 0; n < o.N; ++n) {
          ASSERT_EQ(std::isnan(in_x.out_at(m, n)), m == 3) << m << ", " << n << ", k = " << place;
          ASSERT_EQ(std::isnan(in_weight.out_at(m, n)), n == place % o.N) << m << ", " << n << ", k = " << place;
          ASSERT_EQ(std::isnan(in_scale.out_at(m, n)), n / 8 == 2) << m << ", " << n << ", k = " << place;
        }
      }
    }
  }
}

TEST_P(Linear, LargeScalesAndValuesDoNotOverflowOnTheWay) {
  for (FloatType x_type : x_types()) {
    CaseOptions o;
    o.N = 17;
    o.K = 256;
    o.x_type = x_type;
    LinearCase problem(o);
    for (int64_t n = 0; n < o.N; ++n) {
      for (int64_t k = 0; k < o.K; ++k) problem.code(n, k) = k % 2 ? 0x87 : 0x07;
    }
    for (int64_t k = 0; k < o.K; ++k) problem.set_x(0, k, k % 2 ? -0.25f : 0.25f);
    std::fill(problem.scales.begin(), problem.scales.end(), 0x1p127f);  // a power of two kept out of the decoded values
    problem.run(GetParam());
    // 256 products of 7 * 2^-9 * 2^-2, times 2^127: 7 * 2^124.
    for (int64_t n = 0; n < o.N; ++n) ASSERT_EQ(problem.out_at(0, n), 7 * 0x1p124);
  }
}

TEST_P(Linear, ModesOfTheThreadNeitherChangeResultsNorAreChanged) {
  for (FloatType x_type : x_types()) {
    CaseOptions o;
    o.M = 9;
    o.N = 33;
    o.K = 131;
    o.block_n = o.block_k = 32;
    o.x_type = x_type;
    LinearCase problem(o);
    int exponent = -140;
    for (float& scale : problem.scales) scale = std::ldexp(1.0f, exponent++);
    problem.run(GetParam());
    const auto plain = problem.bits();
    const unsigned before = _mm_getcsr(), mode = 0x8040 | 0x2000 | 0x1f80;  // flush, round down
    _mm_setcsr(mode);
    problem.run(GetParam());
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after, mode);
    EXPECT_EQ(problem.bits(), plain);
  }
}

// ------------------------------------------------------------------------------------------ planted faults

TEST_P(Linear, OneCodeStepInOneWeightIsOutOfBounds) {
  for (FloatType x_type : x_types()) {
    for (int64_t K : {1, 16, 128}) {
      CaseOptions o;
      o.M = 3;
      o.N = 17;
      o.K = K;
      o.x_type = x_type;
      LinearCase problem(o);
      problem.fill(0x30, 0x47);  // weights of 0.5 to 3.75
      problem.set_x(1, K / 2, 1.5f);
      problem.run(GetParam());
      ASSERT_TRUE(problem.within_bound(GetParam()));
      problem.code(9, K / 2) ^= 1;
      EXPECT_FALSE(problem.within_bound(GetParam())) << o.name();
    }
  }
}

TEST_P(Linear, ANeighboursScaleIsOutOfBounds) {
  for (FloatType x_type : x_types()) {
    for (FloatType out_type : test::kFloatTypes) {
      for (int64_t K : {256, 4096}) {
        CaseOptions o;
        o.M = 3;
        o.N = 40;
        o.K = K;
        o.block_n = 16;
        o.x_type = x_type;
        o.out_type = out_type;
        LinearCase problem(o);
        problem.fill(0x30, 0x47);
        problem.run(GetParam());
        ASSERT_TRUE(problem.within_bound(GetParam()));
        std::swap(problem.scale(0, 0), problem.scale(0, 128));
        EXPECT_FALSE(problem.within_bound(GetParam())) << o.name();
        std::swap(problem.scale(0, 0), problem.scale(0, 128));
        std::swap(problem.scale(0, 128), problem.scale(16, 128));
        EXPECT_FALSE(problem.within_bound(GetParam())) << o.name();
      }
    }
  }
}

TEST_P(Linear, ZerosAreOutOfBounds) {
  CaseOptions o;
  o.M = 2;
  o.N = 16;
  o.x_type = FloatType::kBf16;
  LinearCase problem(o);
  std::fill(problem.out.begin(), problem.out.end(), 0);
  EXPECT_FALSE(problem.within_bound(GetParam()));
}

BLOCKSCALE_INSTANTIATE_PER_ISA(Linear);

}  // namespace
}  // namespace blockscale
