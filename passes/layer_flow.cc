/*! \file passes/layer_flow.cc
 *  \brief Which layers each node of a cluster holds, so that the most tokens flow through all
 * layers.
 *
 *      source ──► [0..7] a100 ──► [8..11] t4 ──► ... ──► sink       every hop is a link with a
 * capacity [0..7] l4 x2 ─┘
 *
 *  Node i that holds k layers passes at most rate[i][k] tokens/s. A token may go from i to j where
 * j continues: j starts where i ends, or (with `partial`) anywhere inside what j holds. The value
 * of a layout is a maximum flow. Annealing moves one node, swaps two, or shifts a boundary that
 * several nodes share. */
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "arrays.h"
#include "max_flow.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

constexpr double kHeat[] = {
    0.1, 0.5, 0.02};  // starting temperatures of the rounds, as shares of the best flow

struct Cluster {
  View<double> rate, from_source, to_sink,
      link;  // rate [nodes, most + 1]; link [nodes, nodes], 0: none
  int64_t layers, nodes, most;
  bool partial;

  bool Continues(int32_t end, int32_t start, int32_t size) const {
    return partial ? start <= end && end < start + size : start == end;
  }
};

struct Layout {
  std::vector<int32_t> start, size;  // size 0: the node is not used
};

class Search {
 public:
  Search(const Cluster& c, Layout start, int64_t seed)
      : c_(c), now_(std::move(start)), random_(seed) {
    best_ = now_;
    best_flow_ = Flow(now_);
  }

  double Flow(const Layout& l) {
    const int64_t n = c_.nodes;
    flow_.Reset(2 * n + 2);
    for (int64_t i = 0; i < n; ++i) {
      if (l.size[i] == 0) continue;
      const int32_t end = l.start[i] + l.size[i];
      flow_.Add(i, n + i, c_.rate[i * (c_.most + 1) + l.size[i]]);
      if (l.start[i] == 0 && c_.from_source[i] > 0) flow_.Add(2 * n, i, c_.from_source[i]);
      if (end == c_.layers && c_.to_sink[i] > 0) flow_.Add(n + i, 2 * n + 1, c_.to_sink[i]);
      for (int64_t j = 0; j < n; ++j) {
        if (i == j || l.size[j] == 0 || c_.link[i * n + j] <= 0) continue;
        if (c_.Continues(end, l.start[j], l.size[j])) flow_.Add(n + i, j, c_.link[i * n + j]);
      }
    }
    return flow_.Run(2 * n, 2 * n + 1);
  }

  void Run(int64_t steps, double hot, double cold) {
    const double unit = std::max(best_flow_, 1e-9);
    double score = Score(now_, Flow(now_));
    for (int64_t i = 0; i < steps; ++i) {
      const double heat = unit * hot * std::pow(cold / hot, static_cast<double>(i) / steps);
      const Layout before = now_;
      if (!Propose()) {
        now_ = before;
        continue;
      }
      const double flow = Flow(now_);
      const double next = Score(now_, flow);
      if (next >= score || Chance() < std::exp((next - score) / heat)) {
        score = next;
        if (flow > best_flow_ * (1 + 1e-12)) best_flow_ = flow, best_ = now_;
      } else {
        now_ = before;
      }
    }
  }
  void Restart() { now_ = best_; }
  const Layout& best() const { return best_; }
  double best_flow() const { return best_flow_; }

 private:
  double Chance() { return std::uniform_real_distribution<double>(0.0, 1.0)(random_); }
  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool Valid(int64_t i) const {
    return now_.size[i] >= 1 && now_.size[i] <= c_.most && now_.start[i] >= 0 &&
           now_.start[i] + now_.size[i] <= c_.layers &&
           c_.rate[i * (c_.most + 1) + now_.size[i]] > 0;
  }

