// fp32 kernels for AVX-512 F, BW, DQ and VL: Skylake-X and later.
#include "isa/vec_avx512.h"

namespace blockscale {
namespace {
using Vec = VecAvx512<NibbleDecoder>;
}

extern const KernelTable kernels_avx512;
constexpr KernelTable kernels_avx512 = {
    /*bf16_x_only=*/false,
    Vec::kMaxRows,
    /*preferred_rows=*/12,
    /*row_granule=*/1,
    "12 rows x (even, odd) chains are 24 of 32 registers, beside decoder tables and decoded codes",
    {
#define BLOCKSCALE_FORMAT(type, dtype) run_linear<Vec, type>,
#include "formats/formats.inc"
#undef BLOCKSCALE_FORMAT
    }};

}  // namespace blockscale
