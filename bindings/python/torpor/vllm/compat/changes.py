# SPDX-License-Identifier: Apache-2.0
"""Writes down a manifest by what differs from another one's, and finds what has another place in a version."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module

from torpor.vllm.compat.guards import Class, Module


@dataclass(frozen=True)
class Changed:
    """A class that differs: signatures of its methods, names that it does not have, fields that it has besides; of a
    class that may have others too, those of them that are used.
    """

    calls: dict[str, str] = field(default_factory=dict)
    without: str = ""
    also: str = ""
    used: str = ""


@dataclass(frozen=True)
class Moved:
    to: str  # the full name in this version


class Absent:
    """Is not in this version."""


ABSENT = Absent()
Change = Changed | Moved | Absent
Changes = dict[str, Change]  # by the full name in the other version: of a module, or of what is in one


def changed(parts: dict[str, tuple[Module, ...]], changes: Changes) -> dict[str, tuple[Module, ...]]:
    """The manifest `parts` with these changes. Raises ValueError for one that changes nothing."""
    writer = _Writer(changes)
    result = {part: writer.modules(modules) for part, modules in parts.items()}
    if unused := sorted(writer.all_names() - writer.used):
        raise ValueError(f"the other manifest has none of {', '.join(unused)}")
    return result


def find(changes: Changes, module: str, name: str):
    """What the other version has as `name` in `module`, wherever this one has it; None if it does not."""
    change = changes.get(f"{module}.{name}")
    if change is ABSENT or changes.get(module) is ABSENT:
        return None
    if isinstance(change, Moved):
        module, _, name = change.to.rpartition(".")
    elif isinstance(of_module := changes.get(module), Moved):
        module = of_module.to
    return getattr(import_module(module), name)


class _Writer:
    def __init__(self, changes: Changes):
        self._changes = changes
        self.used: set[str] = set()

    def all_names(self) -> set[str]:
        """Every change, and every name that a class is without."""
        classes = {full: change for full, change in self._changes.items() if isinstance(change, Changed)}
        without = {f"{full}.{name}" for full, change in classes.items() for name in change.without.split()}
        return {*self._changes, *without}

    def modules(self, modules: tuple[Module, ...]) -> tuple[Module, ...]:
        found = [new for module in modules for new in self._module(module)]
        return tuple(found)

    def _module(self, module: Module) -> list[Module]:
        change = self._change(module.name)
        if change is ABSENT:
            return []
        if isinstance(change, Moved):
            return [replace(module, name=change.to)]
        changes = {name: self._change(f"{module.name}.{name}") for name in module.imported()}
        kept = {name: found for name, found in changes.items() if found is None or isinstance(found, Changed)}
        classes = [self._class(f"{module.name}.{c.name}", c, kept[c.name]) for c in module.classes if c.name in kept]
        stays = Module(
            module.name,
            functions={name: signature for name, signature in module.functions.items() if name in kept},
            classes=tuple(classes),
            names=tuple(name for name in module.names if name in kept),
        )
        return [stays, *(_moved(module, name, found.to) for name, found in changes.items() if isinstance(found, Moved))]

    def _class(self, full: str, cls: Class, change: Changed | None) -> Class:
        if change is None:
            return cls

        def kept(names: str) -> str:
            self.used |= {f"{full}.{name}" for name in names.split()}
            return " ".join(name for name in names.split() if name not in change.without.split())

        return replace(
            cls,
            calls={name: change.calls.get(name, cls.calls[name]) for name in kept(" ".join(cls.calls)).split()},
            fields=f"{kept(cls.fields)} {change.also if cls.exact else change.used}".strip(),
            properties=kept(cls.properties),
            members=kept(cls.members),
        )

    def _change(self, full: str) -> Change | None:
        if full in self._changes:
            self.used.add(full)
        return self._changes.get(full)


def _moved(module: Module, name: str, to: str) -> Module:
    place, _, last = to.rpartition(".")
    return Module(
        place,
        functions={last: module.functions[name]} if name in module.functions else {},
        classes=tuple(replace(cls, name=last) for cls in module.classes if cls.name == name),
        names=(last,) if name in module.names else (),
    )
