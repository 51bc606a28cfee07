/*! \file passes/load_pricing.cc
 *  \brief The most valuable set of blocks whose load fits in a given time: one device's part of a
 * load problem, priced.
 *
 *  Blocks are taken one by one, each in or out. Between two blocks only the open nets matter (those
 * with blocks on both sides of the cut): all out so far, all in, or mixed and paid for. Nets with
 * the same blocks so far are alike. For each such state the best value over load is kept as a list.
 * Nets outside the states are paid for in shares (net_shares.h), which is never too much.
 *
 *  No list holds what cannot become worth more than is asked: shares of all nets bound what the
 * blocks to come earn. Where nets are charged in two steps, what each state can still earn after
 * the first is found from the last block backwards, and bounds more closely:
 *
 *      first nets:  completions  ◄── block n ◄── ... ◄── block 1
 *      all nets:    block 1 ──► ... ──► block n,  each entry with its completion > enough */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arrays.h"
#include "net_shares.h"
#include "pricing_bounds.h"
#include "pricing_states.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

constexpr int64_t kPerState = 24;  // entries whose work is that of a state and its completions
struct Entry {
  double load, value;
  int64_t back;  // 4 * index in the layer before + the block's side
};

/*! \brief Entries of each state between two blocks, states ascending. */
struct Layer {
  std::vector<Key> keys;
  std::vector<int64_t> start{0};  // of each state's entries, and the end
  std::vector<Entry> entries;

  void Clear() { keys.clear(), start.assign(1, 0), entries.clear(); }
  /*! \brief End the entries of a state; a state without any is left out. */
  void Close(Key key) {
    if (static_cast<int64_t>(entries.size()) == start.back()) return;
    keys.push_back(key), start.push_back(entries.size());
  }
  /*! \brief The entries of a state; none if it is not there. */
  std::pair<const Entry*, const Entry*> Find(Key key) const {
    const auto it = std::lower_bound(keys.begin(), keys.end(), key);
    if (it == keys.end() || *it != key) return {nullptr, nullptr};
    const int64_t i = it - keys.begin();
    return {entries.data() + start[i], entries.data() + start[i + 1]};
  }
};

/*! \brief Entries by rising load on their way to a state. */
struct Run {
  Key key;
  int64_t begin, end;  // in a pool
};

class Pricing {
 public:
  /*! \param level  Nets of this level or higher are in the states. */
  Pricing(const PricedBlocks& blocks, const std::vector<SharedPrice>& prices, const Lists& before,
          double budget, double enough, double grain, int64_t max_entries, int32_t level)
      : blocks_(blocks),
        prices_(prices),
        states_(blocks, before, level),
        bounds_(blocks, prices, states_),
        budget_(budget),
        enough_(enough),
        grain_(grain),
        max_entries_(max_entries) {}

  /*! \brief Fill `in` with the best set. Return {value, load as rounded down}; an infinite value if
   * there are too many entries. */
  std::pair<double, double> Solve(const View<uint8_t>& in, const Pricing* few = nullptr) {
    const int64_t n = blocks_.size();
    if (few) Translate(*few);
    Layer now, next;
    now.entries = {{0.0, 0.0, -1}};
    now.Close(0);
    std::vector<std::vector<int64_t>> back(n);
    std::fill(in.data(), in.data() + n, 0);
    for (int64_t v = 0; v < n; ++v) {
      if (entries_ > max_entries_) return {HUGE_VAL, 0.0};
      entries_ += kPerState * static_cast<int64_t>(now.keys.size());
      pool_.clear(), runs_.clear();
      for (size_t k = 0; k < now.keys.size(); ++k) {
        for (uint64_t side = 0; side < states_.NumSides(v); ++side) {
          const bool inside = side == kInside;
          if ((inside && bounds_.time(v) == HUGE_VAL) || !states_.Allowed(now.keys[k], v, side))
            continue;
          double pay = 0.0;
          const Key to = states_.Step(now.keys[k], v, side, &pay);
          const double load = pay + (inside ? bounds_.time(v) : 0.0),
                       gain = inside ? blocks_.value[v] : 0.0;
          std::pair<const Entry*, const Entry*> rest{nullptr, nullptr};
          if (few) {
            rest = few->rest_[v + 1].Find(Short(to, v));
            if (!rest.first) continue;
          } else {
            bounds_.Worth(bounds_.ahead, v + 1, to, v);
          }
          const double left = budget_ - load + (few ? bounds_.SlackOf(unlike_[v], to) : 0.0);
          const int64_t begin = pool_.size();
          for (int64_t i = now.start[k]; i < now.start[k + 1]; ++i) {
            const Entry& x = now.entries[i];
            double most = 0.0;
            if (few) {
              while (rest.second > rest.first && rest.second[-1].load > left - x.load)
                --rest.second;
              if (rest.second == rest.first) break;
              most = rest.second[-1].value;
            } else {
              if (left - x.load < bounds_.ahead.relief[v + 1]) break;
              most = bounds_.Most(left - x.load);
            }
            if (x.value + gain + most > enough_)
              pool_.push_back({x.load + load, x.value + gain, 4 * i + static_cast<int64_t>(side)});
          }
          Close(to, begin);
        }
      }
      std::stable_sort(runs_.begin(), runs_.end(),
                       [](const Run& a, const Run& b) { return a.key < b.key; });
      next.Clear();
      for (size_t r = 0; r < runs_.size();) {
        size_t end = r + 1;
        while (end < runs_.size() && runs_[end].key == runs_[r].key) ++end;
        Merge(r, end, &next);
        r = end;
      }
      entries_ += next.entries.size();
      back[v].reserve(next.entries.size());
      for (const Entry& x : next.entries) back[v].push_back(x.back);
      std::swap(now, next);
    }
    Entry best{0.0, -HUGE_VAL, -1};
    int64_t at = -1;
    for (size_t i = 0; i < now.entries.size(); ++i) {
      const Entry& x = now.entries[i];
      if (x.value > best.value && x.load <= budget_) best = x, at = i;
    }
    for (int64_t v = n - 1; v >= 0 && at >= 0; --v) {
      in[v] = (back[v][at] & 3) == kInside;
      at = back[v][at] >> 2;
    }
    return {best.value, best.load};
  }
  int64_t entries() const { return entries_; }

