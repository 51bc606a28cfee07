/*! \file passes/net_shares.h
 *  \brief Shares of nets' costs on their blocks: what nets cost at least, as a linear function of
 * the blocks inside.
 *
 *  A net costs c if some of its blocks are in the set and some are not. For shares that sum to 0
 * over its blocks, and to at most c over those above 0, that is at least the sum of the shares of
 * the blocks inside. For a price of a second, the best shares are a maximum flow: the set worth
 * most above its price is a least cut (Picard, 1976), and what passes through a net is shared as it
 * enters and leaves.
 *
 *      source ──value - price * time──► block ──► [ net: price * cost ] ──► block ──► sink */
#ifndef TVMHET_PASSES_NET_SHARES_H_
#define TVMHET_PASSES_NET_SHARES_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "arrays.h"
#include "max_flow.h"

namespace tvmhet {

using NetShares = std::vector<std::vector<double>>;  // per net and place among its blocks

/*! \brief Blocks in their order and the nets over them; nets that cost nothing are left out. */
struct PricedBlocks {
  struct Net {
    double cost;
    std::vector<int32_t> pins;  // ascending
    int32_t level;              // as given
  };
  std::vector<double> time, value;
  std::vector<Net> nets;

  int64_t size() const { return time.size(); }
};

/*! \brief The shares for one price of a second, and what they prove. */
struct SharedPrice {
  double price;
  double most;    // no set within the time is worth more
  bool too_long;  // is the set worth most above its price longer than that?
  NetShares share;
};

inline SharedPrice ShareNets(const PricedBlocks& blocks, double budget, double price) {
  const int64_t n = blocks.size(), nets = blocks.nets.size(), s = n + 2 * nets, t = s + 1;
  MaxFlow flow(1e-12);
  flow.Reset(t + 1);
  const double scale = 1.0 / std::max(price * budget, 1e-300);
  double total = 0.0;
  for (int64_t v = 0; v < n; ++v) {
    const double worth = (blocks.value[v] - price * blocks.time[v]) * scale;
    if (worth > 0) flow.Add(s, v, worth), total += worth;
    if (worth < 0) flow.Add(v, t, -worth);
  }
  std::vector<std::vector<int64_t>> enters(nets), leaves(nets);
  for (int64_t e = 0; e < nets; ++e) {
    const int64_t in = n + 2 * e, out = in + 1;
    flow.Add(in, out, price * blocks.nets[e].cost * scale);
    for (int32_t v : blocks.nets[e].pins) {
      enters[e].push_back(flow.Add(v, in, HUGE_VAL));
      leaves[e].push_back(flow.Add(out, v, HUGE_VAL));
    }
  }
  const double cut = flow.Run(s, t);
  SharedPrice found{price, (total - cut) / scale + price * budget, false, {}};
  double load = 0.0;
  for (int64_t v = 0; v < n; ++v) load += flow.Reached(v) ? blocks.time[v] : 0.0;
  for (int64_t e = 0; e < nets; ++e) {
    const std::vector<int32_t>& pins = blocks.nets[e].pins;
    const auto in =
        std::count_if(pins.begin(), pins.end(), [&](int32_t v) { return flow.Reached(v); });
    if (in > 0 && in < static_cast<int64_t>(pins.size())) load += blocks.nets[e].cost;
    found.share.emplace_back();
    for (size_t i = 0; i < pins.size(); ++i)
      found.share[e].push_back((flow.Flow(enters[e][i]) - flow.Flow(leaves[e][i])) / scale / price);
  }
  found.too_long = load > budget;
  return found;
}

/*! \brief Shares for a few prices of a second near the best one, that one first. Empty where no
 * price is above 0. */
inline std::vector<SharedPrice> SharePrices(const PricedBlocks& blocks, double budget) {
  double low = 0.0, high = 0.0, sum = 0.0, all = 0.0;
  for (int64_t v = 0; v < blocks.size(); ++v) {
    const double t = blocks.time[v];
    if (t > 0 && t < HUGE_VAL) sum += t, all += blocks.value[v];
  }
  std::vector<SharedPrice> out;
  double price = sum > 0 && budget > 0 ? all / sum : 0.0;
  if (price <= 0) return out;
  SharedPrice best{0.0, HUGE_VAL, false, {}};
  for (int step = 0; step < 10; ++step) {
    SharedPrice now = ShareNets(blocks, budget, price);
    (now.too_long ? low : high) = price;
    if (now.most < best.most) best = std::move(now);
    price = high == 0.0 ? price * 1.2 : low == 0.0 ? price / 1.2 : (low + high) / 2;
    if (low > 0 && high > 0 && high - low < 0.01 * high) break;
  }
  out.push_back(std::move(best));
  for (double part : {0.85, 0.94, 1.06, 1.15, 1.4})
    out.push_back(ShareNets(blocks, budget, out[0].price * part));
  return out;
}

}  // namespace tvmhet
#endif  // TVMHET_PASSES_NET_SHARES_H_
