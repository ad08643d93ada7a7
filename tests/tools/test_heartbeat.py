# SPDX-License-Identifier: Apache-2.0
"""No five seconds without a line: the heartbeat of demos and of setting up, under a clock that the tests set."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools/demo"))
from devtool import heartbeat, setup
from devtool.heartbeat import Heartbeat
from screen import Screen

MOST_SECONDS = 5.0  # that a reader waits for a line


class Time:
    """A clock that only its waits move, and what happens at certain moments: multiples of 1/1024 s, whose sums are
    exact."""

    def __init__(self, happens: list[tuple[float, object]], until: float):
        self.now = 0.0
        self._happens, self._until = sorted(happens, key=lambda each: each[0]), until

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        """What happens meanwhile happens in its order. True: the end."""
        assert seconds >= 0
        end = self.now + seconds
        while self._happens and self._happens[0][0] <= end:
            self.now, what = self._happens.pop(0)
            what()
        self.now = min(end, self._until)
        return self.now >= self._until


def lines_of(happens: list[tuple[float, str]], until: float) -> list[tuple[float, str]]:
    """When what was printed: `happens` has moments and "step" or "line"."""
    printed: list[tuple[float, str]] = []
    beat = None

    def happen(what: str):
        def now():
            printed.append((time.now, what))
            beat.begins() if what == "step" else beat.printed()

        return now

    time = Time([(at, happen(what)) for at, what in happens], until)
    beat = Heartbeat(lambda seconds: printed.append((time.now, f"{seconds:.0f} s")), time.clock, time.wait)
    beat.run()
    return printed


def test_where_nothing_is_printed_it_says_for_how_long_the_step_has_lasted():
    assert lines_of([(1.0, "step")], 14.0) == [(1.0, "step"), (5.0, "4 s"), (9.0, "8 s"), (13.0, "12 s")]


def test_where_enough_is_printed_it_says_nothing():
    happens = [(float(second), "line") for second in range(0, 60, 3)]
    assert lines_of(happens, 60.0) == happens


@pytest.mark.parametrize("seed", range(50))
def test_whatever_happens_a_reader_waits_no_longer_than_five_seconds(seed):
    chance = random.Random(seed)
    at, happens = 0.0, []
    while at < 300:
        at += chance.choice([1, 1024, 4095, 4096, 4097, 7000, 40_000]) * chance.randrange(1, 1536) // 1024 / 1024
        happens.append((at, chance.choice(["step", "line"])))
    moments = [0.0, *(at for at, _ in lines_of(happens, 300.0)), 300.0]
    assert max(later - earlier for earlier, later in pairwise(moments)) <= MOST_SECONDS


@pytest.mark.parametrize("quiet", [False, True])
def test_the_screen_of_a_demo_says_the_step_and_how_far_it_is(quiet, capsys):
    time = Time([], 0)
    screen = Screen(quiet, time.clock)
    screen.say("what will happen")
    time.now = 3.0
    screen.stage("2. The run that never sleeps")
    screen.chats({"0": "one two", "1": "three"})
    screen._still_works(12.4)
    screen.line("for people alone")
    out, error = capsys.readouterr()
    printed, nothing = (error, out) if quiet else (out, error)
    assert "what will happen" in printed and "2. The run that never sleeps  [3 s]" in printed
    assert "… step 2, 12 s: 3 words of 2 answers" in printed
    assert ("for people alone" in printed) == (not quiet) and nothing == ""


def test_a_demo_beats_while_it_runs_and_not_afterwards(capsys, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 0.01)
    with Screen(quiet=True) as screen:
        screen.stage("1. Something long")
        while "… step 1" not in capsys.readouterr().err:
            pass
        thread = screen.heartbeat._thread
    assert not thread.is_alive()


def test_setting_up_beats_too(monkeypatch, tmp_path):
    said: list[str] = []
    monkeypatch.setattr(setup, "CACHE", tmp_path)
    monkeypatch.setattr(setup, "say", said.append)
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 0.01)
    fifo = tmp_path / "go"
    subprocess.run(["mkfifo", fifo], check=True)

    def beats(text: str) -> None:  # the command ends when the third line was said
        said.append(text)
        if len(said) == 3:
            fifo.write_text("now\n")

    monkeypatch.setattr(setup, "say", beats)
    setup.run("Something", ["sh", "-c", f"read now < {fifo}"])
    assert said[0] == "  Something …" and said[1:-1] == ["    … 0 s"] * (len(said) - 2) and len(said) >= 4


def test_every_demo_says_first_what_will_happen():
    import demo

    texts = set()
    for words in ([], ["--server"], ["--offload"], ["--to", "host"], ["--remote"]):
        texts.add(demo.what_happens(demo.parse(["--model", "x", *words])))
    assert len(texts) == 5 and all("steps: " in text for text in texts)
