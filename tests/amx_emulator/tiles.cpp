#include "tiles.h"

#include <immintrin.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// AddressSanitizer's, if the process has it.
extern "C" __attribute__((weak)) void* __asan_region_is_poisoned(void* begin, size_t size);

namespace amx_emulator {

void report(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (length > 0 && write(2, text, length < 512 ? length : 511) < 0) abort();
}

const char* operation_name(AmxemuOperation operation) {
  static const char* const kNames[] = {"LDTILECFG", "STTILECFG",   "TILERELEASE", "TILEZERO",
                                       "TILELOADD", "TILELOADDT1", "TILESTORED",  "TDPBF16PS"};
  return kNames[operation];
}

// For each row and column two chains of fused multiply-adds from +0, over the first and over the second element of each
// pair of k; their sum is added to C once. Every operation rounds to nearest even, subnormal inputs count as zero and
// subnormal results become zero, whatever MXCSR says. Not inlined: nothing may move across the changes of MXCSR around
// the call.
__attribute__((target("avx512f"), noinline)) static void add_products(Tile* c, const Tile& a, const Tile& b, int rows,
                                                                      int pairs, int columns) {
  const __m512i upper_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __mmask16 present = static_cast<__mmask16>((1u << columns) - 1);
  for (int m = 0; m < rows; ++m) {
    __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
    for (int k = 0; k < pairs; ++k) {
      int pair;
      memcpy(&pair, a.row[m] + 4 * k, 4);
      const __m512i x = _mm512_set1_epi32(pair), w = _mm512_load_si512(b.row[k]);
      first = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                              _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), first);
      second = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper_half)),
                               _mm512_castsi512_ps(_mm512_and_si512(w, upper_half)), second);
    }
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(c->row[m]), _mm512_add_ps(first, second));
    _mm512_store_ps(c->row[m], _mm512_maskz_mov_ps(present, sum));
  }
}

void dot_bf16(Tile* c, const Tile& a, const Tile& b, int rows, int pairs, int columns) {
  constexpr unsigned kAllMaskedNearestFlush = 0x9fc0;
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(kAllMaskedNearestFlush);
  add_products(c, a, b, rows, pairs, columns);
  _mm_setcsr(saved);
}

namespace {

void require_addressable(const Instruction& instruction, uint64_t address, size_t size, int row) {
  if (!__asan_region_is_poisoned) return;
  const void* bad = __asan_region_is_poisoned(reinterpret_cast<void*>(address), size);
  if (!bad) return;
  report("amxemu: %s, row %d: AddressSanitizer forbids %p, one of %zu bytes at %#lx\n",
         operation_name(instruction.operation), row, bad, size, static_cast<unsigned long>(address));
  abort();
}

Outcome load_configuration(const Instruction& instruction, TileState* state, const char** reason) {
  require_addressable(instruction, instruction.address, sizeof(Configuration), 0);
  Configuration loaded;
  memcpy(&loaded, reinterpret_cast<const void*>(instruction.address), sizeof loaded);
  if (loaded.palette == 0) {
    memset(state, 0, sizeof *state);
    return Outcome::kDone;
  }
  const auto refuse = [&](const char* why) {
    *reason = why;
    return Outcome::kGeneralProtection;
  };
  if (loaded.palette != 1) return refuse("there is no such palette");
  for (uint8_t byte : loaded.reserved) {
    if (byte) return refuse("a reserved byte of 2 to 15 is not zero");
  }
  for (int tile = kTiles; tile < 16; ++tile) {
    if (loaded.row_bytes[tile]) return refuse("row bytes of a tile from 8 on are not zero");
    if (loaded.rows[tile]) return refuse("rows of a tile from 8 on are not zero");
  }
  for (int tile = 0; tile < kTiles; ++tile) {
    if (loaded.rows[tile] > kRows) return refuse("a tile has more than 16 rows");
    if (loaded.row_bytes[tile] > kRowBytes) return refuse("a tile has more than 64 bytes a row");
    if ((loaded.rows[tile] == 0) != (loaded.row_bytes[tile] == 0))
      return refuse("a tile has rows without bytes or bytes without rows");
  }
  memset(state, 0, sizeof *state);  // loading a configuration clears the tiles
  state->configuration = loaded;
  return Outcome::kDone;
}

// TILELOADD, TILELOADDT1 and TILESTORED, whose operands have been checked.
void move_rows(const Instruction& instruction, TileState* state) {
  Configuration& configuration = state->configuration;
  Tile& tile = state->tiles[instruction.reg];
  const bool store = instruction.operation == AMXEMU_TILESTORED;
  const size_t bytes = configuration.row_bytes[instruction.reg];
  const int first = configuration.start_row;
  if (!store) memset(tile.row[first], 0, static_cast<size_t>(kRows - first) * kRowBytes);
  for (int row = first; row < configuration.rows[instruction.reg]; ++row) {
    configuration.start_row = static_cast<uint8_t>(row);
    __asm__ volatile("" ::: "memory");  // start_row is in memory when the access faults
    const uint64_t address = instruction.address + static_cast<uint64_t>(row) * instruction.stride;
    require_addressable(instruction, address, bytes, row);
    if (store) {
      memcpy(reinterpret_cast<void*>(address), tile.row[row], bytes);
    } else {
      memcpy(tile.row[row], reinterpret_cast<const void*>(address), bytes);
    }
  }
  configuration.start_row = 0;
}

}  // namespace

