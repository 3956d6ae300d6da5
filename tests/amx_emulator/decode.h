// Decoder of the tile instructions. They share one form: a three-byte VEX prefix of opcode map 2, an opcode, a ModRM
// byte, perhaps an SIB byte and a displacement.
//
//   C4 | R X B mmmmm | W vvvv L pp | opcode | ModRM: mod reg rm | SIB: scale index base | displacement of 0, 1 or 4
//   bytes
//
//   opcode  pp    ModRM      instruction
//   49      none  memory /0  LDTILECFG
//   49      66    memory /0  STTILECFG
//   49      none  C0         TILERELEASE
//   49      F2    register   TILEZERO    reg
//   4B      F2    memory     TILELOADD   reg
//   4B      66    memory     TILELOADDT1 reg
//   4B      F3    memory     TILESTORED  reg
//   5C      F3    register   TDPBF16PS   reg += rm * vvvv
//
// Not decoded: segment and address-size prefixes, which no compiler emits here; such an instruction stays an illegal
// one.
#pragma once

#include <stdint.h>
#include <sys/ucontext.h>

#include "amxemu.h"

namespace amx_emulator {

struct Instruction {
  AmxemuOperation operation;
  int length;  // bytes
  int reg, rm, vvvv;
  bool has_sib;
  uint64_t address;  // base register or next instruction, plus displacement
  uint64_t stride;   // index register times scale, 0 without an index
};

enum class Decoded {
  kOther,      // not a tile instruction of the table
  kTile,       // decoded
  kUndefined,  // one of the table with a prefix field that must raise #UD
};

// Reads the instruction at `code`. `reason` is set for kUndefined.
Decoded decode(const uint8_t* code, const greg_t* registers, Instruction* instruction, const char** reason);

// Whether the four bytes at `code` begin like a tile instruction.
bool may_be_tile_instruction(const uint8_t* code);

// Executes the instruction at RIP if it is a 64-bit LEA, which compilers put between tile instructions and which
// changes no flags; false if it is another one.
bool execute_address_computation(greg_t* registers);

}  // namespace amx_emulator
