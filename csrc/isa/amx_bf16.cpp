// Kernels for bf16 x on AMX tiles: Sapphire Rapids and later. TDPBF16PS multiplies 16 rows by 16 columns over 32 k:
// for each row and column two chains (even k, odd k) from zero, added, then added to C; subnormals flushed, MXCSR
// ignored.
//
// A batch-reduce GEMM over the units of K: a unit's codes of 2 strips are decoded into L1 once and meet every row tile
// of a block; C tiles start at zero in each unit, and their sums go into fp32 totals with the unit's scale:
//
//   registers   C 0 1      rows 0-15     A 4    B 6 7    2 x 2: a step of 32 k is 4 loads for 4 products
//               C 2 3      rows 16-31    A 5
//               C 0 1 2 3  rows 0-15     A 4    B 6 7    1 x 4 where M <= 16: 5 loads for 4 products
//
// The sums of a unit depend on its own codes and x alone, so bits do not depend on M, position or split, as on every
// ISA.
#include "isa/vec_avx512_vbmi.h"

namespace blockscale {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileK = 32;
constexpr int kTileBytes = 1024;
constexpr int kUnitTiles = kUnitK / kTileK;
constexpr int kStrips = 4;  // most strips walked together
// Rows that share a decoded unit. By the bound of benchmarks/bench_amx_bound.py, in cycles for each product (16 is the
// tile unit's limit), at M = 512: 36 for blocks of 32 rows, 26 for 64, 21 for 128, 23.8 for 256. Decoding takes 40
// cycles a B tile, so more rows share less of it; but from 256 rows on the totals of two strips leave a 48 KiB L1 and
// cost L2 traffic that the tile unit waits for. 2 x 2 over 1 x 4 for the same reason: 1 A tile from L2 for 2 products.
constexpr int kBlockRows = 128;

// Rows of A and C tiles; B tiles always hold 16 k-pairs.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  explicit TileConfig(int tile_rows) {
    for (int tile = 0; tile < 8; ++tile) {
      row_bytes[tile] = 64;
      rows[tile] = static_cast<uint8_t>(tile < 6 ? tile_rows : kTileRows);
    }
  }
};

// Packed x spends whole tiles of 32 k on a unit, counted from the unit's own start.
struct TileQuads {
  BLOCKSCALE_INLINE int64_t operator()(int64_t k_begin, int64_t k_end) const {
    return (k_end - k_begin + kTileK - 1) / kTileK * (kTileK / 4);
  }
};

// GCC's tile loads do not tell the compiler that they read memory: everything written to `data` is made visible here.
BLOCKSCALE_INLINE void publish(const void* data) { __asm__ volatile("" : : "r"(data) : "memory"); }

BLOCKSCALE_INLINE int tiles_of(const Unit& unit) { return unit.quads / (kTileK / 4); }

// x of `rows` rows as A tiles, [unit][row tile][32 k]: rows beyond the block and k beyond the unit are zero.
void pack_tiles(const LinearTask& task, int64_t row, int rows, const Unit* units, int unit_count, uint8_t* packed) {
  const int row_tiles = (rows + kTileRows - 1) / kTileRows;
  const uint16_t* x = static_cast<const uint16_t*>(task.x) + row * task.x_stride;
  for (int u = 0; u < unit_count; ++u) {
    const Unit& unit = units[u];
    for (int m = 0; m < row_tiles * kTileRows; ++m) {
      uint8_t* out =
          packed +
          (static_cast<int64_t>(unit.x_quad / (kTileK / 4)) * row_tiles + m / kTileRows * tiles_of(unit)) * kTileBytes +
          m % kTileRows * 64;
      for (int t = 0; t < tiles_of(unit); ++t, out += kTileBytes) {
        const int left = m < rows ? unit.depth - t * kTileK : 0;
        const __mmask32 present = left >= kTileK ? ~0u : (1u << left) - 1;
        _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(present, x + m * task.x_stride + unit.k_begin + t * kTileK));
      }
    }
  }
}

// A unit of one strip as B tiles: 8 chunks of codes are the 16 k-pairs of a tile, in order.
template <class F>
BLOCKSCALE_INLINE void decode_tiles(const TableDecoder<F>& decoder, const uint8_t* codes, const Unit& unit,
                                    uint8_t* out) {
  const int chunks = (unit.depth + 3) / 4;
  int q = 0;
  for (; q < chunks; ++q) {
    __m512i pair0, pair1;
    // 4 KiB ahead: two strips' units lie between reading a line and this prefetch of it.
    __builtin_prefetch(codes + 64 * q + 4096);
    decoder.decode(codes + 64 * q, &pair0, &pair1);
    _mm512_store_si512(out + 128 * q, pair0);
    _mm512_store_si512(out + 128 * q + 64, pair1);
  }
  for (; q < unit.quads; ++q) {
    _mm512_store_si512(out + 128 * q, _mm512_setzero_si512());
    _mm512_store_si512(out + 128 * q + 64, _mm512_setzero_si512());
  }
}

