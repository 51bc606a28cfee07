/*! \file passes/call_chain.cc
 *  \brief The quickest chain of accelerator calls and host steps through the downsets of a graph's
 * core.
 *
 *  A gate is a core node that is ordered with every other core node. A call that holds a gate is a
 * barrier: all of the core before it has ended when it starts, all of the core behind it starts
 * when it has ended. So every placement is a path over downsets,
 *
 *      state A --call--> state B   all core nodes of B \ A run in one call that holds a gate
 *      state A --gate--> state B   one gate runs on the host
 *      state A --gap---> state B   nodes between two gates run on the host, or some of them in
 *                                  calls without a gate, each at its least cost
 *
 *  and the shortest path is a lower bound on the makespan. Nodes outside the core cost nothing,
 * unless a call must hold them: those on a path between two of its nodes, and those that share a
 * device with one. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

struct Input {
  View<double> accelerator, host, memory, send;  // inf seconds: cannot run there
  Lists preds, succs;
  Lists mates;  // nodes that share a device with node v
  View<int32_t> order;
  View<uint64_t> core, gates, states;  // states: downsets of the core, smallest first
  double limit;
  int64_t count, nodes;
};

class Chain {
 public:
  explicit Chain(const Input& in)
      : in_(in),
        words_((in.nodes + 63) / 64),
        core_(in.core.data(), words_),
        gates_(in.gates.data(), words_),
        above_(in.nodes, Bits(words_)),
        below_(in.nodes, Bits(words_)),
        position_(in.nodes),
        alone_(in.nodes),
        on_host_(in.nodes),
        on_call_(in.nodes) {
    for (int64_t i = 0; i < in.nodes; ++i) {
      const int32_t v = in.order[i];
      position_[v] = i;
      for (const int32_t* u = in.preds.begin(v); u != in.preds.end(v); ++u) {
        above_[v].Join(above_[*u]);
        above_[v].Add(*u);
      }
    }
    for (int64_t i = in.nodes - 1; i >= 0; --i) {
      const int32_t v = in.order[i];
      for (const int32_t* w = in.succs.begin(v); w != in.succs.end(v); ++w) {
        below_[v].Join(below_[*w]);
        below_[v].Add(*w);
      }
    }
    const int64_t num_states = in.states.size() / words_;
    for (int64_t s = 0; s < num_states; ++s) {
      states_.emplace_back(in.states.data() + s * words_, words_);
      level_.push_back(0);
      for (int64_t v : Members(states_.back())) level_.back() += gates_.Has(v);
      index_.emplace(states_.back(), s);
    }
  }

  struct Step {
    int64_t from = -1;
    bool call = false;  // one more accelerator
  };

  /*! \brief The length of the shortest path; `path` gets (from, to) of its calls. */
  double Run(std::vector<int64_t>* path) {
    const int64_t num = states_.size();
    std::vector<std::vector<double>> best(in_.count + 1, std::vector<double>(num, HUGE_VAL));
    std::vector<std::vector<Step>> back(in_.count + 1, std::vector<Step>(num));
    for (auto& row : best) row[0] = 0.0;
    for (int64_t a = 0; a + 1 < num; ++a) {
      if (best[in_.count][a] == HUGE_VAL) continue;
      calls_.assign(num, Call(words_));
      calls_[a].open = true;
      for (int64_t b = a + 1; b < num; ++b) {
        if (!states_[a].Within(states_[b])) continue;
        const Step host{a, false}, call{a, true};
        const auto [host_s, beside_s] = HostSeconds(a, b);
        const double call_s = std::min(CallSeconds(a, b), beside_s);
        for (int64_t k = 0; k <= in_.count; ++k) {
          if (best[k][a] + host_s < best[k][b]) {
            best[k][b] = best[k][a] + host_s;
            back[k][b] = host;
          }
          if (k > 0 && best[k - 1][a] + call_s < best[k][b]) {
            best[k][b] = best[k - 1][a] + call_s;
            back[k][b] = call;
          }
        }
      }
    }
    int64_t k = 0, at = num - 1;
    for (int64_t c = 1; c <= in_.count; ++c) {
      if (best[c][at] < best[k][at]) k = c;
    }
    const double bound = best[k][at];
    while (bound < HUGE_VAL && at > 0) {
      const Step step = back[k][at];
      if (step.call) path->insert(path->end(), {step.from, at}), --k;
      at = step.from;
    }
    return bound;
  }

 private:
  std::vector<int64_t> Members(const Bits& set) const {
    std::vector<int64_t> out;
    for (int64_t w = 0; w < words_; ++w) {
      for (uint64_t rest = set.words()[w]; rest; rest &= rest - 1)
        out.push_back(64 * w + __builtin_ctzll(rest));
    }
    return out;
  }
  std::vector<int64_t> Between(int64_t a, int64_t b) const {
    std::vector<int64_t> out;
    for (int64_t w = 0; w < words_; ++w) {
      for (uint64_t rest = states_[b].words()[w] & ~states_[a].words()[w]; rest; rest &= rest - 1)
        out.push_back(64 * w + __builtin_ctzll(rest));
    }
    return out;
  }

  /*! \brief Seconds of one gate, or of nodes between two gates: all on the host, and with at least
   * one call beside it; else inf. */
  std::pair<double, double> HostSeconds(int64_t a, int64_t b) {
    if (level_[b] == level_[a]) return GapSeconds(Between(a, b));
    if (level_[b] != level_[a] + 1 || states_[b].Count() != states_[a].Count() + 1)
      return {HUGE_VAL, HUGE_VAL};
    return {in_.host[Between(a, b)[0]], HUGE_VAL};
  }

  /*! \brief The longest chain: on the host, and each node on the host or in a call, where a run of
   * nodes in one call pays its first input and its last result. */
  std::pair<double, double> GapSeconds(std::vector<int64_t> nodes) {
    std::sort(nodes.begin(), nodes.end(),
              [&](int64_t u, int64_t v) { return position_[u] < position_[v]; });
    Bits inside(words_);
    for (int64_t v : nodes) inside.Add(v);
    double longest = 0.0, beside = 0.0;
    for (size_t i = 0; i < nodes.size(); ++i) {
      const int64_t v = nodes[i];
      double alone = 0.0, host = 0.0, call = 0.0;
      for (const int32_t* u = in_.preds.begin(v); u != in_.preds.end(v); ++u) {
        if (!inside.Has(*u)) call = std::max(call, core_.Has(*u) ? in_.send[*u] : 0.0);
      }
      for (size_t j = 0; j < i; ++j) {
        const int64_t u = nodes[j];
        if (!above_[v].Has(u)) continue;
        const bool reads = std::find(in_.preds.begin(v), in_.preds.end(v), u) != in_.preds.end(v);
        const double move = reads ? in_.send[u] : 0.0;
        alone = std::max(alone, alone_[u]);
        host = std::max(host, std::min(on_host_[u], on_call_[u] + move));
        call = std::max(call, std::min(on_host_[u] + move, on_call_[u]));
      }
      alone_[v] = alone + in_.host[v];
      on_host_[v] = host + in_.host[v];
      on_call_[v] = call + in_.accelerator[v];
      bool leaves = false;
      for (const int32_t* w = in_.succs.begin(v); w != in_.succs.end(v); ++w)
        leaves |= core_.Has(*w) && !inside.Has(*w);
      longest = std::max(longest, alone_[v]);
      beside = std::max(beside, std::min(on_host_[v], on_call_[v] + (leaves ? in_.send[v] : 0.0)));
    }
    return {longest, beside};
  }

  /*! \brief What a call that starts at a state holds when it ends at another. */
  struct Call {
    explicit Call(int64_t words) : inside(words), above(words), below(words) {}
    Bits inside, above, below;
    double seconds = 0.0, memory = 0.0;
    bool open = false;  // may fit
  };

  /*! \brief Seconds of the call that holds exactly the core nodes of B \ A and what they force.
   * States between A and B have been seen: the call grows from one that lacks B's last node. */
  double CallSeconds(int64_t a, int64_t b) {
    const std::vector<int64_t> core = Between(a, b);
    const int64_t last = *std::max_element(core.begin(), core.end(), [&](int64_t u, int64_t v) {
      return position_[u] < position_[v];
    });
    Bits without = states_[b];
    without.Remove(last);
    const Call& before = calls_[index_.at(without)];
    if (!before.open) return HUGE_VAL;
    Call& call = calls_[b] = before;
    Hold(last, &call);
    call.open = call.memory <= in_.limit * (1 + 1e-12) && call.seconds < HUGE_VAL;
    if (!call.open || level_[a] == level_[b]) return HUGE_VAL;
    double moves = 0.0;
    Bits paid(words_);
    for (int64_t v : Members(call.inside)) {
      if (core_.Has(v) && (states_[a].Has(v) || !states_[b].Has(v))) return HUGE_VAL;
      for (const int32_t* u = in_.preds.begin(v); u != in_.preds.end(v); ++u) {
        if (call.inside.Has(*u) || !core_.Has(*u) || paid.Has(*u)) continue;
        paid.Add(*u);
        moves += in_.send[*u];
      }
      for (const int32_t* w = in_.succs.begin(v); w != in_.succs.end(v); ++w) {
        if (call.inside.Has(*w) || !core_.Has(*w)) continue;
        moves += in_.send[v];
        break;
      }
    }
    return call.seconds + moves;
  }

  /*! \brief Add a node to a call, with what lies between and what shares the device. */
  void Hold(int64_t node, Call* call) const {
    std::vector<int64_t> todo{node};
    while (!todo.empty()) {
      for (size_t i = 0; i < todo.size(); ++i) {
        const int64_t v = todo[i];
        if (call->inside.Has(v)) continue;
        call->inside.Add(v);
        call->seconds += in_.accelerator[v];
        call->memory += in_.memory[v];
        call->above.Join(above_[v]);
        call->below.Join(below_[v]);
        todo.insert(todo.end(), in_.mates.begin(v), in_.mates.end(v));
      }
      todo.clear();
      for (int64_t w = 0; w < words_; ++w) {
        uint64_t rest = call->above.words()[w] & call->below.words()[w] & ~call->inside.words()[w];
        for (; rest; rest &= rest - 1) todo.push_back(64 * w + __builtin_ctzll(rest));
      }
    }
  }

  const Input& in_;
  int64_t words_;
  Bits core_, gates_;
  std::vector<Bits> above_, below_, states_;
  std::vector<int64_t> level_, position_;
  std::vector<double> alone_, on_host_, on_call_;
  std::vector<Call> calls_;  // of the state at hand, by the state where they end
  std::unordered_map<Bits, int64_t, BitsHash> index_;
};

}  // namespace

