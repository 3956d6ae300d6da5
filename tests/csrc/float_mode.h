// Flush-to-zero and denormals-are-zero set for a scope, as torch.set_flush_denormal(True) leaves a thread.
#pragma once

#include <xmmintrin.h>

namespace blockscale::test {

class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};

}  // namespace blockscale::test
