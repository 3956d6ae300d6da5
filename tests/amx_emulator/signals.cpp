// Where tile instructions arrive and leave: the SIGILL handler, each thread's tiles, and the libc entry points that
// would otherwise take the signal away or deny the permission. Everything that a handler runs is async-signal-safe.
#include <dlfcn.h>
#include <errno.h>
#include <immintrin.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "decode.h"
#include "tiles.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace amx_emulator {
namespace {

bool active;
int permission_requested;
amxemu_fault_hook fault_hook;
struct sigaction application_handler;  // of SIGILL

// ---------------------------------------------------------------------------------------------------- threads

struct Thread {
  TileState tiles;
  uint64_t counters[AMXEMU_OPERATIONS];
  Thread* next;
};

__thread Thread* this_thread __attribute__((tls_model("initial-exec")));
Thread* all_threads;  // never freed, so the counters of ended threads still count

Thread* current_thread() {
  if (this_thread) return this_thread;
  // A signal handler may call mmap but not malloc.
  void* memory = mmap(nullptr, sizeof(Thread), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) abort();
  Thread* thread = static_cast<Thread*>(memory);
  thread->next = __atomic_load_n(&all_threads, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&all_threads, &thread->next, thread, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
  return this_thread = thread;
}

// ---------------------------------------------------------------------------------------------------- libc's own
// functions

template <class Function>
Function* libc_function(Function** cached, const char* name) {
  if (!*cached) *cached = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
  if (!*cached) abort();
  return *cached;
}

int libc_sigaction(int signal_number, const struct sigaction* action, struct sigaction* old) {
  static int (*cached)(int, const struct sigaction*, struct sigaction*);
  return libc_function(&cached, "sigaction")(signal_number, action, old);
}

long libc_syscall(long number, const long* arguments) {
  static long (*cached)(long, ...);
  return libc_function(&cached, "syscall")(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                                           arguments[5]);
}

// ---------------------------------------------------------------------------------------------------- exceptions

void announce(const Instruction& instruction, AmxemuVector vector, const char* reason, const uint8_t* code) {
  if (fault_hook) return fault_hook(instruction.operation, vector, reason, reinterpret_cast<uint64_t>(code));
  report("amxemu: %s by %s at %p: %s\n", vector == AMXEMU_INVALID_OPCODE ? "#UD" : "#GP",
         operation_name(instruction.operation), static_cast<const void*>(code), reason);
}

// To the application's SIGILL handler; without one the instruction is executed again under the default action, which
// ends the process with a core file that points at it.
void deliver_invalid_opcode(int signal_number, siginfo_t* info, void* context) {
  if (application_handler.sa_flags & SA_SIGINFO) {
    if (application_handler.sa_sigaction) return application_handler.sa_sigaction(signal_number, info, context);
  } else if (application_handler.sa_handler != SIG_DFL && application_handler.sa_handler != SIG_IGN) {
    return application_handler.sa_handler(signal_number);
  }
  struct sigaction default_action = {};
  default_action.sa_handler = SIG_DFL;
  libc_sigaction(SIGILL, &default_action, nullptr);
}

// As the kernel reports #GP: SIGSEGV, SI_KERNEL, no address, at the instruction. The signal stays blocked until the
// handler's return restores the interrupted mask, so the application sees the instruction's own context.
void deliver_general_protection() {
  sigset_t blocked;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGSEGV);
  const long block[6] = {SIG_BLOCK, reinterpret_cast<long>(&blocked), 0, 8};
  libc_syscall(SYS_rt_sigprocmask, block);
  siginfo_t info = {};
  info.si_signo = SIGSEGV;
  info.si_code = SI_KERNEL;
  const long queue[6] = {getpid(), gettid(), SIGSEGV, reinterpret_cast<long>(&info)};
  libc_syscall(SYS_rt_tgsigqueueinfo, queue);
}

constexpr int kLongestInstruction = 15;

void on_illegal_instruction(int signal_number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  for (bool first = true;; first = false) {
    const uint8_t* code = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
    Instruction instruction;
    const char* reason = nullptr;
    const Decoded decoded = decode(code, registers, &instruction, &reason);
    if (decoded == Decoded::kOther) {
      if (first) deliver_invalid_opcode(signal_number, info, context);
      break;
    }
    Thread* thread = current_thread();
    const Outcome outcome =
        decoded == Decoded::kUndefined ? Outcome::kInvalidOpcode : execute(instruction, &thread->tiles, &reason);
    if (outcome == Outcome::kInvalidOpcode) {
      announce(instruction, AMXEMU_INVALID_OPCODE, reason, code);
      info->si_addr = const_cast<uint8_t*>(code);
      deliver_invalid_opcode(signal_number, info, context);
      break;
    }
    if (outcome == Outcome::kGeneralProtection) {
      announce(instruction, AMXEMU_GENERAL_PROTECTION, reason, code);
      deliver_general_protection();
      break;
    }
    __atomic_fetch_add(&thread->counters[instruction.operation], 1, __ATOMIC_RELAXED);
    registers[REG_RIP] += instruction.length;
    // Tile instructions that follow run at once, with the address computations between them: a signal costs more than a
    // tile product. Only within the page that this one came from, because the next may not be mapped.
    const greg_t page = reinterpret_cast<greg_t>(code) >> 12;
    const auto on_the_page = [&] { return (registers[REG_RIP] + kLongestInstruction - 1) >> 12 == page; };
    while (on_the_page() && execute_address_computation(registers)) {
    }
    if (!on_the_page() || !may_be_tile_instruction(reinterpret_cast<const uint8_t*>(registers[REG_RIP]))) break;
  }
  errno = saved_errno;
}

__attribute__((constructor)) void install() {
  __builtin_cpu_init();
  if (active || !__builtin_cpu_supports("avx512f")) return;
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;  // an application's handler may leave by siglongjmp
  sigemptyset(&action.sa_mask);
  active = libc_sigaction(SIGILL, &action, &application_handler) == 0;
}

// A blocked SIGILL ends the process at the next tile instruction, so no mask gets it.
const sigset_t* without_sigill(int how, const sigset_t* set, sigset_t* copy) {
  if (!set || how == SIG_UNBLOCK || !active) return set;
  *copy = *set;
  sigdelset(copy, SIGILL);
  return copy;
}

}  // namespace
}  // namespace amx_emulator

