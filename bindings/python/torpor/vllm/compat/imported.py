"""Reads the installed vLLM by importing it, for guards.py."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import sys

from torpor.vllm.compat import source


def module(name: str) -> ImportedModule:
    return ImportedModule(importlib.import_module(name))


def forget() -> None:
    _class_bodies.cache_clear()  # it is large


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
    body = _class_bodies(cls.__module__).get(cls.__qualname__)
    if body is None:
        raise LookupError(f"the source of {cls.__module__}.{cls.__qualname__} is not there")
    return source.assigned_to_self(body)


@functools.cache
def _class_bodies(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
