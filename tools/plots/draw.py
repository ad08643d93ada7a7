# SPDX-License-Identifier: Apache-2.0
"""Draw the plots of docs/measurements.md from docs/measurements/figures.json: `tools/dev plots`. Needs Matplotlib.

The same figures give the same bytes. Arguments: the JSON file, and the folder for the SVG files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = ["#1f60c4", "#73bf69", "#ff9830", "#8f3bb8"]
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "torpor", "font.size": 9, "font.family": "sans-serif"}


def _bars(axes, figure: dict) -> None:
    series = figure["series"]
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        centres = [group + (number - (len(series) - 1) / 2) * width for group in range(len(values))]
        bars = axes.bar(centres, values, width, color=COLOURS[number], label=name)
        axes.bar_label(bars, [f"{value:g}" for value in values], fontsize=7, padding=1)


def _lines(axes, figure: dict) -> None:
    for number, (name, values) in enumerate(figure["series"].items()):
        axes.plot(range(len(values)), values, color=COLOURS[number], marker="o", label=name)
        for at, value in enumerate(values):
            axes.annotate(f"{value:,}", (at, value), fontsize=7, textcoords="offset points", xytext=(0, 5), ha="center")


def draw(figure: dict, path: Path) -> None:
    """Draw one figure into an SVG file."""
    with plt.rc_context(STYLE):
        canvas, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
        {"bars": _bars, "lines": _lines}[figure["kind"]](axes, figure)
        for name, height in figure.get("line", {}).items():
            axes.axhline(height, color="#888888", linestyle="--", linewidth=1)
            axes.annotate(name, (len(figure["groups"]) - 0.5, height), fontsize=7, ha="right", va="bottom")
        if figure.get("logarithmic"):
            axes.set_yscale("log")
        axes.margins(y=0.15)
        axes.set_xticks(range(len(figure["groups"])), figure["groups"])
        axes.set_xlabel(figure.get("group", ""))
        axes.set_ylabel(figure["axis"])
        axes.set_title(figure["title"], fontsize=10)
        axes.legend(fontsize=7, frameon=False, ncols=2 if figure["kind"] == "bars" else 1)
        axes.spines[["top", "right"]].set_visible(False)
        canvas.text(0.99, -0.03, figure["source"], fontsize=6, color="#666666", ha="right", va="top")
        canvas.savefig(path, metadata={"Date": None}, bbox_inches="tight")
        plt.close(canvas)


def main() -> int:
    figures, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, figure in figures.items():
        draw(figure, folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
