// Quantising and dequantising, once for every ISA: walks blocks and rows and finds scales. An ISA supplies `V`
// (csrc/isa/quant_*.h), which works on runs of adjacent elements:
//
//   Largest<Type>: add(values, count), bits()      the largest magnitude so far, as fp32
//   encode<Type>(values, count, scale, codes)      codes[i] = nearest code to values[i] / scale
//   decode<Type>(codes, count, scale, out)         out[i] = decode(codes[i]) * scale, rounded once to Type
//   decode_to_bf16(codes, count, out)              out[i] = decode(codes[i])
//   Plain                                          a V that leaves nothing to another
//
// Magnitudes that are encoded are at most 448 * scale, and what the rounding of scale adds. A V may leave NaN to Plain:
// then bits() is above infinity, or encode returns false and its codes are not right.
//
// Elements that are not adjacent are gathered in chunks first.
//
// Instantiated only with `V` in an anonymous namespace, so nothing here becomes a weak symbol.
#pragma once

#include <stddef.h>

#include "formats/fp8_e4m3.h"
#include "quant/kernel.h"

namespace blockscale {
namespace {

constexpr int64_t kChunk = 256;            // gathered elements: 1 KiB of fp32
constexpr int kGroupsTogether = 8;         // groups of activations whose scales are found before any is encoded,
constexpr int64_t kValuesTogether = 1024;  // if they are no more values than that: 4 KiB of fp32 stay in L1
constexpr int64_t kTileRows = 16;          // rows whose scales fill a cache line
constexpr int64_t kTileGroups = 256;       // and groups of them: 16 KiB of stack
constexpr int64_t kPrefetchRun = 1024;     // bytes of the next block's row that are fetched ahead
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kSmallestNormal = 0x00800000u;  // 2^-126, the least scale: value / scale then never overflows

template <FloatType Type>
struct Element {
  using Stored = uint16_t;
};
template <>
struct Element<FloatType::kF32> {
  using Stored = float;
};
template <FloatType Type>
using Stored = typename Element<Type>::Stored;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline float larger(float a, float b) { return a < b ? b : a; }

inline float group_scale(float amax, const ActivationGroups& groups) {
  const float scale = larger(larger(amax, groups.eps) / Fp8E4m3::kMax, bits_float(kSmallestNormal));
  if (!groups.power_of_two || float_bits(scale) == kInfinity) return scale;
  const uint32_t bits = float_bits(scale);
  return bits_float((bits & 0x7fffffu) ? (bits & 0x7f800000u) + 0x800000u : bits);
}

inline float block_scale(uint32_t amax) {
  return amax == 0 ? 1.0f : larger(bits_float(amax) / Fp8E4m3::kMax, bits_float(kSmallestNormal));
}

// Small enough that a code times the scale, and 2^16 times that, is a finite fp32 number: below 2^102. NaN is not.
inline bool is_moderate(float scale) { return __builtin_fabsf(scale) < bits_float((102u + 127u) << 23); }

// The bits of the largest magnitude in `rows` runs of `count` values.
template <class V, FloatType Type>
inline uint32_t largest_of(const Stored<Type>* values, int64_t stride, int64_t rows, int64_t count) {
  typename V::template Largest<Type> largest;
  for (int64_t n = 0; n < rows; ++n) largest.add(values + n * stride, count);
  if (largest.bits() <= kInfinity) return largest.bits();
  typename V::Plain::template Largest<Type> number;
  for (int64_t n = 0; n < rows; ++n) number.add(values + n * stride, count);
  return number.bits();
}

// ------------------------------------------------------------------------------------------------------- activations
template <class V, FloatType Type>
inline bool encode_groups(const Stored<Type>* x, int64_t count, int64_t group, const float* scales, uint8_t* codes) {
  bool done = true;
  for (int64_t k = 0; k < count; k += group) {
    done &= V::template encode<Type>(x + k, smaller(group, count - k), *scales++, codes + k);
  }
  return done;
}

// `count` values of a row; their groups' scales go to scale_out, `stride` apart.
template <class V, FloatType Type>
void quantize_activation_run(const Stored<Type>* x, int64_t count, const ActivationGroups& settings, uint8_t* codes,
                             float* scale_out, int64_t stride) {
  const int64_t group = settings.group;
  for (int64_t k = 0; k < count;) {
    // Scales of several groups first: each ends in a chain of reductions and a division that would be waited for.
    float amax[kGroupsTogether] = {}, scales[kGroupsTogether];
    int groups = 0;
    int64_t end = k;
    do {
      const int64_t size = smaller(group, count - end);
      amax[groups++] = bits_float(largest_of<V, Type>(x + end, 0, 1, size));
      end += size;
    } while (end < count && groups < kGroupsTogether && end - k + group <= kValuesTogether);
    for (int g = 0; g < kGroupsTogether; ++g) scales[g] = group_scale(amax[g], settings);
    for (int g = 0; g < groups; ++g, scale_out += stride) *scale_out = scales[g];
    if (!encode_groups<V, Type>(x + k, end - k, group, scales, codes + k)) {
      encode_groups<typename V::Plain, Type>(x + k, end - k, group, scales, codes + k);
    }
    k = end;
  }
}

template <class V, FloatType Type>
void quantize_activation_rows(const ActivationTask& task) {
  const ActivationGroups& settings = task.groups;
  const int64_t K = settings.K;
  const auto row = [&](int64_t m) { return static_cast<const Stored<Type>*>(task.x) + m * task.x_stride; };
  if (task.stride_g == 1) {
    for (int64_t m = task.begin; m < task.end; ++m) {
      quantize_activation_run<V, Type>(row(m), K, settings, task.codes + m * K, task.scales + m * task.stride_m, 1);
    }
    return;
  }
  // Scales that are adjacent in m: those of a line's worth of rows are written together.
  float tile[kTileGroups * kTileRows];
  const int64_t run = (K - 1) / settings.group < kTileGroups ? K : settings.group * kTileGroups;
  for (int64_t m = task.begin; m < task.end; m += kTileRows) {
    const int64_t rows = smaller(kTileRows, task.end - m);
    float* scales = task.scales + m * task.stride_m;
    for (int64_t k = 0; k < K; k += run) {
      const int64_t count = smaller(run, K - k);
      for (int64_t r = 0; r < rows; ++r) {
        quantize_activation_run<V, Type>(row(m + r) + k, count, settings, task.codes + (m + r) * K + k, tile + r,
                                         kTileRows);
      }
      for (int64_t g = 0; g * settings.group < count; ++g, scales += task.stride_g) {
        for (int64_t r = 0; r < rows; ++r) scales[r * task.stride_m] = tile[g * kTileRows + r];
      }
    }
  }
}

template <class V>
void quantize_activations_of(const ActivationTask& task) {
  switch (task.type) {
    case FloatType::kF32: return quantize_activation_rows<V, FloatType::kF32>(task);
    case FloatType::kBf16: return quantize_activation_rows<V, FloatType::kBf16>(task);
    case FloatType::kF16: return quantize_activation_rows<V, FloatType::kF16>(task);
  }
}

// ----------------------------------------------------------------------------------------------------------- weights
// Calls visit(values, n, k, count) for rows [n0, n1), columns [k0, k1), with values as fp32 where they are gathered.
template <FloatType Type, class Visit>
void gather_runs(const WeightTask& task, int64_t n0, int64_t n1, int64_t k0, int64_t k1, Visit visit) {
  float values[kChunk];
  for (int64_t n = n0; n < n1; ++n) {
    for (int64_t k = k0; k < k1; k += kChunk) {
      const int64_t count = smaller(kChunk, k1 - k);
      for (int64_t i = 0; i < count; ++i) {
        values[i] = load_float(task.weight, Type, n * task.stride_n + (k + i) * task.stride_k);
      }
      visit(values, n, k, count);
    }
  }
}

// One block. False if it holds an infinity.
template <class V, FloatType Type>
bool quantize_block(const WeightTask& task, int64_t n0, int64_t n1, int64_t k0, int64_t k1, float* scale_out) {
  if (task.stride_k != 1) {
    typename V::Plain::template Largest<FloatType::kF32> largest;
    gather_runs<Type>(task, n0, n1, k0, k1,
                      [&](const float* values, int64_t, int64_t, int64_t count) { largest.add(values, count); });
    if (largest.bits() == kInfinity) return false;
    const float scale = *scale_out = block_scale(largest.bits());
    gather_runs<Type>(task, n0, n1, k0, k1, [&](const float* values, int64_t n, int64_t k, int64_t count) {
      uint8_t* codes = task.codes + n * task.K + k;
      if (!V::template encode<FloatType::kF32>(values, count, scale, codes)) {
        V::Plain::template encode<FloatType::kF32>(values, count, scale, codes);
      }
    });
    return true;
  }
  const Stored<Type>* weight = static_cast<const Stored<Type>*>(task.weight) + k0;
  const uint32_t amax = largest_of<V, Type>(weight + n0 * task.stride_n, task.stride_n, n1 - n0, k1 - k0);
  if (amax == kInfinity) return false;
  const float scale = *scale_out = block_scale(amax);
  // This block comes from L2 the second time; the one to its right, whose rows are too short for the CPU to see a
  // stream in them, is fetched beside it.
  const int64_t run_bytes = smaller((k1 - k0) * static_cast<int64_t>(sizeof(*weight)), kPrefetchRun);
  for (int64_t n = n0; n < n1; ++n) {
    const Stored<Type>* row = weight + n * task.stride_n;
    for (int64_t byte = 0; byte < run_bytes; byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(row + (k1 - k0)) + byte);
    }
    uint8_t* codes = task.codes + n * task.K + k0;
    if (!V::template encode<Type>(row, k1 - k0, scale, codes)) {
      V::Plain::template encode<Type>(row, k1 - k0, scale, codes);
    }
  }
  return true;
}

template <class V, FloatType Type>
bool quantize_weight_blocks(const WeightTask& task, int64_t* bad_block) {
  const int64_t columns = task.K / task.block_k + (task.K % task.block_k != 0);
  for (int64_t row = task.begin; row < task.end; ++row) {
    const int64_t n0 = row * task.block_n;
    const int64_t n1 = n0 + smaller(task.block_n, task.N - n0);
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t k0 = column * task.block_k;
      const int64_t k1 = k0 + smaller(task.block_k, task.K - k0);
      const int64_t block = row * columns + column;
      if (!quantize_block<V, Type>(task, n0, n1, k0, k1, task.scales + block)) {
        *bad_block = block;
        return false;
      }
    }
  }
  return true;
}

