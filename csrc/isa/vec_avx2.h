// AVX2 with FMA and F16C, in fp32: 4 columns x (even k, odd k) in a register.
//
// Codes become fp16 by a shift, the conversion instruction widens them, and 8 bytes of a chunk (one k-pair of 4
// columns) give one register (c0 k0, c0 k1, c1 k0, c1 k1, ...), which is multiplied by the pair (x k0, x k1) broadcast
// as 64 bits. A strip is covered in parts: two of 8 columns, or from 7 rows on four of 4 columns, so that 16 registers
// hold the chains.
#pragma once

#include <immintrin.h>

#include "gemm/microkernel.h"

namespace blockscale {
namespace {

struct VecAvx2 {
  using X = float;
  static constexpr int kXPerQuadRow = 4;
  static constexpr int kMaxRows = 8;
  static constexpr int kMaxStrips = 1;
  template <int MR>
  static constexpr int strips() {
    return 1;
  }
  template <int MR, int NS>
  static constexpr int side_by_side() {
    return MR == 1 ? 2 : 1;
  }
  static constexpr int kTotalsPerRow = 32;
  template <int MR>
  static constexpr int parts() {
    return MR <= 6 ? 2 : 4;
  }
  template <int MR, int>
  static constexpr int prefetch_bytes() {
    return MR == 1 ? 8192 : MR <= 8 ? 6144 : 2048;
  }

  struct Row {
    __m256 half[2];
  };
  BLOCKSCALE_INLINE static Row load(const float* values) {
    return {{_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)}};
  }
  BLOCKSCALE_INLINE static Row add(const Row& a, const Row& b) {
    return {{_mm256_add_ps(a.half[0], b.half[0]), _mm256_add_ps(a.half[1], b.half[1])}};
  }

  // As float_to_bf16.
  BLOCKSCALE_INLINE static __m256i to_bf16(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i even = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
  }

