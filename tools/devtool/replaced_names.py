# SPDX-License-Identifier: Apache-2.0
"""A check of sources: no identifier has a name that the glossary of the documents replaced."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

# Identifiers that the glossary replaced, and what to write instead. Words of comments and texts are not searched.
_REPLACED = {
    r"\w*twins?": "reference, for a reference run",
    r"oracles?": "expected, for expected output",
    r"rigs?|rig_\w+|\w+_rig|\w*Rig(?![a-z])\w*": "gpu_path, or scene for objects of a test",
    r"_?told_?|told_\w+|tells?|tell_\w+|_tell\w*": "publish, published, response … by what it is",
    r"torpor_room": "torpor_library",
}
_IDENTIFIER = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\\\.|[^\"\\\\\n])*\"|'(?:\\\\.|[^'\\\\\n])*'|[A-Za-z_]\w*", re.S)


def _identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Return the line and the name of each identifier of a source in C++ or Python."""
    text = path.read_text()
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string
        return
    for match in _IDENTIFIER.finditer(text):
        if match.group()[0].isalpha() or match.group()[0] == "_":
            yield text.count("\n", 0, match.start()) + 1, match.group()


def replaced_names(root: Path, paths: Iterable[Path]) -> list[str]:
    """Return the identifiers of the sources among `paths` that have a name of before the glossary."""
    instead = {re.compile(pattern): name for pattern, name in _REPLACED.items()}
    return [
        f"{path.relative_to(root)}:{line}: {name}: write {better}"
        for path in paths
        if path.suffix in (".h", ".cpp", ".py")
        for line, name in _identifiers(path)
        for pattern, better in instead.items()
        if pattern.fullmatch(name)
    ]
