/*! \file passes/stage_search.cc
 *  \brief Which stages, on which groups, on how many devices: a Pareto search over the segment
 * table.
 *
 *      cut 0 ──stage on a100 x1──► cut 17 ──stage on t4 x3──► cut 40 = end        label at a cut:
 * devices used so far
 *
 *  Throughput: for a bound T on the load, a stage takes the fewest replicas with load / replicas <=
 * T; a label is dropped when another uses no more of every group. T is found by bisection. Latency:
 * a label also carries the seconds so far and every stage takes one device. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

struct Table {
  View<double> time, moves, latency, per_byte, host_latency, host_per_byte, overhead;
  View<int64_t> count;
  bool overlap;
  int64_t num_cuts, groups;

  /*! \brief Seconds one input keeps the stage from cut b to cut c busy on group g, after a stage on
   * group `before`. */
  double LoadS(int64_t b, int64_t c, int64_t g, int64_t before, bool with_sends) const {
    const int64_t at = b * num_cuts + c;
    const double compute = time[at * groups + g] + overhead[g];
    const double* m = moves.data() + 8 * at;
    double receive = m[4] * host_latency[g] + m[5] * host_per_byte[g];
    if (before >= 0)
      receive += m[0] * latency[before * groups + g] + m[1] * per_byte[before * groups + g];
    if (!with_sends) return compute + receive;
    double send = 0.0;
    if (m[2] > 0) {
      send = HUGE_VAL;
      for (int64_t h = 0; h < groups; ++h) {
        if (count[h] - (h == g) > 0) {
          send = std::min(send, m[2] * latency[g * groups + h] + m[3] * per_byte[g * groups + h]);
        }
      }
    }
    send += m[6] * host_latency[g] + m[7] * host_per_byte[g];
    return overlap ? std::max(compute, std::max(receive, send)) : compute + receive + send;
  }
};

/*! \brief Non-dominated ways to reach each cut. `used` is flat: groups entries a label. */
struct Labels {
  std::vector<int32_t> used;
  std::vector<double> value;
  std::vector<int32_t> group, replicas, from_cut, from_label;
  int64_t size() const { return static_cast<int64_t>(value.size()); }
};

class Search {
 public:
  Search(const Table& t, bool latency, bool one_link, int64_t max_labels)
      : t_(t), latency_(latency), one_link_(one_link), max_labels_(max_labels), at_(t.num_cuts) {}

