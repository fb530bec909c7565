// Defines the operators of the clip stage, on LibTorch's stable ABI, and runs them on CPUs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "clip_tensors.h"

// One body, compiled for several instruction sets; the machine picks when the library is loaded.
#if defined(__x86_64__) && defined(__linux__)
#define ANDREA_VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ANDREA_VECTORIZED
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kChunk = 65536;  // elements; the cut depends on sizes alone, so any number of threads adds alike
constexpr int kStreams = 4;  // parts of a chunk read side by side, which keeps more of the memory system busy than one
constexpr int kLanes = 8;

struct bfloat16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

// Conversions in arithmetic that vectorizes; exact, NaN and Inf kept.
inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float to_float(float value) { return value; }
inline float to_float(bfloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }
inline float to_float(half value) {
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  const uint32_t scaled = bits_of(from_bits(magnitude) * 0x1p112f);  // moves the exponent's bias; subnormals too
  const uint32_t special = (value.bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  return from_bits(scaled | special | static_cast<uint32_t>(value.bits & 0x8000) << 16);
}
inline void assign(float& target, float value) { target = value; }
inline void assign(bfloat16& target, float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
  target.bits = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}
inline void assign(half& target, float value) {
  const uint32_t sign = bits_of(value) & 0x80000000u;
  const uint32_t bits = bits_of(value) ^ sign;
  const uint32_t normal = (bits + 0xfff + (bits >> 13 & 1) - 0x38000000u) >> 13;
  const uint32_t subnormal = bits_of(from_bits(bits) + 0.5f) - bits_of(0.5f);  // the addition rounds at 2^-24
  uint32_t result = bits < bits_of(0x1p-14f) ? subnormal : normal;
  result = bits >= bits_of(65520.0f) ? 0x7c00u : result;
  result = bits > 0x7f800000u ? 0x7e00u : result;
  target.bits = static_cast<uint16_t>(result | sign >> 16);
}

// Squares of float32 are exact in float64, and their sum neither overflows nor vanishes.
template <class T>
__attribute__((always_inline)) inline double sum_squares(const T* data, int64_t count) {
  double lane[kStreams][kLanes] = {};
  const int64_t stream = count / (kStreams * kLanes) * kLanes;
  for (int64_t i = 0; i < stream; i += kLanes)
    for (int s = 0; s < kStreams; ++s)
      for (int j = 0; j < kLanes; ++j) {
        const double x = to_float(data[s * stream + i + j]);
        lane[s][j] += x * x;
      }
  double total = 0.0;
  for (int64_t i = kStreams * stream; i < count; ++i) {
    const double x = to_float(data[i]);
    total += x * x;
  }
  for (const auto& lanes : lane)
    for (const double each : lanes) total += each;
  return total;
}

template <class T>
__attribute__((always_inline)) inline void multiply(T* data, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) assign(data[i], to_float(data[i]) * factor);
}

ANDREA_VECTORIZED double squares_of(const float* data, int64_t count) { return sum_squares(data, count); }
ANDREA_VECTORIZED double squares_of(const bfloat16* data, int64_t count) { return sum_squares(data, count); }
ANDREA_VECTORIZED double squares_of(const half* data, int64_t count) { return sum_squares(data, count); }
ANDREA_VECTORIZED void scale(float* data, int64_t count, float factor) { multiply(data, count, factor); }
ANDREA_VECTORIZED void scale(bfloat16* data, int64_t count, float factor) { multiply(data, count, factor); }
ANDREA_VECTORIZED void scale(half* data, int64_t count, float factor) { multiply(data, count, factor); }

struct Chunk {
  void* data;
  int64_t count;
  int64_t tensor;
};

std::vector<Chunk> chunks_of(const std::vector<Tensor>& tensors, int64_t element_size) {
  std::vector<Chunk> chunks;
  for (size_t t = 0; t < tensors.size(); ++t) {
    char* data = static_cast<char*>(tensors[t].data_ptr());
    const int64_t numel = tensors[t].numel();
    for (int64_t offset = 0; offset < numel; offset += kChunk)
      chunks.push_back({data + offset * element_size, std::min(kChunk, numel - offset), static_cast<int64_t>(t)});
  }
  return chunks;
}

