// Several row blocks that share one decoding of the codes. For each unit of a strip, the first block decodes as it
// multiplies and keeps the decoded codes (a panel: 16 columns x 128 k of fp32, 8 KiB of L1), and the other blocks read
// them. The arithmetic of each row is that of multiply_strips.
//
//   for a chunk of rows              packed x in L2
//     for a chunk of k               all of K, unless that leaves too few rows to share a panel
//       for each strip
//         for each unit              block 0: codes -> panel, chains, totals    blocks 1 ..: panel -> chains, totals
#pragma once

#include "gemm/microkernel.h"

namespace blockscale {
namespace {

// Totals of the rows stay in L1 beside the panel and a block's x: 128 bytes each.
constexpr int64_t kPanelRows = 64;

// One unit of a strip for equal row blocks of MR rows, one after the other in rows, packed x and totals. The first
// block decodes the codes into the panel if there are any; else it reads the panel as the others do.
template <class V, class F, int MR>
void multiply_unit(const StripJob<typename V::X>& job, const Unit& unit, const typename V::Scale& scale,
                   const uint8_t* codes, float* panel, float* totals, int blocks) {
  constexpr int kQuadX = MR * V::kXPerQuadRow;
  constexpr int kParts = V::template parts<MR>();
  float scratch[MR];
  StripJob<typename V::X> block = job;
  for (int b = 0; b < blocks; ++b) {
    const typename V::X* x = block.x;
    const float* x_scales = row_scales(block, unit, MR, scratch);
    for (int part = 0; part < kParts; ++part) {
      typename V::template Chains<MR, 1> chains;
      chains.clear();
      const int64_t offset = part * (64 / kParts);
      if (codes) {
        const typename V::template Decoder<F> decoder(job.exact_products);
        for (int q = 0; q < unit.quads; ++q) {
          if (part == 0) __builtin_prefetch(codes + V::kPanelPrefetchBytes + 64 * q);
          chains.step(decoder, codes + 64 * q + offset, x + q * kQuadX, panel + 64 * q + offset);
        }
      } else {
        for (int q = 0; q < unit.quads; ++q) chains.step(panel + 64 * q + offset, x + q * kQuadX);
      }
      chains.fold(0, part, scale, x_scales, totals);
    }
    codes = nullptr;
    block.x += unit.quads * kQuadX;
    block.row += MR;
    totals += MR * V::kTotalsPerRow;
  }
}

template <class V>
using UnitKernel = void (*)(const StripJob<typename V::X>& job, const Unit& unit, const typename V::Scale& scale,
                            const uint8_t* codes, float* panel, float* totals, int blocks);

template <class V, class F, int MR>
BLOCKSCALE_INLINE UnitKernel<V> unit_kernel(int rows) {
  if (rows == MR) return multiply_unit<V, F, MR>;
  if constexpr (MR > 1) return unit_kernel<V, F, MR - 1>(rows);
  return nullptr;
}

template <class V, class F>
void run_panels(const LinearTask& task) {
  using X = typename V::X;
  constexpr int64_t kXBytes = V::kXPerQuadRow * static_cast<int64_t>(sizeof(X));  // of one quad and row
  X* packed_x = reinterpret_cast<X*>(task.scratch);
  float* all_totals = reinterpret_cast<float*>(task.scratch + kPackedXBytes);
  Unit* units = reinterpret_cast<Unit*>(task.scratch + kPackedXBytes + kTotalsBytes);
  alignas(64) float panel[(kUnitK / 4 + 1) * 64];
  StripJob<X> job{};
  job.task = &task;
  job.units = units;
  job.staged = task.scratch + kPackedXBytes + kTotalsBytes + kMaxUnits * kUnitBytes;

  // Rows of a chunk: whole blocks, as many as fit L2 with all of K, but some in any case.
  const int64_t block_rows = task.rows_per_block;
  int64_t quads = 0;
  const int64_t k_of_one = cut_units(task, 0, block_rows * kXBytes, TouchedQuads(), units, &job.unit_count, &quads);
  const int64_t block_bytes = quads * block_rows * kXBytes;
  int64_t chunk_blocks = k_of_one == task.K && block_bytes > 0 ? kRowChunkBytes / block_bytes : 1;
  if (chunk_blocks * block_rows > kPanelRows) chunk_blocks = kPanelRows / block_rows;
  if (chunk_blocks < V::kPanelBlocks) chunk_blocks = V::kPanelBlocks;
  const int64_t chunk_rows = chunk_blocks * block_rows;

  for (int64_t chunk = task.row_begin; chunk < task.row_end; chunk += chunk_rows) {
    const int64_t rows = task.row_end - chunk < chunk_rows ? task.row_end - chunk : chunk_rows;
    const int full_blocks = static_cast<int>(rows / block_rows), last_rows = static_cast<int>(rows % block_rows);
    const UnitKernel<V> full = unit_kernel<V, F, V::kMaxRows>(static_cast<int>(block_rows));
    const UnitKernel<V> rest = unit_kernel<V, F, V::kMaxRows>(last_rows);
    int64_t k_end = cut_units(task, 0, rows * kXBytes, TouchedQuads(), units, &job.unit_count, &quads);
    const bool whole = k_end == task.K;
    const int64_t strip_totals = rows * V::kTotalsPerRow;
    const int64_t group_strips = whole ? task.strip_end - task.strip_begin : kTotalsBytes / 4 / strip_totals;
    for (int64_t group = task.strip_begin; group < task.strip_end; group += group_strips) {
      const int64_t group_end = group + group_strips < task.strip_end ? group + group_strips : task.strip_end;
      for (int64_t k = 0; k < task.K || k == 0; k = k_end) {
        k_end = cut_units(task, k, rows * kXBytes, TouchedQuads(), units, &job.unit_count, &quads);
        job.exact_products = true;
        for (int u = 0; u < job.unit_count; ++u) {
          Unit unit = units[u];
          X* unit_x = packed_x + unit.x_quad * rows * V::kXPerQuadRow;
          unit.x_quad = 0;
          for (int64_t row = 0; row < rows; row += block_rows) {
            const int count = static_cast<int>(rows - row < block_rows ? rows - row : block_rows);
            job.exact_products &=
                V::pack_x(task, chunk + row, count, &unit, 1, unit_x + row * unit.quads * V::kXPerQuadRow);
          }
        }
        for (int64_t strip = group; strip < group_end; ++strip) {
          enter_strip(task, strip, &job);
          float* totals = whole ? all_totals : all_totals + (strip - group) * strip_totals;
          if (k == 0) V::clear(totals, rows);
          for (int u = 0; u < job.unit_count; ++u) {
            const Unit& unit = units[u];
            const uint8_t* codes = unit_codes(job, unit, 0);
            alignas(64) float lanes[kStripColumns];
            const typename V::Scale scale = unit_scale<V, false>(job, unit, lanes);
            job.row = chunk;
            job.x = packed_x + unit.x_quad * rows * V::kXPerQuadRow;
            full(job, unit, scale, codes, panel, totals, full_blocks);
            if (!rest) continue;
            job.row += full_blocks * block_rows;
            job.x += full_blocks * block_rows * unit.quads * V::kXPerQuadRow;
            rest(job, unit, scale, full_blocks > 0 ? nullptr : codes, panel,
                 totals + full_blocks * block_rows * V::kTotalsPerRow, 1);
          }
          if (k_end < task.K) continue;
          job.row = chunk;
          for (int m = 0; m < rows; ++m) finish_row<V>(job, m, V::row_of(totals + m * V::kTotalsPerRow));
        }
        if (task.K == 0) break;
      }
    }
  }
}

}  // namespace
}  // namespace blockscale
