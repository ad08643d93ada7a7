# SPDX-License-Identifier: Apache-2.0
"""tests/golden/vllm/VERSION.json: what a release of vLLM has, where torpor looks; read as its source is (source.py).

Of the classes and modules in the manifest it has all names, so that a manifest that names more of them is checked too;
of functions whose behaviour torpor relies on (relied_on.py), a digest of what they do.
"""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

from devtool.relied_on import RELIED_ON
from devtool.setup import ROOT

FOLDER = ROOT / "tests/golden/vllm"
_UNSEEN = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}  # of a function, for its digest


def path_of(version: str) -> Path:
    return FOLDER / f"{version}.json"


def known() -> dict[str, Golden]:
    """By version, the oldest first."""
    found = [Golden(path) for path in FOLDER.glob("*.json")]
    return {each.version: each for each in sorted(found, key=lambda each: _numbers(each.version))}


def before(version: str) -> Golden | None:
    """Of this very version; else of the newest that is older, or of the newest there is. None where there is none."""
    goldens = known()
    older = [each for name, each in goldens.items() if _numbers(name) <= _numbers(version)]
    return goldens.get(version) or next(reversed(older or list(goldens.values())), None)


def _numbers(version: str) -> tuple[int, ...]:
    """Of something that is no release, more than of any."""
    numbers = version.split("+")[0].split("rc")[0].split(".post")[0].split(".")
    return tuple(int(number) for number in numbers) if all(number.isdecimal() for number in numbers) else (1 << 30,)


# --- written --------------------------------------------------------------------------------------------------------


def text_of(tree, parts: dict, version: str, origin: str) -> str:
    """`tree`: a SourceTree of the release. A line for each module and class, in order."""
    modules, classes = _recorded(tree, [module for part in parts.values() for module in part])
    bodies = {name: digest(tree, name) for name in RELIED_ON}
    content = {"modules": modules, "classes": classes, "bodies": bodies}
    head = "".join(f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in (("vllm", version), ("of", origin)))
    return (
        "{\n" + head + ",\n".join(f"{json.dumps(name)}: {_lines(table)}" for name, table in content.items()) + "\n}\n"
    )


def _lines(table: dict) -> str:
    lines = (f"{json.dumps(name)}: {json.dumps(table[name], separators=(',', ':'))}" for name in sorted(table))
    return "{\n" + ",\n".join(lines) + "\n}"


def _recorded(tree, wanted: list) -> tuple[dict, dict]:
    modules: dict[str, dict] = {}
    classes: dict[str, dict] = {}
    for expected in wanted:
        module = tree.module(expected.name)
        of = modules.setdefault(expected.name, {"functions": {}, "classes": {}, "names": ""})
        for cls in expected.classes:
            found = module.cls(cls.name)
            of["classes"][cls.name] = found.full_name
            for each in found.line():
                classes.setdefault(each.full_name, _class(each))
        names = module.names() | {name for name in expected.imported() if module.has(name)}
        of["functions"] |= _signatures(module, names - of["classes"].keys())
        of["names"] = _words({*of["names"].split(), *names} - of["functions"].keys() - of["classes"].keys())
    for of in modules.values():
        of["functions"] = dict(sorted(of["functions"].items()))
    return modules, classes


def _class(cls) -> dict:
    names = cls.own_names()
    calls = _signatures(cls, names)
    return {
        "bases": " ".join(base.full_name for base in cls.line()[1:]),  # in the order in which they are looked at
        "calls": calls,
        "properties": _words({name for name in names if cls.is_property(name)}),
        "names": _words(names - calls.keys()),
        "fields": _words(cls.own_fields()),
    }


def _words(names: set[str]) -> str:
    return " ".join(sorted(names))


def _signatures(owner, names: set[str]) -> dict[str, str]:
    found = {}
    for name in sorted(names):
        try:
            found[name] = owner.signature(name)
        except LookupError:  # no function
            continue
    return found


def digest(tree, name: str) -> str | None:
    """Of what the function with this full name does: not of its layout, comments, annotations. None: there is none."""
    owner, _, last = name.rpartition(".")
    module, _, cls = owner.rpartition(".")
    try:
        found = (tree.module(owner) if tree.has_module(owner) else tree.module(module).cls(cls)).find(last)
    except (LookupError, ModuleNotFoundError):
        return None
    nodes = [each.node for each in found if hasattr(each, "node") and hasattr(each.node, "args")]
    return hashlib.sha256(repr([_seen(node) for node in nodes]).encode()).hexdigest()[:16] if nodes else None


def _seen(node):
    """The same for each version of Python that reads it."""
    if isinstance(node, list):
        return [_seen(each) for each in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _UNSEEN and value not in (None, [])}
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    return [type(node).__name__, *((name, _seen(value)) for name, value in fields.items())]


# --- read (guards.Reader) ---------------------------------------------------------------------------------------------


class Golden:
    def __init__(self, path: Path):
        content = json.loads(path.read_text())
        self.version: str = content["vllm"]
        self.bodies: dict[str, str | None] = content["bodies"]
        self._modules, self._classes = content["modules"], content["classes"]

    def module(self, name: str) -> GoldenModule:
        return GoldenModule(self, self._modules[name] if name in self._modules else self.unknown(name))

    def of(self, full_name: str) -> dict:
        return self._classes[full_name]

    def unknown(self, what: str):
        raise LookupError(f"nothing is noted of {what}; run tools/dev contract {self.version} --golden")


class GoldenModule:
    def __init__(self, golden: Golden, noted: dict):
        self._golden, self._noted = golden, noted

    def has(self, name: str) -> bool:
        return (
            name in self._noted["functions"] or name in self._noted["classes"] or name in self._noted["names"].split()
        )

    def signature(self, name: str) -> str:
        return _noted_signature(self._noted["functions"], name, self.has(name))

    def cls(self, name: str) -> GoldenClass:
        if name not in self._noted["classes"]:
            self._golden.unknown(f"the class {name}")
        return GoldenClass(self._golden, self._noted["classes"][name])


class GoldenClass:
    def __init__(self, golden: Golden, full_name: str):
        first = golden.of(full_name)
        self._line = [first, *(golden.of(base) for base in first["bases"].split())]

    def has(self, name: str) -> bool:
        return self._owner(name) is not None

    def is_property(self, name: str) -> bool:
        owner = self._owner(name)
        return owner is not None and name in owner["properties"].split()

    def signature(self, name: str) -> str:
        owner = self._owner(name)
        return _noted_signature(owner["calls"] if owner else {}, name, owner is not None)

    def declared(self) -> set[str]:
        return self.fields()

    def fields(self) -> set[str]:
        return {name for cls in self._line for name in cls["fields"].split()}

    def _owner(self, name: str) -> dict | None:
        return next((cls for cls in self._line if name in cls["calls"] or name in cls["names"].split()), None)


def _noted_signature(noted: dict[str, str], name: str, exists: bool) -> str:
    if name not in noted:
        raise LookupError("cannot be called" if exists else "does not exist")
    return noted[name]
