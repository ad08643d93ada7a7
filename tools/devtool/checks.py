"""Checks of documents and sources: every path that a document names exists, and nothing names what it must not."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

# A word in backticks that looks like a path inside the repository: has a slash, or a known file ending.
_PATH = re.compile(r"`([A-Za-z0-9_.][A-Za-z0-9_./-]*/[A-Za-z0-9_./-]*|[A-Za-z0-9_]+\.(?:h|cpp|py|md|txt|json|cmake|toml))`")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
_TOPS = {"base", "allocator", "offload", "kvcache", "scheduler_state", "checkpoint", "engine", "bindings", "tools", "tests", "docs", "cmake"}


def tracked(root: Path) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [root / name for name in listed.splitlines() if (root / name).is_file()]


def missing_paths(root: Path) -> list[str]:
    """Paths that a .md names and that do not exist, from the root or from the document's own folder."""
    problems = []
    for document in tracked(root):
        if document.suffix != ".md":
            continue
        text = document.read_text()
        named = {m for m in _PATH.findall(text) if m.split("/")[0] in _TOPS or "/" not in m} | set(_LINK.findall(text))
        for name in sorted(named):
            if not any((base / name).exists() for base in (root, document.parent)):
                problems.append(f"{document.relative_to(root)}: names {name}, which does not exist")
    return problems


def forbidden_includes(root: Path) -> list[str]:
    """Headers that belong to one place only."""
    rules = {
        r"#include <Python\.h>": (),
        r"#include <cuda(Typedefs)?\.h>": ("allocator/cuda/driver.h",),
        r"#include <pybind11/": ("bindings",),
        r"#include <cereal/types/(memory|polymorphic)\.hpp>": (),
        r"#include <cereal/": ("checkpoint", "tools"),
    }
    problems = []
    for source in tracked(root):
        if source.suffix not in (".h", ".cpp"):
            continue
        name = str(source.relative_to(root))
        for pattern, homes in rules.items():
            if not name.startswith(homes) and re.search(pattern, source.read_text()):
                problems.append(f"{name}: {pattern} belongs to {', '.join(homes) or 'nobody'}")
    return problems


def uses_of_pickle(root: Path) -> list[str]:
    """Nothing of torpor pickles; benchmarks that compare with pickle are the exception."""
    return [
        f"{source.relative_to(root)}: imports pickle"
        for source in tracked(root)
        if source.suffix == ".py" and source.relative_to(root).parts[:2] != ("tools", "bench") and re.search(r"^\s*(import|from) (pickle|cloudpickle)", source.read_text(), re.M)
    ]


def stale_mutants(root: Path) -> list[str]:
    """Faults of tests/mutants.toml whose text is not exactly once in their file: they could not be planted."""
    mutants = tomllib.loads((root / "tests/mutants.toml").read_text())["mutant"]
    counts = ((m, (root / m["file"]).read_text().count(m["replace"]) if (root / m["file"]).is_file() else 0) for m in mutants)
    return [f"tests/mutants.toml: {m['name']!r}: {m['file']} has its text {count} times" for m, count in counts if count != 1]


def all_problems(root: Path) -> list[str]:
    return missing_paths(root) + forbidden_includes(root) + uses_of_pickle(root) + stale_mutants(root)
