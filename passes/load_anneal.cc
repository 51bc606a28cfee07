/*! \file passes/load_anneal.cc
 *  \brief Simulated annealing of a placement whose objective is the largest load of any device.
 *
 *  A device's load is the time of its blocks plus its transfers: a net (one tensor) costs its maker
 * once if anybody else reads it, and each other reading device once. Moves: one block, a connected
 * clump of blocks, a swap; with `monotone`, a block together with all its ancestors (or
 * descendants) that the order of the devices then forces along. The energy is a power sum of loads,
 * so that work leaves every nearly largest device, not only the largest. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "arrays.h"

namespace tvmhet {
namespace ffi = tvm::ffi;
namespace {

constexpr int64_t kMaxSlide = 64;  // blocks that one ordered move may drag along

struct Input {
  View<double> time, memory, net_cost, limit,
      scale;  // time [blocks, devices]; limit and scale per device
  View<int32_t> net_src;
  Lists readers, nets_read, nets_made, preds, succs;
  int64_t blocks, devices;
};

class Placement {
 public:
  Placement(const Input& in, const View<int32_t>& start)
      : in_(in),
        home_(start.data(), start.data() + in.blocks),
        load_(in.devices, 0.0),
        used_(in.devices, 0.0),
        count_(in.net_cost.size() * in.devices, 0) {
    for (int64_t e = 0; e < in.net_cost.size(); ++e) {
      for (const int32_t* v = in.readers.begin(e); v != in.readers.end(e); ++v)
        ++count_[e * in.devices + home_[*v]];
    }
    for (int64_t e = 0; e < in.net_cost.size(); ++e) {
      for (int64_t d = 0; d < in.devices; ++d) load_[d] += Pays(e, d);
    }
    for (int64_t v = 0; v < in.blocks; ++v) {
      load_[home_[v]] += in.time[v * in.devices + home_[v]];
      used_[home_[v]] += in.memory[v];
    }
  }

  void Move(int64_t v, int32_t to) {
    const int32_t from = home_[v];
    if (from == to) return;
    load_[from] -= in_.time[v * in_.devices + from];
    load_[to] += in_.time[v * in_.devices + to];
    used_[from] -= in_.memory[v];
    used_[to] += in_.memory[v];
    for (const int32_t* e = in_.nets_read.begin(v); e != in_.nets_read.end(v); ++e) {
      const int32_t src = home_[in_.net_src[*e]];
      Charge(*e, from, to, src, -1.0);
      --count_[*e * in_.devices + from];
      ++count_[*e * in_.devices + to];
      Charge(*e, from, to, src, 1.0);
    }
    for (const int32_t* e = in_.nets_made.begin(v); e != in_.nets_made.end(v); ++e) {
      Charge(*e, from, to, from, -1.0);
    }
    home_[v] = to;
    for (const int32_t* e = in_.nets_made.begin(v); e != in_.nets_made.end(v); ++e)
      Charge(*e, from, to, to, 1.0);
  }

  bool Fits() const {
    for (int64_t d = 0; d < in_.devices; ++d) {
      if (used_[d] > in_.limit[d]) return false;
    }
    return true;
  }
  double Largest() const { return *std::max_element(load_.begin(), load_.end()); }
  double Energy(double reference) const {
    double sum = 0.0;
    for (double x : load_) {
      const double r = x / reference, r2 = r * r, r4 = r2 * r2, r8 = r4 * r4;
      sum += r8 * r8;
    }
    return sum;
  }
  int32_t home(int64_t v) const { return home_[v]; }
  const std::vector<int32_t>& homes() const { return home_; }

 private:
  double Pays(int64_t e, int64_t d) const {
    const int32_t here = count_[e * in_.devices + d];
    const bool is_src = home_[in_.net_src[e]] == d;
    const bool pays = is_src ? here < in_.readers.end(e) - in_.readers.begin(e) : here > 0;
    return pays ? in_.net_cost[e] * in_.scale[d] : 0.0;
  }
  void Charge(int64_t e, int32_t a, int32_t b, int32_t c, double sign) {
    load_[a] += sign * Pays(e, a);
    load_[b] += sign * Pays(e, b);
    if (c != a && c != b) load_[c] += sign * Pays(e, c);
  }

  const Input& in_;
  std::vector<int32_t> home_;
  std::vector<double> load_, used_;
  std::vector<int32_t> count_;
};

class Annealer {
 public:
  Annealer(const Input& in, Placement start, bool monotone, int64_t seed)
      : in_(in),
        now_(std::move(start)),
        best_(now_.homes()),
        best_value_(now_.Fits() ? now_.Largest() : HUGE_VAL),
        monotone_(monotone),
        random_(seed),
        mark_(in.blocks, 0) {}

  void Run(int64_t steps, double hot, double cold) {
    double reference = best_value_ < HUGE_VAL ? best_value_ : now_.Largest();
    double energy = now_.Energy(reference);
    std::vector<std::pair<int64_t, int32_t>> undo;
    for (int64_t i = 0; i < steps; ++i) {
      const double heat = hot * std::pow(cold / hot, static_cast<double>(i) / steps);
      undo.clear();
      Propose(&undo);
      if (undo.empty()) continue;
      const double next = now_.Fits() ? now_.Energy(reference) : HUGE_VAL;
      if (next <= energy || Chance() < std::exp((energy - next) / heat)) {
        energy = next;
        const double value = now_.Largest();
        if (value < best_value_ * (1 - 1e-12)) {
          best_value_ = value;
          best_ = now_.homes();
          if (value < 0.98 * reference) reference = value, energy = now_.Energy(reference);
        }
      } else {
        for (auto u = undo.rbegin(); u != undo.rend(); ++u) now_.Move(u->first, u->second);
      }
    }
  }
  void Restart() {
    for (int64_t v = 0; v < in_.blocks; ++v) now_.Move(v, best_[v]);
  }
  const std::vector<int32_t>& best() const { return best_; }

 private:
  double Chance() { return std::uniform_real_distribution<double>(0.0, 1.0)(random_); }
  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  void Shift(int64_t v, int32_t to, std::vector<std::pair<int64_t, int32_t>>* undo) {
    if (now_.home(v) == to || in_.time[v * in_.devices + to] == HUGE_VAL) return;
    undo->push_back({v, now_.home(v)});
    now_.Move(v, to);
  }

  void Propose(std::vector<std::pair<int64_t, int32_t>>* undo) {
    const int64_t v = Below(in_.blocks);
    if (monotone_) {
      const int32_t step = static_cast<int32_t>(Below(4) ? 1 : 1 + Below(in_.devices));
      const int32_t to = now_.home(v) + (Below(2) ? step : -step);
      if (to >= 0 && to < in_.devices) Slide(v, to, undo);
      return;
    }
    const int64_t kind = Below(10);
    if (kind < 3) return Shift(v, static_cast<int32_t>(Below(in_.devices)), undo);
    if (kind < 5) return Shift(v, NeighbourHome(v), undo);
    if (kind < 7) {
      const int64_t w = Below(in_.blocks);
      const int32_t a = now_.home(v), b = now_.home(w);
      if (a == b || in_.time[v * in_.devices + b] == HUGE_VAL ||
          in_.time[w * in_.devices + a] == HUGE_VAL)
        return;
      Shift(v, b, undo);
      return Shift(w, a, undo);
    }
    Clump(v, kind == 7 ? static_cast<int32_t>(Below(in_.devices)) : NeighbourHome(v), undo);
  }

  /*! \brief The device of a random neighbour; the block's own if it has none. */
  int32_t NeighbourHome(int64_t v) {
    const int64_t ins = in_.preds.end(v) - in_.preds.begin(v),
                  outs = in_.succs.end(v) - in_.succs.begin(v);
    if (ins + outs == 0) return now_.home(v);
    const int64_t k = Below(ins + outs);
    return now_.home(k < ins ? in_.preds.begin(v)[k] : in_.succs.begin(v)[k - ins]);
  }

  /*! \brief Move a connected part of v's device, of random size, to another device. */
  void Clump(int64_t v, int32_t to, std::vector<std::pair<int64_t, int32_t>>* undo) {
    const int32_t from = now_.home(v);
    if (from == to) return;
    const int64_t size = 2 + Below(int64_t{1} << (1 + Below(5)));
    std::vector<int64_t> queue{v};
    ++stamp_;
    mark_[v] = stamp_;
    for (size_t i = 0; i < queue.size(); ++i) {
      for (const Lists* l : {&in_.preds, &in_.succs}) {
        for (const int32_t* u = l->begin(queue[i]); u != l->end(queue[i]); ++u) {
          if (mark_[*u] == stamp_ || now_.home(*u) != from ||
              static_cast<int64_t>(queue.size()) >= size)
            continue;
          mark_[*u] = stamp_;
          queue.push_back(*u);
        }
      }
    }
    for (int64_t u : queue) Shift(u, to, undo);
  }

  /*! \brief Move v to device `to`, and with it every ancestor on a later (descendant on an earlier)
   * device than `to`. */
  void Slide(int64_t v, int32_t to, std::vector<std::pair<int64_t, int32_t>>* undo) {
    const int32_t from = now_.home(v);
    if (from == to) return;
    const bool back = to < from;
    const Lists& along = back ? in_.preds : in_.succs;
    std::vector<int64_t> queue{v};
    ++stamp_;
    mark_[v] = stamp_;
    for (size_t i = 0; i < queue.size(); ++i) {
      if (in_.time[queue[i] * in_.devices + to] == HUGE_VAL) return;
      for (const int32_t* u = along.begin(queue[i]); u != along.end(queue[i]); ++u) {
        if (static_cast<int64_t>(queue.size()) > kMaxSlide) return;
        if (mark_[*u] == stamp_ || (back ? now_.home(*u) <= to : now_.home(*u) >= to)) continue;
        mark_[*u] = stamp_;
        queue.push_back(*u);
      }
    }
    for (int64_t u : queue) Shift(u, to, undo);
  }

  const Input& in_;
  Placement now_;
  std::vector<int32_t> best_;
  double best_value_;
  bool monotone_;
  std::mt19937_64 random_;
  std::vector<int64_t> mark_;
  int64_t stamp_ = 0;
};

}  // namespace

