/*! \file passes/extract_graph.cc
 *  \brief Read a normalised Relax function as flat arrays: tensors, operators, and who reads what.
 *
 *      lv  = R.nn.conv2d(x, w)             operators: conv2d (x, w) -> lv;  split (lv) -> lv1.0,
 * lv1.1 lv1 = R.split(lv, 2)        ==>     tensors:   x, w, lv, lv1.0, lv1.1 lv2 = lv1[0] (tuples
 * and their fields are names, not operators)
 *
 *  A function that cannot be read so (control flow, unknown shapes, values that are not tensors)
 * gives a reason. */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "describe.h"
#include "relax_ir.h"

namespace tvmhet {
namespace {

using ffi::Any;
using ffi::Array;
using ffi::ObjectRef;

/*! \brief Why a function is not a plain operator graph. Caught in this file; never leaves it. */
struct NotAGraph : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/*! \brief A variable's value: one tensor, or a tuple of values. */
struct Value {
  int64_t tensor = -1;
  bool is_tuple = false;
  std::vector<Value> fields;
};

std::string NameOf(const ObjectRef& var) { return std::string(FieldAs<ffi::String>(var, "name")); }

class Extractor {
 public:
  explicit Extractor(ObjectRef func) : func_(std::move(func)) {}

  ffi::Map<ffi::String, Any> Run() {
    std::string reason;
    try {
      ReadParams();
      ReadBody();
    } catch (const NotAGraph& error) {
      reason = error.what();
    }
    return {{"reason", ffi::String(reason)},
            {"tensor_names", tensor_names_},
            {"tensor_shapes", tensor_shapes_},
            {"tensor_dtypes", tensor_dtypes_},
            {"tensor_producers", tensor_producers_},
            {"op_names", op_names_},
            {"op_families", op_families_},
            {"op_attrs", op_attrs_},
            {"op_inputs", op_inputs_},
            {"op_outputs", op_outputs_},
            {"inputs", inputs_},
            {"params", params_},
            {"outputs", outputs_}};
  }

 private:
  void ReadParams() {
    auto params = FieldAs<Array<ObjectRef>>(func_, "params");
    int64_t num_input = static_cast<int64_t>(params.size());
    ObjectRef attrs = FieldAs<ObjectRef>(func_, "attrs");
    if (attrs.defined()) {
      auto dict = Field(attrs, "__dict__").cast<ffi::Map<ffi::String, Any>>();
      if (dict.count("num_input")) num_input = dict.at("num_input").cast<int64_t>();
    }
    if (!FieldAs<bool>(func_, "is_pure")) throw NotAGraph("the function has side effects");
    for (int64_t i = 0; i < static_cast<int64_t>(params.size()); ++i) {
      Value value = Declare(NameOf(params[i]), FieldAs<ObjectRef>(params[i], "ty"), -1);
      if (value.is_tuple) throw NotAGraph("parameter '" + NameOf(params[i]) + "' is a tuple");
      values_[params[i].get()] = value;
      (i < num_input ? inputs_ : params_).push_back(value.tensor);
    }
  }

  void ReadBody() {
    ObjectRef body = FieldAs<ObjectRef>(func_, "body");
    if (!IsA(body, "relax.expr.SeqExpr")) throw NotAGraph("the body is not a sequence of bindings");
    for (const ObjectRef& block : FieldAs<Array<ObjectRef>>(body, "blocks")) {
      for (const ObjectRef& binding : FieldAs<Array<ObjectRef>>(block, "bindings"))
        ReadBinding(binding);
    }
    Flatten(Read(FieldAs<ObjectRef>(body, "body")), &outputs_);
  }

  void ReadBinding(const ObjectRef& binding) {
    ObjectRef var = FieldAs<ObjectRef>(binding, "var");
    if (!IsA(binding, "relax.expr.VarBinding")) {
      throw NotAGraph("binding '" + NameOf(var) + "' is a " + std::string(binding->GetTypeKey()));
    }
    ObjectRef value = FieldAs<ObjectRef>(binding, "value");
    values_[var.get()] = IsA(value, "ir.Call") ? ReadCall(var, value) : Read(value);
  }

  /*! \brief The value of an expression that computes nothing. */
  Value Read(const ObjectRef& expr) {
    auto known = values_.find(expr.get());
    if (known != values_.end()) return known->second;
    if (IsA(expr, "ir.Tuple")) {
      Value value;
      value.is_tuple = true;
      for (const ObjectRef& field : FieldAs<Array<ObjectRef>>(expr, "fields"))
        value.fields.push_back(Read(field));
      return value;
    }
    if (IsA(expr, "ir.TupleGetItem")) {
      Value tuple = Read(FieldAs<ObjectRef>(expr, "tuple_value"));
      return tuple.fields.at(FieldAs<int64_t>(expr, "index"));
    }
    throw NotAGraph("an expression of kind " + std::string(expr->GetTypeKey()) +
                    " stands outside an operator");
  }

