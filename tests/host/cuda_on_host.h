// A GPU's blocks and warps on one CPU thread, enough to run our kernels with g++ and test them without a GPU.
//
// Every CUDA thread is a context of its own (ucontext).  A context runs until it meets a barrier or an exchange between
// lanes and then lets the next one run, so the outcome does not depend on chance.  What is not here (atomics between
// blocks, memory order) is not tested here; tests/gpu runs the same kernels on a GPU.
//
//   #include "cuda_on_host.h"
//   #include "gemm_w4a4.cu"
//   NV_EXPORT(nv_grouped_w4a4_nvfp4_linear_f32)   // extern "C" void run_<name>(grid[3], threads[2], pointers to arguments)
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static  // blocks run one after the other, so one copy serves
#define __restrict__
#define __launch_bounds__(...)

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };

namespace on_host {

struct Barrier {
  int expected = 0, arrived = 0;
  unsigned generation = 0;
};

struct Warp {
  Barrier barrier;
  unsigned long long slots[2][32];
};

struct Context {
  ucontext_t where;
  dim3 thread;
  Warp* warp = nullptr;
  unsigned lane = 0, parity = 0;
  bool done = false;
};

struct Block {
  std::vector<std::unique_ptr<Context>> contexts;
  std::vector<Warp> warps;
  Barrier barrier;
  std::size_t running = 0;
};

inline Block* block = nullptr;
inline Context* self = nullptr;
inline dim3 g_block, g_block_size, g_grid;
inline void (*g_body)(void*) = nullptr;
inline void* g_arguments = nullptr;
inline ucontext_t g_home;
alignas(128) inline unsigned char g_shared[256 * 1024];

inline void let_others_run() { swapcontext(&self->where, &g_home); }

inline void wait(Barrier& barrier) {
  const unsigned mine = barrier.generation;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == mine) let_others_run();
}

// A thread that has ended no longer takes part in barriers.
inline void leave(Barrier& barrier) {
  if (--barrier.expected > 0 && barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
}

inline void enter() {
  g_body(g_arguments);
  self->done = true;
  leave(self->warp->barrier);
  leave(block->barrier);
  let_others_run();
}

template <class T>
T exchange(T mine, unsigned from) {
  static_assert(sizeof(T) <= 8, "a lane exchanges at most 8 bytes");
  Warp& warp = *self->warp;
  auto& slots = warp.slots[self->parity];
  self->parity ^= 1;  // two sets of slots: the next exchange may start before everybody has read this one
  std::memcpy(&slots[self->lane], &mine, sizeof mine);
  wait(warp.barrier);
  T theirs;
  std::memcpy(&theirs, &slots[from & 31], sizeof theirs);
  return theirs;
}

constexpr std::size_t kStack = 64 * 1024;

// Stacks are kept from block to block: fresh memory is what this would spend its time on.
inline char* stack_of(unsigned i) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() <= i) stacks.emplace_back(new char[kStack]);
  return stacks[i].get();
}

inline std::unique_ptr<Context> make_thread(Block& here, unsigned i) {
  auto context = std::make_unique<Context>();
  context->thread = {i % g_block_size.x, i / g_block_size.x, 0};
  context->lane = i % 32;
  context->warp = &here.warps[i / 32];
  ++context->warp->barrier.expected;
  getcontext(&context->where);
  context->where.uc_stack.ss_sp = stack_of(i);
  context->where.uc_stack.ss_size = kStack;
  context->where.uc_link = nullptr;
  makecontext(&context->where, enter, 0);
  return context;
}

inline void run_block() {
  const unsigned threads = g_block_size.x * g_block_size.y;
  Block here;
  block = &here;
  here.warps.resize((threads + 31) / 32);
  here.barrier.expected = static_cast<int>(threads);
  for (unsigned i = 0; i < threads; ++i) here.contexts.push_back(make_thread(here, i));
  for (bool any = true; any;) {
    any = false;
    for (auto& context : here.contexts) {
      if (context->done) continue;
      any = true;
      self = context.get();
      swapcontext(&g_home, &context->where);
    }
  }
}

template <class... A, std::size_t... I>
void launch(void (*kernel)(A...), const unsigned* grid, const unsigned* threads, void** arguments, std::index_sequence<I...>) {
  struct Call {
    void (*kernel)(A...);
    void** arguments;
  } call{kernel, arguments};
  g_arguments = &call;
  g_body = [](void* raw) {
    Call& c = *static_cast<Call*>(raw);
    c.kernel(*static_cast<A*>(c.arguments[I])...);
  };
  g_block_size = {threads[0], threads[1], 1};
  g_grid = {grid[0], grid[1], grid[2]};
  for (g_block.z = 0; g_block.z < grid[2]; ++g_block.z)
    for (g_block.y = 0; g_block.y < grid[1]; ++g_block.y)
      for (g_block.x = 0; g_block.x < grid[0]; ++g_block.x) {
        std::memset(g_shared, 0xA5, sizeof g_shared);  // what a block finds there means nothing
        run_block();
      }
}

template <class... A>
void launch(void (*kernel)(A...), const unsigned* grid, const unsigned* threads, void** arguments) {
  launch(kernel, grid, threads, arguments, std::index_sequence_for<A...>{});
}

}  // namespace on_host

#define threadIdx (on_host::self->thread)
#define blockIdx (on_host::g_block)
#define blockDim (on_host::g_block_size)
#define gridDim (on_host::g_grid)
// dynamic shared memory goes by this name in every kernel
#define NV_SHARED_MEMORY(TYPE, NAME) TYPE* NAME = reinterpret_cast<TYPE*>(on_host::g_shared)

inline void __syncthreads() { on_host::wait(on_host::block->barrier); }
inline void __syncwarp(unsigned = 0xFFFFFFFFu) { on_host::wait(on_host::self->warp->barrier); }
template <class T>
T __shfl_sync(unsigned, T mine, unsigned from) { return on_host::exchange(mine, from); }
template <class T>
T __shfl_up_sync(unsigned, T mine, unsigned step) {
  const unsigned lane = on_host::self->lane;
  return on_host::exchange(mine, lane >= step ? lane - step : lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T mine, unsigned mask) { return on_host::exchange(mine, on_host::self->lane ^ mask); }
inline unsigned __ballot_sync(unsigned, bool mine) {
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) votes |= on_host::exchange<unsigned>(mine, lane) << lane;
  return votes;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
template <class T>
T __ldg(const T* at) { return *at; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned __vminu2(unsigned a, unsigned b) { return min(a & 0xFFFFu, b & 0xFFFFu) | min(a >> 16, b >> 16) << 16; }
inline unsigned __vmaxu2(unsigned a, unsigned b) { return max(a & 0xFFFFu, b & 0xFFFFu) | max(a >> 16, b >> 16) << 16; }
inline unsigned atomicMax(unsigned* at, unsigned value) { return std::exchange(*at, max(*at, value)); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) picked |= static_cast<unsigned>(bytes >> (8 * ((selector >> (4 * i)) & 7)) & 0xFF) << (8 * i);
  return picked;
}
using std::fmaf;

#define NV_EXPORT(KERNEL)                                                                                     \
  extern "C" void run_##KERNEL(const unsigned* grid, const unsigned* threads, void** arguments) {             \
    on_host::launch(KERNEL, grid, threads, arguments);                                                        \
  }