// C = A B over a unit's `tiles` steps, for two row tiles (a0, a1) and `Strips` strips of B tiles `b`; C tiles of row
// tile r and strip s land at c + (2 r + s) KiB.
template <int Strips>
BLOCKSCALE_INLINE void multiply_two(const uint8_t* a0, const uint8_t* a1, const uint8_t* b, int tiles, float* c) {
  const uint8_t* b1 = b + kUnitTiles * kTileBytes;
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (Strips == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (int64_t at = 0; at < static_cast<int64_t>(tiles) * kTileBytes; at += kTileBytes) {
    _tile_loadd(4, a0 + at, 64);
    _tile_loadd(6, b + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a1 + at, 64);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (Strips == 2) {
      _tile_loadd(7, b1 + at, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, 64);
  _tile_stored(2, c + 512, 64);
  if constexpr (Strips == 2) {
    _tile_stored(1, c + 256, 64);
    _tile_stored(3, c + 768, 64);
  }
}

// The same for one row tile and up to four strips; the C tile of strip s lands at c + s KiB.
template <int Strips>
BLOCKSCALE_INLINE void multiply_one(const uint8_t* a, const uint8_t* b, int tiles, float* c) {
  constexpr int64_t kNext = kUnitTiles * kTileBytes;
  _tile_zero(0);
  if constexpr (Strips > 1) _tile_zero(1);
  if constexpr (Strips > 2) _tile_zero(2);
  if constexpr (Strips > 3) _tile_zero(3);
  for (int64_t at = 0; at < static_cast<int64_t>(tiles) * kTileBytes; at += kTileBytes) {
    _tile_loadd(4, a + at, 64);
    _tile_loadd(6, b + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Strips > 1) {
      _tile_loadd(7, b + kNext + at, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (Strips > 2) {
      _tile_loadd(6, b + 2 * kNext + at, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (Strips > 3) {
      _tile_loadd(7, b + 3 * kNext + at, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, c, 64);
  if constexpr (Strips > 1) _tile_stored(1, c + 256, 64);
  if constexpr (Strips > 2) _tile_stored(2, c + 512, 64);
  if constexpr (Strips > 3) _tile_stored(3, c + 768, 64);
}

// totals[m] = fma(c[m], scale * x_scales[m], totals[m]) for the rows of one C tile; x_scales may be null.
BLOCKSCALE_INLINE void fold_tile(const float* c, const RowsAvx512::Scale& scale, const float* x_scales, int rows,
                                 float* totals) {
  for (int m = 0; m < rows; ++m) {
    float* total = totals + 16 * m;
    _mm512_store_ps(total,
                    _mm512_fmadd_ps(_mm512_load_ps(c + 16 * m), scale.of_row(x_scales, m), _mm512_load_ps(total)));
  }
}

// One block of rows x `Strips` adjacent strips (jobs[0 .. Strips-1]) x the jobs' units.
template <class F, int Strips>
void multiply_strips(const StripJob<uint8_t>* jobs, int rows) {
  const TableDecoder<F> decoder(true);
  const int row_tiles = (rows + kTileRows - 1) / kTileRows;
  alignas(64) uint8_t decoded[Strips * kUnitTiles * kTileBytes];
  alignas(64) float c[4 * kTileBytes / 4];
  alignas(64) float lanes[kStripColumns];
  for (int s = 0; s < Strips; ++s) {
    if (jobs[s].first) __builtin_memset(jobs[s].totals, 0, static_cast<size_t>(rows) * 64);
  }
  for (int u = 0; u < jobs[0].unit_count; ++u) {
    const Unit& unit = jobs[0].units[u];
    const int tiles = tiles_of(unit);
    RowsAvx512::Scale scales[Strips];
    for (int s = 0; s < Strips; ++s) {
      const StripJob<uint8_t>& job = jobs[s];
      const uint8_t* codes = job.codes + unit.k_begin * kStripColumns;
      if (unit.staged || job.columns < kStripColumns) {
        stage_codes(*job.task, job.strip, job.columns, unit.k_begin, unit.k_begin + unit.depth, unit.k_begin,
                    job.staged);
        codes = job.staged;
      }
      decode_tiles(decoder, codes, unit, decoded + s * kUnitTiles * kTileBytes);
      scales[s] = unit_scale<RowsAvx512, false>(job, unit, lanes);
    }
    publish(decoded);
    float row_buffer[kBlockRows];
    const float* x_scales = row_scales(jobs[0], unit, rows, row_buffer);
    const uint8_t* a = jobs[0].x + static_cast<int64_t>(unit.x_quad / (kTileK / 4)) * row_tiles * kTileBytes;
    int tile = 0;
    if constexpr (Strips <= 2) {
      for (; tile + 2 <= row_tiles; tile += 2) {
        multiply_two<Strips>(a + tile * tiles * kTileBytes, a + (tile + 1) * tiles * kTileBytes, decoded, tiles, c);
        for (int r = 0; r < 2; ++r) {
          const int first = (tile + r) * kTileRows;
          for (int s = 0; s < Strips; ++s) {
            fold_tile(c + (2 * r + s) * 256, scales[s], x_scales ? x_scales + first : nullptr,
                      rows - first < kTileRows ? rows - first : kTileRows, jobs[s].totals + 16 * first);
          }
        }
      }
    }
    if (tile < row_tiles) {
      multiply_one<Strips>(a + tile * tiles * kTileBytes, decoded, tiles, c);
      for (int s = 0; s < Strips; ++s) {
        fold_tile(c + s * 256, scales[s], x_scales ? x_scales + tile * kTileRows : nullptr, rows - tile * kTileRows,
                  jobs[s].totals + 16 * tile * kTileRows);
      }
    }
  }
  for (int s = 0; s < Strips && jobs[s].last; ++s) {
    for (int m = 0; m < rows; ++m) finish_row<RowsAvx512>(jobs[s], m, _mm512_load_ps(jobs[s].totals + 16 * m));
  }
}

template <class F>
BLOCKSCALE_INLINE void multiply_group(const StripJob<uint8_t>* jobs, int strips, int rows) {
  if (strips == 4) return multiply_strips<F, 4>(jobs, rows);
  if (strips == 3) return multiply_strips<F, 3>(jobs, rows);
  if (strips == 2) return multiply_strips<F, 2>(jobs, rows);
  multiply_strips<F, 1>(jobs, rows);
}

template <class F>
void run_tiles(const LinearTask& task) {
  uint8_t* packed_x = task.scratch;
  float* totals = reinterpret_cast<float*>(task.scratch + kPackedXBytes);
  Unit* units = reinterpret_cast<Unit*>(task.scratch + kPackedXBytes + kTotalsBytes);
  StripJob<uint8_t> jobs[kStrips]{};

  const int64_t block_rows = task.rows_per_block;
  const int64_t padded_rows = (block_rows + kTileRows - 1) / kTileRows * kTileRows;
  const int width = block_rows <= kTileRows ? kStrips : 2;
  const int64_t group_strips = kTotalsBytes / (padded_rows * 64) / width * width;
  const TileConfig config(static_cast<int>(block_rows < kTileRows ? block_rows : kTileRows));
  publish(&config);
  _tile_loadconfig(&config);
  for (int64_t row = task.row_begin; row < task.row_end; row += block_rows) {
    const int rows = static_cast<int>(task.row_end - row < block_rows ? task.row_end - row : block_rows);
    for (int64_t group = task.strip_begin; group < task.strip_end;) {
      int unit_count = 0;
      int64_t quads = 0;
      int64_t k_end = 0;
      int64_t k = 0;
      int64_t group_end = task.strip_end;
      do {
        k_end = cut_units(task, k, padded_rows * 8, TileQuads(), units, &unit_count, &quads);
        // Totals of a whole K stay with their strips; otherwise a group of strips carries them from one k chunk to the
        // next.
        const bool whole = k == 0 && k_end == task.K;
        if (!whole && group_end > group + group_strips) group_end = group + group_strips;
        pack_tiles(task, row, rows, units, unit_count, packed_x);
        for (int64_t strip = group; strip < group_end; strip += width) {
          const int strips = static_cast<int>(group_end - strip < width ? group_end - strip : width);
          for (int s = 0; s < strips; ++s) {
            StripJob<uint8_t>& job = jobs[s];
            job.task = &task;
            job.units = units;
            job.unit_count = unit_count;
            job.x = packed_x;
            job.row = row;
            job.first = k == 0;
            job.last = k_end == task.K;
            job.staged = task.scratch + kPackedXBytes + kTotalsBytes + kMaxUnits * kUnitBytes;
            job.totals = totals + (whole ? s : strip - group + s) * padded_rows * 16;
            enter_strip(task, strip + s, &job);
          }
          multiply_group<F>(jobs, strips, rows);
        }
        k = k_end;
      } while (k < task.K);
      group = group_end;
    }
  }
  _tile_release();
}

}  // namespace

extern const KernelTable kernels_amx_bf16;
constexpr KernelTable kernels_amx_bf16 = {
    /*bf16_x_only=*/true,
    kBlockRows,
    /*preferred_rows=*/kBlockRows,
    /*row_granule=*/kTileRows,
    "cycles a product by the bound: 26 with 64 rows to a decoded tile, 21 with 128, 23.8 with 256",
    {
#define BLOCKSCALE_FORMAT(type, dtype) run_tiles<type>,
#include "formats/formats.inc"
#undef BLOCKSCALE_FORMAT
    },
    /*quant=*/{}};

}  // namespace blockscale