  /*! \brief The flow, and a little of what the layers could carry if every boundary met: it leads
   * across plateaus. */
  double Score(const Layout& l, double flow) {
    cover_.assign(c_.layers, 0.0);
    for (int64_t i = 0; i < c_.nodes; ++i) {
      for (int32_t x = 0; x < l.size[i]; ++x)
        cover_[l.start[i] + x] += c_.rate[i * (c_.most + 1) + l.size[i]];
    }
    double least = HUGE_VAL, mean = 0.0;
    for (double x : cover_)
      least = std::min(least, x), mean += std::min(x, 1.2 * best_flow_ + 1e-9) / c_.layers;
    return flow + 0.2 * std::min(least, 2 * best_flow_) + 0.1 * mean;
  }

  bool Propose() {
    const int64_t i = Below(c_.nodes), kind = Below(10);
    if (kind < 2) {
      now_.size[i] = 1 + Below(c_.most);
      now_.start[i] = Below(c_.layers);
      return Valid(i);
    }
    if (kind < 5) {  // take over another node's interval, or the place next to it
      const int64_t j = Below(c_.nodes);
      if (now_.size[j] == 0) return false;
      now_.size[i] = kind == 2 ? now_.size[j] : static_cast<int32_t>(1 + Below(c_.most));
      now_.start[i] = kind == 2   ? now_.start[j]
                      : kind == 3 ? now_.start[j] + now_.size[j]
                                  : now_.start[j] - now_.size[i];
      return Valid(i);
    }
    if (kind < 7) {
      const int64_t j = Below(c_.nodes);
      std::swap(now_.start[i], now_.start[j]);
      std::swap(now_.size[i], now_.size[j]);
      return (now_.size[i] == 0 || Valid(i)) && (now_.size[j] == 0 || Valid(j));
    }
    if (now_.size[i] == 0) return false;
    // Shift a boundary: all nodes that end (and start) there, or only those on one random side with
    // probability 1/4.
    const int32_t at = now_.start[i] + (kind == 7 ? 0 : now_.size[i]), by = Below(2) ? 1 : -1;
    for (int64_t j = 0; j < c_.nodes; ++j) {
      if (now_.size[j] == 0 || (kind == 9 && j != i && Below(4) == 0)) continue;
      if (now_.start[j] + now_.size[j] == at)
        now_.size[j] += by;
      else if (now_.start[j] == at)
        now_.start[j] += by, now_.size[j] -= by;
      else
        continue;
      if (!Valid(j)) return false;
    }
    return true;
  }

  const Cluster& c_;
  Layout now_, best_;
  double best_flow_;
  std::mt19937_64 random_;
  MaxFlow flow_;
  std::vector<double> cover_;
};

}  // namespace

/*! \brief Improve a layout in place: start [nodes], size [nodes] (0: unused). Returns its flow in
 * tokens/s.
 *  \param arrays rate [nodes, most + 1], source link [nodes], sink link [nodes], link [nodes,
 * nodes]; 0: not possible.
 *  \param rounds each anneals `steps` moves from the best layout; 0 rounds only values the layout.
 */
double LayerFlow(const ffi::Array<ffi::Tensor>& arrays, int64_t layers, bool partial,
                 const ffi::TensorView& start, const ffi::TensorView& size, int64_t steps,
                 int64_t rounds, int64_t seed) {
  const View<int32_t> first(start, "start"), count(size, "size");
  const View<double> rate(arrays[0], "rate");
  const int64_t nodes = first.size();
  const Cluster cluster{rate,
                        View<double>(arrays[1], "from_source"),
                        View<double>(arrays[2], "to_sink"),
                        View<double>(arrays[3], "link"),
                        layers,
                        nodes,
                        rate.size() / nodes - 1,
                        partial};
  Search search(cluster,
                {{first.data(), first.data() + nodes}, {count.data(), count.data() + nodes}}, seed);
  for (int64_t r = 0; r < rounds; ++r) {
    search.Restart();
    search.Run(steps, kHeat[r % 3], 1e-4);
  }
  std::copy(search.best().start.begin(), search.best().start.end(), first.data());
  std::copy(search.best().size.begin(), search.best().size.end(), count.data());
  return search.best_flow();
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.LayerFlow", LayerFlow); }
}  // namespace tvmhet
