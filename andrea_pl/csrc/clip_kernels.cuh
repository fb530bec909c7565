// Three kernels that measure the norm of many gradients and scale them: k_grad_norm_partial, k_grad_norm_final and
// k_grad_scale. Plain CUDA C++ without a torch header; tests/kernels executes this very text on a CPU.
//
//   tensors of one dtype ──k_grad_norm_partial──> one Sum a chunk ──k_grad_norm_final──> one Sum a tensor (a row)
//   rows ──k_grad_norm_final──> norm, coefficient, divisor, held
//   tensors, coefficient ──k_grad_scale──> tensors, in place
//
// A chunk is kChunk elements of one tensor and belongs to one block. Every sum has a slot of its own and every
// addition its place in a fixed order, without atomics: the result is the same bit for bit, whatever the order of
// blocks, the alignment of a tensor and the launch that it falls into. Sizes and offsets have 64 bits.
#pragma once

#include <cstdint>

#ifndef ANDREA_CUDA_SHIM
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define ANDREA_SHARED_ARRAY(type, name, size) __shared__ type name[size]
#endif

namespace andrea {

using bfloat16 = __nv_bfloat16;
using half = __half;

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kChunk = 16384;  // 12M parameters make 730 blocks, enough for a large GPU
constexpr int kPacksInFlight = 4;  // of a thread
constexpr int kMaxTensors = 200;

// A sum of squares in float32 between these bounds lost nothing that matters: 16384 squares, each off by the smallest
// normal number (where subnormals are flushed), are 2e-34. Anything else is added up again in float64.
constexpr double kSmallestExactSum = 1e-26;
constexpr double kLargestExactSum = 1e38;
constexpr double kLargestFloat = 3.4028234663852886e38;

// What is known of the elements of a chunk or a tensor.
struct Sum {
  double squares;
  double nonfinite;  // how many are NaN or Inf; exact to 2^53
};

// The tensors of one launch, passed by value: nothing is copied to the device, and nothing has to stay alive.
struct TensorTable {
  void* data[kMaxTensors];
  int64_t numel[kMaxTensors];        // more than 0
  int32_t first_chunk[kMaxTensors];  // within this launch
  int32_t tensors;
  int32_t tensors_before;  // in earlier launches
  int32_t chunks_before;
};
static_assert(sizeof(TensorTable) <= 4096 - 64, "kernel parameters have 4 KB on every driver");

template <class T>
struct Chunk {
  T* data;
  int count;  // 1 .. kChunk
  int tensor;
  bool is_first;  // of its tensor
};

template <class T>
__device__ __forceinline__ Chunk<T> find_chunk(const TensorTable& table, int chunk) {
  int low = 0, high = table.tensors;  // the last tensor that starts at or before the chunk
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_chunk[middle] <= chunk)
      low = middle;
    else
      high = middle;
  }
  const int64_t offset = static_cast<int64_t>(chunk - table.first_chunk[low]) * kChunk;
  const int64_t left = table.numel[low] - offset;
  return {static_cast<T*>(table.data[low]) + offset, left < kChunk ? static_cast<int>(left) : kChunk, low, offset == 0};
}

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(half value) { return __half2float(value); }
__device__ __forceinline__ void assign(float& target, float value) { target = value; }
__device__ __forceinline__ void assign(bfloat16& target, float value) { target = __float2bfloat16(value); }
__device__ __forceinline__ void assign(half& target, float value) { target = __float2half(value); }

// What a thread loads at once: 16 bytes.
template <class T>
struct alignas(16) Pack {
  static constexpr int kLanes = 16 / sizeof(T);
  T lane[kLanes];
};

// An aligned pack moves in one instruction, any other element by element: the same elements in the same lanes.
template <class T>
__device__ __forceinline__ Pack<T> load(const T* from, bool is_aligned) {
  if (is_aligned) return *reinterpret_cast<const Pack<T>*>(from);
  Pack<T> pack;
#pragma unroll
  for (int j = 0; j < Pack<T>::kLanes; ++j) pack.lane[j] = from[j];
  return pack;
}

template <class T>
__device__ __forceinline__ void store(T* to, const Pack<T>& pack, bool is_aligned) {
  if (is_aligned) {
    *reinterpret_cast<Pack<T>*>(to) = pack;
    return;
  }
#pragma unroll
  for (int j = 0; j < Pack<T>::kLanes; ++j) to[j] = pack.lane[j];
}

