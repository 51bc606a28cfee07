"""Names of functions in compiled stages, for those who write (`emit`), call (`runtime`) or watch them (`cost`)."""

STORAGES, STEADY = "storages", "steady"  # emit/kept_storages.py
TENSOR_AT = "tvmhet.TensorAt"  # passes/tensor_at.cc, called by what emit/place_tensors.py makes


def is_kernel_call(name: str) -> bool:
    """Whether a call that the VM makes runs a kernel of the plan: no allocation, and of TVM's builtins reshapes only.

    >>> is_kernel_call("fused_relu"), is_kernel_call("vm.builtin.reshape"), is_kernel_call("vm.builtin.alloc_tensor")
    (True, True, False)
    """
    return name == "vm.builtin.reshape" or not (name == TENSOR_AT or name.startswith("vm.builtin."))
