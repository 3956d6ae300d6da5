// fp32 kernels for AVX-512 with VBMI: Ice Lake, Zen 4 and later.
#include "isa/vec_avx512_vbmi.h"

namespace blockscale {
namespace {
using Vec = VecAvx512<TableDecoder, false>;  // decoding 8 rows' codes anew takes 530 cycles a unit; storing them, 582
}

extern const KernelTable kernels_avx512_vbmi;
constexpr KernelTable kernels_avx512_vbmi = {
    /*bf16_x_only=*/false,
    Vec::kMaxRows,
    /*preferred_rows=*/8,
    /*row_granule=*/1,
    "11 rows x 2 registers of (even, odd) chains are 22 of 32, beside tables and decoded codes; 8 reach 95 % of peak",
    {
#define BLOCKSCALE_FORMAT(type, dtype) run_linear<Vec, type>,
#include "formats/formats.inc"
#undef BLOCKSCALE_FORMAT
    },
    /*quant=*/{}};

}  // namespace blockscale
