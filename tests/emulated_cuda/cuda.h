/* CUDA C++ as TVM writes it, for a CPU: a block's threads are fibers of one thread, run in turn
 * between barriers.
 *
 * What is exact: grid and block, barriers, shuffles, types and their alignment, int arithmetic.
 * Shared memory is full of NaNs when a block begins and ends at a page that cannot be touched; the
 * order of threads between two barriers is forwards or backwards, so that what depends on it
 * differs. What is not: speed, rounding of fast math, memory order.
 */
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __align__(bytes) alignas(bytes)
#define __syncthreads() emulated::wait(emulated::kBlock, __LINE__)
#define __syncwarp(...) emulated::wait(emulated::kWarp, __LINE__)
/* A lane outside the width is taken modulo it (CUDA C++ programming guide, warp shuffle functions). */
#define __shfl_sync(mask, value, lane, width) \
  emulated::shuffle(value, __LINE__, (lane) % (width), width, [](int i, int n) { return n; })
#define __shfl_down_sync(mask, value, delta, width) \
  emulated::shuffle(value, __LINE__, delta, width, [](int i, int n) { return i + n; })
#define __shfl_up_sync(mask, value, delta, width) \
  emulated::shuffle(value, __LINE__, delta, width, [](int i, int n) { return i - n; })
#define __shfl_xor_sync(mask, value, bits, width) \
  emulated::shuffle(value, __LINE__, bits, width, [](int i, int n) { return i ^ n; })
#define __ballot_sync(mask, predicate) emulated::ballot(predicate, __LINE__)

struct Index {
  unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

template <typename T>
struct alignas(2 * sizeof(T)) Vec2 {
  T x, y;
};
template <typename T>
struct Vec3 {
  T x, y, z;
};
template <typename T>
struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) Vec4 {
  T x, y, z, w;
};
#define EMULATED_VECTOR(type, name)                                                  \
  typedef struct {                                                                   \
    type x;                                                                          \
  } name##1;                                                                         \
  typedef Vec2<type> name##2;                                                        \
  typedef Vec3<type> name##3;                                                        \
  typedef Vec4<type> name##4;                                                        \
  static inline name##1 make_##name##1(type x) { return {x}; }                       \
  static inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  static inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATED_VECTOR(float, float)
EMULATED_VECTOR(double, double)
EMULATED_VECTOR(int, int)
EMULATED_VECTOR(unsigned int, uint)
EMULATED_VECTOR(signed char, char)
EMULATED_VECTOR(unsigned char, uchar)
EMULATED_VECTOR(short, short)
EMULATED_VECTOR(unsigned short, ushort)
EMULATED_VECTOR(long long, longlong)
EMULATED_VECTOR(unsigned long long, ulonglong)

