/*! \file passes/describe.cc
 *  \brief Canonical JSON of attributes and constant arguments, through reflection. */
#include "describe.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "relax_ir.h"

namespace tvmhet {
namespace {

void AppendQuoted(std::string_view text, std::string* out) {
  out->push_back('"');
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned char>(c));
      out->append(escaped);
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

void AppendFloat(double value, std::string* out) {
  if (std::isnan(value)) return AppendQuoted("nan", out);
  if (std::isinf(value)) return AppendQuoted(value > 0 ? "inf" : "-inf", out);
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", value);
  out->append(text);
  if (!std::strpbrk(text, ".eE")) out->append(".0");
}

void AppendDtype(DLDataType dtype, std::string* out) {
  AppendQuoted(std::string(ffi::DLDataTypeToString(dtype)), out);
}

/*! \brief FNV-1a: stable across processes, and enough to tell constants apart in a cache key that
 * is checked anyway. */
uint64_t HashBytes(const uint8_t* data, int64_t size) {
  uint64_t hash = 1469598103934665603ull;
  for (int64_t i = 0; i < size; ++i) hash = (hash ^ data[i]) * 1099511628211ull;
  return hash;
}

/*! \brief The value of an IEEE 754 half-precision number. */
double HalfValue(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  double size = std::ldexp(fraction + (exponent ? 1024 : 0), (exponent ? exponent : 1) - 25);
  if (exponent == 31) {
    size = fraction ? std::numeric_limits<double>::quiet_NaN()
                    : std::numeric_limits<double>::infinity();
  }
  return bits & 0x8000 ? -size : size;
}

bool AppendScalar(const DLTensor& tensor, const uint8_t* data, std::string* out) {
  const DLDataType& t = tensor.dtype;
  auto integer = [&](auto zero) {
    std::memcpy(&zero, data, sizeof(zero));
    out->append(std::to_string(zero));
    return true;
  };
  if (t.lanes != 1) return false;
  if (t.code == kDLFloat && t.bits == 32) {
    float value;
    std::memcpy(&value, data, sizeof(value));
    AppendFloat(value, out);
    return true;
  }
  if (t.code == kDLFloat && t.bits == 64) {
    double value;
    std::memcpy(&value, data, sizeof(value));
    AppendFloat(value, out);
    return true;
  }
  if (t.bits == 16 && (t.code == kDLFloat || t.code == kDLBfloat)) {
    uint16_t bits;
    std::memcpy(&bits, data, sizeof(bits));
    if (t.code == kDLFloat) {
      AppendFloat(HalfValue(bits), out);
      return true;
    }
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;  // bfloat16: the upper half of a float
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    AppendFloat(value, out);
    return true;
  }
  if (t.code == kDLBool || (t.code == kDLUInt && t.bits == 8)) return integer(uint8_t{0});
  if (t.code == kDLInt && t.bits == 8) return integer(int8_t{0});
  if (t.code == kDLInt && t.bits == 16) return integer(int16_t{0});
  if (t.code == kDLInt && t.bits == 32) return integer(int32_t{0});
  if (t.code == kDLInt && t.bits == 64) return integer(int64_t{0});
  return false;
}

void AppendTensor(const ffi::Tensor& tensor, std::string* out) {
  const DLTensor& t = *tensor.GetDLTensorPtr();
  int64_t count = 1;
  for (int i = 0; i < t.ndim; ++i) count *= t.shape[i];
  const auto* data = static_cast<const uint8_t*>(t.data) + t.byte_offset;
  out->append("{\"dtype\": ");
  AppendDtype(t.dtype, out);
  out->append(", \"shape\": [");
  for (int i = 0; i < t.ndim; ++i) out->append((i ? ", " : "") + std::to_string(t.shape[i]));
  out->append("], ");
  std::string scalar;
  if (count == 1 && AppendScalar(t, data, &scalar)) {
    out->append("\"value\": " + scalar + "}");
    return;
  }
  const int64_t size = (count * t.dtype.bits * t.dtype.lanes + 7) / 8;
  char hash[24];
  std::snprintf(hash, sizeof(hash), "%016llx",
                static_cast<unsigned long long>(HashBytes(data, size)));
  out->append("\"hash\": \"" + std::string(hash) + "\"}");
}

void AppendArray(const ffi::Array<ffi::Any>& array, std::string* out) {
  out->push_back('[');
  bool first = true;
  for (const ffi::Any& item : array) {
    if (!first) out->append(", ");
    first = false;
    Describe(item, out);
  }
  out->push_back(']');
}

void AppendMap(const ffi::Map<ffi::Any, ffi::Any>& map, std::string* out) {
  std::vector<std::pair<std::string, std::string>> items;
  for (const auto& kv : map) {
    std::string key, value;
    if (auto text = kv.first.as<ffi::String>()) {
      AppendQuoted(std::string_view(text->data(), text->size()), &key);
    } else {
      std::string inner;
      Describe(kv.first, &inner);
      AppendQuoted(inner, &key);
    }
    Describe(kv.second, &value);
    items.emplace_back(std::move(key), std::move(value));
  }
  std::sort(items.begin(), items.end());
  out->push_back('{');
  for (size_t i = 0; i < items.size(); ++i)
    out->append((i ? ", " : "") + items[i].first + ": " + items[i].second);
  out->push_back('}');
}

void AppendFields(const ffi::ObjectRef& object, std::string* out) {
  out->append("{\"_type\": ");
  AppendQuoted(object->GetTypeKey(), out);
  const TVMFFITypeInfo* info = TVMFFIGetTypeInfo(object->type_index());
  ffi::reflection::ForEachFieldInfo(info, [&](const TVMFFIFieldInfo* f) {
    std::string_view name(f->name.data, f->name.size);
    if (name == "span") return;
    out->append(", ");
    AppendQuoted(name, out);
    out->append(": ");
    Describe(ffi::reflection::FieldGetter(f)(object.get()), out);
  });
  out->push_back('}');
}

void AppendObject(const ffi::ObjectRef& object, std::string* out) {
  if (IsA(object, "ir.IntImm")) {
    out->append(std::to_string(FieldAs<int64_t>(object, "value")));
  } else if (IsA(object, "ir.FloatImm")) {
    AppendFloat(FieldAs<double>(object, "value"), out);
  } else if (IsA(object, "relax.expr.ShapeExpr")) {
    Describe(Field(object, "values"), out);
  } else if (IsA(object, "ir.Tuple")) {
    Describe(Field(object, "fields"), out);
  } else if (IsA(object, "ir.GenericConst")) {
    Describe(Field(object, "value"), out);
  } else if (IsA(object, "ir.PrimType")) {
    Describe(Field(object, "dtype"), out);
  } else if (IsA(object, "ir.GlobalVar")) {
    AppendQuoted(std::string(FieldAs<ffi::String>(object, "name_hint")), out);
  } else if (IsA(object, "ir.Var")) {
    AppendQuoted(std::string(FieldAs<ffi::String>(object, "name")), out);
  } else {
    AppendFields(object, out);
  }
}

}  // namespace

void Describe(const ffi::Any& value, std::string* out) {
  switch (value.type_index()) {
    case ffi::TypeIndex::kTVMFFINone:
      out->append("null");
      return;
    case ffi::TypeIndex::kTVMFFIBool:
      out->append(value.cast<bool>() ? "true" : "false");
      return;
    case ffi::TypeIndex::kTVMFFIInt:
      out->append(std::to_string(value.cast<int64_t>()));
      return;
    case ffi::TypeIndex::kTVMFFIFloat:
      return AppendFloat(value.cast<double>(), out);
    case ffi::TypeIndex::kTVMFFIDataType:
      return AppendDtype(value.cast<DLDataType>(), out);
    default:
      break;
  }
  if (auto text = value.as<ffi::String>())
    return AppendQuoted(std::string_view(text->data(), text->size()), out);
  if (auto tensor = value.as<ffi::Tensor>()) return AppendTensor(*tensor, out);
  if (auto array = value.as<ffi::Array<ffi::Any>>()) return AppendArray(*array, out);
  if (auto map = value.as<ffi::Map<ffi::Any, ffi::Any>>()) return AppendMap(*map, out);
  if (auto object = value.as<ffi::ObjectRef>()) return AppendObject(*object, out);
  AppendQuoted(value.GetTypeKey(), out);
}

}  // namespace tvmhet