// ---------------------------------------------------------------------------------------------------- libc's,
// interposed

// The application may install and read back a SIGILL handler; it gets what the emulator does not execute.
EXPORT int sigaction(int signal_number, const struct sigaction* action, struct sigaction* old) noexcept {
  using namespace amx_emulator;
  if (signal_number != SIGILL || !active) return libc_sigaction(signal_number, action, old);
  const struct sigaction before = application_handler;
  if (action) application_handler = *action;
  if (old) *old = before;
  return 0;
}

EXPORT sighandler_t signal(int signal_number, sighandler_t handler) noexcept {
  struct sigaction action = {}, old;
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  return sigaction(signal_number, &action, &old) ? SIG_ERR : old.sa_handler;
}

EXPORT int pthread_sigmask(int how, const sigset_t* set, sigset_t* old) noexcept {
  static int (*cached)(int, const sigset_t*, sigset_t*);
  sigset_t copy;
  set = amx_emulator::without_sigill(how, set, &copy);
  return amx_emulator::libc_function(&cached, "pthread_sigmask")(how, set, old);
}

EXPORT int sigprocmask(int how, const sigset_t* set, sigset_t* old) noexcept {
  static int (*cached)(int, const sigset_t*, sigset_t*);
  sigset_t copy;
  set = amx_emulator::without_sigill(how, set, &copy);
  return amx_emulator::libc_function(&cached, "sigprocmask")(how, set, old);
}

// libc has no function for arch_prctl, so every program asks for the tile permission through this one.
EXPORT long syscall(long number, ...) noexcept {
  using namespace amx_emulator;
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  constexpr long kGetSupported = 0x1021, kGetPermitted = 0x1022, kRequest = 0x1023, kTileData = 18;
  constexpr unsigned long kTileConfigurationBit = 1ul << 17, kTileDataBit = 1ul << kTileData;
  if (active && number == SYS_arch_prctl) {
    if (arguments[0] == kRequest && arguments[1] == kTileData) {
      __atomic_store_n(&permission_requested, 1, __ATOMIC_RELAXED);
      return 0;
    }
    if (arguments[0] == kGetSupported || arguments[0] == kGetPermitted) {
      unsigned long features = 0;
      const long real[6] = {arguments[0], reinterpret_cast<long>(&features)};
      libc_syscall(number, real);  // an older kernel fails, and has no features of its own to report
      features |= kTileConfigurationBit;
      if (arguments[0] == kGetSupported || permission_requested) features |= kTileDataBit;
      memcpy(reinterpret_cast<void*>(arguments[1]), &features, sizeof features);
      return 0;
    }
  }
  return libc_syscall(number, arguments);
}

// ---------------------------------------------------------------------------------------------------- amxemu.h

EXPORT int amxemu_active(void) { return amx_emulator::active; }
EXPORT int amxemu_permission_requested(void) {
  return __atomic_load_n(&amx_emulator::permission_requested, __ATOMIC_RELAXED);
}
EXPORT void amxemu_set_fault_hook(amxemu_fault_hook hook) { amx_emulator::fault_hook = hook; }

EXPORT void amxemu_counters(uint64_t counters[AMXEMU_OPERATIONS]) {
  using namespace amx_emulator;
  memset(counters, 0, AMXEMU_OPERATIONS * sizeof *counters);
  for (Thread* thread = __atomic_load_n(&all_threads, __ATOMIC_ACQUIRE); thread; thread = thread->next) {
    for (int i = 0; i < AMXEMU_OPERATIONS; ++i) counters[i] += __atomic_load_n(&thread->counters[i], __ATOMIC_RELAXED);
  }
}

EXPORT void amxemu_reset_counters(void) {
  using namespace amx_emulator;
  for (Thread* thread = __atomic_load_n(&all_threads, __ATOMIC_ACQUIRE); thread; thread = thread->next) {
    for (uint64_t& counter : thread->counters) __atomic_store_n(&counter, 0, __ATOMIC_RELAXED);
  }
}

EXPORT int amxemu_tiles_configured(void) { return amx_emulator::current_thread()->tiles.configuration.palette != 0; }
EXPORT void amxemu_peek_tile(int tile, uint8_t rows[16 * 64]) {
  memcpy(rows, &amx_emulator::current_thread()->tiles.tiles[tile], sizeof(amx_emulator::Tile));
}
