"""Keys of the attributes that tvmhet's passes leave in a module."""

STAGE_ATTR = "tvmhet.stage"  # int: the 0-based stage a function is
KERNEL_ATTR = "tvmhet.kernel"  # str: the planned kernel a private function is
BRANCHES_ATTR = "tvmhet.branches"  # str: JSON, [work, number of kernels] of each branch that a function's calls make
POOLED_ATTR = "tvmhet.pooled"  # bool: a function that takes memory in turn with others, of one pool
PRIMITIVE_ATTR = "Primitive"  # TVM's own mark: FuseTIR makes one PrimFunc of such a function
NUM_INPUT_ATTR = "num_input"  # TVM's own mark: parameters of main after this many are weights
NUM_STATE_ATTR = "tvmhet.num_state"  # int: so many inputs of main, the last ones, become as many results, the last ones
NUM_SESSIONS_ATTR = "tvmhet.num_sessions"  # int: how many sessions have states of their own, 1 if it is not there
LIBRARY_FUNCTION = "tvmhet.library"  # the packed function that runs a library kernel
