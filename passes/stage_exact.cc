/*! \file passes/stage_exact.cc
 *  \brief Branch and bound over sequences of stages, with the exact closed forms of `Problem`.
 *
 *  A node of the search tree is a list of stages that together run a downset; a branch adds one
 * stage on one group. Where each tensor lies is known, so every transfer is charged exactly: over
 * the real pair of groups, once per reading stage. Throughput bound: loads only grow, and a group's
 * replicas are shared out at the end. Latency bound: the longest chain of what is left, at each
 * node's least share of any kernel. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>

#include "stage_table.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

struct Input {
  View<double> time;  // [cuts, cuts, groups]: fastest kernels that fit, inf: impossible
  View<uint64_t> words;
  View<double> latency, per_byte, host_latency, host_per_byte, overhead;
  Devices devices;
  View<int32_t> src;
  View<double> bytes;
  View<uint8_t> is_output;
  Lists readers;
  View<double> tail;  // per node: least seconds from its start to the end of the model
  View<double> wire_per_byte;
  View<uint8_t>
      crosses;  // [wires, 1 + groups, 1 + groups]: from and to the host (first), the groups
  bool overlap, is_latency;
  int64_t nodes, groups, cuts;
};

struct Stage {
  int64_t begin, end, group;
  double busy = 0.0, receive = 0.0, send = 0.0, finish = 0.0,
         home = 0.0;  // home: seconds to return outputs
};

class Search {
 public:
  Search(const Input& in, double upper, int64_t max_steps)
      : best_value(upper),
        in_(in),
        max_steps_(max_steps),
        stage_of_(in.nodes, -1),
        used_(in.groups, 0),
        wire_(in.wire_per_byte.size(), 0.0) {
    const int64_t words = (in.nodes + 63) / 64;
    for (int64_t c = 0; c < in.cuts; ++c) sets_.emplace_back(in.words.data() + c * words, words);
  }
  void Run() { Extend(0); }

  double best_value;
  std::vector<Stage> best;
  std::vector<int64_t> best_replicas;
  int64_t steps = 0;
  bool complete = true;

 private:
  double Load(const Stage& s) const {
    return in_.overlap ? std::max(s.busy, std::max(s.receive, s.send))
                       : s.busy + s.receive + s.send;
  }

  int64_t Width(size_t stage) const { return in_.devices.width[stages_[stage].group]; }

  /*! \brief The least bottleneck when each group's devices are shared among its stages; fills
   * replicas if asked. */
  double Bottleneck(std::vector<int64_t>* replicas) const {
    double worst = WireS();
    if (replicas) replicas->assign(stages_.size(), 1);
    for (int64_t g = 0; g < in_.groups; ++g) {
      std::vector<std::pair<double, int64_t>> of;  // load per replica, stage
      std::vector<int64_t> have;
      int64_t left = in_.devices.room[g];
      for (size_t i = 0; i < stages_.size(); ++i) {
        if (in_.devices.pool[stages_[i].group] != g) continue;
        of.push_back({Load(stages_[i]), i}), have.push_back(1);
        left -= Width(i);
      }
      if (of.empty()) continue;
      std::vector<double> load;
      for (const auto& o : of) load.push_back(o.first);
      while (left > 0) {  // no load below the largest needs fewer devices than these
        const size_t i = std::max_element(load.begin(), load.end()) - load.begin();
        left -= Width(of[i].second);
        if (left < 0) break;
        load[i] = of[i].first / ++have[i];
      }
      worst = std::max(worst, *std::max_element(load.begin(), load.end()));
      for (size_t i = 0; replicas && i < of.size(); ++i) (*replicas)[of[i].second] = have[i];
    }
    return worst;
  }

  double WireS() const {
    return wire_.empty() ? 0.0 : *std::max_element(wire_.begin(), wire_.end());
  }

  void Cross(int64_t from, int64_t to, double bytes) {
    const int64_t n = in_.groups + 1;
    for (size_t w = 0; w < wire_.size(); ++w) {
      if (in_.crosses[(w * n + from + 1) * n + to + 1]) wire_[w] += bytes * in_.wire_per_byte[w];
    }
  }

  double Latency() const {
    double end = WireS();
    for (const Stage& s : stages_) end = std::max(end, s.finish + s.home);
    return end;
  }

  void Extend(int64_t begin) {
    if (begin == in_.cuts - 1) {
      std::vector<int64_t> replicas(stages_.size(), 1);
      const double value = in_.is_latency ? Latency() : Bottleneck(&replicas);
      if (value < best_value * (1 - 1e-12))
        best_value = value, best = stages_, best_replicas = replicas;
      return;
    }
    for (int64_t end = in_.cuts - 1; end > begin;
         --end) {  // large stages first: an early incumbent
      for (int64_t g = 0; g < in_.groups; ++g) {
        const int64_t pool = in_.devices.pool[g], width = in_.devices.width[g];
        if (in_.devices.count[g] <= 0 || used_[pool] + width > in_.devices.room[pool]) continue;
        const double time = in_.time[(begin * in_.cuts + end) * in_.groups + g];
        if (time == HUGE_VAL) continue;
        if (++steps > max_steps_) {
          complete = false;
          return;
        }
        Try(begin, end, g, time);
      }
      if (!complete) return;
    }
  }

  void Try(int64_t begin, int64_t end, int64_t g, double time) {
    const std::vector<Stage> before = stages_;
    const std::vector<double> wire_before = wire_;
    const int32_t me = stages_.size();
    for (int64_t v = 0; v < in_.nodes; ++v) {
      if (sets_[end].Has(v) && !sets_[begin].Has(v)) stage_of_[v] = me;
    }
    Stage s{begin, end, g};
    s.busy = time + in_.overhead[g];
    std::vector<double> from(stages_.size(), -1.0);
    double from_host = 0.0;
    for (int64_t e = 0; e < in_.src.size(); ++e) {
      const int64_t u = in_.src[e];
      const bool mine = u >= 0 && sets_[end].Has(u) && !sets_[begin].Has(u);
      if (mine && in_.is_output[e]) {
        s.home += in_.host_latency[g] + in_.bytes[e] * in_.host_per_byte[g];
        Cross(g, -1, in_.bytes[e]);
      }
      if (mine) continue;
      bool reads = false;
      for (const int32_t* r = in_.readers.begin(e); r != in_.readers.end(e); ++r) {
        reads |= sets_[end].Has(*r) && !sets_[begin].Has(*r);
      }
      if (!reads) continue;
      if (u < 0) {
        from_host += in_.host_latency[g] + in_.bytes[e] * in_.host_per_byte[g];
        Cross(-1, g, in_.bytes[e]);
        continue;
      }
      const int32_t a = stage_of_[u];
      const int64_t link = stages_[a].group * in_.groups + g;
      Cross(stages_[a].group, g, in_.bytes[e]);
      const double move = in_.latency[link] + in_.bytes[e] * in_.per_byte[link];
      from[a] = std::max(from[a], 0.0) + move;
      stages_[a].send += move;
      s.receive += move;
    }
    s.receive += from_host;
    s.send += s.home;
    double start = from_host;
    for (size_t a = 0; a < from.size(); ++a) {
      if (from[a] >= 0) start = std::max(start, stages_[a].finish + from[a]);
    }
    s.finish = start + s.busy;
    stages_.push_back(s);
    used_[in_.devices.pool[g]] += in_.devices.width[g];
    if (Bound(end) < best_value * (1 - 1e-12)) Extend(end);
    used_[in_.devices.pool[g]] -= in_.devices.width[g];
    stages_ = before;
    wire_ = wire_before;
    for (int64_t v = 0; v < in_.nodes; ++v) {
      if (stage_of_[v] == me) stage_of_[v] = -1;
    }
  }

  double Bound(int64_t end) const {
    if (!in_.is_latency) return Bottleneck(nullptr);
    double bound = Latency();
    for (int64_t e = 0; e < in_.src.size(); ++e) {
      const int64_t u = in_.src[e];
      if (u < 0 || !sets_[end].Has(u)) continue;
      for (const int32_t* r = in_.readers.begin(e); r != in_.readers.end(e); ++r) {
        if (!sets_[end].Has(*r))
          bound = std::max(bound, stages_[stage_of_[u]].finish + in_.tail[*r]);
      }
    }
    for (int64_t v = 0; v < in_.nodes; ++v) {
      if (!sets_[end].Has(v)) bound = std::max(bound, in_.tail[v]);
    }
    return bound;
  }

  const Input& in_;
  int64_t max_steps_;
  std::vector<Bits> sets_;
  std::vector<Stage> stages_;
  std::vector<int32_t> stage_of_;
  std::vector<int64_t> used_;
  std::vector<double> wire_;  // seconds of each
};

}  // namespace

