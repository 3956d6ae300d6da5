// Public interface of libamxemu.so, an in-process emulator of the AMX tile instructions that the amx_bf16 kernels use.
// Preload the library or link to it: loading it installs the emulator. README.md says what it proves.
// All functions are async-signal-safe and may be called from any thread.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The instructions, and the indices of their counters.
enum AmxemuOperation {
  AMXEMU_LDTILECFG,
  AMXEMU_STTILECFG,
  AMXEMU_TILERELEASE,
  AMXEMU_TILEZERO,
  AMXEMU_TILELOADD,
  AMXEMU_TILELOADDT1,
  AMXEMU_TILESTORED,
  AMXEMU_TDPBF16PS,
  AMXEMU_OPERATIONS
};

// Exception vectors as the processor numbers them.
enum AmxemuVector { AMXEMU_INVALID_OPCODE = 6, AMXEMU_GENERAL_PROTECTION = 13 };

// 1 if tile instructions of this process are emulated; 0 on a CPU without AVX-512, which the emulator itself computes
// with.
int amxemu_active(void);

// Instructions completed since the last reset, summed over all threads. Reset while no tile instruction is running.
void amxemu_counters(uint64_t counters[AMXEMU_OPERATIONS]);
void amxemu_reset_counters(void);

// The calling thread's tiles: whether a configuration is loaded, and the 16 rows of 64 bytes of one tile.
int amxemu_tiles_configured(void);
void amxemu_peek_tile(int tile, uint8_t rows[16 * 64]);

// 1 once the process has asked for the tile permission by arch_prctl(ARCH_REQ_XCOMP_PERM), which always succeeds.
int amxemu_permission_requested(void);

// Called before an exception is delivered. Without a hook the reason goes to stderr.
typedef void (*amxemu_fault_hook)(enum AmxemuOperation operation, enum AmxemuVector vector, const char* reason,
                                  uint64_t instruction);
void amxemu_set_fault_hook(amxemu_fault_hook hook);

#ifdef __cplusplus
}
#endif