  /*! \brief Fill the labels for bound `limit`; return the best label at the last cut, or -1. */
  int64_t Run(double limit) {
    truncated = false;
    for (Labels& l : at_) l = Labels();
    Labels& start = at_[0];
    start.used.assign(t_.groups, 0);
    start.value = {0.0}, start.group = {-1}, start.replicas = {0}, start.from_cut = {-1},
    start.from_label = {-1};
    std::vector<int32_t> used(t_.groups);
    for (int64_t b = 0; b + 1 < t_.num_cuts; ++b) {
      if (at_[b].size() == 0) continue;
      Thin(&at_[b]);
      for (int64_t c = b + 1; c < t_.num_cuts; ++c) {
        for (int64_t g = 0; g < t_.groups; ++g) {
          if (t_.time[(b * t_.num_cuts + c) * t_.groups + g] == HUGE_VAL || t_.count[g] == 0)
            continue;
          if (!latency_ && t_.time[(b * t_.num_cuts + c) * t_.groups + g] > limit * t_.count[g])
            continue;
          Extend(b, c, g, limit, &used);
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
  void Extend(int64_t b, int64_t c, int64_t g, double limit, std::vector<int32_t>* used) {
    const Labels& from = at_[b];
    double load = -1.0;
    int64_t load_before = -2;
    for (int64_t i = 0; i < from.size(); ++i) {
      ++steps;
      const int32_t before = from.group[i];
      if (load_before == -2 || (!one_link_ && before != load_before)) {
        load = t_.LoadS(b, c, g, before, !latency_);
        if (latency_ && c == t_.num_cuts - 1) {
          const double* m = t_.moves.data() + 8 * (b * t_.num_cuts + c);
          load += m[6] * t_.host_latency[g] + m[7] * t_.host_per_byte[g];
        }
        load_before = before;
      }
      const int64_t free = t_.count[g] - from.used[i * t_.groups + g];
      const double need = latency_ ? 1.0 : std::max(1.0, std::ceil(load / limit * (1.0 - 1e-12)));
      if (!(need <= free)) continue;
      const double value = latency_ ? from.value[i] + load : std::max(from.value[i], load / need);
      if (value > limit * (1.0 + 1e-12)) continue;
      std::copy_n(from.used.begin() + i * t_.groups, t_.groups, used->begin());
      (*used)[g] += static_cast<int32_t>(need);
      Insert(&at_[c], *used, value, g, static_cast<int32_t>(need), b, i);
    }
  }

  /*! \brief Does a label with (used a, value x, group p) make one with (used b, value y, group q)
   * superfluous? */
  bool Dominates(const int32_t* a, double x, int32_t p, const int32_t* b, double y,
                 int32_t q) const {
    if (!one_link_ && p != q) return false;
    if (latency_ && x > y) return false;
    bool same = true;
    for (int64_t g = 0; g < t_.groups; ++g) {
      if (a[g] > b[g]) return false;
      same &= a[g] == b[g];
    }
    return !same || x <= y;
  }

  void Insert(Labels* l, const std::vector<int32_t>& used, double value, int32_t group,
              int32_t replicas, int32_t cut, int32_t label) {
    const int64_t groups = t_.groups;
    for (int64_t i = 0; i < l->size(); ++i) {
      if (Dominates(l->used.data() + i * groups, l->value[i], l->group[i], used.data(), value,
                    group))
        return;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < l->size(); ++i) {
      if (Dominates(used.data(), value, group, l->used.data() + i * groups, l->value[i],
                    l->group[i]))
        continue;
      if (kept != i) Move(l, i, kept);
      ++kept;
    }
    Resize(l, kept + 1);
    std::copy(used.begin(), used.end(), l->used.begin() + kept * groups);
    l->value[kept] = value, l->group[kept] = group, l->replicas[kept] = replicas;
    l->from_cut[kept] = cut, l->from_label[kept] = label;
    if (l->size() >= 2 * max_labels_) Thin(l);
  }

  /*! \brief Keep at most max_labels_, those that use the smallest share of the cluster (or the
   * least time). */
  void Thin(Labels* l) {
    if (l->size() <= max_labels_) return;
    truncated = true;
    std::vector<double> rank(l->size(), 0.0);
    for (int64_t i = 0; i < l->size(); ++i) {
      for (int64_t g = 0; g < t_.groups; ++g) {
        rank[i] +=
            static_cast<double>(l->used[i * t_.groups + g]) / std::max<int64_t>(1, t_.count[g]);
      }
      if (latency_) rank[i] = l->value[i] * (1.0 + 1e-3 * rank[i]);
    }
    std::vector<int64_t> order(l->size());
    for (int64_t i = 0; i < l->size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return rank[a] < rank[b]; });
    order.resize(max_labels_);
    std::sort(order.begin(), order.end());
    for (int64_t i = 0; i < max_labels_; ++i) Move(l, order[i], i);
    Resize(l, max_labels_);
  }

  void Move(Labels* l, int64_t from, int64_t to) {
    std::copy_n(l->used.begin() + from * t_.groups, t_.groups, l->used.begin() + to * t_.groups);
    l->value[to] = l->value[from], l->group[to] = l->group[from],
    l->replicas[to] = l->replicas[from];
    l->from_cut[to] = l->from_cut[from], l->from_label[to] = l->from_label[from];
  }

  void Resize(Labels* l, int64_t n) {
    l->used.resize(n * t_.groups), l->value.resize(n), l->group.resize(n), l->replicas.resize(n);
    l->from_cut.resize(n), l->from_label.resize(n);
  }

  const Table& t_;
  bool latency_, one_link_;
  int64_t max_labels_;
  std::vector<Labels> at_;
};

bool OneLink(const Table& t) {
  for (int64_t i = 1; i < t.latency.size(); ++i) {
    if (t.latency[i] != t.latency[0] || t.per_byte[i] != t.per_byte[0]) return false;
  }
  return true;
}

}  // namespace

/*! \brief Search stages over a segment table.
 *  \param arrays time [cuts, cuts, groups], moves [cuts, cuts, 8], link latency and s/byte [groups,
 * groups], host latency and s/byte [groups], stage overhead [groups].
 *  \param lower, upper bounds on the objective in seconds; `upper` may be inf.
 *  \return (stages, truncated, steps, proved): `stages` holds (from cut, to cut, group, replicas)
 * of each stage, empty if there is none below `upper`; no plan of this table has an objective below
 * `proved` by its cost model. */
ffi::Array<ffi::Any> StageSearch(const ffi::Array<ffi::Tensor>& arrays,
                                 const ffi::TensorView& counts, bool overlap, bool latency,
                                 double lower, double upper, double tolerance, int64_t max_labels) {
  const View<int64_t> count(counts, "counts");
  const int64_t groups = count.size();
  const View<double> moves(arrays[1], "moves");
  const int64_t num_cuts = std::llround(std::sqrt(moves.size() / 8.0));
  const Table t{View<double>(arrays[0], "time"),
                moves,
                View<double>(arrays[2], "latency"),
                View<double>(arrays[3], "per_byte"),
                View<double>(arrays[4], "host_latency"),
                View<double>(arrays[5], "host_per_byte"),
                View<double>(arrays[6], "overhead"),
                count,
                overlap,
                num_cuts,
                groups};
  Search search(t, latency, OneLink(t), max_labels);
  int64_t best = search.Run(upper);
  bool truncated = search.truncated;
  if (best < 0) return {ffi::Array<int64_t>(), truncated, search.steps, upper};
  std::vector<int64_t> stages = search.Trace(best);
  double value = search.Value(best);
  while (!latency && value - lower > tolerance * value) {
    // First try just below the incumbent: a plan that only shaves a little is found without a long
    // bisection.
    const double middle = lower > 0 ? std::sqrt(lower * value) : value / 2;
    best = search.Run(std::min(middle, value * (1.0 - 1e-9)));
    truncated |= search.truncated;
    if (best >= 0) {
      stages = search.Trace(best), value = search.Value(best);
    } else {
      lower = middle;
    }
  }
  const double proved = latency ? value : (value - lower <= tolerance * value ? lower : value);
  return {ffi::Array<int64_t>(stages.begin(), stages.end()), truncated, search.steps, proved};
}

/*! \brief The whole front of speed against price: the cheapest stages for every bottleneck.
 *
 *  Starts without a limit and asks each time for something faster by at least the factor `step`
 * than the last answer.
 *  \param prices price of one device of each group, in any unit per time.
 *  \return lists of (from cut, to cut, group, replicas), cheapest first; and whether the label
 * limit hid any. */
ffi::Array<ffi::Any> StageFront(const ffi::Array<ffi::Tensor>& arrays,
                                const ffi::TensorView& counts, const ffi::TensorView& prices,
                                bool overlap, double step, int64_t max_labels) {
  const View<int64_t> count(counts, "counts");
  const View<double> moves(arrays[1], "moves"), price(prices, "prices");
  const Table t{View<double>(arrays[0], "time"),
                moves,
                View<double>(arrays[2], "latency"),
                View<double>(arrays[3], "per_byte"),
                View<double>(arrays[4], "host_latency"),
                View<double>(arrays[5], "host_per_byte"),
                View<double>(arrays[6], "overhead"),
                count,
                overlap,
                std::llround(std::sqrt(moves.size() / 8.0)),
                count.size()};
  Search search(t, false, OneLink(t), max_labels);
  ffi::Array<ffi::Any> front;
  bool truncated = false;
  for (double limit = HUGE_VAL; limit > 0;) {
    search.Run(limit);
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
      .def("tvmhet.StageFront", StageFront);
}
}  // namespace tvmhet
