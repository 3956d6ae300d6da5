// google-benchmark over the kernel table: one kernel at a time, one thread, without torch.
//
//   cmake -S . -B build/bench-kernels -DBLOCKSCALE_BUILD_BENCHMARKS=ON -DBLOCKSCALE_BUILD_OPS=OFF   (or make
//   bench-kernels) build/bench-kernels/benchmarks/bench_kernels --benchmark_filter=avx512_bf16/bf16/M:1/
//
// Names are isa/x/M:.../N:.../K:...; instruction sets that this machine lacks are left out. Each iteration takes the
// next weight of a region larger than the last-level cache, so weights come from memory. Results are not checked here:
// that is the tests' work.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gemm/kernel.h"
#include "gemm/linear.h"
#include "gemm/plan.h"
#include "isa/isa.h"

namespace blockscale {
namespace {

constexpr int64_t kRegionBytes = 384 << 20;  // 12 times a last-level cache of 32 MiB
constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kBlock = 128;

struct Shape {
  int64_t N, K;
};
// A projection of Qwen3-0.6B, of Qwen3-8B and of DeepSeek-V3.
constexpr Shape kShapes[] = {{1024, 2048}, {6144, 4096}, {2112, 7168}};
constexpr int64_t kRows[] = {1, 2, 4, 8, 16, 32, 64, 512};

struct XType {
  const char* name;
  FloatType type;
};
constexpr XType kXTypes[] = {{"bf16", FloatType::kBf16}, {"fp16", FloatType::kF16}, {"fp32", FloatType::kF32}};

// Codes without NaN on huge pages, as packed weights lie. Any order of codes is some weight's packed order.
const uint8_t* region() {
  static const uint8_t* codes = [] {
    auto* bytes = static_cast<uint8_t*>(std::aligned_alloc(kHugePage, kRegionBytes));
    madvise(bytes, kRegionBytes, MADV_HUGEPAGE);
    std::mt19937 random(1);
    for (int64_t i = 0; i < kRegionBytes; ++i) bytes[i] = static_cast<uint8_t>(random() % 0x7f);
    return bytes;
  }();
  return codes;
}

void serial(int64_t count, int64_t, void (*body)(int64_t, int64_t, void*), void* context) { body(0, count, context); }

void run(benchmark::State& state, Isa isa, FloatType x_type, int64_t M, Shape shape) {
  const int64_t grid_n = (shape.N + kBlock - 1) / kBlock, grid_k = (shape.K + kBlock - 1) / kBlock;
  const std::vector<float> scales(grid_n * grid_k, 0.5f);
  const std::vector<uint16_t> x(2 * M * shape.K, 0x3c00);  // 1 or about 0.008, and room for fp32
  std::vector<uint16_t> out(M * shape.N);
  LinearProblem problem;
  problem.M = M;
  problem.N = shape.N;
  problem.K = shape.K;
  problem.x = x.data();
  problem.x_type = x_type;
  problem.x_stride = shape.K;
  problem.scales = scales.data();
  problem.scale_stride_n = grid_k;
  problem.scale_stride_k = 1;
  problem.block_n = problem.block_k = kBlock;
  problem.out = out.data();
  problem.out_type = FloatType::kBf16;
  problem.out_stride = shape.N;
  const Plan plan = plan_linear(M, shape.N, shape.K, x_type, isa, /*threads=*/1);
  const int64_t bytes = shape.N * shape.K, copies = kRegionBytes / bytes;
  int64_t turn = 0;
  for (auto _ : state) {
    problem.weight = region() + turn++ % copies * bytes;
    if (!linear(problem, plan, serial)) {
      state.SkipWithError("out of memory");
      break;
    }
  }
  using benchmark::Counter;
  const double weights = static_cast<double>(bytes);
  state.counters["FLOP/s"] = Counter(2.0 * M * weights, Counter::kIsIterationInvariantRate);
  state.counters["B/s"] = Counter(weights, Counter::kIsIterationInvariantRate);
}

void register_all() {
  for (int i = 0; i < kIsaCount; ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (!isa_report().isas[i].usable) continue;
    for (const XType& x : kXTypes) {
      if (kernel_table(isa)->bf16_x_only && x.type != FloatType::kBf16) continue;  // another table's kernel would run
      for (const Shape& shape : kShapes) {
        for (int64_t M : kRows) {
          const std::string name = std::string(isa_name(isa)) + "/" + x.name + "/M:" + std::to_string(M) +
                                   "/N:" + std::to_string(shape.N) + "/K:" + std::to_string(shape.K);
          benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
            run(state, isa, x.type, M, shape);
          })->Unit(benchmark::kMicrosecond);
        }
      }
    }
  }
}

}  // namespace
}  // namespace blockscale

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  blockscale::register_all();
  blockscale::region();  // filled before anything is timed
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
