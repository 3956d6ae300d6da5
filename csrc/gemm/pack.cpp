// Packing and unpacking of weights: 4 columns x 16 k at a time where they are whole and adjacent, in SSE2, which every
// x86-64 CPU has; what is ragged or strided goes byte by byte. Memory is the limit, not instructions: wider registers
// gain nothing on pages that are written for the first time.
#include "gemm/pack.h"

#include <emmintrin.h>

#include <algorithm>

#include "gemm/kernel.h"

namespace blockscale {
namespace {

// Calls visit(column in strip, k in quad, count of consecutive k) in packed order for one quad of `columns` columns and
// `depth` k.
template <class Visit>
void for_each_pair(int64_t columns, int64_t depth, Visit visit) {
  for (int64_t lane = 0; lane < columns; lane += 4) {
    const int64_t lane_end = std::min<int64_t>(lane + 4, columns);
    for (int64_t pair = 0; pair < depth; pair += 2) {
      for (int64_t c = lane; c < lane_end; ++c) visit(c, pair, std::min<int64_t>(2, depth - pair));
    }
  }
}

// A cache line of k in each row: rows are a stride apart, often a multiple of 4 KiB, where 16 lines at once would not
// fit the ways of L1.
constexpr int64_t kRunDepth = 64;
constexpr int64_t kRowPrefetch = 256;      // bytes ahead in each of the 16 rows: 23.5 GB/s against 20.8 without
constexpr int64_t kPackedPrefetch = 4096;  // bytes ahead in the packed stream: 18.6 GB/s against 14.0 without

inline __m128i load(const uint8_t* bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)); }
inline void store(uint8_t* bytes, __m128i value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), value); }

// 4 rows of 16 codes to one lane in each of 4 quads, which are 64 bytes apart: pairs of k are 16-bit units, and
// interleaving a with b, c with d, then ab with cd gives a b c d of one pair.
inline void pack_lanes(const uint8_t* row, int64_t stride, uint8_t* out) {
  const __m128i a = load(row), b = load(row + stride), c = load(row + 2 * stride), d = load(row + 3 * stride);
  const __m128i ab_low = _mm_unpacklo_epi16(a, b), ab_high = _mm_unpackhi_epi16(a, b);
  const __m128i cd_low = _mm_unpacklo_epi16(c, d), cd_high = _mm_unpackhi_epi16(c, d);
  store(out, _mm_unpacklo_epi32(ab_low, cd_low));
  store(out + 64, _mm_unpackhi_epi32(ab_low, cd_low));
  store(out + 128, _mm_unpacklo_epi32(ab_high, cd_high));
  store(out + 192, _mm_unpackhi_epi32(ab_high, cd_high));
}

// The inverse: a transpose of 4 quads x 2 pairs x 4 columns of 16-bit units, in three interleavings.
inline void unpack_lanes(const uint8_t* in, uint8_t* row, int64_t stride) {
  __m128i ab[2], cd[2];  // 8 k of two columns: a's pairs of k in the low half of ab, b's in the high half
  for (int half = 0; half < 2; ++half) {
    const __m128i first = load(in + 128 * half), second = load(in + 128 * half + 64);
    const __m128i pair0 = _mm_unpacklo_epi16(first, second), pair1 = _mm_unpackhi_epi16(first, second);
    ab[half] = _mm_unpacklo_epi16(pair0, pair1);
    cd[half] = _mm_unpackhi_epi16(pair0, pair1);
  }
  store(row, _mm_unpacklo_epi64(ab[0], ab[1]));
  store(row + stride, _mm_unpackhi_epi64(ab[0], ab[1]));
  store(row + 2 * stride, _mm_unpacklo_epi64(cd[0], cd[1]));
  store(row + 3 * stride, _mm_unpackhi_epi64(cd[0], cd[1]));
}

// Packs or unpacks the k of a full strip that fill 16-byte runs of a row; returns how many they are.
int64_t pack_runs(const uint8_t* source, int64_t stride, int64_t K, uint8_t* out) {
  int64_t k = 0;
  for (int64_t depth; K - k >= 16; k += depth) {
    depth = std::min(kRunDepth, (K - k) / 16 * 16);
    for (int64_t c = 0; c < kStripColumns; c += 4) {
      const uint8_t* row = source + c * stride + k;
      for (int64_t j = 0; j < 4; ++j) __builtin_prefetch(row + j * stride + kRowPrefetch);
      for (int64_t j = 0; j < depth; j += 16) pack_lanes(row + j, stride, out + (k + j) * kStripColumns + 4 * c);
    }
  }
  return k;
}

int64_t unpack_runs(const uint8_t* in, int64_t K, uint8_t* target) {
  int64_t k = 0;
  for (int64_t depth; K - k >= 16; k += depth) {
    depth = std::min(kRunDepth, (K - k) / 16 * 16);
    for (int64_t c = 0; c < kStripColumns; c += 4) {
      const uint8_t* lanes = in + k * kStripColumns;
      for (int64_t j = 0; j < 4; ++j) __builtin_prefetch(lanes + kPackedPrefetch + 64 * (c + j));
      for (int64_t j = 0; j < depth; j += 16)
        unpack_lanes(lanes + j * kStripColumns + 4 * c, target + c * K + k + j, K);
    }
  }
  return k;
}

}  // namespace

int64_t strip_count(int64_t N) { return (N + kStripColumns - 1) / kStripColumns; }

void pack_weight(const uint8_t* codes, int64_t N, int64_t K, int64_t stride_n, int64_t stride_k, int64_t strip_begin,
                 int64_t strip_end, uint8_t* packed) {
  for (int64_t strip = strip_begin; strip < strip_end; ++strip) {
    const int64_t first = strip * kStripColumns;
    const int64_t columns = std::min<int64_t>(kStripColumns, N - first);
    const uint8_t* source = codes + first * stride_n;
    uint8_t* out = packed + first * K;
    int64_t k = 0;
    if (columns == kStripColumns && stride_k == 1) {
      k = pack_runs(source, stride_n, K, out);
      out += k * kStripColumns;
    }
    for (; k < K; k += 4) {
      for_each_pair(columns, std::min<int64_t>(4, K - k), [&](int64_t c, int64_t pair, int64_t count) {
        for (int64_t j = 0; j < count; ++j) *out++ = source[c * stride_n + (k + pair + j) * stride_k];
      });
    }
  }
}

void unpack_weight(const uint8_t* packed, int64_t N, int64_t K, int64_t strip_begin, int64_t strip_end,
                   uint8_t* codes) {
  for (int64_t strip = strip_begin; strip < strip_end; ++strip) {
    const int64_t first = strip * kStripColumns;
    const int64_t columns = std::min<int64_t>(kStripColumns, N - first);
    const uint8_t* in = packed + first * K;
    uint8_t* target = codes + first * K;
    int64_t k = 0;
    if (columns == kStripColumns) {
      k = unpack_runs(in, K, target);
      in += k * kStripColumns;
    }
    for (; k < K; k += 4) {
      for_each_pair(columns, std::min<int64_t>(4, K - k), [&](int64_t c, int64_t pair, int64_t count) {
        for (int64_t j = 0; j < count; ++j) target[c * K + k + pair + j] = *in++;
      });
    }
  }
}

}  // namespace blockscale
