// Every addressing form of the tile loads and stores and some of LDTILECFG, encoded by the assembler: one function
// each, and a table of what it must address. Each function sets base and index, executes the instruction and restores
// the registers.
//
// struct { void (*run)(void); uint64_t address, stride; uint32_t one_row, store, config, base_is_rsp; }

#define BASE 0x20040000

  .data
saved_rsp:
  .quad 0
  .globl addressing_forms
addressing_forms:

  .text
  .set count, 0

.macro enter
  push %rbx
  push %rbp
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, saved_rsp(%rip)
.endm

.macro leave_form
  mov saved_rsp(%rip), %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbp
  pop %rbx
  ret
.endm

.macro entry address, stride, one_row, store, config, on_stack
  .data
  .quad 1b, \address, \stride
  .long \one_row, \store, \config, \on_stack
  .text
  .set count, count + 1
.endm

// Loads, hinted loads and stores take turns; `memory` is the operand's text.
.macro tile_instruction memory:vararg
  .if count % 4 == 0
    tilestored %tmm3, \memory
  .elseif count % 4 == 1
    tileloaddt1 \memory, %tmm3
  .else
    tileloadd \memory, %tmm3
  .endif
.endm

.macro form base, index, scale, displacement, stride, on_stack=0
1:
  enter
  movabs $BASE, %\base
  .ifnc \base, \index
  movabs $\stride, %\index
  .endif
  tile_instruction \displacement(%\base,%\index,\scale)
  leave_form
  .ifnc \base, \index
  entry BASE+(\displacement), (\stride)*\scale, 0, (count % 4 == 0), 0, \on_stack
  .else
  entry BASE+(\displacement), BASE*\scale, 1, (count % 4 == 0), 0, \on_stack
  .endif
.endm

.macro form_without_index base, displacement, on_stack=0
1:
  enter
  movabs $BASE, %\base
  tile_instruction \displacement(%\base)
  leave_form
  entry BASE+(\displacement), 0, 0, (count % 4 == 0), 0, \on_stack
.endm

.macro form_without_base index, scale, stride
1:
  enter
  movabs $\stride, %\index
  tile_instruction BASE(,%\index,\scale)
  leave_form
  entry BASE, (\stride)*\scale, 0, (count % 4 == 0), 0, 0
.endm

.macro form_of_config base, displacement
1:
  enter
  movabs $BASE, %\base
  ldtilecfg \displacement(%\base)
  leave_form
  entry BASE+(\displacement), 0, 0, 0, 1, 0
.endm

  .altmacro
  .irp index, rax, rcx, rdx, rbx, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15
    .irp base, rax, rcx, rdx, rbx, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15
      form \base, \index, 1, 0, 72
      form \base, \index, 2, 24, -48
      form \base, \index, 4, -72, 16
      form \base, \index, 8, 4096, -8
      form \base, \index, 1, -8192, -96
    .endr
    // Below rsp lie the frames of the signal: forward rows only.
    form rsp, \index, 1, 0, 64, 1
    form rsp, \index, 4, 24, 24, 1
    form rsp, \index, 8, 4096, 8, 1
    form_without_base \index, 1, 64
    form_without_base \index, 2, -40
    form_without_base \index, 8, 16
  .endr
  .irp base, rax, rcx, rdx, rbx, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15
    form_without_index \base, 0
    form_without_index \base, -72
    form_without_index \base, 4096
    form_of_config \base, 0
    form_of_config \base, 64
    form_of_config \base, -4096
  .endr
  form_without_index rsp, 24, 1
  form_of_config rsp, 64

  .section .rodata
  .globl addressing_form_count
addressing_form_count:
  .quad count
  .section .note.GNU-stack, "", @progbits
