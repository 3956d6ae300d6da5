// The readable kernel: 16 columns as plain loops, no intrinsics. Every other vec_*.h does the same with registers.
// Even and odd k have a chain each, which is the order of all fp32 kernels; an inexact product goes through a fused
// multiply-add.
#pragma once

#include "gemm/pack_x.h"

namespace blockscale {
namespace {

struct VecScalar {
  using X = float;
  static constexpr bool kPanels = false;
  static constexpr int kXPerQuadRow = 4;
  static constexpr int kMaxRows = 8;  // rows that share one decoding of the codes
  static constexpr int kMaxStrips = 1;
  template <int>
  static constexpr int strips() {
    return 1;
  }
  template <int, int>
  static constexpr int side_by_side() {
    return 1;
  }
  static constexpr int kTotalsPerRow = 32;
  template <int MR>
  static constexpr int parts() {
    return 1;
  }
  template <int, int>
  static constexpr int prefetch_bytes() {
    return 2048;
  }

  struct Row {
    float lane[16];
  };
  static Row load(const float* values) {
    Row row;
    for (int c = 0; c < 16; ++c) row.lane[c] = values[c];
    return row;
  }
  static Row add(const Row& a, const Row& b) {
    Row row;
    for (int c = 0; c < 16; ++c) row.lane[c] = a.lane[c] + b.lane[c];
    return row;
  }
  static void store(void* out, FloatType type, int64_t index, const Row& row) {
    for (int c = 0; c < 16; ++c) store_float(out, type, index + c, row.lane[c]);
  }

  struct Scale {
    float lane[16];
    static Scale of_strip(float scale) {
      Scale result;
      for (int c = 0; c < 16; ++c) result.lane[c] = scale;
      return result;
    }
    static Scale of_columns(const float* scales) {
      Scale result;
      for (int c = 0; c < 16; ++c) result.lane[c] = scales[c];
      return result;
    }
  };

  template <class F>
  struct Decoder {
    explicit Decoder(bool exact) : exact_products(exact) {}
    static float value(uint8_t code) { return F::to_float(code); }
    bool exact_products;
  };

  // chain[c] = fma(x, weight[c], chain[c]). A product of 24 and 4 bits is exact in double and the sum is rounded to 53
  // bits, so rounding it again to fp32 differs from one rounding only if it lands on the midpoint of two floats: then,
  // once in 2^28, the library's fmaf decides. (Below the normal fp32 range the sum in double is exact.) fmaf alone
  // takes 50 ns where the CPU has no instruction for it.
  static void fused_multiply_add(float x, const float* weight, float* chain) {
    double sum[16];
    int64_t midpoint = 0;
    for (int c = 0; c < 16; ++c)
      sum[c] = static_cast<double>(x) * static_cast<double>(weight[c]) + static_cast<double>(chain[c]);
    for (int c = 0; c < 16; ++c) {
      int64_t bits;
      __builtin_memcpy(&bits, &sum[c], 8);
      midpoint |= ((bits & 0x1fffffff) ^ 0x10000000) - 1;  // negative if the 29 bits beyond fp32 are 1000...
    }
    if (midpoint < 0) {
      for (int c = 0; c < 16; ++c) chain[c] = __builtin_fmaf(x, weight[c], chain[c]);
    } else {
      for (int c = 0; c < 16; ++c) chain[c] = static_cast<float>(sum[c]);
    }
  }

  template <int MR, int>
  struct Chains {
    float sum[2][MR][16];  // even k, odd k
    void clear() { __builtin_memset(sum, 0, sizeof(sum)); }

    template <class D>
    void step(const D& decoder, const uint8_t* const (&codes)[1], const float* x) {
      for (int k = 0; k < 4; ++k) {
        float weight[16];
        for (int c = 0; c < 16; ++c) weight[c] = D::value(codes[0][16 * (c / 4) + 8 * (k / 2) + 2 * (c % 4) + k % 2]);
        for (int m = 0; m < MR; ++m) {
          float* chain = sum[k % 2][m];
          const float xk = x[(k / 2 * MR + m) * 2 + k % 2];
          if (decoder.exact_products) {
            for (int c = 0; c < 16; ++c) chain[c] += xk * weight[c];
          } else {
            fused_multiply_add(xk, weight, chain);
          }
        }
      }
    }
    void fold(int, int, const Scale& scale, const float* x_scales, float* totals) const {
      for (int parity = 0; parity < 2; ++parity) {
        for (int m = 0; m < MR; ++m) {
          float* total = totals + m * kTotalsPerRow + 16 * parity;
          for (int c = 0; c < 16; ++c) {
            const float factor = x_scales ? scale.lane[c] * x_scales[m] : scale.lane[c];
            total[c] = __builtin_fmaf(sum[parity][m][c], factor, total[c]);
          }
        }
      }
    }
  };

  // Totals of a row: [even, odd][column].
  static Row row_of(const float* totals) { return add(load(totals), load(totals + 16)); }
  static void clear(float* totals, int64_t rows) {
    for (int64_t i = 0; i < rows * kTotalsPerRow; ++i) totals[i] = 0.0f;
  }

  static void widen(const void* x, FloatType type, int64_t index, int count, float* out) {
    for (int i = 0; i < count; ++i) out[i] = load_float(x, type, index + i);
  }
  // Returns whether every product with a decoded weight is exact in fp32: 11 + 4 bits of mantissa, below 2^119 * 2^9.
  static bool pack_x(const LinearTask& task, int64_t row, int rows, const Unit* units, int unit_count, float* packed) {
    pack_x_pairs<VecScalar>(task, row, rows, units, unit_count, packed);
    if (task.x_type == FloatType::kF32 || unit_count == 0) return false;
    const Unit& last = units[unit_count - 1];
    uint32_t largest = 0;
    for (int64_t i = 0; i < (static_cast<int64_t>(last.x_quad) + last.quads) * rows * 4; ++i) {
      const uint32_t magnitude = float_bits(packed[i]) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    return largest < (119u + 127u) << 23;
  }
};

}  // namespace
}  // namespace blockscale
