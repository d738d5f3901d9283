"""What a function of PyTorch is called here, and which ones touch no data.

Not a list of what is supported: an operation that is not named here is recorded under its own name.
"""

from __future__ import annotations

from typing import Any

# One operation under several names. The reflected forms of what does not commute keep a name of their own.
_SAME = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add",
    "__sub__": "sub", "__isub__": "sub", "__rsub__": "rsub",
    "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul",
    "__truediv__": "div", "__itruediv__": "div", "__div__": "div", "__idiv__": "div",
    "__rtruediv__": "rdiv", "__rdiv__": "rdiv",
    "__floordiv__": "floor_divide", "__ifloordiv__": "floor_divide", "__rfloordiv__": "rfloor_divide",
    "__mod__": "remainder", "__imod__": "remainder", "__rmod__": "rremainder",
    "__pow__": "pow", "__ipow__": "pow", "__rpow__": "rpow",
    "__matmul__": "matmul", "__imatmul__": "matmul", "__rmatmul__": "rmatmul",
    "__neg__": "neg", "negative": "neg", "__pos__": "positive", "__abs__": "abs", "absolute": "abs",
    "__and__": "bitwise_and", "__rand__": "bitwise_and", "__iand__": "bitwise_and",
    "__or__": "bitwise_or", "__ror__": "bitwise_or", "__ior__": "bitwise_or",
    "__xor__": "bitwise_xor", "__rxor__": "bitwise_xor", "__ixor__": "bitwise_xor",
    "__invert__": "bitwise_not", "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le",
    "__gt__": "gt", "__ge__": "ge", "__getitem__": "getitem", "__setitem__": "setitem",
    "__bool__": "bool", "__nonzero__": "bool", "__float__": "float", "__int__": "int",
    "__index__": "index", "__long__": "int", "__complex__": "complex", "__contains__": "contains",
    "__iter__": "unbind", "__array__": "numpy", "__dlpack__": "dlpack", "__deepcopy__": "clone",
    "__repr__": "repr", "__format__": "repr", "__reversed__": "flip",
    "multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div",
    "concat": "cat", "concatenate": "cat", "swapaxes": "transpose", "swapdims": "transpose",
    "max_pool1d_with_indices": "max_pool1d", "max_pool2d_with_indices": "max_pool2d",
    "max_pool3d_with_indices": "max_pool3d",
    "adaptive_max_pool1d_with_indices": "adaptive_max_pool1d",
    "adaptive_max_pool2d_with_indices": "adaptive_max_pool2d",
    "adaptive_max_pool3d_with_indices": "adaptive_max_pool3d",
    "fractional_max_pool2d_with_indices": "fractional_max_pool2d",
    "fractional_max_pool3d_with_indices": "fractional_max_pool3d",
}  # fmt: skip

# Ask about a tensor, not for its data.
_ABOUT = frozenset({
    "__dir__", "__hash__", "__len__", "_is_view", "_is_zerotensor", "_make_subclass",
    "_nested_tensor_size", "broadcast_shapes", "can_cast", "dim", "dim_order", "element_size",
    "get_device", "has_names", "is_autocast_enabled", "is_coalesced", "is_complex", "is_conj",
    "is_contiguous", "is_distributed", "is_floating_point", "is_inference", "is_neg", "is_pinned",
    "is_same_size", "is_set_to", "is_shared", "is_signed", "is_storage", "is_tensor", "ndimension",
    "nelement", "numel", "promote_types", "register_hook", "register_post_accumulate_grad_hook",
    "requires_grad_", "result_type", "retain_grad", "size", "storage_offset", "stride", "sym_numel",
    "sym_size", "sym_stride",
})  # fmt: skip

# Attributes that never hold data; of the others, those that turn out to be a tensor count as data.
_FACTS = frozenset({
    "_version", "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mps",
    "is_nested", "is_quantized", "is_sparse", "is_xpu", "itemsize", "layout", "name", "names",
    "nbytes", "ndim", "output_nr", "requires_grad", "retains_grad", "shape",
})  # fmt: skip

# After these, memory can be written where PyTorch does not see it.
ESCAPES = frozenset({
    "__cuda_array_interface__", "_typed_storage", "const_data_ptr", "data_ptr", "dlpack",
    "mutable_data_ptr", "numpy", "share_memory", "storage", "untyped_storage",
})  # fmt: skip

# What they return is no tensor: from here on the forward code may decide by the values.
READS = frozenset({
    "allclose", "bool", "complex", "contains", "equal", "float", "index", "int", "is_nonzero", "item",
    "dlpack", "numpy", "tolist",
})  # fmt: skip

# These make memory with nothing in it yet: no statement about its values is true.
BLANK = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_quantized", "empty_strided", "new_empty",
    "new_empty_strided",
})  # fmt: skip


def is_access(func: Any) -> bool:
    """Whether `func` reads or sets an attribute of a tensor (`x.shape`, `x.data`, `x.data = y`)."""
    return getattr(func, "__name__", "") in {"__get__", "__set__", "__delete__"}


def asks_about(func: Any) -> bool:
    """Whether `func` asks for a tensor's shape, dtype, place and the like, and touches no data.

    >>> import torch
    >>> asks_about(torch.Tensor.size), asks_about(torch.Tensor.item)
    (True, False)
    """
    name = getattr(func, "__name__", "")
    if is_access(func):
        return getattr(func.__self__, "__name__", "") in _FACTS
    return name in _ABOUT


def name_of(func: Any) -> str:
    """The canonical name of an operation, whichever way it was called.

    >>> import torch
    >>> name_of(torch.Tensor.__iadd__), name_of(torch.relu_), name_of(torch.ops.aten.mul.Tensor)
    ('add', 'relu', 'mul')
    """
    func = getattr(func, "overloadpacket", func)
    name = str(getattr(func, "__name__", type(func).__name__))
    if is_access(func):
        attribute = str(getattr(func.__self__, "__name__", "attribute"))
        return attribute if name == "__get__" else f"{name.strip('_')}_{attribute}"
    if name in _SAME:
        return _SAME[name]
    if not name.startswith("__"):
        name = name.rstrip("_") or name
    return _SAME.get(name, name)
