// Codes that a kernel cannot read in place, copied into full 64-byte chunks with zeros for what is absent: a strip of
// fewer than 16 columns, and a unit that starts or ends inside a chunk. The stream's order is that of gemm/pack.h, with
// absent columns and k left out.
//
// Each row block stages its units anew, and at M = 1 a kernel takes 1.2 ns for a chunk: so a chunk is two loads, two
// masks and a store as wide as the load that will read it, for the store to be forwarded.
//
// Included by the ISA files: everything is in an anonymous namespace.
#pragma once

#include <stddef.h>

#include "gemm/kernel.h"

namespace blockscale {
namespace {

constexpr int kChunkBytes = 64;
constexpr int kChunkWords = 8;

// A chunk as words: of columns 4 g .. 4 g + 3, word 2 g holds the first two k (column by column, an even k and the next
// one) and word 2 g + 1 the other two.
typedef uint64_t Chunk __attribute__((vector_size(kChunkBytes)));
constexpr uint64_t kEvenK = 0x00ff00ff00ff00ff;  // a word's bytes at its even k

struct PackedStrip {
  const uint8_t* codes;
  const uint8_t* begin;  // of the whole weight: nothing outside [begin, end) is read
  const uint8_t* end;
  int64_t K;
  int columns;
};

// The first `count` bytes of a word, 1 .. 8.
constexpr uint64_t low_bytes(int count) { return ~uint64_t{0} >> (64 - 8 * count); }

// `count` codes as the low bytes of a word.
inline uint64_t load_word(const PackedStrip& strip, const uint8_t* in, int count) {
  uint64_t word = 0;
  if (strip.end - in >= 8) {
    __builtin_memcpy(&word, in, 8);
    return word & low_bytes(count);
  }
  for (int b = 0; b < count; ++b) word |= static_cast<uint64_t>(in[b]) << (8 * b);
  return word;
}

// The same of columns that have but the even k of their word.
inline uint64_t load_even(const PackedStrip& strip, const uint8_t* in, int count) {
  uint64_t word = load_word(strip, in, count);
  word = (word | word << 16) & 0x0000ffff0000ffff;
  return (word | word << 8) & kEvenK;
}

// The last chunk of a K that is no multiple of 4: its depth is 1, 2 or 3.
inline void stage_short_chunk(const PackedStrip& strip, uint8_t* out) {
  const int depth = static_cast<int>(strip.K % 4);
  const uint8_t* in = strip.codes + (strip.K - depth) * strip.columns;
  for (int lane = 0; lane < kStripColumns; lane += 4, out += 16) {
    uint64_t words[2] = {0, 0};
    if (lane < strip.columns) {
      const int width = strip.columns - lane < 4 ? strip.columns - lane : 4;
      words[0] = depth == 1 ? load_even(strip, in, width) : load_word(strip, in, 2 * width);
      if (depth == 3) words[1] = load_even(strip, in + 2 * width, width);
      in += depth * width;
    }
    __builtin_memcpy(out, &words[0], 8);
    __builtin_memcpy(out + 8, &words[1], 8);
  }
}

// How whole chunks of 1 .. 15 columns come to stand on 64 bytes. Up to the last columns' first two k all is in place;
// their other two k follow at once, `8 - rest` bytes too early.
struct RaggedMasks {
  struct Row {
    uint64_t in_place[kChunkWords], early[kChunkWords];
    int rest;
  } of[kStripColumns];

