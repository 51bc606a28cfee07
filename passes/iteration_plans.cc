/*! \file passes/iteration_plans.cc
 *  \brief Every plan of a training iteration whose closed form may be below a value.
 *
 *      end ◄── [17, end) t4 x2 ◄── [4, 17) a100 x1 ◄── [0, 4) ...      depth first, from the end
 *
 *  A suffix is left once its paths, its largest (n - 1) load, its largest all-reduce and update,
 * and the shortest way through what is still missing come to the value. For small problems, where
 * the closed form is not the last word: see tvmhet/solve/iteration_simulated.py. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "iteration_labels.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

class Listing {
 public:
  Listing(const IterationStages& s, double upper, int64_t max_plans, int64_t max_steps)
      : s_(s),
        upper_(upper),
        max_plans_(max_plans),
        max_steps_(max_steps),
        used_(s.groups, 0),
        way_(LeastBeforeOf(s).way) {}

  void Run() { From(s_.cuts - 1, -1, 0, 0.0, 0.0, 0.0); }

  ffi::Array<ffi::Any> plans;
  bool complete = true;
  int64_t steps = 0;

 private:
  void From(int64_t c, int64_t after, int64_t later, double path, double slowest, double post) {
    if (c == 0) {
      if (static_cast<int64_t>(plans.size()) >= max_plans_) {
        complete = false;
        return;
      }
      ffi::Array<int64_t> rows;
      for (auto row = chosen_.rbegin(); row != chosen_.rend(); ++row)
        for (int64_t x : *row) rows.push_back(x);
      plans.push_back(rows);
      return;
    }
    for (int64_t mode = 0; mode < s_.modes; ++mode) {
      for (int64_t b = 0; b < c; ++b) Before(b, c, mode, after, later, path, slowest, post);
    }
  }

  void Before(int64_t b, int64_t c, int64_t mode, int64_t after, int64_t later, double path,
              double slowest, double post) {
    const int64_t at = (mode * s_.cuts + b) * s_.cuts + c, g = s_.mode_group[mode],
                  degree = s_.mode_degree[mode], micro = s_.microbatches;
    if (!(s_.time[at] < HUGE_VAL) || !complete) return;
    const StageCost cost = StageCostOf(s_, b, c, mode, after);
    const double update = s_.update[g] * s_.updated[at];
    const double hidden = s_.reduce_overlap * s_.backward_share[mode] * s_.time[at];
    const int64_t free = (s_.count[g] - used_[g]) / degree;
    for (int64_t r = 1; r <= std::min(free, micro); ++r) {
      if (++steps > max_steps_) complete = false;
      const double load = ((micro + r - 1) / r - 1) * cost.load;
      const double exchange = s_.ReduceS(mode, at, r);
      const double end = std::max(post, std::max(0.0, exchange - hidden) + update);
      const double least = path + cost.path + way_[b] + std::max(slowest, load) + end;
      if (!complete || !(least < upper_) || !s_.Fits(at, g, later, r)) continue;
      used_[g] += r * degree;
      chosen_.push_back({b, c, mode, r});
      From(b, g, later + r, path + cost.path, std::max(slowest, load), end);
      chosen_.pop_back();
      used_[g] -= r * degree;
    }
  }

  const IterationStages& s_;
  double upper_;
  int64_t max_plans_, max_steps_;
  std::vector<int64_t> used_;
  std::vector<double> way_;
  std::vector<std::array<int64_t, 4>> chosen_;
};

}  // namespace

/*! \brief List plans of a training iteration.
 *  \param arrays, scalars as for IterationSearch; replicas of a stage are in one mode.
 *  \param upper plans whose closed form is above it may be left out.
 *  \return (plans, each (from cut, to cut, mode, replicas)...; whether none below `upper` is
 * missing; steps). */
ffi::Array<ffi::Any> IterationPlans(const ffi::Array<ffi::Tensor>& arrays,
                                    const ffi::Array<double>& scalars, bool overlap, bool gpipe,
                                    double upper, int64_t max_plans, int64_t max_steps) {
  const IterationStages stages = UnpackStages(arrays, scalars, overlap, gpipe);
  Listing listing(stages, upper, max_plans, max_steps);
  listing.Run();
  return {listing.plans, listing.complete, listing.steps};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef().def("tvmhet.IterationPlans", IterationPlans);
}
}  // namespace tvmhet
