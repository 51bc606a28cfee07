/*! \file passes/segment_model.h
 *  \brief Tensors, weights and kernels of a model as seen from its states, for segment_table.cc. */
#ifndef TVMHET_PASSES_SEGMENT_MODEL_H_
#define TVMHET_PASSES_SEGMENT_MODEL_H_

#include <algorithm>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;

/*! \brief Tensors and weights of the model, and where each stands in each state. */
struct Flow {
  Flow(int64_t n, const View<uint64_t>& states, const Lists& readers, const View<int32_t>& src,
       const View<double>& size, const View<uint8_t>& is_output, const Lists& weight_readers,
       const View<double>& weight, const View<uint8_t>& is_whole)
      : words((n + 63) / 64),
        num_states(states.size() / words),
        src(src),
        size(size),
        is_output(is_output),
        weight(weight),
        is_whole(is_whole),
        made(num_states),
        weight_single(2 * num_states, 0.0),
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
          if (state.Has(*weight_readers.begin(w))) weight_single[2 * s + is_whole[w]] += weight[w];
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
  /*! \brief Bytes of the weights that the segment s..t reads: those that the devices of a team
   * share, or those that each of them holds. */
  double WeightBytes(int64_t s, int64_t t, bool whole) const {
    double bytes = weight_single[2 * t + whole] - weight_single[2 * s + whole];
    for (size_t k = 0; k < shared.size(); ++k) {
      if (is_whole[shared[k]] == whole &&
          shared_count[t * shared.size() + k] > shared_count[s * shared.size() + k])
        bytes += weight[shared[k]];
    }
    return bytes;
  }

  int64_t words, num_states;
  View<int32_t> src;
  View<double> size;
  View<uint8_t> is_output;
  View<double> weight;
  View<uint8_t> is_whole;
  std::vector<std::vector<int64_t>>
      made;  // per state: tensors that exist and are still needed, or are outputs
  std::vector<double> weight_single;  // [states, 2]: shared by a team's devices, held by each
  int64_t num_tensors;
  std::vector<int32_t> read_count, shared_count, num_readers;
  std::vector<int64_t> shared;
};

/*! \brief Counts and bytes a stage moves, in the order the table documents. */
struct Moves {
  double receive_count = 0, receive_bytes = 0, send_count = 0, send_bytes = 0;
  double host_in_count = 0, host_in_bytes = 0, host_out_count = 0, host_out_bytes = 0;
};

inline Moves MovesOf(const Flow& f, const Bits& begin, int64_t s, int64_t t) {
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
  View<double> time, kernel_bytes, limit,
      weight_share;  // of the weights that one device of a group holds: 1, less where it is split
  std::vector<int64_t> first;  // first[s]: index of the first edge that leaves state s

  int64_t num_groups() const { return limit.size(); }
  Bits StateBits(int64_t s) const { return Bits(words.data() + s * flow.words, flow.words); }
};

inline Model Unpack(int64_t n, const ffi::Array<ffi::Tensor>& a) {
  if (a.size() != 15) TVM_FFI_THROW(ValueError) << "SegmentTable needs 15 arrays, got " << a.size();
  const View<uint64_t> words(a[0], "states");
  Model m{Flow(n, words, Lists(a[8], a[9], "readers"), View<int32_t>(a[5], "tensor_src"),
               View<double>(a[6], "tensor_bytes"), View<uint8_t>(a[7], "tensor_output"),
               Lists(a[11], a[12], "weights"), View<double>(a[10], "weight_bytes"),
               View<uint8_t>(a[14], "weight_whole")),
          words,
          View<int32_t>(a[1], "edges"),
          View<double>(a[2], "kernel_time_s"),
          View<double>(a[3], "kernel_bytes"),
          View<double>(a[4], "group_memory"),
          View<double>(a[13], "weight_share"),
          {}};
  m.first.assign(m.flow.num_states + 1, 0);
  for (int64_t i = 0; i < m.edges.size(); i += 3) ++m.first[m.edges[i] + 1];
  for (int64_t s = 0; s < m.flow.num_states; ++s) m.first[s + 1] += m.first[s];
  return m;
}

}  // namespace tvmhet
#endif  // TVMHET_PASSES_SEGMENT_MODEL_H_
