/*! \file passes/iteration_labels.h
 *  \brief Suffixes of a model as stages of a training iteration: the labels of
 * passes/iteration_search.cc. */
#ifndef TVMHET_PASSES_ITERATION_LABELS_H_
#define TVMHET_PASSES_ITERATION_LABELS_H_

#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "arrays.h"
#include "unlike_replicas.h"

namespace tvmhet {

/*! \brief Stages between cuts, in modes (a group, a tensor-split degree,
 * recompute or not). */
struct IterationStages {
  View<double> time, memory, stash;  // [modes, cuts, cuts]
  View<int64_t> mode_group, mode_degree;
  View<double> backward_share;    // [modes]: how much of a stage's time is its
                                  // backward pass, at most
  View<double> moves, gradients;  // [cuts, cuts, 8], [cuts, cuts, 4]
  View<double> held, updated;     // [modes, cuts, cuts]: bytes of one device
  View<double> latency, per_byte, host_latency, host_per_byte, overhead, limit, reduce, update,
      worth;
  View<int64_t> count;
  View<double> weight;  // [cuts, cuts]: bytes of all devices of a team together
  double gradient_ratio, reduce_overlap;
  int64_t microbatches;
  bool overlap, gpipe,
      unlike;  // unlike: replicas of a stage may be on several groups
  int64_t cuts, groups, modes;

  /*! \brief Seconds in which `replicas` of a stage [mode, from, to] at index `at` add up their
   * gradients: as AllReduce.seconds in tvmhet/solve/collectives.py. */
  double ReduceS(int64_t mode, int64_t at, int64_t replicas) const {
    const double* a = reduce.data() + 5 * mode_group[mode];
    const int64_t most = std::max<int64_t>(1, static_cast<int64_t>(a[2]) / mode_degree[mode]);
    return Ring(a[0], a[1], held[at] * gradient_ratio, std::min(replicas, most)) +
           Ring(a[3], a[4], weight[at - mode * cuts * cuts] * gradient_ratio,
                (replicas + most - 1) / most);
  }

  /*! \brief Whether `r` replicas of the stage [mode, from, to] at index `at` fit, with `later`
   * replicas after it. */
  bool Fits(int64_t at, int64_t g, int64_t later, int64_t r) const {
    const int64_t most = (microbatches + r - 1) / r;
    const int64_t away = gpipe ? most : std::min(most, (later + 2 * r - 1) / r);
    return memory[at] + away * stash[at] <= limit[g];
  }

  /*! \brief The slowest ring among the links within and between two groups; `own` bytes of one
   * device inside machines, `bytes` between them. */
  double RingS(int64_t g, int64_t h, double own, double bytes, int64_t devices) const {
    double slow = Ring(latency[g * groups + h], per_byte[g * groups + h], bytes, devices);
    for (const double* a : {reduce.data() + 5 * g, reduce.data() + 5 * h}) {
      slow = std::max(slow, Ring(a[0], a[1], own, devices));
      slow = std::max(slow, Ring(a[3], a[4], bytes, devices));
    }
    return slow;
  }

