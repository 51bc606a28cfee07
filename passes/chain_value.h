/*! \file passes/chain_value.h
 *  \brief What a chain of stages takes: every tensor over the link it really crosses, once per
 * (producer stage, reader stage), and over the wires that the link is part of.
 *
 *  Devices of a pool are dealt to its stages one by one (to teams by as many as they take), always
 * to the one with the largest load. Where stages may share devices and all stages of a group fit on
 * one together, all that the group gets run all of them: their loads add up, which is never worse
 * than dealing, and what passes between them stays. */
#ifndef TVMHET_PASSES_CHAIN_VALUE_H_
#define TVMHET_PASSES_CHAIN_VALUE_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "stage_table.h"

namespace tvmhet {

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

/*! \brief The tensors of a model and the nodes before each cut. */
struct Model {
  int64_t nodes;
  View<uint64_t> sets;  // [cuts, words]
  View<int32_t> src;
  View<double> bytes;
  View<uint8_t> is_output;
  Lists readers;
};

class ChainValue {
 public:
  /*! \param memory bytes of a stage [cuts, cuts, groups], \param room bytes of a device of each
   * group: where given, stages may share devices. */
  ChainValue(const StageTable& t, const Model& m, const View<double>* memory,
             const View<double>* room)
      : t_(t),
        m_(m),
        memory_(memory),
        room_(room),
        words_((m.nodes + 63) / 64),
        stage_of_(m.nodes),
        shared_(t.groups, false),
        first_(t.groups, -1) {}

  /*! \brief The worth of `chain`, none if it is impossible or its largest load is surely above
   * `limit`. */
  Worth Of(const Chain& chain, double limit) {
    ++steps;
    const size_t m = chain.group.size();
    busy_.assign(m, 0.0), receive_.assign(m, 0.0), send_.assign(m, 0.0);
    wire_.assign(t_.NumWires(), 0.0);
    for (size_t i = 0; i < m; ++i) {
      if (chain.cut[i] >= chain.cut[i + 1] ||
          !t_.Possible(chain.cut[i], chain.cut[i + 1], chain.group[i]))
        return {};
      busy_[i] = t_.time[At(chain, i)] + t_.overhead[chain.group[i]];
    }
    Share(chain);
    if (!Deal(chain)) return {};
    Loads(chain);
    if (Largest() > limit * (1 + 1e-12)) return {};
    Transfers(chain);
    Deal(chain);
    Loads(chain);
    Worth w{Largest(), 0.0};
    for (double load : loads_) w.spread += std::pow(load / w.largest, 8);
    w.spread *= w.largest;
    return w;
  }

  /*! \brief (from cut, to cut, group, replicas, first stage on the same devices or -1) of each
   * stage, with the fewest devices that keep the largest load. */
  std::vector<int64_t> Flat(const Chain& chain) {
    const double largest = Of(chain, HUGE_VAL).largest;
    std::vector<int64_t> out;
    for (size_t i = 0; i < chain.group.size(); ++i) {
      const int64_t g = chain.group[i];
      const double load =
          shared_[g] ? SharedLoad(chain, g) : t_.Sum(busy_[i], receive_[i], send_[i]);
      const double need = std::ceil(load / largest * (1 - 1e-12));
      const int64_t replicas = std::min<int64_t>(replicas_[i], std::max(1.0, need));
      const int64_t first = shared_[g] && first_[g] != static_cast<int64_t>(i) ? first_[g] : -1;
      const int64_t five[5] = {chain.cut[i], chain.cut[i + 1], g, replicas, first};
      out.insert(out.end(), five, five + 5);
    }
    return out;
  }

  int64_t steps = 0;

 private:
  int64_t At(const Chain& chain, size_t i) const {
    return (chain.cut[i] * t_.num_cuts + chain.cut[i + 1]) * t_.groups + chain.group[i];
  }

  /*! \brief Which groups run all their stages on the same devices: several that fit together. */
  void Share(const Chain& chain) {
    std::fill(shared_.begin(), shared_.end(), false);
    if (!memory_) return;
    for (size_t i = chain.group.size(); i-- > 0;) first_[chain.group[i]] = i;
    for (int64_t g = 0; g < t_.groups; ++g) {
      double need = 0.0;
      int64_t stages = 0;
      for (size_t i = 0; i < chain.group.size(); ++i) {
        if (chain.group[i] == g) need += (*memory_)[At(chain, i)], ++stages;
      }
      shared_[g] = stages > 1 && need <= (*room_)[g];
    }
  }

