/*! \file passes/segment_chain.cc
 *  \brief The quickest chain of accelerator calls and host steps through a graph's segments.
 *
 *  A gate is a core node that is ordered with every other core node; the core nodes between two
 * gates are a segment. A call that holds a gate is a barrier: all of the core before it has ended
 * when it starts, all of the core behind it starts when it has ended. It begins within a segment,
 * or at its first gate, and ends within one:
 *
 *      segment      gate  segment       gate  segment
 *      [done|-------------- call -------------|rest]
 *            a                                b
 *
 *  Its seconds are those of what is done at b less those of what is done at a, its first tensors
 * are a matter of a, its last ones of b, and it fits if the bytes at b less those at a do. So the
 * best start for every end is a minimum over a range of bytes. Between two barriers, the rest of a
 * segment runs on the host and in calls of its own. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>

#include "arrays.h"
#include "segment_states.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

using segments::Input;
using segments::Segments;
using segments::State;

/*! \brief The least of values whose key is at least a given one; a tree over the keys' ranks. */
class Least {
 public:
  explicit Least(int64_t num_ranks) : size_(num_ranks), best_(num_ranks + 1, {HUGE_VAL, -1}) {}
  using Entry = std::pair<double, int64_t>;
  void Add(int64_t rank, Entry e) {
    for (int64_t i = size_ - rank; i <= size_; i += i & -i) best_[i] = std::min(best_[i], e);
  }
  Entry From(int64_t rank) const {
    Entry out{HUGE_VAL, -1};
    for (int64_t i = size_ - rank; i > 0; i -= i & -i) out = std::min(out, best_[i]);
    return out;
  }

 private:
  int64_t size_;
  std::vector<Entry> best_;
};

struct Step {
  int64_t from = -1;
  int64_t calls = 0;
};

class Chain : public Segments {
 public:
  using Segments::Segments;

  /*! \brief The length of the shortest path; `path` gets (from, to) of its calls. */
  double Run(std::vector<int64_t>* path) {
    const int64_t num = states_.size(), rows = in_.count + 1;
    const std::vector<double> never(num, HUGE_VAL);
    arrived_.assign(rows, never), best_.assign(rows, never);
    came_.assign(rows, std::vector<Step>(num)), gap_.assign(rows, std::vector<Step>(num));
    opened_.assign(rows, Least(num));
    for (auto& row : arrived_) row[0] = 0.0;
    int64_t open_from = 0;
    for (int64_t i = 0; i < NumSegments(); ++i) {
      if (i > 0 && !crossings_.empty()) {
        opened_.assign(rows, Least(num));
        for (int64_t before = open_from; before < i; ++before) Open(before, i);
      }
      if (i > 0) Arrive(i);
      if (Barred(i)) {  // no call holds all of it
        open_from = i;
        opened_.assign(rows, Least(num));
      }
      Gaps(i);
      if (i + 1 < NumSegments() && crossings_.empty()) Open(i, i);
    }
    int64_t k = in_.count, at = num - 1;
    const double bound = best_[k][at];
    while (bound < HUGE_VAL && at > 0) {
      const Step gap = gap_[k][at];
      if (gap.calls) path->insert(path->end(), {gap.from, at});
      k -= gap.calls, at = gap.from;
      const Step barrier = came_[k][at];
      if (barrier.from < 0) break;
      if (barrier.calls) path->insert(path->end(), {barrier.from, at});
      k -= barrier.calls, at = barrier.from;
    }
    return bound;
  }

 private:
  /*! \brief Paths into a segment: by its gate on the host, and by calls that hold its gate. */
  void Arrive(int64_t i) {
    const int64_t before = starts_[i] - 1, gate = First(i) - 1;
    for (int64_t k = 0; k <= in_.count; ++k) {
      arrived_[k][starts_[i]] = best_[k][before] + in_.host[gate];
      came_[k][starts_[i]] = {before, 0};
    }
    for (int64_t b = starts_[i]; b < starts_[i + 1]; ++b) {
      const State& s = states_[b];
      if (s.out_s == HUGE_VAL) continue;
      const double least = s.end_bytes - in_.limit * (1 + 1e-9) - 1e-9;
      const int64_t rank = std::lower_bound(keys_.begin(), keys_.end(), least) - keys_.begin();
      Least::Entry first{HUGE_VAL, -1};
      for (int64_t k = 1; k <= in_.count; ++k) {
        first = std::min(first, opened_[k - 1].From(rank));
        const auto [value, from] = first;
        if (from < 0 || value + s.end_s + s.out_s >= arrived_[k][b]) continue;
        arrived_[k][b] = std::max(0.0, value + s.end_s + s.out_s);
        came_[k][b] = {from, 1};
      }
    }
  }

  /*! \brief Let calls begin at a segment's states that end in segment j. */
  void Open(int64_t i, int64_t j) {
    for (int64_t a = starts_[i]; a < starts_[i + 1]; ++a) {
      const State& s = states_[a];
      if (s.in_s == HUGE_VAL || best_[in_.count][a] >= in_.most) continue;
      const double first_s = s.in_s + Across(s, j) - s.start_s;
      const int64_t rank =
          std::lower_bound(keys_.begin(), keys_.end(), s.start_bytes) - keys_.begin();
      for (int64_t k = 0; k < in_.count; ++k) {
        if (best_[k][a] < in_.most && (k == 0 || best_[k][a] < best_[k - 1][a]))
          opened_[k].Add(rank, {best_[k][a] + first_s, a});
      }
    }
  }

