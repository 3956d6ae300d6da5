// The torch ops of namespace `blockscale`: schemas, checks, allocation and the thread pool. What computes is
// torch-free, below gemm/, isa/ and quant/. Only torch's stable ABI (target 2.11) is used, so one shared object serves
// every torch from 2.11 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <limits>
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
#include "tensors.h"

namespace blockscale {
namespace {

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
  advise_huge_pages(out, m.count * m.rows * m.columns);
  for (int64_t e = 0; e < m.count; ++e) {
    const int64_t offset = e * m.rows * m.columns;
    parallel_for(strip_count(m.rows), rows_per_task(16 * m.columns), [&](int64_t begin, int64_t end) {
      unpack_weight(in + offset, m.rows, m.columns, begin, end, out + offset);
    });
  }
  return weight;
}

// The checks of a packed or plain weight argument.
void check_weight(const Check& check, const char* name, const Tensor& weight, bool is_vnni) {
  if (is_vnni) {
    check.dtype(name, weight, ScalarType::Byte, " (from convert_weight_packed) with is_vnni=True");
  } else {
    check.dtype(name, weight, ScalarType::Float8_e4m3fn, " with is_vnni=False");
  }
  if (weight.dim() != 2) check.fail(std::string("`") + name + "` of shape [N, K]", list_text(weight.sizes()));
  if (is_vnni) check.packed_contiguous(name, weight);
}

// What the two products share: weight, its scales, bias and output; `problem` holds M, N, K and x. Everything is
// checked.
void multiply(LinearProblem& problem, const Tensor& weight, const Tensor& scales,
              const std::vector<int64_t>& block_size, const std::optional<Tensor>& bias, Tensor& out, bool is_vnni,
              Isa active) {
  const auto* codes = static_cast<const uint8_t*>(weight.const_data_ptr());
  std::unique_ptr<uint8_t[]> packed;
  if (!is_vnni) {
    packed.reset(new uint8_t[static_cast<size_t>(problem.N * problem.K)]);
    pack_matrix(codes, Matrices(weight), packed.get());
  }
  problem.weight = is_vnni ? codes : packed.get();
  const Fp32Scales fp32_scales(scales, 0, block_size);
  problem.scales = fp32_scales.grid.data;
  problem.scale_stride_n = fp32_scales.grid.stride_n;
  problem.scale_stride_k = fp32_scales.grid.stride_k;
  problem.block_n = block_size[0];
  problem.block_k = block_size[1];
  std::optional<Tensor> bias_row;
  if (bias) {
    bias_row = bias->is_contiguous() ? *bias : torch::stable::contiguous(*bias);
    problem.bias = bias_row->const_data_ptr();
    problem.bias_type = float_type(bias_row->scalar_type());
  }
  problem.out = out.mutable_data_ptr();
  problem.out_type = float_type(out.scalar_type());
  problem.out_stride = problem.N;
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  const Plan plan = plan_linear(problem.M, problem.N, problem.K, problem.x_type, active, threads);
  if (!linear(problem, plan, parallel_for)) throw std::bad_alloc();
}

// Arguments by reference: torch's unboxing calls with copies of what it holds, here 0.1 us of a small layer's 3.
Tensor fp8_scaled_mm_cpu(const Tensor& mat1, const Tensor& mat2, const Tensor& scales2,
                         const std::vector<int64_t>& block_size, const std::optional<Tensor>& bias,
                         ScalarType out_dtype, bool is_vnni) {
  const Check check("fp8_scaled_mm_cpu");
  LinearProblem problem;
  problem.x_type = check.float_dtype("mat1", mat1.scalar_type());
  if (mat1.dim() == 0) check.fail("`mat1` of shape [..., K]", "[]");
  check_weight(check, "mat2", mat2, is_vnni);
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
  multiply(problem, mat2, scales2, block_size, bias, out, is_vnni, active);
  return out;
}

Tensor fp8_w8a8_block_scaled_mm_cpu(Tensor A, Tensor B, Tensor As, Tensor Bs, std::vector<int64_t> block_size,
                                    std::optional<Tensor> bias, ScalarType out_dtype, bool is_vnni) {
  const Check check("fp8_w8a8_block_scaled_mm_cpu");
  check.dtype("A", A, ScalarType::Float8_e4m3fn);
  if (A.dim() != 2) check.fail("`A` of shape [M, K]", list_text(A.sizes()));
  check_weight(check, "B", B, is_vnni);
  LinearProblem problem;
  problem.M = A.size(0);
  problem.N = B.size(0);
  problem.K = B.size(1);
  if (A.size(1) != problem.K) {
    check.fail("`A` of shape [M, K] with K = B.size(1) = " + std::to_string(problem.K), list_text(A.sizes()));
  }
  check.block_size(block_size);
  check.dtype("As", As, ScalarType::Float);
  const std::vector<int64_t> groups = {problem.M, ceil_div(problem.K, block_size[1])};
  if (shape_of(As) != groups) {
    check.fail("`As` of shape [M, ceil(K/block_k)] = " + list_text(groups), list_text(As.sizes()));
  }
  check.scales("Bs", Bs, B, block_size);
  if (bias) check.bias(*bias, problem.N);
  check.out_dtype(out_dtype);
  const Isa active = active_isa();

  Tensor out = empty_cpu({problem.M, problem.N}, out_dtype);
  if (problem.M == 0 || problem.N == 0) return out;
  // Codes of A become bf16 once, exactly: a pass over M x K beside a product of M x N x K.
  const Rows codes(A);
  const Tensor x = empty_cpu({problem.M, problem.K}, ScalarType::BFloat16);
  auto* bf16 = static_cast<uint16_t*>(x.mutable_data_ptr());
  const auto* a = static_cast<const uint8_t*>(codes.tensor.const_data_ptr());
  parallel_for(problem.M, rows_per_task(problem.K), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) decode_to_bf16(a + m * codes.stride, problem.K, active, bf16 + m * problem.K);
  });
  problem.x = bf16;
  problem.x_type = FloatType::kBf16;
  problem.x_stride = problem.K;
  problem.x_scales = static_cast<const float*>(As.const_data_ptr());
  problem.x_scale_stride_m = As.stride(0);
  problem.x_scale_stride_k = As.stride(1);
  multiply(problem, B, Bs, block_size, bias, out, is_vnni, active);
  return out;
}

