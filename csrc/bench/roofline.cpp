// What the machine can do at most, measured beside the kernels by `python -m blockscale bench`: reading memory, copying
// it, and the peak of each multiply instruction. Built as _bench.so, plain C functions for ctypes: no op is registered.
//
// The work runs on torch's thread pool, as the kernels' does, so that a limit and a kernel differ in nothing else. Each
// function picks its instructions by the CPU at run time; the file itself is compiled for baseline x86-64.
#include <immintrin.h>
#include <sched.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kStep = 512;  // bytes in flight per turn of the loop: eight registers of 64
constexpr int64_t kPage = 4096;

// body(t) on each of `threads` threads.
template <class Body>
void on_threads(int threads, const Body& body) {
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) body(t);
  });
}

// Share t of `bytes`, in whole pages.
int64_t share(int64_t bytes, int64_t t, int threads) { return bytes / kPage * t / threads * kPage; }

// One read loop for each register width, over memory aligned to 64: eight loads a turn into four registers. Nothing is
// prefetched by hand. The OR of all bytes is returned so that no load can be dropped.
#define BLOCKSCALE_READ(name, isa, Register, load, zero, merge)                 \
  __attribute__((target(isa))) uint64_t name(const char* data, int64_t bytes) { \
    constexpr int64_t kWidth = sizeof(Register);                                \
    Register sum[4] = {zero(), zero(), zero(), zero()};                         \
    for (int64_t i = 0; i + kStep <= bytes; i += kStep) {                       \
      for (int64_t j = 0; j < kStep; j += 4 * kWidth) {                         \
        for (int r = 0; r < 4; ++r) {                                           \
          const auto* source = reinterpret_cast<const Register*>(data + i + j); \
          sum[r] = merge(sum[r], load(source + r));                             \
        }                                                                       \
      }                                                                         \
    }                                                                           \
    uint64_t words[sizeof(sum) / 8], all = 0;                                   \
    std::memcpy(words, sum, sizeof(sum));                                       \
    for (const uint64_t word : words) all |= word;                              \
    return all;                                                                 \
  }
BLOCKSCALE_READ(read_sse2, "sse2", __m128i, _mm_load_si128, _mm_setzero_si128, _mm_or_si128)
BLOCKSCALE_READ(read_avx2, "avx2", __m256i, _mm256_load_si256, _mm256_setzero_si256, _mm256_or_si256)
BLOCKSCALE_READ(read_avx512, "avx512f", __m512i, _mm512_load_si512, _mm512_setzero_si512, _mm512_or_si512)
#undef BLOCKSCALE_READ

uint64_t read_bytes(const char* data, int64_t bytes) {
  if (__builtin_cpu_supports("avx512f")) return read_avx512(data, bytes);
  return __builtin_cpu_supports("avx2") ? read_avx2(data, bytes) : read_sse2(data, bytes);
}

// Independent accumulators cover the latency. Written as assembly, as a compiler would fold a product of constants.
// They accumulate zeros, which cost what other numbers do.
#define BLOCKSCALE_ONE(instruction, width, i) instruction " %%" width "15,%%" width "14,%%" width #i "\n\t"
#define BLOCKSCALE_SIX(instruction, width, a, b, c, d, e, f) \
  BLOCKSCALE_ONE(instruction, width, a)                      \
  BLOCKSCALE_ONE(instruction, width, b)                      \
  BLOCKSCALE_ONE(instruction, width, c)                      \
  BLOCKSCALE_ONE(instruction, width, d)                      \
  BLOCKSCALE_ONE(instruction, width, e) BLOCKSCALE_ONE(instruction, width, f)
#define BLOCKSCALE_TWELVE(instruction, width) \
  BLOCKSCALE_SIX(instruction, width, 0, 1, 2, 3, 4, 5) BLOCKSCALE_SIX(instruction, width, 6, 7, 8, 9, 10, 11)
// Zen 5 starts two VDPBF16PS a cycle, each 6 cycles long: with 12 chains any hiccup costs (489 GFLOP/s), with 16 none
// does (525). Registers 16 to 19 exist with AVX-512 only, and baseline code uses none of them.
#define BLOCKSCALE_SIXTEEN(instruction, width) \
  BLOCKSCALE_TWELVE(instruction, width)        \
  BLOCKSCALE_ONE(instruction, width, 16)       \
  BLOCKSCALE_ONE(instruction, width, 17)       \
  BLOCKSCALE_ONE(instruction, width, 18)       \
  BLOCKSCALE_ONE(instruction, width, 19)

