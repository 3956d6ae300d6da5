// AVX2 with FMA and F16C, in fp32: 4 columns x (even k, odd k) in a register.
//
// 32 codes become bf16 pairs by 4-bit byte shuffles; interleaved with zeros within 128-bit lanes, a k-pair of 8 columns
// is two registers of fp32, and a 64-bit broadcast of a row's pair of x serves both:
//
//   register 0   c0 k0 c0 k1 c1 k0 c1 k1 | c4 k0 c4 k1 c5 k0 c5 k1      register 1   columns 2 3 | 6 7
//
// A strip is covered in two parts of 8 columns, in one where a single row leaves registers for it. Decoding through
// fp16 (a shift and VCVTPH2PS) takes 379 cycles for a unit of 128 k, or 427 with a factor of 2^8; this takes 320.
#pragma once

#include <immintrin.h>

#include "gemm/pack_x.h"
#include "gemm/panel.h"

namespace blockscale {
namespace {

struct VecAvx2 {
  using X = float;
  static constexpr bool kPanels = true;
  static constexpr int kPanelPrefetchBytes = 8192;
  static constexpr int kPanelBlocks = 8;
  static constexpr int kXPerQuadRow = 4;
  static constexpr int kMaxRows = 6;  // 12 chains, 2 decoded registers and x: 15 of 16
  static constexpr int kMaxStrips = 1;
  template <int>
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
    return MR == 1 ? 1 : 2;
  }
  template <int, int>
  static constexpr int prefetch_bytes() {
    return 8192;
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
    // Of columns 8 half .. 8 half + 7.
    BLOCKSCALE_INLINE __m256 of_half(int half) const { return columns ? _mm256_loadu_ps(columns + 8 * half) : value; }
  };

  // 32 codes, 8 columns of a chunk, with 16-entry shuffles: see E4m3NibbleTables.
  template <class F>
  struct Decoder {
    BLOCKSCALE_INLINE explicit Decoder(bool) {}
    BLOCKSCALE_INLINE static __m256i table(const uint8_t* bytes) {
      return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    }
    // weights[2 p + r]: register r of k-pair p.
    BLOCKSCALE_INLINE void decode(const uint8_t* codes, __m256* weights) const {
      const E4m3NibbleTables& tables = F::nibble_tables();
      const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
      const __m256i doubled = _mm256_add_epi8(_mm256_add_epi8(code, code), _mm256_set1_epi8(2));
      const __m256i index = _mm256_avg_epu8(doubled, _mm256_set1_epi8(static_cast<char>(0xed)));
      const __m256i low =
          _mm256_xor_si256(_mm256_and_si256(_mm256_slli_epi16(code, 4), _mm256_set1_epi8(static_cast<char>(0xf0))),
                           _mm256_shuffle_epi8(table(tables.special_low), index));
      const __m256i nibble = _mm256_and_si256(_mm256_srli_epi16(code, 4), _mm256_set1_epi8(15));
      const __m256i high = _mm256_xor_si256(_mm256_shuffle_epi8(table(tables.sign_high), nibble),
                                            _mm256_shuffle_epi8(table(tables.special_high), index));
      BLOCKSCALE_UNROLL
      for (int p = 0; p < 2; ++p) {
        const __m256i pair = p ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
        weights[2 * p] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(_mm256_setzero_si256(), pair));
        weights[2 * p + 1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(_mm256_setzero_si256(), pair));
      }
    }
  };

