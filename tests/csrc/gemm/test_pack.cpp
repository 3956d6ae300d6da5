// The packed layout: its index formula, its drawing, ragged strips and quads, strides, splits, and the way back.
#include "gemm/pack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "guarded_buffer.h"

namespace blockscale {
namespace {

using test::Guard;
using test::GuardedBuffer;

constexpr int64_t kSides[] = {0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 19, 31, 32, 33, 48, 50};
constexpr int64_t kDepths[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 63, 64, 80, 193};

std::vector<uint8_t> random_codes(int64_t count) {
  std::mt19937 random(1);
  std::vector<uint8_t> codes(count);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
  return codes;
}

std::vector<uint8_t> packed_of(const std::vector<uint8_t>& codes, int64_t N, int64_t K) {
  std::vector<uint8_t> packed(codes.size());
  pack_weight(codes.data(), N, K, K, 1, 0, strip_count(N), packed.data());
  return packed;
}

// The order without a formula: strip, quad, 4 columns, k-pair, column, k, from outside in; absent ones are left out.
std::vector<uint8_t> packed_by_definition(const std::vector<uint8_t>& codes, int64_t N, int64_t K) {
  std::vector<uint8_t> packed;
  for (int64_t strip = 0; strip < N; strip += 16) {
    for (int64_t quad = 0; quad < K; quad += 4) {
      for (int64_t lane = strip; lane < strip + 16; lane += 4) {
        for (int64_t pair = quad; pair < quad + 4; pair += 2) {
          for (int64_t n = lane; n < lane + 4; ++n) {
            for (int64_t k = pair; k < pair + 2; ++k) {
              if (n < N && k < K) packed.push_back(codes[n * K + k]);
            }
          }
        }
      }
    }
  }
  return packed;
}

TEST(Pack, IndexFormulaOfFullStripsAndQuads) {
  const int64_t N = 48, K = 72;
  const std::vector<uint8_t> codes = random_codes(N * K);
  const std::vector<uint8_t> packed = packed_of(codes, N, K);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t k = 0; k < K; ++k) {
      const int64_t s = n / 16, c = n % 16, q = k / 4, p = k % 4 / 2, j = k % 2;
      ASSERT_EQ(packed[s * 16 * K + q * 64 + 16 * (c / 4) + 8 * p + 2 * (c % 4) + j], codes[n * K + k]);
    }
  }
}

// The drawing of pack.h, made from the code.
TEST(Pack, DrawingOfTheFirstLane) {
  std::vector<uint8_t> codes(16 * 4);
  for (int n = 0; n < 16; ++n) {
    for (int k = 0; k < 4; ++k) codes[n * 4 + k] = static_cast<uint8_t>(n << 4 | k);
  }
  const std::vector<uint8_t> packed = packed_of(codes, 16, 4);
  std::ostringstream columns, depths;
  for (int byte = 0; byte < 18; byte += 2) {
    const char* border = byte && byte % 8 == 0 ? " | " : byte ? "   " : "";
    ASSERT_EQ(packed[byte] >> 4, packed[byte + 1] >> 4);
    columns << border << (packed[byte] >> 4) << "  ";
    depths << border << (packed[byte] & 15) << " " << (packed[byte + 1] & 15);
  }
  EXPECT_EQ(columns.str(), "0     1     2     3   | 0     1     2     3   | 4  ");
  EXPECT_EQ(depths.str(), "0 1   0 1   0 1   0 1 | 2 3   2 3   2 3   2 3 | 0 1");
}

TEST(Pack, EveryRaggedShapeFollowsTheOrderAndReturns) {
  for (int64_t N : kSides) {
    for (int64_t K : kDepths) {
      SCOPED_TRACE("N" + std::to_string(N) + "-K" + std::to_string(K));
      const std::vector<uint8_t> codes = random_codes(N * K);
      const std::vector<uint8_t> packed = packed_of(codes, N, K);
      EXPECT_EQ(packed, packed_by_definition(codes, N, K));
      std::vector<uint8_t> back(codes.size());
      unpack_weight(packed.data(), N, K, 0, strip_count(N), back.data());
      EXPECT_EQ(back, codes);
    }
  }
}

TEST(Pack, StridesReadTheSameCodes) {
  for (int64_t N : {1, 16, 19, 33}) {
    for (int64_t K : {1, 4, 7, 64}) {
      const std::vector<uint8_t> codes = random_codes(N * K);
      const std::vector<uint8_t> expected = packed_of(codes, N, K);
      const int64_t strides[][2] = {{1, N}, {2 * K + 3, 2}, {K + 5, 1}, {3, 3 * N}};
      for (const auto& stride : strides) {
        std::vector<uint8_t> spread((N - 1) * stride[0] + (K - 1) * stride[1] + 1, 0x7f);
        for (int64_t n = 0; n < N; ++n) {
          for (int64_t k = 0; k < K; ++k) spread[n * stride[0] + k * stride[1]] = codes[n * K + k];
        }
        std::vector<uint8_t> packed(codes.size());
        pack_weight(spread.data(), N, K, stride[0], stride[1], 0, strip_count(N), packed.data());
        EXPECT_EQ(packed, expected) << "N" << N << "-K" << K << ", strides " << stride[0] << ", " << stride[1];
      }
    }
  }
}

TEST(Pack, NoByteOutsideIsReadOrWritten) {
  for (Guard guard : {Guard::kAfter, Guard::kBefore}) {
    for (int64_t N : kSides) {
      for (int64_t K : kDepths) {
        const std::vector<uint8_t> codes = random_codes(N * K);
        GuardedBuffer<uint8_t> source(N * K, guard), packed(N * K, guard), back(N * K, guard);
        std::copy(codes.begin(), codes.end(), source.begin());
        pack_weight(source.data(), N, K, K, 1, 0, strip_count(N), packed.data());
        unpack_weight(packed.data(), N, K, 0, strip_count(N), back.data());
        ASSERT_TRUE(std::equal(back.begin(), back.end(), codes.begin())) << "N" << N << "-K" << K;
      }
    }
  }
}

TEST(Pack, ARangeOfStripsTouchesItsOwnBytesOnly) {
  const int64_t N = 83, K = 37, strips = strip_count(N);
  ASSERT_EQ(strips, 6);
  const std::vector<uint8_t> codes = random_codes(N * K);
  const std::vector<uint8_t> packed = packed_of(codes, N, K);
  for (int64_t begin = 0; begin < strips; ++begin) {
    for (int64_t end = begin; end <= strips; ++end) {
      const int64_t first = begin * 16 * K, last = std::min(end * 16, N) * K;
      std::vector<uint8_t> part(codes.size(), 0x5a), back(codes.size(), 0x5a);
      pack_weight(codes.data(), N, K, K, 1, begin, end, part.data());
      unpack_weight(packed.data(), N, K, begin, end, back.data());
      for (int64_t i = 0; i < N * K; ++i) {
        ASSERT_EQ(part[i], i >= first && i < last ? packed[i] : 0x5a);
        ASSERT_EQ(back[i], i >= first && i < last ? codes[i] : 0x5a);
      }
    }
  }
}

}  // namespace
}  // namespace blockscale