void clear_registers() {
  asm volatile("vzeroall" ::
                   : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                     "xmm12", "xmm13", "xmm14", "xmm15");
}

// Cleared at the end, too: code that follows would pay for used upper halves.
#define BLOCKSCALE_MULTIPLY(name, instructions)                                                                   \
  void name(int64_t turns) {                                                                                      \
    clear_registers();                                                                                            \
    for (int64_t i = 0; i < turns; ++i) {                                                                         \
      asm volatile(instructions ::                                                                                \
                       : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
                         "xmm11");                                                                                \
    }                                                                                                             \
    clear_registers();                                                                                            \
  }
BLOCKSCALE_MULTIPLY(multiply_ymm, BLOCKSCALE_TWELVE("vfmadd231ps", "ymm"))
BLOCKSCALE_MULTIPLY(multiply_zmm, BLOCKSCALE_SIXTEEN("vfmadd231ps", "zmm"))
BLOCKSCALE_MULTIPLY(dot_bf16, BLOCKSCALE_SIXTEEN("vdpbf16ps", "zmm"))
#undef BLOCKSCALE_MULTIPLY
#undef BLOCKSCALE_SIXTEEN
#undef BLOCKSCALE_TWELVE
#undef BLOCKSCALE_SIX
#undef BLOCKSCALE_ONE

struct Peak {
  void (*run)(int64_t turns);
  int flops;  // of one turn
};

// The loop of a peak, null where this CPU lacks the instruction.
Peak peak_of(const char* name) {
  if (!std::strcmp(name, "fp32_ymm") && __builtin_cpu_supports("fma")) return {multiply_ymm, 12 * 16};
  if (!std::strcmp(name, "fp32_zmm") && __builtin_cpu_supports("avx512f")) return {multiply_zmm, 16 * 32};
  if (!std::strcmp(name, "bf16_dot") && __builtin_cpu_supports("avx512bf16")) return {dot_bf16, 16 * 64};
  return {nullptr, 0};
}

std::atomic<uint64_t> sink;

}  // namespace

#define BLOCKSCALE_EXPORT extern "C" __attribute__((visibility("default")))

// Reads `bytes` from `data`, aligned to 64, on `threads` threads, each a contiguous share.
BLOCKSCALE_EXPORT void blockscale_bench_read(const char* data, int64_t bytes, int threads) {
  on_threads(threads, [&](int64_t t) {
    const int64_t begin = share(bytes, t, threads), end = share(bytes, t + 1, threads);
    sink.fetch_or(read_bytes(data + begin, end - begin), std::memory_order_relaxed);
  });
}

// Copies with libc's memcpy on `threads` threads.
BLOCKSCALE_EXPORT void blockscale_bench_copy(char* target, const char* source, int64_t bytes, int threads) {
  on_threads(threads, [&](int64_t t) {
    const int64_t begin = share(bytes, t, threads), end = t + 1 == threads ? bytes : share(bytes, t + 1, threads);
    std::memcpy(target + begin, source + begin, static_cast<size_t>(end - begin));
  });
}

// Multiplies in registers, `turns` turns on each thread. `name`: fp32_ymm, fp32_zmm or bf16_dot.
// Returns the floating-point operations done, 0 where this CPU lacks the instruction.
BLOCKSCALE_EXPORT int64_t blockscale_bench_multiply(const char* name, int64_t turns, int threads) {
  const Peak peak = peak_of(name);
  if (!peak.run) return 0;
  on_threads(threads, [&](int64_t) { peak.run(turns); });
  return turns * peak.flops * threads;
}

// Binds the threads of torch's pool to one CPU each, thread t to cpus[t]. Left alone, two of them can share a CPU for
// several rounds, in which a call takes a scheduler's slice of 8 ms.
BLOCKSCALE_EXPORT void blockscale_bench_bind(const int* cpus, int threads) {
  on_threads(threads, [&](int64_t t) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpus[t], &one);
    sched_setaffinity(0, sizeof(one), &one);
  });
}

// A chain of `turns` times four additions, each waiting for the last: four cycles a turn on every x86-64 CPU.
BLOCKSCALE_EXPORT void blockscale_bench_cycles(int64_t turns) {
  uint64_t x = 0;
  for (int64_t i = 0; i < turns; ++i) {
    asm volatile("add $1,%0\n\tadd $1,%0\n\tadd $1,%0\n\tadd $1,%0" : "+r"(x));
  }
}
