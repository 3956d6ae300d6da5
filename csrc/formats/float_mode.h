// The floating-point mode that results are defined under, whatever the calling thread has set for its own arithmetic.
#pragma once

#include <stdint.h>

namespace blockscale {

// Round to nearest, no flushing of subnormals, for as long as it lives. Arithmetic under it belongs in a function of
// its own that is not inlined: the compiler may move a floating-point operation over a write to MXCSR.
class PlainArithmetic {
 public:
  PlainArithmetic() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1f80); }
  ~PlainArithmetic() { __builtin_ia32_ldmxcsr(saved_); }
  PlainArithmetic(const PlainArithmetic&) = delete;
  PlainArithmetic& operator=(const PlainArithmetic&) = delete;

 private:
  uint32_t saved_;
};

}  // namespace blockscale
