/*! \file passes/training_search.cc
 *  \brief Stages of pipelined training: nodes, data-parallel and tensor-parallel degrees, and who
 * recomputes.
 *
 *      suffixes of the model:   {} ◄──last stage, d=4 t=1── S1 ◄──d=2 t=2── S2 ◄── ... ── all
 *
 *  A stage of d * t devices holds y = ceil(sum of degrees d of it and all later stages / d)
 * samples. For a bound T on the time of a stage, memory bounds y, hence that sum; so the fewest
 * devices for each (suffix, sum of degrees) are a shortest path, and T is found by bisection.
 * Stages are valued when a bound first admits them. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <unordered_map>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

struct Model {
  View<uint64_t> states;     // suffixes, small ones first
  View<int32_t> tensor;      // tensor degrees
  View<int32_t> config_ptr;  // configurations of (node, tensor degree)
  View<double> config;       // [configurations, 4]: seconds, parameter bytes, A, B
  Lists sync_with;           // per configuration: neighbours ...
  View<double> sync_bytes;   // ... and bytes, moved when the neighbour is in another stage
  Lists near;                // per node: neighbours ...
  View<double> near_bytes;   // ... and the bytes of the edge
  View<int32_t> sync_ptr, near_ptr;
  int64_t nodes, devices, batches;
  double memory, byte_per_s;
};

struct Choice {
  double time, per_sample, fixed;
  double Memory(int64_t samples) const { return per_sample * samples + fixed; }
};

constexpr size_t kFewSwaps = 20;  // up to so many are chosen exactly, whatever their kinds

struct Swap {
  double extra, saved;
  int64_t count;
};

constexpr int64_t kMostTries = 2000;  // of one choice: swaps alike in extra / saved could take 2^20

/*! \brief Lower `best` to the least extra seconds of `swaps` from `i` on, by rising extra / saved,
 * that save `need`, in up to `tries` steps. */
void LeastExtra(const std::vector<Swap>& swaps, size_t i, double need, double extra, double* best,
                int64_t* tries) {
  if (need <= 0) *best = std::min(*best, extra);
  double rest = need, bound = extra;  // with a part of the last swap
  for (size_t j = i; j < swaps.size() && rest > 0; ++j) {
    bound += swaps[j].extra * std::min(1.0, rest / swaps[j].saved);
    rest -= swaps[j].saved;
  }
  if (need <= 0 || rest > 0 || bound >= *best || --*tries < 0) return;
  LeastExtra(swaps, i + 1, need - swaps[i].saved, extra + swaps[i].extra, best, tries);
  LeastExtra(swaps, i + 1, need, extra, best, tries);
}

/*! \brief Least seconds of a stage that holds `samples`, one choice per node; inf if nothing fits.
 * `guessed` is set where they may not be the least; with `relaxed` nodes may be recomputed in part
 * there, and nothing is less. See recompute.py. */
