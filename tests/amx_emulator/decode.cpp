#include "decode.h"

#include <string.h>

namespace amx_emulator {
namespace {

enum Prefix { kNone = 0, k66 = 1, kF3 = 2, kF2 = 3 };  // VEX.pp

// Registers in the order of their encoding.
constexpr int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// AMXEMU_OPERATIONS if the table in decode.h has no such row.
AmxemuOperation operation_of(uint8_t opcode, int prefix, uint8_t modrm) {
  const bool memory = modrm < 0xc0;
  if (opcode == 0x49 && memory && (modrm >> 3 & 7) == 0) {
    return prefix == kNone ? AMXEMU_LDTILECFG : prefix == k66 ? AMXEMU_STTILECFG : AMXEMU_OPERATIONS;
  }
  if (opcode == 0x49 && prefix == kNone && modrm == 0xc0) return AMXEMU_TILERELEASE;
  if (opcode == 0x49 && !memory && prefix == kF2 && (modrm & 7) == 0) return AMXEMU_TILEZERO;
  if (opcode == 0x4b && memory && prefix == kF2) return AMXEMU_TILELOADD;
  if (opcode == 0x4b && memory && prefix == k66) return AMXEMU_TILELOADDT1;
  if (opcode == 0x4b && memory && prefix == kF3) return AMXEMU_TILESTORED;
  if (opcode == 0x5c && !memory && prefix == kF3) return AMXEMU_TDPBF16PS;
  return AMXEMU_OPERATIONS;
}

int64_t displacement(const uint8_t** at, int bytes) {
  int8_t short_value = 0;
  int32_t long_value = 0;
  if (bytes == 1) memcpy(&short_value, *at, 1);
  if (bytes == 4) memcpy(&long_value, *at, 4);
  *at += bytes;
  return bytes == 1 ? short_value : long_value;
}

struct MemoryOperand {
  bool has_sib;
  uint64_t address;  // base register or next instruction, plus displacement
  uint64_t stride;   // index register times scale, 0 without an index
};

// Reads SIB byte and displacement behind `modrm` from `*at`, and moves `*at` behind them; no immediate follows.
MemoryOperand memory_operand(uint8_t modrm, int extend_index, int extend_base, const greg_t* registers,
                             const uint8_t** at) {
  MemoryOperand operand{};
  const int mod = modrm >> 6, rm = modrm & 7;
  uint64_t base = 0;
  int displacement_bytes = mod == 1 ? 1 : mod == 2 ? 4 : 0;
  bool from_next_instruction = false;
  if (rm == 4) {
    const uint8_t sib = *(*at)++;
    operand.has_sib = true;
    const int index = (sib >> 3 & 7) | extend_index;
    // 4 means no index; r12, which is 4 extended, is one.
    if (index != 4) operand.stride = static_cast<uint64_t>(registers[kRegisters[index]]) << (sib >> 6);
    if ((sib & 7) == 5 && mod == 0) {
      displacement_bytes = 4;  // no base
    } else {
      base = static_cast<uint64_t>(registers[kRegisters[(sib & 7) | extend_base]]);
    }
  } else if (rm == 5 && mod == 0) {
    displacement_bytes = 4;
    from_next_instruction = true;
  } else {
    base = static_cast<uint64_t>(registers[kRegisters[rm | extend_base]]);
  }
  const int64_t offset = displacement(at, displacement_bytes);
  if (from_next_instruction) base = reinterpret_cast<uint64_t>(*at);
  operand.address = base + static_cast<uint64_t>(offset);
  return operand;
}

}  // namespace

bool may_be_tile_instruction(const uint8_t* code) {
  return code[0] == 0xc4 && (code[1] & 31) == 2 && (code[3] == 0x49 || code[3] == 0x4b || code[3] == 0x5c);
}

Decoded decode(const uint8_t* code, const greg_t* registers, Instruction* instruction, const char** reason) {
  if (!may_be_tile_instruction(code)) return Decoded::kOther;
  // R, X, B and vvvv are stored inverted.
  const int extend_reg = code[1] & 0x80 ? 0 : 8;
  const int extend_index = code[1] & 0x40 ? 0 : 8;
  const int extend_base = code[1] & 0x20 ? 0 : 8;
  const uint8_t modrm = code[4];

  Instruction decoded{};
  decoded.operation = operation_of(code[3], code[2] & 3, modrm);
  if (decoded.operation == AMXEMU_OPERATIONS) return Decoded::kOther;
  decoded.reg = (modrm >> 3 & 7) | extend_reg;
  decoded.rm = (modrm & 7) | extend_base;
  decoded.vvvv = ~(code[2] >> 3) & 15;

  const uint8_t* at = code + 5;
  if (modrm < 0xc0) {
    const MemoryOperand operand = memory_operand(modrm, extend_index, extend_base, registers, &at);
    decoded.has_sib = operand.has_sib;
    decoded.address = operand.address;
    decoded.stride = operand.stride;
  }
  decoded.length = static_cast<int>(at - code);
  *instruction = decoded;

  *reason = nullptr;
  if (code[2] & 0x80) *reason = "VEX.W must be 0";
  if (code[2] & 0x04) *reason = "VEX.L must be 0";
  if (decoded.operation != AMXEMU_TDPBF16PS && decoded.vvvv != 0) *reason = "VEX.vvvv must be 1111b";
  return *reason ? Decoded::kUndefined : Decoded::kTile;
}

bool execute_address_computation(greg_t* registers) {
  const uint8_t* code = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  const uint8_t rex = code[0], modrm = code[2];
  if ((rex & 0xf8) != 0x48 || code[1] != 0x8d || modrm >= 0xc0) return false;
  const uint8_t* at = code + 3;
  const MemoryOperand operand = memory_operand(modrm, rex & 2 ? 8 : 0, rex & 1 ? 8 : 0, registers, &at);
  registers[kRegisters[(modrm >> 3 & 7) | (rex & 4 ? 8 : 0)]] = static_cast<greg_t>(operand.address + operand.stride);
  registers[REG_RIP] = reinterpret_cast<greg_t>(at);
  return true;
}

}  // namespace amx_emulator
