// The checks of every op: one sentence each, the same words as the fakes in python/blockscale/checks.py.
//   blockscale::<op>: expected <requirement>, got <what came>
// All throw std::invalid_argument (ValueError in Python) and run before any allocation or parallel region.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "formats/floats.h"

namespace blockscale {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// "float8_e4m3fn", as torch prints a dtype without its prefix.
std::string dtype_name(ScalarType type);

// "[3, 128]"
template <class Integers>
std::string list_text(const Integers& values) {
  std::string text = "[";
  for (size_t i = 0; i < static_cast<size_t>(values.size()); ++i) {
    text += (i ? ", " : "") + std::to_string(values[i]);
  }
  return text + "]";
}

// The checks of one op call.
class Check {
 public:
  explicit Check(const char* op) : op_(op) {}

  // Throws the sentence.
  [[noreturn]] void fail(const std::string& requirement, const std::string& got) const;

  // bfloat16, float16 or float32.
  FloatType float_dtype(const char* name, ScalarType type) const;
  void out_dtype(ScalarType type) const;
  void dtype(const char* name, const Tensor& tensor, ScalarType wanted, const char* note = "") const;
  void weight_shape(const char* name, const Tensor& tensor) const;  // [N, K] or [E, N, K]
  void packed_contiguous(const char* name, const Tensor& tensor) const;
  void block_size(const std::vector<int64_t>& block_size) const;
  // Scales of a weight [.., N, K]: dtype, and the shape of its grid.
  void scales(const char* name, const Tensor& scales, const Tensor& weight, const std::vector<int64_t>& block) const;
  void bias(const Tensor& bias, int64_t N) const;

 private:
  const char* op_;
};

int64_t ceil_div(int64_t a, int64_t b);
FloatType float_type(ScalarType type);  // of a dtype that float_dtype or out_dtype has accepted

}  // namespace blockscale
