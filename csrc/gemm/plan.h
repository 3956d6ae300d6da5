// Which kernel multiplies a shape, and how its work is cut: a pure function, testable for any CPU on any CPU.
// Nothing here changes a result: the bits of a row depend on the ISA alone.
#pragma once

#include <cstdint>

#include "formats/floats.h"
#include "isa/isa.h"

namespace blockscale {

struct KernelTable;

// The kernels of an ISA, or null if none are compiled.
const KernelTable* kernel_table(Isa isa);

struct Plan {
  Isa isa;                  // whose kernel runs: the active ISA, or a lower one that takes this x
  const char* reason;       // why this ISA, in a few words
  int rows_per_block;       // rows that share one pass over a strip
  const char* rows_reason;  // why at most that many
  int64_t row_parts;        // parts into which M is cut, each a multiple of rows_per_block except the last
  int64_t part_rows;
  int64_t strips;  // ceil(N / 16); the work is row_parts x strips, strips fastest
  int64_t grain;   // fewest (part, strip) items worth a thread
};

// M, N, K >= 0; threads >= 1.
Plan plan_linear(int64_t M, int64_t N, int64_t K, FloatType x_type, Isa active, int threads);

}  // namespace blockscale
