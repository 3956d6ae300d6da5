// See quantize.h. One indirect call into csrc/isa/<isa>.cpp each, under the arithmetic that the results are defined in.
#include "quant/quantize.h"

#include "formats/float_mode.h"
#include "gemm/kernel.h"
#include "gemm/plan.h"

namespace blockscale {

const QuantKernels& quant_kernels(Isa isa) {
  const KernelTable* table = kernel_table(isa);
  while (!table || !table->quant.quantize_activations) {
    isa = static_cast<Isa>(static_cast<int>(isa) - 1);
    table = kernel_table(isa);
  }
  return table->quant;
}

void quantize_activations(const ActivationTask& task, Isa isa) {
  const PlainArithmetic plain;
  quant_kernels(isa).quantize_activations(task);
}

bool quantize_weight(const WeightTask& task, Isa isa, int64_t* bad_block) {
  const PlainArithmetic plain;
  return quant_kernels(isa).quantize_weight(task, bad_block);
}

void dequantize(const DequantizeTask& task, Isa isa) {
  const PlainArithmetic plain;
  quant_kernels(isa).dequantize(task);
}

void decode_to_bf16(const uint8_t* codes, int64_t count, Isa isa, uint16_t* bf16) {
  const PlainArithmetic plain;
  quant_kernels(isa).decode_to_bf16(codes, count, bf16);
}

}  // namespace blockscale
