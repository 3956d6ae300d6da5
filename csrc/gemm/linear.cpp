// See linear.h. Splits the plan's items into kernel tasks; each is one indirect call into csrc/isa/<isa>.cpp.
#include "gemm/linear.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "formats/float_mode.h"
#include "gemm/kernel.h"
#include "gemm/pack.h"

namespace blockscale {
namespace {

std::atomic<uint64_t> calls[kIsaCount];

struct Scratch {
  unsigned char* bytes = nullptr;
  ~Scratch() { std::free(bytes); }
  unsigned char* get() {
    if (!bytes) bytes = static_cast<unsigned char*>(std::aligned_alloc(64, kScratchBytes));
    return bytes;
  }
};

struct Run {
  const LinearProblem& problem;
  const Plan& plan;
  LinearTask task;
  LinearKernel kernel;
  std::atomic<bool> failed{false};
};

void run_items(int64_t begin, int64_t end, void* context) {
  Run& run = *static_cast<Run*>(context);
  thread_local Scratch scratch;
  LinearTask task = run.task;
  task.scratch = scratch.get();
  if (!task.scratch) {
    run.failed = true;
    return;
  }
  const PlainArithmetic plain;
  const Plan& plan = run.plan;
  while (begin < end) {
    const int64_t part = begin / plan.strips;
    task.row_begin = part * plan.part_rows;
    task.row_end = std::min(task.row_begin + plan.part_rows, run.problem.M);
    task.strip_begin = begin % plan.strips;
    task.strip_end = std::min(task.strip_begin + (end - begin), plan.strips);
    run.kernel(task);
    calls[static_cast<int>(plan.isa)].fetch_add(1, std::memory_order_relaxed);
    begin += task.strip_end - task.strip_begin;
  }
}

}  // namespace

bool linear(const LinearProblem& problem, const Plan& plan, ParallelFor parallel_for) {
  const int64_t items = problem.M > 0 ? plan.row_parts * plan.strips : 0;
  if (items == 0) return true;
  LinearTask task{};
  task.x = problem.x;
  task.x_type = problem.x_type;
  task.x_stride = problem.x_stride;
  task.x_scales = problem.x_scales;
  task.x_scale_stride_m = problem.x_scale_stride_m;
  task.x_scale_stride_k = problem.x_scale_stride_k;
  task.weight = problem.weight;
  task.N = problem.N;
  task.K = problem.K;
  task.scales = problem.scales;
  task.scale_stride_n = problem.scale_stride_n;
  task.scale_stride_k = problem.scale_stride_k;
  // Blocks larger than the weight are one block; clamping keeps products of block indices and sizes in range.
  task.block_n = std::min(problem.block_n, problem.N);
  task.block_k = std::min(problem.block_k, std::max<int64_t>(problem.K, 1));
  task.bias = problem.bias;
  task.bias_type = problem.bias_type;
  task.out = problem.out;
  task.out_type = problem.out_type;
  task.out_stride = problem.out_stride;
  task.rows_per_block = plan.rows_per_block;
  Run run{problem, plan, task, kernel_table(plan.isa)->linear[static_cast<int>(problem.format)]};
  parallel_for(items, plan.grain, run_items, &run);
  return !run.failed;
}

std::array<uint64_t, kIsaCount> kernel_calls() {
  std::array<uint64_t, kIsaCount> result;
  for (int isa = 0; isa < kIsaCount; ++isa) result[isa] = calls[isa].load(std::memory_order_relaxed);
  return result;
}

}  // namespace blockscale