 private:
  static double Ring(double latency, double per_byte, double bytes, int64_t members) {
    return members < 2 ? 0.0 : 2.0 * (members - 1) * (latency + bytes / members * per_byte);
  }
};

/*! \brief The 21 arrays and 4 scalars of IterationSearch. */
inline IterationStages UnpackStages(const tvm::ffi::Array<tvm::ffi::Tensor>& a,
                                    const tvm::ffi::Array<double>& scalars, bool overlap,
                                    bool gpipe) {
  if (a.size() != 21 || scalars.size() != 4) {
    TVM_FFI_THROW(ValueError) << "IterationSearch needs 21 arrays and 4 scalars, got " << a.size()
                              << " and " << scalars.size();
  }
  const View<int64_t> group(a[3], "mode_group"), count(a[18], "count");
  const View<double> weight(a[20], "weight");
  return {View<double>(a[0], "time"),
          View<double>(a[1], "memory"),
          View<double>(a[2], "stash"),
          group,
          View<int64_t>(a[4], "mode_degree"),
          View<double>(a[5], "backward_share"),
          View<double>(a[6], "moves"),
          View<double>(a[7], "gradients"),
          View<double>(a[8], "held"),
          View<double>(a[19], "updated"),
          View<double>(a[9], "latency"),
          View<double>(a[10], "per_byte"),
          View<double>(a[11], "host_latency"),
          View<double>(a[12], "host_per_byte"),
          View<double>(a[13], "overhead"),
          View<double>(a[14], "limit"),
          View<double>(a[15], "reduce"),
          View<double>(a[16], "update"),
          View<double>(a[17], "worth"),
          count,
          weight,
          scalars[0],
          scalars[1],
          static_cast<int64_t>(scalars[2]),
          overlap,
          gpipe,
          scalars[3] > 0,
          std::llround(std::sqrt(static_cast<double>(weight.size()))),
          count.size(),
          group.size()};
}

/*! \brief What a stage adds for one micro-batch, given the group after it; the
 * best group before it is assumed. */
struct StageCost {
  double load, path;
};

inline StageCost StageCostOf(const IterationStages& s, int64_t b, int64_t c, int64_t mode,
                             int64_t after) {
  const int64_t at = b * s.cuts + c, g = s.mode_group[mode], n = s.groups;
  const double *m = s.moves.data() + 8 * at, *d = s.gradients.data() + 4 * at;
  const double compute = s.time[mode * s.cuts * s.cuts + at] + 2.0 * s.overhead[g];
  const double host_in = m[4] * s.host_latency[g] + m[5] * s.host_per_byte[g];
  const double host_out = m[6] * s.host_latency[g] + m[7] * s.host_per_byte[g];
  double in = 0.0, out_b = 0.0;  // activations received, gradients sent back
  if (m[0] > 0) {
    double best = HUGE_VAL;
    for (int64_t p = 0; p < n; ++p) {
      if (s.count[p] - (p == g) <= 0) continue;
      const double there = m[0] * s.latency[p * n + g] + m[1] * s.per_byte[p * n + g];
      const double back = d[0] * s.latency[g * n + p] + d[1] * s.per_byte[g * n + p];
      if (there + back < best) best = there + back, in = there, out_b = back;
    }
    if (best == HUGE_VAL) return {HUGE_VAL, HUGE_VAL};
  }
  double out = 0.0, in_b = 0.0;
  if (after >= 0) {
    out = m[2] * s.latency[g * n + after] + m[3] * s.per_byte[g * n + after];
    in_b = d[2] * s.latency[after * n + g] + d[3] * s.per_byte[after * n + g];
  }
  const double receive = host_in + in + in_b, send = out + host_out + out_b;
  const double load =
      s.overlap ? std::max(compute, std::max(receive, send)) : compute + receive + send;
  return {load, compute + receive + host_out};
}

/*! \brief At least so much from the start to each cut: seconds of one micro-batch's way, and device
 * seconds of its passes, those on group g times worth[g]. */
struct LeastBefore {
  std::vector<double> way, work;
};

inline LeastBefore LeastBeforeOf(const IterationStages& s) {
  LeastBefore least{std::vector<double>(s.cuts, HUGE_VAL), std::vector<double>(s.cuts, HUGE_VAL)};
  least.way[0] = least.work[0] = 0.0;
  for (int64_t c = 1; c < s.cuts; ++c) {
    for (int64_t mode = 0; mode < s.modes; ++mode) {
      const int64_t g = s.mode_group[mode];
      if (s.count[g] < s.mode_degree[mode]) continue;
      for (int64_t b = 0; b < c; ++b) {
        const double both = s.time[(mode * s.cuts + b) * s.cuts + c] + 2.0 * s.overhead[g];
        least.way[c] = std::min(least.way[c], least.way[b] + both);
        least.work[c] =
            std::min(least.work[c], least.work[b] + s.worth[g] * s.mode_degree[mode] * both);
      }
    }
  }
  return least;
}

/*! \brief Non-dominated suffixes that start at one cut. `used` is flat: groups
 * entries a label. */
struct SuffixLabels {
  std::vector<int32_t> used;
  std::vector<double> path, post, steady;
  std::vector<int32_t> replicas, mode, stage_replicas, team, to_cut, to_label;
  int64_t size() const { return static_cast<int64_t>(path.size()); }
};

class SuffixSearch {
 public:
  SuffixSearch(const IterationStages& s, bool one_link, int64_t max_labels)
      : s_(s),
        one_link_(one_link),
        max_labels_(max_labels),
        before_(LeastBeforeOf(s)),
        at_(s.cuts),
        used_(s.groups) {
    if (s.unlike) LimitTeams();
  }