double Cheapest(const std::vector<std::vector<Choice>>& nodes, int64_t samples, double memory,
                bool relaxed, bool* guessed) {
  double need = -memory, least = -memory, seconds = 0.0;
  std::vector<const Choice*> fastest;
  for (const auto& row : nodes) {
    const Choice* fast = &row[0];
    double small = HUGE_VAL;
    for (const Choice& c : row) {
      if (c.time < fast->time ||
          (c.time == fast->time && c.Memory(samples) < fast->Memory(samples)))
        fast = &c;
      small = std::min(small, c.Memory(samples));
    }
    fastest.push_back(fast);
    need += fast->Memory(samples);
    least += small;
    seconds += fast->time;
  }
  if (need <= 0) return seconds;
  if (least > 0) return HUGE_VAL;
  std::vector<Swap> kinds, all;
  bool several = false;
  for (size_t v = 0; v < nodes.size(); ++v) {
    int64_t options = 0;
    for (const Choice& c : nodes[v]) {
      const double saved = fastest[v]->Memory(samples) - c.Memory(samples),
                   extra = c.time - fastest[v]->time;
      if (saved <= 0) continue;
      ++options;
      all.push_back({extra, saved, 1});
      if (kinds.size() > 3) continue;  // too many to be exact anyway
      auto same = std::find_if(kinds.begin(), kinds.end(), [&](const Swap& k) {
        return std::abs(k.extra - extra) <= 1e-12 * extra &&
               std::abs(k.saved - saved) <= 1e-12 * saved;
      });
      if (same == kinds.end()) {
        kinds.push_back({extra, saved, 1});
      } else {
        ++same->count;
      }
    }
    several |= options > 1;
  }
  if (several || kinds.size() > 3) {
    std::sort(all.begin(), all.end(),
              [](const Swap& a, const Swap& b) { return a.extra * b.saved < b.extra * a.saved; });
    if (!several && all.size() <= kFewSwaps) {
      double extra = HUGE_VAL;
      int64_t tries = kMostTries;
      LeastExtra(all, 0, need, 0.0, &extra, &tries);
      if (tries >= 0) return seconds + extra;
      if (!relaxed) {
        *guessed = true;
        return seconds + extra;
      }
    }
    *guessed = true;
    std::vector<Swap> used;
    for (const Swap& s : all) {
      if (need <= 0) break;
      if (relaxed && s.saved > need) return seconds + s.extra * need / s.saved;
      need -= s.saved, seconds += s.extra, used.push_back(s);
    }
    for (auto s = used.rbegin(); s != used.rend(); ++s) {
      if (need + s->saved <= 0) need += s->saved, seconds -= s->extra;
    }
    return need <= 0 ? seconds : HUGE_VAL;
  }
  while (kinds.size() < 3) kinds.push_back({0.0, 1.0, 0});
  double best = HUGE_VAL;
  for (int64_t a = 0; a <= kinds[0].count; ++a) {
    for (int64_t b = 0; b <= kinds[1].count; ++b) {
      const double rest = need - a * kinds[0].saved - b * kinds[1].saved;
      const int64_t c = std::max<int64_t>(0, std::ceil(rest / kinds[2].saved - 1e-12));
      if (c > kinds[2].count) continue;
      best = std::min(best, a * kinds[0].extra + b * kinds[1].extra + c * kinds[2].extra);
    }
  }
  return seconds + best;
}

struct Stage {
  int32_t tensor, data;
  double beyond;             // one sample more than `time` holds takes at least so long
  std::vector<double> time;  // time[y - 1], never falling
};

constexpr double kSame = 1e-9;        // of sums of many seconds or bytes
constexpr double kFirstStep = 0.005;  // above the bound on the bottleneck

struct Floor {
  double seconds = 0.0, bytes = 0.0;
  int64_t without = 0;
};

struct Step {
  int32_t begin = -1, tensor = 0, data = 0, sum = 0;
};

class Planner {
 public:
  Planner(const Model& m, bool relaxed)
      : m_(m), relaxed_(relaxed), words_((m.nodes + 63) / 64), count_(m.states.size() / words_) {
    for (int64_t s = 0; s < count_; ++s) sets_.emplace_back(m.states.data() + s * words_, words_);
    for (int64_t d = 1; d <= m.devices; ++d) {
      if (m.batches % d == 0) degrees_.push_back(d);
    }
    Sums();
  }

