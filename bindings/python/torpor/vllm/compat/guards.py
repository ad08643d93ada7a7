"""What a manifest says of vLLM, and whether the installed vLLM agrees. Nothing here changes vLLM or needs an engine.

A guard compares what can be seen without running anything: that a name exists, the whole signature of what is called or
replaced, and, where a field that torpor does not know would be state that it loses, all fields of a class.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Module:
    """Names that are imported from a module or set in it, and what is expected of each."""

    name: str
    functions: dict[str, str] = field(default_factory=dict)  # name: signature without annotations
    classes: tuple[Class, ...] = ()
    names: tuple[str, ...] = ()  # that exist, whatever they are

    def imported(self) -> set[str]:
        return {*self.functions, *self.names, *(cls.name for cls in self.classes)}


@dataclass(frozen=True)
class Class:
    """A class of vLLM. `fields` are those that its instances have; with `exact` they have no other."""

    name: str
    calls: dict[str, str] = field(default_factory=dict)  # method: signature without annotations
    fields: str = ""  # separated by spaces
    exact: bool = False
    properties: str = ""
    members: str = ""  # of an enum or a constant of the class

    def touched(self) -> set[str]:
        return {*self.calls, *self.fields.split(), *self.properties.split(), *self.members.split()}


def problems(modules: Iterable[Module]) -> list[str]:
    """Where the installed vLLM differs from `modules`, each by its full name. Empty if it agrees. Never raises."""
    found: list[str] = []
    for module in modules:
        try:
            found += _module_problems(module, importlib.import_module(module.name))
        except Exception as problem:  # an import can fail in any way
            found.append(f"{module.name} cannot be used: {type(problem).__name__}: {problem}")
    _class_bodies.cache_clear()  # it is large
    return found


def _module_problems(expected: Module, module) -> list[str]:
    found = []
    for name in sorted(expected.imported()):
        if not hasattr(module, name):
            found.append(f"{expected.name} has no {name}")
    for name, signature in expected.functions.items():
        found += _signature_problems(f"{expected.name}.{name}", getattr(module, name, None), signature)
    for cls in expected.classes:
        if hasattr(module, cls.name):
            found += _class_problems(f"{expected.name}.{cls.name}", cls, getattr(module, cls.name))
    return found


def _class_problems(where: str, expected: Class, cls) -> list[str]:
    found = []
    for name, signature in expected.calls.items():
        function = inspect.getattr_static(cls, name, None)
        found += _signature_problems(f"{where}.{name}", function, signature)
    for name in (*expected.properties.split(), *expected.members.split()):
        if not hasattr(cls, name):
            found.append(f"{where} has no {name}")
    for name in expected.properties.split():
        if hasattr(cls, name) and not isinstance(
            inspect.getattr_static(cls, name), (property, functools.cached_property)
        ):
            found.append(f"{where}.{name} is no property")
    if not expected.fields:
        return found
    wanted, fields = set(expected.fields.split()), _declared(cls)
    if expected.exact or not wanted <= fields:  # the source is read only if it must be
        fields = fields_of(cls)
    found += [f"{where} has no field {name}" for name in sorted(wanted - fields)]
    if expected.exact:
        found += [f"{where} has a field {name} that torpor does not know" for name in sorted(fields - wanted)]
    return found


def _signature_problems(where: str, function, expected: str) -> list[str]:
    if function is None:
        return [f"{where} does not exist"]
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    if not callable(function):
        return [f"{where} cannot be called"]
    found = signature_text(function)
    return [] if found == expected else [f"{where} takes ({found}), torpor expects ({expected})"]


def signature_text(function) -> str:
    """All parameters with their kinds and defaults, without annotations."""
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(plain))[1:-1]


def fields_of(cls) -> set[str]:
    """Fields of instances: declared (dataclass, msgspec, named tuple, slots) or assigned to self, here or in a base."""
    return _declared(cls).union(*(_assigned_to_self(base) for base in _bases(cls)))


def _bases(cls) -> list:
    """The class and its bases of the same package."""
    return [base for base in cls.__mro__ if base.__module__.split(".")[0] == cls.__module__.split(".")[0]]


def _declared(cls) -> set[str]:
    found = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for base in _bases(cls):
        found |= set(getattr(base, "__struct_fields__", ()) or getattr(base, "_fields", ()))
        slots = vars(base).get("__slots__", ())
        found |= {slots} if isinstance(slots, str) else set(slots)
    return found


def _assigned_to_self(cls) -> set[str]:
    body = _class_bodies(cls.__module__).get(cls.__qualname__)
    if body is None:
        raise LookupError(f"the source of {cls.__module__}.{cls.__qualname__} is not there")
    found = set()
    for function in ast.walk(body):
        if (
            isinstance(function, ast.Attribute)
            and isinstance(function.ctx, ast.Store)
            and isinstance(function.value, ast.Name)
            and function.value.id == "self"
        ):
            found.add(function.attr)
    return found


@functools.cache
def _class_bodies(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
