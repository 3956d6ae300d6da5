// The plan for every instruction set and shape, without their hardware: who multiplies, and that the pieces cover the
// work once.
#include "gemm/plan.h"

#include <gtest/gtest.h>

#include <string>

#include "gemm/kernel.h"

namespace blockscale {
namespace {

constexpr FloatType kTypes[] = {FloatType::kF32, FloatType::kBf16, FloatType::kF16};
constexpr int64_t kRows[] = {0, 1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17, 24, 33, 64, 129, 512, 4097, int64_t{1} << 33};
constexpr int64_t kColumns[] = {0, 1, 15, 16, 17, 48, 576, 6144, int64_t{1} << 20};
constexpr int64_t kDepths[] = {0, 1, 193, 4096, 65536};
constexpr int kThreads[] = {1, 2, 7, 64, 256};

template <class Check>
void for_every_plan(Check check) {
  for (int i = 0; i < kIsaCount; ++i) {
    for (FloatType type : kTypes) {
      for (int64_t M : kRows) {
        for (int64_t N : kColumns) {
          for (int64_t K : kDepths) {
            for (int threads : kThreads) {
              const Isa active = static_cast<Isa>(i);
              check(active, type, M, N, threads, plan_linear(M, N, K, type, active, threads));
              if (testing::Test::HasFatalFailure()) {
                ADD_FAILURE() << "M" << M << "-N" << N << "-K" << K << ", " << isa_name(active) << ", threads "
                              << threads;
                return;
              }
            }
          }
        }
      }
    }
  }
}

TEST(Plan, TheKernelExistsAndTakesX) {
  for_every_plan([](Isa active, FloatType type, int64_t, int64_t, int, const Plan& plan) {
    ASSERT_LE(plan.isa, active);
    const KernelTable* table = kernel_table(plan.isa);
    ASSERT_NE(table, nullptr);
    ASSERT_TRUE(!table->bf16_x_only || type == FloatType::kBf16);
    for (LinearKernel kernel : table->linear) ASSERT_NE(kernel, nullptr);
    ASSERT_NE(plan.reason, nullptr);
    ASSERT_GT(std::string(plan.reason).size(), 0u);
    ASSERT_GT(std::string(plan.rows_reason).size(), 20u);
  });
}

// The bits of a row depend on the instruction set alone, so nothing but x's type and the CPU may choose it.
TEST(Plan, TheInstructionSetDependsOnTheTypeOfXOnly) {
  for_every_plan([](Isa active, FloatType type, int64_t, int64_t, int, const Plan& plan) {
    ASSERT_EQ(plan.isa, plan_linear(1, 16, 128, type, active, 1).isa);
  });
}

TEST(Plan, WhichKernelServesWhichX) {
  const auto isa = [](Isa active, FloatType type) { return plan_linear(4, 64, 128, type, active, 1).isa; };
  for (Isa same : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Vbmi}) {
    for (FloatType type : kTypes) EXPECT_EQ(isa(same, type), same);
  }
  EXPECT_EQ(isa(Isa::kAvx512Bf16, FloatType::kBf16), Isa::kAvx512Bf16);
  EXPECT_EQ(isa(Isa::kAvx512Bf16, FloatType::kF16), Isa::kAvx512Vbmi);
  EXPECT_EQ(isa(Isa::kAvx512Bf16, FloatType::kF32), Isa::kAvx512Vbmi);
  EXPECT_EQ(isa(Isa::kAmxBf16, FloatType::kF32), Isa::kAvx512Vbmi);
}

TEST(Plan, PartsCoverTheRowsOnceInWholeBlocks) {
  for_every_plan([](Isa, FloatType, int64_t M, int64_t N, int, const Plan& plan) {
    const KernelTable* table = kernel_table(plan.isa);
    ASSERT_GE(plan.rows_per_block, 1);
    ASSERT_LE(plan.rows_per_block, table->max_rows);
    ASSERT_EQ(plan.strips, (N + 15) / 16);
    ASSERT_GE(plan.grain, 1);
    if (M == 0) return;
    ASSERT_GE(plan.row_parts, 1);
    ASSERT_GE(plan.row_parts * plan.part_rows, M);
    ASSERT_LT((plan.row_parts - 1) * plan.part_rows, M);
    if (plan.row_parts > 1) {
      ASSERT_EQ(plan.part_rows % plan.rows_per_block, 0);
    }
  });
}

TEST(Plan, FewRowsAreOneBlockAndManyAreEvenBlocks) {
  for (int i = 0; i < kIsaCount; ++i) {
    const Isa active = static_cast<Isa>(i);
    const Isa served = plan_linear(1, 64, 128, FloatType::kBf16, active, 1).isa;
    const KernelTable* table = kernel_table(served);
    ASSERT_LE(table->preferred_rows, table->max_rows);
    for (int64_t M = 1; M <= 200; ++M) {
      const int64_t rows = plan_linear(M, 64, 128, FloatType::kBf16, active, 1).rows_per_block;
      if (M <= table->max_rows) {
        EXPECT_EQ(rows, M);
      } else {
        const int64_t blocks = (M + rows - 1) / rows;
        EXPECT_LE(rows, table->preferred_rows);
        EXPECT_EQ(rows % table->row_granule, 0);
        EXPECT_LT(blocks * rows - M, blocks * table->row_granule);  // no block is more than a granule short
      }
    }
  }
}

TEST(Plan, RowsAreCutForThreadsOnlyWhereStripsAreFew) {
  for (FloatType type : kTypes) {
    EXPECT_EQ(plan_linear(512, 6144, 4096, type, Isa::kAvx512Bf16, 2).row_parts, 1);
    EXPECT_EQ(plan_linear(512, 32, 4096, type, Isa::kAvx512Bf16, 1).row_parts, 1);
    EXPECT_GT(plan_linear(512, 32, 4096, type, Isa::kAvx512Bf16, 8).row_parts, 1);
    EXPECT_EQ(plan_linear(1, 32, 4096, type, Isa::kAvx512Bf16, 8).row_parts, 1);
  }
}

TEST(Plan, SmallWorkStaysOnOneThread) {
  const Plan small = plan_linear(1, 576, 192, FloatType::kBf16, Isa::kAvx512Bf16, 2);
  EXPECT_GE(small.grain, small.strips);
  EXPECT_EQ(plan_linear(512, 6144, 4096, FloatType::kBf16, Isa::kAvx512Bf16, 2).grain, 1);
}

}  // namespace
}  // namespace blockscale
