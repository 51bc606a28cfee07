/*! \file passes/latency_anneal.cc
 *  \brief Simulated annealing of a placement for the latency of one input, with a host that calls
 * accelerators.
 *
 *  Device 0 is the host: its nodes run as soon as their inputs exist, any number at once. Every
 * other device runs its nodes as one call: it starts when its last input exists, then receives,
 * computes and sends, and only then are its results seen. A tensor costs each receiving device once
 * and its maker once. A call must not wait for itself: placements whose calls form a cycle are
 * never accepted. */
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

struct Input {
  View<double> accelerator, host, memory,
      send;  // seconds on an accelerator (inf: cannot), on the host; bytes; seconds
  Lists preds, succs, blocks;  // blocks: nodes that share a device
  View<double> limit;          // bytes per device; limit[0] is the host's
  int64_t nodes, devices;
};

class Clock {
 public:
  explicit Clock(const Input& in)
      : in_(in),
        waiting_(in.nodes + in.devices),
        ready_(in.nodes + in.devices),
        finish_(in.nodes + in.devices),
        call_(in.devices) {}

  /*! \brief The makespan of a placement; inf if its calls wait for each other. */
  double Makespan(const std::vector<int32_t>& home) {
    const int64_t n = in_.nodes;
    auto task = [&](int64_t v) { return home[v] == 0 ? v : n + home[v]; };
    std::fill(waiting_.begin(), waiting_.end(), 0);
    std::fill(ready_.begin(), ready_.end(), 0.0);
    std::fill(call_.begin(), call_.end(), 0.0);
    for (auto& m : members_) m.clear();
    members_.resize(in_.devices);
    int64_t tasks = 0, done = 0;
    for (int64_t v = 0; v < n; ++v) {
      const int32_t d = home[v];
      if (d == 0) {
        ++tasks;
      } else {
        tasks += members_[d].empty();
        members_[d].push_back(v);
        call_[d] += in_.accelerator[v];
        bool sends = false;
        for (const int32_t* w = in_.succs.begin(v); w != in_.succs.end(v); ++w)
          sends |= home[*w] != d;
        if (sends) call_[d] += in_.send[v];
      }
      for (const int32_t* u = in_.preds.begin(v); u != in_.preds.end(v); ++u)
        waiting_[task(v)] += task(*u) != task(v);
    }
    for (int64_t u = 0; u < n; ++u) {  // each device receives a tensor once
      if (in_.send[u] <= 0) continue;
      seen_.clear();
      for (const int32_t* w = in_.succs.begin(u); w != in_.succs.end(u); ++w) {
        const int32_t d = home[*w];
        if (d == 0 || d == home[u] || std::find(seen_.begin(), seen_.end(), d) != seen_.end())
          continue;
        seen_.push_back(d);
        call_[d] += in_.send[u];
      }
    }
    queue_.clear();
    for (int64_t v = 0; v < n; ++v) {
      if (home[v] == 0 && waiting_[v] == 0) queue_.push_back(v);
    }
    for (int64_t d = 1; d < in_.devices; ++d) {
      if (!members_[d].empty() && waiting_[n + d] == 0) queue_.push_back(n + d);
    }
    double makespan = 0.0;
    auto release = [&](int64_t v, int64_t t) {
      for (const int32_t* w = in_.succs.begin(v); w != in_.succs.end(v); ++w) {
        const int64_t other = task(*w);
        if (other == t) continue;
        ready_[other] = std::max(ready_[other], finish_[t]);
        if (--waiting_[other] == 0) queue_.push_back(other);
      }
    };
    for (size_t i = 0; i < queue_.size(); ++i) {
      const int64_t t = queue_[i];
      ++done;
      finish_[t] = ready_[t] + (t < n ? in_.host[t] : call_[t - n]);
      makespan = std::max(makespan, finish_[t]);
      if (t < n) {
        release(t, t);
      } else {
        for (int64_t v : members_[t - n]) release(v, t);
      }
    }
    return done == tasks ? makespan : HUGE_VAL;
  }

 private:
  const Input& in_;
  std::vector<int64_t> waiting_;
  std::vector<double> ready_, finish_, call_;
  std::vector<int64_t> queue_;
  std::vector<int32_t> seen_;
  std::vector<std::vector<int64_t>> members_;
};

class Annealer {
 public:
  Annealer(const Input& in, std::vector<int32_t> home, int64_t seed)
      : in_(in),
        clock_(in),
        now_(std::move(home)),
        used_(in.devices, 0.0),
        block_of_(in.nodes),
        random_(seed),
        mark_(in.blocks.size(), 0) {
    for (int64_t b = 0; b < in.blocks.size(); ++b) {
      for (const int32_t* v = in.blocks.begin(b); v != in.blocks.end(b); ++v) block_of_[*v] = b;
    }
    for (int64_t v = 0; v < in.nodes; ++v) used_[now_[v]] += in.memory[v];
    best_ = now_;
    best_value_ = clock_.Makespan(now_);
  }

  void Run(int64_t steps, double hot, double cold) {
    double value = clock_.Makespan(now_);
    const double unit = best_value_;
    for (int64_t i = 0; i < steps; ++i) {
      const double heat = unit * hot * std::pow(cold / hot, static_cast<double>(i) / steps);
      undo_.clear();
      const bool legal = Propose();
      const double next = legal && !undo_.empty() && Fits() ? clock_.Makespan(now_) : HUGE_VAL;
      if (next < HUGE_VAL && (next <= value || Chance() < std::exp((value - next) / heat))) {
        value = next;
        if (value < best_value_ * (1 - 1e-12)) best_value_ = value, best_ = now_;
      } else {
        for (auto u = undo_.rbegin(); u != undo_.rend(); ++u) Place(u->first, u->second);
      }
    }
  }
  void Restart() {
    for (int64_t b = 0; b < in_.blocks.size(); ++b) Place(b, best_[*in_.blocks.begin(b)]);
  }
  const std::vector<int32_t>& best() const { return best_; }
  double best_value() const { return best_value_; }

