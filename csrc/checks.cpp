// See checks.h.
#include "checks.h"

#include <stdexcept>

namespace blockscale {

std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::UInt16: return "uint16";
    case ScalarType::UInt32: return "uint32";
    case ScalarType::UInt64: return "uint64";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Bool: return "bool";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e4m3fnuz: return "float8_e4m3fnuz";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Float8_e5m2fnuz: return "float8_e5m2fnuz";
    case ScalarType::Float8_e8m0fnu: return "float8_e8m0fnu";
    default: return torch::headeronly::toString(type);
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

FloatType float_type(ScalarType type) {
  return type == ScalarType::Float      ? FloatType::kF32
         : type == ScalarType::BFloat16 ? FloatType::kBf16
                                        : FloatType::kF16;
}

namespace {

bool is_float(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

std::string quoted(const char* name) { return std::string("`") + name + "`"; }

}  // namespace

void Check::fail(const std::string& requirement, const std::string& got) const {
  throw std::invalid_argument(std::string("blockscale::") + op_ + ": expected " + requirement + ", got " + got);
}

FloatType Check::float_dtype(const char* name, ScalarType type) const {
  if (!is_float(type)) fail(quoted(name) + " of dtype bfloat16, float16 or float32", dtype_name(type));
  return float_type(type);
}

void Check::out_dtype(ScalarType type) const {
  if (!is_float(type)) fail("`out_dtype` bfloat16, float16 or float32", dtype_name(type));
}

void Check::dtype(const char* name, const Tensor& tensor, ScalarType wanted, const char* note) const {
  const ScalarType type = tensor.scalar_type();
  if (type != wanted) fail(quoted(name) + " of dtype " + dtype_name(wanted) + note, dtype_name(type));
}

void Check::weight_shape(const char* name, const Tensor& tensor) const {
  if (tensor.dim() != 2 && tensor.dim() != 3) {
    fail(quoted(name) + " of shape [N, K] or [E, N, K]", list_text(tensor.sizes()));
  }
}

void Check::packed_contiguous(const char* name, const Tensor& tensor) const {
  if (!tensor.is_contiguous()) {
    fail(quoted(name) + " to be contiguous, as convert_weight_packed returns it",
         "strides " + list_text(tensor.strides()));
  }
}

void Check::block_size(const std::vector<int64_t>& block_size) const {
  if (block_size.size() != 2 || block_size[0] <= 0 || block_size[1] <= 0) {
    fail("`block_size` of two positive integers [block_n, block_k]", list_text(block_size));
  }
}

void Check::scales(const char* name, const Tensor& scales, const Tensor& weight,
                   const std::vector<int64_t>& block) const {
  const ScalarType type = scales.scalar_type();
  if (type != ScalarType::Float && type != ScalarType::BFloat16 && type != ScalarType::Float8_e8m0fnu &&
      type != ScalarType::Byte) {
    fail(quoted(name) + " of dtype float32, bfloat16, float8_e8m0fnu or uint8 (e8m0 codes)", dtype_name(type));
  }
  const auto shape = weight.sizes();
  const auto sizes = scales.sizes();
  const size_t dim = shape.size();
  const int64_t grid_n = ceil_div(shape[dim - 2], block[0]), grid_k = ceil_div(shape[dim - 1], block[1]);
  if (sizes.size() == dim && sizes[dim - 2] == grid_n && sizes[dim - 1] == grid_k &&
      (dim == 2 || sizes[0] == shape[0])) {
    return;
  }
  std::vector<int64_t> grid = {grid_n, grid_k};
  if (dim == 3) grid.insert(grid.begin(), shape[0]);
  fail(
      quoted(name) + " of shape [" + (dim == 3 ? "E, " : "") + "ceil(N/block_n), ceil(K/block_k)] = " + list_text(grid),
      list_text(sizes));
}

void Check::bias(const Tensor& bias, int64_t N) const {
  const ScalarType type = bias.scalar_type();
  if (!is_float(type)) fail("`bias` of dtype float32, bfloat16 or float16", dtype_name(type));
  if (bias.dim() != 1 || bias.size(0) != N) {
    fail("`bias` of shape [N] = [" + std::to_string(N) + "]", list_text(bias.sizes()));
  }
}

}  // namespace blockscale
