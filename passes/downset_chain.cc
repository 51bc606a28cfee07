/*! \file passes/downset_chain.cc
 *  \brief The exact best chain of contiguous stages, each on one device, when every downset can be
 * listed.
 *
 *      {} ──device of type a──► S1 ──type a──► S2 ──type b──► all      minimise the largest load
 *
 *  Loads are those of load_anneal.cc: a stage pays for a net when it holds some, but not all, of
 * the blocks that make or read it (the maker may come later than its readers, as gradients do).
 * f[S][used devices] is the least bottleneck of a chain that ends in downset S. Given a known upper
 * bound, a stage that exceeds it is never extended, and a downset whose rest cannot be done by the
 * devices that are left within the bound is never left: with a good incumbent few pairs remain. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

struct Chain {
  Lists preds, readers;
  View<double> time, memory, net_cost, limit,
      scale;  // time [blocks, types]; limit and scale per type
  View<int32_t> net_src;
  View<int64_t> count;
  int64_t blocks, types, nets;
};

/*! \brief All downsets with what a stage needs of them: summed times and memory, and the nets that
 * cross. */
class Downsets {
 public:
  struct Crossing {
    int32_t net, inside;  // inside: how many of its maker and readers
  };

  /*! \brief List the downsets; false if there are more than `limit`. */
  bool List(const Chain& in, int64_t limit) {
    const int64_t words = (in.blocks + 63) / 64;
    std::vector<Bits> needs(in.blocks, Bits(words));
    std::vector<std::vector<int32_t>> nets_of(in.blocks);
    for (int64_t v = 0; v < in.blocks; ++v) {
      for (const int32_t* p = in.preds.begin(v); p != in.preds.end(v); ++p) needs[v].Add(*p);
    }
    for (int64_t e = 0; e < in.nets; ++e) {
      nets_of[in.net_src[e]].push_back(e);
      for (const int32_t* r = in.readers.begin(e); r != in.readers.end(e); ++r)
        nets_of[*r].push_back(e);
    }
    std::unordered_map<Bits, int32_t, BitsHash> known;
    sets.emplace_back(words);
    known.emplace(sets[0], 0);
    crossing.push_back({});
    next.push_back({});
    width = 2 * in.types + 1;
    sums.assign(width, 0.0);
    for (int32_t s = 0; s < static_cast<int32_t>(sets.size());
         ++s) {  // breadth first: sizes never fall
      for (int64_t v = 0; v < in.blocks; ++v) {
        if (sets[s].Has(v) || !needs[v].Within(sets[s])) continue;
        Bits larger = sets[s];
        larger.Add(v);
        const auto [at, is_new] = known.emplace(larger, static_cast<int32_t>(sets.size()));
        next[s].push_back(at->second);
        if (!is_new) continue;
        if (static_cast<int64_t>(sets.size()) >= limit) return false;
        for (int64_t g = 0; g < in.types; ++g) {
          const double t = in.time[v * in.types + g];
          sums.push_back(sums[s * width + g] + (t < HUGE_VAL ? t : 0.0));
        }
        for (int64_t g = 0; g < in.types; ++g) {
          sums.push_back(sums[s * width + in.types + g] + (in.time[v * in.types + g] == HUGE_VAL));
        }
        sums.push_back(sums[s * width + 2 * in.types] + in.memory[v]);
        crossing.push_back(Cross(in, s, nets_of[v]));
        sets.push_back(std::move(larger));
        next.push_back({});
      }
    }
    return true;
  }

  std::vector<Bits> sets;
  std::vector<std::vector<int32_t>> next;  // one block more
  int64_t width = 0;
  std::vector<double>
      sums;  // [downsets, width]: seconds per type, blocks that cannot run per type, memory
  std::vector<std::vector<Crossing>> crossing;  // nets partly inside

 private:
  /*! \brief The nets that cross when a block with these nets joins downset s. */
  std::vector<Crossing> Cross(const Chain& in, int32_t s, const std::vector<int32_t>& nets) const {
    std::vector<Crossing> out;
    std::vector<int32_t> fresh = nets;
    for (Crossing c : crossing[s]) {
      const auto at = std::find(fresh.begin(), fresh.end(), c.net);
      if (at != fresh.end()) ++c.inside, fresh.erase(at);
      if (c.inside <= in.readers.end(c.net) - in.readers.begin(c.net)) out.push_back(c);
    }
    for (int32_t e : fresh) {
      if (in.readers.end(e) != in.readers.begin(e)) out.push_back({e, 1});
    }
    return out;
  }
};

