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
  double waste;
};

/*! \brief What is known of the nodes when every stage must reach `target`.
 *
 *  A node is worth the most layer-tokens/s that it can give, max over k of k * min(rate(k),
 * target). A stage of k layers wastes the worth of its nodes beyond k * target; all stages and idle
 * nodes together waste what the nodes are worth beyond layers * target, the slack, and no more. */
struct Nodes {
  View<double> rate;
  View<int64_t> count;
  int64_t types, width;
  double target, slack;
  std::vector<double> worth;

  Nodes(const View<double>& rate, const View<int64_t>& count, int64_t layers, double target)
      : rate(rate),
        count(count),
        types(count.size()),
        width(rate.size() / types),
        target(target),
        slack(-layers * target),
        worth(types, 0.0) {
    for (int64_t t = 0; t < types; ++t) {
      for (int64_t k = 1; k < std::min(width, layers + 1); ++k)
        worth[t] = std::max(worth[t], k * std::min(rate[t * width + k], target));
      slack += count[t] * worth[t];
    }
    slack += 1e-9 * layers * target;
  }
};

/*! \brief The smallest node counts with a summed rate of at least the target for stages of k
 * layers, as far as their waste is within the slack. */
void Enumerate(const Nodes& of, int64_t k, int64_t type, double missing, double waste,
               std::vector<int32_t>* nodes, std::vector<Option>* out) {
  if (waste > of.slack) return;
  if (missing <= 0) {
    out->push_back({k, *nodes, waste});
    return;
  }
  if (type == of.types) return;
  const double r = of.rate[type * of.width + k];
  for (int64_t n = 0; n <= of.count[type]; ++n) {
    (*nodes)[type] = n;
    Enumerate(of, k, type + 1, missing - n * r, waste + n * of.worth[type], nodes, out);
    if (r <= 0 || missing - n * r <= 0) break;
  }
  (*nodes)[type] = 0;
}

struct Label {
  std::vector<int32_t> used;
  int64_t option, before;  // before: label index at layers - option's layers
  double waste;
};

/*! \brief Keep the `most` of least waste. */
template <typename T>
void KeepLeastWaste(std::vector<T>* all, int64_t most) {
  if (static_cast<int64_t>(all->size()) <= most) return;
  std::stable_sort(all->begin(), all->end(),
                   [](const T& a, const T& b) { return a.waste < b.waste; });
  all->resize(most);
}

}  // namespace

/*! \brief Find stages that together hold `layers` layers, each with a rate of at least `target`.
 *  \param rate [types, most + 1] tokens/s of one node by layers held (0: cannot); count nodes of
 * each type.
 *  \return per stage: layers, then the number of nodes of each type; empty if there is none (or
 * `max_labels` hid it). */
ffi::Array<int64_t> LayerStages(const ffi::TensorView& rate_in, const ffi::TensorView& count_in,
                                int64_t layers, double target, int64_t max_labels) {
  const View<int64_t> count(count_in, "count");
  const Nodes nodes(View<double>(rate_in, "rate"), count, layers, target);
  const int64_t types = nodes.types;
  std::vector<Option> options;
  for (int64_t k = std::min(nodes.width - 1, layers); k >= 1; --k) {
    std::vector<int32_t> held(types, 0);
    std::vector<Option> of_k;
    Enumerate(nodes, k, 0, target * (1 - 1e-12), -k * target, &held, &of_k);
    KeepLeastWaste(&of_k, 2 * max_labels);
    options.insert(options.end(), of_k.begin(), of_k.end());
  }
  std::vector<std::vector<Label>> at(layers + 1);
  at[0].push_back({std::vector<int32_t>(types, 0), -1, -1, 0.0});
  for (int64_t p = 0; p < layers; ++p) {
    std::vector<Label>& here = at[p];
    KeepLeastWaste(&here, max_labels);
    for (int64_t i = 0; i < static_cast<int64_t>(here.size()); ++i) {
      // Stages come in the order of the options, so each set of stages is found once.
      for (int64_t o = std::max<int64_t>(0, here[i].option);
           o < static_cast<int64_t>(options.size()); ++o) {
        const int64_t q = p + options[o].layers;
        Label next{{}, o, i, here[i].waste + options[o].waste};
        if (q > layers || next.waste > nodes.slack) continue;
        next.used = here[i].used;
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
