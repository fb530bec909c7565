// Executes CUDA kernels on a CPU, for tests: every thread of a block is a fiber, and a seeded random schedule
// decides which one runs until its next barrier or warp operation; one warp at a time lags behind all others. Blocks
// come in random order, too, and find shared memory filled with NaN.
//
// An error is: a barrier that some thread of the block never reaches, a warp operation whose lanes disagree on the
// mask or are not in it, a shuffle from a lane outside it, and a block in which nothing moves any more. Memory
// that does not belong to the kernel, and misaligned access, are what the sanitizers see.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define ANDREA_CUDA_SHIM
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
// a static array that is filled with NaN before every block
#define ANDREA_SHARED_ARRAY(type, name, size) \
  static type name[size];                     \
  static const shim::Shared name##_shared(name, sizeof name)

using std::fmaf;
using std::isfinite;
using std::sqrt;

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};

namespace shim {

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Round a non-negative number to a binary format by arithmetic alone: `digits` after the leading one, exponents from
// `smallest`; to nearest, ties to even.
inline double rounded(double value, int digits, int smallest) {
  const int exponent = std::max(std::ilogb(value), smallest);
  const double unit = std::ldexp(1.0, exponent - digits);
  return std::nearbyint(value / unit) * unit;
}

}  // namespace shim

