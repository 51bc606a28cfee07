/*! \file passes/stage_priced.cc
 *  \brief Chains of stages whose groups come back: candidates where stages may share devices.
 *
 *      a100 ──► t4 ──► a100 ──► t4        one second of group g costs p[g], all devices together 1
 *
 *  Where all devices of a group run all its stages, the largest load is that of the busiest group.
 * A Lagrangian relaxation: the chain of least price is a shortest path over (cut, group); then
 * groups that it uses more than the others become dearer. Each round leaves one chain. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>

#include "stage_table.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

class Priced {
 public:
  explicit Priced(const StageTable& t)
      : t_(t),
        price_(t.devices.EqualPrices()),
        cost_(t.num_cuts * t.groups),
        via_(t.num_cuts * t.groups) {}

  /*! \brief (from cut, to cut, group, devices of it) of each stage of the cheapest chain; raises
   * the prices of the groups that it keeps busy, by `step`. Empty if there is no chain. */
  std::vector<int64_t> Next(double step) {
    const int64_t n = t_.groups, end = t_.num_cuts - 1;
    std::fill(cost_.begin(), cost_.end(), HUGE_VAL);
    for (int64_t b = 0; b < end; ++b) {
      for (int64_t c = b + 1; c <= end; ++c) {
        for (int64_t g = 0; g < n; ++g) {
          if (!t_.Possible(b, c, g)) continue;
          const double price = t_.devices.PriceOf(g, price_), alone = price * AloneS(b, c, g);
          if (b == 0) Offer(c * n + g, alone, -1);
          for (int64_t h = 0; b > 0 && h < n; ++h) {
            if (h == g || cost_[b * n + h] == HUGE_VAL) continue;
            const double move = t_.Receive(b * t_.num_cuts + c, g, h) - HostS(b, c, g);
            const double both = price + t_.devices.PriceOf(h, price_);
            Offer(c * n + g, cost_[b * n + h] + alone + both * move, b * n + h);
          }
        }
      }
    }
    int64_t at = end * n;
    for (int64_t g = 1; g < n; ++g) {
      if (cost_[end * n + g] < cost_[at]) at = end * n + g;
    }
    if (cost_[at] == HUGE_VAL) return {};
    return Trace(at, step);
  }

 private:
  double HostS(int64_t b, int64_t c, int64_t g) const {
    return t_.Receive(b * t_.num_cuts + c, g, -1);
  }
  /*! \brief Seconds of a stage without what moves between stages. */
  double AloneS(int64_t b, int64_t c, int64_t g) const {
    const int64_t at = b * t_.num_cuts + c;
    return t_.time[at * t_.groups + g] + t_.overhead[g] + HostS(b, c, g) + t_.Send(at, g, -1);
  }
  void Offer(int64_t at, double cost, int64_t via) {
    if (cost < cost_[at]) cost_[at] = cost, via_[at] = via;
  }

  /*! \brief Add the seconds of a stage on g to those of a device of its pool. */
  void Use(int64_t g, double seconds, std::vector<double>* busy) const {
    const int64_t pool = t_.devices.pool[g];
    (*busy)[pool] += t_.devices.width[g] * seconds / t_.devices.room[pool];
  }

  std::vector<int64_t> Trace(int64_t at, double step) {
    const int64_t n = t_.groups;
    std::vector<int64_t> out;
    std::vector<double> busy(n, 0.0);
    for (; at >= 0; at = via_[at]) {
      const int64_t begin = via_[at] < 0 ? 0 : via_[at] / n, c = at / n, g = at % n;
      Use(g, AloneS(begin, c, g), &busy);
      if (via_[at] >= 0) {
        const int64_t h = via_[at] % n;
        const double move = t_.Receive(begin * t_.num_cuts + c, g, h) - HostS(begin, c, g);
        Use(g, move, &busy), Use(h, move, &busy);
      }
      const int64_t four[4] = {begin, c, g, t_.count[g]};
      out.insert(out.begin(), four, four + 4);
    }
    const double most = *std::max_element(busy.begin(), busy.end());
    double sum = 0.0;
    for (int64_t g = 0; g < n; ++g) {
      if (most > 0) price_[g] *= std::exp(step * (busy[g] / most - 0.5));
      sum += price_[g] * t_.devices.room[g];
    }
    for (double& p : price_) p /= sum;
    return out;
  }

  const StageTable& t_;
  std::vector<double> price_, cost_;
  std::vector<int64_t> via_;  // cut * groups + group of the stage before, -1 at the start
};

}  // namespace

/*! \brief Return chains in which groups may come back, each as flat (from cut, to cut, group,
 * devices), without repeats in a row. \param arrays those of StageTable. */
ffi::Array<ffi::Any> StagePriced(const ffi::Array<ffi::Tensor>& arrays, bool overlap,
                                 int64_t rounds) {
  const StageTable t(arrays, overlap);
  Priced priced(t);
  std::vector<std::vector<int64_t>> found;
  for (int64_t i = 0; i < rounds; ++i) {
    const std::vector<int64_t> chain = priced.Next(1.5 / (1.0 + 0.25 * i));
    if (chain.empty()) break;
    if (std::find(found.begin(), found.end(), chain) == found.end()) found.push_back(chain);
  }
  ffi::Array<ffi::Any> out;
  for (const auto& chain : found) out.push_back(ffi::Array<int64_t>(chain.begin(), chain.end()));
  return out;
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.StagePriced", StagePriced); }
}  // namespace tvmhet
