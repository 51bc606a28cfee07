/*! \file passes/critical_path.cc
 *  \brief The longest chain of a DAG. Given each node's fastest time, no placement ends sooner. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <vector>

namespace tvmhet {
namespace ffi = tvm::ffi;

/*! \brief Return the critical path in seconds. O(V + E).
 *  \param time_s      time_s[u] is the shortest run time of node u.
 *  \param successors  successors[u] holds ids greater than u: the order is topological. */
double CriticalPath(const ffi::Array<double>& time_s,
                    const ffi::Array<ffi::Array<int64_t>>& successors) {
  const int64_t n = static_cast<int64_t>(time_s.size());
  std::vector<double> tail_s(n, 0.0);
  for (int64_t u = n - 1; u >= 0; --u) {
    for (int64_t v : successors[u]) {
      if (v <= u || v >= n) {
        TVM_FFI_THROW(ValueError) << "edge " << u << " -> " << v
                                  << " is not in topological order; sort the nodes first";
      }
      tail_s[u] = std::max(tail_s[u], tail_s[v]);
    }
    tail_s[u] += time_s[u];
  }
  return n == 0 ? 0.0 : *std::max_element(tail_s.begin(), tail_s.end());
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef().def("tvmhet.CriticalPath", CriticalPath);
}

}  // namespace tvmhet
