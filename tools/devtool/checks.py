# SPDX-License-Identifier: Apache-2.0
"""Checks of documents and sources: every path that a document names exists, and nothing names what it must not."""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from devtool import documents
from devtool.public_names import private_names
from devtool.reference import problems as reference_differs
from devtool.replaced_names import replaced_names
from devtool.setup import LINT, FOLDERS

# A word in backticks that looks like a path inside the repository: has a slash, or a known file ending.
_PATH = re.compile(
    r"`([A-Za-z0-9_.][A-Za-z0-9_./-]*/[A-Za-z0-9_./-]*|[A-Za-z0-9_]+\.(?:h|cpp|py|md|txt|json|cmake|toml))`"
)
_MEMBER = re.compile(r"`([A-Z]\w*)::(\w+)(?:\(\))?`")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
_TOPS = {*FOLDERS, "tools", "tests", "docs", "cmake"}


def tracked(root: Path) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
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


def missing_members(root: Path) -> list[str]:
    """Members of C++ classes that a .md names and that no file with that class has."""
    files = tracked(root)
    words = [set(re.findall(r"\w+", path.read_text())) for path in files if path.suffix in (".h", ".cpp")]
    return [
        f"{document.relative_to(root)}: names {owner}::{member}, which does not exist"
        for document in files
        if document.suffix == ".md"
        for owner, member in sorted(set(_MEMBER.findall(document.read_text())))
        if not any({owner, member} <= each for each in words)
    ]


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


_INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
_FOLDER = re.compile(r"^(\w+)/ +.*?(knows nobody|depends on nothing|→ ([\w, ]+))$", re.M)


def arrows(root: Path) -> dict[str, set[str]]:
    """Which folders each folder may include, itself among them, as the picture in docs/architecture.md says."""
    allowed: dict[str, set[str]] = {}
    document = root / "docs/architecture.md"
    for folder, _, named in _FOLDER.findall(document.read_text() if document.exists() else ""):
        names = {name.strip() for name in named.split(",") if name.strip()}
        if "all of the above" in names or names & {"engine and below", "console and below", "remote and below"}:
            names = set(allowed) - {"bindings", "tools"}
        allowed[folder] = names | {folder}
    return allowed


def includes(root: Path) -> dict[str, list[str]]:
    """Every C++ source with the sources of the project that it includes."""
    sources = [p for p in tracked(root) if p.suffix in (".h", ".cpp", ".cu")]
    return {str(p.relative_to(root)): _INCLUDE.findall(p.read_text()) for p in sources}


def wrong_arrows(root: Path) -> list[str]:
    """Includes that go against the arrows. Tests may include everything."""
    allowed = arrows(root)
    return [
        f"{source}: includes {name}, but {folder} may include only {', '.join(sorted(allowed[folder]))}"
        for source, names in includes(root).items()
        for name in names
        if (folder := source.split("/")[0]) in allowed
        if (target := name.split("/")[0]) in allowed and target not in allowed[folder]
    ]


def include_cycles(root: Path) -> list[str]:
    """Cycles between the files of a folder; each once, by its first name.

    NAME.h, NAME.cpp and NAME_internal.h, which NAME's sources share, are one file.
    """

    def file(path: str) -> str:
        return path.rsplit(".", 1)[0].removesuffix("_internal")

    edges: dict[str, set[str]] = {}
    for source, names in includes(root).items():
        edges.setdefault(file(source), set()).update(file(n) for n in names if n.split("/")[0] == source.split("/")[0])
    problems = []
    for start in sorted(edges):
        path = _way_back(edges, start)
        if path and start == min(path):
            problems.append(f"files include each other: {' → '.join([*path, start])}")
    return problems


def _way_back(edges: dict[str, set[str]], start: str) -> list[str]:
    """The shortest way from `start` to itself, or nothing."""
    ways = [[start]]
    seen = {start}
    for way in ways:
        for following in sorted(edges.get(way[-1], ())):
            if following == start and len(way) > 1:
                return way
            if following not in seen:
                seen.add(following)
                ways.append([*way, following])
    return []


def uses_of_pickle(root: Path) -> list[str]:
    """Nothing of torpor pickles; benchmarks that compare with pickle are the exception."""
    return [
        f"{source.relative_to(root)}: imports pickle"
        for source in tracked(root)
        if source.suffix == ".py"
        and source.relative_to(root).parts[:2] != ("tools", "bench")
        and re.search(r"^\s*(import|from) (pickle|cloudpickle)", source.read_text(), re.M)
    ]


