// Tiles belong to a thread; fork copies them; signal masks and handlers of the application do not disturb the
// emulation.
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "machine_code.h"

namespace amx_emulator::test {
namespace {

class Process : public Conformance {};

TEST_F(Process, ThreadsHaveTheirOwnTiles) {
  load_config(TileConfig().with(0, 16, 64));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int id = 0; id < 6; ++id) {
    threads.emplace_back([&wrong, id] {
      if (amxemu_tiles_configured()) ++wrong;
      alignas(64) uint8_t in[1024], out[1024];
      for (int turn = 0; turn < 100; ++turn) {
        load_config(TileConfig().with(0, 16, 64));
        memset(in, id * 16 + turn, sizeof in);
        load_tile(0, in, 64);
        sched_yield();
        store_tile(0, out, 64);
        if (memcmp(in, out, sizeof in)) ++wrong;
      }
      release();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(amxemu_tiles_configured());
}

TEST_F(Process, CountersSumOverThreadsThatEnded) {
  amxemu_reset_counters();
  const auto work = [] {
    load_config(TileConfig().with(0, 16, 64));
    zero(0);
    zero(0);
    release();
  };
  work();
  std::thread(work).join();
  uint64_t counters[AMXEMU_OPERATIONS];
  amxemu_counters(counters);
  EXPECT_EQ(counters[AMXEMU_LDTILECFG], 2u);
  EXPECT_EQ(counters[AMXEMU_TILEZERO], 4u);
  EXPECT_EQ(counters[AMXEMU_TILERELEASE], 2u);
  EXPECT_EQ(counters[AMXEMU_TILELOADD], 0u);
  amxemu_reset_counters();
  amxemu_counters(counters);
  for (uint64_t counter : counters) EXPECT_EQ(counter, 0u);
}

// The handler executes these itself when a tile instruction comes before.
TEST_F(Process, AddressComputationsBetweenTileInstructions) {
  load_config(TileConfig().with(0, 16, 64));
  const uint64_t base = 0x123456789abcull, index = 0x1111ull;
  uint64_t full = 0, only_index = 0, short_offset = 0, extended = 0, here = 0, there = 1;
  __asm__ volatile(
      "tilezero %%tmm0\n lea -0x12345(%[base],%[index],8), %[full]\n"
      "tilezero %%tmm0\n lea 0x40(,%[index],4), %[only_index]\n lea -8(%[base]), %[short_offset]\n"
      "tilezero %%tmm0\n"
      : [full] "=&r"(full), [only_index] "=&r"(only_index), [short_offset] "=&r"(short_offset)
      : [base] "r"(base), [index] "r"(index));
  EXPECT_EQ(full, base + 8 * index - 0x12345);
  EXPECT_EQ(only_index, 4 * index + 0x40);
  EXPECT_EQ(short_offset, base - 8);
  __asm__ volatile(
      "mov %[base], %%r13\n mov %[index], %%r12\n stc\n"
      "tilezero %%tmm0\n lea 0(%%r13,%%r12,2), %%r15\n lea 1f(%%rip), %[here]\n tilezero %%tmm0\n"
      "1: lea 1b(%%rip), %[there]\n"
      "mov %%r15, %[extended]\n jc 2f\n ud2\n 2:"
      : [here] "=&r"(here), [there] "=&r"(there), [extended] "=&r"(extended)
      : [base] "r"(base), [index] "r"(index)
      : "r12", "r13", "r15", "cc");
  EXPECT_EQ(extended, base + 2 * index);
  EXPECT_EQ(here, there);
}

TEST_F(Process, ForkKeepsTheTiles) {
  const TileConfig config = TileConfig().with(0, 16, 64).with(4, 3, 8);
  load_config(config);
  const pid_t child = fork();
  if (child == 0) _exit(stored_config() == config ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(Process, ABlockedSigillStillReachesTheEmulator) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  load_config(TileConfig().with(0, 16, 64));
  sigprocmask(SIG_SETMASK, &all, nullptr);
  zero(0);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  EXPECT_TRUE(amxemu_tiles_configured());
}

TEST_F(Process, TheApplicationReadsBackItsOwnHandler) {
  struct sigaction installed;
  sigaction(SIGILL, nullptr, &installed);
  EXPECT_EQ(installed.sa_sigaction, &Process::on_fault);
  const auto own = [](int) {};
  const sighandler_t before = signal(SIGILL, own);
  EXPECT_EQ(reinterpret_cast<void*>(before), reinterpret_cast<void*>(&Process::on_fault));
  load_config(TileConfig().with(0, 16, 64));
  EXPECT_TRUE(amxemu_tiles_configured());
  EXPECT_EQ(signal(SIGILL, SIG_DFL), static_cast<sighandler_t>(own));
}

TEST_F(Process, ThePermissionIsGrantedWhenAsked) {
  constexpr long kGetSupported = 0x1021, kGetPermitted = 0x1022, kRequest = 0x1023, kTileData = 18;
  unsigned long features = 0;
  ASSERT_EQ(syscall(SYS_arch_prctl, kGetSupported, &features), 0);
  EXPECT_EQ(features >> 17 & 3, 3u);
  ASSERT_EQ(syscall(SYS_arch_prctl, kRequest, kTileData), 0);
  EXPECT_TRUE(amxemu_permission_requested());
  ASSERT_EQ(syscall(SYS_arch_prctl, kGetPermitted, &features), 0);
  EXPECT_EQ(features >> 17 & 3, 3u);
  EXPECT_EQ(syscall(SYS_getpid), getpid()) << "other system calls pass through";
  errno = 0;
  EXPECT_EQ(syscall(SYS_close, -1L), -1);
  EXPECT_EQ(errno, EBADF);
}

}  // namespace
}  // namespace amx_emulator::test
