/*! \file passes/load_pricing.cc
 *  \brief The most valuable set of blocks whose load fits in a given time: one device's part of a
 * load problem, priced.
 *
 *  Blocks are taken one by one, each in or out. Between two blocks only the open nets matter (those
 * with blocks on both sides of the cut): all out so far, all in, or mixed and paid for. For each
 * such state the best value over load is kept as a list. Nets with cost 0 are never open.
 *
 *  Where fewer nets are charged first, what each state can still earn then is found from the last
 * block backwards, and no list holds what cannot become worth more than is asked:
 *
 *      few nets:   completions  ◄── block n ◄── ... ◄── block 1
 *      all nets:   block 1 ──► ... ──► block n,  each entry with its completion > enough */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>
#include <vector>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

enum : uint64_t { kOut = 0, kIn = 1, kMixed = 2 };                 // of a net
enum : uint64_t { kBefore = 0, kInside = 1, kAfter = 2, kSides };  // of a block

constexpr int64_t kPerState = 24;  // entries whose work is that of a state and its completions

struct Entry {
  double load, value;
  int64_t back;  // 4 * index in the layer before + the block's side
};
using Runs = std::vector<std::vector<Entry>>;
using Completions = std::unordered_map<uint64_t, std::vector<Entry>>;  // by state

