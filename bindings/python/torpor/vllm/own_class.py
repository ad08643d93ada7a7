# SPDX-License-Identifier: Apache-2.0
"""Classes of a user's own that an option names, as "module:Class"."""

from __future__ import annotations

import importlib
from typing import Any

from torpor.errors import InvalidArgument


def made(name: str, option: str) -> Any:
    """Return an object of the class. Raises InvalidArgument, with the cause, if it cannot be made."""
    check_name(name, option)
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for each in path.split("."):
            found = getattr(found, each)
        return found()
    except Exception as raised:
        raise InvalidArgument(
            f"{option} {name} cannot be made: {type(raised).__name__}: {raised}",
            "its module must be importable in the engine's process, and its class take no arguments",
        ) from raised


def check_name(name: str, option: str) -> None:
    """Raises InvalidArgument for what is not "module:Class"."""
    module, colon, cls = name.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), *cls.split(".")]):
        raise InvalidArgument(f"{option} is {name!r}", 'name a class as "module:Class"')
