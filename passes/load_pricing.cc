/*! \file passes/load_pricing.cc
 *  \brief The most valuable set of blocks whose load fits in a given time: one device's part of a
 * load problem, priced.
 *
 *  Blocks are taken one by one, each in or out. Between two blocks only the open nets matter (those
 * with blocks on both sides of the cut): all out so far, all in, or mixed and paid for. For each
 * such state the best value over load is kept as a list. Nets with cost 0 are never open. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

enum : uint64_t { kOut = 0, kIn = 1, kMixed = 2 };                 // of a net
enum : uint64_t { kBefore = 0, kInside = 1, kAfter = 2, kSides };  // of a block

struct Entry {
  double load, value;
  int64_t back;  // 4 * index in the layer before + the block's side
};
using Runs = std::vector<std::vector<Entry>>;

struct Net {
  double cost;
  int64_t first, last;  // of its blocks
  int slot = -1;        // two bits of the state while open
};

class Pricing {
 public:
  Pricing(const View<double>& time, const View<double>& value, const View<double>& net_cost,
          const Lists& pins, const Lists& before, double budget, double enough, double grain,
          int64_t max_entries)
      : time_(time),
        value_(value),
        budget_(budget),
        enough_(enough),
        grain_(grain),
        max_entries_(max_entries) {
    const int64_t n = time.size();
    nets_of_.resize(n), earlier_.resize(n), block_slot_.assign(n, -1);
    for (int64_t e = 0; e < net_cost.size(); ++e) {
      Net net{net_cost[e], n, -1};
      for (const int32_t* v = pins.begin(e); v != pins.end(e); ++v) {
        net.first = std::min<int64_t>(net.first, *v), net.last = std::max<int64_t>(net.last, *v);
      }
      if (net.cost > 0 && net.first < net.last) {
        for (const int32_t* v = pins.begin(e); v != pins.end(e); ++v)
          nets_of_[*v].push_back(nets_.size());
        nets_.push_back(net);
      }
    }
    std::vector<int64_t> last(n, -1);  // the last block whose side depends on this one's
    for (int64_t v = 0; v < before.size(); ++v) {
      for (const int32_t* u = before.begin(v); u != before.end(v); ++u) {
        const int64_t first = std::min<int64_t>(*u, v), second = std::max<int64_t>(*u, v);
        earlier_[second].push_back({first, first == *u});
        last[first] = std::max(last[first], second);
        last[second] = std::max(last[second], second);
      }
    }
    ordered_.resize(n);
    for (int64_t v = 0; v < n; ++v) ordered_[v] = last[v] >= 0;
    Slots(last);
    Suffixes();
  }

  /*! \brief Fill `in` with the best set. Return {value, load as rounded down}; an infinite value if
   * there are too many entries. */
  std::pair<double, double> Solve(const View<uint8_t>& in) {
    const int64_t n = time_.size();
    std::map<uint64_t, std::vector<Entry>> now{{0, {{0.0, 0.0, -1}}}};
    std::vector<std::vector<int64_t>> back(n);
    std::fill(in.data(), in.data() + n, 0);
    for (int64_t v = 0; v < n; ++v) {
      if (entries_ > max_entries_) return {HUGE_VAL, 0.0};
      std::map<uint64_t, Runs> next;
      int64_t index = 0;
      for (const auto& [key, list] : now) {
        for (uint64_t side = 0; side < (ordered_[v] ? kSides : kAfter); ++side) {
          const bool inside = side == kInside;
          if ((inside && time_[v] == HUGE_VAL) || !Allowed(key, v, side)) continue;
          double pay = 0.0;
          const uint64_t to = Step(key, v, side, &pay);
          const double load = pay + (inside ? time_[v] : 0.0), gain = inside ? value_[v] : 0.0;
          std::vector<Entry> moved;
          for (size_t i = 0; i < list.size(); ++i) {
            const Entry x{list[i].load + load, list[i].value + gain,
                          4 * (index + static_cast<int64_t>(i)) + static_cast<int64_t>(side)};
            if (x.load > budget_) break;
            if (x.value + Most(v + 1, budget_ - x.load) > enough_) moved.push_back(x);
          }
          if (!moved.empty()) next[to].push_back(std::move(moved));
        }
        index += list.size();
      }
      now.clear();
      for (auto& [key, runs] : next) {
        std::vector<Entry> list = Merge(std::move(runs));
        for (const Entry& x : list) back[v].push_back(x.back);
        entries_ += list.size();
        now[key] = std::move(list);
      }
    }
    Entry best{0.0, -HUGE_VAL, -1};
    int64_t at = -1, index = 0;
    for (const auto& [key, list] : now) {
      for (const Entry& x : list) {
        if (x.value > best.value) best = x, at = index;
        ++index;
      }
    }
    for (int64_t v = n - 1; v >= 0 && at >= 0; --v) {
      in[v] = (back[v][at] & 3) == kInside;
      at = back[v][at] >> 2;
    }
    return {best.value, best.load};
  }
  int64_t entries() const { return entries_; }

 private:
  /*! \brief Give each net, and each block that others must follow, two bits of the state from its
   * first block to its last. */
  void Slots(const std::vector<int64_t>& last) {
    std::vector<int> free;
    int slots = 0;
    const auto take = [&] {
      if (free.empty()) free.push_back(slots++);
      const int slot = free.back();
      free.pop_back();
      return slot;
    };
    const int64_t n = time_.size();
    std::vector<std::vector<int>> freed(n);
    for (int64_t v = 0; v < n; ++v) {
      for (int64_t e : nets_of_[v]) {
        if (nets_[e].first == v)
          nets_[e].slot = take(), freed[nets_[e].last].push_back(nets_[e].slot);
      }
      if (last[v] > v) block_slot_[v] = take(), freed[last[v]].push_back(block_slot_[v]);
      free.insert(free.end(), freed[v].begin(), freed[v].end());
      closes_.push_back(0);
      for (int slot : freed[v]) closes_.back() |= slot < 31 ? uint64_t{3} << 2 * slot : 0;
    }
    if (slots > 31) TVM_FFI_THROW(ValueError) << slots << " are open at once; leave out some (31)";
  }

  /*! \brief May v be on `side`? No block lies before one that it follows. */
  bool Allowed(uint64_t key, int64_t v, uint64_t side) const {
    for (const auto& [u, u_first] : earlier_[v]) {
      const uint64_t other = key >> 2 * block_slot_[u] & 3;
      if (u_first ? other > side : side > other) return false;
    }
    return true;
  }

  /*! \brief The state after v joins `side`; nets that become mixed are added to `pay`. */
  uint64_t Step(uint64_t key, int64_t v, uint64_t side, double* pay) const {
    const uint64_t in = side == kInside ? kIn : kOut;
    for (int64_t e : nets_of_[v]) {
      const Net& net = nets_[e];
      const int shift = 2 * net.slot;
      const uint64_t was = key >> shift & 3;
      if (net.first == v) {
        key |= in << shift;
      } else if (was != kMixed && was != in) {
        *pay += net.cost;
        key = (key & ~(uint64_t{3} << shift)) | kMixed << shift;
      }
    }
    if (block_slot_[v] >= 0) key |= side << 2 * block_slot_[v];
    return key & ~closes_[v];
  }

  /*! \brief Entries by load with rising value; of those within `grain_` one with the least load and
   * the most value stands for all. */
  std::vector<Entry> Merge(Runs runs) const {
    std::vector<Entry> all = std::move(runs[0]);
    for (size_t r = 1; r < runs.size(); ++r) {
      std::vector<Entry> both;
      both.reserve(all.size() + runs[r].size());
      std::merge(all.begin(), all.end(), runs[r].begin(), runs[r].end(), std::back_inserter(both),
                 [](const Entry& a, const Entry& b) { return a.load < b.load; });
      all = std::move(both);
    }
    std::vector<Entry> out;
    double anchor = -HUGE_VAL;
    for (const Entry& x : all) {
      if (!out.empty() && x.value <= out.back().value) continue;
      if (!out.empty() && x.load - anchor <= grain_) {
        out.back().value = x.value, out.back().back = x.back;
      } else {
        anchor = x.load;
        out.push_back(x);
      }
    }
    return out;
  }

  /*! \brief Tables for `Most`: for a few prices of a second, what blocks from v on earn above it.
   * The best price is near that of the set in question. */
  void Suffixes() {
    const int64_t n = time_.size();
    for (double share : {0.5, 0.8, 0.9, 0.97, 1.0, 1.05, 1.2})
      prices_.push_back(share * std::max(enough_, 0.0) / budget_);
    above_.assign((n + 1) * prices_.size(), 0.0);
    for (int64_t v = n - 1; v >= 0; --v) {
      for (size_t p = 0; p < prices_.size(); ++p) {
        const double earns = time_[v] < HUGE_VAL ? value_[v] - prices_[p] * time_[v] : 0.0;
        above_[v * prices_.size() + p] =
            above_[(v + 1) * prices_.size() + p] + std::max(0.0, earns);
      }
    }
  }
  double Most(int64_t v, double left) const {
    double most = HUGE_VAL;
    for (size_t p = 0; p < prices_.size(); ++p)
      most = std::min(most, above_[v * prices_.size() + p] + prices_[p] * left);
    return most;
  }

  const View<double>&time_, &value_;
  const double budget_, enough_, grain_;
  const int64_t max_entries_;
  std::vector<Net> nets_;
  std::vector<std::vector<int64_t>> nets_of_;
  std::vector<std::vector<std::pair<int64_t, bool>>>
      earlier_;  // (block placed before, does v follow it?)
  std::vector<int> block_slot_;
  std::vector<char> ordered_;
  std::vector<uint64_t> closes_;  // bits of what ends with the block
  std::vector<double> prices_, above_;
  int64_t entries_ = 0;
};

}  // namespace

