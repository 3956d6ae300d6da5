// AMX tiles: each way in which a CPU, a hypervisor or an operating system fails to offer them has its own reason, and
// tests can assume tiles only while the emulator really is there.
#include <dlfcn.h>
#include <errno.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>
#include <vector>

#include "gemm/linear_case.h"
#include "isa/isa.h"

namespace blockscale {
namespace {

constexpr Isa kTiles = Isa::kAmxBf16;

// Sapphire Rapids (Xeon w7 2475X) under an operating system that grants tiles.
CpuWords sapphire_rapids() {
  CpuWords words;
  words.leaf1_ecx = 0x7ffefbff;
  words.leaf7_ebx = 0xf3bfbffb;
  words.leaf7_ecx = 0xbb417fee;
  words.leaf7_edx = 0xffdd4430;
  words.leaf7_1_eax = 0x00001c30;
  words.xcr0 = 0x602e7;
  words.leaf1d_1_eax = 0x04002000;
  words.leaf1d_1_ebx = 0x00080040;
  words.leaf1d_1_ecx = 0x00000010;
  words.tile_permission = 0;
  return words;
}

CpuWords zen4() {  // EPYC 9124
  CpuWords words;
  words.leaf1_ecx = 0x7efa320b;
  words.leaf7_ebx = 0xf1bf97a9;
  words.leaf7_ecx = 0x00415fce;
  words.leaf7_edx = 0x10000010;
  words.leaf7_1_eax = 0x00000020;
  words.xcr0 = 0x2e7;
  return words;
}

CpuWords ice_lake() {  // Xeon D 1718T
  CpuWords words;
  words.leaf1_ecx = 0xfffaf387;
  words.leaf7_ebx = 0xf3bfbfb9;
  words.leaf7_ecx = 0x00415f46;
  words.leaf7_edx = 0xbc000410;
  words.xcr0 = 0xe7;
  return words;
}

CpuWords skylake_x() {  // Core i7 7800X
  CpuWords words;
  words.leaf1_ecx = 0x7ffefbbf;
  words.leaf7_ebx = 0xd39ffffb;
  words.leaf7_edx = 0x0c000000;
  words.xcr0 = 0xff;
  return words;
}

constexpr const char* kNoPalette = "CPU or hypervisor hides the AMX tile palette (CPUID leaf 0x1D)";
constexpr const char* kNoState = "operating system does not save AMX tile state (XCR0)";
constexpr const char* kInvalid = "operating system refuses the AMX tile permission (arch_prctl: Invalid argument)";
constexpr const char* kNotPermitted =
    "operating system refuses the AMX tile permission (arch_prctl: Operation not permitted)";
constexpr const char* kNoSpace =
    "operating system refuses the AMX tile permission (arch_prctl: No space left on device)";
constexpr const char* kNotAsked = "operating system refuses the AMX tile permission (arch_prctl: not asked)";

TEST(AmxDetection, EachRefusalHasItsReason) {
  struct Refusal {
    const char* what;
    void (*change)(CpuWords*);
    const char* reason;
  };
  const Refusal refusals[] = {
      {"nothing is missing", [](CpuWords*) {}, ""},
      {"no tiles", [](CpuWords* words) { words->leaf7_edx &= ~(1u << 24); }, "CPU lacks AMX_TILE"},
      {"no bf16 products", [](CpuWords* words) { words->leaf7_edx &= ~(1u << 22); }, "CPU lacks AMX_BF16"},
      {"neither", [](CpuWords* words) { words->leaf7_edx &= ~(5u << 22); }, "CPU lacks AMX_TILE, AMX_BF16"},
      {"no byte tables", [](CpuWords* words) { words->leaf7_ecx &= ~2u; }, "CPU lacks AVX512_VBMI"},
      {"no AVX512-BF16", [](CpuWords* words) { words->leaf7_1_eax &= ~32u; }, "CPU lacks AVX512_BF16"},
      {"tile data not saved", [](CpuWords* words) { words->xcr0 &= ~(1u << 18); }, kNoState},
      {"tile configuration not saved", [](CpuWords* words) { words->xcr0 &= ~(1u << 17); }, kNoState},
      {"a hypervisor that shows tiles without leaf 0x1D",
       [](CpuWords* words) { words->leaf1d_1_eax = words->leaf1d_1_ebx = words->leaf1d_1_ecx = 0; }, kNoPalette},
      {"less tile memory", [](CpuWords* words) { words->leaf1d_1_eax = 0x04001000; }, kNoPalette},
      {"smaller tiles", [](CpuWords* words) { words->leaf1d_1_eax = 0x02002000; }, kNoPalette},
      {"shorter rows", [](CpuWords* words) { words->leaf1d_1_ebx = 0x00080020; }, kNoPalette},
      {"fewer tiles", [](CpuWords* words) { words->leaf1d_1_ebx = 0x00040040; }, kNoPalette},
      {"fewer rows", [](CpuWords* words) { words->leaf1d_1_ecx = 8; }, kNoPalette},
      {"a kernel before 5.16", [](CpuWords* words) { words->tile_permission = EINVAL; }, kInvalid},
      {"an administrator", [](CpuWords* words) { words->tile_permission = EPERM; }, kNotPermitted},
      {"a small alternate signal stack", [](CpuWords* words) { words->tile_permission = ENOSPC; }, kNoSpace},
      {"permission not asked", [](CpuWords* words) { words->tile_permission = -1; }, kNotAsked},
  };
  for (const Refusal& refusal : refusals) {
    CpuWords words = sapphire_rapids();
    refusal.change(&words);
    EXPECT_EQ(missing_for(words, kTiles), refusal.reason) << refusal.what;
    const IsaStatus status = detect(words, std::nullopt)[static_cast<int>(kTiles)];
    EXPECT_EQ(status.reason, refusal.reason) << refusal.what;
    EXPECT_EQ(status.active, std::string(refusal.reason).empty()) << refusal.what;
  }
}

TEST(AmxDetection, EmulatedTilesAreTilesAndNothingElse) {
  EXPECT_EQ(missing_for(zen4(), kTiles), "CPU lacks AMX_TILE, AMX_BF16");
  CpuWords words = emulated_tiles(zen4());
  EXPECT_EQ(missing_for(words, kTiles), kNotAsked);
  words.tile_permission = 0;
  EXPECT_EQ(missing_for(words, kTiles), "");
  EXPECT_EQ(missing_for(emulated_tiles(ice_lake()), kTiles), "CPU lacks AVX512_BF16");
  EXPECT_EQ(missing_for(emulated_tiles(skylake_x()), kTiles), "CPU lacks AVX512_VBMI, AVX512_BF16");
  CpuWords without_zmm = emulated_tiles(zen4());
  without_zmm.xcr0 &= ~0xe0u;
  EXPECT_EQ(missing_for(without_zmm, kTiles), "operating system does not save ZMM state (XCR0)");
  for (const CpuWords& real : {zen4(), ice_lake(), skylake_x(), CpuWords{}}) {
    for (int isa = 0; isa < static_cast<int>(kTiles); ++isa) {
      EXPECT_EQ(missing_for(emulated_tiles(real), static_cast<Isa>(isa)), missing_for(real, static_cast<Isa>(isa)));
    }
  }
}

class AssumedTiles : public testing::Test {
 protected:
  static constexpr const char* kVariable = "BLOCKSCALE_TEST_ASSUME_AMX";
  void SetUp() override {
    const char* text = getenv(kVariable);
    set_ = text != nullptr;
    if (set_) saved_ = text;
    unsetenv(kVariable);
    real_ = missing_for(read_cpu_words(), kTiles);
  }
  void TearDown() override {
    if (set_) {
      setenv(kVariable, saved_.c_str(), 1);
    } else {
      unsetenv(kVariable);
    }
  }
  static bool emulator_active() {
    const auto active = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "amxemu_active"));
    return active && active();
  }
  static std::string missing_with(const char* value) {
    setenv(kVariable, value, 1);
    return missing_for(read_cpu_words(), kTiles);
  }

