/*! \file passes/stage_search.cc
 *  \brief Which stages, on which groups, on how many devices: a Pareto search over the segment
 * table.
 *
 *      cut 0 ──stage on a100 x1──► cut 17 ──stage on t4 x3──► cut 40 = end        label at a cut:
 * devices used so far
 *
 *  Throughput: for a bound T on the load, a stage takes the fewest replicas with load / replicas <=
 * T; a label is dropped when another uses no more of every group, or when what is left of the
 * cluster cannot do the rest within T by the prices below. T is found by bisection. Latency: a
 * label also carries the seconds so far and every stage takes one device. Where lines are shared, a
 * label carries the seconds that each of them takes; none may exceed T.
 *
 *  Prices (a Lagrangian relaxation): let a device of group g cost p[g], the whole cluster 1. The
 * cheapest chain of stages from a cut to the end, each on the fewest devices for T, bounds what any
 * chain still needs. If even the cheapest whole chain costs more than 1, T is impossible.
 * Subgradient steps raise the price of groups that the cheapest chain uses beyond their count. The
 * same prices rank labels when there are too many. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "stage_table.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

constexpr double kSlack = 1e-9;  // relative, on sums of prices
constexpr int64_t kPriceRounds = 12;

/*! \brief Non-dominated ways to reach each cut. `used` is flat: groups entries a label, devices of
 * each pool; those of teams stay 0. */
struct Labels {
  std::vector<int32_t> used;
  std::vector<double> wire;  // seconds of each, flat
  std::vector<double> value, rank;
  std::vector<int32_t> group, link, replicas, from_cut, from_label;
  int64_t size() const { return static_cast<int64_t>(value.size()); }
};

struct Goal {
  bool latency;     // of one input, not the largest load
  bool optimistic;  // loads over the best links: no chain is missed, and the answer bounds every
                    // chain
};

class Search {
 public:
  Search(const StageTable& t, Goal goal, int64_t max_labels)
      : t_(t),
        goal_(goal),
        one_link_(t.one_link || goal.optimistic),
        wires_(goal.latency || goal.optimistic ? 0 : t.NumWires()),
        max_labels_(max_labels),
        at_(t.num_cuts),
        price_(t.devices.EqualPrices()),
        least_(t.time.size(), HUGE_VAL),
        need_(t.time.size(), 0),
        rest_(t.num_cuts, 0.0) {
    if (goal.latency) return;
    for (int64_t b = 0; b < t.num_cuts; ++b) {
      for (int64_t c = b + 1; c < t.num_cuts; ++c) {
        for (int64_t g = 0; g < t.groups; ++g) {
          if (t.Possible(b, c, g))
            least_[(b * t.num_cuts + c) * t.groups + g] = t.LeastLoadS(b, c, g);
        }
      }
    }
  }

  /*! \brief Rank labels by these prices instead of those that bound the rest. */
  void RankBy(const View<double>& price) {
    rank_by_.assign(price.data(), price.data() + price.size());
  }

  /*! \brief False if the prices alone prove that no chain keeps `limit`. */
  bool MayKeep(double limit) { return Prepare(limit); }

  /*! \brief Fill the labels for bound `limit`; return the best label at the last cut, or -1. It
   * gives up, as `truncated`, after `max_steps` in all. */
  int64_t Run(double limit, int64_t max_steps) {
    truncated = false;
    for (Labels& l : at_) l = Labels();
    if (!goal_.latency && !Prepare(limit)) return -1;
    Labels& start = at_[0];
    start.used.assign(t_.groups, 0);
    start.wire.assign(wires_, 0.0);
    start.value = {0.0}, start.rank = {0.0}, start.group = {-1}, start.link = {-1};
    start.replicas = {0}, start.from_cut = {-1}, start.from_label = {-1};
    for (int64_t b = 0; b + 1 < t_.num_cuts; ++b) {
      if (at_[b].size() == 0) continue;
      if (steps > max_steps) {
        truncated = true;
        return -1;
      }
      Thin(&at_[b]);
      for (int64_t c = b + 1; c < t_.num_cuts; ++c) {
        for (int64_t g = 0; g < t_.groups; ++g) {
          if (!t_.Possible(b, c, g)) continue;
          if (!goal_.latency && need_[(b * t_.num_cuts + c) * t_.groups + g] > t_.count[g])
            continue;
          Extend(b, c, g, limit);
        }
      }
    }
    const Labels& end = at_[t_.num_cuts - 1];
    int64_t best = -1;
    for (int64_t i = 0; i < end.size(); ++i) {
      if (best < 0 || end.value[i] < end.value[best]) best = i;
    }
    return best;
  }