  Value ReadCall(const ObjectRef& var, const ObjectRef& call) {
    ObjectRef op = FieldAs<ObjectRef>(call, "op");
    if (!IsA(op, "ir.Op")) {
      throw NotAGraph("binding '" + NameOf(var) + "' calls a " + std::string(op->GetTypeKey()) +
                      ", not an operator");
    }
    std::string family = std::string(FieldAs<ffi::String>(op, "name"));
    if (family.rfind("relax.", 0) == 0) family = family.substr(6);
    std::string attrs = "{";
    Array<int64_t> inputs = ReadArguments(call, &attrs);
    ObjectRef fields = FieldAs<ObjectRef>(call, "attrs");
    if (fields.defined()) {
      attrs += std::string(attrs.size() > 1 ? ", " : "") + "\"attrs\": ";
      Describe(fields, &attrs);
    }
    attrs += "}";
    const int64_t index = static_cast<int64_t>(op_names_.size());
    Value result = Declare(NameOf(var), FieldAs<ObjectRef>(var, "ty"), index);
    op_names_.push_back(NameOf(var));
    op_families_.push_back(family);
    op_attrs_.push_back(attrs);
    op_inputs_.push_back(inputs);
    Array<int64_t> outputs;
    Flatten(result, &outputs);
    op_outputs_.push_back(outputs);
    return result;
  }

  /*! \brief Tensor arguments become inputs, in order; every other argument becomes an attribute
   * "argN". */
  Array<int64_t> ReadArguments(const ObjectRef& call, std::string* attrs) {
    Array<int64_t> inputs;
    auto args = FieldAs<Array<ObjectRef>>(call, "args");
    for (size_t i = 0; i < args.size(); ++i) {
      if (HoldsTensor(args[i])) {
        Flatten(Read(args[i]), &inputs);
        continue;
      }
      *attrs += std::string(attrs->size() > 1 ? ", " : "") + "\"arg" + std::to_string(i) + "\": ";
      Describe(args[i], attrs);
    }
    return inputs;
  }

  bool HoldsTensor(const ObjectRef& expr) {
    if (values_.count(expr.get())) return true;
    if (IsA(expr, "ir.TupleGetItem")) return true;
    if (!IsA(expr, "ir.Tuple")) return false;
    bool any = false, all = true;
    for (const ObjectRef& field : FieldAs<Array<ObjectRef>>(expr, "fields")) {
      const bool holds = HoldsTensor(field);
      any = any || holds;
      all = all && holds;
    }
    if (any && !all) throw NotAGraph("an argument mixes tensors and constants in one tuple");
    return any;
  }

  void Flatten(const Value& value, Array<int64_t>* out) {
    if (!value.is_tuple) return out->push_back(value.tensor);
    for (const Value& field : value.fields) Flatten(field, out);
  }

  /*! \brief Make the tensors of a type; a tuple's fields are named after it: `split.0`, `split.1`.
   */
  Value Declare(const std::string& name, const ObjectRef& type, int64_t producer) {
    Value value;
    if (IsA(type, "ir.TupleType")) {
      value.is_tuple = true;
      int64_t i = 0;
      for (const ObjectRef& field : FieldAs<Array<ObjectRef>>(type, "fields")) {
        value.fields.push_back(Declare(name + "." + std::to_string(i++), field, producer));
      }
      return value;
    }
    if (!IsA(type, "relax.TensorType")) {
      throw NotAGraph("value '" + name + "' is not a tensor but a " +
                      std::string(type->GetTypeKey()));
    }
    value.tensor = static_cast<int64_t>(tensor_names_.size());
    tensor_names_.push_back(name);
    tensor_shapes_.push_back(StaticShape(name, type));
    ObjectRef dtype = FieldAs<ObjectRef>(type, "dtype");
    if (!dtype.defined()) throw NotAGraph("value '" + name + "' has no known dtype");
    tensor_dtypes_.push_back(
        ffi::String(ffi::DLDataTypeToString(FieldAs<DLDataType>(dtype, "dtype"))));
    tensor_producers_.push_back(producer);
    return value;
  }

  Array<int64_t> StaticShape(const std::string& name, const ObjectRef& type) {
    ObjectRef shape = FieldAs<ObjectRef>(type, "shape");
    if (!IsA(shape, "relax.expr.ShapeExpr"))
      throw NotAGraph("value '" + name + "' has no known shape");
    Array<int64_t> dims;
    for (const ObjectRef& dim : FieldAs<Array<ObjectRef>>(shape, "values")) {
      if (!IsA(dim, "ir.IntImm")) {
        std::string text;
        Describe(dim, &text);
        throw NotAGraph("value '" + name + "' has an unbound dimension " + text);
      }
      dims.push_back(FieldAs<int64_t>(dim, "value"));
    }
    return dims;
  }

  ObjectRef func_;
  std::unordered_map<const ffi::Object*, Value> values_;
  Array<ffi::String> tensor_names_, tensor_dtypes_, op_names_, op_families_, op_attrs_;
  Array<Array<int64_t>> tensor_shapes_, op_inputs_, op_outputs_;
  Array<int64_t> tensor_producers_, inputs_, params_, outputs_;
};

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef().def("tvmhet.ExtractGraph",
                                   [](ObjectRef func) { return Extractor(std::move(func)).Run(); });
}

}  // namespace tvmhet
