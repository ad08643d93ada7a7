# SPDX-License-Identifier: Apache-2.0
"""What a manifest says of vLLM, and whether a vLLM agrees. Nothing here changes vLLM or needs an engine.

A guard compares what can be seen without running anything: that a name exists, the whole signature of what is called or
replaced, and, where a field that torpor does not know would be state that it loses, all fields of a class. What is
seen comes from a reader: of the installed vLLM (imported.py), or of the source of any release (source.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from torpor.vllm.compat import imported


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


class ClassReader(Protocol):
    def has(self, name: str) -> bool: ...

    def is_property(self, name: str) -> bool: ...

    def signature(self, name: str) -> str:
        """All parameters with their kinds and defaults, without annotations. Raises LookupError, saying why not."""

    def declared(self) -> set[str]:
        """Fields that are found without reading what methods do; some of fields(), and quicker."""

    def fields(self) -> set[str]:
        """Of instances: declared (dataclass, msgspec, named tuple, slots) or assigned to self, here or in a base."""


class ModuleReader(Protocol):
    def has(self, name: str) -> bool: ...

    def signature(self, name: str) -> str:
        """As of a class."""

    def cls(self, name: str) -> ClassReader:
        """Raises LookupError where the name stands for something else."""


class Reader(Protocol):
    def module(self, name: str) -> ModuleReader:
        """May raise anything."""


class UnknownField(str):
    """A problem: vLLM has a field, in a class whose fields torpor must all know. `owner`: the class's full name."""

    owner: str

    def __new__(cls, owner: str, name: str):
        problem = super().__new__(cls, f"{owner} has a field {name} that torpor does not know")
        problem.owner = owner
        return problem


def problems(modules: Iterable[Module], reader: Reader = imported) -> list[str]:
    """Where vLLM differs from `modules`, each by its full name. Empty if it agrees. Never raises."""
    found: list[str] = []
    for module in modules:
        try:
            found += _module_problems(module, reader.module(module.name))
        except Exception as problem:  # an import can fail in any way
            found.append(f"{module.name} cannot be used: {type(problem).__name__}: {problem}")
    return found


def _module_problems(expected: Module, module: ModuleReader) -> list[str]:
    found = [f"{expected.name} has no {name}" for name in sorted(expected.imported()) if not module.has(name)]
    for name, signature in expected.functions.items():
        found += _signature_problems(f"{expected.name}.{name}", module, name, signature)
    for cls in expected.classes:
        if module.has(cls.name):
            found += _class_problems(f"{expected.name}.{cls.name}", cls, module.cls(cls.name))
    return found


def _class_problems(where: str, expected: Class, cls: ClassReader) -> list[str]:
    found = []
    for name, signature in expected.calls.items():
        found += _signature_problems(f"{where}.{name}", cls, name, signature)
    for name in (*expected.properties.split(), *expected.members.split()):
        if not cls.has(name):
            found.append(f"{where} has no {name}")
    for name in expected.properties.split():
        if cls.has(name) and not cls.is_property(name):
            found.append(f"{where}.{name} is no property")
    if not expected.fields:
        return found
    wanted, fields = set(expected.fields.split()), cls.declared()
    if expected.exact or not wanted <= fields:
        fields = cls.fields()
    found += [f"{where} has no field {name}" for name in sorted(wanted - fields)]
    if expected.exact:
        found += [UnknownField(where, name) for name in sorted(fields - wanted)]
    return found


def _signature_problems(where: str, owner: ModuleReader | ClassReader, name: str, expected: str) -> list[str]:
    try:
        found = owner.signature(name)
    except LookupError as problem:
        return [f"{where} {problem.args[0]}"]
    return [] if found == expected else [f"{where} takes ({found}), torpor expects ({expected})"]
