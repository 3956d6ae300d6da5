// TDPBF16PS bit for bit against exact_dot.h, over shapes, tile numbers and kinds of data, and against recorded results
// of an independent implementation (golden_dot.bin). NaN results are compared as NaN: which payload survives is not
// specified there.
#include <xmmintrin.h>

#include <cstdio>
#include <random>
#include <utility>
#include <vector>

#include "exact_dot.h"
#include "machine_code.h"

namespace amx_emulator::test {
namespace {

// What the 32-bit words of a tile hold.
enum class Kind { kAnyBits, kOrdinaryPairs, kTinyPairs, kOrdinaryFloats, kTinyFloats };

class Arithmetic : public Conformance {
 protected:
  uint32_t word(Kind kind) {
    const auto ordinary_half = [&] { return (random_() & 0x807f) | (115 + random_() % 24) << 7; };
    // Exponents whose products fall around the smallest normal number; a third are zeros and subnormals.
    const auto tiny_half = [&] {
      return (random_() & 0x807f) | (random_() % 3 ? 50 + random_() % 30 : random_() % 3) << 7;
    };
    const auto pair = [](uint32_t low, uint32_t high) { return low | high << 16; };
    switch (kind) {
      case Kind::kOrdinaryPairs: return pair(ordinary_half(), ordinary_half());
      case Kind::kTinyPairs: return pair(tiny_half(), tiny_half());
      case Kind::kOrdinaryFloats: return (random_() & 0x807fffff) | (115 + random_() % 24) << 23;
      case Kind::kTinyFloats: return (random_() & 0x807fffff) | (random_() % 6) << 23;
      default: return static_cast<uint32_t>(random_());
    }
  }
  void fill(uint8_t* tile, int rows, int words, Kind kind) {
    memset(tile, 0, 1024);
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < words; ++i) {
        const uint32_t value = word(kind);
        memcpy(tile + 64 * row + 4 * i, &value, 4);
      }
    }
  }
  static void expect_equal(const uint8_t* actual, const uint8_t* expected) {
    for (int i = 0; i < 256; ++i) {
      uint32_t a, e;
      memcpy(&a, actual + 4 * i, 4);
      memcpy(&e, expected + 4 * i, 4);
      if (is_nan(a) && is_nan(e)) {
        ASSERT_TRUE(a & 0x400000) << "a quiet NaN";
      } else {
        ASSERT_EQ(a, e) << "row " << i / 16 << ", column " << i % 16;
      }
    }
  }

  std::mt19937 random_{1};
};

TEST_F(Arithmetic, EqualsTheExactDefinition) {
  struct Kinds {
    Kind factors, sums;
  };
  constexpr Kinds kKinds[] = {{Kind::kOrdinaryPairs, Kind::kOrdinaryFloats},
                              {Kind::kTinyPairs, Kind::kTinyFloats},
                              {Kind::kAnyBits, Kind::kAnyBits},
                              {Kind::kOrdinaryPairs, Kind::kAnyBits}};
  for (int turn = 0; turn < 320; ++turn) {
    const bool whole = turn % 4 == 0;
    const int rows = whole ? 16 : 1 + random_() % 16;
    const int pairs = whole ? 16 : 1 + random_() % 16;
    const int columns = whole ? 16 : 1 + random_() % 16;
    int tiles[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int i = 0; i < 3; ++i) std::swap(tiles[i], tiles[i + random_() % (8 - i)]);
    const auto [c_tile, a_tile, b_tile] = std::make_tuple(tiles[0], tiles[1], tiles[2]);
    const Kinds& kinds = kKinds[turn / 4 % 4];
    alignas(64) uint8_t a[1024], b[1024], c[1024], actual[1024];
    fill(a, rows, pairs, kinds.factors);
    fill(b, pairs, columns, kinds.factors);
    fill(c, rows, columns, kinds.sums);
    load_config(
        TileConfig().with(c_tile, rows, 4 * columns).with(a_tile, rows, 4 * pairs).with(b_tile, pairs, 4 * columns));
    load_tile(c_tile, c, 64);
    load_tile(a_tile, a, 64);
    load_tile(b_tile, b, 64);
    const unsigned mxcsr = _mm_getcsr();
    const unsigned odd_mode = turn % 2 ? 0x7f80 : 0x1f80;  // rounding towards zero must not matter
    _mm_setcsr(odd_mode);
    dot(c_tile, a_tile, b_tile);
    const unsigned mxcsr_after = _mm_getcsr();
    _mm_setcsr(mxcsr);
    ASSERT_EQ(mxcsr_after, odd_mode) << "neither mode nor flags change";
    exact_dot(c, a, b, rows, pairs, columns);
    amxemu_peek_tile(c_tile, actual);
    SCOPED_TRACE("turn " + std::to_string(turn) + ": " + std::to_string(rows) + " rows, " + std::to_string(pairs) +
                 " pairs, " + std::to_string(columns) + " columns");
    ASSERT_NO_FATAL_FAILURE(expect_equal(actual, c));
  }
}

// Records of a 64-byte configuration of tiles C 0, A 1, B 2, then C, A, B and the resulting C, each 1 KiB.
TEST_F(Arithmetic, EqualsRecordedResultsOfAnotherImplementation) {
  FILE* file = fopen(AMXEMU_GOLDEN_DOT, "rb");
  ASSERT_NE(file, nullptr) << AMXEMU_GOLDEN_DOT;
  struct Record {
    TileConfig config;
    uint8_t c[1024], a[1024], b[1024], expected[1024];
  };
  static_assert(sizeof(Record) == 64 + 4 * 1024);
  Record record;
  int records = 0;
  for (; fread(&record, sizeof record, 1, file) == 1; ++records) {
    load_config(record.config);
    load_tile(0, record.c, 64);
    load_tile(1, record.a, 64);
    load_tile(2, record.b, 64);
    dot(0, 1, 2);
    uint8_t actual[1024];
    amxemu_peek_tile(0, actual);
    SCOPED_TRACE("record " + std::to_string(records));
    ASSERT_NO_FATAL_FAILURE(expect_equal(actual, record.expected));
  }
  fclose(file);
  EXPECT_EQ(records, 20);
}

}  // namespace
}  // namespace amx_emulator::test
