// Units of 128 k whose codes are read in place have a path of their own in gemm/microkernel.h: each condition of that
// path, met and just missed, in strips walked together and alone.
#include <gtest/gtest.h>

#include "gemm/linear_case.h"

namespace blockscale {
namespace {

using test::CaseOptions;
using test::LinearCase;

class WholeUnits : public test::PerIsa {
 protected:
  void expect_right(const CaseOptions& o) {
    SCOPED_TRACE(o.name());
    LinearCase problem(o);
    problem.run(GetParam());
    ASSERT_TRUE(problem.within_bound(GetParam()));
  }
};

TEST_P(WholeUnits, BlocksOfEveryLengthBesideThem) {
  const auto types = x_types();
  uint32_t turn = 0;
  for (int64_t block_k : {64, 96, 128, 192, 256}) {
    for (int64_t block_n : {16, 24, 128}) {
      for (int64_t K : {128, 384, 508}) {
        for (int64_t M : {1, 2, 4, 5, 8, 12, 21}) {
          CaseOptions o;
          o.M = M;
          o.N = turn % 3 ? 112 : 107;  // seven strips, the last of them whole or not: four, a pair, one
          o.K = K;
          o.block_n = block_n;
          o.block_k = block_k;
          o.x_type = types[turn % types.size()];
          o.column_major_scales = turn % 5 < 2;
          o.seed = ++turn;
          expect_right(o);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Packed x of a block exceeds the scratch: the second chunk of K starts at a unit that is not the first.
TEST_P(WholeUnits, KInChunks) {
  for (FloatType x_type : x_types()) {
    CaseOptions o;
    o.x_type = x_type;
    o.M = kernel_table(GetParam())->max_rows;
    o.N = 48;
    o.K = 33024;
    o.block_n = 16;
    expect_right(o);
  }
}

BLOCKSCALE_INSTANTIATE_PER_ISA(WholeUnits);

}  // namespace
}  // namespace blockscale
