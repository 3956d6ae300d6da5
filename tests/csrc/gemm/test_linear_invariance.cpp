// Bits of a row: the same at every M, row position, stride, thread and split of the work, and on the fp32 paths on
// every ISA. Cancelling data makes the exact result zero: what is left is the residue of the order of additions.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <thread>

#include "gemm/linear_case.h"

namespace blockscale {
namespace {

using test::CaseOptions;
using test::Guard;
using test::LinearCase;

constexpr int64_t kRowCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 23, 24, 25, 31, 33, 64, 65, 129};

// A row that cancels: the second half of k is the first one permuted, x negated, scales equal. The exact sum is zero.
void make_cancelling(LinearCase& problem, int64_t row) {
  const int64_t half = problem.options.K / 2;
  for (int64_t k = 0; k < half; ++k) {
    const int64_t other = half + (k * 7 + 3) % half;  // half is not a multiple of 7
    for (int64_t n = 0; n < problem.options.N; ++n) {
      problem.code(n, other) = problem.code(n, k);
      problem.scale(n, other) = problem.scale(n, k) = 1.5f;
    }
    problem.set_x(row, other, -static_cast<float>(problem.x_at(row, k)));
  }
  if (problem.options.K % 2) problem.set_x(row, problem.options.K - 1, 0.0f);
}

struct InvarianceShape {
  int64_t N, K, block_n, block_k;
};
constexpr InvarianceShape kInvarianceShapes[] = {{48, 1024, 128, 128}, {35, 643, 128, 128}, {16, 500, 1, 192},
                                                 {33, 260, 8, 3},      {20, 96, 16, 32},    {17, 20000, 128, 128}};

CaseOptions options_of(const InvarianceShape& shape, FloatType x_type) {
  CaseOptions o;
  o.N = shape.N;
  o.K = shape.K;
  o.block_n = shape.block_n;
  o.block_k = shape.block_k;
  o.x_type = x_type;
  return o;
}

void copy_row(const LinearCase& from, int64_t from_row, LinearCase& to, int64_t to_row) {
  const int64_t element = test::bytes_of(from.options.x_type);
  std::memcpy(to.x.data() + to_row * to.x_stride * element, from.x.data() + from_row * from.x_stride * element,
              static_cast<size_t>(from.options.K * element));
}

class LinearInvariance : public test::PerIsa {};

TEST_P(LinearInvariance, ARowHasTheSameBitsAtEveryMAndPosition) {
  for (const InvarianceShape& shape : kInvarianceShapes) {
    for (FloatType x_type : x_types()) {
      CaseOptions o = options_of(shape, x_type);
      LinearCase alone(o);
      make_cancelling(alone, 0);
      alone.run(GetParam());
      const auto expected = alone.bits();
      double residue = 0;
      for (int64_t n = 0; n < o.N; ++n) residue = std::max(residue, std::fabs(alone.out_at(0, n)));
      EXPECT_GT(residue, 0.0) << "data whose order of additions does not show: " << o.name();
      for (int64_t M : kRowCounts) {
        if (shape.K > 10000 && M != 1 && M != 8 && M != 16) continue;  // around where x exceeds the scratch
        o.M = M;
        o.x_gap = M % 3;
        o.seed = static_cast<uint32_t>(M);
        LinearCase together(o);
        together.codes = alone.codes;
        std::copy(alone.scales.begin(), alone.scales.end(), together.scales.begin());
        for (int64_t position : {int64_t{0}, M / 2, M - 1}) copy_row(alone, 0, together, position);
        together.run(GetParam());
        for (int64_t position : {int64_t{0}, M / 2, M - 1}) {
          ASSERT_EQ(together.bits(position, position + 1), expected) << o.name() << ", row " << position;
        }
      }
    }
  }
}

TEST_P(LinearInvariance, EverySplitOfTheWorkGivesTheSameBits) {
  for (const InvarianceShape& shape : kInvarianceShapes) {
    for (FloatType x_type : x_types()) {
      for (int64_t M : {1, 5, 29}) {
        if (shape.K > 10000 && M > 5) continue;
        CaseOptions o = options_of(shape, x_type);
        o.M = M;
        LinearCase problem(o);
        make_cancelling(problem, M - 1);
        problem.run(GetParam());
        const auto expected = problem.bits();
        for (ParallelFor parallel_for :
             {test::serial, test::one_by_one_backwards, test::uneven_pieces, test::three_threads}) {
          for (int threads : {1, 3, 16}) {  // more threads: rows are cut into parts too
            problem.run(GetParam(), parallel_for, threads);
            ASSERT_EQ(problem.bits(), expected) << o.name() << ", threads " << threads;
          }
        }
      }
    }
  }
}

TEST_P(LinearInvariance, SeveralThreadsMayCallAtOnce) {
  CaseOptions o = options_of(kInvarianceShapes[1], FloatType::kBf16);
  o.M = 7;
  LinearCase expected(o);
  expected.run(GetParam());
  std::vector<std::thread> callers;
  std::vector<std::vector<unsigned char>> results(4);
  for (auto& result : results) {
    callers.emplace_back([&result, &o, this] {
      LinearCase problem(o);
      problem.run(GetParam(), test::three_threads, 3);
      result = problem.bits();
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const auto& result : results) EXPECT_EQ(result, expected.bits());
}

TEST_P(LinearInvariance, CallsAreCountedForTheKernelThatRan) {
  LinearCase problem(options_of(kInvarianceShapes[0], FloatType::kBf16));
  const auto before = kernel_calls();
  problem.run(GetParam(), test::one_by_one_backwards);
  const auto after = kernel_calls();
  for (int i = 0; i < kIsaCount; ++i) {
    EXPECT_EQ(after[i] - before[i], i == static_cast<int>(GetParam()) ? 3u : 0u) << isa_name(static_cast<Isa>(i));
  }
}

// ------------------------------------------------------------------------------------------ offsets beyond 2^31

// Memory that is only reserved until touched, so that distant rows cost nothing.
class SparseMemory {
 public:
  explicit SparseMemory(int64_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~SparseMemory() {
    if (reserved()) munmap(data_, static_cast<size_t>(bytes_));
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  bool reserved() const { return data_ != MAP_FAILED; }
  template <class T>
  T* as() {
    return static_cast<T*>(data_);
  }

 private:
  int64_t bytes_;
  void* data_;
};

void last_item_only(int64_t count, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  body(count - 1, count, context);
}

TEST_P(LinearInvariance, OffsetsBeyond31BitsInXAndOut) {
  const int64_t stride = (int64_t{1} << 31) + 40;
  CaseOptions o = options_of({48, 192, 128, 128}, FloatType::kBf16);
  LinearCase near(o);
  near.run(GetParam());
  SparseMemory x(2 * stride + 1024), out(4 * stride + 1024);
  if (!x.reserved() || !out.reserved()) GTEST_SKIP() << "the system reserves no 13 GB of address space";
  std::memcpy(x.as<uint16_t>() + stride, near.x.data(), 192 * 2);
  LinearProblem problem = near.problem();
  problem.M = 2;
  problem.x = x.as<uint16_t>();
  problem.x_stride = stride;
  problem.out = out.as<float>();
  problem.out_stride = stride;
  ASSERT_TRUE(linear(problem, plan_linear(2, o.N, o.K, o.x_type, GetParam(), 1), test::serial));
  EXPECT_EQ(std::memcmp(out.as<float>() + stride, near.out.data(), 48 * 4), 0);
}

TEST_P(LinearInvariance, OffsetsBeyond31BitsInWeightAndScales) {
  const int64_t N = (int64_t{1} << 21) + 16, K = 1030;  // more than 2^31 codes and, at 1x1, as many scales
  CaseOptions o = options_of({16, K, 1, 1}, FloatType::kBf16);
  LinearCase near(o);
  near.run(GetParam());
  SparseMemory weight(N * K), scales(4 * N * K), out(4 * N);
  if (!weight.reserved() || !scales.reserved()) GTEST_SKIP() << "the system reserves no 11 GB of address space";
  std::memcpy(weight.as<uint8_t>() + (N - 16) * K, near.packed.data(), static_cast<size_t>(16 * K));
  std::memcpy(scales.as<float>() + (N - 16) * K, near.scales.data(), static_cast<size_t>(16 * K * 4));
  LinearProblem problem = near.problem();
  problem.N = N;
  problem.weight = weight.as<uint8_t>();
  problem.scales = scales.as<float>();
  problem.out = out.as<float>();
  problem.out_stride = N;
  ASSERT_TRUE(linear(problem, plan_linear(1, N, K, o.x_type, GetParam(), 1), last_item_only));
  EXPECT_EQ(std::memcmp(out.as<float>() + N - 16, near.out.data(), 16 * 4), 0);
}

BLOCKSCALE_INSTANTIATE_PER_ISA(LinearInvariance);

// ------------------------------------------------------------------------------------------ across instruction sets

// Equal bits, but any NaN equals any other: which operand's payload survives is the instruction's choice.
bool same_results(const LinearCase& a, const LinearCase& b) {
  for (int64_t m = 0; m < a.options.M; ++m) {
    for (int64_t n = 0; n < a.options.N; ++n) {
      const double left = a.out_at(m, n), right = b.out_at(m, n);
      if (std::isnan(left) && std::isnan(right)) continue;
      if (left != right || std::signbit(left) != std::signbit(right)) return false;
    }
  }
  return true;
}

void expect_equal_on_all_isas(const CaseOptions& o, void (*prepare)(LinearCase&)) {
  LinearCase judge(o);
  prepare(judge);
  judge.run(Isa::kScalar);
  for (Isa isa : test::all_isas()) {
    const IsaStatus& status = isa_report().isas[static_cast<int>(isa)];
    if (!status.usable || kernel_table(isa)->bf16_x_only) continue;
    LinearCase other(o);
    prepare(other);
    other.run(isa);
    EXPECT_TRUE(same_results(judge, other)) << o.name() << ", scalar and " << isa_name(isa);
  }
}

TEST(LinearAcrossIsas, Fp32PathsGiveEqualBits) {
  for (const InvarianceShape& shape : kInvarianceShapes) {
    for (FloatType x_type : test::kFloatTypes) {
      for (int64_t M : {1, 2, 4, 7, 8, 12, 13, 16, 24, 31, 65}) {
        if (shape.K > 10000 && M != 1 && M != 8) continue;
        CaseOptions o = options_of(shape, x_type);
        o.M = M;
        o.out_type = test::kFloatTypes[M % 3];
        o.bias_type = FloatType::kBf16;
        expect_equal_on_all_isas(o, [](LinearCase&) {});
        o.out_type = FloatType::kF32;
        o.bias_type.reset();
        expect_equal_on_all_isas(o, [](LinearCase& problem) { make_cancelling(problem, 0); });
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

// A product exactly between two floats and a chain of 2^-60 that tips it: 60 significant bits, one rounding is right.
TEST(LinearAcrossIsas, SumsBesideAMidpointAreRoundedOnce) {
  CaseOptions o;
  o.M = 2;
  o.K = 3;
  for (Isa isa : test::all_isas()) {
    const IsaStatus& status = isa_report().isas[static_cast<int>(isa)];
    if (!status.usable || kernel_table(isa)->bf16_x_only) continue;
    LinearCase problem(o);
    std::fill(problem.codes.begin(), problem.codes.end(), 0x38);  // 1
    std::fill(problem.scales.begin(), problem.scales.end(), 1.0f);
    for (int64_t n = 0; n < o.N; ++n) problem.code(n, 2) = 0x3c;  // 1.5
    for (int64_t m = 0; m < 2; ++m) {
      problem.set_x(m, 0, m ? -0x1p-60f : 0x1p-60f);
      problem.set_x(m, 1, 0.0f);
      problem.set_x(m, 2, 1.0f + 0x1p-23f);
    }
    problem.run(isa);
    for (int64_t n = 0; n < o.N; ++n) {
      EXPECT_EQ(problem.out_at(0, n), 1.5 + 0x1p-22) << isa_name(isa);
      EXPECT_EQ(problem.out_at(1, n), 1.5 + 0x1p-23) << isa_name(isa);
    }
  }
}

TEST(LinearAcrossIsas, TinyHugeAndSpecialValuesGiveEqualBits) {
  for (FloatType x_type : test::kFloatTypes) {
    for (FloatType out_type : test::kFloatTypes) {
      CaseOptions o = options_of({35, 300, 16, 128}, x_type);
      o.M = 9;
      o.out_type = out_type;
      expect_equal_on_all_isas(o, [](LinearCase& problem) {  // products and sums among the subnormals
        for (int64_t m = 0; m < 9; ++m) {
          for (int64_t k = 0; k < 300; ++k) problem.set_x(m, k, std::ldexp(static_cast<float>(k - 150), -146 + k % 20));
        }
      });
      expect_equal_on_all_isas(o, [](LinearCase& problem) {  // sums that pass the largest float on the way
        for (int64_t m = 0; m < 9; ++m) {
          for (int64_t k = 0; k < 300; ++k) problem.set_x(m, k, std::ldexp(k % 3 ? 1.5f : -1.75f, 110 + k % 17));
        }
      });
      expect_equal_on_all_isas(o, [](LinearCase& problem) {  // results among the subnormals of every output type
        for (int64_t i = 0; i < problem.scales.size(); ++i) problem.scales[i] = std::ldexp(1.3f, i % 2 ? -140 : -24);
      });
      expect_equal_on_all_isas(o, [](LinearCase& problem) {
        const float infinity = std::numeric_limits<float>::infinity();
        problem.set_x(1, 5, infinity);
        problem.set_x(2, 5, -infinity);
        problem.set_x(2, 200, infinity);
        problem.set_x(3, 299, std::numeric_limits<float>::quiet_NaN());
        problem.code(20, 7) = 0x7f;
        problem.code(34, 299) = 0xff;
        problem.scale(17, 0) = infinity;
        problem.scale(0, 299) = std::numeric_limits<float>::quiet_NaN();
      });
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(LinearAcrossIsas, TheBf16KernelAgreesWithTheFp32KernelsWhereSumsAreExact) {
  const IsaStatus& status = isa_report().isas[static_cast<int>(Isa::kAvx512Bf16)];
  if (!status.usable) GTEST_SKIP() << status.reason;
  CaseOptions o = options_of({48, 640, 16, 128}, FloatType::kBf16);
  o.M = 6;
  const auto small_integers = [](LinearCase& problem) {
    for (uint8_t& code : problem.codes) code = static_cast<uint8_t>((code & 0x80) | (0x38 + code % 24));  // 1 to 7.5
    for (int64_t m = 0; m < 6; ++m) {
      for (int64_t k = 0; k < 640; ++k) problem.set_x(m, k, static_cast<float>((m * 31 + k * 17) % 65 - 32));
    }
    int turn = 0;
    for (float& scale : problem.scales) scale = std::ldexp(1.0f, turn++ % 5 - 2);
  };
  LinearCase judge(o), dot(o);
  small_integers(judge);
  small_integers(dot);
  judge.run(Isa::kScalar);
  dot.run(Isa::kAvx512Bf16);
  EXPECT_EQ(judge.bits(), dot.bits());
}

}  // namespace
}  // namespace blockscale
