// Scales of the rows of x, one for each row and k-block. Powers of two that differ in every row and block are exact
// wherever they are applied: kernels that are given them must give the bits of x multiplied by them beforehand.
#include "gemm/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "gemm/linear_case.h"
#include "gemm/pack.h"

namespace blockscale {
namespace {

class RowScales : public test::PerIsa {};

void serial(int64_t count, int64_t, void (*body)(int64_t, int64_t, void*), void* context) { body(0, count, context); }

TEST_P(RowScales, EqualRowsMultipliedBeforehand) {
  constexpr int64_t N = 37, K = 300;
  for (int64_t block_k : {3, 128, 300}) {
    for (int64_t M : {1, 2, 5, 9, 16, 17, 33, 64, 130}) {
      for (bool column_major : {false, true}) {
        const int64_t blocks = (K + block_k - 1) / block_k, stride_m = column_major ? 1 : blocks;
        const int64_t stride_k = column_major ? M : 1;
        std::vector<uint8_t> codes(N * K), packed(N * K);
        for (int64_t i = 0; i < N * K; ++i) codes[i] = static_cast<uint8_t>((i * 37 + i / 7) % 126 | (i % 3 ? 0 : 128));
        pack_weight(codes.data(), N, K, K, 1, 0, strip_count(N), packed.data());
        std::vector<float> scales(N * blocks), x_scales(M * blocks);
        for (size_t i = 0; i < scales.size(); ++i) scales[i] = std::ldexp(1.0f, static_cast<int>(i * 5 % 7) - 3);
        std::vector<uint16_t> x(M * K), multiplied(M * K);
        for (int64_t m = 0; m < M; ++m) {
          for (int64_t k = 0; k < K; ++k) {
            float& scale = x_scales[m * stride_m + k / block_k * stride_k];
            scale = std::ldexp(1.0f, static_cast<int>((m * 3 + k / block_k * 5) % 11) - 5);
            const float value = static_cast<float>((m * 31 + k * 17) % 255 - 127) / 64.0f;  // 8 bits: exact in bf16
            x[m * K + k] = float_to_bf16(value);
            multiplied[m * K + k] = float_to_bf16(value * scale);
          }
        }
        std::vector<float> given(M * N, -1.0f), wanted(M * N, -2.0f);
        LinearProblem problem;
        problem.M = M;
        problem.N = N;
        problem.K = K;
        problem.x_type = FloatType::kBf16;
        problem.x_stride = K;
        problem.weight = packed.data();
        problem.scales = scales.data();
        problem.scale_stride_n = blocks;
        problem.scale_stride_k = 1;
        problem.block_n = 1;
        problem.block_k = block_k;
        problem.out_stride = N;
        const Plan plan = plan_linear(M, N, K, FloatType::kBf16, GetParam(), 1);
        problem.x = multiplied.data();
        problem.out = wanted.data();
        ASSERT_TRUE(linear(problem, plan, serial));
        problem.x = x.data();
        problem.x_scales = x_scales.data();
        problem.x_scale_stride_m = stride_m;
        problem.x_scale_stride_k = stride_k;
        problem.out = given.data();
        ASSERT_TRUE(linear(problem, plan, serial));
        for (int64_t i = 0; i < M * N; ++i) {
          ASSERT_EQ(float_bits(given[i]), float_bits(wanted[i]))
              << "M " << M << " block_k " << block_k << " column-major " << column_major << " row " << i / N;
        }
        if (M > 1) {
          ASSERT_NE(given[0], given[N]);  // rows differ, so that a neighbour's scale would show
        }
      }
    }
  }
}

BLOCKSCALE_INSTANTIATE_PER_ISA(RowScales);

}  // namespace
}  // namespace blockscale
