"""What a library kernel of several operators calls on a GPU, each call a kernel of its own.

    {conv2d add relu}                    ==>  {conv2d}                       cuDNN joins bias, residual and relu
    {conv2d add}                         ==>  {conv2d} {add}                 in place
    {linear add gelu}                    ==>  {linear} {add} {gelu}          few results: the bias comes afterwards
    {conv2d add}, a window of 1 x 1      ==>  {linear} {add}                 a product of its pixels
    {matmul multiply softmax matmul}     ==>  {attention_prefill}
    {multiply sum multiply subtract}     ==>  {softmax, backward}
    {permute_dims linear}                ==>  {linear}                       a view

torch writes joined convolutions, pooling, layer norms and attention into memory of its own; their results are then
copied to where the module wants them:

    {pooling}                            ==>  {pooling} {copy}
    {conv2d add relu gelu}               ==>  {conv2d} {gelu}                the last call writes in place

Which calls are joined is decided where they are made: `emit/library_folds.py`, `library_cudnn.py` and
`library_products.py`. Libraries on CPUs join other ones, and their kernels are known from measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvmhet.cost.model import KernelDesc, OpDesc
from tvmhet.cost.workload import counts, kernel_of
from tvmhet.emit.library_products import adds_bias_afterwards, is_long

_ENDS = (("add", "relu"), ("add", "add", "relu"), ("relu",))
_SOFTMAX_BACKWARD = ("multiply", "sum", "multiply", "subtract")
_NOT_IN_PLACE = frozenset({"pooling", "layer_norm", "attention_prefill", "attention_decode"})


def library_calls(desc: KernelDesc) -> tuple[KernelDesc, ...]:
    """Return the kernels whose times add up to that of the library kernel `desc` on a GPU, in order."""
    return (*_calls(desc), *result_copy(desc))


def result_copy(desc: KernelDesc) -> tuple[KernelDesc, ...]:
    """Return the copy of a library kernel's result, none where its last call writes in place."""
    ops = [op for op in desc.ops if op.family != "movement"]
    if not ops or not (desc.ops[-1].family == "movement" or _makes_memory(ops)):
        return ()
    num_values = round(counts(desc.ops[-1])[2])
    return (kernel_of(OpDesc("movement", (num_values, num_values), desc.ops[-1].dtype, "copy")),)


def _makes_memory(ops: Sequence[OpDesc]) -> bool:
    """Whether the last call of these operators returns memory of its own."""
    if _is_softmax_backward(ops) or _is_attention(ops):
        return True
    roots = [i for i, op in enumerate(ops) if op.family in _NOT_IN_PLACE]
    if not roots:
        conv = next((i for i, op in enumerate(ops) if op.family == "conv2d"), None)
        return conv is not None and _is_copied(ops[conv], ops[conv + 1 :])
    return all(op.name in ("add", "relu") for op in ops[roots[0] + 1 :])


def _is_copied(conv: OpDesc, after: Sequence[OpDesc]) -> bool:
    """Whether torch makes the last result of a convolution and what follows it in memory of its own."""
    if conv.name == "transpose":
        return all(op.name in ("add", "relu") for op in after)
    return _product(conv, after) is None and len(_joined_end(conv, after)) == len(after) > 0


def _is_softmax_backward(ops: Sequence[OpDesc]) -> bool:
    return tuple(op.name for op in ops) == _SOFTMAX_BACKWARD


def _is_attention(ops: Sequence[OpDesc]) -> bool:
    return sum(op.family == "matmul" for op in ops) == 2 and any(op.family == "softmax" for op in ops)


def _calls(desc: KernelDesc) -> tuple[KernelDesc, ...]:
    ops = [op for op in desc.ops if op.family != "movement"]
    if not ops:
        return (desc,)
    if _is_softmax_backward(ops):
        return (kernel_of(OpDesc("softmax", ops[1].sizes, ops[1].dtype, backward=True)),)
    if _is_attention(ops):
        first, last = (i for i, op in enumerate(ops) if op.family == "matmul")
        masks = [op for op in ops[first:last] if op.name == "where"]  # made a bias first
        attention = kernel_of(_attention(ops[first], ops[last]))
        return (*_apart([*ops[:first], *masks]), attention, *_apart(ops[last + 1 :]))
    root = next((i for i, op in enumerate(ops) if op.family in ("conv2d", "linear")), None)
    if root is None:
        return (desc,) if len(desc.ops) == 1 else _apart(ops)
    if product := _product(ops[root], ops[root + 1 :]):
        return (*_apart(ops[:root]), kernel_of(product), *_apart(ops[root + 1 :]))
    joined = _joined(ops[root], ops[root + 1 :])
    return (*_apart(ops[:root]), kernel_of(ops[root]), *_apart(ops[root + 1 + joined :]))


def _apart(ops: Sequence[OpDesc]) -> tuple[KernelDesc, ...]:
    return tuple(kernel_of(op) for op in ops)


def _product(root: OpDesc, after: Sequence[OpDesc]) -> OpDesc | None:
    """The product that computes a convolution, in spite of what its own call would join of what follows it."""
    if root.family != "conv2d" or root.dtype != "float32" or root.backward or root.name == "transpose":
        return None
    n, c, h, w, oc, kh, kw, oh, ow, groups = root.sizes
    if (kh, kw, groups) != (1, 1, 1) or (oh, ow) != (h, w) or (_joined_end(root, after) and not is_long(c)):
        return None
    return OpDesc("linear", (1, oc, n * oh * ow, c), root.dtype)


def _joined_end(conv: OpDesc, after: Sequence[OpDesc]) -> tuple[str, ...]:
    """What cuDNN joins with a convolution of what follows it."""
    names = tuple(op.name for op in after)
    if conv.family != "conv2d" or conv.name == "transpose" or conv.size("groups") > 1:
        return ()
    return max((end for end in _ENDS if names[: len(end)] == end), key=len, default=())


def _joined(root: OpDesc, after: Sequence[OpDesc]) -> int:
    """How many of the operators after a convolution or product its own call computes."""
    bias = bool(after) and after[0].name == "add" and after[0].size("read") < 2 * after[0].size("write")
    if root.family == "conv2d" and root.size("groups") > 1:
        return int(bias and root.size("groups") == root.size("c") and root.name != "transpose")  # torch's own kernel
    if root.family == "conv2d":
        return len(_joined_end(root, after))
    return int(bias and not adds_bias_afterwards(root.dtype, root.size("b") * root.size("m"), root.size("n")))


def _attention(scores: OpDesc, values: OpDesc) -> OpDesc:
    """Both products of attention, (heads, queries, keys, width) and back, as one operator."""
    heads, q_len, kv_len, width = scores.sizes
    return OpDesc("attention_prefill", (1, heads, heads, q_len, kv_len, max(width, values.size("n")), 0), scores.dtype)
