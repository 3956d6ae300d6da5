// The torch ops of namespace `blockscale`: schemas, checks, allocation and the thread pool. What computes is
// torch-free, below gemm/, isa/ and quant/. Only torch's stable ABI (target 2.11) is used, so one shared object serves
// every torch from 2.11 on.
#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "checks.h"
#include "gemm/linear.h"
#include "gemm/pack.h"
#include "gemm/plan.h"
#include "isa/isa.h"
#include "quant/quantize.h"

namespace blockscale {
namespace {

Tensor empty_cpu(const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                         strides.data(), dtype, aoti_torch_device_type_cpu(), 0,
                                                         &handle));
  return Tensor(handle);
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return std::vector<int64_t>(sizes.begin(), sizes.end());
}

void parallel_for(int64_t count, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, grain, body, context));
}

template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  parallel_for(
      count, grain, [](int64_t begin, int64_t end, void* context) { (*static_cast<const Body*>(context))(begin, end); },
      const_cast<Body*>(&body));
}

// A packed weight is streamed once a token: 2 MiB pages save the misses of 512 small ones. Best effort.
void advise_huge_pages(void* data, int64_t bytes) {
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) & ~(kHugePage - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

// A thread's share of byte-moving work is worth waking it from about 64 KiB on.
int64_t rows_per_task(int64_t bytes_per_row) {
  return std::max<int64_t>(1, (64 << 10) / std::max<int64_t>(1, bytes_per_row));
}

// A weight [N, K] or [E, N, K] as E matrices.
struct Matrices {
  explicit Matrices(const Tensor& tensor) {
    const int64_t dim = tensor.dim();
    count = dim == 3 ? tensor.size(0) : 1;
    stride = dim == 3 ? tensor.stride(0) : 0;
    rows = tensor.size(dim - 2);
    columns = tensor.size(dim - 1);
    row_stride = tensor.stride(dim - 2);
    column_stride = tensor.stride(dim - 1);
  }
  int64_t count, stride, rows, columns, row_stride, column_stride;
};

void pack_matrix(const uint8_t* codes, const Matrices& m, uint8_t* packed) {
  parallel_for(strip_count(m.rows), rows_per_task(16 * m.columns), [&](int64_t begin, int64_t end) {
    pack_weight(codes, m.rows, m.columns, m.row_stride, m.column_stride, begin, end, packed);
  });
}

Tensor convert_weight_packed(Tensor weight) {
  const Check check("convert_weight_packed");
  check.dtype("weight", weight, ScalarType::Float8_e4m3fn);
  check.weight_shape("weight", weight);
  Tensor packed = empty_cpu(shape_of(weight), ScalarType::Byte);
  const Matrices m(weight);
  const auto* codes = static_cast<const uint8_t*>(weight.const_data_ptr());
  auto* out = static_cast<uint8_t*>(packed.mutable_data_ptr());
  advise_huge_pages(out, m.count * m.rows * m.columns);
  for (int64_t e = 0; e < m.count; ++e) pack_matrix(codes + e * m.stride, m, out + e * m.rows * m.columns);
  return packed;
}

Tensor unpack_weight_op(Tensor packed) {
  const Check check("unpack_weight");
  check.dtype("packed", packed, ScalarType::Byte);
  check.weight_shape("packed", packed);
  check.packed_contiguous("packed", packed);
  Tensor weight = empty_cpu(shape_of(packed), ScalarType::Float8_e4m3fn);
  const Matrices m(packed);
  const auto* in = static_cast<const uint8_t*>(packed.const_data_ptr());
  auto* out = static_cast<uint8_t*>(weight.mutable_data_ptr());
  for (int64_t e = 0; e < m.count; ++e) {
    const int64_t offset = e * m.rows * m.columns;
    parallel_for(strip_count(m.rows), rows_per_task(16 * m.columns), [&](int64_t begin, int64_t end) {
      unpack_weight(in + offset, m.rows, m.columns, begin, end, out + offset);
    });
  }
  return weight;
}

// One matrix of scales as fp32: the tensor's own memory, or a widened copy that keeps column-major order.
class Fp32Scales {
 public:
  Fp32Scales(const Tensor& scales, int64_t offset, const std::vector<int64_t>& block) {
    const int64_t dim = scales.dim();
    const int64_t rows = scales.size(dim - 2), columns = scales.size(dim - 1);
    const int64_t stride_n = scales.stride(dim - 2), stride_k = scales.stride(dim - 1);
    const ScalarType type = scales.scalar_type();
    const void* data = scales.const_data_ptr();
    if (type == ScalarType::Float) {
      grid = {static_cast<const float*>(data) + offset, stride_n, stride_k, block[0], block[1]};
      return;
    }
    widened_.resize(static_cast<size_t>(rows * columns));
    const bool column_major = stride_n == 1 && rows > 1;
    grid = {widened_.data(), column_major ? 1 : columns, column_major ? rows : 1, block[0], block[1]};
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t index = offset + i * stride_n + j * stride_k;
        widened_[static_cast<size_t>(i * grid.stride_n + j * grid.stride_k)] =
            type == ScalarType::BFloat16 ? bf16_to_float(static_cast<const uint16_t*>(data)[index])
                                         : e8m0_to_float(static_cast<const uint8_t*>(data)[index]);
      }
    }
  }

  ScaleGrid grid;

 private:
  // 2^(code - 127); code 0 is the subnormal 2^-127, code 255 is NaN.
  static float e8m0_to_float(uint8_t code) {
    return bits_float(code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : static_cast<uint32_t>(code) << 23);
  }
  std::vector<float> widened_;
};

