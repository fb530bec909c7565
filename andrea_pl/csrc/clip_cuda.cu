// The CUDA side of the operators that clip_cpu.cpp defines, on LibTorch's stable ABI.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <functional>
#include <limits>
#include <tuple>
#include <vector>

#include "clip_kernels.cuh"
#include "clip_tensors.h"

namespace {

using andrea::Sum;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The device of a tensor, made current, and its stream.
struct Place {
  explicit Place(const Tensor& tensor) : guard(tensor.get_device_index()) {
    void* pointer = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &pointer));
    stream = static_cast<cudaStream_t>(pointer);
  }
  Place(const Place&) = delete;

  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream = nullptr;

  // Starts a kernel there.
  template <class Kernel, class... Arguments>
  void operator()(Kernel kernel, unsigned blocks, Arguments... arguments) const {
    kernel<<<blocks, andrea::kThreads, 0, stream>>>(arguments...);
    const cudaError_t error = cudaGetLastError();
    STD_TORCH_CHECK(error == cudaSuccess, "andrea_clip: ", cudaGetErrorString(error));
  }
};

struct Pointers {
  std::vector<void*> data;
  std::vector<int64_t> numel;
  int64_t chunks = 0;

  explicit Pointers(const std::vector<Tensor>& tensors) {
    andrea::check(tensors);
    for (const Tensor& tensor : tensors) {
      data.push_back(tensor.data_ptr());
      numel.push_back(tensor.numel());
      chunks += andrea::chunks_of(numel.back());
    }
    STD_TORCH_CHECK(chunks <= std::numeric_limits<int32_t>::max(), "andrea_clip: more than 2^31 chunks");
  }
  andrea::Tensors tensors() const { return {static_cast<int64_t>(data.size()), data.data(), numel.data()}; }
};

// Call `work` with an element of the type of the tensors.
template <class Work>
void with_element(const std::vector<Tensor>& tensors, Work work) {
  switch (tensors[0].scalar_type()) {
    case ScalarType::Float:
      return work(float());
    case ScalarType::BFloat16:
      return work(andrea::bfloat16());
    default:
      return work(andrea::half());
  }
}

Tensor squared_norms(std::vector<Tensor> tensors) {
  const Pointers pointers(tensors);
  const Place place(tensors[0]);
  const int64_t count = static_cast<int64_t>(tensors.size());
  const Tensor scratch = torch::stable::new_empty(tensors[0], {pointers.chunks, 2}, ScalarType::Double);
  const Tensor first = torch::stable::new_empty(tensors[0], {count}, ScalarType::Int);
  const Tensor rows = torch::stable::new_empty(tensors[0], {count, 2}, ScalarType::Double);
  with_element(tensors, [&](auto element) {
    andrea::launch_squared_norms<decltype(element)>(
        pointers.tensors(), static_cast<Sum*>(scratch.mutable_data_ptr()),
        static_cast<int32_t*>(first.mutable_data_ptr()), static_cast<Sum*>(rows.mutable_data_ptr()), std::ref(place));
  });
  return rows;
}

std::tuple<Tensor, Tensor> clip_figures(Tensor rows, double max_norm) {
  andrea::check_rows(rows);
  const Place place(rows);
  const Tensor figures = torch::stable::new_empty(rows, {2}, ScalarType::Double);
  const Tensor controls = torch::stable::new_empty(rows, {2}, ScalarType::Float);
  andrea::launch_clip_figures(static_cast<const Sum*>(rows.const_data_ptr()), static_cast<int>(rows.numel() / 2),
                              max_norm, static_cast<double*>(figures.mutable_data_ptr()),
                              static_cast<float*>(controls.mutable_data_ptr()), std::ref(place));
  return {figures, controls};
}

void scale_(std::vector<Tensor> tensors, Tensor coefficient) {
  const Pointers pointers(tensors);
  andrea::check_coefficient(coefficient, tensors[0]);
  const Place place(tensors[0]);
  const double* factor = static_cast<const double*>(coefficient.const_data_ptr());
  with_element(tensors, [&](auto element) {
    andrea::launch_scale<decltype(element)>(pointers.tensors(), factor, std::ref(place));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(andrea_clip, CUDA, library) {
  library.impl("squared_norms", TORCH_BOX(&squared_norms));
  library.impl("clip_figures", TORCH_BOX(&clip_figures));
  library.impl("scale_", TORCH_BOX(&scale_));
}