// Hand every element of this thread's share of a chunk to `visit`, in packs, of which kInFlight are loaded at once;
// keep what it made of them if kWrites.
template <bool kWrites, int kInFlight, class T, class Visit>
__device__ __forceinline__ void for_each_pack(const Chunk<T>& chunk, Visit visit) {
  constexpr int kLanes = Pack<T>::kLanes;
  const bool is_aligned = reinterpret_cast<uintptr_t>(chunk.data) % sizeof(Pack<T>) == 0;
  const int packs = chunk.count / kLanes;
  int i = threadIdx.x;
  for (; i + (kInFlight - 1) * kThreads < packs; i += kInFlight * kThreads) {
    Pack<T> pack[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) pack[u] = load(chunk.data + (i + u * kThreads) * kLanes, is_aligned);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      visit(pack[u]);
      if (kWrites) store(chunk.data + (i + u * kThreads) * kLanes, pack[u], is_aligned);
    }
  }
  for (; i < packs; i += kThreads) {
    Pack<T> pack = load(chunk.data + i * kLanes, is_aligned);
    visit(pack);
    if (kWrites) store(chunk.data + i * kLanes, pack, is_aligned);
  }
  const int tail = packs * kLanes + threadIdx.x;
  if (tail < chunk.count) {
    Pack<T> pack = {};  // zeros beside the one element
    pack.lane[0] = chunk.data[tail];
    visit(pack);
    if (kWrites) chunk.data[tail] = pack.lane[0];
  }
}

// The sum over a block, in a fixed order; every thread gets it.
__device__ __forceinline__ double block_sum(double value) {
  ANDREA_SHARED_ARRAY(double, of_warp, kThreads / kWarp);
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value += __shfl_down_sync(0xffffffffu, value, distance);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  double total = 0.0;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) total += of_warp[warp];
  __syncthreads();  // before the next call writes of_warp again
  return total;
}

// One block a chunk: sums[slot of the chunk], and first[tensor] = the slot of the tensor's first chunk.
template <class T>
__global__ void __launch_bounds__(kThreads)
    k_grad_norm_partial(const __grid_constant__ TensorTable table, Sum* __restrict__ sums, int32_t* __restrict__ first) {
  const Chunk<T> chunk = find_chunk<T>(table, blockIdx.x);
  float lane[Pack<T>::kLanes] = {};  // at most 17 additions each
  for_each_pack<false, kPacksInFlight>(chunk, [&](Pack<T>& pack) {
#pragma unroll
    for (int j = 0; j < Pack<T>::kLanes; ++j) {
      const float x = to_float(pack.lane[j]);
      lane[j] = fmaf(x, x, lane[j]);
    }
  });
  double squares = 0.0;
#pragma unroll
  for (int j = 0; j < Pack<T>::kLanes; ++j) squares += lane[j];
  squares = block_sum(squares);
  double nonfinite = 0.0;
  if (!(squares >= kSmallestExactSum && squares <= kLargestExactSum)) {  // the same for the whole block
    double exact = 0.0, bad = 0.0;
    for_each_pack<false, 1>(chunk, [&](Pack<T>& pack) {
#pragma unroll
      for (int j = 0; j < Pack<T>::kLanes; ++j) {
        const double x = to_float(pack.lane[j]);
        exact += x * x;
        if (!isfinite(x)) bad += 1.0;
      }
    });
    squares = block_sum(exact);
    nonfinite = block_sum(bad);
  }
  if (threadIdx.x == 0) {
    sums[table.chunks_before + static_cast<int>(blockIdx.x)] = {squares, nonfinite};
    if (chunk.is_first) first[table.tensors_before + chunk.tensor] = table.chunks_before + static_cast<int>(blockIdx.x);
  }
}