// x as (M, K) with one row stride, copied only where its strides allow no such view.
struct Rows {
  explicit Rows(const Tensor& x) : tensor(x) {
    if (!view()) {
      tensor = torch::stable::contiguous(x);
      view();
    }
  }
  Tensor tensor;
  int64_t count = 1, stride = 0;

 private:
  bool view() {
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    const int64_t dim = tensor.dim();
    count = 1;
    stride = sizes[dim - 1];
    if (sizes[dim - 1] > 1 && strides[dim - 1] != 1) return false;
    for (int64_t d = dim - 2; d >= 0; --d) {
      if (sizes[d] != 1) {
        if (count == 1) {
          stride = strides[d];
        } else if (strides[d] != stride * count) {
          return false;
        }
      }
      count *= sizes[d];
    }
    return true;
  }
};

Tensor fp8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales2, std::vector<int64_t> block_size,
                         std::optional<Tensor> bias, ScalarType out_dtype, bool is_vnni) {
  const Check check("fp8_scaled_mm_cpu");
  LinearProblem problem;
  problem.x_type = check.float_dtype("mat1", mat1.scalar_type());
  if (mat1.dim() == 0) check.fail("`mat1` of shape [..., K]", "[]");
  if (is_vnni) {
    check.dtype("mat2", mat2, ScalarType::Byte, " (from convert_weight_packed) with is_vnni=True");
  } else {
    check.dtype("mat2", mat2, ScalarType::Float8_e4m3fn, " with is_vnni=False");
  }
  if (mat2.dim() != 2) check.fail("`mat2` of shape [N, K]", list_text(mat2.sizes()));
  if (is_vnni) check.packed_contiguous("mat2", mat2);
  problem.N = mat2.size(0);
  problem.K = mat2.size(1);
  if (mat1.size(mat1.dim() - 1) != problem.K) {
    check.fail("`mat1` of shape [..., K] with K = mat2.size(1) = " + std::to_string(problem.K),
               list_text(mat1.sizes()));
  }
  check.block_size(block_size);
  check.scales("scales2", scales2, mat2, block_size);
  if (bias) check.bias(*bias, problem.N);
  check.out_dtype(out_dtype);
  const Isa active = active_isa();

  const Rows x(mat1);
  problem.M = x.count;
  std::vector<int64_t> out_shape = shape_of(mat1);
  out_shape.back() = problem.N;
  Tensor out = empty_cpu(out_shape, out_dtype);
  if (problem.M == 0 || problem.N == 0) return out;

  problem.x = x.tensor.const_data_ptr();
  problem.x_stride = x.stride;
  const auto* codes = static_cast<const uint8_t*>(mat2.const_data_ptr());
  std::unique_ptr<uint8_t[]> packed;
  if (!is_vnni) {
    packed.reset(new uint8_t[static_cast<size_t>(problem.N * problem.K)]);
    pack_matrix(codes, Matrices(mat2), packed.get());
  }
  problem.weight = is_vnni ? codes : packed.get();
  const Fp32Scales scales(scales2, 0, block_size);
  problem.scales = scales.grid.data;
  problem.scale_stride_n = scales.grid.stride_n;
  problem.scale_stride_k = scales.grid.stride_k;
  problem.block_n = block_size[0];
  problem.block_k = block_size[1];
  std::optional<Tensor> bias_row;
  if (bias) {
    bias_row = torch::stable::contiguous(*bias);
    problem.bias = bias_row->const_data_ptr();
    problem.bias_type = float_type(bias_row->scalar_type());
  }
  problem.out = out.mutable_data_ptr();
  problem.out_type = float_type(out_dtype);
  problem.out_stride = problem.N;

  const int threads = static_cast<int>(torch::stable::get_num_threads());
  const Plan plan = plan_linear(problem.M, problem.N, problem.K, problem.x_type, active, threads);
  if (!linear(problem, plan, parallel_for)) throw std::bad_alloc();
  return out;
}

