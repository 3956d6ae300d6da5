// TILELOADD and TILESTORED: which bytes they touch, and page faults in the middle of a tile.
#include <random>
#include <vector>

#include "machine_code.h"

namespace amx_emulator::test {
namespace {

class Memory : public Conformance {};

TEST_F(Memory, LoadAndStoreTouchRowsTimesBytesAndNothingElse) {
  std::mt19937 random(1);
  std::vector<uint8_t> source(16384), target(16384), expected_target(16384);
  for (uint8_t& byte : source) byte = static_cast<uint8_t>(random());
  for (int turn = 0; turn < 300; ++turn) {
    const int rows = 1 + random() % 16, bytes = 4 * (1 + random() % 16), tile = random() % 8;
    const int start_row = turn % 3 == 0 ? random() % rows : 0;
    const long stride = random() % 400;  // rows may overlap
    TileConfig config = TileConfig().with(tile, rows, bytes);
    config.bytes[1] = static_cast<uint8_t>(start_row);
    load_config(config);
    load_tile(tile, source.data(), stride);
    uint8_t expected[1024] = {}, loaded[1024];
    for (int row = start_row; row < rows; ++row) memcpy(expected + row * 64, &source[row * stride], bytes);
    amxemu_peek_tile(tile, loaded);
    ASSERT_EQ(memcmp(expected, loaded, 1024), 0) << "rows " << rows << ", bytes " << bytes << ", start " << start_row;
    EXPECT_EQ(stored_config().bytes[1], 0) << "start_row is zero afterwards";

    const long target_stride = 64 + random() % 300;
    std::fill(target.begin(), target.end(), 0xee);
    expected_target = target;
    store_tile(tile, target.data(), target_stride);
    for (int row = 0; row < rows; ++row) memcpy(&expected_target[row * target_stride], expected + row * 64, bytes);
    ASSERT_EQ(target, expected_target);
  }
}

TEST_F(Memory, AFaultNamesTheByteAndTheInstructionResumesAtItsRow) {
  void* memory = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  uint8_t* pages = static_cast<uint8_t*>(memory);
  for (int i = 0; i < 8192; ++i) pages[i] = static_cast<uint8_t>(7 * i);
  ASSERT_EQ(mprotect(pages + 4096, 4096, PROT_NONE), 0);
  load_config(TileConfig().with(2, 16, 64));
  const Fault fault = fault_of([&] { load_tile(2, pages + 4096 - 5 * 64, 64); });
  EXPECT_EQ(fault.signal, SIGSEGV);
  EXPECT_EQ(fault.address, pages + 4096);
  EXPECT_EQ(stored_config().bytes[1], 5) << "start_row is the row that faulted";
  ASSERT_EQ(mprotect(pages + 4096, 4096, PROT_READ), 0);
  // Other data in the first five rows shows that they are not read again.
  std::vector<uint8_t> expected(pages + 4096 - 5 * 64, pages + 4096 + 11 * 64);
  memset(pages, 0, 4096);
  load_tile(2, pages + 4096 - 5 * 64, 64);
  uint8_t loaded[1024];
  amxemu_peek_tile(2, loaded);
  EXPECT_EQ(memcmp(loaded, expected.data(), 1024), 0);
  munmap(pages, 8192);
}

TEST_F(Memory, AConfigurationThatCannotBeReadFaultsThere) {
  void* page = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const Fault fault = fault_of([&] { execute_bytes({0xc4, 0xe2, 0x78, 0x49, 0x00}, page); });
  EXPECT_EQ(fault.signal, SIGSEGV);
  EXPECT_EQ(fault.address, page);
  munmap(page, 4096);
}

#ifdef __SANITIZE_ADDRESS__
TEST_F(Memory, AddressSanitizerStopsATileThatLeavesItsBuffer) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::vector<uint8_t> buffer(1024);
  load_config(TileConfig().with(0, 16, 64));
  load_tile(0, buffer.data(), 64);
  store_tile(0, buffer.data(), 64);
  EXPECT_DEATH(load_tile(0, buffer.data() + 4, 64), "TILELOADD, row 15: AddressSanitizer forbids");
  EXPECT_DEATH(store_tile(0, buffer.data() - 4, 64), "TILESTORED, row 0: AddressSanitizer forbids");
}
#endif

}  // namespace
}  // namespace amx_emulator::test
