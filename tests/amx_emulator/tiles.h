// The tiles of a thread and what each instruction does to them, with the architecture's conditions for exceptions.
#pragma once

#include <stdint.h>

#include "amxemu.h"
#include "decode.h"

namespace amx_emulator {

constexpr int kTiles = 8;
constexpr int kRows = 16;
constexpr int kRowBytes = 64;

struct Tile {
  alignas(64) uint8_t row[kRows][kRowBytes];
};

// The 64 bytes that LDTILECFG reads and STTILECFG writes.
struct Configuration {
  uint8_t palette;  // 0: no tiles
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Configuration) == 64, "as in memory");

// Bytes of a tile beyond its configured rows and row bytes are zero at all times.
struct TileState {
  Configuration configuration;
  Tile tiles[kTiles];
};

enum class Outcome { kDone, kInvalidOpcode, kGeneralProtection };

// Executes one instruction. For an exception, `reason` is set and nothing has changed.
// A page fault while a tile is loaded or stored leaves start_row at the row that faulted, where the instruction
// resumes. Aborts the process if AddressSanitizer's shadow memory forbids an access, which neither the CPU nor valgrind
// would see.
Outcome execute(const Instruction& instruction, TileState* state, const char** reason);

// C += A B for `rows` rows of A and C, `pairs` pairs of k and `columns` columns, as TDPBF16PS rounds it: see tiles.cpp.
void dot_bf16(Tile* c, const Tile& a, const Tile& b, int rows, int pairs, int columns);

// Writes to stderr without allocating.
void report(const char* format, ...) __attribute__((format(printf, 1, 2)));

const char* operation_name(AmxemuOperation operation);

}  // namespace amx_emulator
