/*! \file passes/state_graph.cc
 *  \brief The states of a model that is executed kernel by kernel.
 *
 *      {} --conv--> {conv} --add+relu--> {conv, add, relu} = all
 *       \___________conv+add+relu___________________^
 *
 *  A state is the set of nodes already run (a downset); an edge runs one more whole kernel. Every
 * acyclic cover by kernels is a path from {} to all, so fusion, and the cuts between stages, are
 * path problems on this graph.
 *
 *  `full` keeps every downset. Otherwise the next kernel must hold the first node not yet run, or
 * an ancestor that such a kernel still waits for: each cover then keeps exactly one order, and side
 * branches no longer multiply. When `max_states` is met, only states that are prefixes of the given
 * order are still added. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

struct Kernels {
  std::vector<Bits> nodes, waits_for, ancestors;        // waits_for: direct outside predecessors
  std::vector<std::vector<int64_t>> of_node, first_of;  // with the node; with it as the first one
};

Kernels Describe(int64_t n, const Lists& preds, const Lists& kernel_nodes) {
  const int64_t words = (n + 63) / 64;
  std::vector<Bits> above(n, Bits(words));
  for (int64_t v = 0; v < n; ++v) {
    for (const int32_t* p = preds.begin(v); p != preds.end(v); ++p) {
      if (*p >= v)
        TVM_FFI_THROW(ValueError) << "edge " << *p << " -> " << v << " is not in topological order";
      above[v].Join(above[*p]);
      above[v].Add(*p);
    }
  }
  Kernels k;
  k.of_node.resize(n), k.first_of.resize(n);
  for (int64_t i = 0; i < kernel_nodes.size(); ++i) {
    Bits nodes(words), direct(words), all(words);
    for (const int32_t* v = kernel_nodes.begin(i); v != kernel_nodes.end(i); ++v) {
      nodes.Add(*v);
      k.of_node[*v].push_back(i);
      all.Join(above[*v]);
      for (const int32_t* p = preds.begin(*v); p != preds.end(*v); ++p) direct.Add(*p);
    }
    if (kernel_nodes.begin(i) != kernel_nodes.end(i)) {
      k.first_of[*std::min_element(kernel_nodes.begin(i), kernel_nodes.end(i))].push_back(i);
    }
    for (const int32_t* v = kernel_nodes.begin(i); v != kernel_nodes.end(i); ++v)
      direct.Remove(*v), all.Remove(*v);
    k.nodes.push_back(nodes), k.waits_for.push_back(direct), k.ancestors.push_back(all);
  }
  return k;
}

/*! \brief Which kernels may run next in a state. */
class Expander {
 public:
  Expander(int64_t n, const Lists& preds, const Kernels& k, bool full)
      : n_(n), preds_(preds), k_(k), full_(full), seen_(n, -1) {}

  const std::vector<int64_t>& Next(const Bits& state) {
    out_.clear();
    ++stamp_;
    if (full_) {
      for (int64_t v = 0; v < n_; ++v) {  // a kernel waits for what its first node waits for
        if (state.Has(v) || !Ready(v, state)) continue;
        for (int64_t i : k_.first_of[v]) {
          if (!k_.nodes[i].Meets(state) && k_.waits_for[i].Within(state)) out_.push_back(i);
        }
      }
      std::sort(out_.begin(), out_.end());
      return out_;
    }
    for (int64_t v = 0; v < n_; ++v) {
      if (!state.Has(v)) {
        Need(v, state);
        break;
      }
    }
    return out_;
  }

 private:
  bool Ready(int64_t v, const Bits& state) const {
    for (const int32_t* p = preds_.begin(v); p != preds_.end(v); ++p) {
      if (!state.Has(*p)) return false;
    }
    return true;
  }

  void Need(int64_t v, const Bits& state) {
    if (seen_[v] == stamp_) return;
    seen_[v] = stamp_;
    for (int64_t i : k_.of_node[v]) {
      if (k_.nodes[i].Meets(state)) continue;
      if (k_.waits_for[i].Within(state)) {
        if (std::find(out_.begin(), out_.end(), i) == out_.end()) out_.push_back(i);
      } else {
        Need(k_.ancestors[i].FirstOutside(state), state);
      }
    }
  }

  int64_t n_;
  const Lists& preds_;
  const Kernels& k_;
  bool full_;
  std::vector<int64_t> seen_, out_;
  int64_t stamp_ = 0;
};

bool IsPrefix(const Bits& state, int64_t count) {
  for (int64_t w = 0; w < static_cast<int64_t>(state.words().size()); ++w) {
    const int64_t here = std::min<int64_t>(64, std::max<int64_t>(0, count - 64 * w));
    const uint64_t want = here == 64 ? ~uint64_t{0} : (uint64_t{1} << here) - 1;
    if (state.words()[w] != want) return false;
  }
  return true;
}

}  // namespace

