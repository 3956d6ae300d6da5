// One call of the driver in guarded memory, with its reference: the formula of linear.h as plain loops in double.
//
// Bound per element. Every path sums a unit (at most 128 k, within one scale block) in a chain, adds it to a total with
// its scale, adds two totals at most and the bias, then rounds to the output type. An element has seen at most
//   steps = min(K, block_k, 128) + units + 3
// fp32 roundings, each relative to a partial sum of magnitudes, so with u = 2^-24 and S = sum |x w s| + |bias|
//   |out - ref| <= steps u S (1 + small) + u_out |ref|        plus half the output's smallest subnormal.
// A bf16 dot product flushes subnormal factors and sums: under 2^-126 each time, times the largest code, scale and K.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gemm/kernel.h"
#include "gemm/linear.h"
#include "gemm/pack.h"
#include "guarded_buffer.h"
#include "rounding.h"

namespace blockscale::test {

inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
inline int64_t bytes_of(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }
inline const char* name_of(FloatType type) {
  return type == FloatType::kF32 ? "fp32" : type == FloatType::kBf16 ? "bf16" : "fp16";
}

constexpr FloatType kFloatTypes[] = {FloatType::kF32, FloatType::kBf16, FloatType::kF16};

// ------------------------------------------------------------------------------------------ ways to cut the work

inline void serial(int64_t count, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  body(0, count, context);
}

inline void one_by_one_backwards(int64_t count, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  for (int64_t i = count; i-- > 0;) body(i, i + 1, context);
}

inline void uneven_pieces(int64_t count, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  int64_t size = 1;
  for (int64_t begin = 0; begin < count; begin += size, size = size % 5 + 2) {
    body(begin, std::min(count, begin + size), context);
  }
}

inline void three_threads(int64_t count, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 3; ++t) {
    const int64_t begin = count * t / 3, end = count * (t + 1) / 3;
    if (begin < end) threads.emplace_back(body, begin, end, context);
  }
  for (std::thread& thread : threads) thread.join();
}

// ------------------------------------------------------------------------------------------ one problem

struct CaseOptions {
  int64_t M = 1, N = 16, K = 128;
  int64_t block_n = 128, block_k = 128;
  FloatType x_type = FloatType::kF32, out_type = FloatType::kF32;
  std::optional<FloatType> bias_type = std::nullopt;
  int64_t x_gap = 0, out_gap = 0;  // elements between the rows
  bool column_major_scales = false;
  Guard guard = Guard::kAfter;
  uint32_t seed = 1;

  std::string name() const {
    const auto block = [](int64_t side, int64_t whole) {
      return side > whole ? std::string("all") : std::to_string(side);
    };
    return "M" + std::to_string(M) + "-N" + std::to_string(N) + "-K" + std::to_string(K) + "-block" +
           block(block_n, N) + "x" + block(block_k, K) + "-" + name_of(x_type) + "-" + name_of(out_type) + "-bias_" +
           (bias_type ? name_of(*bias_type) : "none") + (x_gap ? "-strided" : "");
  }
};

class LinearCase {
 public:
  explicit LinearCase(const CaseOptions& o)
      : options(o),
        scale_rows(ceil_div(o.N, o.block_n)),
        scale_columns(ceil_div(o.K, o.block_k)),
        x_stride(o.K + o.x_gap),
        out_stride(o.N + o.out_gap),
        codes(o.N * o.K),
        x(o.M && o.K ? bytes_of(o.x_type) * ((o.M - 1) * x_stride + o.K) : 0, o.guard),
        packed(o.N * o.K, o.guard),
        scales(scale_rows * scale_columns, o.guard),
        bias(o.bias_type ? bytes_of(*o.bias_type) * o.N : 0, o.guard),
        out(o.M && o.N ? bytes_of(o.out_type) * ((o.M - 1) * out_stride + o.N) : 0, o.guard),
        random_(o.seed) {
    std::fill(x.begin(), x.end(), 0xff);  // the gaps between rows are NaN in every type
    fill();
  }

