// The readable quantiser: plain loops over the definitions in formats/. Every other quant_*.h gives the same bytes with
// registers, and sends ends of runs here.
#pragma once

#include "quant/rows.h"

// Or the compiler would unroll these loops into every kernel that leaves a rest to them.
#define BLOCKSCALE_OUT_OF_LINE __attribute__((noinline))

namespace blockscale {
namespace {

// The fp32 number next to `product` toward zero, its last bit set if anything was cut off. That bit keeps a following
// rounding to 16 bits (8 or 11 significant of fp32's 24) from mistaking a value beside a tie for the tie.
inline float round_to_odd(double product) {
  const float nearest = static_cast<float>(product);
  const double back = static_cast<double>(nearest);
  const uint32_t away = (back > product) != (product < 0.0) && back != product;  // nearest lies farther from zero
  const uint32_t inexact = back != product;
  return bits_float((float_bits(nearest) - away) | inexact);
}

struct QuantScalar {
  using Plain = QuantScalar;

  template <FloatType Type>
  class Largest {
   public:
    // Magnitudes compare as integers; a NaN is above Inf.
    BLOCKSCALE_OUT_OF_LINE void add(const Stored<Type>* values, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        const int32_t magnitude = static_cast<int32_t>(float_bits(load_float(values, Type, i)) & 0x7fffffffu);
        const int32_t number = magnitude > static_cast<int32_t>(kInfinity) ? 0 : magnitude;
        largest_ = number > largest_ ? number : largest_;
      }
    }
    uint32_t bits() const { return static_cast<uint32_t>(largest_); }

   private:
    int32_t largest_ = 0;
  };

  template <FloatType Type>
  BLOCKSCALE_OUT_OF_LINE static bool encode(const Stored<Type>* values, int64_t count, float scale, uint8_t* codes) {
    for (int64_t i = 0; i < count; ++i) codes[i] = Fp8E4m3::from_float(load_float(values, Type, i) / scale);
    return true;
  }

  template <FloatType Type>
  BLOCKSCALE_OUT_OF_LINE static void decode(const uint8_t* codes, int64_t count, float scale, Stored<Type>* out) {
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (Type == FloatType::kF32) {
        out[i] = Fp8E4m3::to_float(codes[i]) * scale;
      } else {
        // 4 significant bits times 24: exact in double.
        const float odd = round_to_odd(static_cast<double>(Fp8E4m3::to_float(codes[i])) * static_cast<double>(scale));
        out[i] = Type == FloatType::kBf16 ? float_to_bf16(odd) : float_to_fp16(odd);
      }
    }
  }

  BLOCKSCALE_OUT_OF_LINE static void decode_to_bf16(const uint8_t* codes, int64_t count, uint16_t* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint16_t>(float_bits(Fp8E4m3::to_float(codes[i])) >> 16);
  }
};

}  // namespace
}  // namespace blockscale
