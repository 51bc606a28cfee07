/*! \file passes/segment_table.cc
 *  \brief What each possible stage costs: the best kernels, the memory and the transfers between
 * two states.
 *
 *  A stage that starts in state S and ends in state T runs the nodes of T minus S. Its kernels are
 * a shortest path from S to T. Its memory is: weights it reads + live-ins (kept throughout) + the
 * largest, over its kernels, of the results that are still needed, the kernel's own results and its
 * workspace. */
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>

#include "segment_model.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

/*! \brief A way from the first state of a stage to a later one: its seconds, the largest bytes of
 * results and workspace on it, and the edge and label it came by. */
struct Way {
  double time, peak;
  int32_t edge, before;
};

/*! \brief Times within this ratio are one: the same kernels summed in another order. */
constexpr double kSame = 1 + 1e-12;

/*! \brief Fastest paths from one state to all later ones, on every group, within its memory.
 *
 *  Where memory may bind, a state keeps several ways on each group: each is faster, or needs less,
 * than the others. Up to `most` are kept, always the fastest and the leanest; `exact` says whether
 * any was dropped for that limit. */
class Sweep {
 public:
  explicit Sweep(const Model& m)
      : m_(m),
        groups_(m.num_groups()),
        most_(MemoryMayBind(m) ? 8 : 1),
        ways_(m.flow.num_states * groups_ * most_),
        count_(m.flow.num_states * groups_),
        room_(groups_),
        weight_(m.flow.num_states),
        whole_(m.flow.num_states),
        live_in_(m.flow.num_states),
        reached_(m.flow.num_states) {}

  /*! \brief Run from state s up to state `last`. */
  void From(int64_t s, int64_t last) {
    begin_ = s;
    const Bits begin = m_.StateBits(s);
    std::fill(count_.begin(), count_.end(), 0);
    std::fill(reached_.begin(), reached_.end(), 0);
    Hold(last);
    for (int64_t g = 0; g < groups_; ++g) {
      room_[g] = m_.limit[g] - FixedBytes(last, g);
      ways_[(s * groups_ + g) * most_] = {0.0, 0.0, -1, -1};
      count_[s * groups_ + g] = 1;
    }
    reached_[s] = 1;
    for (int64_t u = s; u <= last; ++u) {
      if (reached_[u]) Settle(u, begin);
    }
  }
  bool Reached(int64_t u) const { return reached_[u]; }
  bool Fits(int64_t u, int64_t g) const { return count_[u * groups_ + g] > 0; }
  double TimeS(int64_t u, int64_t g) const { return ways_[(u * groups_ + g) * most_].time; }
  double MemoryBytes(int64_t u, int64_t g) const {
    return FixedBytes(u, g) + ways_[(u * groups_ + g) * most_].peak;
  }
  std::vector<int64_t> Kernels(int64_t u, int64_t g) const {
    std::vector<int64_t> path;
    const Way* way = &ways_[(u * groups_ + g) * most_];
    while (way->edge >= 0) {
      path.push_back(m_.edges[way->edge + 2]);
      way = &ways_[(m_.edges[way->edge] * groups_ + g) * most_ + way->before];
    }
    return {path.rbegin(), path.rend()};
  }
  bool exact() const { return exact_; }

 private:
  static bool MemoryMayBind(const Model& m) {
    double total = 0.0, workspace = 0.0;
    for (int64_t e = 0; e < m.flow.num_tensors; ++e) total += m.flow.size[e];
    for (int64_t w = 0; w < m.flow.weight.size(); ++w) total += m.flow.weight[w];
    for (int64_t k = 0; k < m.kernel_bytes.size(); k += 2)
      workspace = std::max(workspace, m.kernel_bytes[k + 1]);
    for (int64_t g = 0; g < m.num_groups(); ++g) {
      if (total + workspace > m.limit[g]) return true;
    }
    return false;
  }

  /*! \brief Bytes held throughout by a device of g in a stage up to state u, after Hold(u): its
   * share of the weights, and what the stage reads. */
  double FixedBytes(int64_t u, int64_t g) const {
    return weight_[u] * m_.weight_share[g] + whole_[u] + live_in_[u];
  }
  void Hold(int64_t u) {
    const Flow& f = m_.flow;
    live_in_[u] = 0.0;
    for (int64_t x : f.made[begin_]) live_in_[u] += f.Reads(begin_, u, x) ? f.size[x] : 0.0;
    weight_[u] = f.WeightBytes(begin_, u, false);
    whole_[u] = f.WeightBytes(begin_, u, true);
  }