std::tuple<Tensor, Tensor> quantize_weight_block_fp8(Tensor weight, std::vector<int64_t> block_size) {
  const Check check("quantize_weight_block_fp8");
  const FloatType type = check.float_dtype("weight", weight.scalar_type());
  check.weight_shape("weight", weight);
  check.block_size(block_size);
  const Matrices m(weight);
  const int64_t block_n = block_size[0], block_k = block_size[1];
  const int64_t grid_n = ceil_div(m.rows, block_n), grid_k = ceil_div(m.columns, block_k);
  std::vector<int64_t> scales_shape = shape_of(weight);
  scales_shape[scales_shape.size() - 2] = grid_n;
  scales_shape.back() = grid_k;
  Tensor codes = empty_cpu(shape_of(weight), ScalarType::Float8_e4m3fn);
  Tensor scales = empty_cpu(scales_shape, ScalarType::Float);
  const auto* in = static_cast<const char*>(weight.const_data_ptr());
  const int64_t element = type == FloatType::kF32 ? 4 : 2;
  auto* out = static_cast<uint8_t*>(codes.mutable_data_ptr());
  auto* out_scales = static_cast<float*>(scales.mutable_data_ptr());
  const int64_t grain = rows_per_task(std::min(block_n, m.rows) * m.columns);
  for (int64_t e = 0; e < m.count; ++e) {
    std::atomic<int64_t> first_bad{INT64_MAX};
    parallel_for(grid_n, grain, [&](int64_t begin, int64_t end) {
      int64_t bad = 0;
      if (quantize_block_rows(in + e * m.stride * element, type, m.rows, m.columns, m.row_stride, m.column_stride,
                              block_n, block_k, begin, end, out + e * m.rows * m.columns,
                              out_scales + e * grid_n * grid_k, &bad)) {
        return;
      }
      int64_t seen = first_bad.load();
      while (bad < seen && !first_bad.compare_exchange_weak(seen, bad)) {
      }
    });
    if (first_bad != INT64_MAX) {
      std::vector<int64_t> block = {first_bad / grid_k, first_bad % grid_k};
      if (weight.dim() == 3) block.insert(block.begin(), e);
      check.fail("`weight` without infinities", "an infinity in block " + list_text(block));
    }
  }
  return {codes, scales};
}