  // Normal x, any code but NaN, scales that differ from block to block by powers of two and more.
  void fill(int lowest_code = 0, int highest_code = 0x7e) {
    std::normal_distribution<float> normal;
    for (int64_t m = 0; m < options.M; ++m) {
      for (int64_t k = 0; k < options.K; ++k) set_x(m, k, normal(random_));
    }
    for (uint8_t& code : codes) {
      const int magnitude = lowest_code + static_cast<int>(random_() % (highest_code - lowest_code + 1));
      code = static_cast<uint8_t>(magnitude | (random_() & 0x80));
    }
    for (int64_t i = 0; i < scales.size(); ++i) {
      const float mantissa = 1.0f + static_cast<float>(random_() % 1024) / 1024;
      scales[i] = std::ldexp(mantissa, static_cast<int>(i * 5 % 9) - 4);
    }
    for (int64_t n = 0; options.bias_type && n < options.N; ++n) {
      store_float(bias.data(), *options.bias_type, n, normal(random_) * 50);
    }
  }

  void set_x(int64_t m, int64_t k, float value) { store_float(x.data(), options.x_type, m * x_stride + k, value); }
  double x_at(int64_t m, int64_t k) const { return load_double(x.data(), options.x_type, m * x_stride + k); }
  uint8_t& code(int64_t n, int64_t k) { return codes[n * options.K + k]; }
  float& scale(int64_t n, int64_t k) {
    const int64_t row = n / options.block_n, column = k / options.block_k;
    return options.column_major_scales ? scales[column * scale_rows + row] : scales[row * scale_columns + column];
  }
  double out_at(int64_t m, int64_t n) const { return load_double(out.data(), options.out_type, m * out_stride + n); }

  LinearProblem problem() {
    LinearProblem p;
    p.M = options.M;
    p.N = options.N;
    p.K = options.K;
    p.x = x.data();
    p.x_type = options.x_type;
    p.x_stride = x_stride;
    p.weight = packed.data();
    p.scales = scales.data();
    p.scale_stride_n = options.column_major_scales ? 1 : scale_columns;
    p.scale_stride_k = options.column_major_scales ? scale_rows : 1;
    p.block_n = options.block_n;
    p.block_k = options.block_k;
    p.bias = options.bias_type ? bias.data() : nullptr;
    p.bias_type = options.bias_type.value_or(FloatType::kF32);
    p.out = out.data();
    p.out_type = options.out_type;
    p.out_stride = out_stride;
    return p;
  }

  // Packs the codes, fills `out` with a pattern and multiplies with the kernel of `isa` (which must take this x).
  void run(Isa isa, ParallelFor parallel_for = serial, int threads = 1) {
    pack();
    std::fill(out.begin(), out.end(), 0xa5);
    const Plan plan = plan_linear(options.M, options.N, options.K, options.x_type, isa, threads);
    ASSERT_EQ(plan.isa, isa);
    ASSERT_TRUE(linear(problem(), plan, parallel_for));
  }

  // The whole problem as one task of the kernel itself, with the caller's scratch; pack the codes first.
  LinearTask task(unsigned char* scratch, int rows_per_block) {
    const LinearProblem p = problem();
    LinearTask t{};
    t.x = p.x;
    t.x_type = p.x_type;
    t.x_stride = p.x_stride;
    t.weight = p.weight;
    t.N = p.N;
    t.K = p.K;
    t.scales = p.scales;
    t.scale_stride_n = p.scale_stride_n;
    t.scale_stride_k = p.scale_stride_k;
    t.block_n = p.block_n;
    t.block_k = p.block_k;
    t.bias = p.bias;
    t.bias_type = p.bias_type;
    t.out = p.out;
    t.out_type = p.out_type;
    t.out_stride = p.out_stride;
    t.row_end = p.M;
    t.strip_end = strip_count(p.N);
    t.rows_per_block = rows_per_block;
    t.scratch = scratch;
    return t;
  }
  void pack() {
    pack_weight(codes.data(), options.N, options.K, options.K, 1, 0, strip_count(options.N), packed.data());
  }

  // Bits of the output's rows, without the gaps.
  std::vector<unsigned char> bits(int64_t row_begin, int64_t row_end) const {
    std::vector<unsigned char> result;
    const int64_t element = bytes_of(options.out_type);
    for (int64_t m = row_begin; m < row_end; ++m) {
      const unsigned char* row = out.data() + m * out_stride * element;
      result.insert(result.end(), row, row + options.N * element);
    }
    return result;
  }
  std::vector<unsigned char> bits() const { return bits(0, options.M); }

