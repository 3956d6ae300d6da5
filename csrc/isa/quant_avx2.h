// Quantising and dequantising with AVX2, FMA and F16C: 8 values, or 16 codes, in a register. quant_avx512.h explains
// the roundings; they are the same here. The ends of runs, short of a register, go through the plain loops.
#pragma once

#include <immintrin.h>

#include "isa/quant_scalar.h"

namespace blockscale {
namespace {

struct QuantAvx2 {
  using Plain = QuantScalar;

  template <FloatType Type>
  static __m256 load(const Stored<Type>* values) {
    if constexpr (Type == FloatType::kF32) {
      return _mm256_loadu_ps(values);
    } else {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
      return Type == FloatType::kBf16 ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))
                                      : _mm256_cvtph_ps(half);
    }
  }

  static __m256 magnitude_of(__m256 value) {
    return _mm256_and_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
  }

  static __m256i exponent_of(__m256 value) {
    return _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x7f800000));
  }

  // ---------------------------------------------------------------------------------------------------------- largest
  // Magnitudes as integers, of their own width.
  template <FloatType Type>
  class Largest {
   public:
    void add(const Stored<Type>* values, int64_t count) {
      constexpr int kLanes = 32 / sizeof(*values);
      int64_t i = 0;
      for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
        include(values + i);
        include(values + i + kLanes);
      }
      if (i + kLanes <= count) {
        include(values + i);
        i += kLanes;
      }
      if (i < count) rest_.add(values + i, count - i);
    }
    uint32_t bits() const {
      const __m128i low = _mm256_castsi256_si128(largest_), high = _mm256_extracti128_si256(largest_, 1);
      uint32_t largest;
      if constexpr (Type == FloatType::kF32) {
        const __m128i four = _mm_max_epi32(low, high);
        const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
        const __m128i one = _mm_max_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1)));
        largest = static_cast<uint32_t>(_mm_cvtsi128_si32(one));
      } else {
        // The smallest of the complements: the one horizontal instruction there is.
        const __m128i ones = _mm_set1_epi16(-1);
        const __m128i half = _mm_xor_si128(_mm_minpos_epu16(_mm_xor_si128(_mm_max_epi16(low, high), ones)), ones);
        largest = static_cast<uint32_t>(_mm_cvtsi128_si32(
            Type == FloatType::kBf16 ? _mm_slli_epi32(half, 16) : _mm_castps_si128(_mm_cvtph_ps(half))));
      }
      return largest > rest_.bits() ? largest : rest_.bits();
    }

   private:
    void include(const Stored<Type>* values) {
      const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
      if constexpr (Type == FloatType::kF32) {
        largest_ = _mm256_max_epi32(largest_, _mm256_and_si256(value, _mm256_set1_epi32(0x7fffffff)));
      } else {
        largest_ = _mm256_max_epi16(largest_, _mm256_and_si256(value, _mm256_set1_epi16(0x7fff)));
      }
    }

    __m256i largest_ = _mm256_setzero_si256();
    QuantScalar::Largest<Type> rest_;
  };

  // ----------------------------------------------------------------------------------------------------------- encode
  // One code in each dword.
  static __m256i nearest_codes(__m256 value) {
    const __m256 magnitude = magnitude_of(value);
    const __m256i power = _mm256_max_epi32(exponent_of(magnitude), _mm256_set1_epi32(0x3c800000));
    const __m256i rounder = _mm256_add_epi32(power, _mm256_set1_epi32((20 << 23) + 152));
    const __m256i eighths = _mm256_castps_si256(_mm256_add_ps(magnitude, _mm256_castsi256_ps(rounder)));
    const __m256i code = _mm256_add_epi32(eighths, _mm256_srli_epi32(eighths, 20));
    const __m256i sign = _mm256_srli_epi32(_mm256_castps_si256(value), 24);
    const __m256i seven = _mm256_set1_epi32(0x7f);
    return _mm256_or_si256(_mm256_and_si256(code, seven), _mm256_andnot_si256(seven, sign));
  }

  template <FloatType Type>
  static bool encode(const Stored<Type>* values, int64_t count, float scale, uint8_t* codes) {
    const __m256 divisor = _mm256_set1_ps(scale);
    __m256 nan = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
      __m256 value[4];
      for (int j = 0; j < 4; ++j) value[j] = _mm256_div_ps(load<Type>(values + i + 8 * j), divisor);
      nan = _mm256_or_ps(nan, _mm256_or_ps(_mm256_cmp_ps(value[0], value[1], _CMP_UNORD_Q),
                                           _mm256_cmp_ps(value[2], value[3], _CMP_UNORD_Q)));
      // Packing works on each 128-bit half: fours of codes come out as 0 2 4 6 1 3 5 7.
      const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(nearest_codes(value[0]), nearest_codes(value[1])),
                                                _mm256_packus_epi32(nearest_codes(value[2]), nearest_codes(value[3])));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i),
                          _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    }
    if (i < count) QuantScalar::encode<Type>(values + i, count - i, scale, codes + i);
    return _mm256_movemask_ps(nan) == 0;
  }

  // ----------------------------------------------------------------------------------------------------------- decode
  // 16 codes sign-extended, and their magnitudes as fp16 times 2^-8.
  struct Codes {
    __m256i extended;
    __m256i magnitude;
    __m256i nan;
    explicit Codes(const uint8_t* codes) {
      extended = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
      const __m256i seven = _mm256_and_si256(extended, _mm256_set1_epi16(0x7f));
      magnitude = _mm256_slli_epi16(seven, 7);
      nan = _mm256_cmpeq_epi16(seven, _mm256_set1_epi16(0x7f));
    }
    void widen(__m256* low, __m256* high) const {
      const __m256i quiet = _mm256_blendv_epi8(magnitude, _mm256_set1_epi16(0x7e00), nan);
      const __m256i half = _mm256_or_si256(quiet, _mm256_and_si256(extended, _mm256_set1_epi16(-0x8000)));
      *low = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
      *high = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    }
  };

  static __m256i to_bf16(__m256 value, __m256 scale256) {
    const __m256i power = _mm256_max_epi32(exponent_of(_mm256_mul_ps(value, scale256)), _mm256_set1_epi32(0x00800000));
    const __m256i rounder = _mm256_add_epi32(power, _mm256_set1_epi32((16 << 23) + 0x10000 - 128));
    const __m256i counts = _mm256_castps_si256(_mm256_fmadd_ps(value, scale256, _mm256_castsi256_ps(rounder)));
    return _mm256_add_epi32(counts, _mm256_srli_epi32(power, 16));
  }

  static __m128i to_fp16(__m256 value, __m256 scale256) {
    const __m256i exponent = exponent_of(_mm256_mul_ps(value, scale256));
    const __m256i power = _mm256_min_epi32(_mm256_max_epi32(exponent, _mm256_set1_epi32(0x38800000)),
                                           _mm256_set1_epi32(0x48000000));  // 2^-14 .. 2^17
    const __m256 rounder = _mm256_castsi256_ps(_mm256_add_epi32(power, _mm256_set1_epi32(13 << 23)));
    const __m256 rounded = _mm256_sub_ps(_mm256_fmadd_ps(value, scale256, rounder), rounder);
    return _mm256_cvtps_ph(rounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  // Two registers of 8 dwords, whose low 16 bits count, to 16 words in order.
  static __m256i low_words(__m256i first, __m256i second) {
    const __m256i mask = _mm256_set1_epi32(0xffff);
    const __m256i words = _mm256_packus_epi32(_mm256_and_si256(first, mask), _mm256_and_si256(second, mask));
    return _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0));
  }

  template <FloatType Type>
  static __m256i to_half(const Codes& codes, __m256 scale256, __m256i flip) {
    const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(codes.magnitude));
    const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(codes.magnitude, 1));
    __m256i numbers;
    if constexpr (Type == FloatType::kBf16) {
      numbers = low_words(to_bf16(low, scale256), to_bf16(high, scale256));
    } else {
      numbers = _mm256_set_m128i(to_fp16(high, scale256), to_fp16(low, scale256));
    }
    const __m256i quiet = _mm256_set1_epi16(Type == FloatType::kBf16 ? 0x7fc0 : 0x7e00);
    const __m256i magnitude = _mm256_blendv_epi8(numbers, quiet, codes.nan);
    const __m256i sign = _mm256_xor_si256(codes.extended, _mm256_andnot_si256(codes.nan, flip));  // a NaN keeps its own
    return _mm256_or_si256(magnitude, _mm256_and_si256(sign, _mm256_set1_epi16(-0x8000)));
  }

  template <FloatType Type>
  static void decode(const uint8_t* codes, int64_t count, float scale, Stored<Type>* out) {
    int64_t i = 0;
    if (is_moderate(scale)) {
      const __m256 scale256 = _mm256_set1_ps((Type == FloatType::kF32 ? scale : __builtin_fabsf(scale)) * 256.0f);
      const __m256i flip = _mm256_set1_epi16(float_bits(scale) >> 31 ? -0x8000 : 0);
      for (; i + 16 <= count; i += 16) {
        const Codes loaded(codes + i);
        if constexpr (Type == FloatType::kF32) {
          __m256 low, high;
          loaded.widen(&low, &high);
          _mm256_storeu_ps(out + i, _mm256_mul_ps(low, scale256));
          _mm256_storeu_ps(out + i + 8, _mm256_mul_ps(high, scale256));
        } else {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), to_half<Type>(loaded, scale256, flip));
        }
      }
    }
    if (i < count) QuantScalar::decode<Type>(codes + i, count - i, scale, out + i);
  }

  static void decode_to_bf16(const uint8_t* codes, int64_t count, uint16_t* out) {
    const __m256 unscale = _mm256_set1_ps(256.0f);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
      __m256 low, high;
      Codes(codes + i).widen(&low, &high);
      const __m256i first = _mm256_srli_epi32(_mm256_castps_si256(_mm256_mul_ps(low, unscale)), 16);
      const __m256i second = _mm256_srli_epi32(_mm256_castps_si256(_mm256_mul_ps(high, unscale)), 16);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), low_words(first, second));
    }
    QuantScalar::decode_to_bf16(codes + i, count - i, out + i);
  }
};

}  // namespace
}  // namespace blockscale
