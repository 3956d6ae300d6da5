// The amx_bf16 kernel's arithmetic as plain loops: TDPBF16PS in its documented order, one output at a time.
//
//   for each unit, for each step of 32 k from the unit's start:   C = C + (even chain + odd chain), chains from +0
//   total = fma(C, scale, total), in unit order;   out = round(total + bias)
//
// Inside a step every operation rounds to nearest even and treats subnormals as zero, in and out; elsewhere they count.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gemm/linear_case.h"

namespace blockscale::test {

// The nearest fp32, with results below the normal range flushed. `value` is the exact result rounded to double; that
// decides no tie, because the two terms behind it have at most 24 bits each (products of bf16 have 16).
inline float flush_to_fp32(double value) {
  constexpr double kSmallest = 0x1p-126;
  if (std::fabs(value) < kSmallest) {
    // With 24 bits and no end of exponents the next number down is kSmallest - 2^-150; halfway rounds to even, up.
    const bool rounds_up = std::fabs(value) >= kSmallest - 0x1p-151;
    return static_cast<float>(std::copysign(rounds_up ? kSmallest : 0.0, value));
  }
  return static_cast<float>(value);
}

inline double flushed(double value) { return std::fabs(value) < 0x1p-126 ? std::copysign(0.0, value) : value; }

// One element of one step: c + (sum over even k + sum over odd k), for `depth` <= 32 bf16 values of x and w.
inline float tile_step(const double* x, const double* w, int64_t depth, float c) {
  float chain[2] = {0, 0};
  for (int64_t k = 0; k < depth; ++k) chain[k % 2] = flush_to_fp32(flushed(x[k]) * w[k] + chain[k % 2]);
  const float sum = flush_to_fp32(static_cast<double>(chain[0]) + chain[1]);
  return flush_to_fp32(static_cast<double>(c) + sum);
}

// out[m, n] in fp32, before the rounding to the output's type.
inline float model_output(LinearCase& problem, const std::vector<double>& x_row, const std::vector<double>& w_row,
                          int64_t n) {
  const CaseOptions& o = problem.options;
  float total = 0;
  for (int64_t k = 0; k < o.K;) {
    const int64_t end = std::min({o.K, k + kUnitK, k + (o.block_k - k % o.block_k)});
    const float scale = problem.scale(n, k);
    float c = 0;
    while (k < end) {
      const int64_t depth = std::min<int64_t>(32, end - k);
      c = tile_step(&x_row[k], &w_row[k], depth, c);
      k += depth;
    }
    total = std::fma(c, scale, total);
  }
  if (o.bias_type) total += static_cast<float>(load_double(problem.bias.data(), *o.bias_type, n));
  return total;
}

// Every stored element has the model's bits; NaN counts as NaN.
inline testing::AssertionResult equals_model(LinearCase& problem) {
  const CaseOptions& o = problem.options;
  std::vector<std::vector<double>> x_rows(o.M, std::vector<double>(o.K));
  for (int64_t m = 0; m < o.M; ++m) {
    for (int64_t k = 0; k < o.K; ++k) x_rows[m][k] = problem.x_at(m, k);
  }
  std::vector<double> w_row(o.K);
  for (int64_t n = 0; n < o.N; ++n) {
    for (int64_t k = 0; k < o.K; ++k) w_row[k] = e4m3_value(problem.code(n, k));
    for (int64_t m = 0; m < o.M; ++m) {
      const double expected = round_to(model_output(problem, x_rows[m], w_row, n), o.out_type);
      const double actual = problem.out_at(m, n);
      if (std::isnan(expected) && std::isnan(actual)) continue;
      if (expected == actual && std::signbit(expected) == std::signbit(actual)) continue;
      return testing::AssertionFailure() << "out[" << m << ", " << n << "] = " << actual << ", the model has "
                                         << expected;
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace blockscale::test
