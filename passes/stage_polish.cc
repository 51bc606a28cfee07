/*! \file passes/stage_polish.cc
 *  \brief Local search on chains of stages with their exact loads.
 *
 *  The Pareto search (stage_search.cc) takes each stage's tensors to come from the stage before and
 * to go to the one after. Here every tensor pays the link it really crosses, once per (producer
 * stage, reader stage), see chain_value.h. Moves: shift a cut, give a stage to another group, swap
 * the groups of two stages, join two stages, split one. A move is taken when the largest load
 * falls, or stays while the loads as a whole fall. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>

#include "chain_value.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

class Polisher {
 public:
  Polisher(const StageTable& t, ChainValue* value) : t_(t), value_(*value) {}

  /*! \brief Improve `chain` until no move helps or `max_steps` is spent. */
  void Run(Chain* chain, int64_t max_steps, int64_t reach) {
    max_steps_ = value_.steps + max_steps;
    best_ = value_.Of(*chain, HUGE_VAL);
    for (bool moved = true; moved && value_.steps < max_steps_;) {
      moved = Shift(chain, reach);
      moved |= Regroup(chain);
      moved |= Join(chain);
      moved |= Split(chain, reach);
    }
  }
  double Largest() const { return best_.largest; }

 private:
  bool Try(Chain* chain, const Chain& other) {
    if (value_.steps >= max_steps_) return false;
    const Worth w = value_.Of(other, best_.largest);
    if (!w.Beats(best_)) return false;
    best_ = w, *chain = other;
    return true;
  }

  bool Shift(Chain* chain, int64_t reach) {
    bool moved = false;
    for (size_t i = 1; i + 1 < chain->cut.size(); ++i) {
      const int64_t low = std::max(chain->cut[i - 1] + 1, chain->cut[i] - reach),
                    high = std::min(chain->cut[i + 1] - 1, chain->cut[i] + reach);
      for (int64_t c = low; c <= high; ++c) {
        Chain other = *chain;
        other.cut[i] = c;
        moved |= Try(chain, other);
      }
    }
    return moved;
  }

  bool Regroup(Chain* chain) {
    bool moved = false;
    for (size_t i = 0; i < chain->group.size(); ++i) {
      for (int64_t g = 0; g < t_.groups; ++g) {
        Chain other = *chain;
        other.group[i] = g;
        moved |= Try(chain, other);
      }
      for (size_t j = i + 1; j < chain->group.size(); ++j) {
        Chain other = *chain;
        std::swap(other.group[i], other.group[j]);
        moved |= Try(chain, other);
      }
    }
    return moved;
  }

  bool Join(Chain* chain) {
    bool moved = false;
    for (size_t i = 0; i + 1 < chain->group.size(); ++i) {
      for (const size_t keep : {i, i + 1}) {
        if (i + 1 >= chain->group.size()) break;
        Chain other = *chain;
        other.group[i] = chain->group[keep];
        other.group.erase(other.group.begin() + i + 1);
        other.cut.erase(other.cut.begin() + i + 1);
        moved |= Try(chain, other);
      }
    }
    return moved;
  }

  /*! \brief Split a stage at one of about `reach` cuts spread over it, and give either part to
   * another group. */
  bool Split(Chain* chain, int64_t reach) {
    bool moved = false;
    for (size_t i = 0; i < chain->group.size(); ++i) {
      const int64_t begin = chain->cut[i], end = chain->cut[i + 1],
                    step = std::max<int64_t>(1, (end - begin) / reach);
      for (int64_t c = begin + 1; c < end && i < chain->group.size(); c += step) {
        for (int64_t g = 0; g < 2 * t_.groups; ++g) {
          if (c <= chain->cut[i] || c >= chain->cut[i + 1]) break;
          Chain other = *chain;
          other.cut.insert(other.cut.begin() + i + 1, c);
          other.group.insert(other.group.begin() + i + g % 2, g / 2);
          moved |= Try(chain, other);
        }
      }
    }
    return moved;
  }

  const StageTable& t_;
  ChainValue& value_;
  Worth best_;
  int64_t max_steps_ = 0;
};

}  // namespace

/*! \brief Improve chains of stages by local search; throughput only.
 *  \param arrays the 10 of StageTable, then: words of the cuts, tensor source, bytes, is_output,
 * reader (ptr, ids), and, where stages may share devices, bytes of a stage [cuts, cuts, groups] and
 * of a device of each group.
 *  \param starts flat lists of from cut, to cut, group, replicas. \param reach how far a cut moves
 * at once.
 *  \return (the best chain as a flat list of from cut, to cut, group, replicas, first stage on the
 * same devices or -1; empty if no start is legal; its largest load; steps). */
ffi::Array<ffi::Any> StagePolish(int64_t nodes, const ffi::Array<ffi::Tensor>& arrays, bool overlap,
                                 const ffi::Array<ffi::Array<int64_t>>& starts, int64_t reach,
                                 int64_t max_steps) {
  if (arrays.size() != 16 && arrays.size() != 18)
    TVM_FFI_THROW(ValueError) << "StagePolish needs 16 or 18 arrays, got " << arrays.size();
  const StageTable t(ffi::Array<ffi::Tensor>(arrays.begin(), arrays.begin() + 10), overlap);
  const Model model{nodes,
                    View<uint64_t>(arrays[10], "words"),
                    View<int32_t>(arrays[11], "src"),
                    View<double>(arrays[12], "bytes"),
                    View<uint8_t>(arrays[13], "is_output"),
                    Lists(arrays[14], arrays[15], "readers")};
  const bool share = arrays.size() == 18;
  const View<double> memory(arrays[share ? 16 : 0], "memory"), room(arrays[share ? 17 : 0], "room");
  ChainValue worth(t, model, share ? &memory : nullptr, share ? &room : nullptr);
  std::vector<int64_t> best;
  double value = HUGE_VAL;
  for (const ffi::Array<int64_t>& start : starts) {
    Chain chain{{0}, {}};
    for (size_t i = 0; i + 3 < start.size(); i += 4) {
      chain.cut.push_back(start[i + 1]), chain.group.push_back(start[i + 2]);
    }
    Polisher polisher(t, &worth);
    polisher.Run(&chain, max_steps, reach);
    if (polisher.Largest() < value * (1 - 1e-12))
      value = polisher.Largest(), best = worth.Flat(chain);
  }
  return {ffi::Array<int64_t>(best.begin(), best.end()), value, worth.steps};
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.StagePolish", StagePolish); }
}  // namespace tvmhet
