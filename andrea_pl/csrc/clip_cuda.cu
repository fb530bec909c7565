// The CUDA side of the operators that clip_cpu.cpp defines, on LibTorch's stable ABI.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <limits>
#include <tuple>
#include <vector>

#include "clip_kernels.cuh"

namespace {

using andrea::kThreads;
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
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream = nullptr;
};

void check_launch() {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "andrea_clip: ", cudaGetErrorString(error));
}

struct Pointers {
  std::vector<void*> data;
  std::vector<int64_t> numel;
  int64_t chunks = 0;
};

Pointers pointers_of(const std::vector<Tensor>& tensors) {
  Pointers pointers;
  for (const Tensor& tensor : tensors) {
    const int64_t numel = tensor.numel();
    STD_TORCH_CHECK(numel > 0, "andrea_clip: an empty tensor");
    STD_TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(), "andrea_clip: mixed dtypes");
    STD_TORCH_CHECK(tensor.get_device_index() == tensors[0].get_device_index(), "andrea_clip: several devices");
    pointers.data.push_back(tensor.data_ptr());
    pointers.numel.push_back(numel);
    pointers.chunks += (numel + andrea::kChunk - 1) / andrea::kChunk;
  }
  STD_TORCH_CHECK(pointers.chunks <= std::numeric_limits<int32_t>::max(), "andrea_clip: more than 2^31 chunks");
  return pointers;
}

// Call `launch(table, chunks, T())` for every launch, with T the tensors' element type.
template <class Launch>
void for_each_launch(const std::vector<Tensor>& tensors, const Pointers& pointers, Launch launch) {
  const auto with_type = [&](auto element) {
    andrea::for_each_table(
        static_cast<int64_t>(pointers.data.size()), pointers.data.data(), pointers.numel.data(), andrea::kMaxTensors,
        [&](const andrea::TensorTable& table, int chunks) {
          launch(table, chunks, element);
          check_launch();
        });
  };
  switch (tensors[0].scalar_type()) {
    case ScalarType::Float:
      return with_type(float());
    case ScalarType::BFloat16:
      return with_type(andrea::bfloat16());
    case ScalarType::Half:
      return with_type(andrea::half());
    default:
      STD_TORCH_CHECK(false, "andrea_clip: gradients must be float32, bfloat16 or float16");
  }
}

Tensor squared_norms(std::vector<Tensor> tensors) {
  STD_TORCH_CHECK(!tensors.empty(), "andrea_clip: no tensor");
  const Place place(tensors[0]);
  const Pointers pointers = pointers_of(tensors);
  const int64_t count = static_cast<int64_t>(tensors.size());
  const Tensor scratch = torch::stable::new_empty(tensors[0], {pointers.chunks, 2}, ScalarType::Double);
  const Tensor first = torch::stable::new_empty(tensors[0], {count}, ScalarType::Int);
  const Tensor rows = torch::stable::new_empty(tensors[0], {count, 2}, ScalarType::Double);
  Sum* sums = static_cast<Sum*>(scratch.mutable_data_ptr());
  int32_t* starts = static_cast<int32_t*>(first.mutable_data_ptr());
  for_each_launch(tensors, pointers, [&](const andrea::TensorTable& table, int chunks, auto element) {
    andrea::k_grad_norm_partial<decltype(element)><<<chunks, kThreads, 0, place.stream>>>(table, sums, starts);
  });
  andrea::k_grad_norm_final<<<static_cast<unsigned>(count), kThreads, 0, place.stream>>>(
      sums, starts, static_cast<int>(pointers.chunks), static_cast<Sum*>(rows.mutable_data_ptr()), 0.0, nullptr, nullptr);
  check_launch();
  return rows;
}

std::tuple<Tensor, Tensor> clip_figures(Tensor rows, double max_norm) {
  const Place place(rows);
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Double && rows.is_contiguous(), "andrea_clip: rows must be float64");
  const Tensor figures = torch::stable::new_empty(rows, {2}, ScalarType::Double);
  const Tensor controls = torch::stable::new_empty(rows, {2}, ScalarType::Float);
  andrea::k_grad_norm_final<<<1, kThreads, 0, place.stream>>>(
      static_cast<const Sum*>(rows.const_data_ptr()), nullptr, static_cast<int>(rows.numel() / 2), nullptr, max_norm,
      static_cast<double*>(figures.mutable_data_ptr()), static_cast<float*>(controls.mutable_data_ptr()));
  check_launch();
  return {figures, controls};
}

void scale_(std::vector<Tensor> tensors, Tensor coefficient) {
  if (tensors.empty()) return;
  const Place place(tensors[0]);
  STD_TORCH_CHECK(coefficient.scalar_type() == ScalarType::Double && coefficient.numel() == 1 &&
                      coefficient.get_device_index() == tensors[0].get_device_index(),
                  "andrea_clip: the coefficient must be one float64 on the gradients' device");
  const double* factor = static_cast<const double*>(coefficient.const_data_ptr());
  for_each_launch(tensors, pointers_of(tensors), [&](const andrea::TensorTable& table, int chunks, auto element) {
    andrea::k_grad_scale<decltype(element)><<<chunks, kThreads, 0, place.stream>>>(table, factor);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(andrea_clip, CUDA, library) {
  library.impl("squared_norms", TORCH_BOX(&squared_norms));
  library.impl("clip_figures", TORCH_BOX(&clip_figures));
  library.impl("scale_", TORCH_BOX(&scale_));
}