std::tuple<Tensor, Tensor> per_token_group_quant_fp8(Tensor x, int64_t group_size, double eps, bool column_major_scales,
                                                     bool use_ue8m0) {
  const Check check("per_token_group_quant_fp8");
  const FloatType type = check.float_dtype("x", x.scalar_type());
  if (x.dim() == 0) check.fail("`x` of shape [..., K]", "[]");
  if (group_size <= 0) check.fail("`group_size` positive", std::to_string(group_size));
  if (!(eps > 0 && eps <= std::numeric_limits<float>::max())) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", eps);
    check.fail("`eps` positive and finite", text);
  }
  const Isa active = active_isa();
  const Rows rows(x);
  const int64_t K = x.size(x.dim() - 1);
  const int64_t group = std::min(group_size, std::max<int64_t>(K, 1));
  const int64_t groups = ceil_div(K, group_size);
  std::vector<int64_t> scales_shape = shape_of(x);
  scales_shape.back() = groups;
  Tensor codes = empty_cpu(shape_of(x), ScalarType::Float8_e4m3fn);
  Tensor scales = column_major_scales ? empty_column_major_cpu(scales_shape, ScalarType::Float)
                                      : empty_cpu(scales_shape, ScalarType::Float);
  if (rows.count == 0 || K == 0) return {codes, scales};
  ActivationTask whole{};
  whole.x = rows.tensor.const_data_ptr();
  whole.type = type;
  whole.x_stride = rows.stride;
  whole.groups = {K, group, static_cast<float>(eps), use_ue8m0};
  whole.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
  whole.scales = static_cast<float*>(scales.mutable_data_ptr());
  whole.stride_m = column_major_scales ? 1 : groups;
  whole.stride_g = column_major_scales ? rows.count : 1;
  advise_huge_pages(whole.codes, rows.count * K);
  parallel_for(rows.count, rows_per_task(K), [&](int64_t begin, int64_t end) {
    ActivationTask task = whole;
    task.begin = begin;
    task.end = end;
    quantize_activations(task, active);
  });
  return {codes, scales};
}