/*! \brief Build the state graph. Nodes 0..n-1 are in topological order.
 *  \return (states, edges, truncated): `states` are the words of each state, smallest first;
 * `edges` are int32 triples (from, to, kernel) ordered by `from`; only states on a path from {} to
 * all are kept. With `full` and more than `max_states` downsets, both are empty. */
ffi::Array<ffi::Any> StateGraph(int64_t n, const ffi::TensorView& pred_ptr,
                                const ffi::TensorView& pred_ids, const ffi::TensorView& kernel_ptr,
                                const ffi::TensorView& kernel_ids, bool full, int64_t max_states) {
  const Lists preds(pred_ptr, pred_ids, "preds");
  const Kernels kernels = Describe(n, preds, Lists(kernel_ptr, kernel_ids, "kernels"));
  const int64_t words = (n + 63) / 64;
  Expander expand(n, preds, kernels, full);
  struct Edge {
    int32_t from, to, kernel;
  };
  std::vector<Bits> states{Bits(words)};
  std::vector<Edge> edges;
  std::unordered_map<Bits, int32_t, BitsHash> known{{states[0], 0}};
  std::map<int64_t, std::vector<int32_t>> by_size{{0, {0}}};
  bool truncated = false;
  for (auto layer = by_size.begin(); layer != by_size.end(); ++layer) {
    for (size_t i = 0; i < layer->second.size(); ++i) {
      const int32_t from = layer->second[i];
      for (int64_t kernel : expand.Next(Bits(states[from]))) {
        Bits next = states[from];
        next.Join(kernels.nodes[kernel]);
        const int64_t count = next.Count();
        auto found = known.find(next);
        if (found == known.end()) {
          if (static_cast<int64_t>(states.size()) >= max_states) {
            truncated = true;
            if (full) return {ffi::Bytes("", 0), ffi::Bytes("", 0), true};
            if (!IsPrefix(next, count)) continue;
          }
          found = known.emplace(next, static_cast<int32_t>(states.size())).first;
          by_size[count].push_back(found->second);
          states.push_back(next);
        }
        edges.push_back({from, found->second, static_cast<int32_t>(kernel)});
      }
    }
  }
  // Keep what can still reach the end; number the states by size.
  std::vector<std::vector<int32_t>> back(states.size());
  for (const Edge& e : edges) back[e.to].push_back(e.from);
  std::vector<int32_t> alive(states.size(), -1), todo;
  for (size_t s = 0; s < states.size(); ++s) {
    if (states[s].Count() == n) alive[s] = 0, todo.push_back(s);
  }
  while (!todo.empty()) {
    const int32_t s = todo.back();
    todo.pop_back();
    for (int32_t p : back[s]) {
      if (alive[p] < 0) alive[p] = 0, todo.push_back(p);
    }
  }
  std::vector<uint64_t> state_words;
  int32_t num_alive = 0;
  for (const auto& layer : by_size) {
    for (int32_t s : layer.second) {
      if (alive[s] < 0) continue;
      alive[s] = num_alive++;
      state_words.insert(state_words.end(), states[s].words().begin(), states[s].words().end());
    }
  }
  std::vector<Edge> kept;
  for (const Edge& e : edges) {
    if (alive[e.from] >= 0 && alive[e.to] >= 0)
      kept.push_back({alive[e.from], alive[e.to], e.kernel});
  }
  std::stable_sort(kept.begin(), kept.end(),
                   [](const Edge& a, const Edge& b) { return a.from < b.from; });
  return {ffi::Bytes(reinterpret_cast<const char*>(state_words.data()),
                     state_words.size() * sizeof(uint64_t)),
          ffi::Bytes(reinterpret_cast<const char*>(kept.data()), kept.size() * sizeof(Edge)),
          truncated};
}

/*! \brief The cheapest cover when kernel k costs cost_s[k]: the shortest path from the first state
 * to the last.
 *  \return the kernels on it in order as int32, or empty if there is none. */
ffi::Bytes CheapestCover(int64_t num_states, const ffi::TensorView& edges,
                         const ffi::TensorView& cost_s) {
  const View<int32_t> e(edges, "edges");
  const View<double> cost(cost_s, "cost_s");
  std::vector<double> dist(num_states, HUGE_VAL);
  std::vector<int64_t> via(num_states, -1);
  if (num_states == 0) return ffi::Bytes("", 0);
  dist[0] = 0.0;
  for (int64_t i = 0; i + 2 < e.size(); i += 3) {
    const double d = dist[e[i]] + cost[e[i + 2]];
    if (d < dist[e[i + 1]]) dist[e[i + 1]] = d, via[e[i + 1]] = i;
  }
  std::vector<int32_t> path;
  for (int64_t s = num_states - 1; s != 0 && via[s] >= 0; s = e[via[s]])
    path.push_back(e[via[s] + 2]);
  std::reverse(path.begin(), path.end());
  return ffi::Bytes(reinterpret_cast<const char*>(path.data()), path.size() * sizeof(int32_t));
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def("tvmhet.StateGraph", StateGraph)
      .def("tvmhet.CheapestCover", CheapestCover);
}
}  // namespace tvmhet
