/*! \file passes/unlike_replicas.h
 *  \brief Which replicas on unlike groups run a stage's micro-batches within a
 * limit.
 *
 *      limit ──► passes of one replica of each way ──► counts that make all
 * passes, none too many
 */
#ifndef TVMHET_PASSES_UNLIKE_REPLICAS_H_
#define TVMHET_PASSES_UNLIKE_REPLICAS_H_

#include <algorithm>
#include <cmath>
#include <vector>

namespace tvmhet {

/*! \brief Replicas of a stage in one mode. */
struct Part {
  int32_t mode, replicas;
};

/*! \brief A way to run a stage: seconds that each further micro-batch keeps a
 * replica, and of the first one's way through it. */
struct Way {
  int32_t mode, group, degree;
  double load, path;
};

/*! \brief A stage on two groups or more. `passes[p]` micro-batches end in time
 * on one replica of part p. */
struct Team {
  std::vector<Part> parts;
  std::vector<int64_t> passes;
  std::vector<Way> ways;
};

class UnlikeReplicas {
 public:
  /*! \param ways sorted by path: a team's first one has the shortest.
   * \param levels so many counts of each way are tried, spread evenly; 0: nearly all. */
  UnlikeReplicas(const std::vector<Way>& ways, int64_t microbatches, int64_t levels)
      : ways_(ways), micro_(microbatches), levels_(levels) {}

  /*! \brief How many counts of a way with `most` replicas are tried. */
  static int64_t NumCounts(int64_t most, int64_t levels) {
    if (levels > 0) return std::min(most, levels);
    int64_t num = 0;
    for (int64_t count = 1; count <= most; count = After(count, most)) ++num;
    return num;
  }

  /*! \brief Visit every team of which no replica can be left out, such that the
   * last micro-batch of a replica ends no more than `limit` after the first
   * one's shortest way. `free[g]` devices of each group are there. */
  template <typename Visit>
  void Each(const std::vector<int64_t>& free, double limit, const Visit& visit) {
    team_ = Team();
    limit_ = limit;
    Choose(0, micro_, free, visit);
  }

  /*! \brief The least limit that `team` keeps, given one that it keeps. */
  double Steady(const Team& team, double limit) const {
    double low = 0.0, high = limit;
    for (int i = 0; i < kHalvings; ++i) {
      const double middle = (low + high) / 2;
      int64_t sum = 0;
      for (size_t p = 0; p < team.parts.size(); ++p)
        sum += team.parts[p].replicas * Passes(team.ways[p], team.ways[0].path, middle);
      (sum >= micro_ ? high : low) = middle;
    }
    return high;
  }

  int64_t steps = 0;
  bool skipped = false;  // some counts were not tried

 private:
  static constexpr int kHalvings = 40;
  static constexpr int64_t kEach = 8;  // every count is tried up to here, then about every fourth

  int64_t Passes(const Way& way, double shortest, double limit) const {
    const double left = limit - (way.path - shortest);
    if (left < 0) return 0;
    const double passes =
        way.load > 0 ? std::floor(left / way.load * (1.0 + 1e-12)) + 1.0 : HUGE_VAL;
    return passes >= micro_ ? micro_ : static_cast<int64_t>(passes);
  }

  template <typename Visit>
  void Choose(size_t from, int64_t need, const std::vector<int64_t>& free, const Visit& visit) {
    for (size_t w = from; w < ways_.size(); ++w) {
      const Way& way = ways_[w];
      auto same = [&](const Way& other) { return other.group == way.group; };
      if (std::any_of(team_.ways.begin(), team_.ways.end(), same)) continue;
      const double shortest = team_.ways.empty() ? way.path : team_.ways[0].path;
      const int64_t passes = Passes(way, shortest, limit_), most = free[way.group] / way.degree;
      if (passes < 1 || most < 1) continue;
      const int64_t enough = (need + passes - 1) / passes;
      team_.ways.push_back(way), team_.passes.push_back(passes),
          team_.parts.push_back({way.mode, 0});
      const int64_t last = std::min(most, enough);
      for (int64_t count = First(last); count <= last; count = Next(count, last)) {
        ++steps;
        team_.parts.back().replicas = static_cast<int32_t>(count);
        if (count < enough) {
          Choose(w + 1, need - count * passes, free, visit);
        } else if (team_.parts.size() > 1 && NoneTooMany(count * passes - need)) {
          visit(team_);
        }
      }
      team_.ways.pop_back(), team_.passes.pop_back(), team_.parts.pop_back();
    }
  }

  static int64_t After(int64_t count, int64_t last) {
    if (count < kEach || count == last) return count + 1;
    return std::min(last, count + std::max<int64_t>(1, count / 4));
  }

  int64_t Stride(int64_t last) const { return std::max<int64_t>(1, last / levels_); }

  int64_t First(int64_t last) const {
    return levels_ == 0 ? 1 : std::max<int64_t>(1, last - (levels_ - 1) * Stride(last));
  }

  int64_t Next(int64_t count, int64_t last) {
    const int64_t next = levels_ == 0 ? After(count, last) : count + Stride(last);
    skipped |= next > count + 1 || First(last) > 1;
    return next;
  }

  bool NoneTooMany(int64_t more) const {
    return std::all_of(team_.passes.begin(), team_.passes.end(),
                       [&](int64_t passes) { return passes > more; });
  }

  const std::vector<Way>& ways_;
  int64_t micro_, levels_;
  double limit_ = 0.0;
  Team team_;
};

}  // namespace tvmhet
#endif  // TVMHET_PASSES_UNLIKE_REPLICAS_H_
