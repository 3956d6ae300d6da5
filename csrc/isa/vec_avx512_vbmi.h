// AVX-512 VBMI: 64 codes to two registers of bf16 pairs with 128-entry byte tables, 5 instructions.
#pragma once

#include "isa/vec_avx512.h"

namespace blockscale {
namespace {

template <class F>
struct TableDecoder {
  BLOCKSCALE_INLINE explicit TableDecoder(bool)
      : low0(_mm512_load_si512(F::bf16_low_table())),
        low1(_mm512_load_si512(F::bf16_low_table() + 64)),
        high0(_mm512_load_si512(F::bf16_high_table())),
        high1(_mm512_load_si512(F::bf16_high_table() + 64)) {}

  BLOCKSCALE_INLINE void decode(const uint8_t* codes, __m512i* pair0, __m512i* pair1) const {
    const __m512i code = _mm512_loadu_si512(codes);
    const __m512i low = _mm512_permutex2var_epi8(low0, code, low1);  // looks up bits 0..6; the sign bit is ignored
    const __m512i magnitude = _mm512_permutex2var_epi8(high0, code, high1);
    const __m512i high =
        _mm512_ternarylogic_epi32(magnitude, code, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // a | (b & c)
    *pair0 = _mm512_unpacklo_epi8(low, high);
    *pair1 = _mm512_unpackhi_epi8(low, high);
  }

  __m512i low0, low1, high0, high1;
};

}  // namespace
}  // namespace blockscale
