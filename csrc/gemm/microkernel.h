// The GEMM of one task, once for every ISA: cuts K into units, packs x, walks strips and row blocks, applies scales
// and bias. An ISA supplies `V` (csrc/isa/vec_*.h): how 64 codes are decoded, multiplied and summed, and how 16 results
// are stored.
//
// A unit is a run of at most 128 k inside one scale block. The order of arithmetic is the same for every M, row
// position and split of the work, so the bits of a row depend on the ISA alone:
//
//   chain = sum over the k of one unit, in k order, from zero    one chain, or one each for even and odd k
//   total = fma(chain, scale * x_scale, total)                   in unit order, from zero; x_scale 1 if x has none
//   out   = round(total + bias)                                  one rounding to the output type
//
// What runs side by side for speed: several strips, which share loads of x, and several units of a strip, whose chains
// are independent.
//
// Instantiated only with `V` in an anonymous namespace, so nothing here becomes a weak symbol.
#pragma once

#include <stddef.h>

#include "gemm/kernel.h"
#include "gemm/stage.h"

#define BLOCKSCALE_INLINE __attribute__((always_inline)) inline
#define BLOCKSCALE_UNROLL _Pragma("GCC unroll 32")

namespace blockscale {
namespace {

// Packed x of several row blocks shares L2 with a strip of codes: 384 KiB of 1 MiB measured best.
constexpr int64_t kRowChunkBytes = 384 << 10;

struct Unit {
  int64_t k_begin;
  int64_t k_block;  // k_begin / block_k, the column of its scales
  int32_t depth;    // k in the unit, 1 .. kUnitK
  int32_t quads;    // 4-k chunks that hold them, counting those shared with a neighbour
  int32_t x_quad;   // first chunk of packed x
  int32_t staged;   // 1: a border lies inside a chunk, so codes are copied with zeros beyond it
};
static_assert(sizeof(Unit) <= kUnitBytes, "scratch holds kMaxUnits of these");

template <class X>
struct StripJob {
  const LinearTask* task;
  const Unit* units;
  int unit_count;
  const X* x;  // packed x of this row block
  bool exact_products;
  int64_t strip;
  int columns;    // 16, or fewer in a ragged last strip
  int64_t row;    // first row of the block
  float* totals;  // of the block, V::kTotalsPerRow floats a row; in memory, where the chains leave no registers
  bool first;     // totals start at zero
  bool last;      // write the output
  uint8_t* staged;
  const uint8_t* codes;  // of the strip
  bool full;             // 16 columns that share their scales, and every unit kUnitK deep

  // Scales of the strip: one for all columns, 16 adjacent ones, or one offset per column.
  const float* scales;
  bool uniform;
  bool adjacent;
  int64_t scale_lanes[kStripColumns];

