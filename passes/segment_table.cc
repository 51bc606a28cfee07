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

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

/*! \brief Tensors and weights of the model, and where each stands in each state. */
struct Flow {
  Flow(int64_t n, const View<uint64_t>& states, const Lists& readers, const View<int32_t>& src,
       const View<double>& size, const View<uint8_t>& is_output, const Lists& weight_readers,
       const View<double>& weight)
      : words((n + 63) / 64),
        num_states(states.size() / words),
        src(src),
        size(size),
        is_output(is_output),
        weight(weight),
        made(num_states),
        weight_single(num_states, 0.0),
        num_tensors(src.size()) {
    read_count.assign(num_states * num_tensors, 0);
    for (int64_t w = 0; w < weight_readers.size(); ++w) {
      if (weight_readers.end(w) - weight_readers.begin(w) != 1) shared.push_back(w);
    }
    shared_count.assign(num_states * shared.size(), 0);
    for (int64_t s = 0; s < num_states; ++s) {
      const Bits state(states.data() + s * words, words);
      for (int64_t e = 0; e < num_tensors; ++e) {
        int32_t reads = 0;
        for (const int32_t* v = readers.begin(e); v != readers.end(e); ++v) reads += state.Has(*v);
        read_count[s * num_tensors + e] = reads;
        const bool is_made = src[e] < 0 || state.Has(src[e]);
        if (is_made && (reads < readers.end(e) - readers.begin(e) || (is_output[e] && src[e] >= 0)))
          made[s].push_back(e);
      }
      for (int64_t w = 0, k = 0; w < weight_readers.size(); ++w) {
        if (weight_readers.end(w) - weight_readers.begin(w) == 1) {
          if (state.Has(*weight_readers.begin(w))) weight_single[s] += weight[w];
        } else {
          for (const int32_t* v = weight_readers.begin(w); v != weight_readers.end(w); ++v) {
            shared_count[s * shared.size() + k] += state.Has(*v);
          }
          ++k;
        }
      }
    }
    for (int64_t e = 0; e < num_tensors; ++e)
      num_readers.push_back(readers.end(e) - readers.begin(e));
  }

  bool Reads(int64_t s, int64_t t, int64_t e) const {  // does the segment s..t read tensor e?
    return read_count[t * num_tensors + e] > read_count[s * num_tensors + e];
  }
  double WeightBytes(int64_t s, int64_t t) const {
    double bytes = weight_single[t] - weight_single[s];
    for (size_t k = 0; k < shared.size(); ++k) {
      if (shared_count[t * shared.size() + k] > shared_count[s * shared.size() + k])
        bytes += weight[shared[k]];
    }
    return bytes;
  }

  int64_t words, num_states;
  View<int32_t> src;
  View<double> size;
  View<uint8_t> is_output;
  View<double> weight;
  std::vector<std::vector<int64_t>>
      made;  // per state: tensors that exist and are still needed, or are outputs
  std::vector<double> weight_single;
  int64_t num_tensors;
  std::vector<int32_t> read_count, shared_count, num_readers;
  std::vector<int64_t> shared;
};

/*! \brief Counts and bytes a stage moves, in the order the table documents. */
struct Moves {
  double receive_count = 0, receive_bytes = 0, send_count = 0, send_bytes = 0;
  double host_in_count = 0, host_in_bytes = 0, host_out_count = 0, host_out_bytes = 0;
};

Moves MovesOf(const Flow& f, const Bits& begin, int64_t s, int64_t t) {
  Moves m;
  for (int64_t e : f.made[s]) {
    if (!f.Reads(s, t, e)) continue;
    (f.src[e] < 0 ? m.host_in_count : m.receive_count) += 1;
    (f.src[e] < 0 ? m.host_in_bytes : m.receive_bytes) += f.size[e];
  }
  for (int64_t e : f.made[t]) {
    if (f.src[e] < 0 || begin.Has(f.src[e])) continue;
    if (f.read_count[t * f.num_tensors + e] < f.num_readers[e])
      m.send_count += 1, m.send_bytes += f.size[e];
    if (f.is_output[e]) m.host_out_count += 1, m.host_out_bytes += f.size[e];
  }
  return m;
}

/*! \brief Everything both entry points need, unpacked once. Array names are those of SegmentTable.
 */
struct Model {
  Flow flow;
  View<uint64_t> words;
  View<int32_t> edges;
  View<double> time, kernel_bytes, limit;
  std::vector<int64_t> first;  // first[s]: index of the first edge that leaves state s

  int64_t num_groups() const { return limit.size(); }
  Bits StateBits(int64_t s) const { return Bits(words.data() + s * flow.words, flow.words); }
};

Model Unpack(int64_t n, const ffi::Array<ffi::Tensor>& a) {
  if (a.size() != 13) TVM_FFI_THROW(ValueError) << "SegmentTable needs 13 arrays, got " << a.size();
  const View<uint64_t> words(a[0], "states");
  Model m{Flow(n, words, Lists(a[8], a[9], "readers"), View<int32_t>(a[5], "tensor_src"),
               View<double>(a[6], "tensor_bytes"), View<uint8_t>(a[7], "tensor_output"),
               Lists(a[11], a[12], "weights"), View<double>(a[10], "weight_bytes")),
          words,
          View<int32_t>(a[1], "edges"),
          View<double>(a[2], "kernel_time_s"),
          View<double>(a[3], "kernel_bytes"),
          View<double>(a[4], "group_memory"),
          {}};
  m.first.assign(m.flow.num_states + 1, 0);
  for (int64_t i = 0; i < m.edges.size(); i += 3) ++m.first[m.edges[i] + 1];
  for (int64_t s = 0; s < m.flow.num_states; ++s) m.first[s + 1] += m.first[s];
  return m;
}

