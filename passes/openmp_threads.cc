/*! \file passes/openmp_threads.cc
 *  \brief Parallel loops of generated kernels on the threads of a library's OpenMP: one team, which
 * is awake for the next kernel, whosever it is, where TVM's threads and OpenMP's had turns. */
#include <dlfcn.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <atomic>

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

// As tvm/runtime/c_backend_api.h has them, for code that TVM generates.
struct ParallelGroup {
  void* sync_handle;
  int32_t num_task;
};
using Share = int (*)(int task_id, ParallelGroup* group, void* data);

/*! \brief What GCC's OpenMP offers to compiled code; LLVM's and Intel's have the same functions. */
struct OpenMp {
  void (*parallel)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
  void (*barrier)();
  int (*num_threads)();
  int (*thread_num)();
  unsigned size;
};
OpenMp openmp;

/*! \brief A parallel loop, and the error of the first of its shares that failed. */
struct Loop {
  Share share;
  void* data;
  std::atomic<bool> failed{false};
  TVMFFIObjectHandle error = nullptr;
};

void RunShare(void* opaque) {
  auto* loop = static_cast<Loop*>(opaque);
  ParallelGroup group{nullptr, openmp.num_threads()};
  if (loop->share(openmp.thread_num(), &group, loop->data) == 0) return;
  TVMFFIObjectHandle error = nullptr;
  TVMFFIErrorMoveFromRaised(&error);
  if (!loop->failed.exchange(true)) {
    loop->error = error;
  } else if (error != nullptr) {
    TVMFFIObjectDecRef(error);
  }
}

/*! \brief In place of TVM's TVMBackendParallelLaunch: as many shares as the team has threads. */
int Launch(Share share, void* data, int) {
  Loop loop{share, data};
  openmp.parallel(RunShare, &loop, openmp.size, 0);
  if (!loop.failed) return 0;
  if (loop.error != nullptr) {
    TVMFFIErrorSetRaised(loop.error);
    TVMFFIObjectDecRef(loop.error);
  }
  return -1;
}

/*! \brief In place of TVM's TVMBackendParallelBarrier. */
int Barrier(int, ParallelGroup*) {
  openmp.barrier();
  return 0;
}

template <typename F>
bool Find(void* library, const char* name, F** out) {
  *out = reinterpret_cast<F*>(dlsym(library, name));
  return *out != nullptr;
}

/*! \brief Run the parallel loops of kernels that are loaded from now on, on so many of OpenMP's
 *  threads.
 *  \param user  A library of this process, whose OpenMP it is.
 *  \return Whether it has one that takes calls as GCC's does; nothing is changed if not. */
bool UseOpenMpThreads(const ffi::String& user, int64_t num_threads) {
  void* library = dlopen(user.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) TVM_FFI_THROW(RuntimeError) << user << " is not loaded";
  OpenMp found;
  if (!Find(library, "GOMP_parallel", &found.parallel) ||
      !Find(library, "GOMP_barrier", &found.barrier) ||
      !Find(library, "omp_get_num_threads", &found.num_threads) ||
      !Find(library, "omp_get_thread_num", &found.thread_num)) {
    return false;
  }
  found.size = static_cast<unsigned>(num_threads);
  openmp = found;
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvModRegisterContextSymbol("__TVMBackendParallelLaunch",
                                                            reinterpret_cast<void*>(Launch)));
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvModRegisterContextSymbol("__TVMBackendParallelBarrier",
                                                            reinterpret_cast<void*>(Barrier)));
  return true;
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef().def("tvmhet.UseOpenMpThreads", UseOpenMpThreads);
}

}  // namespace tvmhet