  const float* bias;  // 16 floats, or null
  float bias_lanes[kStripColumns];
};

// Chunks of the packed stream that hold k_begin .. k_end-1, counting those shared with a neighbour.
struct TouchedQuads {
  BLOCKSCALE_INLINE int64_t operator()(int64_t k_begin, int64_t k_end) const { return (k_end + 3) / 4 - k_begin / 4; }
};

// Fills `units` from k_begin on until K ends or a limit is reached; returns the k after the last unit.
// quads_of(k_begin, k_end) is the number of 4-k chunks that packed x spends on a unit.
template <class QuadsOf>
BLOCKSCALE_INLINE int64_t cut_units(const LinearTask& task, int64_t k_begin, int64_t x_bytes_per_quad, QuadsOf quads_of,
                                    Unit* units, int* unit_count, int64_t* x_quads) {
  int64_t k = k_begin;
  int64_t quads = 0;
  int count = 0;
  while (k < task.K && count < kMaxUnits) {
    const int64_t block = k / task.block_k;
    int64_t end = (block + 1) * task.block_k;
    if (end > task.K) end = task.K;
    if (end > k + kUnitK) end = k + kUnitK;
    const int64_t unit_quads = quads_of(k, end);
    if (count > 0 && (quads + unit_quads) * x_bytes_per_quad > kPackedXBytes) break;
    units[count] = Unit{k,
                        block,
                        static_cast<int32_t>(end - k),
                        static_cast<int32_t>(unit_quads),
                        static_cast<int32_t>(quads),
                        k % 4 != 0 || end % 4 != 0};
    ++count;
    quads += unit_quads;
    k = end;
  }
  *unit_count = count;
  *x_quads = quads;
  return k;
}

template <class X>
BLOCKSCALE_INLINE const uint8_t* unit_codes(const StripJob<X>& job, const Unit& unit, int slot) {
  if (!unit.staged && job.columns == kStripColumns) {
    return job.codes + unit.k_begin * kStripColumns;
  }
  uint8_t* staged = job.staged + slot * kStagedUnitBytes;
  stage_codes(*job.task, job.strip, job.columns, unit.k_begin, unit.k_begin + unit.depth, unit.k_begin / 4 * 4, staged);
  return staged;
}

__attribute__((noinline)) void gather_scales(const float* scales, const int64_t* offsets, float* lanes) {
  for (int c = 0; c < kStripColumns; ++c) lanes[c] = scales[offsets[c]];
}

template <class V, bool Uniform, class X>
BLOCKSCALE_INLINE typename V::Scale unit_scale(const StripJob<X>& job, const Unit& unit, float* lanes) {
  const float* scales = job.scales + unit.k_block * job.task->scale_stride_k;
  if (Uniform || job.uniform) return V::Scale::of_strip(*scales);
  if (job.adjacent) return V::Scale::of_columns(scales);
  gather_scales(scales, job.scale_lanes, lanes);
  return V::Scale::of_columns(lanes);
}

// Scales of the block's rows of x in the unit's k-block, or null where x has none.
template <class X>
BLOCKSCALE_INLINE const float* row_scales(const StripJob<X>& job, const Unit& unit, int rows, float* scratch) {
  const LinearTask& task = *job.task;
  if (!task.x_scales) return nullptr;
  const float* scales = task.x_scales + job.row * task.x_scale_stride_m + unit.k_block * task.x_scale_stride_k;
  for (int m = 0; m < rows; ++m) scratch[m] = scales[m * task.x_scale_stride_m];
  return scratch;
}

// Adds the bias and stores row m of the job's block.
template <class V, class X>
BLOCKSCALE_INLINE void finish_row(const StripJob<X>& job, int m, typename V::Row row) {
  const LinearTask& task = *job.task;
  if (job.bias) row = V::add(row, V::load(job.bias));
  const int64_t index = (job.row + m) * task.out_stride + job.strip * kStripColumns;
  if (job.columns == kStripColumns) {
    V::store(task.out, task.out_type, index, row);
  } else {
    alignas(64) float lanes[kStripColumns];
    V::store(lanes, FloatType::kF32, 0, row);
    for (int c = 0; c < job.columns; ++c) store_float(task.out, task.out_type, index + c, lanes[c]);
  }
}

// Codes, packed x and quads of the jobs' units. Where every unit is kUnitK deep and its codes are read in place, all
// are known from the unit's number: 93 % of peak instead of 88 with avx512_bf16 and 48 rows from cache.
template <class V, int MR, bool Full>
struct UnitReader {
  static constexpr int kQuadX = MR * V::kXPerQuadRow;
  const StripJob<typename V::X>* jobs;
  int64_t first_k = jobs[0].units[0].k_begin;

