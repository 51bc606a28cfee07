/*! \file passes/segment_states.h
 *  \brief The segments of a graph's core: their downsets, and what calls that begin or end there
 * move.
 */
#ifndef TVMHET_PASSES_SEGMENT_STATES_H_
#define TVMHET_PASSES_SEGMENT_STATES_H_

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <vector>

#include "arrays.h"

namespace tvmhet {
namespace segments {

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

/*! \brief The states of every segment, and what is common to all paths through them. */
class Segments {
 public:
  explicit Segments(const Input& in) : in_(in), nodes_(in.accelerator.size()) {
    double seconds = 0.0, bytes = 0.0, skipped_s = 0.0, skipped_bytes = 0.0;
    for (int64_t i = 0; i < NumSegments(); ++i) {
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

 protected:
  int64_t NumSegments() const { return in_.first.size(); }
  int64_t First(int64_t i) const { return in_.first[i]; }
  int64_t Last(int64_t i) const { return i + 1 < NumSegments() ? in_.first[i + 1] - 1 : nodes_; }
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
    int64_t i = std::upper_bound(in_.first.data(), in_.first.data() + NumSegments(), v) -
                in_.first.data() - 1;
    return i + 1 < NumSegments() && v == in_.first[i + 1] - 1 ? i + 1 : std::max<int64_t>(i, 0);
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
    if (i + 1 == NumSegments()) return HUGE_VAL;
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

  const Input& in_;
  int64_t nodes_;
  std::vector<State> states_;
  std::vector<int64_t> starts_;  // first state of each segment
  std::vector<std::unordered_map<uint64_t, int64_t>> index_;
  std::vector<uint64_t> leaves_;     // readers of each node
  std::vector<Crossing> crossings_;  // in order of their makers
  std::vector<double> keys_;
};

}  // namespace segments
}  // namespace tvmhet
#endif  // TVMHET_PASSES_SEGMENT_STATES_H_
