/*! \file passes/stage_floor.cc
 *  \brief What a stage of any plan costs at least, whatever downsets the plan cuts at.
 *
 *      order   1 2 3 4 5 6 7 8        Downset D lacks node 4 first: it holds 1..3, and beyond them
 * at most nodes D       x x x . x . . .        that do not need 4. A stage that starts at D and
 * ends at D', which lacks 8 D'      x x x x x x x .        first, runs at least those of 4..7 that
 * need 4.
 *
 *  So a downset is known by the first node it lacks, and these nodes, in a fixed topological order,
 * number the cuts. From "lacks j" to "lacks k", a stage surely runs each node of j..k-1 that is j
 * or needs j; surely receives what such a node reads from before j; surely sends what such a node
 * made and k, or a node that needs k, reads. Nodes are weighted so that no kernel takes less than
 * its nodes' weights. Cuts may be blocks of first missing nodes: then each entry is the least over
 * its block. Any plan is a chain over these entries that is no slower. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

struct Model {
  Lists preds, readers, weight_readers;
  View<double> floor_s, limit, bytes,
      weight;  // floor_s [nodes, groups]; limit: memory of each group
  View<int32_t> src;
  View<uint8_t> is_output;
  int64_t nodes, groups;
};

class Floor {
 public:
  Floor(const Model& m, const View<int32_t>& first, const View<double>& time,
        const View<double>& moves)
      : m_(m),
        first_(first),
        cuts_(first.size()),
        time_(time),
        moves_(moves),
        reads_(m.nodes),
        makes_(m.nodes),
        weighs_(m.nodes),
        block_(m.nodes) {
    for (int64_t v = 0; v < m.nodes; ++v) {
      needs_.emplace_back((m.nodes + 63) / 64);
      needs_[v].Add(v);
      for (const int32_t* p = m.preds.begin(v); p != m.preds.end(v); ++p)
        needs_[v].Join(needs_[*p]);
    }
    for (int64_t e = 0; e < m.src.size(); ++e) {
      if (m.src[e] >= 0) makes_[m.src[e]].push_back(e);
      for (const int32_t* r = m.readers.begin(e); r != m.readers.end(e); ++r)
        reads_[*r].push_back(e);
    }
    for (int64_t w = 0; w < m.weight.size(); ++w) {
      for (const int32_t* r = m.weight_readers.begin(w); r != m.weight_readers.end(w); ++r)
        weighs_[*r].push_back(w);
    }
    for (int64_t k = 0; k + 1 < cuts_; ++k)
      std::fill(block_.begin() + first[k], block_.begin() + first[k + 1], k);
    std::fill(time.data(), time.data() + time.size(), HUGE_VAL);
    std::fill(moves.data(), moves.data() + moves.size(), HUGE_VAL);
  }

  void Fill() {
    std::vector<int64_t> seen_tensor(m_.src.size(), -1), seen_weight(m_.weight.size(), -1);
    for (int64_t j = 0; j < m_.nodes; ++j) From(j, &seen_tensor, &seen_weight);
    for (int64_t k = 1; k < m_.nodes; ++k) Sends(k);
    for (int64_t b = 0; b + 1 < cuts_; ++b) Least(b, cuts_ - 1, 2, 0.0, 0.0);
  }

 private:
  /*! \brief All that grows with the end of a stage that starts where j is the first missing node.
   */
  void From(int64_t j, std::vector<int64_t>* seen_tensor, std::vector<int64_t>* seen_weight) {
    std::vector<double> busy(m_.groups, 0.0);
    double weights = 0.0, receives[2] = {0, 0}, host_in[2] = {0, 0}, host_out[2] = {0, 0};
    int64_t next = block_[j] + 1;
    for (int64_t v = j; v < m_.nodes; ++v) {
      if (needs_[v].Has(j)) {
        for (int64_t g = 0; g < m_.groups; ++g) busy[g] += m_.floor_s[v * m_.groups + g];
        for (int64_t w : weighs_[v]) {
          if ((*seen_weight)[w] != j) (*seen_weight)[w] = j, weights += m_.weight[w];
        }
        for (int64_t e : reads_[v]) {
          if (m_.src[e] >= j || (*seen_tensor)[e] == j) continue;
          (*seen_tensor)[e] = j;
          double* to = m_.src[e] < 0 ? host_in : receives;
          to[0] += 1, to[1] += m_.bytes[e];
        }
        for (int64_t e : makes_[v]) {
          if (m_.is_output[e]) host_out[0] += 1, host_out[1] += m_.bytes[e];
        }
      }
      if (v + 1 != first_[next]) continue;
      const int64_t at = block_[j] * cuts_ + next;
      for (int64_t g = 0; g < m_.groups; ++g) {
        if (weights <= m_.limit[g])
          time_[at * m_.groups + g] = std::min(time_[at * m_.groups + g], busy[g]);
      }
      Least(block_[j], next, 0, receives[0], receives[1]);
      Least(block_[j], next, 4, host_in[0], host_in[1]);
      Least(block_[j], next, 6, host_out[0], host_out[1]);
      ++next;
    }
  }

  /*! \brief What stages that end where k is the first missing node surely send. */
  void Sends(int64_t k) {
    std::vector<int64_t> sent;
    for (int64_t e = 0; e < m_.src.size(); ++e) {
      if (m_.src[e] < 0 || m_.src[e] >= k) continue;
      const bool later = std::any_of(m_.readers.begin(e), m_.readers.end(e),
                                     [&](int32_t r) { return r >= k && needs_[r].Has(k); });
      if (later) sent.push_back(e);
    }
    for (int64_t j = 0; j < first_[block_[k]]; ++j) {
      double count = 0, bytes = 0;
      for (int64_t e : sent) {
        if (m_.src[e] >= j && needs_[m_.src[e]].Has(j)) count += 1, bytes += m_.bytes[e];
      }
      Least(block_[j], block_[k], 2, count, bytes);
    }
  }

  void Least(int64_t b, int64_t c, int64_t column, double count, double bytes) {
    double* m = moves_.data() + 8 * (b * cuts_ + c) + column;
    m[0] = std::min(m[0], count), m[1] = std::min(m[1], bytes);
  }

  const Model& m_;
  View<int32_t> first_;
  int64_t cuts_;
  View<double> time_, moves_;
  std::vector<std::vector<int64_t>> reads_, makes_, weighs_;
  std::vector<int64_t> block_;  // of each first missing node
  std::vector<Bits> needs_;     // a node's ancestors and itself
};

}  // namespace