  testing::AssertionResult within_bound(Isa isa) {
    const CaseOptions& o = options;
    const double u = std::ldexp(1.0, -24);
    int64_t units = 0, longest = 0;
    for (int64_t k = 0; k < o.K; ++units) {
      const int64_t depth = std::min({o.K - k, o.block_k - k % o.block_k, static_cast<int64_t>(kUnitK)});
      longest = std::max(longest, depth);
      k += depth;
    }
    const double relative = static_cast<double>(longest + units + 3) * u * 1.01;
    const Precision out_precision = precision_of(o.out_type);
    for (int64_t m = 0; m < o.M; ++m) {
      for (int64_t n = 0; n < o.N; ++n) {
        double expected = 0, magnitude = 0, largest_scale = 0;
        for (int64_t k = 0; k < o.K; ++k) {
          const double product = x_at(m, k) * kE4m3[code(n, k)] * static_cast<double>(scale(n, k));
          expected += product;
          magnitude += std::fabs(product);
          largest_scale = std::max(largest_scale, std::fabs(static_cast<double>(scale(n, k))));
        }
        if (o.bias_type) {
          const double added = load_double(bias.data(), *o.bias_type, n);
          expected += added;
          magnitude += std::fabs(added);
        }
        double bound = relative * magnitude;
        if (kernel_table(isa)->bf16_x_only) bound += 448 * largest_scale * static_cast<double>(o.K) * 0x1p-126;
        bound += unit_roundoff(o.out_type) * (std::fabs(expected) + bound) +
                 std::ldexp(1.0, out_precision.emin - out_precision.bits);
        const double actual = out_at(m, n);
        const double most = std::ldexp(2.0 - std::ldexp(1.0, 1 - out_precision.bits), out_precision.emax);
        if (std::isinf(actual) && std::fabs(expected) + bound >= most && (actual > 0) == (expected > 0)) continue;
        if (!(std::fabs(actual - expected) <= bound)) {
          return testing::AssertionFailure()
                 << "out[" << m << ", " << n << "] = " << actual << ", expected " << expected << " within " << bound;
        }
      }
    }
    return testing::AssertionSuccess();
  }

  // The bytes between the rows of `out` still hold the pattern.
  bool gaps_untouched() const {
    if (options.N == 0) return true;  // there is no memory
    const int64_t element = bytes_of(options.out_type);
    for (int64_t m = 0; m + 1 < options.M; ++m) {
      for (int64_t b = options.N * element; b < out_stride * element; ++b) {
        if (out[m * out_stride * element + b] != 0xa5) return false;
      }
    }
    return true;
  }

  const CaseOptions options;
  const int64_t scale_rows, scale_columns, x_stride, out_stride;
  std::vector<uint8_t> codes;  // contiguous (N, K)
  GuardedBuffer<unsigned char> x;
  GuardedBuffer<uint8_t> packed;
  GuardedBuffer<float> scales;
  GuardedBuffer<unsigned char> bias;
  GuardedBuffer<unsigned char> out;

 private:
  static std::vector<double> e4m3_values() {
    std::vector<double> values(256);
    for (int i = 0; i < 256; ++i) values[i] = e4m3_value(static_cast<uint8_t>(i));
    return values;
  }
  inline static const std::vector<double> kE4m3 = e4m3_values();

  std::mt19937 random_;
};

// ------------------------------------------------------------------------------------------ tests once per kernel

// Every instruction set in isa.inc; one that this machine or BLOCKSCALE_MAX_ISA rules out is skipped with its reason.
class PerIsa : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    const IsaStatus& status = isa_report().isas[static_cast<int>(GetParam())];
    if (!status.usable) GTEST_SKIP() << status.reason;
  }
  bool takes(FloatType x_type) const { return x_type == FloatType::kBf16 || !kernel_table(GetParam())->bf16_x_only; }
  // Types of x that this kernel multiplies.
  std::vector<FloatType> x_types() const {
    std::vector<FloatType> types;
    for (FloatType type : kFloatTypes) {
      if (takes(type)) types.push_back(type);
    }
    return types;
  }
};

inline std::vector<Isa> all_isas() {
  std::vector<Isa> isas;
  for (int i = 0; i < kIsaCount; ++i) isas.push_back(static_cast<Isa>(i));
  return isas;
}

#define BLOCKSCALE_INSTANTIATE_PER_ISA(suite)                                \
  INSTANTIATE_TEST_SUITE_P(Isas, suite, testing::ValuesIn(test::all_isas()), \
                           [](const testing::TestParamInfo<Isa>& isa) { return std::string(isa_name(isa.param)); })

}  // namespace blockscale::test
