# SPDX-License-Identifier: Apache-2.0
"""Reads the source of a vLLM without running any of it, for guards.py: any release, on a machine that cannot import it.

What a name stands for is followed through imports and assignments within the package. Where a condition decides which
of several definitions holds, all of them count: their signatures must be the same. Decorators are taken to leave
signatures as they are.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard


@dataclass(frozen=True)
class Import:
    """What an import binds a name to: a name of a module, or with "" the module itself."""

    module: str
    name: str = ""


@dataclass(frozen=True)
class Outside:
    """Something of another package, by its full name."""

    name: str


@dataclass(frozen=True)
class Function:
    module: SourceModule
    node: ast.FunctionDef | ast.AsyncFunctionDef


class SourceTree:
    """The folder of a package."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._modules: dict[str, SourceModule] = {}

    def module(self, name: str) -> SourceModule:
        if name not in self._modules:
            if (path := self._path(name)) is None:
                raise ModuleNotFoundError(f"No module named {name!r}")
            self._modules[name] = SourceModule(self, name, path)
        return self._modules[name]

    def has_module(self, name: str) -> bool:
        return self._path(name) is not None

    def files(self) -> list[Path]:
        """Return the files that were read up to now, sorted."""
        return sorted(path for name in self._modules if (path := self._path(name)) is not None)

    def holds(self, name: str) -> bool:
        """Whether the module is of this package, even if it does not exist."""
        return name.split(".")[0] == self._folder.name

    def _path(self, name: str) -> Path | None:
        if not self.holds(name):
            return None
        place = self._folder.parent.joinpath(*name.split("."))
        return next((p for p in (place / "__init__.py", place.with_suffix(".py")) if p.is_file()), None)


class SourceModule:
    def __init__(self, tree: SourceTree, name: str, path: Path):
        self.tree, self.name = tree, name
        self._package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        body = ast.parse(path.read_text(encoding="utf-8"), str(path)).body
        self._bound = bindings(body, self._package)
        if "__getattr__" in self._bound:  # then names that type checkers are told of are there when asked for
            self._bound = bindings(typing_only(body), self._package, declared=True) | self._bound

    def has(self, name: str) -> bool:
        return bool(self.bound(name)) or self.tree.has_module(f"{self.name}.{name}")

    def names(self) -> set[str]:
        """All that it defines, and what the `__init__` of a package imports from the package."""
        found = ((name, node) for name, bound in self._bound.items() for node in bound if name != "*")
        kept = self.tree.holds if self.name == self._package else lambda module: False
        return {name for name, node in found if not isinstance(node, Import) or kept(node.module)}

    def signature(self, name: str) -> str:
        return _signature(self.bound(name), self)

    def cls(self, name: str) -> SourceClass:
        for found in self.find(name):
            if isinstance(found, SourceClass):
                return found
        raise LookupError(f"{name} is no class")

    def bound(self, name: str) -> list:
        """What binds the name here; by `from … import *` too."""
        if name in self._bound or name.startswith("_"):
            return self._bound.get(name, [])
        stars = [star.module for star in self._bound.get("*", ()) if self.tree.has_module(star.module)]
        return [Import(star, name) for star in stars if self.tree.module(star).bound(name)]

    def find(self, name: str) -> list:
        """What the name may stand for: SourceClass, Function, SourceModule or Outside; nothing for other values."""
        return [found for node in self.bound(name) for found in self.follow(node)]

    def follow(self, node) -> list:
        """The same for what binds a name, or for an expression."""
        match node:
            case ast.ClassDef():
                return [SourceClass(self, node)]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return [Function(self, node)]
            case Import():
                return self._imported(node)
            case ast.Assign() | ast.AnnAssign():
                return [] if node.value is None else self.follow(node.value)
            case ast.Name():
                return self.find(node.id) if self.bound(node.id) else [Outside(node.id)]
            case ast.Attribute():
                return [found for owner in self.follow(node.value) for found in self._attribute(owner, node.attr)]
            case ast.Subscript():  # Base[T]
                return self.follow(node.value)
            case _:
                return []

    def _attribute(self, owner, name: str) -> list:
        if isinstance(owner, SourceModule):
            return self._imported(Import(owner.name, name))
        return [Outside(f"{owner.name}.{name}")] if isinstance(owner, Outside) else []

    def _imported(self, what: Import) -> list:
        if not self.tree.holds(what.module):
            return [Outside(f"{what.module}.{what.name}".rstrip("."))]
        if not what.name:
            return [self.tree.module(what.module)]
        if self.tree.has_module(what.module) and self.tree.module(what.module).bound(what.name):
            return self.tree.module(what.module).find(what.name)
        inner = f"{what.module}.{what.name}"
        return [self.tree.module(inner)] if self.tree.has_module(inner) else []


