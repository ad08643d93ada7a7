# SPDX-License-Identifier: Apache-2.0
"""Mixins of torpor in front of classes of vLLM or of a user, as classes that every process finds by a name.

A class that is made at run time cannot be pickled. So each has a name, `MODULE.NAME`, and the module's `__getattr__`
makes the class from NAME in whatever process looks it up. vLLM looks up schedulers and workers in this way. By that
look-up, an engine core or a worker in a process of its own learns that its engine asked for torpor.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


class NamedMixins:
    """The classes with one mixin."""

    def __init__(self, module: str, mixin: type, stock: dict[str, str] | None = None):
        """`module`: its `__getattr__` calls find(). `stock`: classes of vLLM with a short name, and their modules."""
        self._module = module
        self._mixin = mixin
        self._stock = stock or {}
        self._made: dict[type, type] = {}

    def over(self, base: type) -> type:
        """The mixin in front of `base`, which is its `torpor_base`."""
        if base not in self._made:
            names = {"__module__": self._module, "__doc__": base.__doc__, "torpor_base": base}
            made = type(base.__name__, (self._mixin, base), names)
            if self._stock.get(base.__name__) == base.__module__:
                made.__qualname__ = base.__name__  # by which pickle finds it
            elif _is_found_by_name(base):
                made.__qualname__ = _encoded(base)
            self._made[base] = made
        return self._made[base]

    def named(self, base: type) -> str | type:
        """The full name of that class; the class itself where no name leads to `base`."""
        return self.short(_encoded(base)) if _is_found_by_name(base) else self.over(base)

    def named_by(self, given: str | type) -> str | type:
        """The same for a class, or the name of one. One of vLLM's own is not imported: this process may not need it."""
        if isinstance(given, str) and given.startswith("vllm."):
            module, _, name = given.rpartition(".")
            return self.short(_joined(module, name))
        return self.named(resolved(given))

    def short(self, name: str) -> str:
        """The full name of that class over one of vLLM's with a short name."""
        return f"{self._module}.{name}"

    def find(self, name: str) -> type:
        """For `__getattr__` of the module. Raises AttributeError for a name that leads to no class."""
        if name in self._stock:
            return self.over(getattr(importlib.import_module(self._stock[name]), name))
        module, slash, inside = name.partition("/")
        if not slash:
            raise AttributeError(f"module {self._module!r} has no attribute {name!r}")
        found: Any = importlib.import_module(module.replace(":", "."))
        return self.over(functools.reduce(getattr, inside.split(":"), found))

    def has(self, given: str | type) -> bool:
        """Whether it is such a class, or the name of one."""
        if isinstance(given, str):
            return given.startswith(f"{self._module}.")
        return isinstance(given, type) and issubclass(given, self._mixin)


def resolved(given: str | type):
    """The class that a name, as vLLM's arguments have it, leads to."""
    if not isinstance(given, str):
        return given
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(given)


def _encoded(cls: type) -> str:
    """Its full name without a dot: vLLM splits names there."""
    return _joined(cls.__module__, cls.__qualname__)


def _joined(module: str, name: str) -> str:
    return f"{module}/{name}".replace(".", ":")


def _is_found_by_name(cls: type) -> bool:
    try:
        found = functools.reduce(getattr, cls.__qualname__.split("."), importlib.import_module(cls.__module__))
    except (ImportError, AttributeError):
        return False
    return found is cls
