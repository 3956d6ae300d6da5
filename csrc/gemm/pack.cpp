// Packing and unpacking of weights: a byte permutation, so one routine visits (column, k) in packed order for both
// directions.
#include "gemm/pack.h"

#include <algorithm>
#include <cstring>

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

// 4 rows of 4 codes to one 16-byte lane: k-pair 0 of the four columns, then k-pair 1.
inline void pack_lane(const uint8_t* row0, const uint8_t* row1, const uint8_t* row2, const uint8_t* row3,
                      uint8_t* out) {
  uint32_t a, b, c, d;
  std::memcpy(&a, row0, 4);
  std::memcpy(&b, row1, 4);
  std::memcpy(&c, row2, 4);
  std::memcpy(&d, row3, 4);
  const uint32_t words[4] = {(a & 0xffffu) | (b << 16), (c & 0xffffu) | (d << 16), (a >> 16) | (b & 0xffff0000u),
                             (c >> 16) | (d & 0xffff0000u)};
  std::memcpy(out, words, 16);
}

inline void unpack_lane(const uint8_t* in, uint8_t* row0, uint8_t* row1, uint8_t* row2, uint8_t* row3) {
  uint32_t words[4];
  std::memcpy(words, in, 16);
  const uint32_t a = (words[0] & 0xffffu) | (words[2] << 16), b = (words[0] >> 16) | (words[2] & 0xffff0000u);
  const uint32_t c = (words[1] & 0xffffu) | (words[3] << 16), d = (words[1] >> 16) | (words[3] & 0xffff0000u);
  std::memcpy(row0, &a, 4);
  std::memcpy(row1, &b, 4);
  std::memcpy(row2, &c, 4);
  std::memcpy(row3, &d, 4);
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
      for (; k + 4 <= K; k += 4) {
        for (int64_t c = 0; c < kStripColumns; c += 4, out += 16) {
          const uint8_t* row = source + c * stride_n + k;
          pack_lane(row, row + stride_n, row + 2 * stride_n, row + 3 * stride_n, out);
        }
      }
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
      for (; k + 4 <= K; k += 4) {
        for (int64_t c = 0; c < kStripColumns; c += 4, in += 16) {
          uint8_t* row = target + c * K + k;
          unpack_lane(in, row, row + K, row + 2 * K, row + 3 * K);
        }
      }
    }
    for (; k < K; k += 4) {
      for_each_pair(columns, std::min<int64_t>(4, K - k), [&](int64_t c, int64_t pair, int64_t count) {
        for (int64_t j = 0; j < count; ++j) target[c * K + k + pair + j] = *in++;
      });
    }
  }
}

}  // namespace blockscale