_WORD_TO_FILL = re.compile(r"(?<!\{)\{[a-z_][\w.]*\}(?!\})")
_ROUTE = re.compile(r"(?:(?:GET|POST|PUT|DELETE) )?/")


def unfilled_words(root: Path) -> list[str]:
    """Texts with a word in braces that nothing fills: the f in front of one was forgotten. Routes have such words."""
    problems = []
    for source in tracked(root):
        if source.suffix != ".py" or source.relative_to(root).parts[0] == "tests":
            continue
        tree = ast.parse(source.read_text())
        filled = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Attribute) and node.attr == "format")
            for part in ast.walk(node)
        }
        problems += [
            f"{source.relative_to(root)}:{node.lineno}: nothing fills {found.group(0)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in filled
            and not _ROUTE.match(node.value)
            and (found := _WORD_TO_FILL.search(node.value))
        ]
    return problems


_ENDS = re.compile(
    r"\b(?:std::|::)?(?<!->)(?<!\.)(abort|exit|_exit|_Exit|quick_exit|terminate)\(|\bassert\(|noexcept\(false\)"
)
# A check for tests: it is asked for in their environment alone.
_MAY_END = {"bindings/module_files.cpp"}


def ends_the_process(root: Path) -> list[str]:
    """The library returns errors (I11). Declarations of functions of its own, and calls of objects, are no ends."""
    return [
        f"{source.relative_to(root)}: {found.group(0)} would end the process"
        for source in tracked(root)
        if source.suffix in (".h", ".cpp")
        and source.relative_to(root).parts[0] in {*FOLDERS, "remote"}
        and str(source.relative_to(root)) not in _MAY_END
        for line in source.read_text().splitlines()
        if (found := _ENDS.search(line.split("//")[0])) and not re.match(r"\s*bool ", line)
    ]


def reached(root: Path, files: list[str]) -> set[str]:
    """Sources of the project that these include, or what they include."""
    edges = includes(root)
    seen, todo = set(files), list(files)
    while todo:
        new = [name for name in edges.get(todo.pop(), ()) if name not in seen]
        seen.update(new)
        todo += new
    return seen


_PROMISES = {f"{letter}{n}" for letter, last in (("I", 12), ("S", 12), ("P", 6)) for n in range(1, last + 1)}
_PROMISE = re.compile(r"^- \*\*(\w+)\*\*", re.M)
_NAMED_TEST = re.compile(r"`([\w/]+\.(?:py|cpp))::(\w+)`")


def broken_promises(root: Path) -> list[str]:
    """Promises of tests/promises.md without a test of their number, and tests that are named there and do not exist."""
    page = root / "tests/promises.md"
    if not page.exists():
        return []
    _, *parts = _PROMISE.split(page.read_text())
    named = dict(zip(parts[::2], map(_NAMED_TEST.findall, parts[1::2]), strict=True))
    problems = []
    for number in sorted(_PROMISES):
        tests = named.get(number, [])
        problems += [
            f"tests/promises.md: {number}: there is no test {name} in {file}"
            for file, name in tests
            if not (root / "tests" / file).is_file()
            or not re.search(rf"(?:TEST\w*\(\s*\w+,|def)\s+{name}\s*\(?", (root / "tests" / file).read_text())
        ]
        has_number = re.compile(rf"(?<![A-Za-z]){number}(?!\d)|(?<=\d){number}(?!\d)|_{number.lower()}_")
        if not any(has_number.search(name) for _, name in tests):
            problems.append(f"tests/promises.md: no test has {number} in its name")
    return problems


def stale_mutants(root: Path) -> list[str]:
    """Faults of tests/mutants.toml that could not be planted: their text is not exactly once in their file, or what
    they make of a file in Python cannot be parsed."""
    problems = []
    for m in tomllib.loads((root / "tests/mutants.toml").read_text())["mutant"]:
        path = root / m["file"]
        text = path.read_text() if path.is_file() else ""
        if (count := text.count(m["replace"])) != 1:
            problems.append(f"tests/mutants.toml: {m['name']!r}: {m['file']} has its text {count} times")
        elif path.suffix == ".py":
            try:
                ast.parse(text.replace(m["replace"], m["by"]))
            except SyntaxError as problem:
                problems.append(f"tests/mutants.toml: {m['name']!r}: {m['file']} would not parse: {problem}")
    return problems


_GTEST = re.compile(r"\bT(?:EST|YPED_TEST)\w*\(\s*(\w+),\s*(\w+)")
_PARAMETERS = re.compile(r"^\w+/(?=[A-Za-z]\w*\.)|/\w+(?=\.)|/[^.]*$")


