// The list of weight formats, from formats.inc. Every ISA's kernel table has one kernel per entry.
#pragma once

#include "formats/fp8_e4m3.h"

namespace blockscale {

enum class WeightFormat : int {
#define BLOCKSCALE_FORMAT(type, dtype) k##type,
#include "formats/formats.inc"
#undef BLOCKSCALE_FORMAT
  kCount
};

}  // namespace blockscale
