// The amx_bf16 kernel under the emulator: bit for bit the documented order of TDPBF16PS, the ideal number of
// instructions, one tile configuration a task and none left behind. Where amx_bf16 is not usable, skipped with its
// reason.
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>

#include "amxemu.h"
#include "gemm/linear_case.h"
#include "isa/tile_model.h"

namespace blockscale {
namespace {

using test::CaseOptions;
using test::Guard;
using test::LinearCase;

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
constexpr Isa kIsa = Isa::kAmxBf16;
constexpr int64_t kM[] = {1, 2, 5, 16, 17, 31, 32, 33, 48, 64, 65, 128, 129, 130, 300};
constexpr int64_t kN[] = {1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 100, 130};
constexpr int64_t kK[] = {1, 2, 31, 32, 33, 63, 64, 97, 127, 128, 129, 160, 193, 256, 515};
constexpr int64_t kBlockN[] = {1, 5, 16, 128};
constexpr int64_t kBlockK[] = {3, 48, 64, 128, 192, kAll};

// Products of a shape: every row tile meets every strip once in every step of every unit.
uint64_t ideal_products(const CaseOptions& o) {
  int64_t steps = 0;
  for (int64_t k = 0; k < o.K;) {
    const int64_t end = std::min({o.K, k + kUnitK, k + (o.block_k - k % o.block_k)});
    steps += test::ceil_div(end - k, 32);
    k = end;
  }
  return static_cast<uint64_t>(steps * test::ceil_div(o.M, 16) * test::ceil_div(o.N, 16));
}

// What a local array that a kernel forgets to clear would hold.
__attribute__((noinline)) void leave_nan_on_the_stack() {
  volatile unsigned char bytes[64 << 10];
  for (volatile unsigned char& byte : bytes) byte = 0xff;
}

void serial_on_a_dirty_stack(int64_t count, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  leave_nan_on_the_stack();
  body(0, count, context);
}

void three_threads_left_without_tiles(int64_t count, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 3; ++t) {
    threads.emplace_back([=] {
      if (count * t / 3 < count * (t + 1) / 3) body(count * t / 3, count * (t + 1) / 3, context);
      if (amxemu_tiles_configured()) abort();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class AmxBf16 : public testing::Test {
 protected:
  void SetUp() override {
    const IsaStatus& status = isa_report().isas[static_cast<int>(kIsa)];
    if (!status.usable) GTEST_SKIP() << status.reason;
  }
  static CaseOptions bf16_options(int64_t M, int64_t N, int64_t K, int64_t block_n, int64_t block_k) {
    CaseOptions o;
    o.M = M;
    o.N = N;
    o.K = K;
    o.block_n = block_n;
    o.block_k = block_k;
    o.x_type = FloatType::kBf16;
    return o;
  }
  // Types, grids, strides and guards take turns, with periods that share few factors.
  static CaseOptions options_of_turn(int64_t M, int64_t N, int64_t K, uint32_t turn) {
    CaseOptions o = bf16_options(M, N, K, kBlockN[turn % std::size(kBlockN)], kBlockK[turn % std::size(kBlockK)]);
    o.out_type = test::kFloatTypes[turn % 5 % 3];
    if (turn % 7) o.bias_type = test::kFloatTypes[turn % 7 % 3];
    o.x_gap = turn % 11 < 5 ? 1 + turn % 3 : 0;
    o.out_gap = turn % 13 < 4 ? 5 : 0;
    o.column_major_scales = turn % 17 < 8;
    o.guard = turn % 3 ? Guard::kAfter : Guard::kBefore;
    o.seed = turn + 1;
    return o;
  }
  static void expect_model(LinearCase& problem, ParallelFor parallel_for = test::serial, int threads = 1) {
    SCOPED_TRACE(problem.options.name());
    uint64_t before[AMXEMU_OPERATIONS], after[AMXEMU_OPERATIONS];
    amxemu_counters(before);
    const uint64_t tasks_before = kernel_calls()[static_cast<int>(kIsa)];
    problem.run(kIsa, parallel_for, threads);
    amxemu_counters(after);
    const uint64_t tasks = kernel_calls()[static_cast<int>(kIsa)] - tasks_before;
    EXPECT_TRUE(test::equals_model(problem));
    EXPECT_TRUE(problem.gaps_untouched());
    EXPECT_EQ(amxemu_tiles_configured(), 0);
    EXPECT_GT(tasks, 0u);
    EXPECT_EQ(after[AMXEMU_TDPBF16PS] - before[AMXEMU_TDPBF16PS], ideal_products(problem.options));
    EXPECT_EQ(after[AMXEMU_LDTILECFG] - before[AMXEMU_LDTILECFG], tasks) << "one configuration a task";
    EXPECT_EQ(after[AMXEMU_TILERELEASE] - before[AMXEMU_TILERELEASE], tasks) << "one release a task";
  }
};

TEST_F(AmxBf16, EqualsTheModelForEveryRowCountAndDepth) {
  uint32_t turn = 0;
  for (int64_t M : kM) {
    for (int64_t K : kK) {
      LinearCase problem(options_of_turn(M, kN[turn % std::size(kN)], K, turn));
      ++turn;
      expect_model(problem);
      if (HasFailure()) return;
    }
  }
}

TEST_F(AmxBf16, EqualsTheModelForEveryRowCountAndWidth) {
  uint32_t turn = 5;
  for (int64_t M : kM) {
    for (int64_t N : kN) {
      LinearCase problem(options_of_turn(M, N, kK[turn % std::size(kK)], turn));
      ++turn;
      expect_model(problem);
      if (HasFailure()) return;
    }
  }
}

TEST_F(AmxBf16, EqualsTheModelForEveryGridAndOutput) {
  uint32_t turn = 0;
  for (int64_t block_n : kBlockN) {
    for (int64_t block_k : kBlockK) {
      for (FloatType out_type : test::kFloatTypes) {
        for (int64_t M : {3, 33}) {
          CaseOptions o = options_of_turn(M, 50, 391, turn++);
          o.block_n = block_n;
          o.block_k = block_k;
          o.out_type = out_type;
          LinearCase problem(o);
          expect_model(problem);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Totals are carried when packed x of a block exceeds its scratch, and when there are more units than it lists.
TEST_F(AmxBf16, EqualsTheModelWhenKGoesInChunks) {
  for (const CaseOptions& o : {bf16_options(3, 50, 20000, 128, 128), bf16_options(17, 33, 16500, 1, kAll),
                               bf16_options(130, 35, 4100, 16, 192), bf16_options(2, 37, 2500, 5, 1)}) {
    LinearCase problem(o);
    expect_model(problem);
    if (HasFailure()) return;
  }
}

// x and products around the smallest normal number and scales that make outputs subnormal: inside a step subnormals are
// zero, outside of it they count.
TEST_F(AmxBf16, FlushesInsideTheTilesOnly) {
  std::mt19937 random(7);
  for (int64_t M : {1, 18}) {
    CaseOptions o = bf16_options(M, 40, 300, 16, 64);
    LinearCase problem(o);
    int64_t subnormal_outputs = 0;
    for (int turn = 0; turn < 6; ++turn) {
      for (int64_t m = 0; m < M; ++m) {
        for (int64_t k = 0; k < o.K; ++k) {
          const float mantissa = 1.0f + static_cast<float>(random() % 128) / 128;
          problem.set_x(m, k, std::ldexp(random() & 1 ? -mantissa : mantissa, static_cast<int>(random() % 20) - 136));
        }
      }
      for (uint8_t& code : problem.codes) code = static_cast<uint8_t>((random() & 0x80) | random() % 0x40);
      std::fill(problem.scales.begin(), problem.scales.end(), turn % 2 ? 0x1p-10f : 0x1p3f);
      expect_model(problem);
      if (HasFailure()) return;
      for (int64_t m = 0; m < M; ++m) {
        for (int64_t n = 0; n < o.N; ++n) {
          const double out = std::fabs(problem.out_at(m, n));
          subnormal_outputs += out != 0 && out < 0x1p-126;
        }
      }
    }
    EXPECT_GT(subnormal_outputs, 20 * M);
  }
}

// The second half of K mirrors the first with the other sign: the exact result is 0, and the output is the residue of
// every rounding in its order.
TEST_F(AmxBf16, CancellingDataShowsTheOrderOfEverySum) {
  for (int64_t block_k : {64, 128, 192}) {
    CaseOptions o = bf16_options(37, 49, 768, 16, block_k);
    LinearCase problem(o);
    for (int64_t k = 0; k < o.K / 2; ++k) {
      const int64_t other = o.K - 1 - k;
      for (int64_t m = 0; m < o.M; ++m) problem.set_x(m, other, static_cast<float>(-problem.x_at(m, k)));
      for (int64_t n = 0; n < o.N; ++n) problem.code(n, other) = problem.code(n, k);
    }
    std::fill(problem.scales.begin(), problem.scales.end(), 0.75f);
    expect_model(problem);
    int64_t zeros = 0;
    for (int64_t m = 0; m < o.M; ++m) {
      for (int64_t n = 0; n < o.N; ++n) zeros += problem.out_at(m, n) == 0;
    }
    EXPECT_LT(zeros, o.M * o.N / 2) << "there is a residue to compare";
  }
}

// What lies behind a unit, a row, a strip or in an uninitialised buffer is NaN or Inf, which times zero would show.
TEST_F(AmxBf16, NothingLeaksIntoARaggedUnit) {
  for (int64_t M : {1, 17, 40}) {
    for (int64_t K : {1, 7, 33, 50, 100, 130, 177}) {
      for (int64_t block_k : {3, 50, 128}) {
        CaseOptions o = bf16_options(M, 49, K, 16, block_k);
        o.x_gap = 40;  // NaN between the rows
        LinearCase problem(o);
        const int64_t border = (K - 1) / block_k * block_k;
        for (int64_t n = 0; n < o.N; ++n) {
          for (int64_t k = 0; k < K; ++k) {
            if ((problem.code(n, k) & 0x7f) == 0) problem.code(n, k) = 0x38;
            if (k >= border) problem.code(n, k) &= 0x7f;
          }
        }
        // Infinite x in the last block: positive codes make the row infinite, a zero code from outside would make it
        // NaN.
        for (int64_t k = border; border > 0 && k < K; ++k) {
          problem.set_x(M / 2, k, std::numeric_limits<float>::infinity());
        }
        for (int64_t k = 0; k < K; ++k) problem.code(48, k) = 0x7f;  // one strip is all NaN, the others are not
        expect_model(problem, serial_on_a_dirty_stack);
        for (int64_t m = 0; m < M; ++m) {
          for (int64_t n = 0; n < o.N; ++n) {
            ASSERT_EQ(std::isnan(problem.out_at(m, n)), n == 48) << o.name() << ", " << m << ", " << n;
          }
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(AmxBf16, EveryCodeIsExactInEveryPlaceOfATile) {
  const CaseOptions o = bf16_options(33, 256, 32, kAll, kAll);
  LinearCase problem(o);
  std::fill(problem.scales.begin(), problem.scales.end(), 1.0f);
  for (int64_t place = 0; place < o.K; ++place) {
    std::fill(problem.codes.begin(), problem.codes.end(), 0);
    for (int64_t m = 0; m < o.M; ++m) {
      for (int64_t k = 0; k < o.K; ++k) problem.set_x(m, k, k == place ? 1.0f : -3.0f);
    }
    for (int64_t n = 0; n < 256; ++n) problem.code(n, place) = static_cast<uint8_t>(n);
    problem.run(kIsa);
    for (int64_t m = 0; m < o.M; ++m) {
      for (int64_t n = 0; n < 256; ++n) {
        const double expected = test::e4m3_value(static_cast<uint8_t>(n)), actual = problem.out_at(m, n);
        ASSERT_TRUE(std::isnan(expected) ? std::isnan(actual) : expected == actual) << place << ", " << m << ", " << n;
      }
    }
  }
}

TEST_F(AmxBf16, BitsOfARowDoNotDependOnMOrItsPlace) {
  constexpr int64_t kMost = 300;
  for (int64_t K : {129, 4100}) {  // 4100: in chunks for many rows, at once for few
    const CaseOptions o = bf16_options(kMost, 49, K, 5, 96);
    LinearCase whole(o);
    whole.run(kIsa);
    for (int64_t M : {1, 2, 16, 17, 32, 33, 64, 128, 129}) {
      for (int64_t first : {int64_t{0}, int64_t{7}, kMost - M}) {
        CaseOptions part_options = o;
        part_options.M = M;
        LinearCase part(part_options);
        part.codes = whole.codes;
        std::copy(whole.scales.begin(), whole.scales.end(), part.scales.begin());
        for (int64_t m = 0; m < M; ++m) {
          for (int64_t k = 0; k < K; ++k) part.set_x(m, k, static_cast<float>(whole.x_at(first + m, k)));
        }
        part.run(kIsa);
        ASSERT_EQ(part.bits(), whole.bits(first, first + M)) << "K " << K << ", M " << M << " from row " << first;
      }
    }
  }
}

TEST_F(AmxBf16, AnyPartitionOnAnyThreadsGivesTheModel) {
  for (int64_t M : {1, 33, 300}) {
    for (ParallelFor parallel_for : {ParallelFor{test::one_by_one_backwards}, ParallelFor{test::uneven_pieces},
                                     ParallelFor{three_threads_left_without_tiles}}) {
      for (int threads : {1, 2, 64}) {
        CaseOptions o = bf16_options(M, 85, 200, 16, 64);
        o.bias_type = FloatType::kF32;
        LinearCase problem(o);
        expect_model(problem, parallel_for, threads);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(AmxBf16, LoadsPerProductStayNearOneFrom32RowsOn) {
  for (int64_t M : {32, 64, 96, 128, 160, 256}) {
    for (int64_t N : {32, 64, 160}) {
      LinearCase problem(bf16_options(M, N, 512, 128, 128));
      amxemu_reset_counters();
      problem.run(kIsa);
      uint64_t counters[AMXEMU_OPERATIONS];
      amxemu_counters(counters);
      const double loads = static_cast<double>(counters[AMXEMU_TILELOADD] + counters[AMXEMU_TILELOADDT1]);
      EXPECT_EQ(counters[AMXEMU_TDPBF16PS], ideal_products(problem.options));
      EXPECT_LE(loads, 1.1 * static_cast<double>(counters[AMXEMU_TDPBF16PS])) << "M " << M << ", N " << N;
      EXPECT_EQ(counters[AMXEMU_LDTILECFG], 1u);
      EXPECT_EQ(counters[AMXEMU_TILERELEASE], 1u);
    }
  }
}

// On any machine: the plan is a pure function.
TEST(AmxPlan, OtherTypesOfXTakeTheFp32KernelWithAReason) {
  EXPECT_EQ(plan_linear(64, 64, 256, FloatType::kBf16, kIsa, 1).isa, kIsa);
  for (FloatType type : {FloatType::kF16, FloatType::kF32}) {
    const Plan plan = plan_linear(64, 64, 256, type, kIsa, 1);
    EXPECT_EQ(plan.isa, Isa::kAvx512Vbmi);
    EXPECT_STREQ(plan.reason, "x is not bf16, and is never narrowed to it");
  }
}

}  // namespace
}  // namespace blockscale