struct Net {
  double cost;
  int64_t first, last;  // of its blocks
  int64_t id;           // of the net given
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
      Net net{net_cost[e], n, -1, e};
      for (const int32_t* v = pins.begin(e); v != pins.end(e); ++v) {
        net.first = std::min<int64_t>(net.first, *v), net.last = std::max<int64_t>(net.last, *v);
      }
      if (net.cost > 0 && net.first < net.last) {
        for (const int32_t* v = pins.begin(e); v != pins.end(e); ++v)
          nets_of_[*v].push_back(nets_.size());
        nets_.push_back(net);
      }
    }
    std::vector<int64_t>& last = last_;
    last.assign(n, -1);
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
  std::pair<double, double> Solve(const View<uint8_t>& in, const Pricing* few = nullptr) {
    const int64_t n = time_.size();
    if (few) Translate(*few);
    std::map<uint64_t, std::vector<Entry>> now{{0, {{0.0, 0.0, -1}}}};
    std::vector<std::vector<int64_t>> back(n);
    std::fill(in.data(), in.data() + n, 0);
    for (int64_t v = 0; v < n; ++v) {
      if (entries_ > max_entries_) return {HUGE_VAL, 0.0};
      if (few) entries_ += kPerState * static_cast<int64_t>(now.size());
      std::map<uint64_t, Runs> next;
      int64_t index = 0;
      for (const auto& [key, list] : now) {
        for (uint64_t side = 0; side < (ordered_[v] ? kSides : kAfter); ++side) {
          const bool inside = side == kInside;
          if ((inside && time_[v] == HUGE_VAL) || !Allowed(key, v, side)) continue;
          double pay = 0.0;
          const uint64_t to = Step(key, v, side, &pay);
          const double load = pay + (inside ? time_[v] : 0.0), gain = inside ? value_[v] : 0.0;
          const std::vector<Entry>* rest = few ? few->Rest(v + 1, Short(to, v)) : nullptr;
          if (few && !rest) continue;
          size_t at = few ? rest->size() : 0;
          std::vector<Entry> moved;
          for (size_t i = 0; i < list.size(); ++i) {
            const Entry x{list[i].load + load, list[i].value + gain,
                          4 * (index + static_cast<int64_t>(i)) + static_cast<int64_t>(side)};
            if (x.load > budget_) break;
            double most = 0.0;
            if (few) {
              while (at > 0 && (*rest)[at - 1].load > budget_ - x.load) --at;
              if (at == 0) break;
              most = (*rest)[at - 1].value;
            } else {
              most = Most(v + 1, budget_ - x.load);
            }
            if (x.value + most > enough_) moved.push_back(x);
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

  /*! \brief Find for each block and state what the blocks from it on can earn over load, as far as
   * those before could make it more than `enough`. False if there are too many entries. */
  bool Complete() {
    const int64_t n = time_.size();
    std::vector<std::vector<uint64_t>> keys(n + 1);
    keys[0] = {0};
    int64_t states = 0;
    for (int64_t v = 0; v < n; ++v) {
      for (uint64_t key : keys[v]) {
        for (uint64_t side = 0; side < (ordered_[v] ? kSides : kAfter); ++side) {
          double pay = 0.0;
          if (Allowed(key, v, side)) keys[v + 1].push_back(Step(key, v, side, &pay));
        }
      }
      std::sort(keys[v + 1].begin(), keys[v + 1].end());
      keys[v + 1].erase(std::unique(keys[v + 1].begin(), keys[v + 1].end()), keys[v + 1].end());
      if ((states += keys[v + 1].size()) > max_entries_) return false;
    }
    rest_.resize(n + 1);
    rest_[n][0] = {{0.0, 0.0, -1}};
    for (int64_t v = n - 1; v >= 0; --v) {
      for (uint64_t key : keys[v]) {
        Runs runs;
        for (uint64_t side = 0; side < (ordered_[v] ? kSides : kAfter); ++side) {
          const bool inside = side == kInside;
          if ((inside && time_[v] == HUGE_VAL) || !Allowed(key, v, side)) continue;
          double pay = 0.0;
          const std::vector<Entry>* after = Rest(v + 1, Step(key, v, side, &pay));
          if (!after) continue;
          const double load = pay + (inside ? time_[v] : 0.0), gain = inside ? value_[v] : 0.0;
          runs.emplace_back();
          for (const Entry& x : *after) {
            if (x.load + load > budget_) break;
            if (x.value + gain + MostBefore(v, budget_ - x.load - load) > enough_)
              runs.back().push_back({x.load + load, x.value + gain, -1});
          }
        }
        if (runs.empty()) continue;
        std::vector<Entry> list = Merge(std::move(runs));
        entries_ += list.size();
        if (!list.empty()) rest_[v][key] = std::move(list);
      }
      if (entries_ > max_entries_) return false;
    }
    return true;
  }

 private:
  const std::vector<Entry>* Rest(int64_t v, uint64_t key) const {
    const auto it = rest_[v].find(key);
    return it == rest_[v].end() ? nullptr : &it->second;
  }

  /*! \brief Where the bits of each net and block that `few` keeps are in our states and in its. */
  void Translate(const Pricing& few) {
    const int64_t n = time_.size();
    bits_.assign(n, {});
    std::unordered_map<int64_t, int> slots;
    for (const Net& net : few.nets_) slots[net.id] = net.slot;
    for (const Net& net : nets_) {
      const auto it = slots.find(net.id);
      for (int64_t v = net.first; it != slots.end() && v < net.last; ++v)
        bits_[v].push_back({2 * net.slot, 2 * it->second});
    }
    for (int64_t u = 0; u < n; ++u) {
      for (int64_t v = u; v < last_[u]; ++v)
        bits_[v].push_back({2 * block_slot_[u], 2 * few.block_slot_[u]});
    }
  }
  /*! \brief The state after v as one that charges few nets. */
  uint64_t Short(uint64_t key, int64_t v) const {
    uint64_t out = 0;
    for (const auto& [from, to] : bits_[v]) out |= (key >> from & 3) << to;
    return out;
  }

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

  /*! \brief Tables for `Most` and `MostBefore`: for a few prices of a second, what blocks from v
   * on, and up to v, earn above it. The best price is near that of the set in question. */
  void Suffixes() {
    const int64_t n = time_.size();
    for (double share : {0.5, 0.8, 0.9, 0.97, 1.0, 1.05, 1.2})
      prices_.push_back(share * std::max(enough_, 0.0) / budget_);
    above_.assign((n + 1) * prices_.size(), 0.0);
    before_ = above_;
    const auto earns = [&](int64_t v, size_t p) {
      return time_[v] < HUGE_VAL ? std::max(0.0, value_[v] - prices_[p] * time_[v]) : 0.0;
    };
    const size_t prices = prices_.size();
    for (size_t p = 0; p < prices; ++p) {
      for (int64_t v = n - 1; v >= 0; --v)
        above_[v * prices + p] = above_[(v + 1) * prices + p] + earns(v, p);
      for (int64_t v = 0; v < n; ++v)
        before_[(v + 1) * prices + p] = before_[v * prices + p] + earns(v, p);
    }
  }
  double Most(int64_t v, double left) const { return Priced(above_, v, left); }
  double MostBefore(int64_t v, double left) const { return Priced(before_, v, left); }
  double Priced(const std::vector<double>& earned, int64_t v, double left) const {
    double most = HUGE_VAL;
    for (size_t p = 0; p < prices_.size(); ++p)
      most = std::min(most, earned[v * prices_.size() + p] + prices_[p] * left);
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
  std::vector<int64_t> last_;     // the last block whose side depends on this one's
  std::vector<double> prices_, above_, before_;
  std::vector<Completions> rest_;
  std::vector<std::vector<std::pair<int, int>>> bits_;  // (ours, of few) after each block
  int64_t entries_ = 0;
};

}  // namespace

/*! \brief Among sets of blocks with load <= budget, find one with the largest value, if that is
 * more than `enough`. Return (value; -inf: none, inf: more than `max_entries`; its load; entries
 * kept).
 *  \param arrays  time [blocks] (inf: cannot run), value [blocks], net_cost [nets], (ptr, ids) of
 * each net's blocks and of the blocks before each, and the costs [nets] of those charged first (0:
 * not), or nothing [0].
 *  \param in      [blocks], set to 1 for the members.
 *  \param grain   Loads closer than this may be taken for the smaller of them: the value is never
 * too small, the set's true load may be a little above the budget. */
ffi::Array<double> LoadPricing(const ffi::Array<ffi::Tensor>& arrays, const ffi::TensorView& in,
                               double budget, double enough, double grain, int64_t max_entries) {
  if (arrays.size() != 8)
    TVM_FFI_THROW(ValueError) << "LoadPricing needs 8 arrays, got " << arrays.size();
  const View<double> time(arrays[0], "time"), value(arrays[1], "value"),
      cost(arrays[2], "net_cost"), few_cost(arrays[7], "few_cost");
  const Lists pins(arrays[3], arrays[4], "pins"), before(arrays[5], arrays[6], "before");
  const auto priced = [&](const View<double>& costs) {
    return Pricing(time, value, costs, pins, before, budget, enough, grain, max_entries);
  };
  const View<uint8_t> out(in, "in");
  Pricing all = priced(cost);
  if (few_cost.size() == 0) {
    const auto [best, load] = all.Solve(out);
    return {best, load, static_cast<double>(all.entries())};
  }
  Pricing few = priced(few_cost);
  if (!few.Complete()) return {HUGE_VAL, 0.0, static_cast<double>(few.entries())};
  const auto [best, load] = all.Solve(out, &few);
  return {best, load, static_cast<double>(few.entries() + all.entries())};
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.LoadPricing", LoadPricing); }
}  // namespace tvmhet
