/*! \file passes/max_flow.h
 *  \brief A maximum flow and its least cut. */
#ifndef TVMHET_PASSES_MAX_FLOW_H_
#define TVMHET_PASSES_MAX_FLOW_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace tvmhet {

/*! \brief Dinic's maximum flow with real capacities. */
class MaxFlow {
 public:
  /*! \param nothing  What is taken for nothing, in the unit of the capacities. */
  explicit MaxFlow(double nothing = 1e-9) : nothing_(nothing) {}
  void Reset(int64_t n) {
    edges_.clear();
    head_.assign(n, -1);
  }
  /*! \brief Add an edge; return its number. */
  int64_t Add(int64_t a, int64_t b, double capacity) {
    edges_.push_back({static_cast<int32_t>(b), head_[a], capacity});
    head_[a] = edges_.size() - 1;
    edges_.push_back({static_cast<int32_t>(a), head_[b], 0.0});
    head_[b] = edges_.size() - 1;
    return edges_.size() - 2;
  }
  /*! \brief Push all that fits from s to t; return how much. */
  double Run(int64_t s, int64_t t) {
    double total = 0.0;
    while (Levels(s, t)) {
      at_ = head_;
      while (const double pushed = Push(s, t, HUGE_VAL)) total += pushed;
    }
    return total;
  }

  /*! \brief What flows over edge e, after `Run`. */
  double Flow(int64_t e) const { return edges_[e ^ 1].left; }
  /*! \brief Is v on the source's side of a least cut, after `Run`? */
  bool Reached(int64_t v) const { return level_[v] >= 0; }

 private:
  struct Edge {
    int32_t to, next;
    double left;
  };
  bool Levels(int64_t s, int64_t t) {
    level_.assign(head_.size(), -1);
    level_[s] = 0;
    queue_.assign(1, s);
    for (size_t i = 0; i < queue_.size(); ++i) {
      for (int32_t e = head_[queue_[i]]; e >= 0; e = edges_[e].next) {
        if (edges_[e].left > nothing_ && level_[edges_[e].to] < 0) {
          level_[edges_[e].to] = level_[queue_[i]] + 1;
          queue_.push_back(edges_[e].to);
        }
      }
    }
    return level_[t] >= 0;
  }
  double Push(int64_t u, int64_t t, double most) {
    if (u == t) return most;
    for (int32_t& e = at_[u]; e >= 0; e = edges_[e].next) {
      if (edges_[e].left <= nothing_ || level_[edges_[e].to] != level_[u] + 1) continue;
      const double pushed = Push(edges_[e].to, t, std::min(most, edges_[e].left));
      if (pushed > 0) {
        edges_[e].left -= pushed;
        edges_[e ^ 1].left += pushed;
        return pushed;
      }
    }
    return 0.0;
  }
  double nothing_;
  std::vector<Edge> edges_;
  std::vector<int32_t> head_, at_, level_;
  std::vector<int64_t> queue_;
};

}  // namespace tvmhet
#endif  // TVMHET_PASSES_MAX_FLOW_H_