  void Settle(int64_t u, const Bits& begin) {
    const Flow& f = m_.flow;
    double live = 0.0;
    for (int64_t x : f.made[u]) live += f.src[x] >= 0 && !begin.Has(f.src[x]) ? f.size[x] : 0.0;
    Hold(u);
    bool fits = false;
    for (int64_t g = 0; g < groups_; ++g) {
      Way* ways = &ways_[(u * groups_ + g) * most_];
      int8_t& count = count_[u * groups_ + g];
      const double fixed = FixedBytes(u, g);
      const auto too_large = [&](const Way& w) { return fixed + w.peak > m_.limit[g]; };
      count = std::remove_if(ways, ways + count, too_large) - ways;
      fits |= count > 0;
    }
    if (!fits) return;
    for (int64_t i = 3 * m_.first[u]; i < 3 * m_.first[u + 1]; i += 3) {
      const int64_t v = m_.edges[i + 1], k = m_.edges[i + 2];
      const double step = live + m_.kernel_bytes[2 * k] + m_.kernel_bytes[2 * k + 1];
      reached_[v] = 1;
      for (int64_t g = 0; g < groups_; ++g) {
        const double time = m_.time[k * groups_ + g];
        if (time == HUGE_VAL) continue;
        const Way* ways = &ways_[(u * groups_ + g) * most_];
        for (int32_t w = 0; w < count_[u * groups_ + g]; ++w) {
          Offer(v, g,
                {ways[w].time + time, std::max(ways[w].peak, step), static_cast<int32_t>(i), w});
        }
      }
    }
  }

  /*! \brief Keep a way to state v, fastest first, unless another is as fast and as lean. */
  void Offer(int64_t v, int64_t g, const Way& way) {
    Way* ways = &ways_[(v * groups_ + g) * most_];
    int8_t& count = count_[v * groups_ + g];
    const double room = room_[g];  // a peak up to here fits whatever else the stage runs
    const auto as_good = [room](const Way& a, const Way& b) {
      return a.time <= b.time * kSame &&
             (a.peak <= b.peak || (a.peak <= room && a.time * kSame < b.time));
    };
    for (int8_t i = 0; i < count; ++i) {
      if (as_good(ways[i], way)) return;
    }
    count =
        std::remove_if(ways, ways + count, [&](const Way& w) { return as_good(way, w); }) - ways;
    if (count == most_) {
      if (most_ == 1) {  // memory never binds: only equally fast, or slower and leaner
        if (way.time <= ways[0].time * kSame) ways[0] = way;
        return;
      }
      exact_ = false;
      const bool is_end = way.time < ways[0].time || way.peak < ways[count - 1].peak;
      if (!is_end) return;
      const int8_t gone = way.time < ways[0].time ? 1 : count - 2;
      std::copy(ways + gone + 1, ways + count, ways + gone);
      --count;
    }
    int8_t at = count++;
    for (; at > 0 && way.time < ways[at - 1].time; --at) ways[at] = ways[at - 1];
    ways[at] = way;
  }

  const Model& m_;
  int64_t groups_, begin_ = 0, most_;
  std::vector<Way> ways_;
  std::vector<int8_t> count_;
  std::vector<double> room_, weight_, whole_, live_in_;
  std::vector<char> reached_;
  bool exact_ = true;
};

}  // namespace

/*! \brief Fill time_s and memory ([cuts, cuts, groups]; inf where impossible) and moves ([cuts,
 * cuts, 8]: count and bytes received, sent, read from the host and returned to it).
 *  \param arrays states (words), edges (int32 triples from, to, kernel, by `from`), kernel_time_s
 * [kernels, groups], kernel_bytes [kernels, 2] (results still needed outside, workspace),
 * group_memory, tensor_src, tensor_bytes, tensor_output, reader_ptr, reader_ids, weight_bytes,
 * weight_ptr, weight_ids, weight_share [groups] (of the weights, on one device), weight_whole
 * [weights] (each device of a team holds all of it).
 *  \param cuts ids of the states between which stages may be cut, ascending.
 *  \return whether every entry is the fastest that fits; else some may be slower than need be. */