  /*! \brief The best label at cut 0 when no stage's (n - 1) load exceeds
   * `limit` and the rest is below `upper`; -1 if there is none. */
  int64_t Run(double limit, double upper) {
    for (SuffixLabels& l : at_) l = SuffixLabels();
    teams_.clear();
    SuffixLabels& end = at_[s_.cuts - 1];
    end.used.assign(s_.groups, 0);
    end.path = end.post = end.steady = {0.0};
    end.replicas = {0}, end.mode = end.team = end.to_cut = end.to_label = {-1};
    end.stage_replicas = {0};
    for (int64_t c = s_.cuts - 1; c > 0; --c) {
      if (at_[c].size() == 0) continue;
      Thin(&at_[c]);
      for (int64_t mode = 0; mode < s_.modes; ++mode) {
        if (s_.count[s_.mode_group[mode]] < s_.mode_degree[mode]) continue;
        for (int64_t b = 0; b < c; ++b) {
          if (s_.time[(mode * s_.cuts + b) * s_.cuts + c] < HUGE_VAL)
            Extend(b, c, mode, limit, upper);
        }
      }
      if (s_.unlike && (c % team_stride_ == 0 || c == s_.cuts - 1)) {
        for (int64_t b = 0; b < c; b += team_stride_) ExtendUnlike(b, c, limit, upper);
      }
    }
    const SuffixLabels& l = at_[0];
    int64_t best = -1;
    for (int64_t i = 0; i < l.size(); ++i) {
      if (best < 0 || Rest(i) < Rest(best) ||
          (Rest(i) == Rest(best) && l.steady[i] < l.steady[best]))
        best = i;
    }
    return best;
  }
  double Rest(int64_t label) const { return at_[0].path[label] + at_[0].post[label]; }
  double Steady(int64_t label) const { return at_[0].steady[label]; }
  int64_t NumPlans() const { return at_[0].size(); }
  int64_t Used(int64_t label, int64_t group) const {
    return at_[0].used[label * s_.groups + group];
  }

  /*! \brief Stages behind a label of cut 0: (from cut, to cut, mode, replicas)
   * each, in order. */
  std::vector<int64_t> Trace(int64_t label) const {
    std::vector<int64_t> out;
    for (int64_t b = 0; b != s_.cuts - 1;) {
      const SuffixLabels& l = at_[b];
      const int64_t to = l.to_cut[label];
      if (l.team[label] < 0) {
        out.insert(out.end(), {b, to, l.mode[label], l.stage_replicas[label]});
      } else {
        for (const Part& p : teams_[l.team[label]])
          out.insert(out.end(), {b, to, p.mode, p.replicas});
      }
      label = l.to_label[label];
      b = to;
    }
    return out;
  }

  bool truncated = false;
  int64_t steps = 0;

 private:
  static constexpr double kTeams = 1e8;  // of one run, as far as can be known before it
  static constexpr int64_t kLevels = 16;

  /*! \brief With many groups: fewer counts of each, then teams between fewer cuts. */
  void LimitTeams() {
    const double stages = 0.5 * s_.cuts * s_.cuts * max_labels_;
    if (stages * NumTeams(0) <= kTeams) return;
    for (team_levels_ = kLevels; team_levels_ > 1; team_levels_ /= 2) {
      if (stages * NumTeams(team_levels_) <= kTeams) return;
    }
    const double over = stages * NumTeams(team_levels_) / kTeams;
    team_stride_ =
        static_cast<int64_t>(std::min<double>(s_.cuts, std::ceil(std::sqrt(std::max(1.0, over)))));
    truncated = truncated || team_stride_ > 1;
  }

