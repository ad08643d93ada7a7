# SPDX-License-Identifier: Apache-2.0
"""Runs kernels of vLLM's GPU path as they are written, with NumPy for Triton's language.

Triton's interpreter makes objects of types and shapes for every operation, which takes most of a step on the GPU path.
Here a kernel's own source runs with a small `tl`: a value is a NumPy array or scalar, a pointer is an address. Results
are the stock interpreter's, bit for bit (tests/python/test_gpu_path_setup.py runs both). Only the kernels of KERNELS
run so, and of their launches those whose tensors have a type that NumPy has; all else is the interpreter's.

Type rules, from Triton's semantics (triton/language/semantic.py): a Python number takes the other operand's type, but
for a float beside an integer, which gives float32; of an integer and a float the float's type counts; of two integers
the wider one, of equal width the unsigned one.
"""

from __future__ import annotations

import builtins
import inspect
import operator
import types

import numpy as np

KERNELS = frozenset(
    "_apply_grammar_bitmask_kernel _apply_write_kernel _bias_kernel _combine_sampled_and_draft_tokens_kernel "
    "_compute_local_logits_stats_kernel _compute_slot_mappings_kernel _expand_idx_mapping_kernel "
    "_gather_block_tables_kernel _gather_draft_sampled_kernel _get_num_sampled_and_rejected_kernel "
    "_gumbel_sample_kernel _insert_resampled_kernel _min_p_kernel _ngram_finalize_kernel _ngram_scan_kernel "
    "_penalties_kernel _post_update_kernel _prepare_pos_seq_lens_kernel _prepare_prefill_inputs_kernel "
    "_prompt_logprobs_token_ids_kernel _rejection_kernel _resample_kernel _temperature_kernel".split()
)
_OF_TORCH = ("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "float32", "float64", "bool")
_LANGUAGE = ("triton.language", "triton.language.core", "triton.language.math", "triton.language.standard")


class Type:
    """A type of values."""

    def __init__(self, name: str):
        self.name = name
        self.np = np.dtype(np.bool_ if name == "int1" else name)
        self.primitive_bitwidth = 1 if name == "int1" else 8 * self.np.itemsize
        self.c = np.ctypeslib.as_ctypes_type(self.np)

    def is_int(self) -> bool:
        return self.np.kind in "biu"


TYPES = {name: Type(name) for name in "int1 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64".split()}
_BY_NP = {kind.np: kind for kind in TYPES.values()}


class PointerType:
    def __init__(self, to: Type):
        self.to = to


class Value:
    """Numbers of one type, or one number."""

    __slots__ = ("data",)

    def __init__(self, data):
        self.data = data

    @property
    def dtype(self) -> Type:
        return _BY_NP[self.data.dtype]

    @property
    def shape(self):
        return self.data.shape

    def to(self, kind, bitcast: bool = False) -> Value:
        if isinstance(kind, PointerType):
            return Pointer(self.data.astype(np.int64), kind.to)
        if bitcast and kind.np.itemsize == self.data.dtype.itemsize:
            return Value(self.data.view(kind.np))
        return self if self.data.dtype == kind.np else Value(self.data.astype(kind.np))

    def reshape(self, *shape) -> Value:
        return Value(self.data.reshape(*shape))

    def __getitem__(self, at) -> Value:
        return Value(self.data[at])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __invert__(self) -> Value:
        return Value(~self.data)


def _promoted(a: np.dtype, b: np.dtype) -> np.dtype:
    if a.kind == "f" or b.kind == "f":
        return max((kind for kind in (a, b) if kind.kind == "f"), key=lambda kind: kind.itemsize)
    if a.itemsize != b.itemsize or "b" in (a.kind, b.kind):
        return a if a.kind != "b" and (b.kind == "b" or a.itemsize > b.itemsize) else b
    return a if a.kind == "u" else b


_known: dict[tuple[np.dtype, np.dtype], np.dtype] = {}


def _pair(a, b):
    """Return both operands as NumPy has them, of one type."""
    if type(a) is not Value:
        b = b.data
        kind = b.dtype
        if type(a) is float and kind.kind != "f":
            kind, b = np.dtype(np.float32), b.astype(np.float32)
        return kind.type(a), b
    if type(b) is not Value:
        other, one = _pair(b, a)
        return one, other
    a, b = a.data, b.data
    if a.dtype is b.dtype or a.dtype == b.dtype:
        return a, b
    key = a.dtype, b.dtype
    if key not in _known:
        _known[key] = _promoted(*key)
    kind = _known[key]
    return (a if a.dtype == kind else a.astype(kind)), (b if b.dtype == kind else b.astype(kind))


def _binary(function):
    def forward(self, other):
        if type(other) is Pointer:
            return NotImplemented
        a, b = _pair(self, other)
        return Value(function(a, b))

    def backward(self, other):
        b, a = _pair(self, other)
        return Value(function(a, b))

    return forward, backward


def _divide(a, b):
    """Triton computes the quotient of two integers in float32."""
    return a / b if a.dtype.kind == "f" else a.astype(np.float32) / b.astype(np.float32)


def _quotient(a, b):
    """Rounded towards zero, as the remainder has the sign of `a`."""
    return (a - np.fmod(a, b)) // b


for _name, _function in {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": _divide, "floordiv": _quotient,
    "mod": np.fmod, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "lshift": operator.lshift,
    "rshift": operator.rshift,
}.items():  # fmt: skip
    _forward, _backward = _binary(_function)
    setattr(Value, f"__{_name}__", _forward)
    setattr(Value, f"__r{_name}__", _backward)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _binary(getattr(operator, _name))[0])