bool SegmentTable(int64_t n, const ffi::Array<ffi::Tensor>& arrays, const ffi::TensorView& cuts,
                  const ffi::TensorView& time_out, const ffi::TensorView& memory_out,
                  const ffi::TensorView& moves_out) {
  const Model m = Unpack(n, arrays);
  const View<int32_t> cut(cuts, "cuts");
  const View<double> time(time_out, "time_out"), memory(memory_out, "memory_out"),
      moves(moves_out, "moves_out");
  std::fill(time.data(), time.data() + time.size(), HUGE_VAL);
  std::fill(memory.data(), memory.data() + memory.size(), HUGE_VAL);
  const int64_t groups = m.num_groups(), num_cuts = cut.size();
  Sweep sweep(m);
  for (int64_t b = 0; b < num_cuts; ++b) {
    sweep.From(cut[b], cut[num_cuts - 1]);
    const Bits begin = m.StateBits(cut[b]);
    for (int64_t c = b + 1; c < num_cuts; ++c) {
      if (!sweep.Reached(cut[c])) continue;
      const int64_t at = b * num_cuts + c;
      const Moves mv = MovesOf(m.flow, begin, cut[b], cut[c]);
      std::copy(&mv.receive_count, &mv.receive_count + 8, moves.data() + 8 * at);
      for (int64_t g = 0; g < groups; ++g) {
        if (!sweep.Fits(cut[c], g)) continue;
        time[at * groups + g] = sweep.TimeS(cut[c], g);
        memory[at * groups + g] = sweep.MemoryBytes(cut[c], g);
      }
    }
  }
  return sweep.exact();
}

/*! \brief The kernels behind one entry of the table, in order: those of the stage from state `from`
 * to `to`. */
ffi::Array<int64_t> SegmentKernels(int64_t n, const ffi::Array<ffi::Tensor>& arrays, int64_t from,
                                   int64_t to, int64_t group) {
  const Model m = Unpack(n, arrays);
  Sweep sweep(m);
  sweep.From(from, to);
  if (!sweep.Fits(to, group)) {
    TVM_FFI_THROW(ValueError) << "no stage from state " << from << " to " << to << " fits group "
                              << group;
  }
  const std::vector<int64_t> path = sweep.Kernels(to, group);
  return ffi::Array<int64_t>(path.begin(), path.end());
}

/*! \brief The kernels of many stages that start in one state.
 *  \param ends (state, group) of each stage.
 *  \return the kernels of each, in order. */
ffi::Array<ffi::Any> SegmentPaths(int64_t n, const ffi::Array<ffi::Tensor>& arrays, int64_t from,
                                  const ffi::TensorView& ends) {
  const Model m = Unpack(n, arrays);
  const View<int64_t> end(ends, "ends");
  int64_t last = from;
  for (int64_t i = 0; i < end.size(); i += 2) last = std::max(last, end[i]);
  Sweep sweep(m);
  sweep.From(from, last);
  ffi::Array<ffi::Any> out;
  for (int64_t i = 0; i < end.size(); i += 2) {
    if (!sweep.Fits(end[i], end[i + 1])) {
      TVM_FFI_THROW(ValueError) << "no stage from state " << from << " to " << end[i]
                                << " fits group " << end[i + 1];
    }
    const std::vector<int64_t> path = sweep.Kernels(end[i], end[i + 1]);
    out.push_back(ffi::Array<int64_t>(path.begin(), path.end()));
  }
  return out;
}

/*! \brief The kernels of many stages of one model.
 *  \param stages (from state, to state, group) of each, those that start in one state in a row.
 *  \return the kernels of each, in order; none of a stage that its group cannot run or hold. */
ffi::Array<ffi::Any> SegmentStages(int64_t n, const ffi::Array<ffi::Tensor>& arrays,
                                   const ffi::TensorView& stages) {
  const Model m = Unpack(n, arrays);
  const View<int64_t> row(stages, "stages");
  Sweep sweep(m);
  ffi::Array<ffi::Any> out;
  for (int64_t i = 0, next = 0; i < row.size(); i += 3) {
    if (i == next) {
      int64_t last = row[i];
      for (; next < row.size() && row[next] == row[i]; next += 3) {
        last = std::max(last, row[next + 1]);
      }
      sweep.From(row[i], last);
    }
    std::vector<int64_t> path;
    if (sweep.Fits(row[i + 1], row[i + 2])) path = sweep.Kernels(row[i + 1], row[i + 2]);
    out.push_back(ffi::Array<int64_t>(path.begin(), path.end()));
  }
  return out;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def("tvmhet.SegmentTable", SegmentTable)
      .def("tvmhet.SegmentStages", SegmentStages)
      .def("tvmhet.SegmentKernels", SegmentKernels)
      .def("tvmhet.SegmentPaths", SegmentPaths);
}
}  // namespace tvmhet
