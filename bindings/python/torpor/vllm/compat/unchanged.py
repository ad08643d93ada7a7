# SPDX-License-Identifier: Apache-2.0
"""Which modules of vLLM need not be imported to be compared: their files are those of a release that was compared.

The guards read a module by importing it. That costs a second of CPU time in each process of an engine, most of it for
modules that this process needs late or never: a front end needs no worker, an engine without adapters no vllm.lora.
releases/VERSION.json has a digest for each module of the manifest, over all files that decide what its guards see. A
test compares the manifest of each release with its source, and the digests with the files. So a module whose files
have this digest is as the manifest says.

A module that is imported already is compared as it is now: another plugin may have changed it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType

from torpor.vllm.compat import guards

FOLDER = Path(__file__).with_name("releases")


def to_compare(modules: Iterable[guards.Module], version: str) -> list[guards.Module]:
    """Return those that the guards have to look at. version: of the installed vLLM."""
    known = _known(version.split("+")[0])
    return [module for module in modules if not _is_as_released(module.name, known.get(module.name))]


def digest(package: Path, files: Sequence[str]) -> str:
    """Return the digest of these files. files: paths in the folder that has the package. Raises OSError."""
    found = hashlib.blake2b(digest_size=16)
    for name in files:
        content = (package.parent / name).read_bytes()
        found.update(f"{name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()


def table_of(tree, package: Path, parts: dict[str, tuple[guards.Module, ...]]) -> dict[str, dict]:
    """Return the table of a release: files and digest by module. tree: makes a source.SourceTree of the package."""
    modules: dict[str, list[guards.Module]] = {}
    for module in (module for part in parts.values() for module in part):
        modules.setdefault(module.name, []).append(module)
    found = {}
    for name, expected in sorted(modules.items()):
        read = tree(package)
        if problems := guards.problems(expected, read):
            raise ValueError(f"the manifest does not fit: {problems[0]}")
        files = [path.relative_to(package.parent).as_posix() for path in read.files()]
        found[name] = {"files": files, "digest": digest(package, files)}
    return found


def text_of(table: dict[str, dict]) -> str:
    """Return the table as JSON, a line for each module."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(what)}" for name, what in table.items()) + "\n}\n"


@functools.cache
def _known(release: str) -> dict[str, dict]:
    """Return the table of a release; an empty one if there is none: all modules are compared then."""
    try:
        return json.loads((FOLDER / f"{release}.json").read_text())
    except FileNotFoundError:
        return {}


@functools.cache
def _is_as_on_disk(files: tuple[str, ...], expected: str) -> bool:
    import vllm

    folders = list(vllm.__path__)
    try:
        return len(folders) == 1 and digest(Path(folders[0]), files) == expected
    except OSError:
        return False


def _is_as_released(name: str, known: dict | None) -> bool:
    """Return whether a module is not imported, and would be as in the release."""
    if known is None or name in sys.modules:
        return False
    loaded = [sys.modules[each] for each in map(_module_of, known["files"]) if each in sys.modules]
    return all(map(_is_as_its_file, loaded)) and _is_as_on_disk(tuple(known["files"]), known["digest"])


def _module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_as_its_file(module: ModuleType) -> bool:
    """Return whether no other package has put a function into a class of this module."""
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    functions = [each for cls in classes for member in vars(cls).values() for each in _functions(member)]
    return all(_is_own(each.__globals__.get("__name__", "").split(".")[0]) for each in functions)


def _is_own(package: str) -> bool:
    """Return whether functions of this package are vLLM's, or made for it, as by dataclass and torch.inference_mode."""
    return package in ("vllm", "torch") or package in sys.stdlib_module_names or package.startswith("namedtuple_")


def _functions(member) -> list[FunctionType]:
    """Return the functions that a member of a class is made of."""
    parts = [getattr(member, name, None) for name in ("__func__", "fget", "fset", "func")]
    return [each for each in (member, *parts) if isinstance(each, FunctionType)]
