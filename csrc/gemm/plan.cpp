// See plan.h. Constants carry the measurement that set them.
#include "gemm/plan.h"

#include <algorithm>

#include "gemm/kernel.h"
#include "gemm/pack.h"

namespace blockscale {

// The tables of csrc/isa/<name>.cpp, for the rows of isa.inc that have kernels.
#define BLOCKSCALE_TABLE_0(name) nullptr
#define BLOCKSCALE_TABLE_1(name) &kernels_##name
#define BLOCKSCALE_TABLE_OF(name, compiled) BLOCKSCALE_TABLE_(name, compiled)
#define BLOCKSCALE_TABLE_(name, compiled) BLOCKSCALE_TABLE_##compiled(name)
#define BLOCKSCALE_ISA(enumerator, name, compiled) extern const KernelTable kernels_##name;
#include "isa/isa.inc"

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Waking a thread of torch's pool costs about 5 us; 128 Ki code-rows (codes x ceil(rows / 4)) are about as long at 25
// codes/ns.
constexpr int64_t kMinTaskCost = 128 << 10;

// With fewer strips than this for each thread, rows are cut too, so that threads end together.
constexpr int64_t kStripsPerThread = 4;

}  // namespace

const KernelTable* kernel_table(Isa isa) {
  static constexpr const KernelTable* kTables[kIsaCount] = {
#define BLOCKSCALE_ISA(enumerator, name, compiled) BLOCKSCALE_TABLE_OF(name, compiled),
#include "isa/isa.inc"
  };
  return kTables[static_cast<int>(isa)];
}

Plan plan_linear(int64_t M, int64_t N, int64_t K, FloatType x_type, Isa active, int threads) {
  Plan plan{};
  plan.isa = active;
  plan.reason = "the active instruction set";
  const KernelTable* table = kernel_table(active);
  while (!table || (table->bf16_x_only && x_type != FloatType::kBf16)) {
    plan.reason =
        table ? "x is not bf16, and is never narrowed to it" : "no kernel is compiled for the active instruction set";
    plan.isa = static_cast<Isa>(static_cast<int>(plan.isa) - 1);
    table = kernel_table(plan.isa);
  }

  plan.rows_reason = table->rows_reason;
  if (M <= table->max_rows) {
    plan.rows_per_block = static_cast<int>(std::max<int64_t>(M, 1));
  } else {
    const int64_t blocks = ceil_div(M, table->preferred_rows);
    plan.rows_per_block = static_cast<int>(ceil_div(ceil_div(M, blocks), table->row_granule) * table->row_granule);
  }

  plan.strips = strip_count(N);
  plan.row_parts = 1;
  plan.part_rows = M;
  const int64_t blocks = ceil_div(M, plan.rows_per_block);
  if (threads > 1 && plan.strips > 0 && plan.strips < kStripsPerThread * threads && blocks > 1) {
    const int64_t wanted = std::min(blocks, ceil_div(kStripsPerThread * threads, plan.strips));
    plan.part_rows = ceil_div(blocks, wanted) * plan.rows_per_block;
    plan.row_parts = ceil_div(M, plan.part_rows);
  }

  const int64_t item_cost = std::max<int64_t>(1, kStripColumns * K * ceil_div(plan.part_rows, 4));
  plan.grain = std::max<int64_t>(1, kMinTaskCost / item_cost);
  return plan;
}

}  // namespace blockscale
