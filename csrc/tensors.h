// Tensors as the ops use them: allocation, views as matrices, scales as fp32, torch's thread pool. Stable ABI only.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "quant/kernel.h"

namespace blockscale {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor empty_cpu(const std::vector<int64_t>& sizes, ScalarType type);  // contiguous
// [.., G] with unit stride over the rows of all leading dimensions: 2-D strides (1, M).
Tensor empty_column_major_cpu(const std::vector<int64_t>& sizes, ScalarType type);
std::vector<int64_t> shape_of(const Tensor& tensor);

// body(begin, end, context) over a partition of [0, count) on torch's pool, at least `grain` items at a time.
void parallel_for(int64_t count, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);

template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  parallel_for(
      count, grain, [](int64_t begin, int64_t end, void* context) { (*static_cast<const Body*>(context))(begin, end); },
      const_cast<Body*>(&body));
}

// A thread's share of byte-moving work is worth waking it from about 64 KiB on.
inline int64_t rows_per_task(int64_t bytes_per_row) {
  return std::max<int64_t>(1, (64 << 10) / std::max<int64_t>(1, bytes_per_row));
}

// For large outputs, before they are written: the system clears 2 MiB pages three times as fast as the 512 small ones
// they replace (20 against 6 GB/s of a copy), and a packed weight, streamed once a token, saves their misses. Best
// effort.
void advise_huge_pages(void* data, int64_t bytes);

// A weight [N, K] or [E, N, K] as E matrices.
struct Matrices {
  explicit Matrices(const Tensor& tensor);
  int64_t count, stride, rows, columns, row_stride, column_stride;
};

// x as (M, K) with one row stride, copied only where its strides allow no such view.
struct Rows {
  explicit Rows(const Tensor& x);
  Tensor tensor;
  int64_t count = 1, stride = 0;

 private:
  bool view();
};

// One matrix of scales as fp32: the tensor's own memory, or a widened copy that keeps column-major order.
class Fp32Scales {
 public:
  Fp32Scales(const Tensor& scales, int64_t offset, const std::vector<int64_t>& block_size);
  ScaleGrid grid;

 private:
  std::vector<float> widened_;
};

}  // namespace blockscale
