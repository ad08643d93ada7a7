# SPDX-License-Identifier: Apache-2.0
"""Draws the board from its own JSON and recorded series (series.json): `tools/dev board`. It needs matplotlib."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, MaxNLocator

HERE = Path(__file__).resolve().parent
COLUMNS = 24  # of a board
COLOURS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#37872d", "#fade2a", "#1f60c4", "#8f3bb8"]
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "torpor", "font.size": 8, "font.family": "sans-serif",
    "figure.facecolor": "#181b1f", "axes.facecolor": "#181b1f", "axes.edgecolor": "#4a4d52", "text.color": "#ccccdc",
    "axes.labelcolor": "#ccccdc", "xtick.color": "#ccccdc", "ytick.color": "#ccccdc", "grid.color": "#2c3235",
}  # fmt: skip


def words(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)


def amount(unit: str):
    """Return how numbers of this unit are written."""

    def bytes_of(value: float, _at=None) -> str:
        for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:.3g} B"

    return {
        "bytes": bytes_of,
        "Bps": lambda value, at=None: f"{bytes_of(value)}/s",
        "s": lambda value, at=None: f"{value:.3g} s",
    }.get(unit, lambda value, at=None: f"{value:.3g}")


def states(axes, series: list[tuple[str, list]]) -> None:
    """Each state while its series has a value: a bar in the row of its server."""
    servers = sorted({name.split(" ")[0] for name, _ in series})
    shown = {}
    for name, values in series:
        server, state = name.split(" ", 1)
        colour = shown.setdefault(state, COLOURS[len(shown) % len(COLOURS)])
        axes.broken_barh([(at - 0.5, 1) for at, _ in values], (servers.index(server) - 0.4, 0.8), color=colour)
    axes.set_yticks(range(len(servers)), servers)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in shown.values()]
    axes.legend(handles, shown, ncol=len(shown), loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def lines(axes, series: list[tuple[str, list]], custom: dict, end: int) -> None:
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    below = [0.0] * (end + 1)
    # What is zero all the time is no line of a legend, unless nothing else is there.
    moving = [each for each in series if any(value != 0 for _, value in each[1])] or series
    for number, (name, values) in enumerate(moving):
        colour = COLOURS[number % len(COLOURS)]
        known = dict(map(tuple, values))
        heights = [known.get(at, 0.0) for at in range(end + 1)]
        if custom.get("drawStyle") == "bars":
            seconds = [at for at in range(end + 1) if heights[at] > 0]
            axes.bar(
                seconds, [heights[at] for at in seconds], 1, [below[at] for at in seconds], color=colour, label=name
            )
        elif stacked:
            tops = [low + height for low, height in zip(below, heights, strict=True)]
            axes.fill_between(range(end + 1), below, tops, color=colour, alpha=0.5, label=name, linewidth=0)
        else:
            shown = [known.get(at, float("nan")) for at in range(end + 1)]
            axes.plot(range(end + 1), shown, color=colour, label=name, linewidth=1.2)
        if stacked:
            below = [low + height for low, height in zip(below, heights, strict=True)]
    if moving:
        axes.legend(ncol=3, loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False, fontsize=6)
    else:
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center", va="center")


def draw(board: dict, recorded: dict, path: Path) -> None:
    """Write the picture of `board` with what Prometheus answered to each of its panels."""
    series = {
        panel["id"]: [
            (words(target["legend"], each["labels"]), each["values"])
            for target in panel["targets"] for each in target["series"] if each["values"]
        ]
        for panel in recorded["panels"]
    }  # fmt: skip
    end = max(at for found in series.values() for _, values in found for at, _ in values)
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(13, rows * 0.4))
        for panel in board["panels"]:
            place, field = panel["gridPos"], panel["fieldConfig"]["defaults"]
            bottom = 1 - (place["y"] + place["h"]) / rows
            axes = figure.add_axes(
                (place["x"] / COLUMNS + 0.05, bottom + 0.028, place["w"] / COLUMNS - 0.07, place["h"] / rows - 0.044)
            )
            axes.set_title(panel["title"], loc="left", fontsize=9)
            axes.set_xlim(0, end)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, at=None: f"{value:.0f} s"))
            axes.grid(True, linewidth=0.5)
            if panel["type"] == "state-timeline":
                states(axes, series[panel["id"]])
                continue
            lines(axes, series[panel["id"]], field.get("custom", {}), end)
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.yaxis.set_major_formatter(FuncFormatter(amount(field.get("unit", "short"))))
            axes.set_ylim(bottom=0)
        figure.savefig(path, metadata={"Date": None})


def main() -> int:
    board, recorded = (json.loads((HERE / name).read_text()) for name in ("torpor.json", "series.json"))
    draw(board, recorded, Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
