// What is staged of a strip, for every width and every border, against the index formula; the weight lies between
// inaccessible pages, and only the chunks asked for are written.
#include "gemm/stage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "guarded_buffer.h"

namespace blockscale {
namespace {

using test::Guard;
using test::GuardedBuffer;

// Codes 1 .. 251, so that a neighbour's code, or a zero, shows; a strip's own are told apart by column and k.
uint8_t code(int64_t n, int64_t k) { return static_cast<uint8_t>(1 + (n * 37 + k * 5) % 251); }

// The packed stream of (N, K) by its definition: strips of 16 columns, chunks of 4 k, groups of 4 columns, pairs of k.
void pack(int64_t N, int64_t K, uint8_t* out) {
  for (int64_t strip = 0; strip < N; strip += 16) {
    for (int64_t chunk = 0; chunk < K; chunk += 4) {
      for (int64_t group = strip; group < std::min(strip + 16, N); group += 4) {
        for (int64_t pair = chunk; pair < std::min(chunk + 4, K); pair += 2) {
          for (int64_t n = group; n < std::min(group + 4, N); ++n) {
            for (int64_t k = pair; k < std::min(pair + 2, K); ++k) *out++ = code(n, k);
          }
        }
      }
    }
  }
}

constexpr int64_t kMaxChunks = kUnitK / 4 + 1;
constexpr uint8_t kUntouched = 0xff;

class Stage {
 public:
  Stage(int64_t N, int64_t K, Guard guard) : N_(N), K_(K), weight_(N * K, guard), staged_(64 * (kMaxChunks + 1)) {
    pack(N, K, weight_.data());
    task_.weight = weight_.data();
    task_.N = N;
    task_.K = K;
  }

  // Stages the last strip, the only one that may be ragged, and checks every byte.
  void check(int64_t k_begin, int64_t k_end, int64_t origin) {
    const int64_t strip = (N_ - 1) / 16;
    const int columns = static_cast<int>(N_ - 16 * strip);
    std::fill(staged_.begin(), staged_.end(), kUntouched);
    stage_codes(task_, strip, columns, k_begin, k_end, origin, staged_.data());
    const int64_t chunks = (k_end + 3) / 4 - k_begin / 4;
    std::vector<uint8_t> expected(staged_.size(), kUntouched);
    std::fill(expected.begin(), expected.begin() + 64 * chunks, 0);
    for (int64_t k = k_begin; k < k_end; ++k) {
      for (int c = 0; c < columns; ++c) {
        const int64_t at = k - origin;
        expected[at / 4 * 64 + c / 4 * 16 + at % 4 / 2 * 8 + c % 4 * 2 + at % 2] = code(16 * strip + c, k);
      }
    }
    ASSERT_EQ(staged_, expected) << "N " << N_ << " K " << K_ << " k " << k_begin << " .. " << k_end << " from "
                                 << origin;
  }

 private:
  int64_t N_, K_;
  GuardedBuffer<uint8_t> weight_;
  std::vector<uint8_t> staged_;
  LinearTask task_{};
};

TEST(Stage, EveryWidthAndEveryBorder) {
  for (Guard guard : {Guard::kAfter, Guard::kBefore}) {
    for (int64_t N = 1; N <= 32; ++N) {
      for (int64_t K = 1; K <= 21; ++K) {
        Stage stage(N, K, guard);
        for (int64_t k_begin = 0; k_begin < K; ++k_begin) {
          for (int64_t k_end = k_begin + 1; k_end <= K; ++k_end) {
            stage.check(k_begin, k_end, k_begin / 4 * 4);
            stage.check(k_begin, k_end, k_begin);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Stage, WholeUnitsNearBothEndsOfTheWeight) {
  for (Guard guard : {Guard::kAfter, Guard::kBefore}) {
    for (int64_t N : {1, 2, 3, 4, 7, 9, 13, 15, 16, 17, 31, 33}) {
      for (int64_t K : {128, 129, 130, 131, 132, 193, 300, 511}) {
        Stage stage(N, K, guard);
        for (int64_t k_begin : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3}, int64_t{4}, K - 128, K - 127}) {
          const int64_t k_end = std::min(K, k_begin + 128);
          stage.check(k_begin, k_end, k_begin / 4 * 4);
          stage.check(k_begin, k_end, k_begin);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace blockscale
