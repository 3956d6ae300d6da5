// fp32 kernels for AVX-512 F, BW, DQ and VL: Skylake-X and later.
#include "isa/quant_avx512.h"
#include "isa/vec_avx512.h"

namespace blockscale {
namespace {
using Vec = VecAvx512<NibbleDecoder, true>;
}

extern const KernelTable kernels_avx512;
constexpr KernelTable kernels_avx512 = {
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
    kQuantKernels<QuantAvx512>};

}  // namespace blockscale
