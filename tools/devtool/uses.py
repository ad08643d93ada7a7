# SPDX-License-Identifier: Apache-2.0
"""Where a package writes and reads fields of these names: by name alone, whatever object they are of."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def of(folder: Path, names: set[str]) -> dict[str, dict[str, list[str]]]:
    """By name and kind ("written", "read"): FILE:LINE and the function, in order."""
    found = {name: {"written": [], "read": []} for name in names}
    if not names:
        return found
    looked_for = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names)))})\b")
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if looked_for.search(text):
            for name, kind, line, function in _in(ast.parse(text), names):
                place = f"{path.relative_to(folder)}:{line}" + (f" ({function})" if function else "")
                found[name][kind].append(place)
    return found


def _in(tree: ast.Module, names: set[str]) -> list[tuple[str, str, int, str]]:
    found = []

    def look(node: ast.AST, inside: str, of_class: bool) -> None:
        if isinstance(node, ast.Attribute) and node.attr in names:
            found.append((node.attr, "read" if isinstance(node.ctx, ast.Load) else "written", node.lineno, inside))
        if isinstance(node, ast.keyword) and node.arg in names:
            found.append((node.arg, "written", node.value.lineno, inside))
        if of_class and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.extend((name, "written", node.lineno, inside) for name in names & {node.target.id})
        named = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        inner = f"{inside}.{node.name}".lstrip(".") if named else inside
        for child in ast.iter_child_nodes(node):
            look(child, inner, isinstance(node, ast.ClassDef))

    look(tree, "", False)
    return found