  // chain = fma(x, weight, chain) in the chain's own register. Given the intrinsic, GCC 12 writes sums over x where x
  // is used last, moves the chains around and spills some of 12: 70 % of peak instead of 98.
  BLOCKSCALE_INLINE static void accumulate(__m256 x, __m256 weight, __m256* chain) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(*chain) : "x"(x), "x"(weight));
  }

  template <int MR, int>
  struct Chains {
    static constexpr int kHalves = 2 / parts<MR>();  // groups of 8 columns in a part
    __m256 chain[kHalves][MR][2];
    BLOCKSCALE_INLINE void clear() {
      BLOCKSCALE_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        BLOCKSCALE_UNROLL
        for (int m = 0; m < MR; ++m) chain[half][m][0] = chain[half][m][1] = _mm256_setzero_ps();
      }
    }
    // One k-pair of a group of 8 columns.
    BLOCKSCALE_INLINE void multiply(int half, __m256 weight0, __m256 weight1, const float* x) {
      BLOCKSCALE_UNROLL
      for (int m = 0; m < MR; ++m) {
        double pair;
        __builtin_memcpy(&pair, x + 2 * m, 8);
        const __m256 xk = _mm256_castpd_ps(_mm256_set1_pd(pair));
        accumulate(xk, weight0, &chain[half][m][0]);
        accumulate(xk, weight1, &chain[half][m][1]);
      }
    }
    template <class D>
    BLOCKSCALE_INLINE void step(const D& decoder, const uint8_t* const (&codes)[1], const float* x) {
      if constexpr (MR <= 3) {
        BLOCKSCALE_UNROLL
        for (int half = 0; half < kHalves; ++half) {
          __m256 weights[4];
          decoder.decode(codes[0] + 32 * half, weights);
          BLOCKSCALE_UNROLL
          for (int p = 0; p < 2; ++p) multiply(half, weights[2 * p], weights[2 * p + 1], x + p * MR * 2);
        }
      } else {
        alignas(32) float panel[32 * kHalves];
        step(decoder, codes[0], x, panel);
      }
    }
    // The same, and keeps the decoded codes.
    template <class D>
    BLOCKSCALE_INLINE void step(const D& decoder, const uint8_t* codes, const float* x, float* panel) {
      BLOCKSCALE_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        __m256 weights[4];
        decoder.decode(codes + 32 * half, weights);
        BLOCKSCALE_UNROLL
        for (int i = 0; i < 4; ++i) _mm256_store_ps(panel + 32 * half + 8 * i, weights[i]);
      }
      __asm__("" : : "r"(panel) : "memory");  // read back: 12 chains leave no registers for 4 decoded ones
      step(panel, x);
    }
    // The same with decoded codes.
    BLOCKSCALE_INLINE void step(const float* panel, const float* x) {
      BLOCKSCALE_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        BLOCKSCALE_UNROLL
        for (int p = 0; p < 2; ++p) {
          const float* weights = panel + 32 * half + 16 * p;
          multiply(half, _mm256_load_ps(weights), _mm256_load_ps(weights + 8), x + p * MR * 2);
        }
      }
    }
    // Totals of a row: by group of 8 columns two registers, as its chains.
    BLOCKSCALE_INLINE void fold(int, int part, const Scale& scale, const float* x_scales, float* totals) const {
      BLOCKSCALE_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        // Of each column once; a chain holds it twice.
        const __m256 columns = scale.of_half(part * kHalves + half);
        const __m256 factors[2] = {_mm256_unpacklo_ps(columns, columns), _mm256_unpackhi_ps(columns, columns)};
        BLOCKSCALE_UNROLL
        for (int r = 0; r < 2; ++r) {
          float* sum = totals + 16 * (part * kHalves + half) + 8 * r;
          if (x_scales) {
            BLOCKSCALE_UNROLL
            for (int m = 0; m < MR; ++m) {
              const __m256 factor = _mm256_mul_ps(factors[r], _mm256_set1_ps(x_scales[m]));
              _mm256_store_ps(sum + 32 * m, _mm256_fmadd_ps(chain[half][m][r], factor, _mm256_load_ps(sum + 32 * m)));
            }
          } else {
            BLOCKSCALE_UNROLL
            for (int m = 0; m < MR; ++m) {
              _mm256_store_ps(sum + 32 * m,
                              _mm256_fmadd_ps(chain[half][m][r], factors[r], _mm256_load_ps(sum + 32 * m)));
            }
          }
        }
      }
    }
  };

  // Even and odd k are added; within each 128-bit lane the columns fall into place.
  BLOCKSCALE_INLINE static Row row_of(const float* totals) {
    Row result;
    BLOCKSCALE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const __m256 a = _mm256_load_ps(totals + 16 * half), b = _mm256_load_ps(totals + 16 * half + 8);
      result.half[half] = _mm256_add_ps(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0)),
                                        _mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
    }
    return result;
  }
  BLOCKSCALE_INLINE static void clear(float* totals, int64_t rows) {
    __m256 zero = _mm256_setzero_ps();
    __asm__("" : "+x"(zero));  // else GCC makes REP STOS of it, which takes longer to start than this takes
    for (int64_t i = 0; i < 4 * rows; ++i) _mm256_store_ps(totals + 8 * i, zero);
  }
  BLOCKSCALE_INLINE static void widen(const void* x, FloatType type, int64_t index, int count, float* out) {
    int i = 0;
    for (; i + 8 <= count; i += 8) {
      __m256 values;
      if (type == FloatType::kF32) {
        values = _mm256_loadu_ps(static_cast<const float*>(x) + index + i);
      } else {
        const __m128i half =
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(x) + index + i));
        values = type == FloatType::kBf16 ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))
                                          : _mm256_cvtph_ps(half);
      }
      _mm256_storeu_ps(out + i, values);
    }
    for (; i < count; ++i) out[i] = load_float(x, type, index + i);
  }
  static bool pack_x(const LinearTask& task, int64_t row, int rows, const Unit* units, int unit_count, float* packed) {
    pack_x_pairs<VecAvx2>(task, row, rows, units, unit_count, packed);
    return true;
  }
};

}  // namespace
}  // namespace blockscale