  double NumTeams(int64_t levels) const {
    std::vector<double> of(s_.groups, 1.0);
    for (int64_t m = 0; m < s_.modes; ++m) {
      const int64_t most = s_.count[s_.mode_group[m]] / s_.mode_degree[m];
      of[s_.mode_group[m]] += UnlikeReplicas::NumCounts(most, levels);
    }
    double teams = 1.0;
    for (double x : of) teams *= x;
    return teams;
  }

  void Extend(int64_t b, int64_t c, int64_t mode, double limit, double upper) {
    const SuffixLabels& from = at_[c];
    const int64_t at = (mode * s_.cuts + b) * s_.cuts + c, g = s_.mode_group[mode],
                  degree = s_.mode_degree[mode];
    const int64_t all = s_.count[g] / degree, micro = s_.microbatches;
    if (((micro + all - 1) / all - 1) * s_.time[at] > limit) return;
    StageCost cost{0.0, 0.0};
    int64_t cost_after = -2;
    for (int64_t i = 0; i < from.size(); ++i) {
      ++steps;
      const int64_t after = from.mode[i] < 0 ? -1 : s_.mode_group[from.mode[i]];
      if (cost_after == -2 || (!one_link_ && after != cost_after))
        cost = StageCostOf(s_, b, c, mode, after), cost_after = after;
      const int64_t free = (s_.count[g] - from.used[i * s_.groups + g]) / degree;
      const double passes =
          cost.load > 0 ? std::floor(limit / cost.load * (1.0 + 1e-12)) + 1.0 : HUGE_VAL;
      const double path = from.path[i] + cost.path, way = path + before_.way[b];
      if (!(passes >= 1.0) || !(way + from.post[i] < upper)) continue;
      int64_t r = passes >= micro ? 1 : static_cast<int64_t>(std::ceil(micro / passes));
      while (r <= free && !s_.Fits(at, g, from.replicas[i], r)) ++r;
      if (r > free) continue;
      const double reduce = s_.ReduceS(mode, at, r);
      const double hidden = s_.reduce_overlap * s_.backward_share[mode] * s_.time[at];
      const double post =
          std::max(from.post[i], std::max(0.0, reduce - hidden) + s_.update[g] * s_.updated[at]);
      if (!(way + post < upper)) continue;
      std::copy_n(from.used.begin() + i * s_.groups, s_.groups, used_.begin());
      used_[g] += static_cast<int32_t>(r * degree);
      if (!CanRunBefore(b, limit)) continue;
      const double steady = std::max(from.steady[i], ((micro + r - 1) / r - 1) * cost.load);
      Insert(&at_[b], path, post, steady, from.replicas[i] + r, mode, r, -1, c, i);
    }
  }

  /*! \brief Stages whose replicas are on two groups or more. */
  void ExtendUnlike(int64_t b, int64_t c, double limit, double upper) {
    int64_t cost_after = -2;
    std::vector<Way> ways;
    std::vector<int64_t> free(s_.groups);
    for (int64_t i = 0; i < at_[c].size(); ++i) {
      const SuffixLabels& from = at_[c];
      const int64_t after = from.mode[i] < 0 ? -1 : s_.mode_group[from.mode[i]];
      if (cost_after == -2 || (!one_link_ && after != cost_after))
        ways = WaysOf(b, c, after), cost_after = after;
      if (ways.size() < 2 || !(from.path[i] + ways[0].path + from.post[i] < upper)) continue;
      for (int64_t g = 0; g < s_.groups; ++g) free[g] = s_.count[g] - from.used[i * s_.groups + g];
      UnlikeReplicas teams(ways, s_.microbatches, team_levels_);
      teams.Each(free, limit,
                 [&](const Team& team) { InsertTeam(b, c, i, team, teams, limit, upper); });
      steps += teams.steps;
      truncated |= teams.skipped;
    }
  }