/*! \brief Fill time_s [cuts, cuts, groups] (inf where the weights that it surely reads exceed the
 * memory) and moves [cuts, cuts, 8] as in passes/segment_table.cc, from below.
 *  \param arrays pred_ptr, pred_ids, floor_s [nodes, groups], memory [groups], tensor_src,
 * tensor_bytes, tensor_output, reader_ptr, reader_ids, weight_bytes, weight_ptr, weight_ids; nodes
 * are numbered in a topological order.
 *  \param first the first missing node of each cut, or the first of its block, ascending from 0 to
 * the number of nodes, which stands for the end. */
void StageFloor(const ffi::Array<ffi::Tensor>& a, const ffi::TensorView& first,
                const ffi::TensorView& time_out, const ffi::TensorView& moves_out) {
  if (a.size() != 12) TVM_FFI_THROW(ValueError) << "StageFloor needs 12 arrays, got " << a.size();
  const Lists preds(a[0], a[1], "preds");
  const View<double> limit(a[3], "memory");
  const Model m{preds,
                Lists(a[7], a[8], "readers"),
                Lists(a[10], a[11], "weights"),
                View<double>(a[2], "floor_s"),
                limit,
                View<double>(a[5], "tensor_bytes"),
                View<double>(a[9], "weight_bytes"),
                View<int32_t>(a[4], "tensor_src"),
                View<uint8_t>(a[6], "tensor_output"),
                preds.size(),
                limit.size()};
  Floor(m, View<int32_t>(first, "first"), View<double>(time_out, "time_out"),
        View<double>(moves_out, "moves_out"))
      .Fill();
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.StageFloor", StageFloor); }
}  // namespace tvmhet