class SourceClass:
    def __init__(self, module: SourceModule, node: ast.ClassDef):
        self.module, self.node = module, node
        self._bound = bindings(node.body, module.name)

    @property
    def full_name(self) -> str:
        return f"{self.module.name}.{self.node.name}"

    def __eq__(self, other) -> bool:
        return isinstance(other, SourceClass) and self.node is other.node

    def __hash__(self) -> int:
        return id(self.node)

    def has(self, name: str) -> bool:
        return bool(self._inherited(name)[1])

    def is_property(self, name: str) -> bool:
        return all(
            isinstance(node, ast.FunctionDef) and bool({"property", "cached_property"} & decorators(node))
            for node in self._inherited(name)[1]
        )

    def signature(self, name: str) -> str:
        module, bound = self._inherited(name)
        return _signature(bound, module, self._bound)

    def declared(self) -> set[str]:
        return set().union(*(cls._declared_here() for cls in self.line()))

    def fields(self) -> set[str]:
        return set().union(*(cls.own_fields() for cls in self.line()))

    def own_names(self) -> set[str]:
        """What its body binds; bases bind more."""
        return set(self._bound)

    def own_fields(self) -> set[str]:
        return self._declared_here() | assigned_to_self(self.node)

    def find(self, name: str) -> list:
        """What the name may stand for, as of a module."""
        module, bound = self._inherited(name)
        return [found for node in bound for found in module.follow(node)]

    def line(self) -> list[SourceClass]:
        """The class and its bases in this package, each after all that derive from it."""
        order = [self]
        for base in self._bases():
            if isinstance(base, SourceClass):
                further = base.line()
                order = [cls for cls in order if cls not in further] + further
        return order

    def _bases(self) -> list:
        return [found for base in self.node.bases for found in self.module.follow(base)]

    def _inherited(self, name: str) -> tuple[SourceModule, list]:
        """What binds the name in the class or the next base that does, and in which module."""
        for cls in self.line():
            if name in cls._bound:
                return cls.module, cls._bound[name]
        return self.module, []

    def _declared_here(self) -> set[str]:
        slots = [node.value for node in self._bound.get("__slots__", ()) if isinstance(node, ast.Assign)]
        named = [ast.literal_eval(value) for value in slots]
        found = {name for names in named for name in ([names] if isinstance(names, str) else names)}
        return found | annotated(self.node.body) if self._is_record() else found

    def _is_record(self) -> bool:
        """Whether its annotations are fields: a dataclass, a named tuple, a struct of msgspec."""
        if any(self._makes_dataclass(decorator) for decorator in self.node.decorator_list):
            return True
        if any(base == Outside("typing.NamedTuple") for base in self._bases()):
            return True
        return any(base == Outside("msgspec.Struct") for cls in self.line() for base in cls._bases())

    def _makes_dataclass(self, decorator: ast.expr) -> bool:
        decorator = decorator.func if isinstance(decorator, ast.Call) else decorator
        for found in self.module.follow(decorator):
            if isinstance(found, Outside) and found.name.split(".")[-1] == "dataclass":
                return True
            if isinstance(found, Function) and "dataclass_transform" in decorators(found.node):
                return True
        return False


# --- what a body of statements defines --------------------------------------------------------------------------------


def bindings(body: Iterable[ast.stmt], package: str, declared: bool = False) -> dict[str, list]:
    """Each name with all that may be bound to it when the body has run. With `declared`, names without a value too."""
    found: dict[str, list] = {}
    for node in body:
        branches = _branches(node)
        if branches is None:
            for name, bound in _bound_by(node, package, declared):
                found[name] = [*found.get("*", ()), bound] if name == "*" else [bound]
            continue
        inner = [bindings(branch, package, declared) for branch in branches]
        for name in {name for each in inner for name in each}:
            before = [] if all(name in each for each in inner) and name != "*" else found.get(name, [])
            found[name] = before + [bound for each in inner for bound in each.get(name, ())]
    return found


