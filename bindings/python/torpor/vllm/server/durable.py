# SPDX-License-Identifier: Apache-2.0
"""Small files that are there whole after a loss of power, or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def written_beside(path: Path, content: bytes) -> Path:
    """A new file in the folder of `path`, for its owner alone, whose content is on disk: to be put in its place, and
    then sync_folder()."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with open(beside, "xb", opener=_for_its_owner) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(beside)
            raise
    return beside


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