/*! \brief Improve a placement; `home` [blocks] holds the device of each block and is overwritten by
 * the best one found.
 *  \param arrays time [blocks, devices], memory [blocks], net_cost, memory limit [devices],
 * transfer scale [devices], net_src, then (ptr, ids) of: readers of each net, nets each block
 * reads, nets each block makes, predecessors and successors (with `monotone`: of the order that
 * devices must respect).
 *  \param rounds each anneals `steps` moves from the best placement, from temperature `hot` down to
 * 1e-3. */
void LoadAnneal(const ffi::Array<ffi::Tensor>& arrays, const ffi::TensorView& home, bool monotone,
                int64_t steps, int64_t rounds, double hot, int64_t seed) {
  if (arrays.size() != 16)
    TVM_FFI_THROW(ValueError) << "LoadAnneal needs 16 arrays, got " << arrays.size();
  const View<double> memory(arrays[1], "memory"), limit(arrays[3], "limit");
  const Input in{View<double>(arrays[0], "time"),
                 memory,
                 View<double>(arrays[2], "net_cost"),
                 limit,
                 View<double>(arrays[4], "scale"),
                 View<int32_t>(arrays[5], "net_src"),
                 Lists(arrays[6], arrays[7], "readers"),
                 Lists(arrays[8], arrays[9], "nets_read"),
                 Lists(arrays[10], arrays[11], "nets_made"),
                 Lists(arrays[12], arrays[13], "preds"),
                 Lists(arrays[14], arrays[15], "succs"),
                 memory.size(),
                 limit.size()};
  const View<int32_t> out(home, "home");
  Annealer annealer(in, Placement(in, out), monotone, seed);
  for (int64_t r = 0; r < rounds; ++r) {
    annealer.Restart();
    annealer.Run(steps, r % 2 ? hot / 10 : hot, 1e-3);
  }
  std::copy(annealer.best().begin(), annealer.best().end(), out.data());
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.LoadAnneal", LoadAnneal); }
}  // namespace tvmhet
