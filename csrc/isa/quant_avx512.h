// Quantising and dequantising with AVX-512 F, BW, DQ and VL: 16 values, or 32 codes, in a register.
#pragma once

#include <immintrin.h>

#include "isa/quant_scalar.h"

namespace blockscale {
namespace {

// A register of elements, or the `count` that are left of a run, masked: no byte outside is touched. Whole registers go
// without a mask: masked accesses halve the speed of a stream from memory (Zen 5).
struct Masked {
  static __mmask16 mask16(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static __mmask32 mask32(int64_t count) { return (1u << count) - 1; }

  static __m512 load_floats(const float* from, int64_t count) {
    if (count >= 16) return _mm512_loadu_ps(from);
    return count > 0 ? _mm512_maskz_loadu_ps(mask16(count), from) : _mm512_setzero_ps();
  }
  static __m512i load_words(const uint16_t* from, int64_t count) {
    if (count >= 32) return _mm512_loadu_si512(from);
    return count > 0 ? _mm512_maskz_loadu_epi16(mask32(count), from) : _mm512_setzero_si512();
  }
  static __m256i load_bytes(const uint8_t* from, int64_t count) {
    if (count >= 32) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm256_maskz_loadu_epi8(mask32(count), from);
  }
  static void store_floats(float* to, int64_t count, __m512 value) {
    if (count >= 16) return _mm512_storeu_ps(to, value);
    if (count > 0) _mm512_mask_storeu_ps(to, mask16(count), value);
  }
  static void store_words(uint16_t* to, int64_t count, __m512i value) {
    if (count >= 32) return _mm512_storeu_si512(to, value);
    _mm512_mask_storeu_epi16(to, mask32(count), value);
  }
  static void store_bytes(uint8_t* to, int64_t count, __m256i value) {
    if (count >= 32) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
    _mm256_mask_storeu_epi8(to, mask32(count), value);
  }
};

struct QuantAvx512 {
  using Plain = QuantScalar;

  // The low or the high words of two registers of dwords, which hold values 0..15 and 16..31, or, interleaved in lanes
  // as unpacking leaves them, 0..3 8..11 16..19 24..27 and the rest.
  template <bool High, bool InLanes>
  static __m512i words_of(__m512i first, __m512i second) {
    alignas(64) static constexpr uint16_t kInOrder[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                          22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                          44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    alignas(64) static constexpr uint16_t kByLane[32] = {0,  2,  4,  6,  32, 34, 36, 38, 8,  10, 12,
                                                         14, 40, 42, 44, 46, 16, 18, 20, 22, 48, 50,
                                                         52, 54, 24, 26, 28, 30, 56, 58, 60, 62};
    const __m512i low_words = _mm512_load_si512(InLanes ? kByLane : kInOrder);
    return _mm512_permutex2var_epi16(first, High ? _mm512_add_epi16(low_words, _mm512_set1_epi16(1)) : low_words,
                                     second);
  }

  // ---------------------------------------------------------------------------------------------------------- largest
  // Magnitudes as integers, of their own width.
  template <FloatType Type>
  class Largest {
   public:
    void add(const Stored<Type>* values, int64_t count) {
      if constexpr (Type == FloatType::kF32) {
        for (int64_t i = 0; i < count; i += 32) {
          const __m512 low = Masked::load_floats(values + i, count - i);
          const __m512 high = Masked::load_floats(values + i + 16, count - i - 16);
          largest_ = _mm512_max_epi32(largest_, _mm512_castps_si512(_mm512_abs_ps(low)));
          largest_ = _mm512_max_epi32(largest_, _mm512_castps_si512(_mm512_abs_ps(high)));
        }
      } else {
        for (int64_t i = 0; i < count; i += 32) {
          const __m512i value = Masked::load_words(values + i, count - i);
          largest_ = _mm512_max_epi16(largest_, _mm512_and_si512(value, _mm512_set1_epi16(0x7fff)));
        }
      }
    }
    uint32_t bits() const {
      if constexpr (Type == FloatType::kF32) return static_cast<uint32_t>(_mm512_reduce_max_epi32(largest_));
      const __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(largest_), _mm512_extracti64x4_epi64(largest_, 1));
      const __m128i quarter = _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
      // The smallest of the complements: the one horizontal instruction there is.
      const __m128i ones = _mm_set1_epi16(-1);
      const __m128i largest = _mm_xor_si128(_mm_minpos_epu16(_mm_xor_si128(quarter, ones)), ones);
      return static_cast<uint32_t>(_mm_cvtsi128_si32(
          Type == FloatType::kBf16 ? _mm_slli_epi32(largest, 16) : _mm_castps_si128(_mm_cvtph_ps(largest))));
    }

   private:
    __m512i largest_ = _mm512_setzero_si512();
  };

