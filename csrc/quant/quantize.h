// Weights and activations to float8_e4m3fn codes with scales, and back; kernel.h defines every result.
//
// Torch-free and single-threaded: the caller splits rows or block rows over threads, any split gives the same bytes,
// and so does any ISA. The thread's MXCSR (flush modes, rounding) neither changes a result nor is changed.
#pragma once

#include "isa/isa.h"
#include "quant/kernel.h"

namespace blockscale {

// The kernels that serve an ISA: its own, or those of the next lower one that has some.
const QuantKernels& quant_kernels(Isa isa);

void quantize_activations(const ActivationTask& task, Isa isa);

// See QuantKernels::quantize_weight for the answer.
bool quantize_weight(const WeightTask& task, Isa isa, int64_t* bad_block);

void dequantize(const DequantizeTask& task, Isa isa);

// bf16[i] = decode(codes[i]) for `count` codes: exact.
void decode_to_bf16(const uint8_t* codes, int64_t count, Isa isa, uint16_t* bf16);

}  // namespace blockscale
