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
#include <numeric>
#include <unordered_map>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

constexpr size_t kMaxCrossings = 300'000'000;  // tensors, starts, segments: beyond, none is counted

struct Input {
  View<double> accelerator, host, memory, send;  // inf seconds: cannot run there
  View<double> skipped_s, skipped_bytes;         // per segment: work that only whole segments hold
  View<int32_t> first;        // first node of each segment; before it, but for the first, its gate
  View<uint64_t> above;       // nodes of its segment that come before each node
  Lists preds, succs, mates;  // mates: nodes that share a device with node v
  double limit, most;         // bytes of an accelerator; paths longer than this do not matter
  int64_t count;              // accelerators
};

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

/*! \brief What is done at a point of the chain: all before a segment, its gate, and `mask` of it.
 */
struct State {
  int64_t segment;
  uint64_t mask;
  double start_s, start_bytes, in_s;  // as the start of a call: done, and its first tensors
  double end_s, end_bytes, out_s;     // as the end of a call
};

/*! \brief A tensor that is read behind the gate after its maker. Segments count their gates. */
struct Crossing {
  int64_t maker, made;  // node, its segment
  struct Reader {
    int64_t at, held;  // its segment; a call that ends in this segment or later holds it
  };
  std::vector<Reader> readers;
  int64_t open = -1;  // a call that ends in this segment or earlier lacks a reader
};

struct Step {
  int64_t from = -1;
  int64_t calls = 0;
};

class Chain {
 public:
  explicit Chain(const Input& in) : in_(in), nodes_(in.accelerator.size()) {
    double seconds = 0.0, bytes = 0.0, skipped_s = 0.0, skipped_bytes = 0.0;
    for (int64_t i = 0; i < Segments(); ++i) {
      starts_.push_back(states_.size());
      if (i > 0) Count(in_.first[i] - 1, &seconds, &bytes);
      Enumerate(i, seconds, bytes, skipped_s, skipped_bytes);
      for (int64_t v = First(i); v < Last(i); ++v) Count(v, &seconds, &bytes);
      skipped_s += in_.skipped_s[i], skipped_bytes += in_.skipped_bytes[i];
    }
    starts_.push_back(states_.size());
    for (int64_t u = 0; u < nodes_; ++u) FindCrossing(u);
    if (crossings_.size() * states_.size() * starts_.size() > kMaxCrossings) crossings_.clear();
    for (int64_t u = 0; u < nodes_; ++u) leaves_.push_back(Readers(u));
    for (const State& s : states_) keys_.push_back(s.start_bytes);
    std::sort(keys_.begin(), keys_.end());
  }

  const std::vector<State>& states() const { return states_; }

