/*! \file passes/pricing_states.h
 *  \brief What must be known of the blocks so far when the rest of a set is chosen: on which sides
 * the blocks of each open net lie, and the blocks that others must follow.
 *
 *  Nets with the same blocks so far are alike: they share two bits of the state. */
#ifndef TVMHET_PASSES_PRICING_STATES_H_
#define TVMHET_PASSES_PRICING_STATES_H_

#include <tvm/ffi/error.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "arrays.h"
#include "net_shares.h"

namespace tvmhet {

enum : uint64_t { kOut = 0, kIn = 1, kMixed = 2 };                 // of a net
enum : uint64_t { kBefore = 0, kInside = 1, kAfter = 2, kSides };  // of a block

constexpr int kMostSlots = 63;  // of a state

using Key = unsigned __int128;  // two bits for each slot

inline Key At(uint64_t bits, int slot) { return static_cast<Key>(bits) << 2 * slot; }
inline uint64_t Bits(Key key, int slot) { return static_cast<uint64_t>(key >> 2 * slot) & 3; }

/*! \brief What block v does to nets with the same blocks so far. */
struct Move {
  int from, to;  // slots, -1: none
  double cost;   // of all of them
};

/*! \brief Open nets with the same blocks so far, after block v. */
struct Open {
  int slot;
  std::vector<int64_t> nets;
};

class PricingStates {
 public:
  /*! \param level  Nets of this level or higher are in the states. */
  PricingStates(const PricedBlocks& blocks, const Lists& before, int32_t level)
      : blocks_(blocks), level_(level) {
    const int64_t n = blocks.size();
    earlier_.resize(n), last_.assign(n, -1);
    for (int64_t v = 0; v < before.size(); ++v) {
      for (const int32_t* u = before.begin(v); u != before.end(v); ++u) {
        const int64_t first = std::min<int64_t>(*u, v), second = std::max<int64_t>(*u, v);
        earlier_[second].push_back({first, first == *u});
        last_[first] = std::max(last_[first], second);
        last_[second] = std::max(last_[second], second);
      }
    }
    Slots();
  }
  bool Charged(size_t e) const { return blocks_.nets[e].level >= level_; }
  uint64_t NumSides(int64_t v) const { return last_[v] >= 0 ? kSides : kAfter; }
  /*! \brief May v be on `side`? No block lies before one that it follows. */
  bool Allowed(Key key, int64_t v, uint64_t side) const {
    for (const auto& [u, u_first] : earlier_[v]) {
      const uint64_t other = Bits(key, block_slot_[u]);
      if (u_first ? other > side : side > other) return false;
    }
    return true;
  }

  /*! \brief The state after v joins `side`; nets that become mixed are added to `pay`. */
  Key Step(Key key, int64_t v, uint64_t side, double* pay) const {
    const uint64_t in = side == kInside ? kIn : kOut;
    Key next = key;
    for (const Move& move : moves_[v]) {
      uint64_t bits = in;
      if (move.from >= 0) {
        bits = Bits(key, move.from);
        if (bits != kMixed && bits != in) *pay += move.cost, bits = kMixed;
      }
      if (move.to >= 0) next = (next & ~At(3, move.to)) | At(bits, move.to);
    }
    if (block_slot_[v] >= 0) next |= At(side, block_slot_[v]);
    return next & ~closes_[v];
  }

  const std::vector<Open>& open(int64_t v) const { return open_[v]; }  // after block v
  int block_slot(int64_t v) const { return block_slot_[v]; }
  int64_t last(int64_t v) const { return last_[v]; }

 private:
  /*! \brief Give nets with the same blocks so far, and each block that others must follow, two bits
   * of the state. */
  void Slots() {
    const int64_t n = blocks_.size();
    std::vector<int> free;
    int slots = 0;
    const auto take = [&] {
      if (free.empty()) free.push_back(slots++);
      const int slot = free.back();
      free.pop_back();
      return slot;
    };
    std::vector<std::vector<int64_t>> opens(n);
    std::vector<std::vector<int>> ends(n);
    for (size_t e = 0; e < blocks_.nets.size(); ++e) {
      const std::vector<int32_t>& pins = blocks_.nets[e].pins;
      if (Charged(e) && pins.front() < pins.back()) opens[pins.front()].push_back(e);
    }
    block_slot_.assign(n, -1), moves_.resize(n), open_.resize(n), closes_.assign(n, 0);
    std::vector<Open> now;
    for (int64_t v = 0; v < n; ++v) {
      std::vector<Open> after;
      std::vector<int> freed = std::move(ends[v]);
      for (Open& open : now) {
        Open touched{-1, {}}, same{open.slot, {}};
        Move move{open.slot, -1, 0.0};
        bool any = false;
        for (int64_t e : open.nets) {
          const std::vector<int32_t>& pins = blocks_.nets[e].pins;
          if (!std::binary_search(pins.begin(), pins.end(), v)) {
            same.nets.push_back(e);
            continue;
          }
          any = true, move.cost += blocks_.nets[e].cost;
          if (pins.back() > v) touched.nets.push_back(e);
        }
        if (!touched.nets.empty()) move.to = touched.slot = same.nets.empty() ? open.slot : take();
        if (same.nets.empty() && touched.nets.empty()) freed.push_back(open.slot);
        if (any) moves_[v].push_back(move);
        if (!same.nets.empty()) after.push_back(std::move(same));
        if (!touched.nets.empty()) after.push_back(std::move(touched));
      }
      if (!opens[v].empty()) {
        after.push_back({take(), std::move(opens[v])});
        moves_[v].push_back({-1, after.back().slot, 0.0});
      }
      if (last_[v] > v) block_slot_[v] = take(), ends[last_[v]].push_back(block_slot_[v]);
      for (int slot : freed) closes_[v] |= slot < kMostSlots ? At(3, slot) : 0;
      free.insert(free.end(), freed.begin(), freed.end());
      open_[v] = after;
      now = std::move(after);
    }
    if (slots > kMostSlots) {
      TVM_FFI_THROW(ValueError) << slots << " are open at once; leave out some (" << kMostSlots
                                << ")";
    }
  }

  const PricedBlocks& blocks_;
  const int32_t level_;
  std::vector<std::vector<std::pair<int64_t, bool>>>
      earlier_;  // (block placed before, does v follow it?)
  std::vector<std::vector<Move>> moves_;
  std::vector<std::vector<Open>> open_;
  std::vector<int> block_slot_;
  std::vector<Key> closes_;    // bits of what ends with the block
  std::vector<int64_t> last_;  // the last block whose side depends on this one's; -1: none does
};

}  // namespace tvmhet
#endif  // TVMHET_PASSES_PRICING_STATES_H_
