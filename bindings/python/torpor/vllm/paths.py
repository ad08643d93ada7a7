# SPDX-License-Identifier: Apache-2.0
"""Paths as a user writes them."""

from __future__ import annotations

import os

from torpor.errors import InvalidArgument


def expanded(path):
    """A path with its "~" or "~user" expanded as a shell would: none does so in a configuration or an environment.

    Anything else is returned as it is. Raises InvalidArgument for a "~" that names nobody.
    """
    if not isinstance(path, (str, os.PathLike)):
        return path
    path = os.path.expanduser(path)
    if os.fspath(path).startswith("~"):
        raise InvalidArgument(f"the path {os.fspath(path)!r} begins with a ~ that names nobody", "give the whole path")
    return path
