/*! \file passes/unit_search.cc
 *  \brief The fastest pipeline on every small set of devices: what a fleet is put together from.
 *
 *      used (a100, t4):  (1, 0) 1.2 ms    (0, 1) 4.1 ms    (1, 1) 1.1 ms    (0, 2) 2.2 ms ...
 *
 *  A label is a pipeline up to a cut: devices used, group and replicas of its last stage, whose
 * sends are added once the next group is known. A group may be teams that take their devices from
 * another one's. Labels of one key (devices used, last group, last
 * replicas) are compared by the slowest closed stage, the load of the open one and, where a latency
 * limit is set, the seconds of one input so far. A label is dropped where devices that hold the
 * whole model alone would do more, each by itself, than its slowest stage lets its devices do. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

constexpr double kSame = 1e-9;  // relative difference that means nothing

struct Table {
  View<double> time, moves, latency, per_byte, host_latency, host_per_byte, overhead;
  bool overlap;
  int64_t num_cuts, groups;

  const double* Moves(int64_t b, int64_t c) const { return moves.data() + 8 * (b * num_cuts + c); }
  double ComputeS(int64_t b, int64_t c, int64_t g) const {
    return time[(b * num_cuts + c) * groups + g] + overhead[g];
  }
  double ReceiveS(int64_t b, int64_t c, int64_t before, int64_t g) const {
    const double* m = Moves(b, c);
    const double host = m[4] * host_latency[g] + m[5] * host_per_byte[g];
    return before < 0
               ? host
               : host + m[0] * latency[before * groups + g] + m[1] * per_byte[before * groups + g];
  }
  double SendS(int64_t b, int64_t c, int64_t g, int64_t next) const {
    const double* m = Moves(b, c);
    const double host = m[6] * host_latency[g] + m[7] * host_per_byte[g];
    return next < 0 ? host
                    : host + m[2] * latency[g * groups + next] + m[3] * per_byte[g * groups + next];
  }
  double LoadS(double compute, double receive, double send) const {
    return overlap ? std::max(compute, std::max(receive, send)) : compute + receive + send;
  }
};

struct Label {
  int64_t used;  // devices of each group that has its own, in mixed radix
  int32_t devices, group, replicas, from_cut, from_label;
  double closed_s, compute_s, receive_s, latency_s;
  double apart_per_s;  // results of its devices, each alone
  bool dead = false;
};

class Search {
 public:
  Search(const Table& t, const View<int64_t>& limits, const View<int64_t>& alone,
         const View<int64_t>& pool, const View<int64_t>& degree, int64_t max_devices,
         double latency_limit_s, int64_t max_labels)
      : t_(t),
        limits_(limits),
        pool_(pool),
        degree_(degree),
        max_devices_(max_devices),
        latency_limit_s_(latency_limit_s),
        max_labels_(max_labels),
        at_(t.num_cuts),
        keys_(t.num_cuts) {
    int64_t next = 1;
    for (int64_t g = 0; g < t.groups; ++g) {  // teams come after the group that has their devices
      const bool own = pool[g] == g;
      radix_.push_back(own ? next : radix_[pool[g]] * degree[g]);
      if (own) next *= limits[g] + 1;
      alone_per_s_.push_back(own ? (alone[g] ? AlonePerS(g) : 0.0)
                                 : alone_per_s_[pool[g]] * degree[g]);
    }
  }

  void Run() {
    at_[0].push_back({0, 0, -1, 1, -1, -1, 0.0, 0.0, 0.0, 0.0, 0.0, false});
    for (int64_t b = 0; b + 1 < t_.num_cuts; ++b) {
      Thin(b);
      for (int64_t c = b + 1; c < t_.num_cuts; ++c) {
        for (int64_t g = 0; g < t_.groups; ++g) {
          if (limits_[pool_[g]] >= degree_[g] &&
              t_.time[(b * t_.num_cuts + c) * t_.groups + g] < HUGE_VAL)
            Extend(b, c, g);
        }
      }
    }
  }

  /*! \brief For each set of devices the fastest pipeline: (stages, seconds between results). */
  ffi::Array<ffi::Any> Best() const {
    const int64_t end = t_.num_cuts - 1;
    std::vector<std::pair<int64_t, int64_t>> best;  // (used, label), ascending
    std::unordered_map<int64_t, int64_t> of;
    for (size_t i = 0; i < at_[end].size(); ++i) {
      const Label& l = at_[end][i];
      if (l.dead) continue;
      auto [it, fresh] = of.emplace(l.used, i);
      if (!fresh && Period(end, l) < Period(end, at_[end][it->second])) it->second = i;
    }
    best.assign(of.begin(), of.end());
    std::sort(best.begin(), best.end());
    ffi::Array<ffi::Any> out;
    for (const auto& [used, label] : best) {
      const std::vector<int64_t> stages = Trace(label);
      out.push_back(ffi::Array<ffi::Any>{ffi::Array<int64_t>(stages.begin(), stages.end()),
                                         Period(end, at_[end][label])});
    }
    return out;
  }

  bool truncated = false;
  int64_t steps = 0;

 private:
  /*! \brief Results per second of one device that runs the whole model; 0 where it cannot. */
  double AlonePerS(int64_t g) const {
    const int64_t end = t_.num_cuts - 1;
    if (limits_[g] == 0 || !(t_.time[end * t_.groups + g] < HUGE_VAL)) return 0.0;
    const double compute = t_.ComputeS(0, end, g), receive = t_.ReceiveS(0, end, -1, g);
    const double send = t_.SendS(0, end, g, -1), load = t_.LoadS(compute, receive, send);
    return compute + receive + send <= latency_limit_s_ && load > 0 ? 1.0 / load : 0.0;
  }

  double Period(int64_t cut, const Label& l) const {
    const double send = t_.SendS(l.from_cut, cut, l.group, -1);
    return std::max(l.closed_s, t_.LoadS(l.compute_s, l.receive_s, send) / l.replicas);
  }

  /*! \brief Replicas of a group that fit into what a pipeline has left. */
  int64_t Free(const Label& l, int64_t g) const {
    const int64_t pool = pool_[g], used = l.used / radix_[pool] % (limits_[pool] + 1);
    return std::min<int64_t>(limits_[pool] - used, max_devices_ - l.devices) / degree_[g];
  }

  void Extend(int64_t b, int64_t c, int64_t g) {
    const double compute = t_.ComputeS(b, c, g);
    const bool last = c + 1 == t_.num_cuts;
    for (size_t i = 0; i < at_[b].size(); ++i) {
      const Label from = at_[b][i];
      if (from.dead) continue;
      ++steps;
      const double receive = t_.ReceiveS(b, c, from.group, g);
      double closed = from.closed_s;
      if (from.group >= 0) {
        const double send = t_.SendS(from.from_cut, b, from.group, g);
        closed = std::max(closed, t_.LoadS(from.compute_s, from.receive_s, send) / from.replicas);
      }
      const double latency =
          from.latency_s + compute + receive + (last ? t_.SendS(b, c, g, -1) : 0.0);
      if (latency > latency_limit_s_ * (1.0 + 1e-12)) continue;
      const int64_t free = Free(from, g);
      const double busy = t_.LoadS(compute, receive, 0.0);
      for (int64_t r = 1; r <= free; ++r) {
        const double apart = from.apart_per_s + r * alone_per_s_[g];
        if (std::max(closed, busy / r) * apart > 1.0 + kSame) continue;
        Insert(c, {from.used + r * radix_[g], static_cast<int32_t>(from.devices + r * degree_[g]),
                   static_cast<int32_t>(g), static_cast<int32_t>(r), static_cast<int32_t>(b),
                   static_cast<int32_t>(i), closed, compute, receive, latency, apart, false});
      }
    }
  }

  bool Dominates(const Label& a, const Label& b) const {
    return a.closed_s <= b.closed_s && a.compute_s + a.receive_s <= b.compute_s + b.receive_s &&
           (!t_.overlap || (a.compute_s <= b.compute_s && a.receive_s <= b.receive_s)) &&
           (latency_limit_s_ == HUGE_VAL || a.latency_s <= b.latency_s);
  }

  void Insert(int64_t cut, const Label& made) {
    const int64_t key = (made.used * t_.groups + made.group) * (max_devices_ + 1) + made.replicas;
    std::vector<int32_t>& same = keys_[cut][key];
    for (int32_t i : same) {
      if (Dominates(at_[cut][i], made)) return;
    }
    size_t kept = 0;
    for (int32_t i : same) {
      if (Dominates(made, at_[cut][i])) {
        at_[cut][i].dead = true;
      } else {
        same[kept++] = i;
      }
    }
    same.resize(kept);
    same.push_back(static_cast<int32_t>(at_[cut].size()));
    at_[cut].push_back(made);
  }

  /*! \brief Keep at most max_labels_ at a cut: the best of each set of devices first, then their
   * second best ... */
  void Thin(int64_t cut) {
    std::vector<Label>& labels = at_[cut];
    std::vector<int64_t> order;
    for (size_t i = 0; i < labels.size(); ++i) {
      if (!labels[i].dead) order.push_back(i);
    }
    if (static_cast<int64_t>(order.size()) <= max_labels_) return;
    truncated = true;
    auto so_far = [&](int64_t i) {
      const Label& l = labels[i];
      return std::max(l.closed_s, (l.compute_s + l.receive_s) / l.replicas);
    };
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {
      if (labels[i].used != labels[j].used) return labels[i].used < labels[j].used;
      return so_far(i) < so_far(j);
    });
    std::vector<std::pair<double, int64_t>> rank;
    int64_t place = 0;
    for (size_t k = 0; k < order.size(); ++k) {
      place = k > 0 && labels[order[k]].used == labels[order[k - 1]].used ? place + 1 : 0;
      rank.push_back({place * 1e3 + labels[order[k]].devices, order[k]});
    }
    std::stable_sort(rank.begin(), rank.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t k = max_labels_; k < rank.size(); ++k) labels[rank[k].second].dead = true;
  }

  std::vector<int64_t> Trace(int64_t label) const {
    std::vector<int64_t> out;
    for (int64_t c = t_.num_cuts - 1; c != 0;) {
      const Label& l = at_[c][label];
      const int64_t four[4] = {l.from_cut, c, l.group, l.replicas};
      out.insert(out.begin(), four, four + 4);
      label = l.from_label;
      c = four[0];
    }
    return out;
  }

  const Table& t_;
  const View<int64_t>& limits_;
  const View<int64_t>& pool_;
  const View<int64_t>& degree_;
  int64_t max_devices_;
  double latency_limit_s_;
  int64_t max_labels_;
  std::vector<std::vector<Label>> at_;
  std::vector<std::unordered_map<int64_t, std::vector<int32_t>>> keys_;
  std::vector<int64_t> radix_;
  std::vector<double> alone_per_s_;
};

}  // namespace

