# SPDX-License-Identifier: Apache-2.0
"""Type stubs say what the compiled module says of itself, and are Python."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_stubs_are_those_of_the_module():
    from torpor import _core

    sys.path.append(str(ROOT / "tools"))
    import stubs

    shipped = (ROOT / "bindings/python/torpor/_core.pyi").read_text()
    assert stubs.stubs(_core) == shipped, "run: tools/dev python tools/stubs.py > bindings/python/torpor/_core.pyi"
    tree = ast.parse(shipped)
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert names == {name for name in vars(_core) if not name.startswith("_")}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            public = {name for name in vars(getattr(_core, node.name)) if not name.startswith("_")}
            said = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            assert public == said - {"__init__"}, node.name
