/*! \file passes/fusion_candidates.cc
 *  \brief Every set of operators that may be one kernel by TVM's rules, not only FuseOps' choice.
 *
 *  A legal kernel ends in one operator, its *sink*; all others are read inside only. So it is
 * convex and connected, and grows from its sink backwards, one operator at a time, each of whose
 * readers are in already. Adding them in descending order makes every set once:
 *
 *        conv ─ add ─ relu       sink relu:  {relu}  {add relu}  {conv add relu}  {exp add relu}
 * ... exp ───┘
 *
 *  A set is legal if FuseOps, given it alone, makes one group of it. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <set>
#include <vector>

#include "fusion_rules.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

using OpSet = std::vector<int>;  // descending: the sink first

/*! \brief Enumerate the legal kernels that end in one sink, small ones first. */
class SinkSearch {
 public:
  SinkSearch(const FusionGraph& graph, const std::vector<std::vector<int>>& producers,
             int64_t max_ops, int64_t max_depth)
      : graph_(graph),
        producers_(producers),
        max_ops_(max_ops),
        max_depth_(max_depth),
        local_(graph.size(), -1) {}

  /*! \brief Append legal kernels of two operators or more; look at `quota` sets at most.
   *  \return how many sets were known but not looked at: 0 if the enumeration is complete. */
  int64_t Run(int sink, int64_t quota, std::vector<OpSet>* legal) {
    std::deque<OpSet> open;
    Expand({sink}, &open);
    for (int64_t looked = 0; !open.empty(); ++looked) {
      if (looked == quota) return static_cast<int64_t>(open.size());
      const OpSet ops = std::move(open.front());
      open.pop_front();
      if (IsOneGroup(ops)) legal->push_back(ops);
      Expand(ops, &open);
    }
    return 0;
  }

 private:
  /*! \brief Queue every set that has one earlier operator more. */
  void Expand(const OpSet& ops, std::deque<OpSet>* open) {
    if (static_cast<int64_t>(ops.size()) >= max_ops_ || graph_.kind[ops.front()] > kCommReduce) {
      return;
    }
    Mark(ops);
    std::set<int, std::greater<int>> candidates;
    for (int v : ops) {
      for (int u : producers_[v]) {
        if (u < ops.back() && CanAdd(u, ops)) candidates.insert(u);
      }
    }
    Unmark(ops);
    for (int u : candidates) {
      open->push_back(ops);
      open->back().push_back(u);
    }
  }

  /*! \brief Conditions that no further operator could mend, so a set without them is never grown.
   */
  bool CanAdd(int u, const OpSet& ops) const {
    const int kind = graph_.kind[u];
    if (graph_.escapes[u] || kind > kOutEWiseFusable || kind == kCommReduce) return false;
    for (int v : graph_.consumers[u]) {
      if (local_[v] < 0 || graph_.kind[v] == kOutEWiseFusable) return false;
    }
    return kind != kOutEWiseFusable || CanAnchor(u, ops);
  }

  /*! \brief Whether `u` would be the only kind 4, with nothing but elementwise operators after it.
   */
  bool CanAnchor(int u, const OpSet& ops) const {
    if (graph_.is_multi_output[u]) return false;
    std::vector<char> after(ops.size(), 0);
    for (int v : graph_.consumers[u]) after[local_[v]] = 1;
    for (int i = static_cast<int>(ops.size()) - 1; i >= 0; --i) {
      if (graph_.kind[ops[i]] == kOutEWiseFusable) return false;
      if (!after[i]) continue;
      if (graph_.kind[ops[i]] != kElemWise) return false;
      for (int v : graph_.consumers[ops[i]]) {
        if (local_[v] >= 0) after[local_[v]] = 1;
      }
    }
    return true;
  }

  /*! \brief Whether FuseOps makes one group of `ops` alone. */
  bool IsOneGroup(const OpSet& ops) {
    const int n = static_cast<int>(ops.size());
    Mark(ops);
    FusionGraph alone;
    for (int i = n - 1; i >= 0; --i) {  // ascending operators: local id n - 1 - i
      std::vector<int> consumers;
      if (i > 0) {
        for (int v : graph_.consumers[ops[i]]) consumers.push_back(n - 1 - local_[v]);
      }
      alone.kind.push_back(graph_.kind[ops[i]]);
      alone.consumers.push_back(std::move(consumers));
      alone.escapes.push_back(i == 0);
      alone.is_multi_output.push_back(graph_.is_multi_output[ops[i]]);
    }
    Unmark(ops);
    const std::vector<int> root = FuseGreedily(alone, max_depth_);
    return std::all_of(root.begin(), root.end(), [&](int r) { return r == n - 1; });
  }

  void Mark(const OpSet& ops) {
    for (size_t i = 0; i < ops.size(); ++i) local_[ops[i]] = static_cast<int>(i);
  }

  void Unmark(const OpSet& ops) {
    for (int u : ops) local_[u] = -1;
  }