Tensor dequantize_weight_block_fp8(Tensor weight, Tensor scales, std::vector<int64_t> block_size,
                                   ScalarType out_dtype) {
  const Check check("dequantize_weight_block_fp8");
  check.dtype("weight", weight, ScalarType::Float8_e4m3fn);
  check.weight_shape("weight", weight);
  check.block_size(block_size);
  check.scales("scales", scales, weight, block_size);
  check.out_dtype(out_dtype);
  const Matrices m(weight);
  Tensor out = empty_cpu(shape_of(weight), out_dtype);
  const auto* codes = static_cast<const uint8_t*>(weight.const_data_ptr());
  auto* values = static_cast<char*>(out.mutable_data_ptr());
  const int64_t matrix_bytes = m.rows * m.columns * (out_dtype == ScalarType::Float ? 4 : 2);
  if (matrix_bytes == 0) return out;
  for (int64_t e = 0; e < m.count; ++e) {
    const Fp32Scales grid(scales, weight.dim() == 3 ? e * scales.stride(0) : 0, block_size);
    parallel_for(m.rows, rows_per_task(m.columns), [&](int64_t begin, int64_t end) {
      dequantize_rows(codes + e * m.stride, m.row_stride, m.column_stride, m.rows, m.columns, grid.grid, begin, end,
                      values + e * matrix_bytes, float_type(out_dtype));
    });
  }
  return out;
}

std::string quoted_json(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    json += c;
  }
  return json + "\"";
}

std::string isa_info() {
  const IsaReport& report = isa_report();
  const std::array<uint64_t, kIsaCount> calls = kernel_calls();
  std::string json = "{\"max_isa\": " + (report.cap ? quoted_json(isa_name(*report.cap)) : "null") +
                     ", \"active\": " + quoted_json(isa_name(report.active)) + ", \"isas\": [";
  const auto flag = [](bool value) { return value ? "true" : "false"; };
  for (int i = 0; i < kIsaCount; ++i) {
    const IsaStatus& isa = report.isas[i];
    json += std::string(i ? ", " : "") + "{\"name\": " + quoted_json(isa_name(static_cast<Isa>(i))) +
            ", \"compiled\": " + flag(isa.compiled) + ", \"usable\": " + flag(isa.usable) +
            ", \"active\": " + flag(isa.active) + ", \"reason\": " + quoted_json(isa.reason) +
            ", \"calls\": " + std::to_string(calls[i]) + "}";
  }
  return json + "]}";
}

STABLE_TORCH_LIBRARY(blockscale, m) {
  m.def("convert_weight_packed(Tensor weight) -> Tensor");
  m.def("unpack_weight(Tensor packed) -> Tensor");
  m.def(
      "fp8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales2, int[] block_size, Tensor? bias, ScalarType "
      "out_dtype, "
      "bool is_vnni) -> Tensor");
  m.def("quantize_weight_block_fp8(Tensor weight, int[] block_size) -> (Tensor, Tensor)");
  m.def("dequantize_weight_block_fp8(Tensor weight, Tensor scales, int[] block_size, ScalarType out_dtype) -> Tensor");
  m.def("isa_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(blockscale, CPU, m) {
  m.impl("convert_weight_packed", TORCH_BOX(&convert_weight_packed));
  m.impl("unpack_weight", TORCH_BOX(&unpack_weight_op));
  m.impl("fp8_scaled_mm_cpu", TORCH_BOX(&fp8_scaled_mm_cpu));
  m.impl("quantize_weight_block_fp8", TORCH_BOX(&quantize_weight_block_fp8));
  m.impl("dequantize_weight_block_fp8", TORCH_BOX(&dequantize_weight_block_fp8));
}

STABLE_TORCH_LIBRARY_IMPL(blockscale, CompositeExplicitAutograd, m) { m.impl("isa_info", TORCH_BOX(&isa_info)); }

}  // namespace
}  // namespace blockscale
