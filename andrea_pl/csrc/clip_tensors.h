// What the operators ask of their tensors, on every device alike.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace andrea {

// Whether the elements fill one stretch of memory, in whatever order.
inline bool is_dense(const torch::stable::Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride and size
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) != 1) steps.emplace_back(tensor.stride(d), tensor.size(d));
  std::sort(steps.begin(), steps.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : steps) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

inline void check(const std::vector<torch::stable::Tensor>& tensors) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(!tensors.empty(), "andrea_clip: no tensor");
  const ScalarType dtype = tensors[0].scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "andrea_clip: gradients must be float32, bfloat16 or float16");
  for (const auto& tensor : tensors) {
    STD_TORCH_CHECK(tensor.numel() > 0, "andrea_clip: an empty tensor");
    STD_TORCH_CHECK(tensor.scalar_type() == dtype, "andrea_clip: mixed dtypes");
    STD_TORCH_CHECK(tensor.get_device_index() == tensors[0].get_device_index(), "andrea_clip: several devices");
    STD_TORCH_CHECK(is_dense(tensor), "andrea_clip: a tensor with gaps or overlaps");
  }
}

inline void check_rows(const torch::stable::Tensor& rows) {
  STD_TORCH_CHECK(rows.scalar_type() == torch::headeronly::ScalarType::Double && rows.is_contiguous(),
                  "andrea_clip: rows must be float64 and contiguous");
}

inline void check_coefficient(const torch::stable::Tensor& coefficient, const torch::stable::Tensor& beside) {
  STD_TORCH_CHECK(coefficient.scalar_type() == torch::headeronly::ScalarType::Double && coefficient.numel() == 1 &&
                      coefficient.get_device_index() == beside.get_device_index(),
                  "andrea_clip: the coefficient must be one float64 on the gradients' device");
}

}  // namespace andrea