  std::string real_;  // what this machine lacks

 private:
  bool set_ = false;
  std::string saved_;
};

TEST_F(AssumedTiles, TheVariableAloneChangesNothing) {
  if (emulator_active()) GTEST_SKIP() << "the emulator is in this process";
  for (const char* value : {"1", "0", "", "amx_bf16"}) EXPECT_EQ(missing_with(value), real_) << value;
}

TEST_F(AssumedTiles, TheEmulatorAloneChangesNothing) {
  if (!emulator_active()) GTEST_SKIP() << "the emulator is not in this process";
  for (const char* value : {"0", "", "yes", "11"}) EXPECT_EQ(missing_with(value), real_) << value;
}

TEST_F(AssumedTiles, BothTogetherAreTilesWhereTheCpuHasTheRest) {
  if (!emulator_active()) GTEST_SKIP() << "the emulator is not in this process";
  EXPECT_EQ(missing_with("1"), missing_for(read_cpu_words(), Isa::kAvx512Bf16));
}

// The process's own choice, under whatever environment it was started with.
TEST(AmxReport, WhatIsActiveMultiplies) {
  test::CaseOptions options;
  options.M = 3;
  options.N = 33;
  options.K = 130;
  options.x_type = FloatType::kBf16;
  test::LinearCase problem(options);
  problem.run(active_isa());  // no SIGILL
  EXPECT_TRUE(problem.within_bound(active_isa()));
  const IsaStatus& tiles = isa_report().isas[static_cast<int>(kTiles)];
  EXPECT_TRUE(tiles.compiled);
  EXPECT_EQ(tiles.usable, tiles.reason.empty());
  // Under both halves of the hook a machine that has the rest runs tiles: the suites around this one did not skip.
  const char* assumed = getenv("BLOCKSCALE_TEST_ASSUME_AMX");
  const bool emulated = dlsym(RTLD_DEFAULT, "amxemu_active") && assumed && std::string(assumed) == "1";
  const CpuWords words = read_cpu_words();
  if (emulated && !isa_report().cap) {
    EXPECT_EQ(tiles.reason, missing_for(words, Isa::kAvx512Bf16));
  }
  if (!emulated && !isa_report().cap) {
    EXPECT_EQ(tiles.reason, missing_for(words, kTiles));
  }
}

}  // namespace
}  // namespace blockscale
