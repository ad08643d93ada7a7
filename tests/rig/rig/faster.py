# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter finds out about types and shapes in each operation of a kernel, which takes most of a step.

Here that is found out once for each type and shape. Values and types are what they were: each function below asks the
stock one whenever it has not seen the case. tests/python/test_rig.py runs the same kernels both ways.
"""

from __future__ import annotations


def install(interpreter) -> None:
    """Before interpreter._patch_lang() is called."""
    import triton.language as tl

    _call_builtins_directly(interpreter)
    _unwrap_what_is_wrapped(tl.core)
    _shapes_once(tl.core)
    _equal_if_the_same(tl.core)
    _types_as_they_are(interpreter, tl.core)
    _combine_types_once(interpreter.TritonSemantic, tl.core)
    _check_sizes_by_name(interpreter, tl.core)


def _call_builtins_directly(interpreter) -> None:
    """Not through a function that looks whether `_semantic` is given: it is."""

    def patch_attr(obj, name, member, builder, scope):
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def _unwrap_what_is_wrapped(core) -> None:
    stock = core._unwrap_if_constexpr

    def unwrap(value):
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind is core.tensor or kind is int else stock(value)

    core._unwrap_if_constexpr = unwrap


def _shapes_once(core) -> None:
    """Blocks of one shape share it: as block types have it, and as tensors have it (in constexprs)."""
    stock = core.block_type.__init__
    of_scalars = core.constexpr(1), core.tuple([])
    shapes, names = {}, {}

    def init_block_type(self, element_ty, shape) -> None:
        key = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        named = element_ty.name, key
        if named not in names:
            stock(self, element_ty, shape)
            of_tensors = core.constexpr(self.numel), core.tuple([core.constexpr(size) for size in self.shape])
            names[named] = self.name, *shapes.setdefault(key, (self.shape, self.numel, of_tensors))
        self.element_ty = element_ty
        self.name, self.shape, self.numel, self.of_tensors = names[named]

    def init_tensor(self, handle, type) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else of_scalars

    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor


def _equal_if_the_same(core) -> None:
    for kind in (core.dtype, core.pointer_type):
        stock = kind.__eq__
        kind.__eq__ = lambda self, other, stock=stock: self is other or stock(self, other)
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    core.dtype.is_int = lambda self: self.name in integers


def _types_as_they_are(interpreter, core) -> None:
    """What the interpreter has for a type of the compiler is the type itself."""
    core.block_type.to_ir = lambda self, builder: self
    stock, known = interpreter._patch_lang_core, {}

    def patch_lang_core(lang, scope) -> None:
        stock(lang, scope)
        to_ir = lang.dtype.to_ir

        def to_ir_once(self, builder):
            if self.name not in known:
                known[self.name] = to_ir(self, builder)
            return known[self.name]

        scope.set_attr(lang.dtype, "to_ir", to_ir_once)

    interpreter._patch_lang_core = patch_lang_core


def _combine_types_once(semantic, core) -> None:
    """Of two operands: the type they are computed in, and their shape. Most have one type and one shape already."""
    computation_type, cast = semantic.computation_type_impl, semantic.cast
    broadcast, check_types = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl
    known = {}

    def computation_type_once(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = computation_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return known[key]

    def cast_to_another(self, input, dst_ty, *options, **more):
        return input if input.dtype is dst_ty.scalar else cast(self, input, dst_ty, *options, **more)

    def broadcast_to_another(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block():
            same = left.shape is right.shape
        else:
            same = left.is_block() == right.is_block()
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    def check_others(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        same = type(lhs) is core.tensor is type(rhs) and lhs.dtype is rhs.dtype
        if same and not div_or_mod and not lhs.dtype.is_ptr():
            return self.broadcast_impl_value(lhs, rhs)
        return check_types(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.computation_type_impl, semantic.cast = computation_type_once, cast_to_another
    semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl = broadcast_to_another, check_others


def _check_sizes_by_name(interpreter, core) -> None:
    """That a value is no wider than its type."""
    bytes_of = {
        kind.name: max(8, kind.primitive_bitwidth) // 8
        for kind in vars(core).values()
        if type(kind) is core.dtype and hasattr(kind, "primitive_bitwidth")
    }

    def init(self, data, dtype, attr=None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > bytes_of.get(dtype.name, 8):  # pointers have 8
            self.__post_init__()

    interpreter.TensorHandle.__init__ = init
