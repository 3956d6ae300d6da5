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
// Small row blocks take two units side by side, whose chains are independent.
//
// Instantiated only with `V` in an anonymous namespace, so nothing here becomes a weak symbol.
#pragma once

#include <stddef.h>

#include "gemm/kernel.h"

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
  int columns;   // 16, or fewer in a ragged last strip
  int64_t row;   // first row of the block
  float* carry;  // totals between k chunks
  bool first;    // totals start at zero
  bool last;     // write the output, not the carry
  uint8_t* staged;

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

// Copies a unit's codes into full 64-byte chunks, the first of which starts at k = origin; columns and k outside the
// strip and the unit become zero codes.
inline void stage_codes(const LinearTask& task, int64_t strip, int columns, const Unit& unit, int64_t origin,
                        uint8_t* staged) {
  const uint8_t* strip_codes = task.weight + strip * kStripColumns * task.K;
  const int64_t unit_end = unit.k_begin + unit.depth;
  __builtin_memset(staged, 0, static_cast<size_t>((unit_end - origin + 3) / 4) * 64);
  for (int64_t quad = unit.k_begin / 4; 4 * quad < unit_end; ++quad) {
    const int64_t depth = task.K - 4 * quad < 4 ? task.K - 4 * quad : 4;
    const uint8_t* in = strip_codes + quad * 4 * columns;
    if (4 * quad < unit.k_begin || 4 * quad + 4 > unit_end || (4 * quad - origin) % 4 != 0) {
      for (int lane = 0; lane < columns; lane += 4) {
        for (int pair = 0; pair < depth; pair += 2) {
          for (int c = lane; c < columns && c < lane + 4; ++c) {
            for (int j = 0; j < 2 && pair + j < depth; ++j, ++in) {
              const int64_t k = 4 * quad + pair + j - origin;
              if (4 * quad + pair + j < unit.k_begin || 4 * quad + pair + j >= unit_end) continue;
              staged[k / 4 * 64 + 4 * lane + k % 4 / 2 * 8 + 2 * (c - lane) + k % 2] = *in;
            }
          }
        }
      }
    } else {
      uint8_t* out = staged + (4 * quad - origin) * kStripColumns;
      const int full = columns / 4 * 16;
      __builtin_memcpy(out, in, full);
      const int rest = 2 * (columns % 4);
      __builtin_memcpy(out + full, in + full, rest);
      __builtin_memcpy(out + full + 8, in + full + rest, rest);
    }
  }
}

template <class X>
BLOCKSCALE_INLINE const uint8_t* unit_codes(const StripJob<X>& job, const Unit& unit, int slot) {
  if (!unit.staged && job.columns == kStripColumns) {
    return job.task->weight + job.strip * kStripColumns * job.task->K + unit.k_begin * kStripColumns;
  }
  uint8_t* staged = job.staged + slot * (kStagedBytes / 2);
  stage_codes(*job.task, job.strip, job.columns, unit, unit.k_begin / 4 * 4, staged);
  return staged;
}