  /*! \brief Stages behind a label of the last cut: (from cut, to cut, group, replicas) each, in
   * order. */
  std::vector<int64_t> Trace(int64_t label) const {
    std::vector<int64_t> out;
    for (int64_t c = t_.num_cuts - 1; c != 0;) {
      const Labels& l = at_[c];
      const int64_t four[4] = {l.from_cut[label], c, l.group[label], l.replicas[label]};
      out.insert(out.begin(), four, four + 4);
      label = l.from_label[label];
      c = four[0];
    }
    return out;
  }
  /*! \brief The label at the last cut whose devices cost least, the fastest of equals; -1 if there
   * is none. */
  int64_t Cheapest(const View<double>& price) const {
    const Labels& end = at_[t_.num_cuts - 1];
    int64_t best = -1;
    double least = HUGE_VAL;
    for (int64_t i = 0; i < end.size(); ++i) {
      double cost = 0.0;
      for (int64_t g = 0; g < t_.groups; ++g) cost += price[g] * end.used[i * t_.groups + g];
      if (cost < least || (cost == least && end.value[i] < end.value[best])) best = i, least = cost;
    }
    return best;
  }
  double Value(int64_t label) const { return at_[t_.num_cuts - 1].value[label]; }

  bool truncated = false;
  int64_t steps = 0;

 private:
  /*! \brief Fill need_ and rest_ for `limit`; false if the prices prove that no chain keeps it. */
  bool Prepare(double limit) {
    for (size_t i = 0; i < least_.size(); ++i) {
      const double need = std::ceil(least_[i] / limit * (1.0 - 1e-12));
      need_[i] = need < 1e9 ? std::max(1, static_cast<int32_t>(need)) : 1000000000;
    }
    std::vector<double> best_price = price_, best_rest;
    double best = -1.0, step = 0.5;
    for (int64_t round = 0; round < kPriceRounds; ++round, step *= 0.8) {
      std::vector<double> used(t_.groups, 0.0);
      Rest(&used);
      if (rest_[0] > best) best = rest_[0], best_price = price_, best_rest = rest_;
      if (best > 1.0 + kSlack) break;
      double sum = 0.0;
      for (int64_t g = 0; g < t_.groups; ++g) {
        if (price_[g] > 0)
          price_[g] *= std::exp(step * std::min(2.0, used[g] / t_.devices.room[g] - 1.0));
        sum += price_[g] * t_.devices.room[g];
      }
      for (double& p : price_) p /= sum;
    }
    price_ = best_price, rest_ = best_rest;
    return best <= 1.0 + kSlack;
  }

  /*! \brief rest_[c]: the least price of devices for a chain from c to the end; `used` by that from
   * cut 0. */
  void Rest(std::vector<double>* used) {
    std::vector<int64_t> via(t_.num_cuts, -1);
    std::fill(rest_.begin(), rest_.end(), HUGE_VAL);
    rest_.back() = 0.0;
    for (int64_t b = t_.num_cuts - 2; b >= 0; --b) {
      for (int64_t c = b + 1; c < t_.num_cuts; ++c) {
        if (rest_[c] == HUGE_VAL) continue;
        for (int64_t g = 0; g < t_.groups; ++g) {
          const int64_t at = (b * t_.num_cuts + c) * t_.groups + g;
          if (need_[at] > t_.count[g]) continue;
          const double price = need_[at] * t_.devices.PriceOf(g, price_) + rest_[c];
          if (price < rest_[b]) rest_[b] = price, via[b] = at;
        }
      }
    }
    if (rest_[0] == HUGE_VAL) return;
    for (int64_t b = 0; b + 1 < t_.num_cuts; b = via[b] / t_.groups % t_.num_cuts)
      Use(via[b] % t_.groups, need_[via[b]], used->data());
  }

  template <typename T>
  void Use(int64_t g, int32_t replicas, T* used) const {
    used[t_.devices.pool[g]] += replicas * t_.devices.width[g];
  }