/*! \brief Among sets of blocks with load <= budget, find one with the largest value, if that is
 * more than `enough`. Return (value; -inf: none, inf: more than `max_entries`; its load; entries
 * kept).
 *  \param arrays  time [blocks] (inf: cannot run), value [blocks], net_cost [nets], and (ptr, ids)
 * of each net's blocks.
 *  \param in      [blocks], set to 1 for the members.
 *  \param grain   Loads closer than this may be taken for the smaller of them: the value is never
 * too small, the set's true load may be a little above the budget. */
ffi::Array<double> LoadPricing(const ffi::Array<ffi::Tensor>& arrays, const ffi::TensorView& in,
                               double budget, double enough, double grain, int64_t max_entries) {
  if (arrays.size() != 7)
    TVM_FFI_THROW(ValueError) << "LoadPricing needs 7 arrays, got " << arrays.size();
  const View<double> time(arrays[0], "time"), value(arrays[1], "value"),
      cost(arrays[2], "net_cost");
  const Lists pins(arrays[3], arrays[4], "pins"), before(arrays[5], arrays[6], "before");
  Pricing pricing(time, value, cost, pins, before, budget, enough, grain, max_entries);
  const auto [best, load] = pricing.Solve(View<uint8_t>(in, "in"));
  return {best, load, static_cast<double>(pricing.entries())};
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.LoadPricing", LoadPricing); }
}  // namespace tvmhet
