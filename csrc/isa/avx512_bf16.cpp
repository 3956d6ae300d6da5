// Kernels for bf16 x on AVX-512 with VBMI and BF16: Zen 4, Sapphire Rapids and later. Products and sums are VDPBF16PS:
// pairs of k in one chain per output, subnormal inputs and results flushed to zero, whatever MXCSR says.
#include "isa/vec_avx512_vbmi.h"

namespace blockscale {
namespace {

struct VecAvx512Bf16 : RowsAvx512 {
  using X = uint32_t;  // two bf16 of adjacent k
  static constexpr int kXPerQuadRow = 2;
  // Up to 16 rows in one pass: reading the strip once beats the spilled totals. 12 rows fill the registers exactly:
  // 12 chains, 12 totals, 4 tables, 2 decoded of 32.
  static constexpr int kMaxRows = 16;
  static constexpr int kSideBySideRows = 8;
  static constexpr int kTotalsPerRow = 16;
  template <int MR>
  static constexpr int parts() {
    return 1;
  }
  template <int MR>
  static constexpr int prefetch_bytes() {
    return MR == 1 ? 8192 : MR <= 8 ? 6144 : 2048;
  }

  template <class F>
  using Decoder = TableDecoder<F>;

  template <int MR>
  struct Chains {
    __m512 chain[MR];
    BLOCKSCALE_INLINE void clear() {
      BLOCKSCALE_UNROLL
      for (int m = 0; m < MR; ++m) chain[m] = _mm512_setzero_ps();
    }
    template <class D>
    BLOCKSCALE_INLINE void step(const D& decoder, const uint8_t* codes, const uint32_t* x) {
      __m512i pair[2];
      decoder.decode(codes, &pair[0], &pair[1]);
      BLOCKSCALE_UNROLL
      for (int p = 0; p < 2; ++p) {
        BLOCKSCALE_UNROLL
        for (int m = 0; m < MR; ++m) {
          chain[m] = _mm512_dpbf16_ps(chain[m], reinterpret_cast<__m512bh>(pair[p]),
                                      reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x[p * MR + m]))));
        }
      }
    }
  };

  template <int MR>
  struct Totals {
    __m512 total[MR];
    BLOCKSCALE_INLINE void clear() {
      BLOCKSCALE_UNROLL
      for (int m = 0; m < MR; ++m) total[m] = _mm512_setzero_ps();
    }
    BLOCKSCALE_INLINE void load(const float* carry) {
      BLOCKSCALE_UNROLL
      for (int m = 0; m < MR; ++m) total[m] = _mm512_loadu_ps(carry + 16 * m);
    }
    BLOCKSCALE_INLINE void store(float* carry) const {
      BLOCKSCALE_UNROLL
      for (int m = 0; m < MR; ++m) _mm512_storeu_ps(carry + 16 * m, total[m]);
    }
    BLOCKSCALE_INLINE void fold(int, const Chains<MR>& chains, const Scale& scale, const float* x_scales) {
      BLOCKSCALE_UNROLL
      for (int m = 0; m < MR; ++m) total[m] = _mm512_fmadd_ps(chains.chain[m], scale.of_row(x_scales, m), total[m]);
    }
    BLOCKSCALE_INLINE Row row(int m) const { return total[m]; }
  };

  // bf16 pairs of one row block, [quad][pair][row]; k outside a unit is zero in that unit's chunks.
  static bool pack_x(const LinearTask& task, int64_t row, int rows, const Unit* units, int unit_count,
                     uint32_t* packed) {
    for (int u = 0; u < unit_count; ++u) {
      const Unit& unit = units[u];
      uint32_t* out = packed + static_cast<int64_t>(unit.x_quad) * rows * kXPerQuadRow;
      for (int m = 0; m < rows; ++m) {
        uint16_t values[kUnitK + 8] = {};
        __builtin_memcpy(values + unit.k_begin % 4,
                         static_cast<const uint16_t*>(task.x) + (row + m) * task.x_stride + unit.k_begin,
                         static_cast<size_t>(unit.depth) * 2);
        for (int pair = 0; pair < 2 * unit.quads; ++pair) {
          __builtin_memcpy(&out[static_cast<int64_t>(pair) * rows + m], values + 2 * pair, 4);
        }
      }
    }
    return true;
  }
};

}  // namespace

extern const KernelTable kernels_avx512_bf16;
constexpr KernelTable kernels_avx512_bf16 = {
    /*bf16_x_only=*/true,
    VecAvx512Bf16::kMaxRows,
    /*preferred_rows=*/12,
    /*row_granule=*/1,
    "12 chains, 12 totals, 4 tables and 2 decoded registers are 30 of 32",
    {
#define BLOCKSCALE_FORMAT(type, dtype) run_linear<VecAvx512Bf16, type>,
#include "formats/formats.inc"
#undef BLOCKSCALE_FORMAT
    }};

}  // namespace blockscale