inline float __bfloat162float(__nv_bfloat16 value) { return shim::float_of(static_cast<uint32_t>(value.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16(float value) {
  if (std::isnan(value)) return {0x7fff};
  if (std::isinf(value) || value == 0) return {static_cast<uint16_t>(shim::bits_of(value) >> 16)};
  const float nearest = static_cast<float>(shim::rounded(std::fabs(value), 7, -126));
  return {static_cast<uint16_t>(shim::bits_of(std::copysign(nearest, value)) >> 16)};
}
inline float __half2float(__half value) {
  const int exponent = value.bits >> 10 & 31, digits = value.bits & 1023;
  float magnitude = exponent ? std::ldexp(1024.0f + digits, exponent - 25) : std::ldexp(float(digits), -24);
  if (exponent == 31) magnitude = digits ? NAN : INFINITY;
  return value.bits & 0x8000 ? -magnitude : magnitude;
}
inline __half __float2half(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return {0x7fff};
  if (value == 0) return {sign};
  const double nearest = std::isinf(value) ? 65536.0 : shim::rounded(std::fabs(value), 10, -14);
  if (nearest >= 65536.0) return {static_cast<uint16_t>(sign | 0x7c00)};
  const int exponent = std::max(std::ilogb(nearest), -14);  // of zero it is very small
  const int digits = static_cast<int>(std::ldexp(nearest, 10 - exponent));
  return {static_cast<uint16_t>(sign + ((exponent + 14) << 10) + digits)};  // digits carry into the exponent
}

namespace shim {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Shared {
  Shared(void* data, size_t size) : data(data), size(size) {
    std::memset(data, 0xff, size);
    all().push_back(this);
  }
  static std::vector<const Shared*>& all() {
    static std::vector<const Shared*> arrays;
    return arrays;
  }
  void* data;
  size_t size;
};

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Warp {
  uint64_t lane[32];
  uint32_t mask = 0, arrived = 0;
  uint64_t passed = 0;  // operations that all lanes have passed
};

// Where a line of execution goes on. After its start it is resumed by longjmp, which needs no system call; not so
// under AddressSanitizer, which follows swapcontext alone.
struct Place {
  ucontext_t context;
  jmp_buf resume;
  bool has_started = false;

  void go_to(Place& other) {
#ifdef __SANITIZE_ADDRESS__
    swapcontext(&context, &other.context);
#else
    has_started = true;
    if (_setjmp(resume)) return;
    if (other.has_started) _longjmp(other.resume, 1);
    setcontext(&other.context);
#endif
  }
};

struct Fiber {
  Place place;
  unsigned thread = 0;
  bool is_done = false;
};

inline uint64_t seed = 1;
inline Index thread_index, block_index, block_size, grid_size;

class Block {
 public:
  Block(unsigned threads, const std::function<void()>& kernel) : kernel_(kernel), warps_((threads + 31) / 32) {
    fibers_.resize(threads);
    for (const Shared* array : Shared::all()) std::memset(array->data, 0xff, array->size);
  }

  void run(std::mt19937_64& random) {
    current() = this;
    live_ = static_cast<unsigned>(fibers_.size());
    std::vector<unsigned> order(fibers_.size());
    std::iota(order.begin(), order.end(), 0);
    for (unsigned i : order) start(i);
    unsigned slow = pick(random);  // a warp that stands still for as long as any other can go on
    while (live_) {
      std::shuffle(order.begin(), order.end(), random);
      moved_ = false;
      for (unsigned i : order)
        if (i / 32 != slow) resume(i);
      if (moved_) continue;
      for (unsigned i : order)
        if (i / 32 == slow) resume(i);
      if (!moved_) throw Error("deadlock: " + std::to_string(live_) + " threads wait");
      slow = pick(random);
    }
    if (waiting_) throw Error("threads wait at a barrier that others never reached");
  }

  void barrier() {
    if (live_ != fibers_.size()) throw Error("a barrier after a thread of the block has ended");
    const uint64_t before = barriers_;
    moved_ = true;
    if (++waiting_ == live_) {
      waiting_ = 0;
      ++barriers_;
    }
    while (barriers_ == before) yield();
  }

  uint64_t exchange(uint32_t mask, uint64_t value, unsigned from) {
    const unsigned lane = thread_index.x % 32;
    Warp& warp = warps_[thread_index.x / 32];
    warp.lane[lane] = value;
    meet(warp, mask, lane);
    if (!(mask >> from & 1)) throw Error("a shuffle from a lane outside the mask");
    const uint64_t received = warp.lane[from];
    meet(warp, mask, lane);
    return received;
  }

  static Block*& current() {
    static Block* block = nullptr;
    return block;
  }

 private:
  static constexpr size_t kStack = 128 << 10;

  static char* stack_of(unsigned thread) {
    static std::vector<std::unique_ptr<char[]>> stacks;  // of all blocks, one after the other
    while (stacks.size() <= thread) stacks.emplace_back(new char[kStack]);
    return stacks[thread].get();
  }

  unsigned pick(std::mt19937_64& random) { return random() % warps_.size(); }

  void resume(unsigned thread) {
    if (fibers_[thread].is_done) return;
    running_ = &fibers_[thread];
    thread_index.x = thread;
    scheduler_.go_to(running_->place);
    if (error_) std::rethrow_exception(error_);
  }

  void start(unsigned thread) {
    Fiber& fiber = fibers_[thread];
    fiber.thread = thread;
    ucontext_t& context = fiber.place.context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack_of(thread);
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, &Block::enter, 0);
  }

  static void enter() {
    Block& block = *current();
    try {
      block.kernel_();
    } catch (...) {
      if (!block.error_) block.error_ = std::current_exception();
    }
    block.running_->is_done = true;
    block.moved_ = true;
    --block.live_;
    if (block.waiting_ && !block.error_)
      block.error_ = std::make_exception_ptr(Error("a thread ended while others wait at a barrier"));
    block.running_->place.go_to(block.scheduler_);
  }

  void meet(Warp& warp, uint32_t mask, unsigned lane) {
    if (!(mask >> lane & 1)) throw Error("a warp operation by a lane that is not in its mask");
    if (warp.arrived && warp.mask != mask) throw Error("lanes disagree on the mask of a warp operation");
    warp.mask = mask;
    warp.arrived |= 1u << lane;
    moved_ = true;
    const uint64_t before = warp.passed;
    if (warp.arrived == mask) {
      warp.arrived = 0;
      ++warp.passed;
    }
    while (warp.passed == before) yield();
  }

  void yield() {
    Fiber* mine = running_;
    mine->place.go_to(scheduler_);
    thread_index.x = mine->thread;
  }

  const std::function<void()>& kernel_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  Place scheduler_;
  Fiber* running_ = nullptr;
  unsigned live_ = 0, waiting_ = 0;
  uint64_t barriers_ = 0;
  bool moved_ = false;
  std::exception_ptr error_;
};

// kernel<<<blocks, threads>>>(…), one-dimensional
inline void launch(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  std::mt19937_64 random(seed);
  grid_size = {blocks, 1, 1};
  block_size = {threads, 1, 1};
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (unsigned block : order) {
    block_index = {block, 0, 0};
    Block(threads, kernel).run(random);
  }
}

}  // namespace shim

#define threadIdx (shim::thread_index)
#define blockIdx (shim::block_index)
#define blockDim (shim::block_size)
#define gridDim (shim::grid_size)

inline void __syncthreads() { shim::Block::current()->barrier(); }

inline double __shfl_down_sync(uint32_t mask, double value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32, from = lane + distance < 32 ? lane + distance : lane;
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = shim::Block::current()->exchange(mask, bits, from);
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}