// Add up sums. With `first`, one block a tensor: rows[t] = sums[first[t]] + … + sums[first[t + 1] - 1]. Without, one
// block adds all `count` of them:
//   figures[0] the norm, [1] the coefficient min(1, max_norm / norm), 1 where the norm is not finite
//   controls[0] the coefficient's inverse, no more than float32 can say, for optimizers that divide by grad_scale
//   controls[1] 1 where the step must be held, for found_inf: norm or inverse are beyond float32
__global__ void __launch_bounds__(kThreads)
    k_grad_norm_final(const Sum* __restrict__ sums, const int32_t* __restrict__ first, int count, Sum* __restrict__ rows,
                      double max_norm, double* __restrict__ figures, float* __restrict__ controls) {
  const int begin = first ? first[blockIdx.x] : 0;
  const int end = first && blockIdx.x + 1 < gridDim.x ? first[blockIdx.x + 1] : count;
  double squares = 0.0, nonfinite = 0.0;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    squares += sums[i].squares;
    nonfinite += sums[i].nonfinite;
  }
  squares = block_sum(squares);
  nonfinite = block_sum(nonfinite);
  if (threadIdx.x != 0) return;
  if (rows) rows[blockIdx.x] = {squares, nonfinite};
  if (figures) {
    const double norm = sqrt(squares);
    const bool clips = isfinite(norm) && norm > max_norm;
    const double ratio = clips ? norm / max_norm : 1.0;
    figures[0] = norm;
    figures[1] = clips ? max_norm / norm : 1.0;
    controls[0] = static_cast<float>(ratio < kLargestFloat ? ratio : kLargestFloat);
    controls[1] = isfinite(static_cast<float>(norm)) && isfinite(static_cast<float>(ratio)) ? 0.0f : 1.0f;
  }
}

// One block a chunk: multiply by the coefficient, or write nothing where it is 1. Blocks take the chunks from the end,
// which k_grad_norm_partial read last and the cache may still hold.
template <class T>
__global__ void __launch_bounds__(kThreads)
    k_grad_scale(const __grid_constant__ TensorTable table, const double* __restrict__ coefficient) {
  const float factor = static_cast<float>(*coefficient);
  if (factor == 1.0f) return;
  const Chunk<T> chunk = find_chunk<T>(table, gridDim.x - 1 - blockIdx.x);
  for_each_pack<true, kPacksInFlight>(chunk, [&](Pack<T>& pack) {
#pragma unroll
    for (int j = 0; j < Pack<T>::kLanes; ++j) assign(pack.lane[j], to_float(pack.lane[j]) * factor);
  });
}

// From here on the host's part. `launch(kernel, blocks, arguments…)` starts a kernel with kThreads threads a block.

struct Tensors {
  int64_t count;  // none of them empty
  void* const* data;
  const int64_t* numel;
  int capacity = kMaxTensors;  // of a launch
};

inline int64_t chunks_of(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

// Cut tensors into tables and hand each, with its number of chunks, to `use`. Returns the chunks of all.
template <class Use>
inline int64_t for_each_table(const Tensors& tensors, Use use) {
  TensorTable table;
  int64_t before = 0, chunks = 0;
  table.tensors = table.tensors_before = 0;
  const auto flush = [&](int64_t next) {
    table.chunks_before = static_cast<int32_t>(before);
    if (table.tensors) use(table, static_cast<unsigned>(chunks));
    before += chunks;
    chunks = 0;
    table.tensors = 0;
    table.tensors_before = static_cast<int32_t>(next);
  };
  for (int64_t t = 0; t < tensors.count; ++t) {
    if (table.tensors == tensors.capacity) flush(t);
    table.data[table.tensors] = tensors.data[t];
    table.numel[table.tensors] = tensors.numel[t];
    table.first_chunk[table.tensors] = static_cast<int32_t>(chunks);
    chunks += chunks_of(tensors.numel[t]);
    ++table.tensors;
  }
  flush(tensors.count);
  return before;
}

// rows (count): what is known of each tensor. Scratch: sums (one a chunk), first (count).
template <class T, class Launch>
inline void launch_squared_norms(const Tensors& tensors, Sum* sums, int32_t* first, Sum* rows, Launch launch) {
  const int64_t chunks = for_each_table(tensors, [&](const TensorTable& table, unsigned blocks) {
    launch(k_grad_norm_partial<T>, blocks, table, sums, first);
  });
  double* const no_figures = nullptr;
  float* const no_controls = nullptr;
  launch(k_grad_norm_final, static_cast<unsigned>(tensors.count), sums, first, static_cast<int>(chunks), rows, 0.0,
         no_figures, no_controls);
}

// figures (2) and controls (2) of all rows together; see k_grad_norm_final.
template <class Launch>
inline void launch_clip_figures(const Sum* rows, int count, double max_norm, double* figures, float* controls,
                                Launch launch) {
  const int32_t* const in_one = nullptr;
  Sum* const no_rows = nullptr;
  launch(k_grad_norm_final, 1u, rows, in_one, count, no_rows, max_norm, figures, controls);
}

template <class T, class Launch>
inline void launch_scale(const Tensors& tensors, const double* coefficient, Launch launch) {
  for_each_table(tensors, [&](const TensorTable& table, unsigned blocks) {
    launch(k_grad_scale<T>, blocks, table, coefficient);
  });
}

}  // namespace andrea