template <class V, class X>
BLOCKSCALE_INLINE typename V::Scale unit_scale(const StripJob<X>& job, const Unit& unit, float* lanes) {
  const float* scales = job.scales + unit.k_block * job.task->scale_stride_k;
  if (job.uniform) return V::Scale::of_strip(*scales);
  if (job.adjacent) return V::Scale::of_columns(scales);
  for (int c = 0; c < kStripColumns; ++c) lanes[c] = scales[job.scale_lanes[c]];
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

// MR rows x one strip x the job's units.
template <class V, class F, int MR>
void multiply_strip(const StripJob<typename V::X>& job) {
  constexpr int kQuadX = MR * V::kXPerQuadRow;
  const typename V::template Decoder<F> decoder(job.exact_products);
  typename V::template Totals<MR> totals;
  if (job.first) {
    totals.clear();
  } else {
    totals.load(job.carry);
  }
  alignas(64) float lanes[2][kStripColumns];
  float rows[2][MR];
  for (int u = 0; u < job.unit_count;) {
    const Unit& unit = job.units[u];
    const uint8_t* codes = unit_codes(job, unit, 0);
    const typename V::X* x = job.x + static_cast<int64_t>(unit.x_quad) * kQuadX;
    const typename V::Scale scale = unit_scale<V>(job, unit, lanes[0]);
    const float* x_scales = row_scales(job, unit, MR, rows[0]);
    if constexpr (MR <= V::kSideBySideRows) {
      if (u + 1 < job.unit_count && job.units[u + 1].quads == unit.quads) {
        const Unit& next = job.units[u + 1];
        const uint8_t* next_codes = unit_codes(job, next, 1);
        const typename V::X* next_x = job.x + static_cast<int64_t>(next.x_quad) * kQuadX;
        const typename V::Scale next_scale = unit_scale<V>(job, next, lanes[1]);
        const float* next_x_scales = row_scales(job, next, MR, rows[1]);
        for (int part = 0; part < V::template parts<MR>(); ++part) {
          typename V::template Chains<MR> chains, next_chains;
          chains.clear();
          next_chains.clear();
          const int64_t offset = part * (64 / V::template parts<MR>());
#pragma GCC unroll 2
          for (int q = 0; q < unit.quads; ++q) {
            if (part == 0) {
              // Both units' bytes, in stream order: one prefetch for each 64 bytes that this step consumes.
              __builtin_prefetch(codes + V::template prefetch_bytes<MR>() + 128 * q);
              __builtin_prefetch(codes + V::template prefetch_bytes<MR>() + 128 * q + 64);
            }
            chains.step(decoder, codes + 64 * q + offset, x + q * kQuadX);
            next_chains.step(decoder, next_codes + 64 * q + offset, next_x + q * kQuadX);
          }
          totals.fold(part, chains, scale, x_scales);
          totals.fold(part, next_chains, next_scale, next_x_scales);
        }
        u += 2;
        continue;
      }
    }
    for (int part = 0; part < V::template parts<MR>(); ++part) {
      typename V::template Chains<MR> chains;
      chains.clear();
      const int64_t offset = part * (64 / V::template parts<MR>());
      for (int q = 0; q < unit.quads; ++q) {
        if (part == 0) __builtin_prefetch(codes + V::template prefetch_bytes<MR>() + 64 * q);
        chains.step(decoder, codes + 64 * q + offset, x + q * kQuadX);
      }
      totals.fold(part, chains, scale, x_scales);
    }
    ++u;
  }
  if (!job.last) {
    totals.store(job.carry);
    return;
  }
  for (int m = 0; m < MR; ++m) finish_row<V>(job, m, totals.row(m));
}

template <class V, class F, int MR>
BLOCKSCALE_INLINE void multiply_strip_rows(const StripJob<typename V::X>& job, int rows) {
  if (rows == MR) {
    multiply_strip<V, F, MR>(job);
  } else if constexpr (MR > 1) {
    multiply_strip_rows<V, F, MR - 1>(job, rows);
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
  job->bias = task.bias ? job->bias_lanes : nullptr;
  for (int c = 0; c < kStripColumns; ++c) {
    job->bias_lanes[c] = task.bias && c < job->columns ? load_float(task.bias, task.bias_type, n + c) : 0.0f;
  }
}

template <class V, class F>
void run_linear(const LinearTask& task) {
  using X = typename V::X;
  constexpr int64_t kXBytes = V::kXPerQuadRow * static_cast<int64_t>(sizeof(X));  // of one quad and row
  X* packed_x = reinterpret_cast<X*>(task.scratch);
  float* carry = reinterpret_cast<float*>(task.scratch + kPackedXBytes);
  Unit* units = reinterpret_cast<Unit*>(task.scratch + kPackedXBytes + kCarryBytes);
  StripJob<X> job{};
  job.task = &task;
  job.units = units;
  job.staged = task.scratch + kPackedXBytes + kCarryBytes + kMaxUnits * kUnitBytes;

  const int64_t block_rows = task.rows_per_block;
  int64_t quads = 0;
  int64_t k_end = cut_units(task, 0, block_rows * kXBytes, TouchedQuads(), units, &job.unit_count, &quads);
  if (k_end == task.K) {
    job.first = job.last = true;
    const int64_t block_bytes = quads * block_rows * kXBytes;
    const int64_t chunk_blocks = block_bytes < kRowChunkBytes && block_bytes > 0 ? kRowChunkBytes / block_bytes : 1;
    const int64_t chunk_rows = chunk_blocks * block_rows;
    for (int64_t chunk = task.row_begin; chunk < task.row_end; chunk += chunk_rows) {
      const int64_t chunk_end = chunk + chunk_rows < task.row_end ? chunk + chunk_rows : task.row_end;
      job.exact_products = true;
      for (int64_t row = chunk; row < chunk_end; row += block_rows) {
        const int rows = static_cast<int>(chunk_end - row < block_rows ? chunk_end - row : block_rows);
        job.exact_products &=
            V::pack_x(task, row, rows, units, job.unit_count, packed_x + (row - chunk) * quads * V::kXPerQuadRow);
      }
      for (int64_t strip = task.strip_begin; strip < task.strip_end; ++strip) {
        enter_strip(task, strip, &job);
        for (int64_t row = chunk; row < chunk_end; row += block_rows) {
          job.row = row;
          job.x = packed_x + (row - chunk) * quads * V::kXPerQuadRow;
          multiply_strip_rows<V, F, V::kMaxRows>(
              job, static_cast<int>(chunk_end - row < block_rows ? chunk_end - row : block_rows));
        }
      }
    }
    return;
  }

  // Packed x of one row block exceeds the scratch: K goes in chunks, with the totals of a group of strips carried over.
  const int64_t carry_floats = block_rows * V::kTotalsPerRow;
  const int64_t group_strips = kCarryBytes / 4 / carry_floats;
  job.x = packed_x;
  for (int64_t row = task.row_begin; row < task.row_end; row += block_rows) {
    const int rows = static_cast<int>(task.row_end - row < block_rows ? task.row_end - row : block_rows);
    job.row = row;
    for (int64_t group = task.strip_begin; group < task.strip_end; group += group_strips) {
      const int64_t group_end = group + group_strips < task.strip_end ? group + group_strips : task.strip_end;
      for (int64_t k = 0; k < task.K; k = k_end) {
        k_end = cut_units(task, k, block_rows * kXBytes, TouchedQuads(), units, &job.unit_count, &quads);
        job.first = k == 0;
        job.last = k_end == task.K;
        job.exact_products = V::pack_x(task, row, rows, units, job.unit_count, packed_x);
        for (int64_t strip = group; strip < group_end; ++strip) {
          enter_strip(task, strip, &job);
          job.carry = carry + (strip - group) * carry_floats;
          multiply_strip_rows<V, F, V::kMaxRows>(job, rows);
        }
      }
    }
  }
}

// One row block of x as floats in the order that V::x_index gives: k outside a unit is zero in that unit's chunks.
// Returns whether every product with a decoded weight is exact in fp32: 11 + 4 bits of mantissa, and below 2^119 * 2^9.
template <class V>
bool pack_x_as_float(const LinearTask& task, int64_t row, int rows, const Unit* units, int unit_count, float* packed) {
  uint32_t largest = 0;
  for (int u = 0; u < unit_count; ++u) {
    const Unit& unit = units[u];
    const int lead = static_cast<int>(unit.k_begin % 4);
    float* out = packed + static_cast<int64_t>(unit.x_quad) * rows * 4;
    for (int m = 0; m < rows; ++m) {
      float values[kUnitK + 8] = {};
      V::widen(task.x, task.x_type, (row + m) * task.x_stride + unit.k_begin, unit.depth, values + lead);
      for (int k = 0; k < 4 * unit.quads; ++k) {
        const uint32_t magnitude = float_bits(values[k]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
        out[V::x_index(k, rows, m)] = values[k];
      }
    }
  }
  return task.x_type != FloatType::kF32 && largest < (119u + 127u) << 23;
}

}  // namespace
}  // namespace blockscale