  const FusionGraph& graph_;
  const std::vector<std::vector<int>>& producers_;
  const int64_t max_ops_;
  const int64_t max_depth_;
  std::vector<int> local_;  // position in the set under study, or -1
};

FusionGraph Read(const ffi::Array<int64_t>& kinds, const ffi::Array<ffi::Array<int64_t>>& consumers,
                 const ffi::Array<bool>& escapes, const ffi::Array<bool>& multi_output) {
  const int64_t n = static_cast<int64_t>(kinds.size());
  if (static_cast<int64_t>(consumers.size()) != n || static_cast<int64_t>(escapes.size()) != n ||
      static_cast<int64_t>(multi_output.size()) != n) {
    TVM_FFI_THROW(ValueError) << "kinds, consumers, escapes and multi_output differ in length; "
                              << "give one entry for each of the " << n << " operators";
  }
  FusionGraph graph;
  for (int64_t u = 0; u < n; ++u) {
    std::vector<int> readers;
    for (int64_t v : consumers[u]) {
      if (v <= u || v >= n) {
        TVM_FFI_THROW(ValueError) << "operator " << u << " is read by " << v
                                  << ", which is not after it; sort the operators topologically";
      }
      readers.push_back(static_cast<int>(v));
    }
    graph.kind.push_back(static_cast<int>(kinds[u]));
    graph.consumers.push_back(std::move(readers));
    graph.escapes.push_back(escapes[u]);
    graph.is_multi_output.push_back(multi_output[u]);
  }
  return graph;
}

ffi::Array<int64_t> ToArray(const std::vector<int>& values) {
  ffi::Array<int64_t> out;
  out.reserve(static_cast<int64_t>(values.size()));
  for (int v : values) out.push_back(v);
  return out;
}

/*! \brief FuseOps' own groups as descending sets, those of two operators or more. */
std::vector<OpSet> GreedySets(const FusionGraph& graph, int64_t max_depth) {
  const std::vector<int> root = FuseGreedily(graph, max_depth);
  std::vector<OpSet> by_root(graph.size());
  for (int u = graph.size() - 1; u >= 0; --u) by_root[root[u]].push_back(u);
  by_root.erase(std::remove_if(by_root.begin(), by_root.end(),
                               [](const OpSet& ops) { return ops.size() < 2; }),
                by_root.end());
  return by_root;
}

}  // namespace

/*! \brief Return each operator's FuseOps group, named by the group's last operator.
 *  \param kinds         TVM pattern kinds, operators in topological order.
 *  \param consumers     consumers[u] reads u.
 *  \param escapes       the model returns a result of u.
 *  \param multi_output  u has several results.
 *  \param max_depth     FuseOps' limit on operators per group. */
ffi::Array<int64_t> GreedyFusion(const ffi::Array<int64_t>& kinds,
                                 const ffi::Array<ffi::Array<int64_t>>& consumers,
                                 const ffi::Array<bool>& escapes,
                                 const ffi::Array<bool>& multi_output, int64_t max_depth) {
  return ToArray(FuseGreedily(Read(kinds, consumers, escapes, multi_output), max_depth));
}

/*! \brief Return the legal kernels of two operators or more, and how many sets were not examined.
 *  \param max_ops    operators in one kernel; FuseOps' own groups may be larger.
 *  \param quota      sets to examine per sink.
 *  \param max_depth  FuseOps' limit on operators per group.
 *  The other parameters are those of GreedyFusion. Kernels are ascending, in lexicographic order.
 */
ffi::Tuple<ffi::Array<ffi::Array<int64_t>>, int64_t> LegalKernels(
    const ffi::Array<int64_t>& kinds, const ffi::Array<ffi::Array<int64_t>>& consumers,
    const ffi::Array<bool>& escapes, const ffi::Array<bool>& multi_output, int64_t max_ops,
    int64_t quota, int64_t max_depth) {
  const FusionGraph graph = Read(kinds, consumers, escapes, multi_output);
  std::vector<std::vector<int>> producers(graph.size());
  for (int u = 0; u < graph.size(); ++u) {
    for (int v : graph.consumers[u]) producers[v].push_back(u);
  }
  std::vector<OpSet> legal = GreedySets(graph, max_depth);
  SinkSearch search(graph, producers, max_ops, max_depth);
  int64_t unexamined = 0;
  for (int sink = 0; sink < graph.size(); ++sink) unexamined += search.Run(sink, quota, &legal);
  for (OpSet& ops : legal) std::reverse(ops.begin(), ops.end());
  std::sort(legal.begin(), legal.end());
  legal.erase(std::unique(legal.begin(), legal.end()), legal.end());
  ffi::Array<ffi::Array<int64_t>> kernels;
  for (const OpSet& ops : legal) kernels.push_back(ToArray(ops));
  return ffi::Tuple<ffi::Array<ffi::Array<int64_t>>, int64_t>(kernels, unexamined);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def("tvmhet.GreedyFusion", GreedyFusion)
      .def("tvmhet.LegalKernels", LegalKernels);
}

}  // namespace tvmhet
