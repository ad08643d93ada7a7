# SPDX-License-Identifier: Apache-2.0
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
# Instruction: how many local variables it loads. From Python 3.13 on some load two, named by four bits each.
_LOADS = {code: name.count("LOAD") for name, code in dis.opmap.items() if name.startswith("LOAD_FAST")}


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


@functools.cache
def _set_by(code: CodeType) -> frozenset[str]:
    """Names of attributes that are set on `self`."""
    found: set[str] = set()
    if _STORE_ATTR in code.co_code[::2]:
        found |= set(_set_on_cell(code) if "self" in code.co_cellvars + code.co_freevars else _set_on_local(code))
    return frozenset(found.union(*(_set_by(inner) for inner in code.co_consts if isinstance(inner, CodeType))))


def _set_on_local(code: CodeType) -> Iterator[str]:
    """Decoded here: `dis` takes ten times as long, which every process that starts an engine would wait for."""
    extended, loaded = 0, None  # the variable that the instruction before has put on top of the stack
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = extended | low
        if operation == dis.EXTENDED_ARG:
            extended = argument << 8
            continue
        extended = 0
        if operation == _STORE_ATTR and loaded is not None and code.co_varnames[loaded] == "self":
            yield code.co_names[argument]
        loads = _LOADS.get(operation)
        loaded = None if loads is None else argument if loads == 1 else argument & 15


def _set_on_cell(code: CodeType) -> Iterator[str]:
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opcode == _STORE_ATTR and before is not None and before.argval == "self":
            yield instruction.argval
        if instruction.opcode != dis.EXTENDED_ARG:
            before = instruction