// Call `work(chunk, T*)` for every chunk, on torch's threads.
template <class Work>
void for_each_chunk(const std::vector<Tensor>& tensors, Work work) {
  const auto with_type = [&](auto element) {
    using T = decltype(element);
    const std::vector<Chunk> chunks = chunks_of(tensors, sizeof(T));
    work.prepare(chunks);
    torch::stable::parallel_for(0, static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work(i, static_cast<T*>(chunks[i].data), chunks[i].count);
    });
    work.finish(chunks);
  };
  switch (tensors[0].scalar_type()) {
    case ScalarType::Float:
      return with_type(float());
    case ScalarType::BFloat16:
      return with_type(bfloat16());
    default:
      return with_type(half());
  }
}

struct Measure {
  double* rows;
  std::vector<double> squares, nonfinite;

  void prepare(const std::vector<Chunk>& chunks) {
    squares.assign(chunks.size(), 0.0);
    nonfinite.assign(chunks.size(), 0.0);
  }
  template <class T>
  void operator()(int64_t slot, const T* data, int64_t count) {
    squares[slot] = squares_of(data, count);
    if (!std::isfinite(squares[slot]))
      nonfinite[slot] = static_cast<double>(
          std::count_if(data, data + count, [](T value) { return !std::isfinite(to_float(value)); }));
  }
  void finish(const std::vector<Chunk>& chunks) {
    for (size_t slot = 0; slot < chunks.size(); ++slot) {
      rows[2 * chunks[slot].tensor] += squares[slot];
      rows[2 * chunks[slot].tensor + 1] += nonfinite[slot];
    }
  }
};

struct Scale {
  float factor;

  void prepare(const std::vector<Chunk>&) {}
  template <class T>
  void operator()(int64_t, T* data, int64_t count) {
    scale(data, count, factor);
  }
  void finish(const std::vector<Chunk>&) {}
};

Tensor squared_norms(std::vector<Tensor> tensors) {
  andrea::check(tensors);
  const int64_t count = static_cast<int64_t>(tensors.size());
  const Tensor rows = torch::stable::new_empty(tensors[0], {count, 2}, ScalarType::Double);
  double* values = static_cast<double*>(rows.mutable_data_ptr());
  std::fill(values, values + 2 * count, 0.0);
  for_each_chunk(tensors, Measure{values, {}, {}});
  return rows;
}

// As k_grad_norm_final does.
std::tuple<Tensor, Tensor> clip_figures(Tensor rows, double max_norm) {
  andrea::check_rows(rows);
  const Tensor figures = torch::stable::new_empty(rows, {2}, ScalarType::Double);
  const Tensor controls = torch::stable::new_empty(rows, {2}, ScalarType::Float);
  const double* sums = static_cast<const double*>(rows.const_data_ptr());
  double squares = 0.0;
  for (int64_t i = 0; i < rows.numel(); i += 2) squares += sums[i];
  const double norm = std::sqrt(squares);
  const bool clips = std::isfinite(norm) && norm > max_norm;
  const double ratio = clips ? norm / max_norm : 1.0;
  double* figure = static_cast<double*>(figures.mutable_data_ptr());
  float* control = static_cast<float*>(controls.mutable_data_ptr());
  figure[0] = norm;
  figure[1] = clips ? max_norm / norm : 1.0;
  control[0] = static_cast<float>(std::min(ratio, static_cast<double>(std::numeric_limits<float>::max())));
  control[1] = std::isfinite(static_cast<float>(norm)) && std::isfinite(static_cast<float>(ratio)) ? 0.0f : 1.0f;
  return {figures, controls};
}

void scale_(std::vector<Tensor> tensors, Tensor coefficient) {
  andrea::check(tensors);
  andrea::check_coefficient(coefficient, tensors[0]);
  const float factor = static_cast<float>(*static_cast<const double*>(coefficient.const_data_ptr()));
  if (factor == 1.0f) return;
  for_each_chunk(tensors, Scale{factor});
}

}  // namespace

STABLE_TORCH_LIBRARY(andrea_clip, library) {
  library.def("squared_norms(Tensor[] gradients) -> Tensor");
  library.def("clip_figures(Tensor rows, float max_norm) -> (Tensor, Tensor)");
  library.def("scale_(Tensor(a!)[] gradients, Tensor coefficient) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(andrea_clip, CPU, library) {
  library.impl("squared_norms", TORCH_BOX(&squared_norms));
  library.impl("clip_figures", TORCH_BOX(&clip_figures));
  library.impl("scale_", TORCH_BOX(&scale_));
}
