// Quantise and dequantise weights: see quantize.h. Rows are walked in chunks that fit L1: one pass to a plain fp32
// buffer, whatever the type and the strides, and one over the buffer, which the compiler can vectorise.
#include "quant/quantize.h"

#include <algorithm>

#include "formats/float_mode.h"
#include "formats/fp8_e4m3.h"
#include "quant/chunks.h"

namespace blockscale {
namespace {

float scale_of(uint32_t amax) {
  if (amax == 0) return 1.0f;
  const float scale = bits_float(amax) / Fp8E4m3::kMax;
  return std::max(scale, bits_float(0x00800000u));  // 2^-126, the smallest normal: w / scale then never overflows
}

struct Weight {
  const void* data;
  FloatType type;
  int64_t stride_n, stride_k;

  void load(int64_t n, int64_t k, int64_t count, float* values) const {
    load_chunk(data, type, n * stride_n + k * stride_k, stride_k, count, values);
  }
};

// Rows [n0, n1), columns [k0, k1): one block. False if it holds an infinity.
__attribute__((noinline)) bool quantize_block(const Weight& weight, int64_t n0, int64_t n1, int64_t k0, int64_t k1,
                                              int64_t K, uint8_t* codes, float* scale_out) {
  float values[kChunk];
  uint32_t amax = 0;
  for (int64_t n = n0; n < n1; ++n) {
    for (int64_t k = k0; k < k1; k += kChunk) {
      const int64_t count = std::min(kChunk, k1 - k);
      weight.load(n, k, count, values);
      amax = largest_magnitude(values, count, amax);
    }
  }
  if (amax == kInfinity) return false;
  const float scale = scale_of(amax);
  *scale_out = scale;
  for (int64_t n = n0; n < n1; ++n) {
    for (int64_t k = k0; k < k1; k += kChunk) {
      const int64_t count = std::min(kChunk, k1 - k);
      weight.load(n, k, count, values);
      uint8_t* out = codes + n * K + k;
      for (int64_t i = 0; i < count; ++i) out[i] = Fp8E4m3::from_float(values[i] / scale);
    }
  }
  return true;
}

// The fp32 number next to `product` toward zero, its last bit set if anything was cut off. That bit keeps a following
// rounding to 16 bits (8 or 11 significant of fp32's 24) from mistaking a value beside a tie for the tie.
inline float round_to_odd(double product) {
  const float nearest = static_cast<float>(product);
  const double back = static_cast<double>(nearest);
  const uint32_t away = (back > product) != (product < 0.0) && back != product;  // nearest lies farther from zero
  const uint32_t inexact = back != product;
  return bits_float((float_bits(nearest) - away) | inexact);
}

// out_type as a template parameter: the loops then hold no branch on it.
template <FloatType Type>
__attribute__((noinline)) void dequantize_row(const uint8_t* codes, int64_t stride_k, int64_t K, const float* scales,
                                              int64_t scale_stride, int64_t block_k, void* out, int64_t out_offset) {
  float values[kChunk], scale_of_value[kChunk];
  const float* scale = scales;
  int64_t left = block_k;  // columns of the current block still to come
  for (int64_t k = 0; k < K; k += kChunk) {
    const int64_t count = std::min(kChunk, K - k);
    for (int64_t i = 0; i < count; ++i) values[i] = Fp8E4m3::to_float(codes[(k + i) * stride_k]);
    for (int64_t i = 0; i < count;) {
      if (left == 0) {
        scale += scale_stride;
        left = block_k;
      }
      const int64_t run = std::min(left, count - i);
      std::fill_n(scale_of_value + i, run, *scale);
      i += run;
      left -= run;
    }
    if constexpr (Type == FloatType::kF32) {
      float* row = static_cast<float*>(out) + out_offset + k;
      for (int64_t i = 0; i < count; ++i) row[i] = values[i] * scale_of_value[i];
    } else {
      // 4 significant bits times 24: exact in double.
      uint16_t* row = static_cast<uint16_t*>(out) + out_offset + k;
      for (int64_t i = 0; i < count; ++i) {
        const float odd = round_to_odd(static_cast<double>(values[i]) * static_cast<double>(scale_of_value[i]));
        row[i] = Type == FloatType::kBf16 ? float_to_bf16(odd) : float_to_fp16(odd);
      }
    }
  }
}

}  // namespace

bool quantize_block_rows(const void* weight, FloatType type, int64_t N, int64_t K, int64_t stride_n, int64_t stride_k,
                         int64_t block_n, int64_t block_k, int64_t begin, int64_t end, uint8_t* codes, float* scales,
                         int64_t* bad_block) {
  const PlainArithmetic plain;
  const Weight source{weight, type, stride_n, stride_k};
  const int64_t columns = K / block_k + (K % block_k != 0);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t n0 = row * block_n;
    const int64_t n1 = n0 + std::min(block_n, N - n0);
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t k0 = column * block_k;
      const int64_t k1 = k0 + std::min(block_k, K - k0);
      const int64_t block = row * columns + column;
      if (!quantize_block(source, n0, n1, k0, k1, K, codes, scales + block)) {
        *bad_block = block;
        return false;
      }
    }
  }
  return true;
}

void dequantize_rows(const uint8_t* codes, int64_t stride_n, int64_t stride_k, int64_t N, int64_t K,
                     const ScaleGrid& scales, int64_t begin, int64_t end, void* out, FloatType out_type) {
  const PlainArithmetic plain;
  for (int64_t n = begin; n < std::min(end, N); ++n) {
    const uint8_t* row = codes + n * stride_n;
    const float* row_scales = scales.data + n / scales.block_n * scales.stride_n;
    switch (out_type) {
      case FloatType::kF32:
        dequantize_row<FloatType::kF32>(row, stride_k, K, row_scales, scales.stride_k, scales.block_k, out, n * K);
        break;
      case FloatType::kBf16:
        dequantize_row<FloatType::kBf16>(row, stride_k, K, row_scales, scales.stride_k, scales.block_k, out, n * K);
        break;
      case FloatType::kF16:
        dequantize_row<FloatType::kF16>(row, stride_k, K, row_scales, scales.stride_k, scales.block_k, out, n * K);
        break;
    }
  }
}

}  // namespace blockscale