class Pointer:
    """An address, or an array of addresses, of values of one type."""

    __slots__ = ("addresses", "to_type")

    def __init__(self, addresses, to_type: Type):
        self.addresses, self.to_type = addresses, to_type

    def __add__(self, count) -> Pointer:
        if type(count) is Value:
            data = count.data
            count = int(data) if data.ndim == 0 else data.astype(np.int64)
        return Pointer(self.addresses + count * self.to_type.np.itemsize, self.to_type)

    __radd__ = __add__

    def __sub__(self, count) -> Pointer:
        return self + (-count)


def _array(value, kind: np.dtype, shape):
    data = value.data if type(value) is Value else value
    return np.ascontiguousarray(np.broadcast_to(np.asarray(data, dtype=kind), shape))


def _shape(*parts):
    return np.broadcast_shapes(*(part.shape for part in parts if isinstance(part, np.ndarray)))


def load(pointer: Pointer, mask=None, other=None, **_) -> Value:
    kind, at = pointer.to_type, pointer.addresses
    data = mask.data if type(mask) is Value else mask
    if not isinstance(at, np.ndarray) and not isinstance(data, np.ndarray):
        if data is None or data:
            return Value(kind.np.type(kind.c.from_address(int(at)).value))
        return Value(kind.np.type(0 if other is None else other))
    shape = _shape(at, data)
    at = np.ascontiguousarray(np.broadcast_to(at, shape)).astype(np.uint64)
    mask = _array(True if data is None else data, np.dtype(np.bool_), shape)
    return Value(_native().load(at, mask, _array(0 if other is None else other, kind.np, shape), kind.np))


def store(pointer: Pointer, value, mask=None, **_) -> None:
    kind, at = pointer.to_type, pointer.addresses
    data = mask.data if type(mask) is Value else mask
    content = value.data if type(value) is Value else value
    if not any(isinstance(each, np.ndarray) for each in (at, data, content)):
        if data is None or data:
            kind.c.from_address(int(at)).value = kind.np.type(content).item()
        return
    shape = _shape(at, data, content)
    at = np.ascontiguousarray(np.broadcast_to(at, shape)).astype(np.uint64)
    content = np.ascontiguousarray(np.broadcast_to(np.asarray(content).astype(kind.np), shape))
    _native().store(at, content, _array(True if data is None else data, np.dtype(np.bool_), shape))


def _native():
    from triton._C.libtriton import interpreter

    return interpreter


def _where(condition, a, b) -> Value:
    if type(a) is Value or type(b) is Value:
        a, b = _pair(a, b)
    else:
        kind = np.float32 if float in (type(a), type(b)) else np.int32
        a, b = kind(a), kind(b)
    return Value(np.where(condition.data if type(condition) is Value else condition, a, b)[()])


def _of_two(function):
    def call(a, b, **_):
        if type(a) is not Value and type(b) is not Value:
            return function(a, b).item()
        return Value(function(*_pair(a, b)))

    return call


def _largest(value, axis=None, return_indices=False, **_):
    best = Value(value.data.max(axis=axis))
    return (best, Value(np.asarray(value.data.argmax(axis=axis), dtype=np.int32)[()])) if return_indices else best