def typing_only(body: Iterable[ast.stmt]) -> list[ast.stmt]:
    """What only type checkers see."""
    return [inner for node in body if isinstance(node, ast.If) and _is_for_typing(node) for inner in node.body]


def annotated(body: Iterable[ast.stmt]) -> set[str]:
    """Names that a record with this body has as fields."""
    found = set()
    for node in body:
        for branch in _branches(node) or ():
            found |= annotated(branch)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = ast.unparse(node.annotation).strip("'\"").split("[")[0].split(".")[-1]
            found |= {node.target.id} if kind not in ("ClassVar", "InitVar", "KW_ONLY") else set()
    return found


def assigned_to_self(body: ast.ClassDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The last names of its decorators."""
    found = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list]
    return {ast.unparse(decorator).split(".")[-1] for decorator in found}


def _branches(node: ast.stmt) -> list[list[ast.stmt]] | None:
    """Bodies of which one or more may run; None for a statement without."""
    match node:
        case ast.If():
            return [node.orelse] if _is_for_typing(node) else [node.body, node.orelse]
        case ast.Try():
            return [[*node.body, *node.orelse], *(handler.body for handler in node.handlers), node.finalbody]
        case ast.For() | ast.While():
            return [node.body, node.orelse]
        case ast.With():
            return [node.body]
        case _:
            return None


def _is_for_typing(node: ast.If) -> bool:
    return ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"


def _bound_by(node: ast.stmt, package: str, declared: bool) -> list[tuple[str, object]]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            keeps = {"overload", "setter", "deleter"} & decorators(node)  # the property or the last definition counts
            return [] if keeps else [(node.name, node)]
        case ast.ClassDef():
            return [(node.name, node)]
        case ast.Import():
            # `import a.b` binds a to a, `import a.b as c` binds c to a.b
            tops = [(a.name.split(".")[0], a) for a in node.names]
            return [(a.asname, Import(a.name)) if a.asname else (top, Import(top)) for top, a in tops]
        case ast.ImportFrom():
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            return [(a.asname or a.name, Import(module, "" if a.name == "*" else a.name)) for a in node.names]
        case ast.Assign():
            return [(name.id, node) for target in node.targets for name in ast.walk(target) if _is_new(name)]
        case ast.AnnAssign() if _is_new(node.target) and (declared or node.value is not None):
            return [(node.target.id, node)]
        case _:
            return []


def _is_new(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


# --- signatures -------------------------------------------------------------------------------------------------------


def _signature(bound: list, module: SourceModule, of_class: dict[str, list] | None = None) -> str:
    """Of what binds a name. `of_class`: names that an assignment in a class body may mean."""
    if not bound:
        raise LookupError("does not exist")
    named = [node.value.id for node in bound if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)]
    meant = [inner for name in named for inner in (of_class or {}).get(name, ())]
    functions = [found for node in meant or bound for found in module.follow(node) if isinstance(found, Function)]
    if not functions:
        raise LookupError("cannot be called")
    return ") or (".join(dict.fromkeys(signature_text(function.node.args) for function in functions))


def signature_text(arguments: ast.arguments) -> str:
    """As of a function that was imported."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    kinds = inspect.Parameter
    parameters = [
        _parameter(item, kinds.POSITIONAL_ONLY if item in arguments.posonlyargs else kinds.POSITIONAL_OR_KEYWORD, value)
        for item, value in zip(positional, defaults, strict=True)
    ]
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg, kinds.VAR_POSITIONAL, None))
    for item, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(item, kinds.KEYWORD_ONLY, value))
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg, kinds.VAR_KEYWORD, None))
    return str(inspect.Signature(parameters))[1:-1]


def _parameter(item: ast.arg, kind, default: ast.expr | None) -> inspect.Parameter:
    return inspect.Parameter(item.arg, kind, default=inspect.Parameter.empty if default is None else _Default(default))


class _Default:
    """Shows a default as its value does."""

    def __init__(self, node: ast.expr):
        try:
            self._text = repr(ast.literal_eval(node))
        except ValueError:
            self._text = ast.unparse(node)

    def __repr__(self) -> str:
        return self._text