  BLOCKSCALE_INLINE static void store(void* out, FloatType type, int64_t index, const Row& row) {
    if (type == FloatType::kF32) {
      _mm256_storeu_ps(static_cast<float*>(out) + index, row.half[0]);
      _mm256_storeu_ps(static_cast<float*>(out) + index + 8, row.half[1]);
      return;
    }
    __m128i* target = reinterpret_cast<__m128i*>(static_cast<uint16_t*>(out) + index);
    if (type == FloatType::kBf16) {
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(to_bf16(row.half[0]), to_bf16(row.half[1])),
                                                      _MM_SHUFFLE(3, 1, 2, 0));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), packed);
    } else {
      _mm_storeu_si128(target, _mm256_cvtps_ph(row.half[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
      _mm_storeu_si128(target + 1, _mm256_cvtps_ph(row.half[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }

  struct Scale {
    __m256 value;          // of the whole strip
    const float* columns;  // or one per column
    BLOCKSCALE_INLINE static Scale of_strip(float scale) { return {_mm256_set1_ps(scale), nullptr}; }
    BLOCKSCALE_INLINE static Scale of_columns(const float* scales) { return {_mm256_setzero_ps(), scales}; }
    // Scales of columns 4*lane .. 4*lane+3, each twice: for even and odd k.
    BLOCKSCALE_INLINE __m256 of_lane(int lane) const {
      if (!columns) return value;
      return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(columns + 4 * lane)),
                                      _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
    }
  };

  template <class F>
  struct Decoder {
    BLOCKSCALE_INLINE explicit Decoder(bool) {}
    // 16 codes: k-pair 0 and k-pair 1 of 4 columns. The code's exponent and mantissa, shifted to bits 7..13 of fp16,
    // are its value times 2^-8; bit 14 is a copy of the sign to be cleared, except for NaN (0x7f), where adding 0x80
    // carries into it and it is to be set. Multiplying by 2^8 here is exact; leaving it to the chain would lose
    // products near the smallest subnormal.
    BLOCKSCALE_INLINE void decode(const uint8_t* codes, __m256* pair0, __m256* pair1) const {
      const __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
      const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(code), 7);
      const __m256i wrong =
          _mm256_and_si256(_mm256_add_epi16(shifted, _mm256_set1_epi16(0x80)), _mm256_set1_epi16(0x4000));
      const __m256i half = _mm256_xor_si256(shifted, wrong);
      const __m256 unscale = _mm256_set1_ps(256.0f);
      *pair0 = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), unscale);
      *pair1 = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), unscale);
    }
  };

  template <int MR, int>
  struct Chains {
    static constexpr int kLanes = 4 / parts<MR>();  // groups of 4 columns in a part
    __m256 chain[MR][kLanes];
    BLOCKSCALE_INLINE void clear() {
      BLOCKSCALE_UNROLL
      for (int m = 0; m < MR; ++m) {
        BLOCKSCALE_UNROLL
        for (int lane = 0; lane < kLanes; ++lane) chain[m][lane] = _mm256_setzero_ps();
      }
    }
    template <class D>
    BLOCKSCALE_INLINE void step(const D& decoder, const uint8_t* const (&codes)[1], const float* x) {
      BLOCKSCALE_UNROLL
      for (int lane = 0; lane < kLanes; ++lane) {
        __m256 pair[2];
        decoder.decode(codes[0] + 16 * lane, &pair[0], &pair[1]);
        BLOCKSCALE_UNROLL
        for (int p = 0; p < 2; ++p) {
          BLOCKSCALE_UNROLL
          for (int m = 0; m < MR; ++m) {
            const __m256 xk =
                _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(x + (p * MR + m) * 2)));
            chain[m][lane] = _mm256_fmadd_ps(xk, pair[p], chain[m][lane]);
          }
        }
      }
    }
    BLOCKSCALE_INLINE void fold(int, int part, const Scale& scale, const float* x_scales, float* totals) const {
      BLOCKSCALE_UNROLL
      for (int lane = 0; lane < kLanes; ++lane) {
        const __m256 factor = scale.of_lane(part * kLanes + lane);
        BLOCKSCALE_UNROLL
        for (int m = 0; m < MR; ++m) {
          float* total = totals + (4 * m + part * kLanes + lane) * 8;
          const __m256 row_factor = x_scales ? _mm256_mul_ps(factor, _mm256_set1_ps(x_scales[m])) : factor;
          _mm256_store_ps(total, _mm256_fmadd_ps(chain[m][lane], row_factor, _mm256_load_ps(total)));
        }
      }
    }
  };

  // Totals are, by row and group of 4 columns, (even, odd) of each column.
  template <int MR>
  BLOCKSCALE_INLINE static void clear(float* totals) {
    BLOCKSCALE_UNROLL
    for (int m = 0; m < 4 * MR; ++m) _mm256_store_ps(totals + 8 * m, _mm256_setzero_ps());
  }
  template <int>
  BLOCKSCALE_INLINE static Row row(const float* totals, int m) {
    Row result;
    BLOCKSCALE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float* quarter = totals + (4 * m + 2 * half) * 8;
      const __m256 a = _mm256_load_ps(quarter), b = _mm256_load_ps(quarter + 8);
      const __m256 even = _mm256_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0));
      const __m256 odd = _mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1));
      const __m256d sum = _mm256_castps_pd(_mm256_add_ps(even, odd));  // 64-bit pieces: columns 01, 45, 23, 67
      result.half[half] = _mm256_castpd_ps(_mm256_permute4x64_pd(sum, _MM_SHUFFLE(3, 1, 2, 0)));
    }
    return result;
  }

  BLOCKSCALE_INLINE static int64_t x_index(int k, int rows, int m) {
    return (static_cast<int64_t>(k / 2) * rows + m) * 2 + k % 2;
  }
  static void widen(const void* x, FloatType type, int64_t index, int count, float* out) {
    int i = 0;
    if (type == FloatType::kF16) {
      for (; i + 8 <= count; i += 8) {
        const __m128i half =
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(x) + index + i));
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
      }
    }
    for (; i < count; ++i) out[i] = load_float(x, type, index + i);
  }
  static bool pack_x(const LinearTask& task, int64_t row, int rows, const Unit* units, int unit_count, float* packed) {
    return pack_x_as_float<VecAvx2>(task, row, rows, units, unit_count, packed);
  }
};

}  // namespace
}  // namespace blockscale