/*! \brief Find the best sequence of stages with an objective below `upper`, trying at most
 * `max_steps` stages.
 *  \param arrays time [cuts, cuts, groups], words of the cuts, link latency and s/byte [groups,
 * groups], host latency and s/byte [groups], overhead [groups], `Devices` [groups, 4], tensor
 * source, bytes, is_output, reader (ptr, ids), tail, s/byte of wires, ways that cross them [wires,
 * 1 + groups, 1 + groups].
 *  \return (stages, complete, steps): (from cut, to cut, group, replicas) of each stage, empty if
 * nothing beats `upper`; `complete`: the search proves that. */
ffi::Array<ffi::Any> StageExact(int64_t nodes, const ffi::Array<ffi::Tensor>& arrays, bool overlap,
                                bool latency, double upper, int64_t max_steps) {
  if (arrays.size() != 16)
    TVM_FFI_THROW(ValueError) << "StageExact needs 16 arrays, got " << arrays.size();
  const View<uint64_t> words(arrays[1], "words");
  const Devices devices(arrays[7]);
  const Input in{View<double>(arrays[0], "time"),
                 words,
                 View<double>(arrays[2], "latency"),
                 View<double>(arrays[3], "per_byte"),
                 View<double>(arrays[4], "host_latency"),
                 View<double>(arrays[5], "host_per_byte"),
                 View<double>(arrays[6], "overhead"),
                 devices,
                 View<int32_t>(arrays[8], "src"),
                 View<double>(arrays[9], "bytes"),
                 View<uint8_t>(arrays[10], "is_output"),
                 Lists(arrays[11], arrays[12], "readers"),
                 View<double>(arrays[13], "tail"),
                 View<double>(arrays[14], "wires"),
                 View<uint8_t>(arrays[15], "ways"),
                 overlap,
                 latency,
                 nodes,
                 devices.size(),
                 words.size() / ((nodes + 63) / 64)};
  Search search(in, upper, max_steps);
  search.Run();
  std::vector<int64_t> out;
  for (size_t i = 0; i < search.best.size(); ++i) {
    const Stage& s = search.best[i];
    const int64_t four[4] = {s.begin, s.end, s.group, search.best_replicas[i]};
    out.insert(out.end(), four, four + 4);
  }
  return {ffi::Array<int64_t>(out.begin(), out.end()), search.complete, search.steps};
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.StageExact", StageExact); }
}  // namespace tvmhet