def mutants_without_test(root: Path) -> list[str]:
    """Faults of tests/mutants.toml whose test does not exist: nothing could notice them."""
    mutants = tomllib.loads((root / "tests/mutants.toml").read_text())["mutant"]
    sources = [p for p in tracked(root) if p.is_relative_to(root / "tests") and p.suffix in (".h", ".cpp")]
    tests = [".".join(test) for source in sources for test in _GTEST.findall(source.read_text())]

    def exists(binary: str, pattern: str) -> bool:
        if binary in ("pytest", "gpu_path"):
            file, _, name = pattern.partition("::")
            path, name = root / file, name.partition("[")[0]
            return path.is_file() and (not name or f"def {name}(" in path.read_text())
        # Without the parameters of Prefix/Suite.Test/0 and Suite/0.Test.
        return any(fnmatch.filter(tests, _PARAMETERS.sub("", one)) for one in pattern.split(":"))

    return [
        f"tests/mutants.toml: {m['name']!r}: there is no test {m['caught_by']}"
        for m in mutants
        if "caught_by" in m and not exists(*m["caught_by"].split(maxsplit=1))
    ]


def unformatted(root: Path) -> list[str]:
    """C++ that clang-format would lay out differently; asked of the version that the setup installs."""
    if shutil.which("clang-format-16") is None or not (root / ".clang-format").exists():
        return []
    sources = [p for p in tracked(root) if p.suffix in (".h", ".cpp", ".cu")]
    done = subprocess.run(["clang-format-16", "--dry-run", *sources], cwd=root, capture_output=True, text=True)
    named = dict.fromkeys(
        line.split(":")[0] for line in done.stderr.splitlines() if "[-Wclang-format-violations]" in line
    )
    return [f"{Path(name).relative_to(root)}: run tools/dev format" for name in named]


def wrong_python(root: Path) -> list[str]:
    """What ruff finds in Python: names not there or not used, long lines, another layout. Asked if it is installed."""
    ruff = LINT / "bin/ruff"
    if not ruff.exists() or not (root / "pyproject.toml").exists():
        return []
    found = []
    for words in (["check", "--output-format", "concise"], ["format", "--check"]):
        done = subprocess.run([ruff, *words, "--no-cache", "--quiet", root], cwd=root, capture_output=True, text=True)
        found += done.stdout.splitlines()
    return [line if " " in line else f"{line}: run tools/dev format" for line in found]


def wrong_types(root: Path) -> list[str]:
    """What mypy finds in the package. Asked if it is installed; what it has learnt makes the next time short."""
    mypy = LINT / "bin/mypy"
    if not mypy.exists() or not (root / "bindings/python/torpor").exists():
        return []
    done = subprocess.run(
        [mypy, "--no-error-summary", "--cache-dir", root / "build/mypy"],
        cwd=root, env=os.environ | {"PYTHONPATH": str(LINT)}, capture_output=True, text=True,
    )  # fmt: skip
    return [line for line in (done.stdout + done.stderr).splitlines() if ": note: " not in line]


_LICENCE = "SPDX-License-Identifier: Apache-2.0"


def without_licence(root: Path) -> list[str]:
    """Sources whose first line, or second behind a shebang, does not name the licence."""
    sources = [path for path in tracked(root) if path.suffix in (".h", ".cpp", ".cu", ".py")]
    return [
        f"{path.relative_to(root)}: the first line is not {_LICENCE}"
        for path in sources
        if _LICENCE not in "".join(path.read_text().splitlines(keepends=True)[:2])
    ]


def unclear_documents(root: Path) -> list[str]:
    """Documents with long lines, words that they must not use, links that lead nowhere (devtool/documents.py)."""
    return documents.problems(root, tracked(root)) + documents.lost_anchors(root, tracked(root))


def long_lines(root: Path) -> list[str]:
    """Lines of CMake's files that are too long; those of other files are found by their formatters."""
    return [
        f"{path.relative_to(root)}:{number}: {len(line)} columns, {documents.COLUMNS} are the most"
        for path in tracked(root)
        if path.name == "CMakeLists.txt" or path.suffix == ".cmake"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > documents.COLUMNS
    ]


def all_problems(root: Path) -> list[str]:
    checks = (
        missing_paths,
        missing_members,
        unclear_documents,
        long_lines,
        lambda root: replaced_names(root, tracked(root)),
        without_licence,
        forbidden_includes,
        wrong_arrows,
        include_cycles,
        uses_of_pickle,
        unfilled_words,
        ends_the_process,
        broken_promises,
        private_names,
        stale_mutants,
        mutants_without_test,
        unformatted,
        wrong_python,
        wrong_types,
        reference_differs,
    )
    return [problem for check in checks for problem in check(root)]
