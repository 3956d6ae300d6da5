// Row blocks that share decoded codes: every row must have the bits that it has alone, where nothing is shared, at each
// M that is cut into other blocks, in every chunk of rows, k and strips.
#include "gemm/linear.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "gemm/linear_case.h"

namespace blockscale {
namespace {

using test::CaseOptions;
using test::LinearCase;

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

class Panel : public test::PerIsa {
 protected:
  // Rows `step` apart, each against a problem of its own with the same weight.
  void expect_rows_as_alone(LinearCase& together, int64_t step) {
    together.run(GetParam());
    CaseOptions o = together.options;
    o.M = 1;
    o.x_gap = o.out_gap = 0;
    LinearCase alone(o);
    alone.codes = together.codes;
    std::copy(together.scales.begin(), together.scales.end(), alone.scales.begin());
    std::copy(together.bias.begin(), together.bias.end(), alone.bias.begin());
    const int64_t element = test::bytes_of(o.x_type);
    for (int64_t m = 0; m < together.options.M; m += step) {
      std::memcpy(alone.x.data(), together.x.data() + m * together.x_stride * element,
                  static_cast<size_t>(o.K * element));
      alone.run(GetParam());
      ASSERT_EQ(together.bits(m, m + 1), alone.bits()) << together.options.name() << ", row " << m;
    }
  }
};

TEST_P(Panel, EveryGridAndRaggedShapeIsWithinTheBound) {
  struct Grid {
    int64_t n, k;
  };
  uint32_t turn = 0;
  for (const Grid& grid : {Grid{128, 128}, Grid{64, 128}, Grid{128, 32}, Grid{1, 128}, Grid{1, kAll}, Grid{kAll, kAll},
                           Grid{kAll, 128}, Grid{128, kAll}, Grid{1, 1}, Grid{3, 5}, Grid{24, 192}}) {
    for (FloatType x_type : x_types()) {
      for (int64_t M : {7, 13, 23, 31, 65}) {
        CaseOptions o;
        o.M = M;
        o.N = 16 * (turn % 3) + (turn % 4 ? 16 : 3);
        o.K = turn % 5 ? 129 + 7 * (turn % 37) : 256;
        o.block_n = grid.n;
        o.block_k = grid.k;
        o.x_type = x_type;
        o.out_type = test::kFloatTypes[turn % 3];
        if (turn % 2) o.bias_type = test::kFloatTypes[turn / 2 % 3];
        o.x_gap = turn % 3;
        o.out_gap = turn % 4;
        o.column_major_scales = turn % 2;
        o.guard = turn % 5 < 2 ? test::Guard::kBefore : test::Guard::kAfter;
        o.seed = ++turn;
        LinearCase problem(o);
        problem.run(GetParam());
        ASSERT_TRUE(problem.within_bound(GetParam())) << o.name();
        ASSERT_TRUE(problem.gaps_untouched()) << o.name();
      }
    }
  }
}

TEST_P(Panel, ARowHasTheBitsItHasAlone) {
  for (FloatType x_type : x_types()) {
    for (int64_t M : {2, 5, 7, 8, 9, 12, 13, 16, 23, 24, 31, 64, 65, 130, 512}) {
      CaseOptions o;
      o.M = M;
      o.N = 37;
      o.K = M % 2 ? 403 : 512;
      o.block_n = 16;
      o.block_k = M % 3 ? 128 : 72;
      o.x_type = x_type;
      o.x_gap = M % 5;
      LinearCase problem(o);
      expect_rows_as_alone(problem, M > 100 ? 7 : 1);
      if (HasFatalFailure()) return;
    }
  }
}

// More rows than fit the scratch with all of K, and more strips than their carried totals.
TEST_P(Panel, ChunksOfKAndGroupsOfStripsCarryTheTotals) {
  CaseOptions o;
  o.M = 50;
  o.N = 1040;
  o.K = 4200;
  o.x_type = FloatType::kBf16;
  o.bias_type = FloatType::kBf16;
  LinearCase problem(o);
  expect_rows_as_alone(problem, 7);
  o.M = 13;
  o.N = 19;
  o.K = 2100;
  o.block_n = 2;
  o.block_k = 1;  // more units than the scratch lists
  LinearCase units(o);
  expect_rows_as_alone(units, 3);
}

BLOCKSCALE_INSTANTIATE_PER_ISA(Panel);

}  // namespace
}  // namespace blockscale