  std::vector<Way> WaysOf(int64_t b, int64_t c, int64_t after) const {
    std::vector<Way> ways;
    for (int64_t mode = 0; mode < s_.modes; ++mode) {
      if (!(s_.time[(mode * s_.cuts + b) * s_.cuts + c] < HUGE_VAL)) continue;
      const StageCost cost = StageCostOf(s_, b, c, mode, after);
      if (cost.path < HUGE_VAL)
        ways.push_back({static_cast<int32_t>(mode), static_cast<int32_t>(s_.mode_group[mode]),
                        static_cast<int32_t>(s_.mode_degree[mode]), cost.load, cost.path});
    }
    std::stable_sort(ways.begin(), ways.end(),
                     [](const Way& x, const Way& y) { return x.path < y.path; });
    return ways;
  }

  void InsertTeam(int64_t b, int64_t c, int64_t label, const Team& team,
                  const UnlikeReplicas& teams, double limit, double upper) {
    const SuffixLabels& from = at_[c];
    int64_t total = 0, fewest = team.passes[0], devices = 0;
    double own = 0.0;  // of the device that holds most
    for (size_t p = 0; p < team.parts.size(); ++p) {
      total += team.parts[p].replicas * team.passes[p];
      fewest = std::min(fewest, team.passes[p]);
      devices += team.parts[p].replicas;
      own = std::max(own, s_.held[(team.ways[p].mode * s_.cuts + b) * s_.cuts + c]);
    }
    const int64_t span = (total + fewest - 1) / fewest, away = span + from.replicas[label];
    double reduce = 0.0;
    for (const Way& x : team.ways)
      for (const Way& y : team.ways)
        reduce =
            std::max(reduce, s_.RingS(x.group, y.group, own * s_.gradient_ratio,
                                      s_.weight[b * s_.cuts + c] * s_.gradient_ratio, devices));
    double post = from.post[label];
    std::copy_n(from.used.begin() + label * s_.groups, s_.groups, used_.begin());
    for (size_t p = 0; p < team.parts.size(); ++p) {
      const Way& way = team.ways[p];
      const int64_t at = (way.mode * s_.cuts + b) * s_.cuts + c;
      const int64_t most = (s_.microbatches * team.passes[p] + total - 1) / total;
      const int64_t share = (away * team.passes[p] + total - 1) / total;
      const int64_t held = s_.gpipe ? most : from.replicas[label] == 0 ? 1 : std::min(most, share);
      if (s_.memory[at] + held * s_.stash[at] > s_.limit[way.group]) return;
      const double hidden = s_.reduce_overlap * s_.backward_share[way.mode] * s_.time[at];
      post = std::max(post, std::max(0.0, reduce - hidden) + s_.update[way.group] * s_.updated[at]);
      used_[way.group] += team.parts[p].replicas * way.degree;
    }
    const double path = from.path[label] + team.ways[0].path;
    if (!(path + before_.way[b] + post < upper)) return;
    const double steady = std::max(from.steady[label], teams.Steady(team, limit));
    const int32_t number = static_cast<int32_t>(teams_.size());
    if (Insert(&at_[b], path, post, steady, from.replicas[label] + span, team.parts[0].mode, 0,
               number, c, label))
      teams_.push_back(team.parts);
  }

  /*! \brief Whether the devices that `used_` leaves could run what is before a cut: stages of w
   * seconds on r of n devices, (M / r - 1) w <= limit, are no more than n / (M - n) limit. */
  bool CanRunBefore(int64_t b, double limit) const {
    if (s_.unlike || !(limit < HUGE_VAL)) return true;
    double could = 0.0;
    for (int64_t g = 0; g < s_.groups; ++g) {
      const int64_t left = s_.count[g] - used_[g];
      if (left >= s_.microbatches) return true;
      could += s_.worth[g] * limit * left / (s_.microbatches - left);
    }
    return before_.work[b] <= could * (1.0 + 1e-9);
  }

