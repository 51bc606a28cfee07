/*! \file passes/stage_polish.cc
 *  \brief Local search on chains of stages with their exact loads.
 *
 *  The Pareto search (stage_search.cc) takes each stage's tensors to come from the stage before and
 * to go to the one after. Here every tensor pays the link it really crosses, once per (producer
 * stage, reader stage). Moves: shift a cut, give a stage to another group, swap the groups of two
 * stages, join two stages, split one. Devices of a group are dealt to its stages one by one, always
 * to the one with the largest load. A move is taken when the largest load falls, or stays while the
 * loads as a whole fall. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "stage_table.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

struct Chain {
  std::vector<int64_t> cut, group;  // stage i runs from cut[i] to cut[i + 1] on group[i]
};

struct Worth {
  double largest = HUGE_VAL,
         spread = HUGE_VAL;  // seconds; sum of (load / largest)^8 weighted by the largest
  bool Beats(const Worth& o) const {
    if (largest == HUGE_VAL) return false;
    if (largest < o.largest * (1 - 1e-12)) return true;
    return largest <= o.largest * (1 + 1e-12) && spread < o.spread * (1 - 1e-9);
  }
};

class Polisher {
 public:
  Polisher(const StageTable& t, int64_t nodes, const View<uint64_t>& words,
           const View<int32_t>& src, const View<double>& bytes, const View<uint8_t>& is_output,
           const Lists& readers)
      : t_(t),
        nodes_(nodes),
        words_((nodes + 63) / 64),
        sets_(words),
        src_(src),
        bytes_(bytes),
        is_output_(is_output),
        readers_(readers),
        stage_of_(nodes) {}

  /*! \brief Improve `chain` until no move helps or `max_steps` is spent. */
  void Run(Chain* chain, int64_t max_steps, int64_t reach) {
    max_steps_ = max_steps, best_ = Worth();
    best_ = Value(*chain);
    for (bool moved = true; moved && steps < max_steps_;) {
      moved = Shift(chain, reach);
      moved |= Regroup(chain);
      moved |= Join(chain);
      moved |= Split(chain, reach);
    }
  }
  double Largest() const { return best_.largest; }

  /*! \brief (from cut, to cut, group, replicas) of each stage, with the fewest devices that keep
   * the largest load. */
  std::vector<int64_t> Flat(const Chain& chain) {
    max_steps_ = std::numeric_limits<int64_t>::max();  // what is left to do is one evaluation
    best_ = Worth();
    const double largest = Value(chain).largest;
    std::vector<int64_t> out;
    for (size_t i = 0; i < chain.group.size(); ++i) {
      const double need = std::ceil(load_[i] / largest * (1 - 1e-12));
      const int64_t replicas = std::min<int64_t>(replicas_[i], std::max(1.0, need));
      const int64_t four[4] = {chain.cut[i], chain.cut[i + 1], chain.group[i], replicas};
      out.insert(out.end(), four, four + 4);
    }
    return out;
  }
  int64_t steps = 0;

 private:
  bool Try(Chain* chain, const Chain& other) {
    const Worth w = Value(other);
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

  Worth Value(const Chain& chain) {
    ++steps;
    const int64_t m = chain.group.size();
    load_.assign(m, 0.0);
    for (int64_t i = 0; i < m; ++i) {
      if (chain.cut[i] >= chain.cut[i + 1] ||
          !t_.Possible(chain.cut[i], chain.cut[i + 1], chain.group[i]))
        return {};
      load_[i] =
          t_.time[(chain.cut[i] * t_.num_cuts + chain.cut[i + 1]) * t_.groups + chain.group[i]] +
          t_.overhead[chain.group[i]];
    }
    if (!Deal(chain) || Bottleneck() > best_.largest * (1 + 1e-12)) return {};
    if (steps > max_steps_) return {};
    Transfers(chain);
    Deal(chain);
    Worth w{Bottleneck(), 0.0};
    for (int64_t i = 0; i < m; ++i) w.spread += std::pow(load_[i] / replicas_[i] / w.largest, 8);
    w.spread *= w.largest;
    return w;
  }

  double Bottleneck() const {
    double largest = 0.0;
    for (size_t i = 0; i < load_.size(); ++i) largest = std::max(largest, load_[i] / replicas_[i]);
    return largest;
  }

  /*! \brief One device for each stage, then each further device of a group to its busiest stage. */
  bool Deal(const Chain& chain) {
    const int64_t m = chain.group.size();
    replicas_.assign(m, 1);
    for (int64_t g = 0; g < t_.groups; ++g) {
      int64_t free = t_.count[g];
      std::vector<int64_t> mine;
      for (int64_t i = 0; i < m; ++i) {
        if (chain.group[i] == g) mine.push_back(i);
      }
      free -= mine.size();
      if (free < 0) return false;
      if (mine.size() == 1) replicas_[mine[0]] += free;
      for (; mine.size() > 1 && free > 0; --free) {
        ++replicas_[*std::max_element(mine.begin(), mine.end(), [&](int64_t a, int64_t b) {
          return load_[a] * replicas_[b] < load_[b] * replicas_[a];
        })];
      }
    }
    return true;
  }

  bool Holds(int64_t cut, int64_t v) const {
    return sets_[cut * words_ + (v >> 6)] >> (v & 63) & 1;
  }

  /*! \brief Add to load_ what each stage receives and sends. */
  void Transfers(const Chain& chain) {
    const int64_t m = chain.group.size();
    for (int64_t v = 0; v < nodes_; ++v) {
      int64_t low = 0, high = m - 1;  // the first stage whose end holds v
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        Holds(chain.cut[middle + 1], v) ? high = middle : low = middle + 1;
      }
      stage_of_[v] = low;
    }
    steps += nodes_ / 64;
    std::vector<double> receive(m, 0.0), send(m, 0.0);
    std::vector<int64_t> to;
    for (int64_t e = 0; e < src_.size(); ++e) {
      to.clear();
      const int64_t a = src_[e] < 0 ? -1 : stage_of_[src_[e]];
      for (const int32_t* r = readers_.begin(e); r != readers_.end(e); ++r) {
        const int64_t b = stage_of_[*r];
        if (b == a || std::find(to.begin(), to.end(), b) != to.end()) continue;
        to.push_back(b);
        const int64_t h = chain.group[b];
        if (a < 0) {
          receive[b] += t_.host_latency[h] + bytes_[e] * t_.host_per_byte[h];
        } else {
          const int64_t link = chain.group[a] * t_.groups + h;
          const double s = t_.latency[link] + bytes_[e] * t_.per_byte[link];
          receive[b] += s, send[a] += s;
        }
      }
      if (a >= 0 && is_output_[e]) {
        const int64_t g = chain.group[a];
        send[a] += t_.host_latency[g] + bytes_[e] * t_.host_per_byte[g];
      }
    }
    for (int64_t i = 0; i < m; ++i) load_[i] = t_.Sum(load_[i], receive[i], send[i]);
  }

  const StageTable& t_;
  int64_t nodes_, words_;
  View<uint64_t> sets_;
  View<int32_t> src_;
  View<double> bytes_;
  View<uint8_t> is_output_;
  Lists readers_;
  std::vector<int64_t> stage_of_, replicas_;
  std::vector<double> load_;
  Worth best_;
  int64_t max_steps_ = 0;
};

}  // namespace

