#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Type stubs of the compiled module, from what it says of itself; tests/tools/test_stubs.py compares them.

tools/dev python tools/stubs.py > bindings/python/torpor/_core.pyi
"""

from __future__ import annotations

import inspect
import textwrap

HEADER = (
    '"""The compiled module. Made by tools/stubs.py; do not change by hand."""\n\n'
    "import typing\n"
    "from collections.abc import Callable, Mapping, Sequence\n\n"
    "__version__: str\n"
)
SHORTER = {
    "typing.SupportsInt | typing.SupportsIndex": "int", "collections.abc.": "", "torpor._core.": "",
    "-> object": "-> typing.Any",
}  # fmt: skip
WIDTH = 120


def shortened(text: str) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


def documented(text: str, indent: str) -> str:
    """A body that is only the docstring; short of one, three dots."""
    if not text:
        return " ..."
    room = WIDTH - len(indent) - len('    """"""')
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, room) or [""]]
    if len(lines) > 1:
        lines.append("")
    return f'\n{indent}    """' + f"\n{indent}    ".join(lines) + '"""'


def definition(doc: str, indent: str = "", decorator: str = "") -> str:
    """Of a function whose docstring begins with its signature."""
    first, _, rest = doc.partition("\n")
    signature = shortened(first)
    if indent and "(self" in signature:
        head, _, tail = signature.partition("(self: ")
        cut = min(at for at in (tail.find(","), tail.find(")")) if at >= 0)
        signature = f"{head}(self{tail[cut:]}"
    lead = f"{indent}{decorator}\n" if decorator else ""
    line = f"{indent}def {signature}:"
    if len(line) > WIDTH - 4:
        name, _, arguments = signature.partition("(")
        arguments, _, result = arguments.rpartition(")")
        wrapped = f"\n{indent}    ".join(textwrap.wrap(arguments, WIDTH - len(indent) - 4))
        line = f"{indent}def {name}(\n{indent}    {wrapped}\n{indent}){result}:"
    return lead + line + documented(inspect.cleandoc(rest), indent)


def members(cls: type) -> list[str]:
    found = []
    for name, member in sorted(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, property):
            returned = shortened((member.fget.__doc__ or "").strip()).rpartition(" -> ")[2]
            signature = f"{name}(self: {cls.__name__}) -> {returned}"
            found.append(definition(f"{signature}\n{member.__doc__ or ''}", "    ", "@property"))
        elif isinstance(member, staticmethod):
            found.append(definition(member.__func__.__doc__, "    ", "@staticmethod"))
        elif not inspect.isroutine(member) or (member.__doc__ or "").startswith(f"{name}("):
            found.append(definition(member.__doc__, "    "))
    return found


def stubs(module) -> str:
    parts = [HEADER]
    for name, value in sorted(vars(module).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, type):
            body = "\n".join(members(value))
            parts.append(f'class {name}:\n    """{value.__doc__.strip()}"""\n\n{body}\n')
        elif callable(value):
            parts.append(definition(value.__doc__) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    from torpor import _core

    print(stubs(_core), end="")
