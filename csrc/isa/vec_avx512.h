// AVX-512 (F, BW, DQ, VL): 16 columns in a register, in fp32; decoding with 4-bit byte shuffles.
//
// A decoded chunk is two registers of bf16 pairs, dword n = column n. Interleaved with zeros within 128-bit lanes, a
// k-pair of the strip is two registers of fp32:
//
//   dword        0     1     2     3     | 4     5     6     7     | 8 ..
//   register 0   c0 k0 c0 k1 c1 k0 c1 k1 | c4 k0 c4 k1 c5 k0 c5 k1 | columns 8 9, 12 13
//   register 1   c2 k0 c2 k1 c3 k0 c3 k1 | c6 k0 ..                | columns 10 11, 14 15
//
// so one 64-bit broadcast of a row's pair of x serves two multiplications. A load of x for each of them (even and odd k
// in registers of their own, x as an embedded broadcast) is bound by two loads a cycle: 250 GFLOP/s against 267 of 281
// for 8 rows in L1 (Zen 5).
#pragma once

#include <immintrin.h>

#include "gemm/pack_x.h"
#include "gemm/panel.h"

namespace blockscale {
namespace {

// 16 results of a row; what the fp32 and the bf16 kernels share.
struct RowsAvx512 {
  using Row = __m512;
  BLOCKSCALE_INLINE static Row load(const float* values) { return _mm512_loadu_ps(values); }
  BLOCKSCALE_INLINE static Row add(Row a, Row b) { return _mm512_add_ps(a, b); }

  // As float_to_bf16: the conversion instruction would flush subnormals.
  BLOCKSCALE_INLINE static __m256i to_bf16(Row row) {
    const __m512i bits = _mm512_castps_si512(row);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i even = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(row, row, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40)));
  }

  BLOCKSCALE_INLINE static void store(void* out, FloatType type, int64_t index, Row row) {
    if (type == FloatType::kF32) {
      _mm512_storeu_ps(static_cast<float*>(out) + index, row);
    } else {
      const __m256i half =
          type == FloatType::kBf16 ? to_bf16(row) : _mm512_cvtps_ph(row, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out) + index), half);
    }
  }

  struct Scale {
    __m512 value;
    BLOCKSCALE_INLINE static Scale of_strip(float scale) { return {_mm512_set1_ps(scale)}; }
    BLOCKSCALE_INLINE static Scale of_columns(const float* scales) { return {_mm512_loadu_ps(scales)}; }
    // Times the scale of row m of x, if there are any.
    BLOCKSCALE_INLINE __m512 of_row(const float* x_scales, int m) const {
      return x_scales ? _mm512_mul_ps(value, _mm512_set1_ps(x_scales[m])) : value;
    }
  };

  BLOCKSCALE_INLINE static void clear_rows(float* totals, int64_t rows) {
    __m512 zero = _mm512_setzero_ps();
    __asm__("" : "+v"(zero));  // else GCC makes REP STOS of it, which takes longer to start than this takes
    for (int64_t i = 0; i < rows; ++i) _mm512_store_ps(totals + 16 * i, zero);
  }

  static void widen(const void* x, FloatType type, int64_t index, int count, float* out) {
    int i = 0;
    for (; i + 16 <= count; i += 16) {
      __m512 values;
      if (type == FloatType::kF32) {
        values = _mm512_loadu_ps(static_cast<const float*>(x) + index + i);
      } else {
        const __m256i half =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(x) + index + i));
        values = type == FloatType::kBf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))
                                          : _mm512_cvtph_ps(half);
      }
      _mm512_storeu_ps(out + i, values);
    }
    for (; i < count; ++i) out[i] = load_float(x, type, index + i);
  }
};

// 64 codes to two registers of bf16 pairs with 16-entry shuffles, 13 instructions: see E4m3NibbleTables.
template <class F>
struct NibbleDecoder {
  BLOCKSCALE_INLINE explicit NibbleDecoder(bool) {
    const E4m3NibbleTables& tables = F::nibble_tables();
    sign_high = broadcast(tables.sign_high);
    special_high = broadcast(tables.special_high);
    special_low = broadcast(tables.special_low);
  }
  BLOCKSCALE_INLINE static __m512i broadcast(const uint8_t* table) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  }

  BLOCKSCALE_INLINE void decode(const uint8_t* codes, __m512i* pair0, __m512i* pair1) const {
    const __m512i code = _mm512_loadu_si512(codes);
    const __m512i doubled = _mm512_add_epi8(_mm512_add_epi8(code, code), _mm512_set1_epi8(2));
    const __m512i index = _mm512_avg_epu8(doubled, _mm512_set1_epi8(static_cast<char>(0xed)));
    // (code << 4) & 0xf0 ^ table
    const __m512i low = _mm512_ternarylogic_epi32(_mm512_slli_epi16(code, 4), _mm512_set1_epi8(static_cast<char>(0xf0)),
                                                  _mm512_shuffle_epi8(special_low, index), 0x6a);
    const __m512i nibble = _mm512_and_si512(_mm512_srli_epi16(code, 4), _mm512_set1_epi8(15));
    const __m512i high =
        _mm512_xor_si512(_mm512_shuffle_epi8(sign_high, nibble), _mm512_shuffle_epi8(special_high, index));
    *pair0 = _mm512_unpacklo_epi8(low, high);
    *pair1 = _mm512_unpackhi_epi8(low, high);
  }

  __m512i sign_high, special_high, special_low;
};