  int64_t GroupOf(int64_t mode) const { return mode < 0 ? -1 : s_.mode_group[mode]; }

  bool Dominates(const int32_t* a, double path_a, double post_a, int64_t replicas_a, int64_t mode_a,
                 const int32_t* b, double path_b, double post_b, int64_t replicas_b,
                 int64_t mode_b) const {
    if (path_a > path_b || post_a > post_b || replicas_a > replicas_b) return false;
    if (!one_link_ && GroupOf(mode_a) != GroupOf(mode_b)) return false;
    for (int64_t g = 0; g < s_.groups; ++g) {
      if (a[g] > b[g]) return false;
    }
    return true;
  }

  /*! \brief Whether the label was kept. */
  bool Insert(SuffixLabels* l, double path, double post, double steady, int32_t replicas,
              int32_t mode, int32_t r, int32_t team, int32_t cut, int32_t label) {
    const int64_t n = s_.groups;
    for (int64_t i = 0; i < l->size(); ++i) {
      if (Dominates(l->used.data() + i * n, l->path[i], l->post[i], l->replicas[i], l->mode[i],
                    used_.data(), path, post, replicas, mode))
        return false;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < l->size(); ++i) {
      if (Dominates(used_.data(), path, post, replicas, mode, l->used.data() + i * n, l->path[i],
                    l->post[i], l->replicas[i], l->mode[i]))
        continue;
      if (kept != i) Move(l, i, kept);
      ++kept;
    }
    Resize(l, kept + 1);
    std::copy(used_.begin(), used_.end(), l->used.begin() + kept * n);
    l->path[kept] = path, l->post[kept] = post, l->steady[kept] = steady,
    l->replicas[kept] = replicas;
    l->mode[kept] = mode, l->stage_replicas[kept] = r, l->team[kept] = team;
    l->to_cut[kept] = cut, l->to_label[kept] = label;
    if (l->size() >= 2 * max_labels_) Thin(l);
    return true;
  }

  /*! \brief Keep at most max_labels_: those that leave the most computing power
   * unused. */
  void Thin(SuffixLabels* l) {
    if (l->size() <= max_labels_) return;
    truncated = true;
    std::vector<double> rank(l->size(), 0.0);
    std::vector<int64_t> order(l->size());
    for (int64_t i = 0; i < l->size(); ++i) {
      order[i] = i;
      for (int64_t g = 0; g < s_.groups; ++g) rank[i] += l->used[i * s_.groups + g] * s_.worth[g];
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return rank[a] < rank[b]; });
    order.resize(max_labels_);
    std::sort(order.begin(), order.end());
    for (int64_t i = 0; i < max_labels_; ++i) Move(l, order[i], i);
    Resize(l, max_labels_);
  }

  void Move(SuffixLabels* l, int64_t from, int64_t to) {
    std::copy_n(l->used.begin() + from * s_.groups, s_.groups, l->used.begin() + to * s_.groups);
    l->path[to] = l->path[from], l->post[to] = l->post[from], l->steady[to] = l->steady[from];
    l->replicas[to] = l->replicas[from], l->mode[to] = l->mode[from];
    l->stage_replicas[to] = l->stage_replicas[from], l->team[to] = l->team[from];
    l->to_cut[to] = l->to_cut[from], l->to_label[to] = l->to_label[from];
  }

  void Resize(SuffixLabels* l, int64_t n) {
    l->used.resize(n * s_.groups), l->path.resize(n), l->post.resize(n), l->steady.resize(n);
    l->replicas.resize(n), l->mode.resize(n), l->stage_replicas.resize(n);
    l->team.resize(n);
    l->to_cut.resize(n), l->to_label.resize(n);
  }

  const IterationStages& s_;
  bool one_link_;
  int64_t max_labels_, team_levels_ = 0, team_stride_ = 1;
  LeastBefore before_;
  std::vector<SuffixLabels> at_;
  std::vector<std::vector<Part>> teams_;
  std::vector<int32_t> used_;
};

}  // namespace tvmhet
#endif  // TVMHET_PASSES_ITERATION_LABELS_H_
