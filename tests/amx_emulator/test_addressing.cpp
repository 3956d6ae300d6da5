// Every addressing form, encoded by the assembler in addressing_forms.S.
#include <vector>

#include "machine_code.h"

namespace amx_emulator::test {
namespace {

struct Form {
  void (*run)();
  uint64_t address, stride;
  uint32_t one_row, store, config, base_is_rsp;
};
extern "C" const Form addressing_forms[];
extern "C" const uint64_t addressing_form_count;

constexpr uint64_t kArena = 0x20000000, kArenaBytes = 0x80000;
constexpr int kTile = 3;

class Addressing : public Conformance {};

TEST_F(Addressing, EveryForm) {
  void* memory = mmap(reinterpret_cast<void*>(kArena), kArenaBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (memory != reinterpret_cast<void*>(kArena)) GTEST_SKIP() << "the address that the forms use is taken";
  uint8_t* arena = static_cast<uint8_t*>(memory);
  const auto pattern = [](uint64_t offset) { return static_cast<uint8_t>(offset * 0x9e3779b9u >> 13); };
  uint8_t stored[1024];
  for (int i = 0; i < 1024; ++i) stored[i] = static_cast<uint8_t>(i ^ i >> 5 ^ 0x5a);

  ASSERT_GT(addressing_form_count, 1000u);
  for (uint64_t i = 0; i < addressing_form_count; ++i) {
    const Form& form = addressing_forms[i];
    SCOPED_TRACE("form " + std::to_string(i));
    const uint64_t offset = form.address - kArena;
    const int rows = form.one_row ? 1 : 16;
    // 16 rows at strides within +-96 stay within this window; below rsp the signal's frames may change anything.
    const uint64_t window_begin = form.base_is_rsp ? offset : offset - 2048, window_end = offset + 2048;
    for (uint64_t at = window_begin; at < window_end; ++at) arena[at] = pattern(at);

    if (form.config) {
      const TileConfig config = TileConfig().with(1, 3, 8);
      memcpy(arena + offset, config.bytes, sizeof config.bytes);
      release();
      ASSERT_EQ(signal_of([&] { form.run(); }), 0);
      ASSERT_EQ(stored_config(), config);
      continue;
    }
    load_config(TileConfig().with(kTile, rows, 64));
    if (form.store) load_tile(kTile, stored, 64);
    ASSERT_EQ(signal_of([&] { form.run(); }), 0) << reason();
    std::vector<uint8_t> expected;
    for (uint64_t at = window_begin; at < window_end; ++at) expected.push_back(pattern(at));
    uint8_t expected_tile[1024] = {}, tile[1024];
    for (int row = 0; row < rows; ++row) {
      const uint64_t at = offset + static_cast<uint64_t>(row) * form.stride;
      if (form.store) {
        memcpy(&expected[at - window_begin], stored + 64 * row, 64);
      } else {
        memcpy(expected_tile + 64 * row, arena + at, 64);
      }
    }
    if (form.store) {
      ASSERT_EQ(memcmp(arena + window_begin, expected.data(), expected.size()), 0);
    } else {
      amxemu_peek_tile(kTile, tile);
      ASSERT_EQ(memcmp(tile, expected_tile, 1024), 0);
    }
  }
  munmap(memory, kArenaBytes);
}

}  // namespace
}  // namespace amx_emulator::test