  /*! \brief Stages (begin, end, tensor, data, samples), last of the model first; empty if `limit`
   * cannot be met. */
  std::vector<int64_t> Chain(double limit, double* slowest) {
    const int64_t k = m_.devices, none = k + 1;
    std::vector<int32_t> fewest(count_ * (k + 1), none), least(count_, none);
    std::vector<Step> via(fewest.size());
    fewest[0] = least[0] = 0;
    for (int64_t e = 1; e < count_; ++e) {
      // what is not yet in a stage takes at least so many devices, each busy all the time
      const double rest = limit > 0 ? (work_.back() - work_[e]) / limit : 0.0;
      const int64_t most = std::floor(k - rest * (1 - kSame) + kSame);
      for (int64_t b = 0; b < e; ++b) {
        if (least[b] >= most || !sets_[b].Within(sets_[e])) continue;
        const int32_t* from = fewest.data() + b * (k + 1);
        for (const Stage& s : Between(b, e, limit, most - least[b])) {
          const int64_t fits =
              std::upper_bound(s.time.begin(), s.time.end(), limit * (1 + 1e-12)) - s.time.begin();
          const int64_t reach =
              std::min<int64_t>(k, fits * s.data);  // largest sum of degrees with this stage
          for (int64_t sum = s.data; sum <= reach; ++sum) {
            const int32_t used = from[sum - s.data] + s.tensor * s.data;
            int32_t& old = fewest[e * (k + 1) + sum];
            if (used < old && used <= most) {
              old = used;
              least[e] = std::min(least[e], used);
              via[e * (k + 1) + sum] = {static_cast<int32_t>(b), s.tensor, s.data,
                                        static_cast<int32_t>(sum - s.data)};
            }
          }
        }
      }
    }
    const int32_t* last = fewest.data() + (count_ - 1) * (k + 1);
    int64_t sum = std::min_element(last, last + k + 1) - last;
    if (last[sum] > k) return {};
    std::vector<int64_t> out;
    *slowest = 0.0;
    for (int64_t e = count_ - 1; e != 0;) {
      const Step& s = via[e * (k + 1) + sum];
      const int64_t samples = (sum + s.data - 1) / s.data;
      for (const Stage& stage : made_[s.begin * count_ + e]) {
        if (stage.tensor == s.tensor && stage.data == s.data)
          *slowest = std::max(*slowest, stage.time[samples - 1]);
      }
      const int64_t five[5] = {s.begin, e, s.tensor, s.data, samples};
      out.insert(out.end(), five, five + 5);
      e = s.begin;
      sum = s.sum;
    }
    return out;
  }
  /*! \brief Whether some stage's seconds may not be the least: then nothing is proved. */
  bool guessed() const { return guessed_; }

 private:
  struct Parts {
    double time, crossing, reduce, per_sample,
        fixed;  // crossing and reduce in bytes, before the data degree
  };

  /*! \brief For each suffix: its least device-seconds, and for each tensor degree its least seconds
   * and bytes and how many of its nodes cannot have that degree. */
  void Sums() {
    const int64_t degrees = m_.tensor.size();
    std::vector<double> work(m_.nodes, HUGE_VAL), seconds(m_.nodes * degrees, HUGE_VAL),
        bytes(seconds);
    for (int64_t at = 0; at < m_.nodes * degrees; ++at) {
      for (int32_t c = m_.config_ptr[at]; c < m_.config_ptr[at + 1]; ++c) {
        const double* f = m_.config.data() + 4 * c;
        seconds[at] = std::min(seconds[at], f[0]), bytes[at] = std::min(bytes[at], f[2] + f[3]);
      }
      double& least = work[at / degrees];
      least = std::min(least, seconds[at] * m_.tensor[at % degrees]);
    }
    for (const Bits& set : sets_) {
      work_.push_back(0.0);
      floor_.insert(floor_.end(), degrees, {});
      Floor* floor = &floor_[floor_.size() - degrees];
      for (int64_t v = 0; v < m_.nodes; ++v) {
        if (!set.Has(v)) continue;
        work_.back() += work[v];
        for (int64_t t = 0; t < degrees; ++t) {
          const double s = seconds[v * degrees + t];
          if (s == HUGE_VAL)
            ++floor[t].without;
          else
            floor[t].seconds += s, floor[t].bytes += bytes[v * degrees + t];
        }
      }
    }
  }

