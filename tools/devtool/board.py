# SPDX-License-Identifier: Apache-2.0
"""The picture of the Grafana board in the documents: recorded from a real server, drawn from what was recorded."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

from devtool import setup
from devtool.setup import CACHE, ROOT, SetupError, read_list, run

FOLDER = ROOT / "deploy/grafana"
PICTURE = ROOT / "docs/board.svg"


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--draw"]):
        raise SetupError(f"tools/dev board takes --draw, or nothing, not {' '.join(arguments)!r}")
    if not arguments:
        if shutil.which("prometheus") is None:
            raise SetupError("there is no prometheus, which records: apt-get install prometheus, or give --draw")
        python, model = setup.everything()
        run("A server is recorded for a minute and a half", [python, FOLDER / "record.py", "--model", model],
            log_name="board")  # fmt: skip
    draw(PICTURE)
    print(PICTURE.relative_to(ROOT))
    return 0


def draw(path: Path) -> None:
    """Draw what is recorded in the checkout. The same record gives the same bytes."""
    run("The board is drawn", [python(), FOLDER / "render.py", path], log_name="board-drawn")


def python() -> Path:
    """Return the Python that has Matplotlib; the first call installs it."""
    wanted = read_list("board.txt")
    folder = CACHE / f"board-{hashlib.sha256(' '.join(wanted).encode()).hexdigest()[:12]}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run("Environment for the board", [sys.executable, "-m", "venv", folder], log_name="board-venv")
        pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install"]
        run("Matplotlib (20 MB)", [*pip, *wanted], log_name="board-pip")
        (folder / "complete").touch()
    return folder / "bin/python"
