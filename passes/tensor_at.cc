/*! \file passes/tensor_at.cc
 *  \brief A tensor at an offset of a block of memory, as kernels take it: by its address. */
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/reflection/registry.h>

#include <vector>

namespace tvmhet {
namespace ffi = tvm::ffi;

/*! \brief Return a compact tensor in the memory of `block`, which it holds. Copies nothing.
 *
 *  TVM's own views keep the address and say how far from it they begin, which its kernels refuse.
 *  \param block   A compact tensor on a device whose memory has addresses.
 *  \param offset  Where the tensor begins, in bytes from where the block does. */
ffi::Tensor TensorAt(const ffi::Tensor& block, int64_t offset, const ffi::Shape& shape,
                     DLDataType dtype) {
  const DLTensor& whole = *block.GetDLTensorPtr();
  if (!ffi::IsDirectAddressDevice(whole.device)) {
    TVM_FFI_THROW(ValueError) << "memory of device type " << whole.device.device_type
                              << " has no addresses to count from";
  }
  const int64_t held = ffi::GetDataSize(whole);
  const int64_t size = ffi::GetDataSize(shape.Product(), dtype);
  if (offset < 0 || offset > held - size) {
    TVM_FFI_THROW(ValueError) << "a tensor of " << size << " bytes at " << offset
                              << " does not lie in its block of " << held;
  }
  std::vector<int64_t> strides(shape.size() + 1, 1);  // one more: not null for a scalar
  for (size_t i = shape.size(); i > 1; --i) strides[i - 2] = strides[i - 1] * shape[i - 1];
  DLTensor view = whole;
  view.data = static_cast<char*>(whole.data) + whole.byte_offset + offset;
  view.byte_offset = 0;
  view.dtype = dtype;
  view.ndim = static_cast<int>(shape.size());
  view.shape = const_cast<int64_t*>(shape.data());
  view.strides = strides.data();
  using ffi::details::ObjectUnsafe;
  TVMFFIObjectHandle out;
  TVM_FFI_CHECK_SAFE_CALL(
      TVMFFITensorCreateUnsafeView(ObjectUnsafe::TVMFFIObjectPtrFromObjectRef(block), &view, &out));
  auto made = ObjectUnsafe::ObjectPtrFromOwned<ffi::TensorObj>(static_cast<TVMFFIObject*>(out));
  return ffi::Tensor(made);
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvmhet.TensorAt", TensorAt); }

}  // namespace tvmhet
