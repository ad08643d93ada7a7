# SPDX-License-Identifier: Apache-2.0
"""The picture of the board in the documents: of a real server, asked by the board's own expressions."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT
from devtool import board, setup

BOARD = json.loads((board.FOLDER / "torpor.json").read_text())
RECORDED = json.loads((board.FOLDER / "series.json").read_text())


def test_it_was_recorded_with_the_expressions_that_the_board_has():
    asked = {
        panel["id"]: [(each["expr"], each["legendFormat"]) for each in panel["targets"]] for panel in BOARD["panels"]
    }
    recorded = {
        panel["id"]: [(each["expr"], each["legend"]) for each in panel["targets"]] for panel in RECORDED["panels"]
    }
    assert recorded == asked, "tools/dev board records it again"


def test_every_panel_has_something_to_show():
    for panel in RECORDED["panels"]:
        for target in panel["targets"]:
            assert any(each["values"] for each in target["series"]), target["expr"]


def test_the_picture_has_every_panel_and_stands_in_the_documents():
    picture = board.PICTURE.read_text()
    for panel in BOARD["panels"]:
        assert panel["title"].replace("&", "&amp;") in picture
    assert "board.svg" in (ROOT / "docs/operations.md").read_text()


def test_its_command_takes_one_option():
    with pytest.raises(setup.SetupError, match="--draw"):
        board.main(["--nothing"])


@pytest.mark.long  # matplotlib is installed for it
def test_what_was_recorded_gives_the_picture_that_is_kept(tmp_path):
    board.draw(tmp_path / "board.svg")
    assert (tmp_path / "board.svg").read_bytes() == board.PICTURE.read_bytes()
