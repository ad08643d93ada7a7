"""Reads the installed vLLM by importing it, for guards.py."""

from __future__ import annotations

import dataclasses
import dis
import functools
import importlib
import inspect
from collections.abc import Iterator
from types import CodeType

_STORE_ATTR = dis.opmap["STORE_ATTR"]


def module(name: str) -> ImportedModule:
    return ImportedModule(importlib.import_module(name))


class ImportedModule:
    def __init__(self, module):
        self._module = module

    def has(self, name: str) -> bool:
        return hasattr(self._module, name)

    def signature(self, name: str) -> str:
        return _signature(getattr(self._module, name, None))

    def cls(self, name: str) -> ImportedClass:
        found = getattr(self._module, name)
        if not isinstance(found, type):
            raise LookupError(f"{name} is no class")
        return ImportedClass(found)


class ImportedClass:
    def __init__(self, cls: type):
        self._cls = cls

    def has(self, name: str) -> bool:
        return hasattr(self._cls, name)

    def is_property(self, name: str) -> bool:
        return isinstance(inspect.getattr_static(self._cls, name), (property, functools.cached_property))

    def signature(self, name: str) -> str:
        return _signature(inspect.getattr_static(self._cls, name, None))

    def declared(self) -> set[str]:
        found = {f.name for f in dataclasses.fields(self._cls)} if dataclasses.is_dataclass(self._cls) else set()
        for base in self._bases():
            found |= set(getattr(base, "__struct_fields__", ()) or getattr(base, "_fields", ()))
            slots = vars(base).get("__slots__", ())
            found |= {slots} if isinstance(slots, str) else set(slots)
        return found

    def fields(self) -> set[str]:
        return self.declared().union(*(_assigned_to_self(base) for base in self._bases()))

    def _bases(self) -> list[type]:
        """The class and its bases of the same package."""
        package = self._cls.__module__.split(".")[0]
        return [base for base in self._cls.__mro__ if base.__module__.split(".")[0] == package]


def signature_text(function) -> str:
    """All parameters with their kinds and defaults, without annotations."""
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(plain))[1:-1]


def _signature(function) -> str:
    if function is None:
        raise LookupError("does not exist")
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    if not callable(function):
        raise LookupError("cannot be called")
    return signature_text(function)


def _assigned_to_self(cls: type) -> set[str]:
    """Attributes that its methods set on `self`. Read from their bytecode: parsing the sources takes over a second."""
    package = cls.__module__.split(".")[0]
    return {name for member in vars(cls).values() for code in _codes(member, package) for name in _set_by(code)}


def _codes(member, package: str) -> Iterator[CodeType]:
    """What the package runs for a member of a class: of methods, properties, and of what they wrap."""
    for name in ("", "fget", "fset", "func", "__func__"):
        function = getattr(member, name, None) if name else member
        while function is not None:
            if getattr(function, "__globals__", {}).get("__name__", "").split(".")[0] == package:
                yield function.__code__
            function = getattr(function, "__wrapped__", None)


def _set_by(code: CodeType) -> Iterator[str]:
    if _STORE_ATTR in code.co_code[::2]:  # quicker than to look at each instruction
        before = None
        for instruction in dis.get_instructions(code):
            if instruction.opcode == _STORE_ATTR:
                loaded = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
                if loaded == "self":
                    yield instruction.argval
            before = instruction
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _set_by(inner)
