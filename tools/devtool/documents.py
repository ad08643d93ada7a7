# SPDX-License-Identifier: Apache-2.0
"""Checks of the documents' text: no line is longer than 120 columns, and one word means one thing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

COLUMNS = 120

# Words that documents do not use, as regular expressions, and what to write instead. A word stands here only if every
# use of it in a document is a wrong one. Code, paths and links are not searched.
WORDS = {
    "by name": "what the error names, or nothing",
    "rigs?": "the GPU path on CPU tensors",
    "oracles?": "expected output",
    "twins?": "reference run",
    "forgone": "skipped",
    "stamps?": "content version",
    "key spaces?": "namespace",
    "early wakes?": "post-copy wake",
    "late blocks?": "deferred blocks",
    "write-behind": "background checkpoint",
    "quiet prefault": "background prefault",
    "space words?": "cache epoch",
    "whole places": "overflow slots",
    "writ(?:e|es|ing|ten) behind|behind the engine": "background checkpoint",
    "(?:stands?|stood|standing) still": "the engine stops",
    "roll(?:s|ed|ing)? forward": "replay the response log",
    "(?:bring|brings|brought|bringing) up": "prefault",
    "let(?:s|ting)? go of": "release",
}

# The lines of a table after this comment are made from code, and are as long as that makes them.
_FROM_CODE = re.compile(r"\s*<!-- from code: .* -->$")
_FENCE = re.compile(r"\s*```")
# What stands behind the marks of a fence is the language of the block, in one word.
_TEXT_AFTER_FENCE = re.compile(r"\s*```(?!\w*\s*$)")
_NO_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]*>")
_WORD = {re.compile(rf"\b(?:{word})\b".replace(" ", r"\s+"), re.I): instead for word, instead in WORDS.items()}


def _prose(lines: list[str]) -> str:
    """Return the words outside of code and of tables that are made from code, each in its line."""
    code = made = False
    kept = []
    for line in lines:
        fence = bool(_FENCE.match(line))
        made = bool(_FROM_CODE.match(line)) or (made and line.startswith("|"))
        kept.append("" if code or fence or made else _NO_PROSE.sub(" ", line))
        code ^= fence
    return "\n".join(kept)


def _long(lines: list[str]) -> Iterator[tuple[int, int]]:
    made = False
    for number, line in enumerate(lines, 1):
        made = bool(_FROM_CODE.match(line)) or (made and line.startswith("|"))
        if not made and len(line) > COLUMNS:
            yield number, len(line)


def problems_of(name: str, text: str) -> list[str]:
    """Return what is wrong with the text of the page `name`: lines that are too long, text behind a
    fence, words that it must not use."""
    lines = text.splitlines()
    found = [(n, f"{columns} columns, {COLUMNS} are the most") for n, columns in _long(lines)]
    found += [
        (n, "text after ```: begin a line for it") for n, line in enumerate(lines, 1) if _TEXT_AFTER_FENCE.match(line)
    ]
    words = _prose(lines)
    found += [
        (words.count("\n", 0, match.start()) + 1, f"{match.group(0)!r}: write {instead}")
        for pattern, instead in _WORD.items()
        for match in pattern.finditer(words)
    ]
    return [f"{name}:{number}: {problem}" for number, problem in sorted(found)]


_ANCHOR = re.compile(r"\]\(([^)#\s:]*)#([^)\s]+)\)")
_MARK = re.compile(r"`|\]\([^)]*\)|\[")


def slug(heading: str) -> str:
    """Return the place of a heading in its page, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _anchors(text: str) -> set[str]:
    """Return the names to which links into this page may lead: its headings, as GitHub names them, and its marks."""
    names, code = set(re.findall(r'<a id="([^"]+)"', text)), False
    for line in text.splitlines():
        code ^= bool(_FENCE.match(line))
        if line.startswith("#") and not code:
            names.add(slug(_MARK.sub("", line.lstrip("#").strip())))
    return names


def lost_anchors(root: Path, pages: Iterable[Path]) -> list[str]:
    """Return the links to a place in a page that the page does not have."""
    texts = {page.resolve(): page.read_text() for page in pages if page.suffix == ".md"}
    found = []
    for page, text in texts.items():
        for target, anchor in _ANCHOR.findall(text):
            other = (page.parent / target).resolve() if target else page
            if other in texts and anchor not in _anchors(texts[other]):
                found.append(f"{page.relative_to(root.resolve())}: {target}#{anchor} is not there")
    return found


def problems(root: Path, pages: Iterable[Path]) -> list[str]:
    """Return what is wrong with the text of these pages."""
    return [
        problem
        for page in pages
        if page.suffix == ".md"
        for problem in problems_of(str(page.relative_to(root)), page.read_text())
    ]