// Panels: whether row blocks share decoded codes; it pays where storing and loading them costs less than decoding.
template <template <class> class StripDecoder, bool Panels>
struct VecAvx512 : RowsAvx512 {
  using X = float;
  static constexpr bool kPanels = Panels;
  static constexpr int kPanelPrefetchBytes = 8192;
  static constexpr int kPanelBlocks = 4;
  static constexpr int kXPerQuadRow = 4;
  static constexpr int kMaxRows = 11;  // 22 chains, 4 decoded registers, decoder tables, x: 32; totals live in L1
  static constexpr int kMaxStrips = 1;
  template <int>
  static constexpr int strips() {
    return 1;
  }
  // From three rows on there are six independent chains.
  template <int MR, int NS>
  static constexpr int side_by_side() {
    return MR <= 2 ? 2 : 1;
  }
  static constexpr int kTotalsPerRow = 32;
  template <int MR>
  static constexpr int parts() {
    return 1;
  }
  template <int, int>
  static constexpr int prefetch_bytes() {
    return 8192;
  }

  template <class F>
  struct Decoder {
    BLOCKSCALE_INLINE explicit Decoder(bool exact_products) : strip(exact_products) {}
    // weights[2 p + r]: register r of k-pair p.
    BLOCKSCALE_INLINE void decode(const uint8_t* codes, __m512* weights) const {
      __m512i pair[2];
      strip.decode(codes, &pair[0], &pair[1]);
      BLOCKSCALE_UNROLL
      for (int p = 0; p < 2; ++p) {
        weights[2 * p] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_setzero_si512(), pair[p]));
        weights[2 * p + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_setzero_si512(), pair[p]));
      }
    }
    StripDecoder<F> strip;
  };

  // chain = fma(x, weight, chain) in the chain's own register. Given the intrinsic, GCC 12 writes sums over x where x
  // is used last, and moves chains and hoisted loads around.
  BLOCKSCALE_INLINE static void accumulate(__m512 x, __m512 weight, __m512* chain) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(*chain) : "v"(x), "v"(weight));
  }

  template <int MR, int>
  struct Chains {
    __m512 chain[MR][2];
    BLOCKSCALE_INLINE void clear() {
      BLOCKSCALE_UNROLL
      for (int m = 0; m < MR; ++m) chain[m][0] = chain[m][1] = _mm512_setzero_ps();
    }
    BLOCKSCALE_INLINE void multiply(const __m512* weights, const float* x) {
      BLOCKSCALE_UNROLL
      for (int p = 0; p < 2; ++p) {
        BLOCKSCALE_UNROLL
        for (int m = 0; m < MR; ++m) {
          double pair;
          __builtin_memcpy(&pair, x + (p * MR + m) * 2, 8);
          const __m512 xk = _mm512_castpd_ps(_mm512_set1_pd(pair));
          accumulate(xk, weights[2 * p], &chain[m][0]);
          accumulate(xk, weights[2 * p + 1], &chain[m][1]);
        }
      }
    }
    template <class D>
    BLOCKSCALE_INLINE void step(const D& decoder, const uint8_t* const (&codes)[1], const float* x) {
      __m512 weights[4];
      decoder.decode(codes[0], weights);
      multiply(weights, x);
    }
    // The same, and keeps the decoded codes.
    template <class D>
    BLOCKSCALE_INLINE void step(const D& decoder, const uint8_t* codes, const float* x, float* panel) {
      __m512 weights[4];
      decoder.decode(codes, weights);
      BLOCKSCALE_UNROLL
      for (int i = 0; i < 4; ++i) _mm512_store_ps(panel + 16 * i, weights[i]);
      multiply(weights, x);
    }
    // The same with decoded codes.
    BLOCKSCALE_INLINE void step(const float* panel, const float* x) {
      __m512 weights[4];
      BLOCKSCALE_UNROLL
      for (int i = 0; i < 4; ++i) weights[i] = _mm512_load_ps(panel + 16 * i);
      multiply(weights, x);
    }
    // Totals of a row: 2 registers, as its chains.
    BLOCKSCALE_INLINE void fold(int, int, const Scale& scale, const float* x_scales, float* totals) const {
      // Of each column once; a chain holds it twice.
      const __m512 factors[2] = {_mm512_unpacklo_ps(scale.value, scale.value),
                                 _mm512_unpackhi_ps(scale.value, scale.value)};
      BLOCKSCALE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float* sum = totals + 16 * r;
        if (x_scales) {
          BLOCKSCALE_UNROLL
          for (int m = 0; m < MR; ++m) {
            const __m512 factor = _mm512_mul_ps(factors[r], _mm512_set1_ps(x_scales[m]));
            _mm512_store_ps(sum + 32 * m, _mm512_fmadd_ps(chain[m][r], factor, _mm512_load_ps(sum + 32 * m)));
          }
        } else {
          BLOCKSCALE_UNROLL
          for (int m = 0; m < MR; ++m) {
            _mm512_store_ps(sum + 32 * m, _mm512_fmadd_ps(chain[m][r], factors[r], _mm512_load_ps(sum + 32 * m)));
          }
        }
      }
    }
  };

  // Even and odd k are added; within each 128-bit lane the columns fall into place.
  BLOCKSCALE_INLINE static Row row_of(const float* totals) {
    const __m512 a = _mm512_load_ps(totals), b = _mm512_load_ps(totals + 16);
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0)),
                         _mm512_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
  }
  BLOCKSCALE_INLINE static void clear(float* totals, int64_t rows) { clear_rows(totals, 2 * rows); }

  static bool pack_x(const LinearTask& task, int64_t row, int rows, const Unit* units, int unit_count, float* packed) {
    pack_x_pairs<VecAvx512>(task, row, rows, units, unit_count, packed);
    return true;
  }
};

}  // namespace
}  // namespace blockscale
