// One task of a kernel, as gemm/kernel.h describes it, without the driver: it expects nothing of its scratch, and
// writes its range of rows and strips and nothing else.
#include "gemm/kernel.h"

#include <gtest/gtest.h>

#include "gemm/linear_case.h"

namespace blockscale {
namespace {

using test::CaseOptions;
using test::Guard;
using test::LinearCase;

// What a local array that a kernel forgets to clear would hold.
__attribute__((noinline)) void leave_nan_on_the_stack() {
  volatile unsigned char bytes[64 << 10];
  for (volatile unsigned char& byte : bytes) byte = 0xff;
}

class Microkernel : public test::PerIsa {
 protected:
  void run(const LinearTask& task) {
    leave_nan_on_the_stack();
    kernel_table(GetParam())->linear[static_cast<int>(WeightFormat::kFp8E4m3)](task);
  }
};

// Scratch between guard pages, every byte 0xff: NaN as a code, as x in any type and as a total.
TEST_P(Microkernel, NothingInTheScratchBeforeTheCallMatters) {
  static_assert(kScratchBytes % 64 == 0, "aligned to 64 at both ends of a guarded buffer");
  const KernelTable* table = kernel_table(GetParam());
  test::GuardedBuffer<unsigned char> after(kScratchBytes, Guard::kAfter), before(kScratchBytes, Guard::kBefore);
  uint32_t turn = 0;
  for (FloatType x_type : x_types()) {
    for (int64_t block_k : {1, 3, 6, 37, 128}) {
      for (int64_t N : {1, 6, 16, 19, 31, 60}) {
        for (int64_t K : {1, 2, 3, 5, 37, 130, 259, 2100}) {
          for (int64_t M : {1, table->max_rows + 1}) {
            if (K > 300 && (block_k != 1 || N > 16)) continue;  // more units than the scratch lists: once is enough
            CaseOptions o;
            o.M = M;
            o.N = N;
            o.K = K;
            o.block_n = 5;
            o.block_k = block_k;
            o.x_type = x_type;
            o.guard = ++turn % 3 ? Guard::kAfter : Guard::kBefore;
            LinearCase problem(o);
            problem.pack();
            auto& scratch = o.guard == Guard::kAfter ? after : before;
            std::fill(scratch.begin(), scratch.end(), 0xff);
            run(problem.task(scratch.data(), static_cast<int>(std::min<int64_t>(M, table->max_rows))));
            ASSERT_TRUE(problem.within_bound(GetParam())) << o.name();
          }
        }
      }
    }
  }
}

TEST_P(Microkernel, ATaskWritesItsOwnRowsAndStripsOnly) {
  const KernelTable* table = kernel_table(GetParam());
  test::GuardedBuffer<unsigned char> scratch(kScratchBytes, Guard::kAfter);
  for (int64_t K : {70, 2100}) {  // 2100 units of one k: K in chunks with carried totals
    CaseOptions o;
    o.M = 7;
    o.N = 53;
    o.K = K;
    o.block_k = K > 100 ? 1 : 128;
    o.x_type = FloatType::kBf16;
    o.out_gap = 4;
    LinearCase whole(o);
    whole.pack();
    run(whole.task(scratch.data(), 3));
    for (int64_t row_begin : {0, 2, 6}) {
      for (int64_t row_end : {2, 3, 7}) {
        for (int64_t strip_begin = 0; strip_begin < 4; ++strip_begin) {
          for (int64_t strip_end = strip_begin; strip_end <= 4; ++strip_end) {
            if (row_begin > row_end) continue;
            LinearCase part(o);
            part.pack();
            std::fill(part.out.begin(), part.out.end(), 0xa5);
            LinearTask task = part.task(scratch.data(), std::min(3, table->max_rows));
            task.row_begin = row_begin;
            task.row_end = row_end;
            task.strip_begin = strip_begin;
            task.strip_end = strip_end;
            run(task);
            const double untouched = bits_float(0xa5a5a5a5u);
            for (int64_t m = 0; m < o.M; ++m) {
              for (int64_t n = 0; n < o.N; ++n) {
                const bool inside = m >= row_begin && m < row_end && n / 16 >= strip_begin && n / 16 < strip_end;
                ASSERT_EQ(part.out_at(m, n), inside ? whole.out_at(m, n) : untouched)
                    << "rows " << row_begin << " to " << row_end << ", strips " << strip_begin << " to " << strip_end
                    << ": " << m << ", " << n;
              }
            }
            ASSERT_TRUE(part.gaps_untouched());
          }
        }
      }
    }
  }
}

// How many rows share a pass changes no bit.
TEST_P(Microkernel, RowsPerBlockChangesNoBits) {
  const KernelTable* table = kernel_table(GetParam());
  test::GuardedBuffer<unsigned char> scratch(kScratchBytes, Guard::kAfter);
  for (FloatType x_type : x_types()) {
    CaseOptions o;
    o.M = 19;
    o.N = 117;  // seven strips and a ragged one: groups of four, pairs and single strips
    o.K = 390;
    o.block_n = 16;
    o.x_type = x_type;
    LinearCase problem(o);
    problem.pack();
    run(problem.task(scratch.data(), 1));
    const auto expected = problem.bits();
    for (int rows = 2; rows <= table->max_rows; ++rows) {
      std::fill(problem.out.begin(), problem.out.end(), 0xa5);
      run(problem.task(scratch.data(), rows));
      ASSERT_EQ(problem.bits(), expected) << "rows per block " << rows;
    }
  }
}

BLOCKSCALE_INSTANTIATE_PER_ISA(Microkernel);

}  // namespace
}  // namespace blockscale