/*! \brief Fastest paths from one state to all later ones, on every group, dropping what exceeds the
 * memory. */
class Sweep {
 public:
  explicit Sweep(const Model& m)
      : m_(m),
        groups_(m.num_groups()),
        dist_(m.flow.num_states * groups_),
        peak_(dist_.size()),
        via_(dist_.size()),
        fixed_(m.flow.num_states),
        reached_(m.flow.num_states) {}

  /*! \brief Run from state s up to state `last`. */
  void From(int64_t s, int64_t last) {
    begin_ = s;
    const Bits begin = m_.StateBits(s);
    std::fill(dist_.begin(), dist_.end(), HUGE_VAL);
    std::fill(peak_.begin(), peak_.end(), 0.0);
    std::fill(reached_.begin(), reached_.end(), 0);
    for (int64_t g = 0; g < groups_; ++g) dist_[s * groups_ + g] = 0.0;
    reached_[s] = 1;
    for (int64_t u = s; u <= last; ++u) {
      if (reached_[u]) Settle(u, begin);
    }
  }
  bool Reached(int64_t u) const { return reached_[u]; }
  double TimeS(int64_t u, int64_t g) const { return dist_[u * groups_ + g]; }
  double MemoryBytes(int64_t u, int64_t g) const { return fixed_[u] + peak_[u * groups_ + g]; }
  std::vector<int64_t> Kernels(int64_t u, int64_t g) const {
    std::vector<int64_t> path;
    for (; u != begin_; u = m_.edges[via_[u * groups_ + g]])
      path.push_back(m_.edges[via_[u * groups_ + g] + 2]);
    return {path.rbegin(), path.rend()};
  }

 private:
  void Settle(int64_t u, const Bits& begin) {
    const Flow& f = m_.flow;
    double live_in = 0.0, live = 0.0;
    for (int64_t x : f.made[begin_]) live_in += f.Reads(begin_, u, x) ? f.size[x] : 0.0;
    for (int64_t x : f.made[u]) live += f.src[x] >= 0 && !begin.Has(f.src[x]) ? f.size[x] : 0.0;
    fixed_[u] = f.WeightBytes(begin_, u) + live_in;
    bool fits = false;
    for (int64_t g = 0; g < groups_; ++g) {
      double& d = dist_[u * groups_ + g];
      if (fixed_[u] + peak_[u * groups_ + g] > m_.limit[g]) d = HUGE_VAL;
      fits |= d < HUGE_VAL;
    }
    if (!fits) return;
    for (int64_t i = 3 * m_.first[u]; i < 3 * m_.first[u + 1]; i += 3) {
      const int64_t v = m_.edges[i + 1], k = m_.edges[i + 2];
      const double step = live + m_.kernel_bytes[2 * k] + m_.kernel_bytes[2 * k + 1];
      reached_[v] = 1;
      for (int64_t g = 0; g < groups_; ++g) {
        const double d = dist_[u * groups_ + g] + m_.time[k * groups_ + g];
        const double p = std::max(peak_[u * groups_ + g], step);
        double& dv = dist_[v * groups_ + g];
        double& pv = peak_[v * groups_ + g];
        if (d < dv || (d == dv && p < pv && d < HUGE_VAL))
          dv = d, pv = p, via_[v * groups_ + g] = i;
      }
    }
  }

  const Model& m_;
  int64_t groups_, begin_ = 0;
  std::vector<double> dist_, peak_;
  std::vector<int64_t> via_;
  std::vector<double> fixed_;
  std::vector<char> reached_;
};

}  // namespace

/*! \brief Fill time_s and memory ([cuts, cuts, groups]; inf where impossible) and moves ([cuts,
 * cuts, 8]: count and bytes received, sent, read from the host and returned to it).
 *  \param arrays states (words), edges (int32 triples from, to, kernel, by `from`), kernel_time_s
 * [kernels, groups], kernel_bytes [kernels, 2] (results still needed outside, workspace),
 * group_memory, tensor_src, tensor_bytes, tensor_output, reader_ptr, reader_ids, weight_bytes,
 * weight_ptr, weight_ids.
 *  \param cuts ids of the states between which stages may be cut, ascending. */
void SegmentTable(int64_t n, const ffi::Array<ffi::Tensor>& arrays, const ffi::TensorView& cuts,
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
        if (sweep.TimeS(cut[c], g) == HUGE_VAL) continue;
        time[at * groups + g] = sweep.TimeS(cut[c], g);
        memory[at * groups + g] = sweep.MemoryBytes(cut[c], g);
      }
    }
  }
}

/*! \brief The kernels behind one entry of the table, in order: those of the stage from state `from`
 * to `to`. */
ffi::Array<int64_t> SegmentKernels(int64_t n, const ffi::Array<ffi::Tensor>& arrays, int64_t from,
                                   int64_t to, int64_t group) {
  const Model m = Unpack(n, arrays);
  Sweep sweep(m);
  sweep.From(from, to);
  if (!sweep.Reached(to) || sweep.TimeS(to, group) == HUGE_VAL) {
    TVM_FFI_THROW(ValueError) << "no stage from state " << from << " to " << to << " fits group "
                              << group;
  }
  const std::vector<int64_t> path = sweep.Kernels(to, group);
  return ffi::Array<int64_t>(path.begin(), path.end());
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def("tvmhet.SegmentTable", SegmentTable)
      .def("tvmhet.SegmentKernels", SegmentKernels);
}
}  // namespace tvmhet