  constexpr RaggedMasks() : of{} {
    for (int columns = 1; columns < kStripColumns; ++columns) {
      Row& row = of[columns];
      const int last = (columns - 1) / 4 * 2;  // word of the last columns
      row.rest = 2 * columns - 4 * last;
      for (int w = 0; w < last; ++w) row.in_place[w] = ~uint64_t{0};
      row.in_place[last] = row.early[last + 1] = low_bytes(row.rest);
    }
  }
};
alignas(kChunkBytes) constexpr RaggedMasks kRaggedMasks;

// `count` whole chunks; of each, 64 bytes from its start and 6 before it are readable.
inline void stage_chunks(int columns, const uint8_t* in, int64_t count, uint8_t* out) {
  const RaggedMasks::Row& row = kRaggedMasks.of[columns];
  Chunk in_place, early;
  __builtin_memcpy(&in_place, row.in_place, kChunkBytes);
  __builtin_memcpy(&early, row.early, kChunkBytes);
  for (; count > 0; --count, in += 4 * columns, out += kChunkBytes) {
    Chunk first, second;
    __builtin_memcpy(&first, in, kChunkBytes);
    __builtin_memcpy(&second, in + row.rest - 8, kChunkBytes);
    first = (first & in_place) | (second & early);
    __builtin_memcpy(out, &first, kChunkBytes);
  }
}

// The same at either end of the weight, where that is not readable: by way of a copy of at most 64 bytes of the weight,
// which hold the chunks.
inline void stage_end_chunks(const PackedStrip& strip, const uint8_t* in, int64_t count, uint8_t* out) {
  uint8_t copy[8 + 2 * kChunkBytes] = {};
  __builtin_memcpy(copy + 8, in, strip.end - in < kChunkBytes ? strip.end - in : kChunkBytes);
  stage_chunks(strip.columns, copy + 8, count, out);
}

inline void stage_ragged_chunks(const PackedStrip& strip, const uint8_t* in, int64_t count, uint8_t* out) {
  const int64_t bytes = 4 * strip.columns;
  int64_t head = in - strip.begin < 6 ? (6 - (in - strip.begin) + bytes - 1) / bytes : 0;
  if (head > count) head = count;
  if (head > 0) stage_end_chunks(strip, in, head, out);
  int64_t tail = strip.end - in < kChunkBytes ? 0 : (strip.end - in - kChunkBytes) / bytes + 1;
  if (tail > count) tail = count;
  if (tail < head) tail = head;
  stage_chunks(strip.columns, in + head * bytes, tail - head, out + head * kChunkBytes);
  if (tail < count) {
    stage_end_chunks(strip, in + tail * bytes, count - tail, out + tail * kChunkBytes);
  }
}

// Zeroes the k outside [k_begin, k_end) of the staged chunk of k .. k + 3.
inline void zero_outside(int64_t k, int64_t k_begin, int64_t k_end, uint8_t* chunk) {
  if (k >= k_begin && k + 4 <= k_end) return;
  uint64_t keep[2] = {0, 0};
  for (int j = 0; j < 4; ++j) {
    if (k + j >= k_begin && k + j < k_end) keep[j / 2] |= j % 2 ? ~kEvenK : kEvenK;
  }
  const Chunk mask = {keep[0], keep[1], keep[0], keep[1], keep[0], keep[1], keep[0], keep[1]};
  Chunk codes;
  __builtin_memcpy(&codes, chunk, kChunkBytes);
  codes &= mask;
  __builtin_memcpy(chunk, &codes, kChunkBytes);
}

// Moves `count` staged chunks `shift` k towards the start, 1 .. 3; the k that move in are those of the next chunk.
inline void shift_chunks(int shift, int64_t count, uint8_t* staged) {
  for (int64_t q = 0; q < count; ++q, staged += kChunkBytes) {
    uint64_t in[2][kChunkWords] = {}, out[kChunkWords];
    __builtin_memcpy(in, staged, (q + 1 < count ? 2 : 1) * kChunkBytes);
    for (int w = 0; w < kChunkWords; w += 2) {
      const uint64_t words[4] = {in[0][w], in[0][w + 1], in[1][w], in[1][w + 1]};
      for (int i = 0; i < 2; ++i) {
        const uint64_t* at = words + shift / 2 + i;
        out[w + i] = shift == 2 ? at[0] : (at[0] >> 8 & kEvenK) | (at[1] & kEvenK) << 8;
      }
    }
    __builtin_memcpy(staged, out, kChunkBytes);
  }
}

// Stages k_begin .. k_end - 1 of a strip. The first chunk starts at k = origin, which is k_begin or k_begin / 4 * 4; as
// many chunks are written as hold k_begin / 4 * 4 .. k_end - 1.
__attribute__((noinline)) void stage_codes(const LinearTask& task, int64_t strip_index, int columns, int64_t k_begin,
                                           int64_t k_end, int64_t origin, uint8_t* staged) {
  const PackedStrip strip{task.weight + strip_index * kStripColumns * task.K, task.weight,
                          task.weight + task.N * task.K, task.K, columns};
  const int64_t first = k_begin / 4, last = (k_end - 1) / 4;
  const bool short_last = 4 * last + 4 > task.K;
  const int64_t whole = last - first + (short_last ? 0 : 1);
  const uint8_t* in = strip.codes + 4 * first * columns;
  if (columns < kStripColumns) {
    stage_ragged_chunks(strip, in, whole, staged);
  } else {
    for (int64_t at = 0; at < whole * kChunkBytes; at += kChunkBytes) {
      Chunk chunk;
      __builtin_memcpy(&chunk, in + at, kChunkBytes);
      __builtin_memcpy(staged + at, &chunk, kChunkBytes);
    }
  }
  if (short_last) stage_short_chunk(strip, staged + whole * kChunkBytes);
  zero_outside(4 * first, k_begin, k_end, staged);
  if (k_end < task.K) zero_outside(4 * last, k_begin, k_end, staged + (last - first) * kChunkBytes);
  if (origin % 4 != 0) shift_chunks(static_cast<int>(origin % 4), last - first + 1, staged);
}

}  // namespace
}  // namespace blockscale
