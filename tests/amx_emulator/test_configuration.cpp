// LDTILECFG, STTILECFG, TILERELEASE: what they accept, what raises #GP, and the state they leave.
#include "machine_code.h"

namespace amx_emulator::test {
namespace {

class Configuration : public Conformance {};

TEST_F(Configuration, WithoutTilesStoresZeros) {
  EXPECT_FALSE(amxemu_tiles_configured());
  EXPECT_EQ(stored_config(), TileConfig::none());
}

TEST_F(Configuration, StoresWhatWasLoaded) {
  const TileConfig config = TileConfig().with(0, 16, 64).with(3, 5, 20).with(7, 1, 4);
  load_config(config);
  EXPECT_TRUE(amxemu_tiles_configured());
  EXPECT_EQ(stored_config(), config);
  release();
  EXPECT_FALSE(amxemu_tiles_configured());
  EXPECT_EQ(stored_config(), TileConfig::none());
}

TEST_F(Configuration, PaletteZeroReleases) {
  load_config(TileConfig().with(0, 16, 64));
  load_config(TileConfig::none());
  EXPECT_FALSE(amxemu_tiles_configured());
}

TEST_F(Configuration, RefusalsAreGeneralProtectionAndChangeNothing) {
  const TileConfig good = TileConfig().with(0, 16, 64).with(3, 5, 20);
  load_config(good);
  const auto expect_refused = [&](const TileConfig& bad, const std::string& what) {
    const Fault fault = fault_of([&] { load_config(bad); });
    EXPECT_EQ(fault.signal, SIGSEGV) << what;
    EXPECT_EQ(fault.code, SI_KERNEL) << what;
    EXPECT_EQ(fault.address, nullptr) << what;
    ASSERT_NE(fault.instruction, nullptr) << what;
    EXPECT_EQ(fault.instruction[0], 0xc4) << what << ": the context is the instruction's own";
    EXPECT_EQ(fault.instruction[3], 0x49) << what;
    EXPECT_STRNE(reason(), "") << what;
    EXPECT_EQ(stored_config(), good) << what;
  };
  for (int byte = 2; byte < 64; ++byte) {
    if ((byte >= 16 && byte < 32) || (byte >= 48 && byte < 56)) continue;
    TileConfig bad = good;
    bad.bytes[byte] = 1;
    expect_refused(bad, "reserved byte " + std::to_string(byte));
  }
  TileConfig palette = good;
  palette.bytes[0] = 2;
  expect_refused(palette, "palette 2");
  expect_refused(TileConfig(good).with(1, 17, 64), "17 rows");
  expect_refused(TileConfig(good).with(1, 16, 65), "65 bytes a row");
  expect_refused(TileConfig(good).with(1, 0, 64), "no rows");
  expect_refused(TileConfig(good).with(1, 4, 0), "no bytes");
  TileConfig wide = good;
  wide.bytes[17] = 1;
  expect_refused(wide, "320 bytes a row");
}

TEST_F(Configuration, LoadingClearsTheTiles) {
  alignas(64) uint8_t data[1024], tile[1024];
  memset(data, 7, sizeof data);
  const TileConfig config = TileConfig().with(2, 16, 64);
  load_config(config);
  load_tile(2, data, 64);
  load_config(config);
  amxemu_peek_tile(2, tile);
  for (uint8_t byte : tile) ASSERT_EQ(byte, 0);
}

TEST_F(Configuration, ZeroClearsOneTile) {
  alignas(64) uint8_t data[1024], tile[1024];
  memset(data, 7, sizeof data);
  load_config(TileConfig().with(2, 16, 64).with(3, 16, 64));
  load_tile(2, data, 64);
  load_tile(3, data, 64);
  zero(2);
  amxemu_peek_tile(2, tile);
  for (uint8_t byte : tile) ASSERT_EQ(byte, 0);
  amxemu_peek_tile(3, tile);
  EXPECT_EQ(memcmp(tile, data, 1024), 0);
}

}  // namespace
}  // namespace amx_emulator::test
