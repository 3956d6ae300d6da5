// Kernels for bf16 x on AVX-512 with VBMI and BF16: Zen 4, Sapphire Rapids and later. Products and sums are VDPBF16PS:
// pairs of k in one chain per output, subnormal inputs and results flushed to zero, whatever MXCSR says.
#include "isa/vec_avx512_vbmi.h"

namespace blockscale {
namespace {

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

struct VecAvx512Bf16 : RowsAvx512 {
  static constexpr bool kPanels = false;
  using X = uint32_t;  // two bf16 of adjacent k
  static constexpr int kXPerQuadRow = 2;
  static constexpr int kMaxRows = 12;
  static constexpr int kMaxStrips = 4;
  static constexpr int kTotalsPerRow = 16;
  // VDPBF16PS can start twice a cycle and so can loads, so each x broadcast must meet more than one strip. On Zen 5, of
  // the peak at 8 rows: 0.72 with one strip, 0.91 with two. With 3 or 4 rows, four strips: 36.7 GB/s of codes from DRAM
  // at 4 rows, 33 with two strips, 32 with one. With 1 or 2 rows one strip: a single stream of codes is read fastest
  // (41 GB/s at 1 row, 35 with four streams).
  template <int MR>
  static constexpr int strips() {
    return MR <= 2 ? 1 : MR <= 4 ? 4 : 2;
  }
  // Units of one strip side by side are the independent chains that one strip of few rows lacks.
  template <int MR, int NS>
  static constexpr int side_by_side() {
    return NS == 1 && MR <= 8 ? 2 : 1;
  }
  template <int MR>
  static constexpr int parts() {
    return 1;
  }
  // In each of the strips' streams. M = 1, one strip: 29, 34, 40, 41, 37 GB/s with 2, 4, 6, 8, 16 KiB; several streams
  // share L1 and do best with 8 KiB in all.
  template <int, int NS>
  static constexpr int prefetch_bytes() {
    return 8192 / NS;
  }

  template <class F>
  using Decoder = TableDecoder<F>;

  template <int MR, int NS>
  struct Chains {
    __m512 chain[NS][MR];
    BLOCKSCALE_INLINE void clear() {
      BLOCKSCALE_UNROLL
      for (int s = 0; s < NS; ++s) {
        BLOCKSCALE_UNROLL
        for (int m = 0; m < MR; ++m) chain[s][m] = _mm512_setzero_ps();
      }
    }
    template <class D>
    BLOCKSCALE_INLINE void step(const D& decoder, const uint8_t* const (&codes)[NS], const uint32_t* x) {
      __m512i pair[NS][2];
      BLOCKSCALE_UNROLL
      for (int s = 0; s < NS; ++s) decoder.decode(codes[s], &pair[s][0], &pair[s][1]);
      BLOCKSCALE_UNROLL
      for (int p = 0; p < 2; ++p) {
        BLOCKSCALE_UNROLL
        for (int m = 0; m < MR; ++m) {
          const __m512i xk = _mm512_set1_epi32(static_cast<int>(x[p * MR + m]));
          BLOCKSCALE_UNROLL
          for (int s = 0; s < NS; ++s) {
            chain[s][m] =
                _mm512_dpbf16_ps(chain[s][m], reinterpret_cast<__m512bh>(pair[s][p]), reinterpret_cast<__m512bh>(xk));
          }
        }
      }
    }
    BLOCKSCALE_INLINE void fold(int s, int, const Scale& scale, const float* x_scales, float* totals) const {
      BLOCKSCALE_UNROLL
      for (int m = 0; m < MR; ++m) {
        float* total = totals + 16 * m;
        _mm512_store_ps(total, _mm512_fmadd_ps(chain[s][m], scale.of_row(x_scales, m), _mm512_load_ps(total)));
      }
    }
  };

  BLOCKSCALE_INLINE static Row row_of(const float* totals) { return _mm512_load_ps(totals); }
  BLOCKSCALE_INLINE static void clear(float* totals, int64_t rows) { clear_rows(totals, rows); }

  // bf16 pairs of one row block, [quad][pair][row]; k outside a unit is zero in that unit's chunks.
  static bool pack_x(const LinearTask& task, int64_t row, int rows, const Unit* units, int unit_count,
                     uint32_t* packed) {
    for (int u = 0; u < unit_count; ++u) {
      const Unit& unit = units[u];
      uint32_t* out = packed + static_cast<int64_t>(unit.x_quad) * rows * kXPerQuadRow;
      const uint16_t* in = static_cast<const uint16_t*>(task.x) + row * task.x_stride + unit.k_begin;
      const int lead = static_cast<int>(unit.k_begin % 4);
      pack_rows(out, rows, 2 * unit.quads, [&](int m, int pair) {
        // 32 values from k = 2 * pair - lead of the unit on, zero before its first and after its last.
        const int k = 2 * pair - lead;
        const int left = unit.depth - k;
        __mmask32 present = left >= 32 ? ~0u : (1u << left) - 1;
        if (k < 0) present &= ~0u << -k;
        return _mm512_maskz_loadu_epi16(present, in + m * task.x_stride + k);
      });
    }
    return true;
  }
};

}  // namespace

extern const KernelTable kernels_avx512_bf16;
constexpr KernelTable kernels_avx512_bf16 = {
    /*bf16_x_only=*/true,
    VecAvx512Bf16::kMaxRows,
    /*preferred_rows=*/10,
    /*row_granule=*/1,
    "10 rows x 2 strips are 20 chains of 32 registers, beside 4 tables, 4 decoded and x; 12 rows spill: 0.91 of peak, "
    "not 0.92",
    {
#define BLOCKSCALE_FORMAT(type, dtype) run_linear<VecAvx512Bf16, type>,
#include "formats/formats.inc"
#undef BLOCKSCALE_FORMAT
    },
    /*quant=*/{}};

}  // namespace blockscale
