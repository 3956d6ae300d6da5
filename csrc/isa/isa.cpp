// Detection of instruction sets: see isa.h. Compiled with baseline x86-64 flags; nothing here runs before it is called.
#include "isa/isa.h"

#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>

namespace blockscale {
namespace {

struct Row {
  const char* name;
  bool compiled;
};

constexpr Row kRows[] = {
#define BLOCKSCALE_ISA(enumerator, name, compiled) {#name, compiled != 0},
#include "isa/isa.inc"
};

struct Feature {
  Isa isa;
  const char* name;
  uint32_t CpuWords::*word;
  int bit;
};

constexpr Feature kFeatures[] = {
#define BLOCKSCALE_ISA_FEATURE(enumerator, feature, word, bit) {Isa::enumerator, #feature, &CpuWords::word, bit},
#include "isa/isa.inc"
};

struct State {
  Isa isa;
  const char* name;
  uint64_t mask;
};

constexpr State kStates[] = {
#define BLOCKSCALE_ISA_STATE(enumerator, state, mask) {Isa::enumerator, #state, mask},
#include "isa/isa.inc"
};

constexpr int kOsxsaveBit = 27;  // of leaf1_ecx: XGETBV may be executed

// Palette 1 as the tile kernels use it: 8 tiles of 16 rows of 64 bytes.
bool has_tile_palette(const CpuWords& words) {
  const uint32_t total_bytes = words.leaf1d_1_eax & 0xffff, tile_bytes = words.leaf1d_1_eax >> 16;
  const uint32_t row_bytes = words.leaf1d_1_ebx & 0xffff, tiles = words.leaf1d_1_ebx >> 16;
  const uint32_t rows = words.leaf1d_1_ecx & 0xffff;
  return total_bytes >= 8192 && tile_bytes >= 1024 && row_bytes >= 64 && tiles >= 8 && rows >= 16;
}

// Everything that `isa` needs from CPUID and XCR0; the AMX palette and permission come after it.
std::string missing_bits(const CpuWords& words, Isa isa) {
  std::string lacking;
  for (const Feature& feature : kFeatures) {
    if (feature.isa > isa || (words.*feature.word >> feature.bit & 1)) continue;
    lacking += (lacking.empty() ? "CPU lacks " : ", ") + std::string(feature.name);
  }
  if (!lacking.empty()) return lacking;
  const uint64_t saved = (words.leaf1_ecx >> kOsxsaveBit & 1) ? words.xcr0 : 0;
  for (const State& state : kStates) {
    if (state.isa > isa || (saved & state.mask) == state.mask) continue;
    return "operating system does not save " + std::string(state.name) + " state (XCR0)";
  }
  return {};
}

// Both halves must agree: the variable could be left over, and the emulator could be loaded for another program's sake.
bool tests_assume_tiles() {
  const char* text = getenv("BLOCKSCALE_TEST_ASSUME_AMX");
  if (!text || strcmp(text, "1") != 0) return false;
  const auto emulator_active = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "amxemu_active"));
  return emulator_active && emulator_active() != 0;
}

IsaReport report_of_this_machine() {
  IsaReport report;
  const char* text = getenv("BLOCKSCALE_MAX_ISA");
  if (text && *text) report.cap = parse_isa(text);
  report.isas = detect(read_cpu_words(), report.cap);
  for (int i = 0; i < kIsaCount; ++i) {
    if (report.isas[i].active) report.active = static_cast<Isa>(i);
  }
  return report;
}

}  // namespace

const char* isa_name(Isa isa) { return kRows[static_cast<int>(isa)].name; }

Isa parse_isa(const char* name) {
  std::string names;
  for (int i = 0; i < kIsaCount; ++i) {
    if (strcmp(kRows[i].name, name) == 0) return static_cast<Isa>(i);
    names += (i ? ", " : "") + std::string(kRows[i].name);
  }
  std::string got;  // in ASCII: Python decodes the sentence as UTF-8
  for (const char* c = name; *c; ++c) got += static_cast<signed char>(*c) < ' ' ? '?' : *c;
  throw std::invalid_argument("blockscale: expected `BLOCKSCALE_MAX_ISA` to be one of " + names + ", got " + got);
}

CpuWords read_cpu_words() {
  CpuWords words;
  uint32_t eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return words;
  words.leaf1_ecx = ecx;
  if (ecx >> kOsxsaveBit & 1) {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    words.xcr0 = static_cast<uint64_t>(high) << 32 | low;
  }
  // __get_cpuid_count refuses a leaf beyond the CPU's highest, where Intel would answer with the highest one's words.
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
    words.leaf7_ebx = ebx;
    words.leaf7_ecx = ecx;
    words.leaf7_edx = edx;
    if (eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) words.leaf7_1_eax = eax;
  }
  if (__get_cpuid_count(0x1d, 0, &eax, &ebx, &ecx, &edx) && eax >= 1) {
    __get_cpuid_count(0x1d, 1, &words.leaf1d_1_eax, &words.leaf1d_1_ebx, &words.leaf1d_1_ecx, &edx);
  }
  if (tests_assume_tiles()) words = emulated_tiles(words);
  constexpr Isa kTiles = Isa::kAmxBf16;
  if (kRows[static_cast<int>(kTiles)].compiled && missing_bits(words, kTiles).empty() && has_tile_palette(words)) {
    constexpr long kArchReqXcompPerm = 0x1023, kXtileData = 18;
    words.tile_permission = syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData) == 0 ? 0 : errno;
  }
  return words;
}

CpuWords emulated_tiles(CpuWords words) {
  words.leaf7_edx |= 1u << 24 | 1u << 22;  // AMX_TILE, AMX_BF16
  words.leaf1d_1_eax = 1024u << 16 | 8192;
  words.leaf1d_1_ebx = 8u << 16 | 64;
  words.leaf1d_1_ecx = 16;
  words.xcr0 |= 0x60000;
  return words;
}

std::string missing_for(const CpuWords& words, Isa isa) {
  std::string missing = missing_bits(words, isa);
  if (!missing.empty() || isa < Isa::kAmxBf16) return missing;
  if (!has_tile_palette(words)) return "CPU or hypervisor hides the AMX tile palette (CPUID leaf 0x1D)";
  if (words.tile_permission != 0) {
    return "operating system refuses the AMX tile permission (arch_prctl: " +
           (words.tile_permission > 0 ? std::string(strerror(words.tile_permission)) : "not asked") + ")";
  }
  return {};
}

std::array<IsaStatus, kIsaCount> detect(const CpuWords& words, std::optional<Isa> cap) {
  std::array<IsaStatus, kIsaCount> statuses;
  int active = 0;
  for (int i = 0; i < kIsaCount; ++i) {
    const Isa isa = static_cast<Isa>(i);
    IsaStatus& status = statuses[i];
    status.compiled = kRows[i].compiled;
    if (!status.compiled) {
      status.reason = "not compiled into this library";
    } else {
      status.reason = missing_for(words, isa);
      if (status.reason.empty() && cap && isa > *cap) {
        status.reason = "above BLOCKSCALE_MAX_ISA=" + std::string(isa_name(*cap));
      }
    }
    status.usable = status.reason.empty();
    if (status.usable) active = i;
  }
  statuses[active].active = true;
  return statuses;
}

const IsaReport& isa_report() {
  // A throwing initialiser leaves the static unset, so the next call reads the variable again.
  static const IsaReport report = report_of_this_machine();
  return report;
}

Isa active_isa() { return isa_report().active; }

}  // namespace blockscale