/*! \brief Find the fastest pipeline on every set of up to `max_devices` devices.
 *  \param arrays as for StageSearch: time, moves, link latency and s/byte, host latency and s/byte,
 * overhead.
 *  \param limits the most devices of each group in one pipeline; of teams not read.
 *  \param alone for each group 1 if one of its devices may be a pipeline by itself, else 0.
 *  \param pool the group whose devices each group takes: itself, or for teams one before it.
 *  \param degree how many of them one replica takes.
 *  \return ([stages, seconds] for each set of devices that may do better together than each device
 * alone, in mixed-radix order; whether labels were
 * dropped; steps). `stages` holds (from cut, to cut, group, replicas) of each stage. */
ffi::Array<ffi::Any> UnitSearch(const ffi::Array<ffi::Tensor>& arrays,
                                const ffi::TensorView& limits, const ffi::TensorView& alone,
                                const ffi::TensorView& pool, const ffi::TensorView& degree,
                                int64_t max_devices, bool overlap, double latency_limit_s,
                                int64_t max_labels) {
  const View<int64_t> limit(limits, "limits"), single(alone, "alone");
  const View<int64_t> pools(pool, "pool"), degrees(degree, "degree");
  const View<double> moves(arrays[1], "moves");
  const Table t{View<double>(arrays[0], "time"),
                moves,
                View<double>(arrays[2], "latency"),
                View<double>(arrays[3], "per_byte"),
                View<double>(arrays[4], "host_latency"),
                View<double>(arrays[5], "host_per_byte"),
                View<double>(arrays[6], "overhead"),
                overlap,
                std::llround(std::sqrt(moves.size() / 8.0)),
                limit.size()};
  Search search(t, limit, single, pools, degrees, max_devices, latency_limit_s, max_labels);
  search.Run();
  return {search.Best(), search.truncated, search.steps};
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.UnitSearch", UnitSearch); }
}  // namespace tvmhet