  /*! \brief The stages of the suffix `e` without `b` that take up to `limit` on up to `devices`
   * devices; there may be others among them. Each is made once and prolonged when the limit grows.
   */
  const std::vector<Stage>& Between(int64_t b, int64_t e, double limit, int64_t devices) {
    std::vector<Stage>* stages = nullptr;
    for (int64_t t = 0; t < m_.tensor.size(); ++t) {
      const Floor &small = floor_[b * m_.tensor.size() + t],
                  &large = floor_[e * m_.tensor.size() + t];
      if (large.without > small.without ||
          large.bytes - small.bytes > m_.memory * (1 + 1e-9) + kSame * large.bytes)
        continue;
      const double floor = large.seconds - small.seconds - kSame * large.seconds;
      std::vector<std::vector<Parts>> parts;
      for (int64_t d : degrees_) {
        if (m_.tensor[t] * d > devices) break;
        if (floor / d > limit * (1 + 1e-12)) continue;
        if (!stages) stages = &made_[b * count_ + e];
        Prolong(b, e, t, d, limit, &parts, stages);
      }
    }
    return stages ? *stages : none_;
  }

  /*! \brief Make the stage's seconds for one sample, two, ... as long as they are within `limit`.
   */
  void Prolong(int64_t b, int64_t e, int64_t t, int64_t d, double limit,
               std::vector<std::vector<Parts>>* parts, std::vector<Stage>* stages) {
    const Stage made{m_.tensor[t], static_cast<int32_t>(d), 0.0, {}};
    auto s =
        std::lower_bound(stages->begin(), stages->end(), made, [](const Stage& x, const Stage& y) {
          return std::tie(x.tensor, x.data) < std::tie(y.tensor, y.data);
        });
    if (s == stages->end() || s->tensor != made.tensor || s->data != made.data)
      s = stages->insert(s, made);
    const int64_t most = (m_.devices + d - 1) / d;
    if (s->beyond > limit * (1 + 1e-12) || static_cast<int64_t>(s->time.size()) == most) return;
    if (parts->empty()) *parts = Split(b, e, t);
    std::vector<std::vector<Choice>> choices(parts->size());
    double fastest = 0.0;
    for (size_t i = 0; i < parts->size(); ++i) {
      double least = HUGE_VAL;
      for (const Parts& p : (*parts)[i]) {
        const double moved = p.crossing / d + p.reduce * (d - 1) / d;
        choices[i].push_back({p.time / d + moved / m_.byte_per_s, p.per_sample, p.fixed});
        least = std::min(least, choices[i].back().time);
      }
      fastest += least;
    }
    s->beyond = std::max(s->beyond, fastest * (1 - 1e-9));
    while (s->beyond <= limit * (1 + 1e-12) && static_cast<int64_t>(s->time.size()) < most) {
      s->beyond = std::max(Cheapest(choices, s->time.size() + 1, m_.memory, relaxed_, &guessed_),
                           s->time.empty() ? 0.0 : s->time.back());
      if (s->beyond <= limit * (1 + 1e-12)) s->time.push_back(s->beyond);
    }
  }

  std::vector<std::vector<Parts>> Split(int64_t b, int64_t e, int64_t t) const {
    auto inside = [&](int64_t v) { return sets_[e].Has(v) && !sets_[b].Has(v); };
    std::vector<std::vector<Parts>> out;
    for (int64_t v = 0; v < m_.nodes; ++v) {
      if (!inside(v)) continue;
      double cut = 0.0;
      for (int64_t i = m_.near_ptr[v]; i < m_.near_ptr[v + 1]; ++i) {
        if (!inside(m_.near.begin(0)[i])) cut += m_.near_bytes[i];
      }
      out.emplace_back();
      const int64_t at = v * m_.tensor.size() + t;
      for (int32_t c = m_.config_ptr[at]; c < m_.config_ptr[at + 1]; ++c) {
        double sync = 0.0;
        for (int64_t i = m_.sync_ptr[c]; i < m_.sync_ptr[c + 1]; ++i) {
          if (!inside(m_.sync_with.begin(0)[i])) sync += m_.sync_bytes[i];
        }
        const double* f = m_.config.data() + 4 * c;
        out.back().push_back({f[0], 2 * (cut + sync), 4.0 * f[1] / m_.batches, f[2], f[3]});
      }
    }
    return out;
  }