template <class V>
bool quantize_weight_of(const WeightTask& task, int64_t* bad_block) {
  switch (task.type) {
    case FloatType::kF32: return quantize_weight_blocks<V, FloatType::kF32>(task, bad_block);
    case FloatType::kBf16: return quantize_weight_blocks<V, FloatType::kBf16>(task, bad_block);
    case FloatType::kF16: return quantize_weight_blocks<V, FloatType::kF16>(task, bad_block);
  }
  return true;
}

// -------------------------------------------------------------------------------------------------------- dequantise
template <class V, FloatType Type>
void dequantize_rows(const DequantizeTask& task) {
  for (int64_t n = task.begin; n < task.end; ++n) {
    const uint8_t* codes = task.codes + n * task.stride_n;
    const float* scale = task.scales.data + n / task.scales.block_n * task.scales.stride_n;
    Stored<Type>* out = static_cast<Stored<Type>*>(task.out) + n * task.K;
    for (int64_t k = 0; k < task.K; scale += task.scales.stride_k) {
      const int64_t end = k + smaller(task.scales.block_k, task.K - k);
      if (task.stride_k == 1) {
        V::template decode<Type>(codes + k, end - k, *scale, out + k);
        k = end;
        continue;
      }
      while (k < end) {
        uint8_t gathered[kChunk];
        const int64_t count = smaller(kChunk, end - k);
        for (int64_t i = 0; i < count; ++i) gathered[i] = codes[(k + i) * task.stride_k];
        V::template decode<Type>(gathered, count, *scale, out + k);
        k += count;
      }
    }
  }
}

template <class V>
void dequantize_of(const DequantizeTask& task) {
  switch (task.out_type) {
    case FloatType::kF32: return dequantize_rows<V, FloatType::kF32>(task);
    case FloatType::kBf16: return dequantize_rows<V, FloatType::kBf16>(task);
    case FloatType::kF16: return dequantize_rows<V, FloatType::kF16>(task);
  }
}

template <class V>
constexpr QuantKernels kQuantKernels = {quantize_activations_of<V>, quantize_weight_of<V>, dequantize_of<V>,
                                        V::decode_to_bf16};

}  // namespace
}  // namespace blockscale
