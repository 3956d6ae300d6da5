// See tensors.h.
#include "tensors.h"

#include <sys/mman.h>

#include <stdexcept>

#include "checks.h"

namespace blockscale {

namespace {

Tensor empty_strided_cpu(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType type) {
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                               aoti_torch_device_type_cpu(), 0, &handle) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("blockscale: torch could not allocate a tensor of shape " + list_text(sizes) +
                             " and dtype " + dtype_name(type));
  }
  return Tensor(handle);
}

// Contiguous strides of sizes[0 .. dims), from unit stride on; returns the stride after them.
int64_t fill_strides(const std::vector<int64_t>& sizes, size_t dims, std::vector<int64_t>* strides) {
  int64_t stride = 1;
  for (size_t i = dims; i-- > 0;) {
    (*strides)[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return stride;
}

}  // namespace

Tensor empty_cpu(const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  fill_strides(sizes, sizes.size(), &strides);
  return empty_strided_cpu(sizes, strides, type);
}

Tensor empty_column_major_cpu(const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  strides.back() = fill_strides(sizes, sizes.size() - 1, &strides);
  return empty_strided_cpu(sizes, strides, type);
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return std::vector<int64_t>(sizes.begin(), sizes.end());
}

void parallel_for(int64_t count, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  if (count <= grain) {  // one thread's work: torch's pool would cost a small layer 2 % of its time to find that out
    if (count > 0) body(0, count, context);
    return;
  }
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, grain, body, context));
}

void advise_huge_pages(void* data, int64_t bytes) {
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) & ~(kHugePage - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

Matrices::Matrices(const Tensor& tensor) {
  const int64_t dim = tensor.dim();
  count = dim == 3 ? tensor.size(0) : 1;
  stride = dim == 3 ? tensor.stride(0) : 0;
  rows = tensor.size(dim - 2);
  columns = tensor.size(dim - 1);
  row_stride = tensor.stride(dim - 2);
  column_stride = tensor.stride(dim - 1);
}

Rows::Rows(const Tensor& x) : tensor(x) {
  if (!view()) {
    tensor = torch::stable::contiguous(x);
    view();
  }
}

bool Rows::view() {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const auto rank = static_cast<int64_t>(sizes.size());
  count = 1;
  for (int64_t d = 0; d + 1 < rank; ++d) count *= sizes[d];
  stride = sizes[rank - 1];
  if (count == 0) return true;  // nothing is read, whatever the strides; a copy of nothing would keep them
  if (sizes[rank - 1] > 1 && strides[rank - 1] != 1) return false;
  int64_t inner = 1;  // rows of the dimensions after d
  for (int64_t d = rank - 2; d >= 0; --d) {
    if (sizes[d] != 1) {
      if (inner == 1) {
        stride = strides[d];
      } else if (strides[d] != stride * inner) {
        return false;
      }
    }
    inner *= sizes[d];
  }
  return true;
}

namespace {

// 2^(code - 127); code 0 is the subnormal 2^-127, code 255 is NaN.
float e8m0_to_float(uint8_t code) {
  return bits_float(code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : static_cast<uint32_t>(code) << 23);
}

}  // namespace

Fp32Scales::Fp32Scales(const Tensor& scales, int64_t offset, const std::vector<int64_t>& block_size) {
  const auto sizes = scales.sizes(), strides = scales.strides();
  const size_t dim = sizes.size();
  const int64_t rows = sizes[dim - 2], columns = sizes[dim - 1];
  const int64_t stride_n = strides[dim - 2], stride_k = strides[dim - 1];
  const ScalarType type = scales.scalar_type();
  const void* data = scales.const_data_ptr();
  if (type == ScalarType::Float) {
    grid = {static_cast<const float*>(data) + offset, stride_n, stride_k, block_size[0], block_size[1]};
    return;
  }
  widened_.resize(static_cast<size_t>(rows * columns));
  const bool column_major = stride_n == 1 && rows > 1;
  grid = {widened_.data(), column_major ? 1 : columns, column_major ? rows : 1, block_size[0], block_size[1]};
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t index = offset + i * stride_n + j * stride_k;
      widened_[static_cast<size_t>(i * grid.stride_n + j * grid.stride_k)] =
          type == ScalarType::BFloat16 ? bf16_to_float(static_cast<const uint16_t*>(data)[index])
                                       : e8m0_to_float(static_cast<const uint8_t*>(data)[index]);
    }
  }
}

}  // namespace blockscale