  // ----------------------------------------------------------------------------------------------------------- encode
  // Rounds magnitudes of at most 448 and a rounding more, and not NaN, to codes. Adding 2^20 times the power of two
  // below a magnitude lets the adder round it to a multiple of that power's eighth, so the sum's low bits count
  // eighths: 8..16, or below 2^-6, whose power serves all smaller values, 0..8. The exponent times 8 (bits 20 to 27, as
  // the 3 bits above the counts stay zero) and the counts add up to the code but for a constant, which is part of the
  // rounder: 152 is even, so ties still go to even, and 152 + 8 * (121 + 20) = 0 mod 256 for the exponent of 2^-6.
  static __m512i count_eighths(__m512 magnitude) {
    const __m512i power = _mm512_max_epi32(
        _mm512_and_si512(_mm512_castps_si512(magnitude), _mm512_set1_epi32(0x7f800000)), _mm512_set1_epi32(0x3c800000));
    const __m512i rounder = _mm512_add_epi32(power, _mm512_set1_epi32((20 << 23) + 152));
    return _mm512_castps_si512(_mm512_add_ps(magnitude, _mm512_castsi512_ps(rounder)));
  }

  // Codes of 32 values, or of the `count` that are left, in words. Sets bits of *nan for quotients that are NaN.
  template <FloatType Type>
  static __m512i encode32(const Stored<Type>* values, int64_t count, __m512 divisor, __mmask16* nan) {
    constexpr bool kInLanes = Type == FloatType::kBf16;
    __m512 magnitude[2];
    __m512i sign;  // of each value in bit 7 of its word
    if constexpr (Type == FloatType::kF32) {
      const __m512 low = Masked::load_floats(values, count);
      const __m512 high = Masked::load_floats(values + 16, count - 16);
      sign = words_of<true, false>(_mm512_castps_si512(low), _mm512_castps_si512(high));
      magnitude[0] = _mm512_abs_ps(low);
      magnitude[1] = _mm512_abs_ps(high);
    } else {
      sign = Masked::load_words(values, count);
      const __m512i half = _mm512_and_si512(sign, _mm512_set1_epi16(0x7fff));
      if constexpr (Type == FloatType::kBf16) {
        magnitude[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_setzero_si512(), half));
        magnitude[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_setzero_si512(), half));
      } else {
        magnitude[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
        magnitude[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
      }
    }
    for (__m512& value : magnitude) value = _mm512_div_ps(value, divisor);
    *nan |= _mm512_cmp_ps_mask(magnitude[0], magnitude[1], _CMP_UNORD_Q);
    const __m512i low = count_eighths(magnitude[0]), high = count_eighths(magnitude[1]);
    const __m512i counts = words_of<false, kInLanes>(low, high), exponents = words_of<true, kInLanes>(low, high);
    const __m512i code = _mm512_add_epi16(counts, _mm512_srli_epi16(exponents, 4));
    return _mm512_ternarylogic_epi32(code, _mm512_set1_epi16(0x7f), _mm512_srli_epi16(sign, 8), 0xe2);  // b ? a : c
  }

  template <FloatType Type>
  static bool encode(const Stored<Type>* values, int64_t count, float scale, uint8_t* codes) {
    const __m512 divisor = _mm512_set1_ps(scale);
    __mmask16 nan = 0;
    int64_t i = 0;
    for (; count - i >= 64; i += 64) {
      const __m512i first = encode32<Type>(values + i, 32, divisor, &nan);
      const __m512i second = encode32<Type>(values + i + 32, 32, divisor, &nan);
      const __m512i bytes = _mm512_packus_epi16(first, second);  // eights of codes: 0 4 1 5 2 6 3 7
      _mm512_storeu_si512(codes + i, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bytes));
    }
    for (; i < count; i += 32) {
      Masked::store_bytes(codes + i, count - i,
                          _mm512_cvtepi16_epi8(encode32<Type>(values + i, count - i, divisor, &nan)));
    }
    return nan == 0;
  }

  // ----------------------------------------------------------------------------------------------------------- decode
  // 32 codes sign-extended, and their magnitudes as fp16 times 2^-8: exponent and mantissa land in the places of fp16.
  struct Codes {
    __m512i extended;
    __m512i magnitude;
    __mmask32 nan;
    explicit Codes(__m256i codes) {
      extended = _mm512_cvtepi8_epi16(codes);
      const __m512i seven = _mm512_and_si512(extended, _mm512_set1_epi16(0x7f));
      magnitude = _mm512_slli_epi16(seven, 7);
      nan = _mm512_cmpeq_epi16_mask(seven, _mm512_set1_epi16(0x7f));
    }
    // As fp32 times 2^-8, with sign, NaN as the table has it.
    void widen(__m512* low, __m512* high) const {
      const __m512i quiet = _mm512_mask_mov_epi16(magnitude, nan, _mm512_set1_epi16(0x7e00));
      const __m512i half = _mm512_ternarylogic_epi32(quiet, extended, _mm512_set1_epi16(-0x8000), 0xf8);  // a | (b & c)
      *low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
      *high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    }
  };

