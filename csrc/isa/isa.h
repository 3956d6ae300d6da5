// Which instruction sets this process can use, and why not the others.
// Detection is a pure function of the CPU's identification words: any recorded CPU can be tested on any machine.
// The kernels are in csrc/isa/<name>.cpp; this file and isa.cpp are baseline code without intrinsics.
#pragma once

#include <stdint.h>

#include <array>
#include <optional>
#include <string>

namespace blockscale {

// Ordered: a later one needs everything an earlier one needs (isa.inc).
enum class Isa : int {
#define BLOCKSCALE_ISA(enumerator, name, compiled) enumerator,
#include "isa/isa.inc"
};

constexpr int kIsaCount = 0
#define BLOCKSCALE_ISA(enumerator, name, compiled) +1
#include "isa/isa.inc"
    ;

// The spelling of the environment variable, JSON, tables and tests: "avx512_vbmi".
const char* isa_name(Isa isa);

// The inverse, for the value of BLOCKSCALE_MAX_ISA: throws std::invalid_argument with the list of names.
Isa parse_isa(const char* name);

// What a CPU, its hypervisor and its operating system say about themselves. A leaf the CPU does not have is zero.
struct CpuWords {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;                                       // leaf 7, subleaf 1
  uint32_t leaf1d_1_eax = 0, leaf1d_1_ebx = 0, leaf1d_1_ecx = 0;  // leaf 0x1D, subleaf 1: AMX palette 1
  uint64_t xcr0 = 0;                                              // 0 where XGETBV is not enabled
  int tile_permission = -1;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA): 0 granted, an errno, -1 not asked
};

// Reads them from this machine. Asks for the tile permission only where everything else speaks for AMX and the
// library has kernels for it, because being granted it makes the process's signal frames larger for good.
//
// For tests: while BLOCKSCALE_TEST_ASSUME_AMX=1 and the emulator of tests/amx_emulator is active in this process, the
// words say of tiles what emulated_tiles() says. The variable alone changes nothing.
CpuWords read_cpu_words();

// `words` with the tiles that the emulator executes; all else stays as the CPU has it.
CpuWords emulated_tiles(CpuWords words);

struct IsaStatus {
  bool compiled = false;
  bool usable = false;
  bool active = false;  // the highest usable one
  std::string reason;   // why not usable; empty when usable
};

// What the CPU or the operating system lacks for `isa`, empty if nothing. Knows no cap, nor what is compiled.
std::string missing_for(const CpuWords& words, Isa isa);

// The state of every ISA: usable = compiled, nothing missing, not above `cap`; the first that fails is the reason.
std::array<IsaStatus, kIsaCount> detect(const CpuWords& words, std::optional<Isa> cap);

struct IsaReport {
  std::array<IsaStatus, kIsaCount> isas;
  std::optional<Isa> cap;
  Isa active = Isa::kScalar;
};

// detect() of this machine under BLOCKSCALE_MAX_ISA (unset or empty: no cap), computed once; thread safe.
// Throws std::invalid_argument, at every call, for as long as the variable holds a misspelt name.
const IsaReport& isa_report();

// isa_report().active
Isa active_isa();

}  // namespace blockscale
