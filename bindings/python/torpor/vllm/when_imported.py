# SPDX-License-Identifier: Apache-2.0
"""Does something to a module of vLLM once vLLM has imported it. To import it earlier would cost each process time that
needs the module late or never.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` when the module `name` has been imported; at once if it has been.

    What `action` raises, the import raises.
    """
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watcher(name, action))


class _Watcher(MetaPathFinder):
    """Finds one module as the finders behind it do, and wraps its loader, until an import of it has ended well."""

    def __init__(self, name: str, action: Callable[[], None]):
        self._name, self._action = name, action

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        behind = [each for each in sys.meta_path[sys.meta_path.index(self) + 1 :] if hasattr(each, "find_spec")]
        specs = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loading(spec.loader, self)
        return spec

    def imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._action()


class _Loading(Loader):
    """A module's own loader, and what is to be done behind it."""

    def __init__(self, own: Loader, watcher: _Watcher):
        self._own, self._watcher = own, watcher

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._own  # as if nobody had watched
        self._own.exec_module(module)
        self._watcher.imported()
