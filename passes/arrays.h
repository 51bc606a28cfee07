/*! \file passes/arrays.h
 *  \brief Checked, typed views of the plain arrays (numpy through DLPack) that the planner hands to
 * C++. */
#ifndef TVMHET_PASSES_ARRAYS_H_
#define TVMHET_PASSES_ARRAYS_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <cstdint>
#include <vector>

namespace tvmhet {

/*! \brief A flat view of a contiguous CPU array; T must match the array's element type and width.
 */
template <typename T>
class View {
 public:
  View(const tvm::ffi::TensorView& t, const char* name) : data_(static_cast<T*>(t.data_ptr())) {
    const DLDataType type = t.dtype();
    const int code = std::is_floating_point<T>::value ? kDLFloat
                     : std::is_signed<T>::value       ? kDLInt
                                                      : kDLUInt;
    if (type.code != code || type.bits != 8 * sizeof(T) || !t.IsContiguous()) {
      TVM_FFI_THROW(TypeError) << name << " must be a contiguous array of " << 8 * sizeof(T)
                               << "-bit elements";
    }
    for (int64_t d : t.shape()) size_ *= d;
  }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) const { return data_[i]; }
  T* data() const { return data_; }

 private:
  T* data_;
  int64_t size_ = 1;
};

/*! \brief Lists of ids packed one after another: list i is ids[ptr[i]] .. ids[ptr[i + 1] - 1]. */
class Lists {
 public:
  Lists(const tvm::ffi::TensorView& ptr, const tvm::ffi::TensorView& ids, const char* name)
      : ptr_(ptr, name), ids_(ids, name) {}
  int64_t size() const { return ptr_.size() - 1; }
  const int32_t* begin(int64_t i) const { return ids_.data() + ptr_[i]; }
  const int32_t* end(int64_t i) const { return ids_.data() + ptr_[i + 1]; }

 private:
  View<int32_t> ptr_;
  View<int32_t> ids_;
};

/*! \brief A set of nodes as words of 64 bits. */
class Bits {
 public:
  explicit Bits(int64_t num_words) : words_(num_words, 0) {}
  Bits(const uint64_t* from, int64_t num_words) : words_(from, from + num_words) {}
  bool Has(int64_t i) const { return words_[i >> 6] >> (i & 63) & 1; }
  void Add(int64_t i) { words_[i >> 6] |= uint64_t{1} << (i & 63); }
  void Remove(int64_t i) { words_[i >> 6] &= ~(uint64_t{1} << (i & 63)); }
  void Join(const Bits& o) {
    for (size_t w = 0; w < words_.size(); ++w) words_[w] |= o.words_[w];
  }
  bool Meets(const Bits& o) const {
    for (size_t w = 0; w < words_.size(); ++w) {
      if (words_[w] & o.words_[w]) return true;
    }
    return false;
  }
  bool Within(const Bits& o) const {
    for (size_t w = 0; w < words_.size(); ++w) {
      if (words_[w] & ~o.words_[w]) return false;
    }
    return true;
  }
  /*! \brief The smallest member that `o` lacks, or -1. */
  int64_t FirstOutside(const Bits& o) const {
    for (size_t w = 0; w < words_.size(); ++w) {
      if (const uint64_t rest = words_[w] & ~o.words_[w]) return 64 * w + __builtin_ctzll(rest);
    }
    return -1;
  }
  int64_t Count() const {
    int64_t n = 0;
    for (uint64_t w : words_) n += __builtin_popcountll(w);
    return n;
  }
  const std::vector<uint64_t>& words() const { return words_; }
  bool operator==(const Bits& o) const { return words_ == o.words_; }

 private:
  std::vector<uint64_t> words_;
};

struct BitsHash {
  size_t operator()(const Bits& b) const {
    uint64_t h = 1469598103934665603ull;
    for (uint64_t w : b.words()) h = (h ^ w) * 1099511628211ull, h ^= h >> 29;
    return h;
  }
};

}  // namespace tvmhet
#endif  // TVMHET_PASSES_ARRAYS_H_