  void Extend(int64_t b, int64_t c, int64_t g, double limit) {
    const Labels& from = at_[b];
    const bool last = c == t_.num_cuts - 1;
    for (int64_t i = 0; i < from.size(); ++i) {
      ++steps;
      const int32_t before = from.group[i];
      if (!one_link_ && before >= 0 && !goal_.latency &&
          t_.link_class[before * t_.groups + g] != from.link[i])
        continue;
      const int64_t pool = t_.devices.pool[g], width = t_.devices.width[g];
      const int64_t left = t_.devices.room[pool] - from.used[i * t_.groups + pool];
      const int64_t free = width == 1 ? left : left / width;
      if (free <= 0) continue;
      if (goal_.latency) {
        const int64_t at = b * t_.num_cuts + c;
        double load = t_.time[at * t_.groups + g] + t_.overhead[g] + t_.Receive(at, g, before);
        if (last) load += t_.Send(at, g, -1);
        if (from.value[i] + load <= limit * (1.0 + 1e-12))
          Insert(c, b, i, g, -1, 1, from.value[i] + load, limit);
      } else if (goal_.optimistic || last || t_.one_link) {
        const double load = goal_.optimistic ? least_[(b * t_.num_cuts + c) * t_.groups + g]
                                             : t_.LoadS(b, c, g, before, last ? -1 : 0);
        Take(c, b, i, g, -1, load, limit, free);
      } else {
        for (int64_t after = 0; after < t_.groups; ++after) {
          if (t_.link_class[g * t_.groups + after] == after)
            Take(c, b, i, g, after, t_.LoadS(b, c, g, before, after), limit, free);
        }
      }
    }
  }

  /*! \brief Close a stage on the fewest devices that keep `limit`. */
  void Take(int64_t c, int64_t b, int64_t i, int64_t g, int64_t link, double load, double limit,
            int64_t free) {
    const double need = std::max(1.0, std::ceil(load / limit * (1.0 - 1e-12)));
    if (need <= free)
      Insert(c, b, i, g, link, static_cast<int32_t>(need), std::max(at_[b].value[i], load / need),
             limit);
  }

  /*! \brief Does label i of `l` make the candidate superfluous, or (`forward` false) the reverse?
   */
  bool Dominates(const int32_t* a, const double* v, double x, const int32_t* b, const double* w,
                 double y) const {
    if (goal_.latency && x > y) return false;
    for (int64_t i = 0; i < wires_; ++i) {
      if (v[i] > w[i]) return false;
    }
    bool same = true;
    for (int64_t g = 0; g < t_.groups; ++g) {
      if (a[g] > b[g]) return false;
      same &= a[g] == b[g];
    }
    return !same || x <= y;
  }

  void Insert(int64_t c, int64_t b, int64_t i, int64_t g, int64_t link, int32_t replicas,
              double value, double limit) {
    const int64_t groups = t_.groups;
    const Labels& from = at_[b];
    used_.assign(from.used.begin() + i * groups, from.used.begin() + (i + 1) * groups);
    Use(g, replicas, used_.data());
    wire_.assign(from.wire.begin() + i * wires_, from.wire.begin() + (i + 1) * wires_);
    if (wires_ > 0) {
      const double* m = t_.moves.data() + 8 * (b * t_.num_cuts + c);
      if (from.group[i] >= 0) t_.Cross(from.group[i], g, m[1], wire_.data());
      t_.Cross(-1, g, m[5], wire_.data());
      t_.Cross(g, -1, m[7], wire_.data());
      for (double s : wire_) {
        if (s > limit * (1.0 + 1e-12)) return;
        value = std::max(value, s);
      }
    }
    double price = 0.0, rank = 0.0;
    for (int64_t h = 0; h < groups; ++h) {
      price += price_[h] * used_[h];
      rank += (rank_by_.empty() ? price_[h] : rank_by_[h]) * used_[h];
    }
    if (!goal_.latency && price + rest_[c] > 1.0 + kSlack) return;
    if (goal_.latency) rank = value * (1.0 + 1e-3 * rank);
    Labels* l = &at_[c];
    const auto alike = [&](int64_t j) {
      return (one_link_ && wires_ == 0) || (l->group[j] == g && l->link[j] == link);
    };
    steps += l->size() / 8;
    for (int64_t j = 0; j < l->size(); ++j) {
      if (l->rank[j] <= rank * (1.0 + kSlack) && alike(j) &&
          Dominates(l->used.data() + j * groups, l->wire.data() + j * wires_, l->value[j],
                    used_.data(), wire_.data(), value))
        return;
    }
    int64_t kept = 0;
    for (int64_t j = 0; j < l->size(); ++j) {
      if (rank <= l->rank[j] * (1.0 + kSlack) && alike(j) &&
          Dominates(used_.data(), wire_.data(), value, l->used.data() + j * groups,
                    l->wire.data() + j * wires_, l->value[j]))
        continue;
      if (kept != j) Move(l, j, kept);
      ++kept;
    }
    Resize(l, kept + 1);
    std::copy(used_.begin(), used_.end(), l->used.begin() + kept * groups);
    std::copy(wire_.begin(), wire_.end(), l->wire.begin() + kept * wires_);
    l->value[kept] = value, l->rank[kept] = rank, l->group[kept] = static_cast<int32_t>(g);
    l->link[kept] = static_cast<int32_t>(link), l->replicas[kept] = replicas;
    l->from_cut[kept] = static_cast<int32_t>(b), l->from_label[kept] = static_cast<int32_t>(i);
    if (l->size() >= 2 * max_labels_) Thin(l);
  }

