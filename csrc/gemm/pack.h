// The packed weight: the codes of W[N, K] in the order in which every kernel reads them, exactly N*K bytes.
//
// A strip is 16 columns of the product (rows n of W), one contiguous stream of 64 bytes for each 4 k (a quad):
//
//   byte       0        2        4        6      | 8        10       12       14     | 16 ..
//   column     0        1        2        3      | 0        1        2        3      | 4  5  6  7 ...
//   k - 4q     0 1      0 1      0 1      0 1    | 2 3      2 3      2 3      2 3    | 0 1 ...
//
//   column n = 16 s + c, k = 4 q + 2 p + j (p, j in 0..1):   s*16*K + q*64 + 16*(c/4) + 8*p + 2*(c%4) + j
//
// Interleaving the decoded low and high bytes of a chunk within 128-bit lanes yields 16 columns of k-pair p as bf16
// pairs: the operand of the bf16 dot product and a row of an AMX tile. A ragged last strip of w columns starts at
// s*16*K and has quads 4*w bytes apart; a ragged last quad (K % 4) is shorter. In both the order is the same with the
// absent (column, k) left out.
#pragma once

#include <cstdint>

namespace blockscale {

int64_t strip_count(int64_t N);  // ceil(N / 16)

// Packs strips [strip_begin, strip_end) of `codes` (N, K) with the given element strides into `packed` (N*K bytes).
void pack_weight(const uint8_t* codes, int64_t N, int64_t K, int64_t stride_n, int64_t stride_k, int64_t strip_begin,
                 int64_t strip_end, uint8_t* packed);

// The inverse, into contiguous `codes` (N, K).
void unpack_weight(const uint8_t* packed, int64_t N, int64_t K, int64_t strip_begin, int64_t strip_end, uint8_t* codes);

}  // namespace blockscale
