/*! \file passes/stage_table.h
 *  \brief Seconds that one input keeps a stage busy, from the segment table and the links. */
#ifndef TVMHET_PASSES_STAGE_TABLE_H_
#define TVMHET_PASSES_STAGE_TABLE_H_

#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "arrays.h"

namespace tvmhet {

/*! \brief How many devices each group has. Those of a *team* are `width` devices of the group
 * `pool`, which run kernels together (tensor split); any other group is its own pool, and its
 * width 1. */
struct Devices {
  /*! \param array [groups, 4]: most devices or teams in use, pool, width, devices of a pool. */
  explicit Devices(const tvm::ffi::TensorView& array) {
    const View<int64_t> rows(array, "devices");
    for (int64_t i = 0; i + 3 < rows.size(); i += 4) {
      count.push_back(rows[i]), pool.push_back(rows[i + 1]);
      width.push_back(rows[i + 2]), room.push_back(rows[i + 3]);
    }
  }
  int64_t size() const { return static_cast<int64_t>(count.size()); }
  /*! \brief Is there a device of g, and another of h besides it? */
  bool Both(int64_t g, int64_t h) const {
    if (count[h] <= 0) return false;
    return room[pool[h]] - width[h] - (pool[g] == pool[h] ? width[g] : 0) >= 0;
  }
  /*! \brief 1 / (devices * pools) for each pool that some group may use; together they cost 1. */
  std::vector<double> EqualPrices() const {
    std::vector<bool> used(count.size(), false);
    for (int64_t g = 0; g < size(); ++g) {
      if (count[g] > 0) used[pool[g]] = true;
    }
    const double usable = static_cast<double>(std::count(used.begin(), used.end(), true));
    std::vector<double> price(count.size(), 0.0);
    for (int64_t g = 0; g < size(); ++g) {
      if (used[g]) price[g] = 1.0 / (static_cast<double>(room[g]) * usable);
    }
    return price;
  }

  /*! \brief Price of a device or team of g, from those of the pools' devices. */
  double PriceOf(int64_t g, const std::vector<double>& price) const {
    return static_cast<double>(width[g]) * price[pool[g]];
  }

  std::vector<int64_t> count, pool, width, room;
};

/*! \brief The arrays of one search. A stage from cut b to cut c on group g; moves hold counts and
 * bytes received, sent, read from the host and returned to it. A link is named by (from group, to
 * group). */
struct StageTable {
  /*! \param arrays time_s [cuts, cuts, groups], moves [cuts, cuts, 8], link latency and s/byte
   * [groups, groups], host latency and s/byte [groups], stage overhead [groups], devices [groups,
   * 4] as in `Devices`; and, if there are wires, their s/byte [wires] and which ways cross them
   * [wires, 1 + groups, 1 + groups] from and to the host (first) and the groups. */
  StageTable(const tvm::ffi::Array<tvm::ffi::Tensor>& a, bool overlap)
      : time(Checked(a)[0], "time"),
        moves(a[1], "moves"),
        latency(a[2], "latency"),
        per_byte(a[3], "per_byte"),
        host_latency(a[4], "host_latency"),
        host_per_byte(a[5], "host_per_byte"),
        overhead(a[6], "overhead"),
        devices(a[7]),
        count(devices.count),
        wire_per_byte(Wires(a, 8)),
        overlap(overlap),
        num_cuts(std::llround(std::sqrt(moves.size() / 8.0))),
        groups(devices.size()) {
    if (a.size() == 10) {
      const View<uint8_t> ways(a[9], "ways");
      crosses_.assign(ways.data(), ways.data() + ways.size());
    }
    if (crosses_.size() != wire_per_byte.size() * (groups + 1) * (groups + 1))
      TVM_FFI_THROW(ValueError) << "ways do not match " << wire_per_byte.size() << " wires";
    one_link = true;
    for (int64_t i = 1; i < latency.size(); ++i)
      one_link &= latency[i] == latency[0] && per_byte[i] == per_byte[0];
    for (int64_t h = 0; h < groups; ++h) {  // groups that h reaches alike are one class
      for (int64_t g = 0; g < groups; ++g) {
        int64_t like = 0;
        while (like < g && !(latency[h * groups + like] == latency[h * groups + g] &&
                             per_byte[h * groups + like] == per_byte[h * groups + g]))
          ++like;
        link_class.push_back(static_cast<int32_t>(like));
      }
    }
  }