  /*! \brief Keep at most max_labels_: half of them those that cost least so far (or took the least
   * time), the others those of the rest that use the smallest shares of their groups. */
  void Thin(Labels* l) {
    if (l->size() <= max_labels_) return;
    truncated = true;
    std::vector<double> share(l->size(), 0.0);
    for (int64_t i = 0; i < l->size(); ++i) {
      for (int64_t g = 0; g < t_.groups; ++g)
        share[i] += l->used[i * t_.groups + g] / std::max<double>(1.0, t_.devices.room[g]);
    }
    std::vector<int64_t> order(l->size());
    for (int64_t i = 0; i < l->size(); ++i) order[i] = i;
    const auto sort = [&order](int64_t from, const std::vector<double>& by) {
      std::stable_sort(order.begin() + from, order.end(),
                       [&](int64_t a, int64_t b) { return by[a] < by[b]; });
    };
    sort(0, l->rank);
    if (!goal_.latency && rank_by_.empty()) sort(max_labels_ / 2, share);
    order.resize(max_labels_);
    std::sort(order.begin(), order.end());
    for (int64_t i = 0; i < max_labels_; ++i) Move(l, order[i], i);
    Resize(l, max_labels_);
  }

  void Move(Labels* l, int64_t from, int64_t to) {
    std::copy_n(l->used.begin() + from * t_.groups, t_.groups, l->used.begin() + to * t_.groups);
    std::copy_n(l->wire.begin() + from * wires_, wires_, l->wire.begin() + to * wires_);
    for (auto* x : {&l->value, &l->rank}) (*x)[to] = (*x)[from];
    for (auto* x : {&l->group, &l->link, &l->replicas, &l->from_cut, &l->from_label})
      (*x)[to] = (*x)[from];
  }

  void Resize(Labels* l, int64_t n) {
    l->used.resize(n * t_.groups);
    l->wire.resize(n * wires_);
    for (auto* x : {&l->value, &l->rank}) x->resize(n);
    for (auto* x : {&l->group, &l->link, &l->replicas, &l->from_cut, &l->from_label}) x->resize(n);
  }

  const StageTable& t_;
  Goal goal_;
  bool one_link_;
  int64_t wires_;  // those that labels carry
  int64_t max_labels_;
  std::vector<Labels> at_;
  std::vector<double> price_, rank_by_;
  std::vector<double> least_;  // [cuts, cuts, groups]: LeastLoadS
  std::vector<int32_t> need_;  // the fewest devices with least_ / devices <= limit
  std::vector<double> rest_;
  std::vector<int32_t> used_;
  std::vector<double> wire_;
};

}  // namespace

/*! \brief Find the best stages by bisection on T (or, for latency, in one run).
 *  \param arrays those of StageTable.
 *  \param lower known lower bound, seconds.
 *  \param upper only better than this is searched.
 *  \param max_steps no further run after so many label extensions.
 *  \return (flat lists of from cut, to cut, group, replicas, each better than the one before by
 * these loads; whether labels were dropped; steps; the value that no other choice over these cuts
 * beats). */
