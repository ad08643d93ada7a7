# SPDX-License-Identifier: Apache-2.0
"""Options as fields of dataclasses that describe themselves. The engine, its KV connector and a server have such.

One description has the default, how a value is written, what is refused, and the text of --torpor-help.
"""

from __future__ import annotations

import os
import re
from dataclasses import Field, field

from torpor.errors import InvalidArgument
from torpor.vllm.paths import expanded

# How a value is written: 1 or 0; any text; a path; bytes, as 4GiB; a whole number; a number.
SWITCH, TEXT, PATH, BYTES, WHOLE, NUMBER = "switch", "text", "path", "bytes", "whole", "number"

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def described(
    default,
    kind: str,
    text: str,
    *choices: str,
    least: float | None = None,
    most: int | None = None,
    secret=False,
    details: str = "",
    **more,
):
    """A field of a dataclass of options.

    text: what the option does, for people who start an engine. choices: the words that it may be. least, most: of a
    number. secret: it is not shown. details: more sentences for docs/reference/options.md, whose links are relative to
    docs/. more: what else the class knows of the option.
    """
    about = {"kind": kind, "help": text, "choices": choices, "least": least, "most": most, "details": details} | more
    return field(default=default, repr=not secret, metadata=about)


def value_of(option: Field, given, spelled: str):
    """Return an option's value from what somebody wrote for it, in the environment or not.

    spelled: the option's name as that one wrote it. Raises InvalidArgument.
    """
    kind, choices = option.metadata["kind"], option.metadata["choices"]
    if given is None and option.default is None:
        return None
    if choices:
        if given not in choices:
            raise InvalidArgument(f"{spelled} is {given!r}", f"use {' or '.join(map(repr, choices))}")
        return given
    if kind == SWITCH:
        if isinstance(given, str):
            return switch(spelled, given, option.default is True)
        if isinstance(given, bool):
            return given
        raise InvalidArgument(f"{spelled} is {given!r}", "use true or false")
    if kind == BYTES:
        return size(spelled, given)
    if kind in (WHOLE, NUMBER):
        return _number(spelled, given, kind == WHOLE, option.metadata["least"], option.metadata["most"])
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidArgument(f"{spelled} is {given!r}", "use text")
    return expanded(str(given)) if kind == PATH and str(given) else given


def _number(spelled: str, given, whole: bool, least: float | None, most: int | None):
    try:
        number = None if isinstance(given, bool) else float(given)
        if number is not None and whole:
            number = int(given) if int(given) == number else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or number != number:
        raise InvalidArgument(f"{spelled} is {given!r}", "use a whole number" if whole else "use a number")
    if (least is not None and number < least) or (most is not None and number > most):
        fits = f"{least} or more" if most is None else f"{least} to {most}"
        raise InvalidArgument(f"{spelled} is {given!r}", f"use {fits}")
    return number


def size(name: str, given) -> int:
    """Return bytes: of a number, or of text such as "4GiB"."""
    if type(given) is int and given >= 0:
        return given
    if isinstance(given, str) and (match := re.fullmatch(r"(\d+) ?(|KiB|MiB|GiB|TiB)", given)):
        return int(match[1]) * _UNITS[match[2]]
    raise InvalidArgument(f"{name} is {given!r}", 'use a number of bytes, or one with KiB, MiB, GiB or TiB: "4GiB"')


def switch(name: str, text: str, default: bool) -> bool:
    """Return what text says that switches something on or off; empty text says nothing."""
    if (word := text.lower()) in ("1", "true", "on", "yes"):
        return True
    if word in ("0", "false", "off", "no"):
        return False
    if not word:
        return default
    raise InvalidArgument(f"{name} is {text!r}", "use 1 or 0")