/*! \brief Return (bound, calls): calls lists (from state, to state) of the shortest path's calls.
 *  \param arrays seconds on an accelerator and on the host, bytes, seconds to move the result,
 * (ptr, ids) of predecessors, successors and nodes that share a device, a topological order, the
 * core, its gates [words] and its downsets [states, words]. */
ffi::Array<ffi::Any> CallChain(const ffi::Array<ffi::Tensor>& arrays, double limit, int64_t count) {
  if (arrays.size() != 14)
    TVM_FFI_THROW(ValueError) << "CallChain needs 14 arrays, got " << arrays.size();
  const View<double> accelerator(arrays[0], "accelerator");
  const Input in{accelerator,
                 View<double>(arrays[1], "host"),
                 View<double>(arrays[2], "memory"),
                 View<double>(arrays[3], "send"),
                 Lists(arrays[4], arrays[5], "preds"),
                 Lists(arrays[6], arrays[7], "succs"),
                 Lists(arrays[8], arrays[9], "mates"),
                 View<int32_t>(arrays[10], "order"),
                 View<uint64_t>(arrays[11], "core"),
                 View<uint64_t>(arrays[12], "gates"),
                 View<uint64_t>(arrays[13], "states"),
                 limit,
                 count,
                 accelerator.size()};
  std::vector<int64_t> path;
  const double bound = Chain(in).Run(&path);
  return {bound, ffi::Array<int64_t>(path.begin(), path.end())};
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.CallChain", CallChain); }
}  // namespace tvmhet
