/*! \file passes/iteration_search.cc
 *  \brief Which stages, on which devices, with which replicas, make the
 * shortest training iteration.
 *
 *      cut 0 ──recompute, t4 x3──► cut 17 ──keep, a100 x1──► cut 40 = end label
 * at a cut: what the stages after it use
 *
 *  An iteration takes  sum of the stages' paths  +  the largest (n - 1) load  +
 * the largest all-reduce and update. For a limit on the middle term a suffix of
 * the model is described by the devices it uses, its paths' sum and its largest
 * last term; suffixes, because 1F1B keeps as many micro-batches on a stage as
 * there are replicas from it to the end. The limit goes down from one that any
 * plan keeps, so that every trade is seen to within `step`. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>

#include "iteration_labels.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

bool OneLink(const IterationStages& s) {
  for (int64_t i = 1; i < s.latency.size(); ++i) {
    if (s.latency[i] != s.latency[0] || s.per_byte[i] != s.per_byte[0]) return false;
  }
  return true;
}

}  // namespace

/*! \brief Search the stages of a training iteration.
 *  \param arrays time, memory and stash [modes, cuts, cuts] (seconds of both
 * passes of one micro-batch, bytes that do not depend on the schedule, bytes
 * per micro-batch in flight), group, degree and share of the backward pass of
 * each mode, moves [cuts, cuts, 8], gradient moves [cuts, cuts, 4] (count and
 * bytes sent back, count and bytes received), weight bytes of one device
 * [modes, cuts, cuts], link latency and s/byte [groups, groups], host latency and s/byte, overhead,
 * memory limit, all-reduce [groups, 5], update s/byte, computing power of one
 * device, device counts [groups], bytes of one device that the stage is the
 * first to read, of which it makes the update [modes, cuts, cuts], weight
 * bytes of all devices of a team [cuts, cuts].
 *  \param scalars gradient bytes per weight byte, overlap of the all-reduce,
 * micro-batches, and 1 where replicas of a stage may be on unlike groups, else
 * 0.
 *  \param upper only plans below it are of interest, in seconds; may be inf.
 *  \param step neighbouring limits differ by at least this factor.
 *  \param floor no plan has a smaller largest (n - 1) load.
 *  \return (list of plans, each (from cut, to cut, mode, replicas)..., best
 * first, with a row for each group where a stage's replicas are on several;
 * their least value; proved lower bound over these cuts; truncated; steps). */
ffi::Array<ffi::Any> IterationSearch(const ffi::Array<ffi::Tensor>& arrays,
                                     const ffi::Array<double>& scalars, bool overlap, bool gpipe,
                                     double upper, double step, double floor, int64_t max_labels,
                                     int64_t max_steps) {
  const IterationStages stages = UnpackStages(arrays, scalars, overlap, gpipe);
  SuffixSearch search(stages, OneLink(stages), max_labels);
  std::vector<std::pair<double, std::vector<int64_t>>> plans;
  double best = upper, proved = HUGE_VAL;
  auto look = [&](double limit) {  // returns the label's rest, or inf
    const int64_t label = search.Run(limit, best);
    if (label < 0) return std::make_pair(HUGE_VAL, 0.0);
    const double rest = search.Rest(label), steady = search.Steady(label);
    plans.emplace_back(rest + steady, search.Trace(label));
    best = std::min(best, rest + steady);
    return std::make_pair(rest, steady);
  };
  for (double factor : {1.02, 1.1, 1.25, 1.6, 2.5}) {
    if (floor > 0 && look(floor * factor).first < HUGE_VAL) break;
  }
  bool complete = true;
  for (double limit = best;;) {  // a plan whose largest load is above the best value cannot beat it
    const auto [rest, steady] = look(limit);
    if (rest == HUGE_VAL || rest + floor >= best || steady <= 0) break;
    const double next = std::min(steady, limit) * (1.0 - step);
    if (best - rest > next) {
      proved = std::min(proved, rest + next);
      limit = next;
    } else {
      limit = best - rest;
    }
    if (search.steps > max_steps) {
      complete = false;
      break;
    }
  }
  std::stable_sort(plans.begin(), plans.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  ffi::Array<ffi::Any> lists;
  for (size_t i = 0; i < plans.size() && i < 12; ++i)
    lists.push_back(ffi::Array<int64_t>(plans[i].second.begin(), plans[i].second.end()));
  const double lower = complete ? std::min(best, proved) : 0.0;
  return {lists, best, lower, search.truncated, search.steps};
}

/*! \brief The trades of time against rent: for falling limits on the largest (n
 * - 1) load, the plans that no other beats in both.
 *  \param price rent of one device of each group. The rest is as for
 * IterationSearch.
 *  \return (list of plans, cheapest rent first; truncated). */
ffi::Array<ffi::Any> IterationFront(const ffi::Array<ffi::Tensor>& arrays,
                                    const ffi::Array<double>& scalars, bool overlap, bool gpipe,
                                    const ffi::TensorView& price, double step, int64_t max_labels,
                                    int64_t max_steps) {
  struct Trade {
    double rent, value;
    std::vector<int64_t> stages;
  };
  const IterationStages stages = UnpackStages(arrays, scalars, overlap, gpipe);
  const View<double> usd(price, "price");
  SuffixSearch search(stages, OneLink(stages), max_labels);
  std::vector<Trade> kept;
  bool truncated = false;
  for (double limit = HUGE_VAL;;) {
    if (search.Run(limit, HUGE_VAL) < 0) break;
    double slowest = 0.0;
    for (int64_t i = 0; i < search.NumPlans(); ++i) {
      double rent = 0.0;
      for (int64_t g = 0; g < stages.groups; ++g) rent += usd[g] * search.Used(i, g);
      const double value = search.Rest(i) + search.Steady(i);
      slowest = std::max(slowest, search.Steady(i));
      auto beats = [&](const Trade& t) { return t.rent <= rent && t.value <= value; };
      if (std::any_of(kept.begin(), kept.end(), beats)) continue;
      auto beaten = [&](const Trade& t) { return rent <= t.rent && value <= t.value; };
      kept.erase(std::remove_if(kept.begin(), kept.end(), beaten), kept.end());
      kept.push_back({rent, value, search.Trace(i)});
    }
    limit = std::min(limit, slowest) * (1.0 - step);
    if (!(limit > 0) || search.steps > max_steps) {
      truncated = search.steps > max_steps;
      break;
    }
  }
  std::sort(kept.begin(), kept.end(), [](const Trade& a, const Trade& b) {
    return a.rent != b.rent ? a.rent < b.rent : a.value < b.value;
  });
  ffi::Array<ffi::Any> lists;
  for (const Trade& t : kept)
    lists.push_back(ffi::Array<int64_t>(t.stages.begin(), t.stages.end()));
  return {lists, truncated || search.truncated};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def("tvmhet.IterationSearch", IterationSearch)
      .def("tvmhet.IterationFront", IterationFront);
}
}  // namespace tvmhet
