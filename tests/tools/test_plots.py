# SPDX-License-Identifier: Apache-2.0
"""The plots of docs/measurements.md: they have the figures of the page's tables, and the SVG files have the figures."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT
from devtool import plots, setup

FIGURES = json.loads(plots.FIGURES.read_text())
PAGE = (ROOT / "docs/measurements.md").read_text()


def numbers(figure: dict) -> list[float]:
    return [value for values in [*figure["series"].values(), figure.get("line", {}).values()] for value in values]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_a_plot_stands_in_a_table_of_its_section(name):
    figure = FIGURES[name]
    section = PAGE.split(f"\n## {figure['section']}\n")[1].split("\n## ")[0]
    assert f"measurements/{name}.svg" in section
    written = {word.strip("|;,()") for line in section.splitlines() if line.startswith("|") for word in line.split()}
    assert len(numbers(figure)) > 5
    assert [value for value in numbers(figure) if not {f"{value:g}", f"{value:.1f}", f"{value:,}"} & written] == []


@pytest.mark.parametrize("name", FIGURES)
def test_the_picture_has_the_figures_and_the_names(name):
    figure = FIGURES[name]
    for values in figure["series"].values():
        assert len(values) == len(figure["groups"])
    picture = (plots.FOLDER / f"{name}.svg").read_text()
    drawn = [value for values in figure["series"].values() for value in values]
    words = [f"{value:g}" if figure["kind"] == "bars" else f"{value:,}" for value in drawn]
    for word in [figure["title"], figure["source"], figure["axis"], *figure["groups"], *figure["series"], *words]:
        assert f">{word}<" in picture, word


def test_its_command_takes_no_option():
    with pytest.raises(setup.SetupError, match="--nothing"):
        plots.main(["--nothing"])


@pytest.mark.long  # Matplotlib is installed for it
def test_the_figures_give_the_pictures_that_are_kept(tmp_path):
    plots.draw(tmp_path)
    for name in FIGURES:
        assert (tmp_path / f"{name}.svg").read_bytes() == (plots.FOLDER / f"{name}.svg").read_bytes()
