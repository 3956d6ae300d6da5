// Every condition under which a tile instruction raises #UD, and that other illegal instructions still reach the
// application.
#include "machine_code.h"

namespace amx_emulator::test {
namespace {

alignas(64) uint8_t buffer[8192];

class InvalidOpcode : public Conformance {
 protected:
  void expect_invalid(std::initializer_list<int> code, const char* what) {
    const Fault fault = fault_of([&] { execute_bytes(code, buffer, 64); });
    EXPECT_EQ(fault.signal, SIGILL) << what;
    EXPECT_STRNE(reason(), "") << what;
  }
};

TEST_F(InvalidOpcode, WithoutAConfiguration) {
  EXPECT_EQ(signal_of([] { load_tile(0, buffer, 64); }), SIGILL);
  EXPECT_EQ(signal_of([] { store_tile(0, buffer, 64); }), SIGILL);
  EXPECT_EQ(signal_of([] { zero(0); }), SIGILL);
  EXPECT_EQ(signal_of([] { dot(0, 1, 2); }), SIGILL);
}

TEST_F(InvalidOpcode, ProductsOfTilesThatDoNotFit) {
  load_config(
      TileConfig().with(0, 16, 64).with(1, 16, 64).with(2, 16, 64).with(3, 8, 64).with(4, 16, 32).with(5, 16, 62));
  EXPECT_EQ(signal_of([] { dot(0, 1, 2); }), 0);
  EXPECT_EQ(signal_of([] { dot(0, 0, 2); }), SIGILL) << "C is A";
  EXPECT_EQ(signal_of([] { dot(0, 1, 0); }), SIGILL) << "C is B";
  EXPECT_EQ(signal_of([] { dot(0, 1, 1); }), SIGILL) << "A is B";
  EXPECT_EQ(signal_of([] { dot(6, 1, 2); }), SIGILL) << "C not configured";
  EXPECT_EQ(signal_of([] { dot(0, 6, 2); }), SIGILL) << "A not configured";
  EXPECT_EQ(signal_of([] { dot(0, 1, 6); }), SIGILL) << "B not configured";
  EXPECT_EQ(signal_of([] { dot(0, 1, 9); }), SIGILL) << "there is no tile 9";
  EXPECT_EQ(signal_of([] { dot(3, 1, 2); }), SIGILL) << "rows of C and A differ";
  EXPECT_EQ(signal_of([] { dot(4, 1, 2); }), SIGILL) << "columns of C and B differ";
  EXPECT_EQ(signal_of([] { dot(0, 4, 2); }), SIGILL) << "k of A and B differ";
  EXPECT_EQ(signal_of([] { dot(0, 5, 2); }), SIGILL) << "A's row bytes are not a multiple of 4";
}

TEST_F(InvalidOpcode, LoadsAndStores) {
  load_config(TileConfig().with(0, 16, 64).with(5, 16, 62));
  EXPECT_EQ(signal_of([] { load_tile(0, buffer, 64); }), 0);
  EXPECT_EQ(signal_of([] { load_tile(5, buffer, 64); }), SIGILL) << "row bytes not a multiple of 4";
  EXPECT_EQ(signal_of([] { store_tile(5, buffer, 64); }), SIGILL);
  EXPECT_EQ(signal_of([] { load_tile(6, buffer, 64); }), SIGILL) << "not configured";
  TileConfig config = TileConfig().with(0, 16, 64);
  config.bytes[1] = 16;
  load_config(config);
  EXPECT_EQ(signal_of([] { load_tile(0, buffer, 64); }), SIGILL) << "start_row beyond the rows";
}

TEST_F(InvalidOpcode, PrefixFieldsAndAddressingForms) {
  load_config(TileConfig().with(0, 16, 64));
  expect_invalid({0xc4, 0xe2, 0x7b, 0x4b, 0x00}, "no SIB byte");
  expect_invalid({0xc4, 0xe2, 0x7b, 0x4b, 0x05, 0, 0, 0, 0}, "relative to the instruction pointer");
  expect_invalid({0xc4, 0xe2, 0xfb, 0x4b, 0x04, 0x08}, "VEX.W = 1");
  expect_invalid({0xc4, 0xe2, 0x7f, 0x4b, 0x04, 0x08}, "VEX.L = 1");
  expect_invalid({0xc4, 0xe2, 0x73, 0x4b, 0x04, 0x08}, "VEX.vvvv used");
  expect_invalid({0xc4, 0x62, 0x7b, 0x4b, 0x04, 0x08}, "tile 8");
  expect_invalid({0xc4, 0xc2, 0x6a, 0x5c, 0xc1}, "A is tile 9");
  expect_invalid({0xc4, 0xe2, 0xf8, 0x49, 0x00}, "LDTILECFG with VEX.W");
}

TEST_F(InvalidOpcode, InstructionsThatAreNotEmulatedReachTheApplication) {
  load_config(TileConfig().with(0, 16, 64).with(1, 16, 64).with(2, 16, 64));
  const Fault ud2 = fault_of([] { execute_bytes({0x0f, 0x0b}); });
  EXPECT_EQ(ud2.signal, SIGILL);
  ASSERT_NE(ud2.instruction, nullptr);
  EXPECT_EQ(ud2.instruction[1], 0x0b);
  EXPECT_EQ(signal_of([] { execute_bytes({0xc4, 0xe2, 0x6b, 0x5e, 0xc1}); }), SIGILL) << "TDPBSSD";
  EXPECT_EQ(signal_of([] { execute_bytes({0xc4, 0xe2, 0x6b, 0x5c, 0xc1}); }), SIGILL) << "TDPFP16PS";
}

TEST_F(InvalidOpcode, WithoutAHandlerTheProcessDiesOfTheSignal) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        signal(SIGILL, SIG_DFL);
        amxemu_set_fault_hook(nullptr);
        release();
        dot(0, 1, 2);
      },
      testing::KilledBySignal(SIGILL), "#UD by TDPBF16PS");
}

}  // namespace
}  // namespace amx_emulator::test