  const Model& m_;
  bool relaxed_;
  int64_t words_, count_;
  std::vector<Bits> sets_;
  std::vector<int64_t> degrees_;
  std::vector<double> work_;  // [suffixes]
  std::vector<Floor> floor_;  // [suffixes, tensor degrees]
  const std::vector<Stage> none_;
  std::unordered_map<int64_t, std::vector<Stage>> made_;  // by pair of suffixes
  bool guessed_ = false;
};

}  // namespace

/*! \brief Find the stages with the least bottleneck below `upper`, to a relative `tolerance`.
 *  \param arrays suffixes (words), tensor degrees, config_ptr, config [configurations, 4], sync
 * (ptr, ids, bytes), edges of each node (ptr, ids, bytes).
 *  \param lower a bound on the bottleneck; `most`: above it no plan exists.
 *  \param relaxed nodes may be recomputed in part where they are too many to choose among: then
 * `proved` holds for all plans.
 *  \return (stages, proved, guessed): (begin, end, tensor, data, samples) per stage, last of the
 * model first, empty if there are none; no chain of these suffixes has a bottleneck below `proved`,
 * unless recomputation was chosen greedily somewhere (`guessed`). */
ffi::Array<ffi::Any> TrainingSearch(int64_t nodes, const ffi::Array<ffi::Tensor>& arrays,
                                    int64_t devices, int64_t batches, double memory,
                                    double byte_per_s, double lower, double upper, double most,
                                    double tolerance, bool relaxed) {
  if (arrays.size() != 10)
    TVM_FFI_THROW(ValueError) << "TrainingSearch needs 10 arrays, got " << arrays.size();
  const Model model{View<uint64_t>(arrays[0], "states"),
                    View<int32_t>(arrays[1], "tensor"),
                    View<int32_t>(arrays[2], "config_ptr"),
                    View<double>(arrays[3], "config"),
                    Lists(arrays[4], arrays[5], "sync"),
                    View<double>(arrays[6], "sync_bytes"),
                    Lists(arrays[7], arrays[8], "near"),
                    View<double>(arrays[9], "near_bytes"),
                    View<int32_t>(arrays[4], "sync_ptr"),
                    View<int32_t>(arrays[7], "near_ptr"),
                    nodes,
                    devices,
                    batches,
                    memory,
                    byte_per_s};
  Planner planner(model, relaxed);
  std::vector<int64_t> best;
  // from below, by steps that double: what a bound leaves open is searched fastest near it
  double guess = lower > 0 ? lower * (1 + kFirstStep) : most * 1e-6, slowest = 0.0;
  for (double step = 2 * kFirstStep; guess < upper;
       guess *= 1 + step, step = std::min(1.0, 2 * step)) {
    best = planner.Chain(guess, &slowest);
    if (!best.empty())
      upper = slowest;
    else if (guess > most)
      return {ffi::Array<int64_t>(), HUGE_VAL, planner.guessed()};
    else
      lower = guess;
  }
  while (upper - lower > tolerance * upper) {
    const double middle =
        std::min(lower > 0 ? std::sqrt(lower * upper) : upper / 2, upper * (1 - tolerance / 2));
    std::vector<int64_t> found = planner.Chain(middle, &slowest);
    if (found.empty())
      lower = middle;
    else
      best = std::move(found), upper = slowest;
  }
  return {ffi::Array<int64_t>(best.begin(), best.end()), std::min(lower, upper), planner.guessed()};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef().def("tvmhet.TrainingSearch", TrainingSearch);
}
}  // namespace tvmhet