  /*! \brief Paths within a segment: some of it on the host, and in calls without a gate. */
  void Gaps(int64_t i) {
    for (int64_t k = 0; k <= in_.count; ++k) {
      for (int64_t a = starts_[i]; a < starts_[i + 1]; ++a) {
        if (arrived_[k][a] < best_[k][a]) best_[k][a] = arrived_[k][a], gap_[k][a] = {a, 0};
      }
    }
    const int64_t width = Width(i);
    const double slower = Slower(i);
    for (int64_t a = starts_[i]; a < starts_[i + 1]; ++a) {
      if (arrived_[in_.count][a] < in_.most) GapsFrom(i, a, width, slower);
    }
  }

  /*! \brief Offer paths from state a to all states of its segment that hold more. */
  void GapsFrom(int64_t i, int64_t a, int64_t width, double slower) {
    const int64_t n = Last(i) - First(i);
    const Chains chains = ChainsFrom(i, states_[a].mask);
    const double room = in_.most - arrived_[in_.count][a];
    std::vector<uint64_t> layer{states_[a].mask};
    while (!layer.empty()) {
      std::vector<uint64_t> next;
      for (uint64_t mask : layer) {
        for (int64_t b = 0; b < n; ++b) {
          const uint64_t grown = mask | uint64_t{1} << b;
          if (grown != mask && !(in_.above[First(i) + b] & ~mask)) next.push_back(grown);
        }
      }
      std::sort(next.begin(), next.end());
      next.erase(std::unique(next.begin(), next.end()), next.end());
      layer.clear();
      for (uint64_t mask : next) {
        if (Reach(i, a, index_[i].at(mask), chains, width, slower) < room) layer.push_back(mask);
      }
    }
  }

  /*! \brief Offer paths from state a to b of one segment; returns the seconds that they take at
   * least. At any time at most `width` calls and nodes of the host run, and the host is `slower`.
   */
  double Reach(int64_t i, int64_t a, int64_t b, const Chains& chains, int64_t width,
               double slower) {
    double alone_s = 0.0, beside_s = 0.0, inner_s = 0.0;
    for (uint64_t rest = states_[b].mask & ~states_[a].mask; rest; rest &= rest - 1) {
      const int64_t v = __builtin_ctzll(rest);
      const double sent = (leaves_[First(i) + v] & ~states_[b].mask) ? in_.send[First(i) + v] : 0.0;
      alone_s = std::max(alone_s, chains.alone[v]);
      beside_s = std::max(beside_s, std::min(chains.host[v], chains.call[v] + sent));
      inner_s = std::max(inner_s, std::min(chains.host[v], chains.call[v]));
    }
    const double work = states_[b].end_s - states_[a].end_s;
    double least = alone_s;  // grows with b
    for (int64_t calls = 0; calls <= std::min(in_.count, width); ++calls) {
      const double rate = slower < 1 ? width / slower : calls + (width - calls) / slower;
      const double gap_s = calls ? std::max(beside_s, work / rate) : alone_s;
      if (calls) least = std::min(least, std::max(inner_s, work / rate));
      for (int64_t k = calls; k <= in_.count; ++k) {
        if (arrived_[k - calls][a] + gap_s >= best_[k][b]) continue;
        best_[k][b] = arrived_[k - calls][a] + gap_s;
        gap_[k][b] = {a, calls};
      }
    }
    return least;
  }

  std::vector<std::vector<double>> arrived_, best_;  // by calls, state: before, after gaps
  std::vector<std::vector<Step>> came_, gap_;
  std::vector<Least> opened_;
};

}  // namespace

/*! \brief Return (bound, calls): four numbers per call of the shortest path, segment and mask where
 * it begins and ends.
 *  \param arrays seconds on an accelerator and on the host, bytes, seconds to move the result;
 * seconds and bytes of each segment that only calls hold which hold all of it; the first node of
 * each segment; the nodes of its segment before each node, as a mask; (ptr, ids) of predecessors,
 * successors and nodes that share a device. Nodes are in order, each gate just before its segment;
 * a segment has up to 62. \param limit bytes of an accelerator. \param most paths that are not
 * shorter are left out. \param count how many accelerators. */
ffi::Array<ffi::Any> SegmentChain(const ffi::Array<ffi::Tensor>& arrays, double limit, double most,
                                  int64_t count) {
  if (arrays.size() != 14)
    TVM_FFI_THROW(ValueError) << "SegmentChain needs 14 arrays, got " << arrays.size();
  const Input in{View<double>(arrays[0], "accelerator"),
                 View<double>(arrays[1], "host"),
                 View<double>(arrays[2], "memory"),
                 View<double>(arrays[3], "send"),
                 View<double>(arrays[4], "skipped_s"),
                 View<double>(arrays[5], "skipped_bytes"),
                 View<int32_t>(arrays[6], "first"),
                 View<uint64_t>(arrays[7], "above"),
                 Lists(arrays[8], arrays[9], "preds"),
                 Lists(arrays[10], arrays[11], "succs"),
                 Lists(arrays[12], arrays[13], "mates"),
                 limit,
                 most,
                 count};
  Chain chain(in);
  std::vector<int64_t> path;
  const double bound = chain.Run(&path);
  ffi::Array<int64_t> calls;
  for (int64_t s : path) {
    calls.push_back(chain.states()[s].segment);
    calls.push_back(chain.states()[s].mask);
  }
  return {bound, calls};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef().def("tvmhet.SegmentChain", SegmentChain);
}
}  // namespace tvmhet