  double Receive(int64_t at, int64_t g, int64_t before) const {
    const double* m = moves.data() + 8 * at;
    double s = m[4] * host_latency[g] + m[5] * host_per_byte[g];
    if (before >= 0)
      s += m[0] * latency[before * groups + g] + m[1] * per_byte[before * groups + g];
    return s;
  }
  double Send(int64_t at, int64_t g, int64_t after) const {
    const double* m = moves.data() + 8 * at;
    double s = m[6] * host_latency[g] + m[7] * host_per_byte[g];
    if (after >= 0) s += m[2] * latency[g * groups + after] + m[3] * per_byte[g * groups + after];
    return s;
  }
  /*! \brief Load between a stage on group `before` and one on group `after`; -1: the host. */
  double LoadS(int64_t b, int64_t c, int64_t g, int64_t before, int64_t after) const {
    const int64_t at = b * num_cuts + c;
    return Sum(time[at * groups + g] + overhead[g], Receive(at, g, before), Send(at, g, after));
  }
  /*! \brief Load over the best links there are: no stage takes less. */
  double LeastLoadS(int64_t b, int64_t c, int64_t g) const {
    const int64_t at = b * num_cuts + c;
    const double compute = time[at * groups + g] + overhead[g];
    double receive = HUGE_VAL, send = HUGE_VAL;
    for (int64_t h = 0; h < groups; ++h) {
      if (!devices.Both(g, h)) continue;
      receive = std::min(receive, Receive(at, g, h));
      send = std::min(send, Send(at, g, h));
    }
    if (moves[8 * at] == 0) receive = Receive(at, g, -1);
    if (moves[8 * at + 2] == 0) send = Send(at, g, -1);
    return Sum(compute, receive, send);
  }
  int64_t NumWires() const { return static_cast<int64_t>(wire_per_byte.size()); }
  /*! \brief Add to `load`, one entry a wire, the seconds that `bytes` from `from` to `to` take; -1:
   * the host. */
  void Cross(int64_t from, int64_t to, double bytes, double* load) const {
    const int64_t n = groups + 1;
    for (int64_t w = 0; w < NumWires(); ++w) {
      if (crosses_[(w * n + from + 1) * n + to + 1]) load[w] += bytes * wire_per_byte[w];
    }
  }
  double Sum(double compute, double receive, double send) const {
    return overlap ? std::max(compute, std::max(receive, send)) : compute + receive + send;
  }
  bool Possible(int64_t b, int64_t c, int64_t g) const {
    return count[g] > 0 && time[(b * num_cuts + c) * groups + g] < HUGE_VAL;
  }

  View<double> time, moves, latency, per_byte, host_latency, host_per_byte, overhead;
  Devices devices;
  std::vector<int64_t> count;
  std::vector<double> wire_per_byte;
  bool overlap, one_link;
  int64_t num_cuts, groups;
  std::vector<int32_t>
      link_class;  // [from, to]: the first group that `from` reaches by an equal link

 private:
  static const tvm::ffi::Array<tvm::ffi::Tensor>& Checked(
      const tvm::ffi::Array<tvm::ffi::Tensor>& a) {
    if (a.size() != 8 && a.size() != 10)
      TVM_FFI_THROW(ValueError) << "a stage table needs 8 or 10 arrays, got " << a.size();
    return a;
  }
  static std::vector<double> Wires(const tvm::ffi::Array<tvm::ffi::Tensor>& a, size_t at) {
    if (a.size() <= at) return {};
    const View<double> rate(a[at], "wires");
    return std::vector<double>(rate.data(), rate.data() + rate.size());
  }

  std::vector<uint8_t> crosses_;
};

}  // namespace tvmhet
#endif  // TVMHET_PASSES_STAGE_TABLE_H_
