// What the tests of quantising share: an ISA for each test, shapes, weights in guarded memory, the definition in
// double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gemm/linear_case.h"
#include "guarded_buffer.h"
#include "quant/quantize.h"
#include "rounding.h"

namespace blockscale::test {

// The ISA of the test that runs; helpers need not be handed it.
inline Isa quant_isa = Isa::kScalar;

class QuantPerIsa : public PerIsa {
 protected:
  void SetUp() override {
    PerIsa::SetUp();
    quant_isa = GetParam();
  }
};

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

struct Shape {
  int64_t N, K, block_n, block_k;
};

inline std::string name_of(const Shape& shape) {
  return std::to_string(shape.N) + "x" + std::to_string(shape.K) + ", blocks " + std::to_string(shape.block_n) + "x" +
         std::to_string(shape.block_k);
}

inline const std::vector<Shape> kShapes = {
    {1, 1, 1, 1},         {1, 1, 128, 128},      {5, 7, 2, 3},     {48, 193, 16, 128}, {17, 300, 128, 128},
    {130, 259, 128, 128}, {3, 1100, 1, 128},     {9, 513, 1, 513}, {20, 31, 20, 31},   {7, 64, 1, 1},
    {33, 130, 64, 128},   {6, 40, kHuge, kHuge}, {6, 600, 3, 257}, {0, 16, 128, 128},  {16, 0, 128, 128},
};

// A weight (N, K) with chosen strides, in memory that ends or begins at a guard page. NaN and Inf never move to the
// gaps.
struct Weight {
  FloatType type;
  int64_t stride_n, stride_k;
  GuardedBuffer<unsigned char> memory;

  Weight(FloatType t, int64_t N, int64_t K, int64_t sn, int64_t sk, Guard guard)
      : type(t),
        stride_n(sn),
        stride_k(sk),
        memory(N && K ? bytes_of(t) * ((N - 1) * sn + (K - 1) * sk + 1) : 0, guard) {}

  int64_t index(int64_t n, int64_t k) const { return n * stride_n + k * stride_k; }
  double value(int64_t n, int64_t k) const { return load_double(memory.data(), type, index(n, k)); }
  void set(int64_t n, int64_t k, float value) { store_float(memory.data(), type, index(n, k), value); }
};

// Magnitudes that differ by block, so that a misplaced scale shows; every block holds zeros and both signs.
inline void fill(Weight& weight, const Shape& shape, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t n = 0; n < shape.N; ++n) {
    for (int64_t k = 0; k < shape.K; ++k) {
      const int64_t block = n / shape.block_n * 3 + k / shape.block_k * 5;
      const float size = std::ldexp(1.0f, static_cast<int>(block % 11) - 5);
      weight.set(n, k, random() % 16 == 0 ? 0.0f : normal(random) * size);
    }
  }
}

struct Quantised {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

// The definition, element by element. Only the divisions are in fp32, because the contract says so.
inline Quantised reference(const Weight& weight, const Shape& shape) {
  const int64_t columns = ceil_div(shape.K, shape.block_k);
  Quantised result{std::vector<uint8_t>(shape.N * shape.K),
                   std::vector<float>(ceil_div(shape.N, shape.block_n) * columns)};
  std::vector<double> amax(result.scales.size());
  for (int64_t n = 0; n < shape.N; ++n) {
    for (int64_t k = 0; k < shape.K; ++k) {
      double& largest = amax[n / shape.block_n * columns + k / shape.block_k];
      largest = std::fmax(largest, std::fabs(weight.value(n, k)));  // fmax ignores NaN
    }
  }
  for (size_t i = 0; i < amax.size(); ++i) {
    result.scales[i] = amax[i] == 0 ? 1.0f : std::fmax(static_cast<float>(amax[i]) / 448.0f, 0x1p-126f);
  }
  for (int64_t n = 0; n < shape.N; ++n) {
    for (int64_t k = 0; k < shape.K; ++k) {
      const float scale = result.scales[n / shape.block_n * columns + k / shape.block_k];
      result.codes[n * shape.K + k] = e4m3_nearest(static_cast<float>(weight.value(n, k)) / scale);
    }
  }
  return result;
}

}  // namespace blockscale::test
