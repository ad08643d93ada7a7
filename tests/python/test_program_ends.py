# SPDX-License-Identifier: Apache-2.0
"""An engine in a user's process never ends that process: what could is reached in processes of torpor's own alone."""

import ast
from pathlib import Path

import torpor

ADAPTER = Path(torpor.__file__).parent
ENDS_A_PROCESS = {
    ("os", "_exit"), ("os", "abort"), ("os", "kill"), ("os", "killpg"), ("os", "execv"), ("os", "execve"),
    ("sys", "exit"), ("signal", "raise_signal"), ("signal", "pthread_kill"), ("signal", "alarm"),
    ("signal", "setitimer"), ("faulthandler", "dump_traceback_later"),
}  # fmt: skip
NAMES = {"exit", "quit", "SystemExit", "KeyboardInterrupt"}
# Where it is, and why it is no user's process.
KNOWN = {
    # An engine core with a process of its own: test_engine_core.py has the condition.
    ("vllm/engine_core.py", "watch", "os._exit"),
    # The server's process: only the server's package imports this module, see below.
    ("vllm/server/ending.py", "_begin_to_leave", "os.kill"),
    ("vllm/server/ending.py", "_noticed", "os._exit"),
    # Commands, run by their names.
    ("vllm/serve.py", "take_options", "sys.exit"),
    ("vllm/serve.py", "", "sys.exit"),
    ("vllm/replay.py", "", "sys.exit"),
    ("__main__.py", "", "sys.exit"),
    ("console/__main__.py", "", "sys.exit"),
}


def ends(tree: ast.AST, function: str = ""):
    """(function, call) of whatever can end the process, also where it is only named."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in ENDS_A_PROCESS:
                yield inside, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (node.module, alias.name) in ENDS_A_PROCESS:
                    yield inside, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(raised, ast.Name) and raised.id in NAMES:
                yield inside, raised.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
            yield inside, node.func.id
        yield from ends(node, inside)


def modules():
    for path in sorted(ADAPTER.rglob("*.py")):
        yield path.relative_to(ADAPTER).as_posix(), ast.parse(path.read_text())


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_it_finds_what_ends_a_process():
    text = """
import os, sys
from os import _exit
def a():
    exit(1)
def b():
    def c():
        os.kill(1, 2)
    raise SystemExit
stop = sys.exit
"""
    assert set(ends(ast.parse(text))) == {
        ("", "os._exit"), ("a", "exit"), ("c", "os.kill"), ("b", "SystemExit"), ("", "sys.exit"),
    }  # fmt: skip


def test_what_can_end_a_process_is_known():
    found = {(name, *each) for name, tree in modules() for each in ends(tree)}
    assert found - KNOWN == set(), "an engine may be in a user's process: raise an error there"
    assert KNOWN - found == set(), "these are gone"


def test_only_vllms_server_gets_to_the_server():
    """Its package is imported by itself, by the command, and by vLLM, which builds a server: the entry point."""
    importers = {
        name
        for name, tree in modules()
        if not name.startswith("vllm/server/") and any(each.startswith("torpor.vllm.server") for each in imported(tree))
    }
    assert importers == {"vllm/serve.py"}
    assert {name for name, tree in modules() if "torpor.vllm.serve" in imported(tree)} == set()