namespace emulated {

enum State { kReady, kBlock, kWarp, kDone };
constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSlotBytes = 16;

struct Fiber {
  Index index;
  State state;
  int line;
  bool begun;
  jmp_buf here;
  ucontext_t context;
  alignas(kSlotBytes) unsigned char slot[kSlotBytes];
  unsigned char* stack;
};

struct Region {
  unsigned char* begin;
  size_t bytes;
};

static std::vector<Fiber> fibers;
static std::vector<Region> regions;  // of shared memory
static std::function<void()> body;
static Fiber* current;
static jmp_buf scheduler;
static ucontext_t scheduler_context;
static sigjmp_buf fault;
static std::string problem;

/*! \brief Memory that ends where a page begins that cannot be touched. */
static unsigned char* guarded(size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
  auto* base = static_cast<unsigned char*>(
      mmap(nullptr, whole + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(base + page, whole, PROT_READ | PROT_WRITE);
  return base + page + whole - (bytes + 15) / 16 * 16;
}

/*! \brief An array in shared memory, made once for each declaration. */
static void* shared(size_t bytes) {
  regions.push_back({guarded(bytes), bytes});
  return regions.back().begin;
}

static void wait(State state, int line) {
  current->state = state;
  current->line = line;
  if (!_setjmp(current->here)) _longjmp(scheduler, 1);
}

static int lane_of(const Fiber* fiber) {
  return static_cast<int>(fiber - fibers.data()) % kWarpSize;
}

template <typename T, typename Source>
static T shuffle(T value, int line, int operand, int width, Source source) {
  static_assert(sizeof(T) <= kSlotBytes, "a shuffled value is too large");
  memcpy(current->slot, &value, sizeof(T));
  wait(kWarp, line);
  const int lane = lane_of(current), first = lane / width * width, in_width = lane - first;
  const int from = source(in_width, operand);
  T result = value;
  if (from >= 0 && from < width) {
    Fiber* other = current - lane + first + from;
    if (other < fibers.data() + fibers.size()) {
      memcpy(&result, other->slot, sizeof(T));
    } else {
      memset(&result, 0xff, sizeof(T));  // no such thread: undefined
    }
  }
  wait(kWarp, -line);  // until all have read
  return result;
}

static unsigned ballot(int predicate, int line) {
  current->slot[0] = predicate != 0;
  wait(kWarp, line);
  Fiber* first = current - lane_of(current);
  unsigned result = 0;
  for (int i = 0; i < kWarpSize && first + i < fibers.data() + fibers.size(); ++i)
    result |= unsigned(first[i].slot[0]) << i;
  wait(kWarp, -line);
  return result;
}

static unsigned active_mask() {
  const int first = static_cast<int>(current - fibers.data()) / kWarpSize * kWarpSize;
  const int count = std::min<int>(kWarpSize, static_cast<int>(fibers.size()) - first);
  return count == kWarpSize ? 0xffffffffu : (1u << count) - 1;
}

static void enter() {
  body();
  current->state = kDone;
  _longjmp(scheduler, 1);
}

static void resume(Fiber* fiber) {
  current = fiber;
  threadIdx = fiber->index;
  if (_setjmp(scheduler)) return;
  if (fiber->begun) _longjmp(fiber->here, 1);
  fiber->begun = true;
  swapcontext(&scheduler_context, &fiber->context);
}

/*! \brief Let the fibers [first, last) go on when all that have not ended wait at the same line. */
static bool release(State state, size_t first, size_t last) {
  int line = 0, ended = 0;
  for (size_t i = first; i < last; ++i) {
    if (fibers[i].state == kDone) {
      ++ended;
      continue;
    }
    if (fibers[i].state != state || (line && fibers[i].line != line)) return false;
    line = fibers[i].line;
  }
  if (!line || ended) return false;
  for (size_t i = first; i < last; ++i) fibers[i].state = kReady;
  return true;
}

static std::string place(const Fiber& f) {
  char text[200];
  snprintf(text, sizeof text, "thread (%u, %u, %u) of block (%u, %u, %u)", f.index.x, f.index.y,
           f.index.z, blockIdx.x, blockIdx.y, blockIdx.z);
  return text;
}

static bool run_block(bool backwards) {
  const size_t count = fibers.size();
  for (const Region& r : regions) memset(r.begin, 0xff, r.bytes);
  for (size_t i = 0; i < count; ++i) {
    Fiber& f = fibers[i];
    f.state = kReady;
    f.begun = false;
    getcontext(&f.context);
    f.context.uc_stack = {f.stack, 0, kStackBytes};
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  while (true) {
    for (size_t n = 0; n < count; ++n) {
      Fiber& f = fibers[backwards ? count - 1 - n : n];
      if (f.state == kReady) resume(&f);
    }
    bool goes_on = false;
    for (size_t w = 0; w < count; w += kWarpSize)
      goes_on |= release(kWarp, w, std::min(count, w + kWarpSize));
    if (goes_on || release(kBlock, 0, count)) continue;
    for (const Fiber& f : fibers) {
      if (f.state != kDone) {
        problem = place(f) + " waits at line " + std::to_string(std::abs(f.line)) +
                  " for threads that never come there";
        return false;
      }
    }
    return true;
  }
}

static void on_fault(int number, siginfo_t* info, void*) {
  char text[100];
  if (number == SIGSEGV || number == SIGBUS) {
    snprintf(text, sizeof text, " touched %p, which is outside of every tensor", info->si_addr);
  } else {
    snprintf(text, sizeof text, " left an array's bounds, was misaligned or overflowed an int");
  }
  problem = place(*current) + text;
  siglongjmp(fault, 1);
}

/*! \brief Run a kernel over a grid. Returns what went wrong, or nothing. */
static const char* launch(Index grid, Index block, bool backwards, std::function<void()> kernel) {
  const size_t count = size_t(block.x) * block.y * block.z;
  problem.clear();
  if (count == 0 || count > 1024 || !grid.x || grid.y > 65535 || grid.z > 65535 || !grid.y ||
      !grid.z || block.z > 64) {
    problem = "CUDA takes no grid of (" + std::to_string(grid.x) + ", " + std::to_string(grid.y) +
              ", " + std::to_string(grid.z) + ") blocks of " + std::to_string(count) + " threads";
    return problem.c_str();
  }
  gridDim = grid;
  blockDim = block;
  body = kernel;
  while (fibers.size() > count) {
    munmap(fibers.back().stack, kStackBytes);
    fibers.pop_back();
  }
  while (fibers.size() < count) {
    fibers.emplace_back();
    fibers.back().stack =
        static_cast<unsigned char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  for (size_t i = 0; i < count; ++i) {
    fibers[i].index = {unsigned(i % block.x), unsigned(i / block.x % block.y),
                       unsigned(i / (size_t(block.x) * block.y))};
  }
  const int numbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  struct sigaction before[4], action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  for (int i = 0; i < 4; ++i) sigaction(numbers[i], &action, &before[i]);
  if (!sigsetjmp(fault, 1)) {
    for (unsigned z = 0; z < grid.z && problem.empty(); ++z)
      for (unsigned y = 0; y < grid.y && problem.empty(); ++y)
        for (unsigned x = 0; x < grid.x; ++x) {
          blockIdx =
              backwards ? Index{grid.x - 1 - x, grid.y - 1 - y, grid.z - 1 - z} : Index{x, y, z};
          if (!run_block(backwards)) break;
        }
  }
  for (int i = 0; i < 4; ++i) sigaction(numbers[i], &before[i], nullptr);
  return problem.empty() ? nullptr : problem.c_str();
}
}  // namespace emulated

#define __activemask() emulated::active_mask()

template <typename A, typename B>
static inline auto max(A a, B b) -> decltype(a + b) {
  return a > b ? a : b;
}
template <typename A, typename B>
static inline auto min(A a, B b) -> decltype(a + b) {
  return a < b ? a : b;
}
template <typename T>
static inline T atomicAdd(T* place, T value) {
  T old = *place;
  *place = old + value;
  return old;
}
template <typename T>
static inline T __ldg(const T* place) {
  return *place;
}
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf(x, y)
#define __exp10f(x) exp10f(x)
#define __fdividef(x, y) ((x) / (y))
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __float_as_int(float x) {
  int y;
  memcpy(&y, &x, 4);
  return y;
}
static inline float __int_as_float(int x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
using std::isfinite;
using std::isinf;
using std::isnan;
