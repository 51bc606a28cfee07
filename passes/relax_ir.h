/*! \file passes/relax_ir.h
 *  \brief Read Relax IR through tvm_ffi's reflection; the TVM wheel ships no relax headers. */
#ifndef TVMHET_PASSES_RELAX_IR_H_
#define TVMHET_PASSES_RELAX_IR_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/reflection/accessor.h>
#include <tvm/ffi/string.h>

#include <string>
#include <string_view>

namespace tvmhet {
namespace ffi = tvm::ffi;

/*! \brief Read a field by name, inherited ones included. Throws AttributeError if there is none. */
inline ffi::Any Field(const ffi::ObjectRef& object, std::string_view name) {
  const TVMFFITypeInfo* info = TVMFFIGetTypeInfo(object->type_index());
  ffi::Any value;
  bool found = ffi::reflection::ForEachFieldInfoWithEarlyStop(info, [&](const TVMFFIFieldInfo* f) {
    if (std::string_view(f->name.data, f->name.size) != name) return false;
    value = ffi::reflection::FieldGetter(f)(object.get());
    return true;
  });
  if (!found) {
    TVM_FFI_THROW(AttributeError) << object->GetTypeKey() << " has no field '" << std::string(name)
                                  << "'; this TVM is not the one tvmhet was built for";
  }
  return value;
}

template <typename T>
inline T FieldAs(const ffi::ObjectRef& object, std::string_view name) {
  return Field(object, name).cast<T>();
}

/*! \brief The runtime type index of a type key such as "ir.Call". */
inline int32_t TypeIndex(std::string_view key) {
  TVMFFIByteArray bytes{key.data(), key.size()};
  int32_t index = 0;
  TVM_FFI_CHECK_SAFE_CALL(TVMFFITypeKeyToIndex(&bytes, &index));
  return index;
}

inline bool IsA(const ffi::ObjectRef& object, std::string_view key) {
  return object.defined() && object->type_index() == TypeIndex(key);
}

}  // namespace tvmhet
#endif  // TVMHET_PASSES_RELAX_IR_H_