  /*! \brief The length of the shortest path; `path` gets (from, to) of its calls. */
  double Run(std::vector<int64_t>* path) {
    const int64_t num = states_.size(), rows = in_.count + 1;
    const std::vector<double> never(num, HUGE_VAL);
    arrived_.assign(rows, never), best_.assign(rows, never);
    came_.assign(rows, std::vector<Step>(num)), gap_.assign(rows, std::vector<Step>(num));
    opened_.assign(rows, Least(num));
    for (auto& row : arrived_) row[0] = 0.0;
    int64_t open_from = 0;
    for (int64_t i = 0; i < Segments(); ++i) {
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
      if (i + 1 < Segments() && crossings_.empty()) Open(i, i);
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
  int64_t Segments() const { return in_.first.size(); }
  int64_t First(int64_t i) const { return in_.first[i]; }
  int64_t Last(int64_t i) const { return i + 1 < Segments() ? in_.first[i + 1] - 1 : nodes_; }
  void Count(int64_t v, double* seconds, double* bytes) const {
    if (in_.accelerator[v] < HUGE_VAL) *seconds += in_.accelerator[v];
    *bytes += in_.memory[v];
  }

  /*! \brief Add the states of a segment, small ones first. */
  void Enumerate(int64_t i, double seconds, double bytes, double skipped_s, double skipped_bytes) {
    std::vector<uint64_t> layer{0};
    index_.emplace_back();
    while (!layer.empty()) {
      std::vector<uint64_t> next;
      for (uint64_t mask : layer) {
        index_[i].emplace(mask, states_.size());
        double s = seconds, m = bytes;
        for (int64_t v = First(i); v < Last(i); ++v) {
          const int64_t b = v - First(i);
          if (mask >> b & 1) {
            Count(v, &s, &m);
          } else if (!(in_.above[v] & ~mask)) {
            next.push_back(mask | uint64_t{1} << b);
          }
        }
        states_.push_back({i, mask, s + skipped_s + in_.skipped_s[i],
                           m + skipped_bytes + in_.skipped_bytes[i], FirstTensors(i, mask),
                           s + skipped_s, m + skipped_bytes, LastTensors(i, mask)});
      }
      std::sort(next.begin(), next.end());
      next.erase(std::unique(next.begin(), next.end()), next.end());
      layer = std::move(next);
    }
  }

  bool Barred(int64_t i) const {
    for (int64_t v = std::max<int64_t>(First(i) - (i > 0), 0); v < Last(i); ++v) {
      if (in_.accelerator[v] == HUGE_VAL) return true;
    }
    return false;
  }

  /*! \brief The segment of a node; a gate is of the segment behind it. */
  int64_t Where(int64_t v) const {
    int64_t i =
        std::upper_bound(in_.first.data(), in_.first.data() + Segments(), v) - in_.first.data() - 1;
    return i + 1 < Segments() && v == in_.first[i + 1] - 1 ? i + 1 : std::max<int64_t>(i, 0);
  }
  bool IsGate(int64_t v) const { return Where(v) > 0 && v == First(Where(v)) - 1; }

  /*! \brief The readers of a node in its segment; the highest bit stands for all others. */
  uint64_t Readers(int64_t u) const {
    const int64_t i = Where(u);
    uint64_t out = 0;
    for (const int32_t* w = in_.succs.begin(u); w != in_.succs.end(u); ++w)
      out |= uint64_t{1} << (*w < Last(i) ? *w - First(i) : 63);
    return out;
  }

  void FindCrossing(int64_t u) {
    Crossing c{u, Where(u), {}};
    for (const int32_t* w = in_.succs.begin(u); w != in_.succs.end(u); ++w) {
      const int64_t at = Where(*w), gate = IsGate(*w);
      if (at <= c.made || (gate && at == c.made + 1)) continue;
      c.readers.push_back({at, gate ? at : at + 1});
      c.open = std::max(c.open, at - 1);
    }
    if (!c.readers.empty() && in_.send[u] > 0) crossings_.push_back(c);
  }

  /*! \brief Seconds of tensors across gates of a call from state `a` that ends in segment j. */
  double Across(const State& a, int64_t j) const {
    double out = 0.0;
    for (const Crossing& c : crossings_) {
      if (c.made >= j) break;
      if (Done(a.segment, a.mask, c.maker)) {
        bool near = false, held = false;  // counted with the first tensors; read in the call
        for (const int32_t* w = in_.succs.begin(c.maker); w != in_.succs.end(c.maker); ++w)
          near |= *w <= Last(a.segment) && !Done(a.segment, a.mask, *w);
        for (const Crossing::Reader& r : c.readers) held |= r.at > a.segment && r.held <= j;
        if (!near && held) out += in_.send[c.maker];
      } else if (c.open >= j) {
        out += in_.send[c.maker];
      }
    }
    return out;
  }

  bool Done(int64_t i, uint64_t mask, int64_t v) const {
    return v < First(i) || (v < Last(i) && mask >> (v - First(i)) & 1);
  }

  /*! \brief Seconds of tensors that a call receives which holds the rest of segment i and its next
   * gate; inf if it cannot hold them. */
  double FirstTensors(int64_t i, uint64_t mask) const {
    if (i + 1 == Segments()) return HUGE_VAL;
    std::vector<int32_t> makers;
    for (int64_t v = First(i); v <= Last(i); ++v) {
      if (Done(i, mask, v)) continue;
      if (in_.accelerator[v] == HUGE_VAL) return HUGE_VAL;
      for (const int32_t* u = in_.mates.begin(v); u != in_.mates.end(v); ++u) {
        if (Done(i, mask, *u)) return HUGE_VAL;
      }
      for (const int32_t* u = in_.preds.begin(v); u != in_.preds.end(v); ++u) {
        if (Done(i, mask, *u)) makers.push_back(*u);
      }
    }
    return Sum(&makers);
  }

  /*! \brief Seconds of tensors that a call sends which holds the gate before segment i and `mask`;
   * inf if it cannot. */
  double LastTensors(int64_t i, uint64_t mask) const {
    if (i == 0) return HUGE_VAL;
    std::vector<int32_t> makers;
    for (int64_t v = First(i) - 1; v < Last(i); ++v) {
      if (!Done(i, mask, v)) continue;
      if (in_.accelerator[v] == HUGE_VAL) return HUGE_VAL;
      for (const int32_t* u = in_.mates.begin(v); u != in_.mates.end(v); ++u) {
        if (!Done(i, mask, *u)) return HUGE_VAL;
      }
      for (const int32_t* w = in_.succs.begin(v); w != in_.succs.end(v); ++w) {
        if (!Done(i, mask, *w)) makers.push_back(v);
      }
    }
    return Sum(&makers);
  }

  double Sum(std::vector<int32_t>* makers) const {
    std::sort(makers->begin(), makers->end());
    makers->erase(std::unique(makers->begin(), makers->end()), makers->end());
    double out = 0.0;
    for (int32_t u : *makers) out += in_.send[u];
    return out;
  }

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

  /*! \brief How many nodes of a segment may run at once, at most: chains that cover it, found
   * greedily. */
  int64_t Width(int64_t i) const {
    std::vector<int64_t> tails;
    for (int64_t v = First(i); v < Last(i); ++v) {
      auto tail = std::find_if(tails.begin(), tails.end(),
                               [&](int64_t u) { return in_.above[v] >> (u - First(i)) & 1; });
      if (tail == tails.end()) {
        tails.push_back(v);
      } else {
        *tail = v;
      }
    }
    return tails.size();
  }

  /*! \brief Seconds on the host for one on an accelerator, at least. */
  double Slower(int64_t i) const {
    double slower = HUGE_VAL;
    for (int64_t v = First(i); v < Last(i); ++v) {
      if (in_.accelerator[v] > 0 && in_.accelerator[v] < HUGE_VAL)
        slower = std::min(slower, in_.host[v] / in_.accelerator[v]);
    }
    return slower;
  }

  /*! \brief The longest chains of nodes that run from one state on, each chain up to one node. */
  struct Chains {
    std::vector<double> alone;       // on the host
    std::vector<double> host, call;  // the node on the host, or in a call; before it as is best
  };

  Chains ChainsFrom(int64_t i, uint64_t done) const {
    const int64_t n = Last(i) - First(i);
    Chains c{std::vector<double>(n, 0.0), std::vector<double>(n, 0.0), std::vector<double>(n, 0.0)};
    for (int64_t b = 0; b < n; ++b) {
      if (done >> b & 1) continue;
      const int64_t v = First(i) + b;
      uint64_t direct = 0;
      for (const int32_t* u = in_.preds.begin(v); u != in_.preds.end(v); ++u) {
        if (Done(i, done, *u)) {
          c.call[b] = std::max(c.call[b], in_.send[*u]);
        } else {
          direct |= uint64_t{1} << (*u - First(i));
        }
      }
      for (uint64_t rest = in_.above[v] & ~done; rest; rest &= rest - 1) {
        const int64_t u = __builtin_ctzll(rest);
        const double move = direct >> u & 1 ? in_.send[First(i) + u] : 0.0;
        c.alone[b] = std::max(c.alone[b], c.alone[u]);
        c.host[b] = std::max(c.host[b], std::min(c.host[u], c.call[u] + move));
        c.call[b] = std::max(c.call[b], std::min(c.host[u] + move, c.call[u]));
      }
      c.alone[b] += in_.host[v], c.host[b] += in_.host[v], c.call[b] += in_.accelerator[v];
    }
    return c;
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

  const Input& in_;
  int64_t nodes_;
  std::vector<State> states_;
  std::vector<int64_t> starts_;  // first state of each segment
  std::vector<std::unordered_map<uint64_t, int64_t>> index_;
  std::vector<uint64_t> leaves_;     // readers of each node
  std::vector<Crossing> crossings_;  // in order of their makers
  std::vector<double> keys_;
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
