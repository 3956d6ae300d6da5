// Tile instructions as bytes, executed on the spot: any tile numbers, and encodings that no assembler would emit.
// Also the conformance tests' view of exceptions: faults_of(...) runs something and returns the signal that it raised.
#pragma once

#include <gtest/gtest.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "amxemu.h"

namespace amx_emulator::test {

struct alignas(64) TileConfig {
  uint8_t bytes[64] = {1};

  // Tile `tile` has `rows` rows of `row_bytes` bytes.
  TileConfig& with(int tile, int rows, int row_bytes) {
    bytes[16 + 2 * tile] = static_cast<uint8_t>(row_bytes);
    bytes[48 + tile] = static_cast<uint8_t>(rows);
    return *this;
  }
  bool operator==(const TileConfig& other) const { return memcmp(bytes, other.bytes, 64) == 0; }
  static TileConfig none() {
    TileConfig config;
    config.bytes[0] = 0;
    return config;
  }
};

// Runs `code` with rax and rcx set. Every call is at a fresh address, so that no earlier instruction is still cached.
inline void execute_bytes(std::initializer_list<int> code, const void* rax = nullptr, long rcx = 0) {
  constexpr size_t kSize = 1 << 20;
  thread_local uint8_t* page = nullptr;
  thread_local size_t used = 0;
  if (!page) {
    void* memory = mmap(nullptr, kSize, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    page = static_cast<uint8_t*>(memory);
  }
  if (used + 32 > kSize) used = 0;
  uint8_t* start = page + used;
  for (int byte : code) page[used++] = static_cast<uint8_t>(byte);
  page[used++] = 0xc3;  // ret
  __asm__ volatile("sub $128, %%rsp\n call *%2\n add $128, %%rsp" : "+a"(rax), "+c"(rcx) : "r"(start) : "memory");
}

inline void load_config(const TileConfig& config) { execute_bytes({0xc4, 0xe2, 0x78, 0x49, 0x00}, &config); }
inline TileConfig stored_config() {
  TileConfig config;
  memset(config.bytes, 0xee, sizeof config.bytes);
  execute_bytes({0xc4, 0xe2, 0x79, 0x49, 0x00}, &config);
  return config;
}
inline void release() { execute_bytes({0xc4, 0xe2, 0x78, 0x49, 0xc0}); }
inline void zero(int tile) { execute_bytes({0xc4, 0xe2, 0x7b, 0x49, 0xc0 | tile << 3}); }
inline void load_tile(int tile, const void* data, long stride) {
  execute_bytes({0xc4, 0xe2, 0x7b, 0x4b, 0x04 | tile << 3, 0x08}, data, stride);
}
inline void store_tile(int tile, void* data, long stride) {
  execute_bytes({0xc4, 0xe2, 0x7a, 0x4b, 0x04 | tile << 3, 0x08}, data, stride);
}
inline void dot(int c, int a, int b) { execute_bytes({0xc4, 0xe2, (~b & 15) << 3 | 2, 0x5c, 0xc0 | c << 3 | a}); }

struct Fault {
  int signal = 0;  // 0: none
  int code = 0;
  void* address = nullptr;
  const uint8_t* instruction = nullptr;
};

class Conformance : public testing::Test {
 protected:
  void SetUp() override {
    if (!amxemu_active()) GTEST_SKIP() << "the emulator is inactive: this CPU lacks AVX-512";
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, &saved_[0]);
    sigaction(SIGSEGV, &action, &saved_[1]);
    amxemu_set_fault_hook([](AmxemuOperation, AmxemuVector, const char* reason, uint64_t) { reason_ = reason; });
    release();
  }
  void TearDown() override {
    if (!amxemu_active()) return;
    release();
    amxemu_set_fault_hook(nullptr);
    sigaction(SIGILL, &saved_[0], nullptr);
    sigaction(SIGSEGV, &saved_[1], nullptr);
  }

  template <class Action>
  static Fault fault_of(Action action) {
    fault_ = {};
    reason_ = "";
    if (sigsetjmp(resume_, 1) == 0) action();
    return fault_;
  }
  template <class Action>
  static int signal_of(Action action) {
    return fault_of(action).signal;
  }
  static const char* reason() { return reason_; }

  static void on_fault(int signal, siginfo_t* info, void* context) {
    const greg_t rip = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
    fault_ = {signal, info->si_code, info->si_addr, reinterpret_cast<const uint8_t*>(rip)};
    siglongjmp(resume_, 1);
  }

 private:
  inline static sigjmp_buf resume_;
  inline static Fault fault_;
  inline static const char* reason_ = "";
  struct sigaction saved_[2];
};

}  // namespace amx_emulator::test
