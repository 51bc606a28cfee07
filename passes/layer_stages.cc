/*! \file passes/layer_stages.cc
 *  \brief Aligned layouts: cut the layers into stages, give each stage nodes whose rates together
 * reach a target.
 *
 *  What a stage needs depends only on its number of layers, not on where it lies. So the layouts
 * that reach the target are sums of options (layers k, nodes of each type): an unbounded knapsack
 * over layers whose labels are the nodes used so far, kept while no other label uses fewer of every
 * type. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

struct Option {
  int64_t layers;
  std::vector<int32_t> nodes;  // per type
};

/*! \brief All smallest node counts with a summed rate of at least `target` for stages of k layers.
 */
void Enumerate(const View<double>& rate, const View<int64_t>& count, int64_t k, int64_t type,
               double missing, std::vector<int32_t>* nodes, std::vector<Option>* out) {
  const int64_t types = count.size(), width = rate.size() / types;
  if (missing <= 0) {
    out->push_back({k, *nodes});
    return;
  }
  if (type == types) return;
  const double r = rate[type * width + k];
  for (int64_t n = 0; n <= count[type]; ++n) {
    (*nodes)[type] = n;
    Enumerate(rate, count, k, type + 1, missing - n * r, nodes, out);
    if (r <= 0 || missing - n * r <= 0) break;
  }
  (*nodes)[type] = 0;
}

struct Label {
  std::vector<int32_t> used;
  int64_t option, before;  // before: label index at layers - option's layers
};

}  // namespace

/*! \brief Find stages that together hold `layers` layers, each with a rate of at least `target`.
 *  \param rate [types, most + 1] tokens/s of one node by layers held (0: cannot); count nodes of
 * each type.
 *  \return per stage: layers, then the number of nodes of each type; empty if there is none (or
 * `max_labels` hid it). */
ffi::Array<int64_t> LayerStages(const ffi::TensorView& rate_in, const ffi::TensorView& count_in,
                                int64_t layers, double target, int64_t max_labels) {
  const View<double> rate(rate_in, "rate");
  const View<int64_t> count(count_in, "count");
  const int64_t types = count.size(), most = rate.size() / types - 1;
  std::vector<Option> options;
  for (int64_t k = std::min(most, layers); k >= 1; --k) {
    std::vector<int32_t> nodes(types, 0);
    Enumerate(rate, count, k, 0, target * (1 - 1e-12), &nodes, &options);
  }
  std::vector<std::vector<Label>> at(layers + 1);
  at[0].push_back({std::vector<int32_t>(types, 0), -1, -1});
  for (int64_t p = 0; p < layers; ++p) {
    std::vector<Label>& here = at[p];
    if (static_cast<int64_t>(here.size()) > max_labels) {
      auto share = [&](const Label& l) {
        double sum = 0.0;
        for (int64_t t = 0; t < types; ++t)
          sum += static_cast<double>(l.used[t]) / std::max<int64_t>(1, count[t]);
        return sum;
      };
      std::stable_sort(here.begin(), here.end(),
                       [&](const Label& a, const Label& b) { return share(a) < share(b); });
      here.resize(max_labels);
    }
    for (int64_t i = 0; i < static_cast<int64_t>(here.size()); ++i) {
      // Stages come in the order of the options, so each set of stages is found once.
      for (int64_t o = std::max<int64_t>(0, here[i].option);
           o < static_cast<int64_t>(options.size()); ++o) {
        const int64_t q = p + options[o].layers;
        if (q > layers) continue;
        Label next{here[i].used, o, i};
        bool fits = true;
        for (int64_t t = 0; t < types && fits; ++t)
          fits = (next.used[t] += options[o].nodes[t]) <= count[t];
        if (!fits) continue;
        const bool worse = std::any_of(at[q].begin(), at[q].end(), [&](const Label& l) {
          for (int64_t t = 0; t < types; ++t) {
            if (l.used[t] > next.used[t]) return false;
          }
          return l.option <= o;
        });
        if (!worse) at[q].push_back(std::move(next));
      }
    }
  }
  std::vector<int64_t> out;
  if (at[layers].empty()) return {};
  for (int64_t p = layers, i = 0; p > 0;) {
    const Label& l = at[p][i];
    out.push_back(options[l.option].layers);
    out.insert(out.end(), options[l.option].nodes.begin(), options[l.option].nodes.end());
    p -= options[l.option].layers;
    i = l.before;
  }
  return ffi::Array<int64_t>(out.begin(), out.end());
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.LayerStages", LayerStages); }
}  // namespace tvmhet