  /*! \brief Find for each block and state what the blocks from it on can earn over load, as far as
   * those before could make it more than `enough`. False if there are too many entries. */
  bool Complete() {
    const int64_t n = blocks_.size();
    std::vector<std::vector<Key>> keys(n + 1);
    keys[0] = {0};
    for (int64_t v = 0; v < n; ++v) {
      for (Key key : keys[v]) {
        for (uint64_t side = 0; side < states_.NumSides(v); ++side) {
          double pay = 0.0;
          if (states_.Allowed(key, v, side))
            keys[v + 1].push_back(states_.Step(key, v, side, &pay));
        }
      }
      std::sort(keys[v + 1].begin(), keys[v + 1].end());
      keys[v + 1].erase(std::unique(keys[v + 1].begin(), keys[v + 1].end()), keys[v + 1].end());
      if ((entries_ += keys[v + 1].size()) > max_entries_) return false;
    }
    rest_.resize(n + 1);
    rest_[n].entries = {{0.0, 0.0, -1}};
    rest_[n].Close(0);
    for (int64_t v = n - 1; v >= 0; --v) {
      for (Key key : keys[v]) {
        pool_.clear(), runs_.clear();
        if (v > 0) bounds_.Worth(bounds_.behind, v, key, v - 1);
        for (uint64_t side = 0; side < states_.NumSides(v); ++side) {
          const bool inside = side == kInside;
          if ((inside && bounds_.time(v) == HUGE_VAL) || !states_.Allowed(key, v, side)) continue;
          double pay = 0.0;
          auto [x, end] = rest_[v + 1].Find(states_.Step(key, v, side, &pay));
          const double load = pay + (inside ? bounds_.time(v) : 0.0),
                       gain = inside ? blocks_.value[v] : 0.0;
          const int64_t begin = pool_.size();
          for (; x < end; ++x) {
            const double left = budget_ - x->load - load;
            if (left < bounds_.behind.relief[v]) break;
            if (x->value + gain + (v > 0 ? bounds_.Most(left) : 0.0) > enough_)
              pool_.push_back({x->load + load, x->value + gain, -1});
          }
          Close(key, begin);
        }
        if (!runs_.empty()) Merge(0, runs_.size(), &rest_[v]);
      }
      entries_ += rest_[v].entries.size();
      if (entries_ > max_entries_) return false;
    }
    return true;
  }

 private:
  /*! \brief End a run in the pool; one without entries is left out. */
  void Close(Key key, int64_t begin) {
    const int64_t end = pool_.size();
    if (end > begin) runs_.push_back({key, begin, end});
  }

  /*! \brief Where the bits of each net and block that `few` keeps are in our states and in its, and
   * what its states know less of the nets that only ours keep. */
  void Translate(const Pricing& few) {
    const int64_t n = blocks_.size();
    bits_.assign(n, {}), unlike_.assign(n, {});
    for (int64_t v = 0; v < n; ++v) {
      std::unordered_map<int64_t, int> slots;
      for (const Open& open : few.states_.open(v)) slots[open.nets[0]] = open.slot;
      for (const Open& open : states_.open(v)) {
        std::vector<int64_t> ours;
        for (int64_t e : open.nets) {
          if (!few.states_.Charged(e)) ours.push_back(e);
          const auto it = slots.find(e);
          if (it != slots.end()) bits_[v].push_back({open.slot, it->second});
        }
        if (!ours.empty() && !prices_.empty())
          unlike_[v].push_back(bounds_.Ahead(prices_[0].share, {open.slot, std::move(ours)}, v));
      }
    }
    for (int64_t u = 0; u < n; ++u) {
      for (int64_t v = u; v < states_.last(u); ++v)
        bits_[v].push_back({states_.block_slot(u), few.states_.block_slot(u)});
    }
  }
  /*! \brief The state after v as one that charges few nets. */
  Key Short(Key key, int64_t v) const {
    Key out = 0;
    for (const auto& [from, to] : bits_[v]) out |= At(Bits(key, from), to);
    return out;
  }

