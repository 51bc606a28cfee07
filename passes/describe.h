/*! \file passes/describe.h
 *  \brief Write any attribute or constant argument as canonical JSON: the same value gives the same
 * text. */
#ifndef TVMHET_PASSES_DESCRIBE_H_
#define TVMHET_PASSES_DESCRIBE_H_

#include <tvm/ffi/any.h>

#include <string>

namespace tvmhet {

/*! \brief Append the JSON of `value` to `out`.
 *
 *  Integers, floats, booleans, strings, dtypes and (nested) arrays and maps keep their meaning;
 * IntImm, FloatImm, ShapeExpr and Tuple become numbers and lists; a scalar constant becomes its
 * value, a larger one its type and a hash of its bytes; any other object an {"_type": key, field:
 * ...} map of its fields. */
void Describe(const tvm::ffi::Any& value, std::string* out);

}  // namespace tvmhet
#endif  // TVMHET_PASSES_DESCRIBE_H_