class ChainSearch {
 public:
  ChainSearch(const Chain& in, const Downsets& d, double upper, int64_t max_pairs)
      : in_(in),
        d_(d),
        upper_(upper),
        max_pairs_(max_pairs),
        stride_(1),
        seen_(d.sets.size(), -1),
        inside_(in.nets, -1),
        stamp_net_(in.nets, -1) {
    for (int64_t g = 0; g < in.types; ++g) {
      step_.push_back(stride_);
      stride_ *= in.count[g] + 1;
    }
    best_.assign(d.sets.size() * stride_, HUGE_VAL);
    from_.assign(best_.size(), {-1, -1});
    best_[0] = 0.0;
    Speeds();
  }

  /*! \brief Run; false if `max_pairs` stages were tried without finishing. */
  bool Run() {
    for (int32_t s = 0; s + 1 < static_cast<int32_t>(d_.sets.size()); ++s) {
      Leave(s);
      if (pairs > max_pairs_) return false;
    }
    return true;
  }

  /*! \brief (downset before, downset after, type) of each stage of the best chain; empty if none
   * beats the bound. */
  std::vector<int64_t> Trace() const {
    const int64_t last = (d_.sets.size() - 1) * stride_;
    int64_t at = std::min_element(best_.begin() + last, best_.end()) - best_.begin();
    std::vector<int64_t> out;
    if (best_[at] == HUGE_VAL) return out;
    while (at / stride_ != 0) {
      const auto [before, type] = from_[at];
      out.insert(out.begin(), {before, at / stride_, type});
      at = before * stride_ + at % stride_ - step_[type];
    }
    return out;
  }
  int64_t pairs = 0;

 private:
  int64_t Used(int64_t index, int64_t g) const { return index / step_[g] % (in_.count[g] + 1); }

  /*! \brief work_: each block's fastest time; speed_[g]: at most so much of it is done in one
   * second of type g. */
  void Speeds() {
    work_.assign(d_.sets.size(), 0.0);
    std::vector<double> work(in_.blocks);
    speed_.assign(in_.types, 0.0);
    for (int64_t v = 0; v < in_.blocks; ++v) {
      work[v] =
          *std::min_element(in_.time.data() + v * in_.types, in_.time.data() + (v + 1) * in_.types);
      for (int64_t g = 0; g < in_.types; ++g) {
        if (work[v] > 0) speed_[g] = std::max(speed_[g], work[v] / in_.time[v * in_.types + g]);
      }
    }
    for (size_t s = 0; s < d_.sets.size(); ++s) {
      for (int64_t v = 0; v < in_.blocks; ++v) work_[s] += d_.sets[s].Has(v) ? work[v] : 0.0;
    }
  }

  void Leave(int32_t s) {
    std::vector<int64_t> open;
    std::vector<char> can_use(in_.types, 0);
    for (int64_t i = 0; i < stride_; ++i) {
      if (best_[s * stride_ + i] >= upper_) continue;
      double capacity = 0.0;
      for (int64_t g = 0; g < in_.types; ++g)
        capacity += (in_.count[g] - Used(i, g)) * speed_[g] * upper_;
      if (work_.back() - work_[s] > capacity * (1 + 1e-12)) continue;
      open.push_back(i);
      for (int64_t g = 0; g < in_.types; ++g) can_use[g] |= Used(i, g) < in_.count[g];
    }
    if (open.empty()) return;
    double crossing = 0.0;
    for (const auto& c : d_.crossing[s]) {
      inside_[c.net] = c.inside, stamp_net_[c.net] = s;
      crossing += in_.net_cost[c.net];
    }
    std::vector<int32_t> todo{s};
    seen_[s] = s;
    const double* from = d_.sums.data() + s * d_.width;
    while (!todo.empty()) {
      const int32_t u = todo.back();
      todo.pop_back();
      for (int32_t t : d_.next[u]) {
        if (seen_[t] == s) continue;
        seen_[t] = s;
        ++pairs;
        const double* to = d_.sums.data() + t * d_.width;
        double receive = crossing, send = 0.0;
        for (const auto& c : d_.crossing[t]) {
          if (stamp_net_[c.net] != s) {
            send += in_.net_cost[c.net];
          } else if (inside_[c.net] == c.inside) {
            receive -= in_.net_cost[c.net];
          }
        }
        bool extend = false;
        for (int64_t g = 0; g < in_.types; ++g) {
          const double compute = to[g] - from[g];
          if (!can_use[g] || compute >= upper_ || to[in_.types + g] > from[in_.types + g]) continue;
          if (to[2 * in_.types] - from[2 * in_.types] > in_.limit[g]) continue;
          extend = true;
          Close(s, t, g, compute + in_.scale[g] * (std::max(0.0, receive) + send), open);
        }
        if (extend) todo.push_back(t);
      }
    }
  }