std::tuple<Tensor, Tensor> quantize_weight_block_fp8(Tensor weight, std::vector<int64_t> block_size) {
  const Check check("quantize_weight_block_fp8");
  const FloatType type = check.float_dtype("weight", weight.scalar_type());
  check.weight_shape("weight", weight);
  check.block_size(block_size);
  const Isa active = active_isa();
  const Matrices m(weight);
  const int64_t block_n = block_size[0], block_k = block_size[1];
  const int64_t grid_n = ceil_div(m.rows, block_n), grid_k = ceil_div(m.columns, block_k);
  std::vector<int64_t> scales_shape = shape_of(weight);
  scales_shape[scales_shape.size() - 2] = grid_n;
  scales_shape.back() = grid_k;
  Tensor codes = empty_cpu(shape_of(weight), ScalarType::Float8_e4m3fn);
  Tensor scales = empty_cpu(scales_shape, ScalarType::Float);
  const int64_t element = type == FloatType::kF32 ? 4 : 2;
  auto* out = static_cast<uint8_t*>(codes.mutable_data_ptr());
  advise_huge_pages(out, m.count * m.rows * m.columns);
  const int64_t grain = rows_per_task(std::min(block_n, m.rows) * m.columns);
  for (int64_t e = 0; e < m.count; ++e) {
    WeightTask expert{};
    expert.weight = static_cast<const char*>(weight.const_data_ptr()) + e * m.stride * element;
    expert.type = type;
    expert.N = m.rows;
    expert.K = m.columns;
    expert.stride_n = m.row_stride;
    expert.stride_k = m.column_stride;
    expert.block_n = block_n;
    expert.block_k = block_k;
    expert.codes = out + e * m.rows * m.columns;
    expert.scales = static_cast<float*>(scales.mutable_data_ptr()) + e * grid_n * grid_k;
    std::atomic<int64_t> first_bad{INT64_MAX};
    parallel_for(grid_n, grain, [&](int64_t begin, int64_t end) {
      WeightTask task = expert;
      task.begin = begin;
      task.end = end;
      int64_t bad = 0;
      if (quantize_weight(task, active, &bad)) return;
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
  const Isa active = active_isa();
  const Matrices m(weight);
  Tensor out = empty_cpu(shape_of(weight), out_dtype);
  const auto* codes = static_cast<const uint8_t*>(weight.const_data_ptr());
  auto* values = static_cast<char*>(out.mutable_data_ptr());
  const int64_t matrix_bytes = m.rows * m.columns * (out_dtype == ScalarType::Float ? 4 : 2);
  if (matrix_bytes == 0) return out;
  advise_huge_pages(values, m.count * matrix_bytes);
  for (int64_t e = 0; e < m.count; ++e) {
    const Fp32Scales grid(scales, weight.dim() == 3 ? e * scales.stride(0) : 0, block_size);
    parallel_for(m.rows, rows_per_task(m.columns), [&](int64_t begin, int64_t end) {
      dequantize({codes + e * m.stride, m.row_stride, m.column_stride, m.rows, m.columns, grid.grid, begin, end,
                  values + e * matrix_bytes, float_type(out_dtype)},
                 active);
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

// Takes the namespace for this copy of the library; false if another one in the process has it. The macros below do not
// look at the answer, and would register ops through a handle that was never set.
bool claim_namespace() {
  TorchLibraryHandle handle = nullptr;
  if (aoti_torch_library_init_def("blockscale", __FILE__, __LINE__, &handle) == AOTI_TORCH_SUCCESS) return true;
  std::fputs("blockscale: another copy of this library is loaded in this process; its ops are used\n", stderr);
  return false;
}
const bool first_copy = claim_namespace();

STABLE_TORCH_LIBRARY_FRAGMENT(blockscale, m) {
  if (!first_copy) return;
  m.def("convert_weight_packed(Tensor weight) -> Tensor");
  m.def("unpack_weight(Tensor packed) -> Tensor");
  m.def(
      "fp8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales2, int[] block_size, Tensor? bias, ScalarType "
      "out_dtype, "
      "bool is_vnni) -> Tensor");
  m.def(
      "fp8_w8a8_block_scaled_mm_cpu(Tensor A, Tensor B, Tensor As, Tensor Bs, int[] block_size, Tensor? bias, "
      "ScalarType out_dtype, bool is_vnni) -> Tensor");
  m.def(
      "per_token_group_quant_fp8(Tensor x, int group_size, float eps, bool column_major_scales, bool use_ue8m0) -> "
      "(Tensor, Tensor)");
  m.def("quantize_weight_block_fp8(Tensor weight, int[] block_size) -> (Tensor, Tensor)");
  m.def("dequantize_weight_block_fp8(Tensor weight, Tensor scales, int[] block_size, ScalarType out_dtype) -> Tensor");
  m.def("isa_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(blockscale, CPU, m) {
  if (!first_copy) return;
  m.impl("convert_weight_packed", TORCH_BOX(&convert_weight_packed));
  m.impl("unpack_weight", TORCH_BOX(&unpack_weight_op));
  m.impl("fp8_scaled_mm_cpu", TORCH_BOX(&fp8_scaled_mm_cpu));
  m.impl("fp8_w8a8_block_scaled_mm_cpu", TORCH_BOX(&fp8_w8a8_block_scaled_mm_cpu));
  m.impl("per_token_group_quant_fp8", TORCH_BOX(&per_token_group_quant_fp8));
  m.impl("quantize_weight_block_fp8", TORCH_BOX(&quantize_weight_block_fp8));
  m.impl("dequantize_weight_block_fp8", TORCH_BOX(&dequantize_weight_block_fp8));
}

STABLE_TORCH_LIBRARY_IMPL(blockscale, CompositeExplicitAutograd, m) {
  if (first_copy) m.impl("isa_info", TORCH_BOX(&isa_info));
}

}  // namespace
}  // namespace blockscale
