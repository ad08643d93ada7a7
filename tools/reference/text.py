# SPDX-License-Identifier: Apache-2.0
"""Sections of Markdown in lines of at most 120 columns, and docstrings as Markdown."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Collection

from devtool.documents import COLUMNS

HEAD = "<!-- Made by tools/dev reference from the code. Do not edit it here. -->"


_HELD = "\ue000"  # a blank that no line ends with


def paragraph(text: str, indent: str = "") -> str:
    """Return the text in lines of at most COLUMNS; code of a few words stays together. `indent`: of later lines."""
    held = re.sub(r"`[^`]{1,60}`", lambda code: code.group(0).replace(" ", _HELD), " ".join(text.split()))
    filled = textwrap.fill(held, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return filled.replace(_HELD, " ")


def item(text: str) -> str:
    return paragraph(f"- {text}", "  ")


def page(title: str, *blocks: str) -> str:
    """Return a page: its title, and blocks with a blank line between them. Empty blocks are left out."""
    return "\n\n".join([f"# {title}", HEAD, *(block for block in blocks if block)]) + "\n"


def code(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def sentence(text: str) -> str:
    """Return the text as a sentence: with a capital, unless it begins with a name, and a full stop."""
    text = " ".join(text.split())
    first = re.match(r"[a-z]+(?=[ .]|$)", text)
    if first and first.group(0) not in _LOWER:
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", ":", "!", "?", "…")) else text + "."


_LOWER = {"torpor", "vLLM", "bf16"}


def plain(text: str) -> str:
    """Return the text so that Markdown shows it as it is; what stands in backticks is left alone."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<])", r"\\\1", part) for part in parts)


def linked(text: str) -> str:
    """Return text whose links are relative to docs/ with links relative to docs/reference/; docs/NAME is one, too."""
    text = re.sub(r"(?<![\w/(\[`])docs/(\w+\.md)", r"[\1](\1)", text)
    return re.sub(r"\]\((?!https?:|#|\.\./)", "](../", text)


# --- docstrings -------------------------------------------------------------------------------------------------------


def of_docstring(doc: str, names: Collection[str] = ()) -> str:
    """Return a docstring as Markdown. `names`: the arguments, whose lines `name: text` become a list."""
    return "\n\n".join(_blocks(inspect.cleandoc(doc), names))


def argument_texts(doc: str, names: Collection[str]) -> dict[str, str]:
    """Return the text of each argument that a docstring has a line `name: text` for."""
    found: dict[str, str] = {}
    for lines in _paragraphs(inspect.cleandoc(doc)):
        for given, text in _items(lines, names):
            found |= dict.fromkeys(given, text)
    return found


def _paragraphs(doc: str) -> list[list[str]]:
    return [part.splitlines() for part in re.split(r"\n\s*\n", doc) if part.strip()]


def _items(lines: list[str], names: Collection[str]) -> list[tuple[tuple[str, ...], str]]:
    """Return each `name: text` of a paragraph with its names. What stands before the first has no name."""
    found: list[tuple[tuple[str, ...], str]] = []
    for line in lines:
        match = re.match(r"((?:`?\w+`?, )*`?\w+`?): ?(.*)", line)
        given = tuple(match[1].replace("`", "").split(", ")) if match else ()
        if match and set(given) <= set(names):
            found.append((given, match[2]))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
        else:
            found.append(((), line.strip()))
    return found


def _blocks(doc: str, names: Collection[str]) -> list[str]:
    blocks = []
    for lines in _paragraphs(doc):
        if all(line.startswith("    ") for line in lines):
            blocks.append(code(textwrap.dedent("\n".join(lines)), "python"))
            continue
        items = _items(lines, names)
        before = [paragraph(linked(plain(text))) for given, text in items if not given]
        listed = [item(f"{_named(given)}: {linked(sentence(plain(text)))}") for given, text in items if given]
        blocks.append("\n\n".join([*before, *(["\n".join(listed)] if listed else [])]))
    return blocks


def _named(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
