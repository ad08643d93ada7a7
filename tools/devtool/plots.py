# SPDX-License-Identifier: Apache-2.0
"""tools/dev plots: the plots of docs/measurements.md, drawn from the figures that lie beside it."""

from __future__ import annotations

import json
from pathlib import Path

from devtool import board
from devtool.setup import ROOT, SetupError, run

FOLDER = ROOT / "docs/measurements"
FIGURES = FOLDER / "figures.json"


def main(arguments: list[str]) -> int:
    """Draw every plot and print the names of the files."""
    if arguments:
        raise SetupError(f"tools/dev plots takes no {arguments[0]!r}")
    draw(FOLDER)
    for name in json.loads(FIGURES.read_text()):
        print((FOLDER / f"{name}.svg").relative_to(ROOT))
    return 0


def draw(folder: Path) -> None:
    """Draw the plots into this folder."""
    run("The plots are drawn", [board.python(), ROOT / "tools/plots/draw.py", FIGURES, folder], log_name="plots")