ffi::Array<ffi::Any> StageSearch(const ffi::Array<ffi::Tensor>& arrays, bool overlap, bool latency,
                                 double lower, double upper, double tolerance, int64_t max_labels,
                                 int64_t max_steps) {
  const StageTable t(arrays, overlap);
  Search search(t, {latency, false}, max_labels);
  ffi::Array<ffi::Any> found;
  bool truncated = false;
  double value = upper;
  const auto run = [&](double limit) {
    const int64_t best = search.Run(limit, max_steps);
    truncated |= search.truncated;
    if (best < 0) return false;
    const std::vector<int64_t> stages = search.Trace(best);
    found.push_back(ffi::Array<int64_t>(stages.begin(), stages.end()));
    value = search.Value(best);
    return true;
  };
  if (!run(upper)) return {found, truncated, search.steps, upper};
  while (!latency && value - lower > tolerance * value && search.steps < max_steps) {
    // First try just below the incumbent: a plan that only shaves a little is found without a long
    // bisection.
    const double middle = lower > 0 ? std::sqrt(lower * value) : value / 2;
    if (!run(std::min(middle, value * (1.0 - 1e-9)))) lower = middle;
  }
  const double proved = latency ? value : (value - lower <= tolerance * value ? lower : value);
  return {found, truncated, search.steps, proved};
}

/*! \brief The largest T proved to be beyond every chain over these cuts whose loads are no less
 * than the table's.
 *
 *  With a table that bounds each stage of any plan from below (passes/stage_floor.cc), T bounds
 * every plan.
 *  \return (T, steps); at least `lower`. */
ffi::Array<ffi::Any> StageBound(const ffi::Array<ffi::Tensor>& arrays, bool overlap, double lower,
                                double upper, double tolerance, int64_t max_labels,
                                int64_t max_steps) {
  const StageTable t(arrays, overlap);
  Search search(t, {false, true}, max_labels);
  for (double high = upper;
       high - lower > tolerance * high && lower < upper;) {  // by prices alone: cheap
    const double middle = lower > 0 ? std::sqrt(lower * high) : high / 2;
    (search.MayKeep(middle) ? high : lower) = middle;
    if (high < 1e-30) break;
  }
  while (upper - lower > tolerance * upper && search.steps < max_steps) {
    const double middle = lower > 0 ? std::sqrt(lower * upper) : upper / 2;
    const int64_t found = search.Run(middle, max_steps);
    if (found < 0 && !search.truncated) {
      lower = middle;
    } else {
      upper = found < 0 ? middle : std::min(middle, search.Value(found));
    }
  }
  return {lower, search.steps};
}

/*! \brief The whole front of speed against price: the cheapest stages for every bottleneck.
 *
 *  Starts without a limit and asks each time for something faster by at least the factor `step`
 * than the last answer.
 *  \param prices price of one device of each group, in any unit per time.
 *  \return lists of (from cut, to cut, group, replicas), cheapest first; and whether the label
 * limit hid any. */
ffi::Array<ffi::Any> StageFront(const ffi::Array<ffi::Tensor>& arrays,
                                const ffi::TensorView& prices, bool overlap, double step,
                                int64_t max_labels) {
  const StageTable t(arrays, overlap);
  const View<double> price(prices, "prices");
  Search search(t, {false, false}, max_labels);
  search.RankBy(price);
  ffi::Array<ffi::Any> front;
  bool truncated = false;
  for (double limit = HUGE_VAL; limit > 0;) {
    search.Run(limit, std::numeric_limits<int64_t>::max());
    truncated |= search.truncated;
    const int64_t best = search.Cheapest(price);
    if (best < 0) break;
    const std::vector<int64_t> stages = search.Trace(best);
    front.push_back(ffi::Array<int64_t>(stages.begin(), stages.end()));
    limit = search.Value(best) * (1.0 - step);
  }
  return {front, truncated};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def("tvmhet.StageSearch", StageSearch)
      .def("tvmhet.StageBound", StageBound)
      .def("tvmhet.StageFront", StageFront);
}
}  // namespace tvmhet