  void Close(int32_t s, int32_t t, int64_t g, double load, const std::vector<int64_t>& open) {
    if (load >= upper_) return;
    for (int64_t i : open) {
      if (Used(i, g) >= in_.count[g]) continue;
      const double value = std::max(best_[s * stride_ + i], load);
      double& old = best_[t * stride_ + i + step_[g]];
      if (value < old)
        old = value, from_[t * stride_ + i + step_[g]] = {s, static_cast<int32_t>(g)};
    }
  }

  const Chain& in_;
  const Downsets& d_;
  double upper_;
  int64_t max_pairs_, stride_;
  std::vector<int64_t> step_;
  std::vector<double> best_, work_, speed_;
  std::vector<std::pair<int32_t, int32_t>> from_;
  std::vector<int32_t> seen_, inside_, stamp_net_;
};

}  // namespace

/*! \brief Find the best chain of contiguous stages with a bottleneck below `upper`.
 *  \param arrays pred_ptr, pred_ids, reader_ptr, reader_ids, time [blocks, types], memory [blocks],
 * net_cost, memory limit [types], transfer scale [types], net_src, device count [types].
 *  \return (stages, outcome, pairs tried): `stages` holds, stage after stage, its type, its number
 * of blocks and the blocks; outcome 0: the search was exhaustive, 1: too many downsets, 2: too many
 * pairs. */
ffi::Array<ffi::Any> DownsetChain(const ffi::Array<ffi::Tensor>& arrays, double upper,
                                  int64_t max_downsets, int64_t max_pairs) {
  if (arrays.size() != 11)
    TVM_FFI_THROW(ValueError) << "DownsetChain needs 11 arrays, got " << arrays.size();
  const View<double> memory(arrays[5], "memory"), net_cost(arrays[6], "net_cost"),
      limit(arrays[7], "limit");
  const Chain in{Lists(arrays[0], arrays[1], "preds"),
                 Lists(arrays[2], arrays[3], "readers"),
                 View<double>(arrays[4], "time"),
                 memory,
                 net_cost,
                 limit,
                 View<double>(arrays[8], "scale"),
                 View<int32_t>(arrays[9], "net_src"),
                 View<int64_t>(arrays[10], "count"),
                 memory.size(),
                 limit.size(),
                 net_cost.size()};
  Downsets downsets;
  if (!downsets.List(in, max_downsets)) return {ffi::Array<int64_t>(), 1, 0};
  ChainSearch search(in, downsets, upper, max_pairs);
  const bool finished = search.Run();
  std::vector<int64_t> out;
  const std::vector<int64_t> trace = search.Trace();
  for (size_t i = 0; i < trace.size(); i += 3) {
    out.push_back(trace[i + 2]);
    const size_t size_at = out.size();
    out.push_back(0);
    for (int64_t v = 0; v < in.blocks; ++v) {
      if (!downsets.sets[trace[i]].Has(v) && downsets.sets[trace[i + 1]].Has(v))
        out.push_back(v), ++out[size_at];
    }
  }
  return {ffi::Array<int64_t>(out.begin(), out.end()), finished ? 0 : 2, search.pairs};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef().def("tvmhet.DownsetChain", DownsetChain);
}
}  // namespace tvmhet
