// fp32 kernels for AVX2, FMA and F16C: Haswell, Zen and later.
#include "isa/quant_avx2.h"
#include "isa/vec_avx2.h"

namespace blockscale {

extern const KernelTable kernels_avx2;
constexpr KernelTable kernels_avx2 = {
    /*bf16_x_only=*/false,
    VecAvx2::kMaxRows,
    /*preferred_rows=*/6,
    /*row_granule=*/1,
    "6 rows x 8 columns of (even, odd) chains are 12 of 16 registers, beside 2 of decoded codes and x; 7 rows spill",
    {
#define BLOCKSCALE_FORMAT(type, dtype) run_linear<VecAvx2, type>,
#include "formats/formats.inc"
#undef BLOCKSCALE_FORMAT
    },
    kQuantKernels<QuantAvx2>};

}  // namespace blockscale