Outcome execute(const Instruction& instruction, TileState* state, const char** reason) {
  Configuration& configuration = state->configuration;
  const auto refuse = [&](const char* why) {
    *reason = why;
    return Outcome::kInvalidOpcode;
  };
  const auto configured = [&](int tile) { return tile < kTiles && configuration.rows[tile] != 0; };
  const auto ragged = [&](int tile) { return configuration.row_bytes[tile] % 4 != 0; };
  const int reg = instruction.reg;

  switch (instruction.operation) {
    case AMXEMU_LDTILECFG: return load_configuration(instruction, state, reason);
    case AMXEMU_STTILECFG:
      require_addressable(instruction, instruction.address, sizeof configuration, 0);
      memcpy(reinterpret_cast<void*>(instruction.address), &configuration, sizeof configuration);
      return Outcome::kDone;
    case AMXEMU_TILERELEASE: memset(state, 0, sizeof *state); return Outcome::kDone;
    default: break;
  }

  if (configuration.palette == 0) return refuse("no tile configuration is loaded");
  if (!configured(reg)) return refuse("the tile is not configured");
  if (instruction.operation == AMXEMU_TILEZERO) {
    memset(&state->tiles[reg], 0, sizeof(Tile));
    configuration.start_row = 0;
    return Outcome::kDone;
  }
  if (instruction.operation != AMXEMU_TDPBF16PS) {
    if (!instruction.has_sib) return refuse("the address has no SIB byte");
    if (ragged(reg)) return refuse("the bytes of a row are not a multiple of 4");
    if (configuration.start_row >= configuration.rows[reg]) return refuse("start_row is beyond the tile's rows");
    move_rows(instruction, state);
    return Outcome::kDone;
  }

  const int a = instruction.rm, b = instruction.vvvv;
  if (reg == a || reg == b || a == b) return refuse("the three tiles are not different");
  if (!configured(a) || !configured(b)) return refuse("a factor's tile is not configured");
  if (ragged(reg) || ragged(a) || ragged(b)) return refuse("the bytes of a row are not a multiple of 4");
  if (configuration.row_bytes[reg] != configuration.row_bytes[b]) return refuse("C and B differ in row bytes");
  if (configuration.rows[reg] != configuration.rows[a]) return refuse("C and A differ in rows");
  if (configuration.row_bytes[a] / 4 != configuration.rows[b]) return refuse("A's pairs of k are not B's rows");
  dot_bf16(&state->tiles[reg], state->tiles[a], state->tiles[b], configuration.rows[reg], configuration.rows[b],
           configuration.row_bytes[reg] / 4);
  configuration.start_row = 0;
  return Outcome::kDone;
}

}  // namespace amx_emulator
