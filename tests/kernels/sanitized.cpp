// The kernels on buffers that are exactly as long as they say, for AddressSanitizer and UndefinedBehaviorSanitizer.
#include "cuda_shim.h"

#include <cstdio>
#include <cstdlib>

#include "clip_kernels.cuh"

using andrea::kThreads;
using andrea::Sum;

namespace {

template <class T>
bool check(const std::vector<int64_t>& sizes, int offset, int capacity, uint64_t seed) {
  shim::seed = seed;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<void*> blocks, data;
  std::vector<std::vector<double>> values;
  double squares = 0.0;
  int64_t chunks = 0;
  for (int64_t size : sizes) {
    blocks.push_back(std::malloc((size + offset) * sizeof(T)));
    T* tensor = static_cast<T*>(blocks.back()) + offset;
    data.push_back(tensor);
    values.emplace_back();
    for (int64_t i = 0; i < size; ++i) {
      andrea::assign(tensor[i], normal(random));
      values.back().push_back(andrea::to_float(tensor[i]));
      squares += values.back().back() * values.back().back();
    }
    chunks += andrea::chunks_of(size);
  }
  const auto fresh = [](int64_t bytes) { return std::memset(std::malloc(bytes), 0xff, bytes); };
  Sum* sums = static_cast<Sum*>(fresh(chunks * sizeof(Sum)));
  Sum* rows = static_cast<Sum*>(fresh(sizes.size() * sizeof(Sum)));
  int32_t* first = static_cast<int32_t*>(fresh(sizes.size() * sizeof(int32_t)));
  double* figures = static_cast<double*>(fresh(2 * sizeof(double)));
  float* controls = static_cast<float*>(fresh(2 * sizeof(float)));
  const auto launch = [](auto kernel, unsigned count, auto... arguments) {
    shim::launch(count, kThreads, [&] { kernel(arguments...); });
  };
  const andrea::Tensors tensors{static_cast<int64_t>(sizes.size()), data.data(), sizes.data(), capacity};
  andrea::launch_squared_norms<T>(tensors, sums, first, rows, launch);
  andrea::launch_clip_figures(rows, static_cast<int>(sizes.size()), 0.5, figures, controls, launch);
  andrea::launch_scale<T>(tensors, figures + 1, launch);
  const double norm = std::sqrt(squares), coefficient = norm > 0.5 ? 0.5 / norm : 1.0;
  bool is_right = std::fabs(figures[0] - norm) <= 1e-6 * norm;
  for (size_t t = 0; t < sizes.size(); ++t)
    for (int64_t i = 0; i < sizes[t]; ++i) {
      T expected;
      andrea::assign(expected, static_cast<float>(values[t][i]) * static_cast<float>(figures[1]));
      const float found = andrea::to_float(static_cast<T*>(data[t])[i]);
      is_right = is_right && found == andrea::to_float(expected);
    }
  is_right = is_right && std::fabs(figures[1] - coefficient) <= 1e-6;
  for (void* block : blocks) std::free(block);
  for (void* block : {(void*)sums, (void*)rows, (void*)first, (void*)figures, (void*)controls}) std::free(block);
  return is_right;
}

}  // namespace

int main() {
  int checks = 0, failures = 0;
  const std::vector<std::vector<int64_t>> shapes = {{1}, {3, 5}, {16384, 16385, 7}, {2 * 16384 + 5, 100, 4, 4099}};
  try {
    for (const auto& sizes : shapes)
      for (int offset : {0, 1, 3})
        for (int capacity : {2, andrea::kMaxTensors}) {
          const uint64_t seed = 10 + checks;
          failures += !check<float>(sizes, offset, capacity, seed);
          failures += !check<andrea::bfloat16>(sizes, offset, capacity, seed);
          failures += !check<andrea::half>(sizes, offset, capacity, seed);
          checks += 3;
        }
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    return 2;
  }
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures != 0;
}
