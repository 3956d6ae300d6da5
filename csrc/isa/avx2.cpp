// fp32 kernels for AVX2, FMA and F16C: Haswell, Zen and later.
#include "isa/vec_avx2.h"

namespace blockscale {

extern const KernelTable kernels_avx2;
constexpr KernelTable kernels_avx2 = {
    /*bf16_x_only=*/false,
    VecAvx2::kMaxRows,
    /*preferred_rows=*/8,
    /*row_granule=*/1,
    "8 rows x 4 columns of (even, odd) chains are 8 of 16 registers, beside decoded codes and x; 9 rows spill",
    {
#define BLOCKSCALE_FORMAT(type, dtype) run_linear<VecAvx2, type>,
#include "formats/formats.inc"
#undef BLOCKSCALE_FORMAT
    }};

}  // namespace blockscale
