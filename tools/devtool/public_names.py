# SPDX-License-Identifier: Apache-2.0
"""Checks the names that users write or read: options, Python, HTTP, metrics, events. Each uses the glossary's words.

The names are read from the sources, so that a new one is checked where it is made. Nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

VLLM = "bindings/python/torpor/vllm"

# Words that no public name has, and what to use in their place.
PRIVATE = {
    "room": "channel of a swap, library, buffer or headroom",
    "sign": "heartbeat",
    "silence": "peer_timeout",
    "told": "events",
    "late": "deferred",
    "forgone": "skipped",
    "behind": "background",
    "stood": "pause_seconds",
    "give": "swap_out",
    "take": "swap_in",
    "prove": "verify",
    "stamp": "version",
    "place": "what it is: a slot, a location, an address",
    "settle": "wait_idle",
    "up": "onboard",
    "down": "offload",
    "ask": "lookup",
    "rolled": "replayed",
    "answer": "response",
    "answers": "responses",
    "delivery": "response_log",
    "twin": "reference",
    "oracle": "expected",
    "guard": "check",
    "mark": "coverage",
    "remote": "object_store or kv_store",
}
# Whole names that say too little.
TOO_SHORT = {
    "dir": "checkpoint_dir, or another KIND_dir",
    "directory": "checkpoint_dir, or another KIND_dir",
    "lost": "unrecoverable, unreadable or missing",
    "left": "pending",
}
# Ends of options that are durations.
_NO_UNIT = re.compile(r"_(after|every|timeout|interval|term|age|period)$")
# Public names that have such a word, each with its reason.
ALLOWED = {
    "lost": "the event that says how many events are missing",
    "wake_up": "vLLM's own name",
}


def _classes(path: str, *names: str) -> Callable[[Path], Iterator[str]]:
    """The fields of these classes, of all without `names`."""

    def found(root: Path) -> Iterator[str]:
        for node in ast.parse((root / path).read_text()).body:
            if isinstance(node, ast.ClassDef) and (not names or node.name in names):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        yield item.target.id

    return found


def _functions(path: str) -> Callable[[Path], Iterator[str]]:
    """The functions of a module without underscore, their parameters with a default, and those of its classes."""

    def found(root: Path) -> Iterator[str]:
        for node in ast.walk(ast.parse((root / path).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                arguments = node.args
                with_default = arguments.args[len(arguments.args) - len(arguments.defaults) :] + arguments.kwonlyargs
                yield from (node.name, *(each.arg for each in with_default))

    return found


def _strings(path: str, pattern: str) -> Callable[[Path], Iterator[str]]:
    """What a pattern's group finds in a source."""

    def found(root: Path) -> Iterator[str]:
        yield from re.findall(pattern, (root / path).read_text(), re.M)

    return found


_METRIC = r'"(torpor_[a-z_]+)"'
_QUOTED = r'"([a-z][a-z_ ]*)"'
SOURCES: dict[str, Callable[[Path], Iterator[str]]] = {
    f"{VLLM}/options.py": _classes(f"{VLLM}/options.py", "Options"),
    f"{VLLM}/connector_options.py": _classes(f"{VLLM}/connector_options.py", "ConnectorOptions"),
    f"{VLLM}/server/settings.py": _classes(f"{VLLM}/server/settings.py", "Settings"),
    f"{VLLM}/engine_values.py": _classes(f"{VLLM}/engine_values.py"),
    f"{VLLM}/front_end_methods.py": _functions(f"{VLLM}/front_end_methods.py"),
    f"{VLLM}/exchange.py": _functions(f"{VLLM}/exchange.py"),
    f"{VLLM}/server/metrics.py": _strings(f"{VLLM}/server/metrics.py", _METRIC),
    f"{VLLM}/connector_stats.py": _strings(f"{VLLM}/connector_stats.py", r'^    "([a-z_]+)": "'),
    f"{VLLM}/server/routes.py": _strings(
        f"{VLLM}/server/routes.py", r'^        ([a-z_]+): [A-Z].* = |content\["([a-z_]+)"\]'
    ),
    "engine/phases.h": _strings("engine/phases.h", _QUOTED),
    "console/schema.cpp": _strings("console/schema.cpp", _QUOTED),
    "kvcache/offload_queue.cpp": _strings("kvcache/offload_queue.cpp", r'return "([a-z_]+)";'),
    "bindings/bind_controller.cpp": _strings("bindings/bind_controller.cpp", r'out\["([a-z_]+)"\]'),
    **{
        f"tools/torpor/{name}.cpp": _strings(f"tools/torpor/{name}.cpp", r'"(?:-\w,)?--([a-z-]+)"')
        for name in ("catalogue", "changes", "checks", "contents", "events", "live", "mock", "replay", "requests")
    },
    "bindings/connector_values.cpp": _strings("bindings/connector_values.cpp", r'out\["([a-z_]+)"\]'),
}
_OPTIONS = (f"{VLLM}/options.py", f"{VLLM}/connector_options.py", f"{VLLM}/server/settings.py")


def why_not(name: str, is_option: bool = False) -> str | None:
    """Return why a public name may not be so, with what to use, or None if it may."""
    if name in ALLOWED:
        return None
    if name in TOO_SHORT:
        return f"use {TOO_SHORT[name]}"
    for word in re.split(r"[_\-. ]", name):
        if word in PRIVATE:
            return f"use {PRIVATE[word]}, not {word}"
    if is_option and _NO_UNIT.search(name):
        return "end it with its unit: _seconds or _ms"
    return None


def private_names(root: Path) -> list[str]:
    """Public names that are not in the glossary's words, each with its source."""
    problems = []
    for source, names_of in SOURCES.items():
        if not (root / source).exists():
            continue
        for found in names_of(root):
            for name in [found] if isinstance(found, str) else filter(None, found):
                if reason := why_not(name, source in _OPTIONS):
                    problems.append(f"{source}: the public name {name}: {reason}")
    return problems