  // Magnitudes times a scale, 256 times as large, to bf16 in the low half of each lane. The sum with 2^16 times the
  // power of two below the product, fused, is the exact product rounded once to a multiple of that power's 2^-7, which
  // the sum's low bits count. The counts 128..256 continue the exponent above them but for 128, which the rounder takes
  // off; below 2^-126 the smallest power serves.
  static __m512i to_bf16(__m512 value, __m512 scale256) {
    const __m512i product = _mm512_castps_si512(_mm512_mul_ps(value, scale256));
    const __m512i power =
        _mm512_max_epi32(_mm512_and_si512(product, _mm512_set1_epi32(0x7f800000)), _mm512_set1_epi32(0x00800000));
    const __m512i rounder = _mm512_add_epi32(power, _mm512_set1_epi32((16 << 23) + 0x10000 - 128));
    const __m512i counts = _mm512_castps_si512(_mm512_fmadd_ps(value, scale256, _mm512_castsi512_ps(rounder)));
    return _mm512_add_epi32(counts, _mm512_srli_epi32(power, 16));
  }

  // The same to fp16: multiples of 2^-10 of the power below the product, not under that of 2^-14. What rounds to 65536
  // or lies beyond becomes infinite in the conversion; all else converts exactly.
  static __m256i to_fp16(__m512 value, __m512 scale256) {
    const __m512i product = _mm512_castps_si512(_mm512_mul_ps(value, scale256));
    const __m512i exponent = _mm512_and_si512(product, _mm512_set1_epi32(0x7f800000));
    const __m512i power = _mm512_min_epi32(_mm512_max_epi32(exponent, _mm512_set1_epi32(0x38800000)),
                                           _mm512_set1_epi32(0x48000000));  // 2^-14 .. 2^17
    const __m512 rounder = _mm512_castsi512_ps(_mm512_add_epi32(power, _mm512_set1_epi32(13 << 23)));
    const __m512 rounded = _mm512_sub_ps(_mm512_fmadd_ps(value, scale256, rounder), rounder);
    return _mm512_cvtps_ph(rounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  template <FloatType Type>
  static __m512i to_half(const Codes& codes, __m512 scale256, __m512i flip) {
    const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(codes.magnitude));
    const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(codes.magnitude, 1));
    __m512i numbers;
    if constexpr (Type == FloatType::kBf16) {
      numbers = words_of<false, false>(to_bf16(low, scale256), to_bf16(high, scale256));
    } else {
      numbers = _mm512_inserti64x4(_mm512_castsi256_si512(to_fp16(low, scale256)), to_fp16(high, scale256), 1);
    }
    const __m512i quiet = _mm512_set1_epi16(Type == FloatType::kBf16 ? 0x7fc0 : 0x7e00);
    const __m512i magnitude = _mm512_mask_mov_epi16(numbers, codes.nan, quiet);
    // A NaN keeps its own sign.
    const __m512i sign = _mm512_mask_mov_epi16(_mm512_xor_si512(codes.extended, flip), codes.nan, codes.extended);
    return _mm512_ternarylogic_epi32(magnitude, sign, _mm512_set1_epi16(-0x8000), 0xf8);
  }

  template <FloatType Type>
  static void decode(const uint8_t* codes, int64_t count, float scale, Stored<Type>* out) {
    if (!is_moderate(scale)) return QuantScalar::decode<Type>(codes, count, scale, out);
    const __m512 scale256 = _mm512_set1_ps((Type == FloatType::kF32 ? scale : __builtin_fabsf(scale)) * 256.0f);
    const __m512i flip = _mm512_set1_epi16(float_bits(scale) >> 31 ? -0x8000 : 0);
    for (int64_t i = 0; i < count; i += 32) {
      const Codes loaded(Masked::load_bytes(codes + i, count - i));
      if constexpr (Type == FloatType::kF32) {
        __m512 half[2];
        loaded.widen(&half[0], &half[1]);
        Masked::store_floats(out + i, count - i, _mm512_mul_ps(half[0], scale256));
        Masked::store_floats(out + i + 16, count - i - 16, _mm512_mul_ps(half[1], scale256));
      } else {
        Masked::store_words(out + i, count - i, to_half<Type>(loaded, scale256, flip));
      }
    }
  }

  static void decode_to_bf16(const uint8_t* codes, int64_t count, uint16_t* out) {
    for (int64_t i = 0; i < count; i += 32) {
      __m512 half[2];
      Codes(Masked::load_bytes(codes + i, count - i)).widen(&half[0], &half[1]);
      __m512i bits[2];
      for (int j = 0; j < 2; ++j) bits[j] = _mm512_castps_si512(_mm512_mul_ps(half[j], _mm512_set1_ps(256.0f)));
      Masked::store_words(out + i, count - i, words_of<true, false>(bits[0], bits[1]));
    }
  }
};

}  // namespace
}  // namespace blockscale