 private:
  double Chance() { return std::uniform_real_distribution<double>(0.0, 1.0)(random_); }
  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool Fits() const {
    for (int64_t d = 1; d < in_.devices; ++d) {
      if (used_[d] > in_.limit[d]) return false;
    }
    return true;
  }
  void Place(int64_t b, int32_t to) {
    for (const int32_t* v = in_.blocks.begin(b); v != in_.blocks.end(b); ++v) {
      used_[now_[*v]] -= in_.memory[*v];
      used_[to] += in_.memory[*v];
      now_[*v] = to;
    }
  }
  bool Shift(int64_t b, int32_t to) {
    const int32_t from = now_[*in_.blocks.begin(b)];
    if (from == to) return true;
    for (const int32_t* v = in_.blocks.begin(b); to != 0 && v != in_.blocks.end(b); ++v) {
      if (in_.accelerator[*v] == HUGE_VAL) return false;
    }
    undo_.push_back({b, from});
    Place(b, to);
    return true;
  }
  int32_t NeighbourHome(int64_t v) {
    const int64_t ins = in_.preds.end(v) - in_.preds.begin(v),
                  outs = in_.succs.end(v) - in_.succs.begin(v);
    if (ins + outs == 0) return 0;
    const int64_t k = Below(ins + outs);
    return now_[k < ins ? in_.preds.begin(v)[k] : in_.succs.begin(v)[k - ins]];
  }
  bool Propose() {
    const int64_t v = Below(in_.nodes), kind = Below(10);
    const int32_t any = static_cast<int32_t>(Below(in_.devices));
    if (kind < 2) return Shift(block_of_[v], any);
    if (kind < 5) return Shift(block_of_[v], NeighbourHome(v));
    if (kind == 5) {  // all of one device joins another, or the host
      const int32_t from = now_[v], to = Below(3) ? NeighbourHome(v) : any;
      if (from == to || from == 0) return false;
      for (int64_t b = 0; b < in_.blocks.size(); ++b) {
        if (now_[*in_.blocks.begin(b)] == from && !Shift(b, to)) return false;
      }
      return true;
    }
    return Clump(v, kind < 8 ? NeighbourHome(v) : any);
  }
  bool Clump(int64_t v, int32_t to) {
    const int32_t from = now_[v];
    if (from == to) return false;
    const int64_t size = 2 + Below(int64_t{1} << (1 + Below(6)));
    const bool up = Below(2), down = !up || Below(2);
    std::vector<int64_t> nodes{v};
    ++stamp_;
    mark_[block_of_[v]] = stamp_;
    for (size_t i = 0; i < nodes.size(); ++i) {
      for (const Lists* l : {&in_.preds, &in_.succs}) {
        if ((l == &in_.preds && !up) || (l == &in_.succs && !down)) continue;
        for (const int32_t* u = l->begin(nodes[i]); u != l->end(nodes[i]); ++u) {
          if (mark_[block_of_[*u]] == stamp_ || now_[*u] != from) continue;
          if (static_cast<int64_t>(nodes.size()) >= size) continue;
          mark_[block_of_[*u]] = stamp_;
          nodes.push_back(*u);
        }
      }
    }
    for (int64_t u : nodes) {
      if (!Shift(block_of_[u], to)) return false;
    }
    return true;
  }

  const Input& in_;
  Clock clock_;
  std::vector<int32_t> now_, best_;
  double best_value_;
  std::vector<double> used_;
  std::vector<int64_t> block_of_;
  std::mt19937_64 random_;
  std::vector<int64_t> mark_;
  int64_t stamp_ = 0;
  std::vector<std::pair<int64_t, int32_t>> undo_;
};

}  // namespace

/*! \brief Improve `home` [nodes] (0: the host, d: accelerator d) in place; return its makespan.
 *  \param arrays seconds on an accelerator, on the host, bytes, seconds to move the result (each
 * [nodes]), memory limit [devices], then (ptr, ids) of predecessors, successors, and blocks of
 * nodes that share a device. */
double LatencyAnneal(const ffi::Array<ffi::Tensor>& arrays, const ffi::TensorView& home,
                     int64_t steps, int64_t rounds, double hot, int64_t seed) {
  if (arrays.size() != 11)
    TVM_FFI_THROW(ValueError) << "LatencyAnneal needs 11 arrays, got " << arrays.size();
  const View<double> accelerator(arrays[0], "accelerator"), limit(arrays[4], "limit");
  const Input in{accelerator,
                 View<double>(arrays[1], "host"),
                 View<double>(arrays[2], "memory"),
                 View<double>(arrays[3], "send"),
                 Lists(arrays[5], arrays[6], "preds"),
                 Lists(arrays[7], arrays[8], "succs"),
                 Lists(arrays[9], arrays[10], "blocks"),
                 limit,
                 accelerator.size(),
                 limit.size()};
  const View<int32_t> out(home, "home");
  Annealer annealer(in, {out.data(), out.data() + in.nodes}, seed);
  for (int64_t r = 0; r < rounds; ++r) {
    annealer.Restart();
    annealer.Run(steps, r % 2 ? hot / 5 : hot, 1e-5);
  }
  std::copy(annealer.best().begin(), annealer.best().end(), out.data());
  return annealer.best_value();
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef().def("tvmhet.LatencyAnneal", LatencyAnneal);
}
}  // namespace tvmhet
