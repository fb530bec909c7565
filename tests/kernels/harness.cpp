// The kernels of clip_kernels.cuh on the CPU, behind a C interface for ctypes; see checks.py.
#include "cuda_shim.h"

#include "clip_kernels.cuh"

using andrea::bfloat16;
using andrea::half;
using andrea::kThreads;
using andrea::Sum;
using andrea::TensorTable;

namespace {

thread_local std::string message;

const auto launch = [](auto kernel, unsigned blocks, auto... arguments) {
  shim::launch(blocks, kThreads, [&] { kernel(arguments...); });
};

template <class T>
void clip(const andrea::Tensors& tensors, double max_norm, bool scales, Sum* sums, int32_t* first, Sum* rows,
          double* figures, float* controls) {
  andrea::launch_squared_norms<T>(tensors, sums, first, rows, launch);
  andrea::launch_clip_figures(rows, static_cast<int>(tensors.count), max_norm, figures, controls, launch);
  if (scales) andrea::launch_scale<T>(tensors, figures + 1, launch);
}

}  // namespace

// dtype: 0 float32, 1 bfloat16, 2 float16. Returns 0, or -1 with a message.
extern "C" int andrea_clip(int dtype, int64_t count, void* const* data, const int64_t* numel, int capacity,
                           double max_norm, int scales, uint64_t seed, Sum* sums, int32_t* first, Sum* rows,
                           double* figures, float* controls) {
  shim::seed = seed;
  const auto run = dtype == 0 ? clip<float> : dtype == 1 ? clip<bfloat16> : clip<half>;
  try {
    run({count, data, numel, capacity}, max_norm, scales, sums, first, rows, figures, controls);
    return 0;
  } catch (const std::exception& error) {
    message = error.what();
    return -1;
  }
}

extern "C" const char* andrea_message() { return message.c_str(); }

extern "C" int64_t andrea_chunk_size() { return andrea::kChunk; }

// Where a chunk of a tensor of any size begins, in elements, and how many it has; nothing is read.
extern "C" void andrea_find(int64_t numel, int chunk, int64_t* offset, int64_t* count) {
  TensorTable table{};
  table.tensors = 1;
  table.numel[0] = numel;
  const andrea::Chunk<char> found = andrea::find_chunk<char>(table, chunk);
  *offset = reinterpret_cast<int64_t>(found.data);
  *count = found.count;
}
