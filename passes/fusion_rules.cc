/*! \file passes/fusion_rules.cc
 *  \brief What TVM's FuseOps makes of a graph, so that a planner can ask it about any part.
 *
 *  An operator may join its immediate post-dominator, the first operator where all its readers meet
 *  again, and takes everything in between along:
 *
 *        conv                       kind        between        post-dominator
 *        /  \                       0, 1        <= 2           0 - 3, or a group that holds a 4
 *     relu  exp    conv joins       2           <= 2           <= 2
 *        \  /      add              4           0              0
 *        add                        3, 8        never joins forward
 *
 *  The table speaks of the kinds of the *groups* formed so far, except that the operators read on
 * the way from a 4 must be elementwise themselves. Kinds 0, 1 and 4 go first (round 0), then kind 2
 *  too (round 1). TVM's third round serves tuple nodes, which Relax does not make. */
#include "fusion_rules.h"

#include <algorithm>

namespace tvmhet {
namespace {

/*! \brief The immediate post-dominator of each operator, and the worst kind read on the way to it.
 */
struct PostDominators {
  std::vector<int> parent;  // -1: none
  std::vector<int> depth;
  std::vector<int> way_kind;

  explicit PostDominators(const FusionGraph& graph)
      : parent(graph.size(), -1), depth(graph.size(), 1), way_kind(graph.size(), kElemWise) {
    for (int u = graph.size() - 1; u >= 0; --u) {
      if (graph.escapes[u] || graph.consumers[u].empty()) continue;
      const int floor = graph.is_multi_output[u] ? kInjective : kElemWise;
      int meet = graph.consumers[u].front();
      int worst = floor;
      for (int v : graph.consumers[u]) {
        meet = Meet(meet, v, &worst);
        worst = std::max(worst, graph.kind[v]);
      }
      parent[u] = meet;
      depth[u] = meet < 0 ? 1 : depth[meet] + 1;
      way_kind[u] = worst;
    }
  }

 private:
  /*! \brief Climb from both to their nearest common post-dominator, or -1. */
  int Meet(int u, int v, int* worst) const {
    while (u != v) {
      if (u < 0 || v < 0) return -1;
      const bool climb_u = depth[u] >= depth[v];
      const bool climb_v = depth[v] >= depth[u];
      if (climb_u) {
        *worst = std::max(*worst, way_kind[u]);
        u = parent[u];
      }
      if (climb_v) {
        *worst = std::max(*worst, way_kind[v]);
        v = parent[v];
      }
    }
    return u;
  }
};

/*! \brief Groups as a forest that points at later operators; a group's kind is kept at its root. */
class Grouping {
 public:
  Grouping(const FusionGraph& graph, int64_t max_depth)
      : graph_(graph),
        dominators_(graph),
        max_depth_(max_depth),
        up_(graph.size()),
        kind_(graph.kind),
        count_(graph.size(), 1),
        seen_(graph.size(), -1) {
    for (int u = 0; u < graph.size(); ++u) up_[u] = u;
  }

  std::vector<int> Run() {
    for (int round = 0; round < 2; ++round) {
      for (int u = 0; u < graph_.size(); ++u) TryJoin(u, round);
    }
    std::vector<int> roots(graph_.size());
    for (int u = 0; u < graph_.size(); ++u) roots[u] = Root(u);
    return roots;
  }

 private:
  int Root(int u) const {
    while (up_[u] != u) u = up_[u];
    return u;
  }

  /*! \brief Collect into `between_` the operators after `u` and before `sink`. */
  void CollectBetween(int u, int sink) {
    between_.clear();
    stack_.assign(1, u);
    ++stamp_;
    while (!stack_.empty()) {
      const int w = stack_.back();
      stack_.pop_back();
      for (int v : graph_.consumers[w]) {
        if (v == sink || seen_[v] == stamp_) continue;
        seen_[v] = stamp_;
        between_.push_back(v);
        stack_.push_back(v);
      }
    }
  }

  /*! \brief Whether every group between has at most kind `limit`. */
  bool BetweenAtMost(int limit) const {
    return std::all_of(between_.begin(), between_.end(),
                       [&](int w) { return kind_[Root(w)] <= limit; });
  }

  bool IsAllowed(int u, int sink, int round) {
    const int own = kind_[u];
    const int sink_kind = kind_[Root(sink)];
    const int way = dominators_.way_kind[u];
    if (own == kOutEWiseFusable) {
      return round == 0 && way == kElemWise && sink_kind <= kBroadcast && BetweenAtMost(kBroadcast);
    }
    if (own <= kBroadcast) {
      return way <= kCommReduce && sink_kind <= kOutEWiseFusable && BetweenAtMost(kInjective);
    }
    return own == kInjective && round == 1 && sink_kind <= kInjective && BetweenAtMost(kInjective);
  }

  void TryJoin(int u, int round) {
    const int sink = dominators_.parent[u];
    if (kind_[u] > kOutEWiseFusable || sink < 0 || Root(u) == Root(sink)) return;
    CollectBetween(u, sink);
    int64_t total = count_[Root(sink)] + count_[u];
    for (int w : between_) total += count_[w];
    if (total > max_depth_ || !IsAllowed(u, sink, round)) return;
    Join(u, sink);
    for (int w : between_) Join(w, sink);
  }

  void Join(int u, int sink) {
    const int from = Root(u);
    const int to = Root(sink);
    if (from == to) return;
    up_[from] = to;
    count_[to] += count_[from];
    if (kind_[from] == kOutEWiseFusable) kind_[to] = kOutEWiseFusable;
  }

  const FusionGraph& graph_;
  const PostDominators dominators_;
  const int64_t max_depth_;
  std::vector<int> up_;
  std::vector<int> kind_;  // of the group when the operator was last its root
  std::vector<int64_t> count_;
  std::vector<int> seen_;
  std::vector<int> between_;
  std::vector<int> stack_;
  int stamp_ = 0;
};

}  // namespace

std::vector<int> FuseGreedily(const FusionGraph& graph, int64_t max_depth) {
  return Grouping(graph, max_depth).Run();
}

}  // namespace tvmhet
