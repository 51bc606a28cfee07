/*! \file passes/pricing_bounds.h
 *  \brief What blocks still to come, or those so far, earn at most within a time and in a state: by
 * shares of the nets (net_shares.h), for a few prices of a second. */
#ifndef TVMHET_PASSES_PRICING_BOUNDS_H_
#define TVMHET_PASSES_PRICING_BOUNDS_H_

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "net_shares.h"
#include "pricing_states.h"

namespace tvmhet {

/*! \brief By how much a bound's time grows for a slot's bits. */
struct Slack {
  int slot;
  double by[3];
};

class PricingBounds {
 public:
  /*! \brief A bound per price of a second: what blocks from v on, or before v, earn above it. */
  struct Bound {
    std::vector<double> earned;              // per v and price
    std::vector<double> relief;              // per v: load that shares below 0 may take away
    std::vector<std::vector<Slack>> slacks;  // per block v and price: of the slots open after it
  };
  Bound ahead, behind;

  PricingBounds(const PricedBlocks& blocks, const std::vector<SharedPrice>& prices,
                const PricingStates& states)
      : blocks_(blocks), prices_(prices), time_(blocks.time) {
    for (size_t e = 0; e < blocks.nets.size() && !prices.empty(); ++e) {
      if (states.Charged(e)) continue;
      for (size_t i = 0; i < blocks.nets[e].pins.size(); ++i)
        time_[blocks.nets[e].pins[i]] += prices[0].share[e][i];
    }
    const int64_t n = blocks.size(), count = prices.size();
    ahead.earned.assign((n + 1) * count, 0.0), behind.earned = ahead.earned;
    ahead.slacks.resize(n * count), behind.slacks.resize(n * count);
    ahead.relief.assign(n + 1, 0.0), behind.relief = ahead.relief;
    for (int64_t v = n - 1; v >= 0; --v)
      ahead.relief[v] = ahead.relief[v + 1] + std::min(0.0, time_[v]);
    for (int64_t v = 0; v < n; ++v)
      behind.relief[v + 1] = behind.relief[v] + std::min(0.0, time_[v]);
    for (int64_t p = 0; p < count; ++p) {
      const NetShares& share = prices[p].share;
      std::vector<double> time = time_;
      for (size_t e = 0; e < blocks.nets.size(); ++e) {
        for (size_t i = 0; states.Charged(e) && i < blocks.nets[e].pins.size(); ++i)
          time[blocks.nets[e].pins[i]] += share[e][i];
      }
      const auto earns = [&](int64_t v) {
        const bool can = time_[v] < HUGE_VAL;
        return can ? std::max(0.0, blocks.value[v] - prices[p].price * time[v]) : 0.0;
      };
      for (int64_t v = n - 1; v >= 0; --v)
        ahead.earned[v * count + p] = ahead.earned[(v + 1) * count + p] + earns(v);
      for (int64_t v = 0; v < n; ++v) {
        behind.earned[(v + 1) * count + p] = behind.earned[v * count + p] + earns(v);
        for (const Open& open : states.open(v)) {
          ahead.slacks[v * count + p].push_back(Ahead(share, open, v));
          behind.slacks[v * count + p].push_back(Behind(share, open, v));
        }
      }
    }
    worth_.resize(count);
  }
  /*! \brief Seconds of block v with its shares of the nets outside the states. */
  double time(int64_t v) const { return time_[v]; }
  /*! \brief What the shares of blocks after v sum to beyond what these nets still cost, at most. */
  Slack Ahead(const NetShares& share, const Open& open, int64_t v) const {
    Slack slack{open.slot, {0.0, 0.0, 0.0}};
    for (int64_t e : open.nets) {
      const auto [all, above] = After(share, e, v);
      slack.by[kIn] += all, slack.by[kMixed] += above;
    }
    return slack;
  }
  double SlackOf(const std::vector<Slack>& slacks, Key key) const {
    double sum = 0.0;
    for (const Slack& slack : slacks) sum += slack.by[Bits(key, slack.slot)];
    return sum;
  }
  /*! \brief Prepare `Most` for blocks from (ahead) or before (behind) v, in the state after `cut`.
   */
  void Worth(const Bound& bound, int64_t v, Key key, int64_t cut) {
    const size_t prices = prices_.size();
    for (size_t p = 0; p < prices; ++p) {
      worth_[p] = bound.earned[v * prices + p] +
                  prices_[p].price * SlackOf(bound.slacks[cut * prices + p], key);
    }
  }
  /*! \brief What those blocks earn at most within the time that is left. */
  double Most(double left) const {
    double most = HUGE_VAL;
    for (size_t p = 0; p < worth_.size(); ++p)
      most = std::min(most, worth_[p] + prices_[p].price * left);
    return most;
  }

 private:
  /*! \brief Sum of shares of a net's blocks after v, and of those above 0. */
  std::pair<double, double> After(const NetShares& share, int64_t e, int64_t v) const {
    const std::vector<int32_t>& pins = blocks_.nets[e].pins;
    double all = 0.0, above = 0.0;
    for (size_t i = pins.size(); i-- > 0 && pins[i] > v;)
      all += share[e][i], above += std::max(0.0, share[e][i]);
    return {all, above};
  }
  /*! \brief What the shares of blocks up to v sum to beyond what these nets cost so far, at most.
   */
  Slack Behind(const NetShares& share, const Open& open, int64_t v) const {
    Slack slack{open.slot, {0.0, 0.0, 0.0}};
    for (int64_t e : open.nets) {
      const auto [all, above] = After(share, e, -1);
      const auto [rest, rest_above] = After(share, e, v);
      slack.by[kIn] += all - rest, slack.by[kMixed] += above - rest_above - blocks_.nets[e].cost;
    }
    return slack;
  }

  const PricedBlocks& blocks_;
  const std::vector<SharedPrice>& prices_;
  std::vector<double> time_, worth_;
};

}  // namespace tvmhet
#endif  // TVMHET_PASSES_PRICING_BOUNDS_H_