/*! \brief Improve chains of stages by local search; throughput only.
 *  \param arrays those of StageTable, then: words of the cuts, tensor source, bytes, is_output,
 * reader (ptr, ids).
 *  \param starts flat lists of from cut, to cut, group, replicas. \param reach how far a cut moves
 * at once.
 *  \return (the best chain as such a list, empty if no start is legal; its largest load; steps). */
ffi::Array<ffi::Any> StagePolish(int64_t nodes, const ffi::Array<ffi::Tensor>& arrays, bool overlap,
                                 const ffi::Array<ffi::Array<int64_t>>& starts, int64_t reach,
                                 int64_t max_steps) {
  if (arrays.size() != 14)
    TVM_FFI_THROW(ValueError) << "StagePolish needs 14 arrays, got " << arrays.size();
  const StageTable t(ffi::Array<ffi::Tensor>(arrays.begin(), arrays.begin() + 8), overlap);
  const View<uint64_t> words(arrays[8], "words");
  const View<int32_t> src(arrays[9], "src");
  const View<double> bytes(arrays[10], "bytes");
  const View<uint8_t> is_output(arrays[11], "is_output");
  const Lists readers(arrays[12], arrays[13], "readers");
  std::vector<int64_t> best;
  double value = HUGE_VAL;
  int64_t steps = 0;
  for (const ffi::Array<int64_t>& start : starts) {
    Chain chain{{0}, {}};
    for (size_t i = 0; i + 3 < start.size(); i += 4) {
      chain.cut.push_back(start[i + 1]), chain.group.push_back(start[i + 2]);
    }
    Polisher polisher(t, nodes, words, src, bytes, is_output, readers);
    polisher.Run(&chain, max_steps, reach);
    steps += polisher.steps;
    if (polisher.Largest() < value * (1 - 1e-12))
      value = polisher.Largest(), best = polisher.Flat(chain);
  }
  return {ffi::Array<int64_t>(best.begin(), best.end()), value, steps};
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.StagePolish", StagePolish); }
}  // namespace tvmhet