  /*! \brief Add runs of one state to a layer: entries by load with rising value; of those within
   * `grain_` one with the least load and the most value stands for all. */
  void Merge(size_t first, size_t last, Layer* out) {
    const auto less = [](const Entry& a, const Entry& b) { return a.load < b.load; };
    const Entry* x = pool_.data() + runs_[first].begin;
    const Entry* end = pool_.data() + runs_[first].end;
    for (size_t r = first + 1; r < last; ++r) {
      const Entry* y = pool_.data() + runs_[r].begin;
      const Entry* y_end = pool_.data() + runs_[r].end;
      other_.clear();
      std::merge(x, end, y, y_end, std::back_inserter(other_), less);
      std::swap(merged_, other_);
      x = merged_.data(), end = x + merged_.size();
    }
    std::vector<Entry>& kept = out->entries;
    const size_t begin = kept.size();
    double anchor = -HUGE_VAL;
    for (; x < end; ++x) {
      if (kept.size() > begin && x->value <= kept.back().value) continue;
      if (kept.size() > begin && x->load - anchor <= grain_) {
        kept.back().value = x->value, kept.back().back = x->back;
      } else {
        anchor = x->load;
        kept.push_back(*x);
      }
    }
    out->Close(runs_[first].key);
  }

  const PricedBlocks& blocks_;
  const std::vector<SharedPrice>& prices_;
  const PricingStates states_;
  PricingBounds bounds_;
  const double budget_, enough_, grain_;
  const int64_t max_entries_;
  std::vector<Layer> rest_;  // completions from each block on
  std::vector<Entry> pool_, merged_, other_;
  std::vector<Run> runs_;
  std::vector<std::vector<std::pair<int, int>>> bits_;  // (our slot, that of few) after each block
  std::vector<std::vector<Slack>> unlike_;              // of nets that only our states hold
  int64_t entries_ = 0;
};

}  // namespace

/*! \brief Among sets of blocks with load <= budget, find one with the largest value, if that is
 * more than `enough`. Return (value; -inf: none, inf: more than `max_entries`; its load; entries
 * kept).
 *  \param arrays  time [blocks] (inf: cannot run), value [blocks], net_cost [nets], (ptr, ids) of
 * each net's blocks and of the blocks before each, and when each net is charged [nets]: in the
 * first step (2), in the second (1), or only in shares (0).
 *  \param in      [blocks], set to 1 for the members.
 *  \param grain   Loads closer than this may be taken for the smaller of them: the value is never
 * too small, the set's true load may be a little above the budget. */
ffi::Array<double> LoadPricing(const ffi::Array<ffi::Tensor>& arrays, const ffi::TensorView& in,
                               double budget, double enough, double grain, int64_t max_entries) {
  if (arrays.size() != 8)
    TVM_FFI_THROW(ValueError) << "LoadPricing needs 8 arrays, got " << arrays.size();
  const View<double> time(arrays[0], "time"), value(arrays[1], "value"),
      cost(arrays[2], "net_cost");
  const View<int32_t> level(arrays[7], "level");
  const Lists pins(arrays[3], arrays[4], "pins"), before(arrays[5], arrays[6], "before");
  PricedBlocks blocks;
  blocks.time.assign(time.data(), time.data() + time.size());
  blocks.value.assign(value.data(), value.data() + value.size());
  bool staged = false;
  for (int64_t e = 0; e < cost.size(); ++e) {
    PricedBlocks::Net net{cost[e], {pins.begin(e), pins.end(e)}, level[e]};
    std::sort(net.pins.begin(), net.pins.end());
    if (cost[e] <= 0 || net.pins.empty() || net.pins.front() == net.pins.back()) continue;
    staged |= level[e] == 1;
    blocks.nets.push_back(std::move(net));
  }
  const std::vector<SharedPrice> prices = SharePrices(blocks, budget);
  const auto priced = [&](int32_t least) {
    return Pricing(blocks, prices, before, budget, enough, grain, max_entries, least);
  };
  const View<uint8_t> out(in, "in");
  Pricing all = priced(1);
  if (!staged) {
    const auto [best, load] = all.Solve(out);
    return {best, load, static_cast<double>(all.entries())};
  }
  Pricing few = priced(2);
  if (!few.Complete()) return {HUGE_VAL, 0.0, static_cast<double>(few.entries())};
  const auto [best, load] = all.Solve(out, &few);
  return {best, load, static_cast<double>(few.entries() + all.entries())};
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.LoadPricing", LoadPricing); }
}  // namespace tvmhet