def _high_half(a, b) -> Value:
    a, b = _pair(a, b)
    return Value(((a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32))


def _value(number) -> Value:
    if type(number) is Value:
        return number
    whole = np.int32 if -(2**31) <= number < 2**31 else np.int64
    return Value(np.float32(number) if type(number) is float else whole(number))


def _range(*bounds, **_) -> range:
    """range() for loops of kernels, whose bounds may be values."""
    return range(*(operator.index(bound) for bound in bounds))


def _check(condition, *_) -> None:
    assert condition


def _same(value, *_, **__):
    return value


def language(place) -> types.SimpleNamespace:
    """Return the module that kernels use as `tl`. `place` holds the program's place in the grid, and the grid."""
    binary = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
    return types.SimpleNamespace(
        **TYPES,
        **{name: lambda a, b, call=call, **_: call(a, b) for name, call in binary.items()},
        program_id=lambda axis: Value(np.int32(place.at[axis])),
        num_programs=lambda axis: Value(np.int32(place.of[axis])),
        arange=lambda start, end: Value(np.arange(start, end, dtype=np.int32)),
        load=load,
        store=store,
        where=_where,
        minimum=_of_two(np.minimum),
        maximum=_of_two(np.maximum),
        max=_largest,
        argmax=lambda value, axis: _largest(value, axis, return_indices=True)[1],
        sum=lambda value, axis=None, **_: Value(value.data.sum(axis=axis, dtype=value.data.dtype)),
        log=lambda value: Value(np.log(value.data)),
        exp=lambda value: Value(np.exp(value.data)),
        umulhi=_high_half,
        full=lambda shape, value, dtype: Value(np.full(shape, value, dtype=dtype.np)[()]),
        zeros=lambda shape, dtype: Value(np.zeros(shape, dtype=dtype.np)[()]),
        zeros_like=lambda value: Value(np.zeros_like(value.data)[()]),
        cdiv=lambda a, b: (a + (b - 1)) // b,
        to_tensor=_value,
        cast=lambda value, kind, **options: _value(value).to(kind, **options),
        pointer_type=PointerType,
        range=_range,
        static_range=_range,
        static_assert=_check,
        debug_barrier=lambda: None,
        constexpr=_same,
        multiple_of=_same,
    )


class Place:
    """Where the running program is in the grid, and the grid."""

    at = of = (0, 0, 0)


class Translator:
    """Makes functions that compute with Values of Triton's functions, as they are written."""

    def __init__(self) -> None:
        from triton.language import random

        self.place = Place()
        self._made: dict[types.FunctionType, types.FunctionType] = {}
        self._language = language(self.place)
        for name in ("rand", "randint", "randint4x"):
            setattr(self._language, name, self.function(getattr(random, name).fn))

    def function(self, source: types.FunctionType) -> types.FunctionType:
        if source not in self._made:
            names: dict[str, object] = {"__builtins__": builtins, "range": _range}
            made = types.FunctionType(source.__code__, names, source.__name__, None, source.__closure__)
            self._made[source] = made  # before its names are looked at: it may call itself
            made.__defaults__ = tuple(map(self._plain, source.__defaults__ or ())) or None
            made.__kwdefaults__ = {name: self._plain(value) for name, value in (source.__kwdefaults__ or {}).items()}
            for name in set(source.__code__.co_names) & set(source.__globals__):
                names[name] = self._plain(source.__globals__[name])
        return self._made[source]

    def _plain(self, value):
        from triton.language import constexpr
        from triton.runtime.interpreter import InterpretedFunction

        if isinstance(value, constexpr):
            return value.value
        if isinstance(value, InterpretedFunction):
            return self.function(value.fn)
        if isinstance(value, types.ModuleType) and value.__name__ in _LANGUAGE:
            return self._language
        return value


def _argument(value):
    """Return the argument as a kernel takes it; NotImplemented for a tensor of a type that NumPy has not."""
    kind = getattr(value, "dtype", None)
    if kind is None:
        return value
    name = str(kind).removeprefix("torch.")
    if name not in _OF_TORCH or not hasattr(value, "data_ptr"):
        return NotImplemented
    return Pointer(value.data_ptr(), TYPES["int1" if name == "bool" else name])


def install(interpreter) -> None:
    """Replace the interpreter's way to run the programs of a grid, for the kernels of KERNELS."""
    translator = Translator()
    stock = interpreter.InterpretedFunction.run
    signatures: dict[types.FunctionType, inspect.Signature] = {}

    def run(self, *args, grid, warmup, **kwargs):
        if warmup or self.fn.__name__ not in KERNELS or self.pre_run_hooks:
            return stock(self, *args, grid=grid, warmup=warmup, **kwargs)
        if self.fn not in signatures:
            signatures[self.fn] = inspect.signature(self.fn)
        signature = signatures[self.fn]
        bound = signature.bind(*args, **{name: kwargs[name] for name in kwargs if name in signature.parameters})
        named = {name: _argument(value) for name, value in bound.arguments.items()}
        if any(value is NotImplemented for value in named.values()):
            return stock(self, *args, grid=grid, warmup=warmup, **kwargs)
        function, place = translator.function(self.fn), translator.place
        sizes = grid(bound.arguments) if callable(grid) else grid
        place.of = (*sizes, 1, 1, 1)[:3]
        with np.errstate(all="ignore"):
            for at in np.ndindex(place.of):
                place.at = at
                function(**named)

    interpreter.InterpretedFunction.run = run
