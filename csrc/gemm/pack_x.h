// x of one row block as fp32 in the order that the fp32 kernels read, [unit][k-pair][row][2]: one 64-bit broadcast is
// the pair (even k, odd k) of a row. k outside a unit is zero in that unit's chunks.
#pragma once

#include "gemm/microkernel.h"

namespace blockscale {
namespace {

// V::widen(x, type, index, count, out) converts `count` adjacent elements. A row's unit is widened into L1 and spread
// from there in pairs: 0.5 cycles an element. The rows' next units are prefetched: each is too short for the hardware
// to foresee, and waiting for them took 3 cycles an element.
template <class V>
BLOCKSCALE_INLINE void pack_x_pairs(const LinearTask& task, int64_t row, int rows, const Unit* units, int unit_count,
                                    float* packed) {
  const int64_t element = task.x_type == FloatType::kF32 ? 4 : 2;
  for (int u = 0; u < unit_count; ++u) {
    const Unit& unit = units[u];
    float* out = packed + static_cast<int64_t>(unit.x_quad) * rows * 4;
    for (int m = 0; m < rows; ++m) {
      alignas(64) float values[kUnitK + 8];
      float* target = rows == 1 ? out : values;
      const int64_t index = (row + m) * task.x_stride + unit.k_begin;
      const char* next = static_cast<const char*>(task.x) + (index + unit.depth) * element;
      for (int64_t byte = 0; byte < unit.depth * element; byte += 64) __builtin_prefetch(next + byte);
      if (unit.staged) __builtin_memset(target, 0, static_cast<size_t>(unit.quads) * 16);
      V::widen(task.x, task.x_type, index, unit.depth, target + unit.k_begin % 4);
      if (rows == 1) continue;
      float* pair_out = out + 2 * m;
      for (int pair = 0; pair < 2 * unit.quads; ++pair, pair_out += 2 * rows) {
        __builtin_memcpy(pair_out, values + 2 * pair, 8);
      }
    }
  }
}

}  // namespace
}  // namespace blockscale