  BLOCKSCALE_INLINE const uint8_t* codes(int s, int u, int slot) const {
    if constexpr (Full) {
      const StripJob<typename V::X>& job = jobs[s];
      return job.codes + (first_k + int64_t{kUnitK} * u) * kStripColumns;
    } else {
      return unit_codes(jobs[s], jobs[0].units[u], slot);
    }
  }
  BLOCKSCALE_INLINE const typename V::X* x(int u) const {
    return jobs[0].x + (Full ? int64_t{kUnitK / 4} * u : jobs[0].units[u].x_quad) * kQuadX;
  }
  BLOCKSCALE_INLINE int quads(int u) const { return Full ? kUnitK / 4 : jobs[0].units[u].quads; }
};

// MR rows x NS strips x NU units from unit u on, side by side.
template <class V, class F, int MR, int NS, int NU, bool Full>
BLOCKSCALE_INLINE void multiply_units(const StripJob<typename V::X>* jobs, const UnitReader<V, MR, Full>& reader, int u,
                                      const typename V::template Decoder<F>& decoder) {
  constexpr int kParts = V::template parts<MR>();
  const uint8_t* codes[NU][NS];
  const uint8_t* ahead[NS];
  const typename V::X* x[NU];
  int common = reader.quads(u);  // that all of them have
  BLOCKSCALE_UNROLL
  for (int i = 0; i < NU; ++i) {
    BLOCKSCALE_UNROLL
    for (int s = 0; s < NS; ++s) codes[i][s] = reader.codes(s, u + i, i * NS + s);
    x[i] = reader.x(u + i);
    if (reader.quads(u + i) < common) common = reader.quads(u + i);
  }
  // Codes to prefetch: the strip's next ones, and after its end those of the strip that follows the last of these.
  const int64_t strip_bytes = jobs[0].task->K * kStripColumns;
  BLOCKSCALE_UNROLL
  for (int s = 0; s < NS; ++s) {
    ahead[s] = codes[0][s] + V::template prefetch_bytes<MR, NS>();
    if (ahead[s] >= jobs[s].codes + strip_bytes) ahead[s] += (NS - 1) * strip_bytes;
  }
  for (int part = 0; part < kParts; ++part) {
    typename V::template Chains<MR, NS> chains[NU];
    BLOCKSCALE_UNROLL
    for (int i = 0; i < NU; ++i) chains[i].clear();
    const auto step = [&](int i, int q) __attribute__((always_inline)) {
      const uint8_t* step_codes[NS];
      BLOCKSCALE_UNROLL
      for (int s = 0; s < NS; ++s) step_codes[s] = codes[i][s] + 64 * q + part * (64 / kParts);
      chains[i].step(decoder, step_codes, x[i] + q * (MR * V::kXPerQuadRow));
    };
    for (int q = 0; q < common; ++q) {
      if (part == 0) {
        // In stream order: one prefetch for each 64 bytes that this step consumes.
        BLOCKSCALE_UNROLL
        for (int s = 0; s < NS; ++s) {
          BLOCKSCALE_UNROLL
          for (int i = 0; i < NU; ++i) __builtin_prefetch(ahead[s] + 64 * (NU * q + i));
        }
      }
      BLOCKSCALE_UNROLL
      for (int i = 0; i < NU; ++i) step(i, q);
    }
    if constexpr (NU > 1 && !Full) {
      BLOCKSCALE_UNROLL
      for (int i = 0; i < NU; ++i) {
        for (int q = common; q < reader.quads(u + i); ++q) step(i, q);
      }
    }
    BLOCKSCALE_UNROLL
    for (int i = 0; i < NU; ++i) {
      const Unit& unit = jobs[0].units[u + i];
      alignas(64) float lanes[kStripColumns];
      float rows[MR];
      const float* x_scales = row_scales(jobs[0], unit, MR, rows);
      BLOCKSCALE_UNROLL
      for (int s = 0; s < NS; ++s) {
        chains[i].fold(s, part, unit_scale<V, Full>(jobs[s], unit, lanes), x_scales, jobs[s].totals);
      }
    }
  }
}

// MR rows x NS strips (jobs[0 .. NS-1]) x the jobs' units.
template <class V, class F, int MR, int NS, bool Full>
void multiply_strips(const StripJob<typename V::X>* jobs) {
  constexpr int kUnits = V::template side_by_side<MR, NS>();
  const typename V::template Decoder<F> decoder(jobs[0].exact_products);
  if (jobs[0].first) {
    for (int s = 0; s < NS; ++s) V::clear(jobs[s].totals, MR);
  }
  const UnitReader<V, MR, Full> reader{jobs};
  const int count = jobs[0].unit_count;
  int u = 0;
  for (; u + kUnits <= count; u += kUnits) multiply_units<V, F, MR, NS, kUnits>(jobs, reader, u, decoder);
  if constexpr (kUnits > 1) {
    for (; u < count; ++u) multiply_units<V, F, MR, NS, 1>(jobs, reader, u, decoder);
  }
  if (jobs[0].last) {
    for (int s = 0; s < NS; ++s) {
      for (int m = 0; m < MR; ++m) finish_row<V>(jobs[s], m, V::row_of(jobs[s].totals + m * V::kTotalsPerRow));
    }
  }
}

template <class V, class F, int MR, int NS>
BLOCKSCALE_INLINE void multiply_strips(const StripJob<typename V::X>* jobs) {
  bool full = jobs[0].full;
  for (int s = 1; s < NS; ++s) full &= jobs[s].full;
  if (full) {
    multiply_strips<V, F, MR, NS, true>(jobs);
  } else {
    multiply_strips<V, F, MR, NS, false>(jobs);
  }
}

// The kernel of `rows` rows: one strip, or V::strips<MR>() of them where `strips` says that so many are there.
template <class V, class F, int MR>
BLOCKSCALE_INLINE void multiply_rows(const StripJob<typename V::X>* jobs, int strips, int rows) {
  if (rows == MR) {
    constexpr int kStrips = V::template strips<MR>();
    for (; strips >= kStrips; strips -= kStrips, jobs += kStrips) multiply_strips<V, F, MR, kStrips>(jobs);
    for (int s = 0; s < strips; ++s) multiply_strips<V, F, MR, 1>(jobs + s);
  } else if constexpr (MR > 1) {
    multiply_rows<V, F, MR - 1>(jobs, strips, rows);
  }
}

template <class X>
BLOCKSCALE_INLINE void enter_strip(const LinearTask& task, int64_t strip, StripJob<X>* job) {
  const int64_t n = strip * kStripColumns;
  job->strip = strip;
  job->columns = static_cast<int>(task.N - n < kStripColumns ? task.N - n : kStripColumns);
  const int64_t last = n + job->columns - 1;
  const int64_t scale_row = n / task.block_n;
  job->scales = task.scales + scale_row * task.scale_stride_n;
  job->uniform = scale_row == last / task.block_n;
  job->adjacent = task.block_n == 1 && task.scale_stride_n == 1 && job->columns == kStripColumns;
  if (!job->uniform && !job->adjacent) {
    for (int c = 0; c < kStripColumns; ++c) {  // absent columns repeat the last one; nothing of theirs is stored
      const int64_t column = n + c < last ? n + c : last;
      job->scale_lanes[c] = (column / task.block_n - scale_row) * task.scale_stride_n;
    }
  }
  job->codes = task.weight + n * task.K;
  job->full = job->uniform && job->columns == kStripColumns && task.K % kUnitK == 0 && task.block_k % kUnitK == 0;
  job->bias = task.bias ? job->bias_lanes : nullptr;
  for (int c = 0; task.bias && c < kStripColumns; ++c) {
    job->bias_lanes[c] = c < job->columns ? load_float(task.bias, task.bias_type, n + c) : 0.0f;
  }
}

// gemm/panel.h, for V::kPanels.
template <class V, class F>
void run_panels(const LinearTask& task);

template <class V, class F>
void run_linear(const LinearTask& task) {
  if constexpr (V::kPanels) {
    if (task.row_end - task.row_begin > task.rows_per_block) return run_panels<V, F>(task);
  }
  using X = typename V::X;
  constexpr int64_t kXBytes = V::kXPerQuadRow * static_cast<int64_t>(sizeof(X));  // of one quad and row
  X* packed_x = reinterpret_cast<X*>(task.scratch);
  float* totals = reinterpret_cast<float*>(task.scratch + kPackedXBytes);
  Unit* units = reinterpret_cast<Unit*>(task.scratch + kPackedXBytes + kTotalsBytes);
  StripJob<X> jobs[V::kMaxStrips]{};

  const int64_t block_rows = task.rows_per_block;
  int unit_count = 0;
  int64_t quads = 0;
  int64_t k_end = cut_units(task, 0, block_rows * kXBytes, TouchedQuads(), units, &unit_count, &quads);
  // Several row blocks whose packed x fits L2 walk each strip while it is there. If one block's exceeds the scratch, K
  // goes in chunks instead, with the totals of a group of strips kept.
  const bool whole = k_end == task.K;
  const int64_t block_bytes = quads * block_rows * kXBytes;
  const int64_t chunk_blocks =
      whole && block_bytes > 0 && block_bytes < kRowChunkBytes ? kRowChunkBytes / block_bytes : 1;
  const int64_t chunk_rows = chunk_blocks * block_rows;
  const int64_t block_totals = block_rows * V::kTotalsPerRow;
  const int64_t group_strips = whole ? task.strip_end - task.strip_begin : kTotalsBytes / 4 / block_totals;
  for (int64_t chunk = task.row_begin; chunk < task.row_end; chunk += chunk_rows) {
    const int64_t chunk_end = chunk + chunk_rows < task.row_end ? chunk + chunk_rows : task.row_end;
    for (int64_t group = task.strip_begin; group < task.strip_end; group += group_strips) {
      const int64_t group_end = group + group_strips < task.strip_end ? group + group_strips : task.strip_end;
      int64_t k = 0;
      do {
        if (!whole) k_end = cut_units(task, k, block_rows * kXBytes, TouchedQuads(), units, &unit_count, &quads);
        bool exact_products = true;
        for (int64_t row = chunk; row < chunk_end; row += block_rows) {
          const int rows = static_cast<int>(chunk_end - row < block_rows ? chunk_end - row : block_rows);
          exact_products &=
              V::pack_x(task, row, rows, units, unit_count, packed_x + (row - chunk) * quads * V::kXPerQuadRow);
        }
        for (int64_t strip = group; strip < group_end; strip += V::kMaxStrips) {
          const int strips = static_cast<int>(group_end - strip < V::kMaxStrips ? group_end - strip : V::kMaxStrips);
          for (int s = 0; s < strips; ++s) {
            StripJob<X>& job = jobs[s];
            job.task = &task;
            job.units = units;
            job.unit_count = unit_count;
            job.exact_products = exact_products;
            job.first = k == 0;
            job.last = k_end == task.K;
            job.staged = task.scratch + kPackedXBytes + kTotalsBytes + kMaxUnits * kUnitBytes;
            job.totals = totals + (whole ? s : strip - group + s) * block_totals;
            enter_strip(task, strip + s, &job);
          }
          for (int64_t row = chunk; row < chunk_end; row += block_rows) {
            for (int s = 0; s < strips; ++s) {
              jobs[s].row = row;
              jobs[s].x = packed_x + (row - chunk) * quads * V::kXPerQuadRow;
            }
            multiply_rows<V, F, V::kMaxRows>(
                jobs, strips, static_cast<int>(chunk_end - row < block_rows ? chunk_end - row : block_rows));
          }
        }
        k = k_end;
      } while (k < task.K);
    }
  }
}

}  // namespace
}  // namespace blockscale
