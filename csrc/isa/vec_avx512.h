// AVX-512 (F, BW, DQ, VL): 16 columns in a register, in fp32; decoding with 4-bit byte shuffles.
//
// A decoded chunk is two registers of bf16 pairs, dword n = column n: bits << 16 is the even k as fp32, bits &
// 0xffff0000 the odd one. Keeping even and odd k apart lets each multiply take x as an embedded broadcast: no shuffle
// and no separate load of x.
#pragma once

#include <immintrin.h>

#include "gemm/microkernel.h"

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

// Transposes 16 rows of 16 dwords.
BLOCKSCALE_INLINE void transpose_dwords(__m512i (&row)[16]) {
  __m512i t[16];
  BLOCKSCALE_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  BLOCKSCALE_UNROLL
  for (int i = 0; i < 16; i += 4) {
    row[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    row[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    row[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    row[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // row[4 i + j] holds dword 4 l + j of rows 4 i .. 4 i + 3 in lane l.
  BLOCKSCALE_UNROLL
  for (int j = 0; j < 4; ++j) {
    const __m512i low02 = _mm512_shuffle_i32x4(row[j], row[4 + j], 0x88),
                  low13 = _mm512_shuffle_i32x4(row[j], row[4 + j], 0xdd);
    const __m512i high02 = _mm512_shuffle_i32x4(row[8 + j], row[12 + j], 0x88),
                  high13 = _mm512_shuffle_i32x4(row[8 + j], row[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(low02, high02, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(low02, high02, 0xdd);
    t[4 + j] = _mm512_shuffle_i32x4(low13, high13, 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(low13, high13, 0xdd);
  }
  BLOCKSCALE_UNROLL
  for (int i = 0; i < 16; ++i) row[i] = t[i];
}

// out[i * rows + m] = dword i of row m, for i < count and m < rows <= 16; load(m, i) gives dwords i .. i + 15 of row m.
template <class Load>
BLOCKSCALE_INLINE void pack_rows(uint32_t* out, int rows, int count, Load load) {
  if (rows == 1) {
    for (int i = 0; i < count; i += 16) {
      const __mmask16 present = static_cast<__mmask16>(count - i >= 16 ? 0xffff : (1u << (count - i)) - 1);
      _mm512_mask_storeu_epi32(out + i, present, load(0, i));
    }
    return;
  }
  const __mmask16 row_mask = static_cast<__mmask16>((1u << rows) - 1);
  for (int i = 0; i < count; i += 16) {
    __m512i row[16];
    BLOCKSCALE_UNROLL
    for (int m = 0; m < 16; ++m) row[m] = m < rows ? load(m, i) : _mm512_setzero_si512();
    transpose_dwords(row);
    BLOCKSCALE_UNROLL
    for (int j = 0; j < 16; ++j) {
      if (i + j < count) _mm512_mask_storeu_epi32(out + static_cast<int64_t>(i + j) * rows, row_mask, row[j]);
    }
  }
}

// 64 codes to two registers of bf16 pairs with 16-entry shuffles: 14 instructions.
template <class F>
struct NibbleDecoder {
  BLOCKSCALE_INLINE explicit NibbleDecoder(bool) {
    const E4m3NibbleTables& tables = F::nibble_tables();
    sign_high = broadcast(tables.sign_high);
    small_high = broadcast(tables.small_high);
    small_low = broadcast(tables.small_low);
  }
  BLOCKSCALE_INLINE static __m512i broadcast(const uint8_t* table) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  }

  BLOCKSCALE_INLINE void decode(const uint8_t* codes, __m512i* pair0, __m512i* pair1) const {
    const __m512i code = _mm512_loadu_si512(codes);
    const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi8(0x7f));
    // Bit 7 of the index is set unless the code is below 16, and a shuffle by such an index gives 0: no blend needed.
    const __m512i index = _mm512_add_epi8(magnitude, _mm512_set1_epi8(0x70));
    // (code << 4) & 0xf0 ^ table, and the same for the high byte's nibble.
    const __m512i low = _mm512_ternarylogic_epi32(_mm512_slli_epi16(code, 4), _mm512_set1_epi8(static_cast<char>(0xf0)),
                                                  _mm512_shuffle_epi8(small_low, index), 0x6a);
    const __m512i nibble = _mm512_and_si512(_mm512_srli_epi16(code, 4), _mm512_set1_epi8(15));
    __m512i high = _mm512_or_si512(_mm512_shuffle_epi8(sign_high, nibble), _mm512_shuffle_epi8(small_high, index));
    const __mmask64 nan = _mm512_cmpeq_epi8_mask(magnitude, _mm512_set1_epi8(0x7f));
    high = _mm512_mask_blend_epi8(nan, high, _mm512_or_si512(high, _mm512_set1_epi8(0x7f)));
    *pair0 = _mm512_unpacklo_epi8(low, high);
    *pair1 = _mm512_unpackhi_epi8(low, high);
  }

  __m512i sign_high, small_high, small_low;
};

template <template <class> class StripDecoder>
struct VecAvx512 : RowsAvx512 {
  using X = float;
  static constexpr int kXPerQuadRow = 4;
  // 12 rows: 24 chains, two decoded registers of two k each, decoder tables; totals live in L1.
  static constexpr int kMaxRows = 12;
  static constexpr int kMaxStrips = 1;
  template <int MR>
  static constexpr int strips() {
    return 1;
  }
  // From two rows on there are four independent chains.
  template <int MR, int NS>
  static constexpr int side_by_side() {
    return MR == 1 ? 2 : 1;
  }
  static constexpr int kTotalsPerRow = 32;
  template <int MR>
  static constexpr int parts() {
    return 1;
  }
  template <int MR, int>
  static constexpr int prefetch_bytes() {
    return MR == 1 ? 8192 : MR == 2 ? 6144 : 3072;
  }

  template <class F>
  using Decoder = StripDecoder<F>;

  template <int MR, int>
  struct Chains {
    __m512 even[MR], odd[MR];
    BLOCKSCALE_INLINE void clear() {
      BLOCKSCALE_UNROLL
      for (int m = 0; m < MR; ++m) even[m] = odd[m] = _mm512_setzero_ps();
    }
    template <class D>
    BLOCKSCALE_INLINE void step(const D& decoder, const uint8_t* const (&codes)[1], const float* x) {
      __m512i pair[2];
      decoder.decode(codes[0], &pair[0], &pair[1]);
      BLOCKSCALE_UNROLL
      for (int p = 0; p < 2; ++p) {
        const __m512 w_even = _mm512_castsi512_ps(_mm512_slli_epi32(pair[p], 16));
        const __m512 w_odd =
            _mm512_castsi512_ps(_mm512_and_si512(pair[p], _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
        BLOCKSCALE_UNROLL
        for (int m = 0; m < MR; ++m) {
          even[m] = _mm512_fmadd_ps(_mm512_set1_ps(x[(2 * p) * MR + m]), w_even, even[m]);
          odd[m] = _mm512_fmadd_ps(_mm512_set1_ps(x[(2 * p + 1) * MR + m]), w_odd, odd[m]);
        }
      }
    }
    BLOCKSCALE_INLINE void fold(int, int, const Scale& scale, const float* x_scales, float* totals) const {
      BLOCKSCALE_UNROLL
      for (int m = 0; m < MR; ++m) {
        const __m512 factor = scale.of_row(x_scales, m);
        float *total_even = totals + 16 * m, *total_odd = totals + 16 * (MR + m);
        _mm512_store_ps(total_even, _mm512_fmadd_ps(even[m], factor, _mm512_load_ps(total_even)));
        _mm512_store_ps(total_odd, _mm512_fmadd_ps(odd[m], factor, _mm512_load_ps(total_odd)));
      }
    }
  };

  // Totals are [even, odd][row][column].
  template <int MR>
  BLOCKSCALE_INLINE static void clear(float* totals) {
    BLOCKSCALE_UNROLL
    for (int m = 0; m < 2 * MR; ++m) _mm512_store_ps(totals + 16 * m, _mm512_setzero_ps());
  }
  template <int MR>
  BLOCKSCALE_INLINE static Row row(const float* totals, int m) {
    return _mm512_add_ps(_mm512_load_ps(totals + 16 * m), _mm512_load_ps(totals + 16 * (MR + m)));
  }

  BLOCKSCALE_INLINE static int64_t x_index(int k, int rows, int m) { return static_cast<int64_t>(k) * rows + m; }
  static bool pack_x(const LinearTask& task, int64_t row, int rows, const Unit* units, int unit_count, float* packed) {
    return pack_x_as_float<VecAvx512>(task, row, rows, units, unit_count, packed);
  }
};

}  // namespace
}  // namespace blockscale
