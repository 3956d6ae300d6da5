// Detection on recorded CPUs, without their hardware: what each lacks for each instruction set, caps, misspelt names.
#include "isa/isa.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace blockscale {
namespace {

struct RecordedCpu {
  const char* name;
  CpuWords words;
  std::array<const char*, kIsaCount> missing;  // for scalar, avx2, avx512, avx512_vbmi, avx512_bf16, amx_bf16
};

constexpr CpuWords words_of(uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx, uint32_t leaf7_edx,
                            uint32_t leaf7_1_eax, uint64_t xcr0) {
  CpuWords words;
  words.leaf1_ecx = leaf1_ecx;
  words.leaf7_ebx = leaf7_ebx;
  words.leaf7_ecx = leaf7_ecx;
  words.leaf7_edx = leaf7_edx;
  words.leaf7_1_eax = leaf7_1_eax;
  words.xcr0 = xcr0;
  return words;
}

constexpr CpuWords with_tiles(CpuWords words, int permission) {
  words.leaf1d_1_eax = 0x04002000;  // 1024 bytes a tile, 8192 in all
  words.leaf1d_1_ebx = 0x00080040;  // 8 tiles, 64 bytes a row
  words.leaf1d_1_ecx = 0x00000010;  // 16 rows
  words.tile_permission = permission;
  return words;
}

constexpr CpuWords kSapphireRapids = words_of(0x7ffefbff, 0xf3bfbffb, 0xbb417fee, 0xffdd4430, 0x00001c30, 0x602e7);

const std::vector<RecordedCpu>& recorded_cpus() {
  static const std::vector<RecordedCpu> cpus = {
      {"Nehalem (Core i7 920)",
       words_of(0x0098e3bd, 0, 0, 0, 0, 0),
       {"", "CPU lacks AVX, AVX2, FMA, F16C", "CPU lacks AVX, AVX2, FMA, F16C, AVX512F, AVX512BW, AVX512DQ, AVX512VL",
        "CPU lacks AVX, AVX2, FMA, F16C, AVX512F, AVX512BW, AVX512DQ, AVX512VL, AVX512_VBMI",
        "CPU lacks AVX, AVX2, FMA, F16C, AVX512F, AVX512BW, AVX512DQ, AVX512VL, AVX512_VBMI, AVX512_BF16",
        "CPU lacks AVX, AVX2, FMA, F16C, AVX512F, AVX512BW, AVX512DQ, AVX512VL, AVX512_VBMI, AVX512_BF16, AMX_TILE, "
        "AMX_BF16"}},
      {"Haswell (Core i7 4710MQ)",
       words_of(0x7fdafbbf, 0x000027ab, 0, 0, 0, 0x7),
       {"", "", "CPU lacks AVX512F, AVX512BW, AVX512DQ, AVX512VL",
        "CPU lacks AVX512F, AVX512BW, AVX512DQ, AVX512VL, AVX512_VBMI",
        "CPU lacks AVX512F, AVX512BW, AVX512DQ, AVX512VL, AVX512_VBMI, AVX512_BF16",
        "CPU lacks AVX512F, AVX512BW, AVX512DQ, AVX512VL, AVX512_VBMI, AVX512_BF16, AMX_TILE, AMX_BF16"}},
      {"Haswell, the operating system saves no ymm",
       words_of(0x7fdafbbf, 0x000027ab, 0, 0, 0, 0x3),
       {"", "operating system does not save YMM state (XCR0)", "CPU lacks AVX512F, AVX512BW, AVX512DQ, AVX512VL",
        "CPU lacks AVX512F, AVX512BW, AVX512DQ, AVX512VL, AVX512_VBMI",
        "CPU lacks AVX512F, AVX512BW, AVX512DQ, AVX512VL, AVX512_VBMI, AVX512_BF16",
        "CPU lacks AVX512F, AVX512BW, AVX512DQ, AVX512VL, AVX512_VBMI, AVX512_BF16, AMX_TILE, AMX_BF16"}},
      {"Skylake-X (Core i7 7800X)",
       words_of(0x7ffefbbf, 0xd39ffffb, 0, 0x0c000000, 0, 0xff),
       {"", "", "", "CPU lacks AVX512_VBMI", "CPU lacks AVX512_VBMI, AVX512_BF16",
        "CPU lacks AVX512_VBMI, AVX512_BF16, AMX_TILE, AMX_BF16"}},
      {"Skylake-X, the operating system saves no zmm",
       words_of(0x7ffefbbf, 0xd39ffffb, 0, 0x0c000000, 0, 0x7),
       {"", "", "operating system does not save ZMM state (XCR0)", "CPU lacks AVX512_VBMI",
        "CPU lacks AVX512_VBMI, AVX512_BF16", "CPU lacks AVX512_VBMI, AVX512_BF16, AMX_TILE, AMX_BF16"}},
      {"Ice Lake (Xeon D 1718T)",
       words_of(0xfffaf387, 0xf3bfbfb9, 0x00415f46, 0xbc000410, 0, 0xe7),
       {"", "", "", "", "CPU lacks AVX512_BF16", "CPU lacks AVX512_BF16, AMX_TILE, AMX_BF16"}},
      {"Cooper Lake (the Skylake server's words with AVX512_VNNI and AVX512_BF16)",
       words_of(0x7ffefbff, 0xd39ffffb, 0x00000818, 0xbc000400, 0x00000020, 0x2ff),
       {"", "", "", "CPU lacks AVX512_VBMI", "CPU lacks AVX512_VBMI", "CPU lacks AVX512_VBMI, AMX_TILE, AMX_BF16"}},
      {"Zen 4 (EPYC 9124)",
       words_of(0x7efa320b, 0xf1bf97a9, 0x00415fce, 0x10000010, 0x00000020, 0x2e7),
       {"", "", "", "", "", "CPU lacks AMX_TILE, AMX_BF16"}},
      {"Zen 5 (EPYC, virtual)",
       words_of(0xfffa3203, 0xf1bf07ab, 0x00405fc6, 0x00000110, 0x00000030, 0xe7),
       {"", "", "", "", "", "CPU lacks AMX_TILE, AMX_BF16"}},
      {"Sapphire Rapids (Xeon w7 2475X)", with_tiles(kSapphireRapids, 0), {"", "", "", "", "", ""}},
      {"Sapphire Rapids, the hypervisor hides the palette",
       kSapphireRapids,
       {"", "", "", "", "", "CPU or hypervisor hides the AMX tile palette (CPUID leaf 0x1D)"}},
      {"Sapphire Rapids, the kernel saves no tiles",
       with_tiles(words_of(0x7ffefbff, 0xf3bfbffb, 0xbb417fee, 0xffdd4430, 0x00001c30, 0x2e7), -1),
       {"", "", "", "", "", "operating system does not save AMX tile state (XCR0)"}},
      {"Sapphire Rapids, the kernel refuses tiles",
       with_tiles(kSapphireRapids, EOPNOTSUPP),
       {"", "", "", "", "", "operating system refuses the AMX tile permission (arch_prctl: Operation not supported)"}},
      {"Sapphire Rapids, XGETBV not enabled",
       with_tiles(words_of(0x77fefbff, 0xf3bfbffb, 0xbb417fee, 0xffdd4430, 0x00001c30, 0x602e7), -1),
       {"", "operating system does not save YMM state (XCR0)", "operating system does not save YMM state (XCR0)",
        "operating system does not save YMM state (XCR0)", "operating system does not save YMM state (XCR0)",
        "operating system does not save YMM state (XCR0)"}},
  };
  return cpus;
}

TEST(Isa, RecordedCpusMissExactlyWhatTheyMiss) {
  for (const RecordedCpu& cpu : recorded_cpus()) {
    for (int i = 0; i < kIsaCount; ++i) {
      const Isa isa = static_cast<Isa>(i);
      EXPECT_EQ(missing_for(cpu.words, isa), cpu.missing[i]) << cpu.name << ", " << isa_name(isa);
    }
  }
}

TEST(Isa, DetectPutsCompiledBeforeTheCpuAndTheCpuBeforeTheCap) {
  for (const RecordedCpu& cpu : recorded_cpus()) {
    for (int cap = -1; cap < kIsaCount; ++cap) {
      const std::optional<Isa> limit = cap < 0 ? std::nullopt : std::optional<Isa>(static_cast<Isa>(cap));
      const auto statuses = detect(cpu.words, limit);
      int active = 0;
      for (int i = 0; i < kIsaCount; ++i) {
        SCOPED_TRACE(std::string(cpu.name) + ", " + isa_name(static_cast<Isa>(i)) + ", cap " + std::to_string(cap));
        const IsaStatus& status = statuses[i];
        std::string expected = cpu.missing[i];
        if (!status.compiled) {
          expected = "not compiled into this library";
        } else if (expected.empty() && cap >= 0 && i > cap) {
          expected = "above BLOCKSCALE_MAX_ISA=" + std::string(isa_name(*limit));
        }
        EXPECT_EQ(status.reason, expected);
        EXPECT_EQ(status.usable, expected.empty());
        if (status.usable) active = i;
      }
      for (int i = 0; i < kIsaCount; ++i) EXPECT_EQ(statuses[i].active, i == active) << cpu.name << ", cap " << cap;
    }
  }
}

TEST(Isa, ScalarIsCompiledAndNeverMissing) {
  EXPECT_TRUE(detect(CpuWords{}, std::nullopt)[0].active);
  EXPECT_TRUE(detect(CpuWords{}, Isa::kScalar)[0].active);
}

TEST(Isa, NamesRoundTripInTheirOrder) {
  const std::vector<std::string> names = {"scalar", "avx2", "avx512", "avx512_vbmi", "avx512_bf16", "amx_bf16"};
  ASSERT_EQ(static_cast<int>(names.size()), kIsaCount);
  for (int i = 0; i < kIsaCount; ++i) {
    EXPECT_EQ(isa_name(static_cast<Isa>(i)), names[i]);
    EXPECT_EQ(parse_isa(names[i].c_str()), static_cast<Isa>(i));
  }
}

TEST(Isa, MisspeltNamesAreRefusedWithTheList) {
  for (const char* text : {"avx3", "AVX2", "avx2 ", "", "avx512vbmi"}) {
    try {
      parse_isa(text);
      ADD_FAILURE() << "accepted '" << text << "'";
    } catch (const std::invalid_argument& error) {
      EXPECT_EQ(
          std::string(error.what()),
          "blockscale: expected `BLOCKSCALE_MAX_ISA` to be one of scalar, avx2, avx512, avx512_vbmi, avx512_bf16, "
          "amx_bf16, got " +
              std::string(text));
    }
  }
}

// The report is cached for the process, so the whole life of the variable is one test.
TEST(Isa, ReportThrowsWhileTheCapIsMisspeltAndIsThenFixed) {
  const char* before = getenv("BLOCKSCALE_MAX_ISA");
  const std::string saved = before ? before : "";
  setenv("BLOCKSCALE_MAX_ISA", "avx1024", 1);
  EXPECT_THROW(isa_report(), std::invalid_argument);
  EXPECT_THROW(active_isa(), std::invalid_argument);
  setenv("BLOCKSCALE_MAX_ISA", saved.c_str(), 1);
  const IsaReport& report = isa_report();
  EXPECT_EQ(report.cap.has_value(), !saved.empty());
  if (report.cap) {
    EXPECT_EQ(isa_name(*report.cap), saved);
    EXPECT_LE(report.active, *report.cap);
  }
  EXPECT_EQ(report.active, active_isa());
  EXPECT_TRUE(report.isas[static_cast<int>(report.active)].active);
  EXPECT_TRUE(report.isas[static_cast<int>(report.active)].usable);
  setenv("BLOCKSCALE_MAX_ISA", "avx1024", 1);
  EXPECT_EQ(&isa_report(), &report);
  if (before) {
    setenv("BLOCKSCALE_MAX_ISA", saved.c_str(), 1);
  } else {
    unsetenv("BLOCKSCALE_MAX_ISA");
  }
}

TEST(Isa, ThisMachineAgreesWithTheCompilersOwnDetection) {
  const CpuWords words = read_cpu_words();
  EXPECT_EQ(missing_for(words, Isa::kAvx2).empty(), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  EXPECT_EQ(missing_for(words, Isa::kAvx512).empty(),
            __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
  EXPECT_EQ(missing_for(words, Isa::kAvx512Vbmi).empty(),
            missing_for(words, Isa::kAvx512).empty() && __builtin_cpu_supports("avx512vbmi"));
  EXPECT_EQ(missing_for(words, Isa::kAvx512Bf16).empty(),
            missing_for(words, Isa::kAvx512Vbmi).empty() && __builtin_cpu_supports("avx512bf16"));
}

}  // namespace
}  // namespace blockscale