  /*! \brief One device (or team) for each stage, then each further one of a pool to its busiest
   * stage, as long as there are enough. */
  bool Deal(const Chain& chain) {
    const int64_t m = chain.group.size();
    const Devices& d = t_.devices;
    replicas_.assign(m, 1);
    std::vector<double> load(m);
    for (int64_t i = 0; i < m; ++i) {
      const int64_t g = chain.group[i];
      load[i] = shared_[g] ? SharedLoad(chain, g) : t_.Sum(busy_[i], receive_[i], send_[i]);
    }
    for (int64_t p = 0; p < t_.groups; ++p) {
      int64_t free = d.room[p];
      std::vector<int64_t> mine;
      for (int64_t i = 0; i < m; ++i) {
        const int64_t g = chain.group[i];
        if (d.pool[g] != p || (shared_[g] && first_[g] != i)) continue;
        mine.push_back(i), free -= d.width[g];
      }
      if (mine.empty()) continue;
      if (free < 0) return false;
      if (mine.size() == 1) replicas_[mine[0]] += free / d.width[chain.group[mine[0]]];
      while (mine.size() > 1 && free > 0) {
        const int64_t i = *std::max_element(mine.begin(), mine.end(), [&](int64_t a, int64_t b) {
          return load[a] * replicas_[b] < load[b] * replicas_[a];
        });
        free -= d.width[chain.group[i]];
        if (free >= 0) ++replicas_[i];
      }
    }
    for (int64_t i = 0; i < m; ++i) {
      if (shared_[chain.group[i]]) replicas_[i] = replicas_[first_[chain.group[i]]];
    }
    return true;
  }

  double SharedLoad(const Chain& chain, int64_t g) const {
    double busy = 0.0, receive = 0.0, send = 0.0;
    for (size_t i = 0; i < chain.group.size(); ++i) {
      if (chain.group[i] == g) busy += busy_[i], receive += receive_[i], send += send_[i];
    }
    return t_.Sum(busy, receive, send);
  }

  /*! \brief Fill loads_: one for each stage on devices of its own, each shared group, each wire. */
  void Loads(const Chain& chain) {
    loads_ = wire_;
    for (size_t i = 0; i < chain.group.size(); ++i) {
      if (!shared_[chain.group[i]])
        loads_.push_back(t_.Sum(busy_[i], receive_[i], send_[i]) / replicas_[i]);
    }
    for (int64_t g = 0; g < t_.groups; ++g) {
      if (shared_[g]) loads_.push_back(SharedLoad(chain, g) / replicas_[first_[g]]);
    }
  }

  double Largest() const { return *std::max_element(loads_.begin(), loads_.end()); }

  bool Holds(int64_t cut, int64_t v) const {
    return m_.sets[cut * words_ + (v >> 6)] >> (v & 63) & 1;
  }

  void Transfers(const Chain& chain) {
    const int64_t m = chain.group.size();
    for (int64_t v = 0; v < m_.nodes; ++v) {
      int64_t low = 0, high = m - 1;  // the first stage whose end holds v
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        Holds(chain.cut[middle + 1], v) ? high = middle : low = middle + 1;
      }
      stage_of_[v] = low;
    }
    steps += m_.nodes / 64;
    for (int64_t e = 0; e < m_.src.size(); ++e) {
      to_.clear();
      const int64_t a = m_.src[e] < 0 ? -1 : stage_of_[m_.src[e]];
      for (const int32_t* r = m_.readers.begin(e); r != m_.readers.end(e); ++r) {
        const int64_t b = stage_of_[*r];
        if (b == a || std::find(to_.begin(), to_.end(), b) != to_.end()) continue;
        to_.push_back(b);
        Move(a, a < 0 ? -1 : chain.group[a], b, chain.group[b], m_.bytes[e]);
      }
      if (a >= 0 && m_.is_output[e]) {
        const int64_t g = chain.group[a];
        send_[a] += t_.host_latency[g] + m_.bytes[e] * t_.host_per_byte[g];
        t_.Cross(g, -1, m_.bytes[e], wire_.data());
      }
    }
  }

  void Move(int64_t a, int64_t from, int64_t b, int64_t to, double bytes) {
    if (from == to && shared_[to]) return;
    t_.Cross(from, to, bytes, wire_.data());
    if (a < 0) {
      receive_[b] += t_.host_latency[to] + bytes * t_.host_per_byte[to];
      return;
    }
    const int64_t link = from * t_.groups + to;
    const double s = t_.latency[link] + bytes * t_.per_byte[link];
    receive_[b] += s, send_[a] += s;
  }

  const StageTable& t_;
  const Model& m_;
  const View<double>*memory_, *room_;
  int64_t words_;
  std::vector<int64_t> stage_of_, replicas_, to_;
  std::vector<bool> shared_;    // per group
  std::vector<int64_t> first_;  // per group: its first stage
  std::vector<double> busy_, receive_, send_, wire_, loads_;
};

}  // namespace tvmhet
#endif  // TVMHET_PASSES_CHAIN_VALUE_H_
