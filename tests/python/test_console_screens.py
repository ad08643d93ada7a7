# SPDX-License-Identifier: Apache-2.0
"""The screens of the console, driven key by key: over a recording, and over a made-up engine that is really stopped."""

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from inspector import BINARY

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "build/console"))  # Textual, as tools/dev setup has put it there

import torpor.console  # noqa: E402
from torpor import errors  # noqa: E402
from torpor.console import pages  # noqa: E402
from torpor.console.__main__ import pictures  # noqa: E402
from torpor.console.app import Console, Lines, Slots  # noqa: E402
from torpor.console.source import Live, Recording  # noqa: E402

SECONDS = 600  # that something may take that happens
SIZES = [(80, 24), pytest.param((120, 36), marks=pytest.mark.long)]


@pytest.fixture
def recording(tmp_path, monkeypatch):
    monkeypatch.setenv("TORPOR_BINARY", str(BINARY))
    tmp_path.chmod(0o700)
    copy = Path(shutil.copy(ROOT / "tests/golden/events-1.0/core.events", tmp_path))
    copy.chmod(0o600)
    return Recording(str(copy))


@pytest.fixture
def newest(tmp_path, monkeypatch):
    """Of the newest version, by an engine with the connector."""
    monkeypatch.setenv("TORPOR_BINARY", str(BINARY))
    copy = Path(shutil.copy(ROOT / "tests/golden/events-1.2/core.events", tmp_path))
    copy.chmod(0o600)
    tmp_path.chmod(0o700)
    return Recording(str(copy))


def drive(app: Console, keys, size=(120, 36)):
    """Presses the keys, calling what is no key; returns the lines that are shown then, and the picture."""

    async def run():
        async with app.run_test(size=size) as pilot:
            for key in keys:
                if callable(key):
                    key()
                else:
                    await pilot.press(key)
                await pilot.pause()
            lines = [line.plain for line in app.body.lines]
            return lines, app.export_screenshot()

    return asyncio.run(run())


@pytest.mark.parametrize("size", SIZES)
def test_each_screen_shows_what_the_recording_has(recording, size):
    slots, _ = drive(Console(recording), ["1"], size)
    assert any("D decoding" in line and "602/602" in line for line in slots) and len(slots) == 5
    way, _ = drive(Console(recording), ["1", "enter"], size)
    assert way[0].startswith("greedy") and way[1].startswith("        slot") and "DDD" in way[1]
    assert any("prefilling" in line for line in way)
    assert any(line.startswith("disk") and "save" in line for line in drive(Console(recording), ["3"], size)[0])
    assert any(line.startswith("device") and "8164" in line for line in drive(Console(recording), ["4"], size)[0])
    operations, _ = drive(Console(recording), ["6"], size)
    assert any("failed" in line and "planted feature" in line for line in operations)
    assert any("save" in line and "7.1 MB" in line for line in operations)
    assert "No rank has published" in drive(Console(recording), ["5"], size)[0][0]  # version 1.0 had no such events
    assert "Nothing stops" in drive(Console(recording), ["7"], size)[0][0]
    assert len(drive(Console(recording), ["8"], size)[0]) > 50


def test_columns_stand_below_each_other_whatever_characters_they_have():
    rows = [
        pages._row((word, 6, ""), (word, -6, ""), (7, -3, "")) for word in ("abc", "中文字符", "größeren", "e\u0301")
    ]
    assert [row.cell_len for row in rows] == [21] * 4
    assert [row.plain for row in rows[1:3]] == ["中文字  中文字    7  ", "größer  größer    7  "]
    slot = {
        "state": "decoding", "computed_tokens": 1, "tokens": 2, "device_blocks": 0, "host_hit_blocks": 0,
        "disk_hit_blocks": 0, "seconds_in_state": 0, "waiting_for": "",
    }  # fmt: skip
    names = [pages.slot_cells(slot | {"request": name})[0] for name in ("中" * 11, "中" * 12, "a" * 22, "a" * 23)]
    assert [name.plain for name in names] == ["中" * 11, "中" * 10 + " …", "a" * 22, "a" * 21 + "…"]


def test_memory_is_shown_by_rank_and_tag(newest):
    lines, _ = drive(Console(newest), ["5"])
    assert any(line.split()[:2] == ["0", "kv_cache"] and "MB" in line for line in lines)
    assert any("host memory for saved bytes" in line for line in lines)


def test_pictures_of_a_recording_load_nothing_and_say_who_woke(newest, tmp_path):
    asyncio.run(pictures(Console(newest), tmp_path / "pictures"))
    drawn = {path.stem: path.read_text() for path in (tmp_path / "pictures").iterdir()}
    assert set(drawn) == {"slots", "request", "transfers", "tiers", "memory", "operations"}
    assert not any("@font-face" in picture for picture in drawn.values())
    assert "wake" in drawn["operations"] and "pid" in drawn["operations"] and "host" in drawn["tiers"]
    assert "AT" in drawn["slots"]  # the moment before the sleep


def test_without_an_engine_there_are_no_pictures(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORPOR_BINARY", str(BINARY))
    monkeypatch.setattr(torpor.console.__main__, "_PATIENCE", 0.5)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(sys, "argv", ["console", str(tmp_path), "--svg", str(tmp_path / "pictures")])
    assert torpor.console.__main__.main() == 3
    assert f"no engine publishes events in {tmp_path}" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's script")
def test_the_page_says_what_the_console_says(newest, tmp_path):
    done = subprocess.run(
        [BINARY, "events", newest.path, "--export", "html"], capture_output=True, text=True, check=True
    )
    page = tmp_path / "page.html"
    page.write_text(done.stdout)
    script = """
        const page = require("fs").readFileSync(process.argv[1], "utf8");
        const lines = page.split('id="events">\\n')[1].split("</script>")[0].split("\\n").filter(Boolean);
        const events = lines.map(line => JSON.parse(line));
        const {fold, tracks} = new Function(
          page.split("</script><script>")[1].split("</script>")[0] + "; return {fold, tracks}")();
        const view = fold(events, Infinity);
        console.log(JSON.stringify({events: events.length,
          operations: [...view.operations.values()].map(one => [one.from, one.to]),
          tiers: [...view.tiers.values()].map(one => [one.from, one.cached_blocks]).sort(),
          tracks: tracks(events, "").size}));
    """.replace("\\\\", "\\")
    said = json.loads(subprocess.run(["node", "-e", script, page], capture_output=True, text=True, check=True).stdout)
    [process] = newest.snapshot["processes"]
    assert said["operations"] == [[one["operation"], "end"] for one in process["operations"]] != []
    assert said["tiers"] == sorted([one["tier"], one["cached_blocks"]] for one in process["tiers"])
    assert said["events"] > 100 and said["tracks"] > 5


def test_pictures_are_the_same_each_time(recording):
    for key in "1346":
        assert drive(Console(recording), [key])[1] == drive(Console(recording), [key])[1]


def test_a_filter_leaves_what_it_names(recording):
    app = Console(recording)
    lines, _ = drive(app, ["slash", *"long", "enter"])
    assert len(lines) == 2 and "long-" in lines[1]
    assert "long-" in drive(Console(recording), ["slash", *"long", "enter", "enter"])[0][0]  # the request that is left


def test_time_travel_shows_what_was_so_then(recording):
    app = Console(recording)
    now = recording.snapshot["processes"][0]
    moments = []

    def remember():
        moments.append(app.moment)

    lines, _ = drive(app, ["left_square_bracket", remember, *["left_square_bracket"] * 30, remember])
    assert moments[1] < moments[0]
    then = app.process
    assert then["time"] - then["began"] <= moments[1] + 1e-3 and then["steps"]["seen"] < now["steps"]["seen"]
    assert len(lines) == 1 + len(then["slots"]) or lines == [pages.NO_SLOTS]
    drive_app = Console(recording)
    drive(drive_app, ["left_square_bracket", "right_square_bracket", "g"])
    assert drive_app.moment is None and drive_app.process == now


def test_a_moment_can_be_typed(recording):
    app = Console(recording)
    drive(app, ["t", "0", "full_stop", "1", "enter", "t", "x", "enter"])
    assert app.moment == 0.1 and 0 < app.process["time"] - app.process["began"] <= 0.1 + 1e-6
    assert "no number" in app.said


def test_braces_go_from_lint_to_lint(recording):
    """Of this one a sleep failed at the end: before it there is nothing to say."""
    app, seen = Console(recording), []

    def remember():
        seen.append((app.moment, [each["lint"] for each in app.process["lints"]], app.said))

    keys = ["left_square_bracket", "right_curly_bracket", "right_curly_bracket"]
    keys += ["left_square_bracket", "left_curly_bracket"]
    drive(app, [step for key in keys for step in (key, remember)])
    before, (at, lints, said), nothing, _, none_before = seen
    assert before[0] < at and before[1] == []
    assert lints == ["failed operation"] and said == "failed operation  sleep"
    assert nothing == (at, lints, "no other lint")
    assert none_before[0] < at and none_before[1:] == ([], "no other lint")


def test_readonly_sends_nothing(recording, monkeypatch):
    monkeypatch.setattr(torpor.console, "connect", lambda *_, **__: pytest.fail("it connected"))
    app = Console(recording, readonly=True)
    drive(app, ["p", "c", "n"])
    assert "read-only" in app.said


@pytest.fixture
def mock(monkeypatch):
    monkeypatch.setenv("TORPOR_BINARY", str(BINARY))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, made_up_engine(directory):
        yield directory


@contextlib.contextmanager
def made_up_engine(directory):
    engine = subprocess.Popen([BINARY, "mock", directory], stdout=subprocess.PIPE)
    engine.stdout.readline()
    yield engine
    engine.terminate()
    engine.wait()
    engine.stdout.close()


def test_an_engine_is_stopped_stepped_and_let_go_by_keys(mock):
    edges = []
    while not edges or "operation" in edges:  # the engine fell asleep just then, which ends a stop
        before = len(torpor_events(mock))
        stop_step_and_let_go(mock)
        edges = [line.split()[-1] for line in torpor_events(mock)[before:]]
    assert edges.count("begun") == 1 and edges.count("resumed") == 1


def stop_step_and_let_go(directory):
    app = Console(Live(directory))
    shown = []

    def until(wanted):
        def wait():
            began = time.monotonic()
            while app.process is None or bool(app.process["stops"]) is not wanted:
                assert time.monotonic() - began < SECONDS, app.said
                time.sleep(0.05)
                app.look()
            shown.append(app.query_one("#top").has_class("stopped"))

        return wait

    def says(words):
        def said():
            assert words in app.said
            app.look()
            assert not app.process["stops"]

        return said

    asks, cannot = says("the same key again"), says("nothing is stopped")
    keys = [until(False), "n", cannot, "n", cannot, "p", asks, "n", cannot, "p", asks, "p"]
    drive(app, [*keys, until(True), "n", "c", until(False)])
    assert shown == [False, True, False] and app.said == ""


def test_keys_act_on_the_engine_that_is_shown_and_not_on_the_newest(mock):
    with made_up_engine(mock) as newest:
        app, pids = Console(Live(mock)), []
        there = until(app, lambda: len(app.processes) == 2)

        def choose():
            if app.process["pid"] == newest.pid:
                app.action_process()
            pids.append(app.process["pid"])

        def another_goes_ahead():
            [other] = [each for each in app.processes if each["pid"] == newest.pid]
            other["steps"]["seen"] += 1 << 40
            pids.append(app.process["pid"])

        drive(app, [there, choose, "p", "p", another_goes_ahead, "tab", lambda: pids.append(app.process["pid"]), "p"])
        assert pids[0] == pids[1] != newest.pid == pids[2]
        assert "the same key again" in app.said  # the other engine is asked about anew
        began = [line for line in torpor_events(mock) if line.split()[-1] == "begun"]
        assert len(began) == 1
        with torpor.console.connect(Path(mock) / f"{newest.pid}-mock-0.sock") as engine:
            assert engine.events(types="stop,control")["events"] == []


class Connection:
    """In place of one to an engine: what was asked. It answers a slow call when `answering` is set."""

    answering: threading.Event
    made: list["Connection"]

    def __init__(self, path, timeout):
        self.path, self.timeout = str(path), timeout
        self.calls, self.closed = [], False
        self.made.append(self)

    def call(self, method, /, **params):
        self.calls.append((method, params))
        if method == "transfer.wait" and not self.answering.wait(0.1 if self.timeout is not None else SECONDS):
            raise TimeoutError("timed out")
        if method == "record.start":
            raise errors.TimedOut("the disk is slow", "wait")
        return {"asked of": self.path}

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture
def connections(recording, monkeypatch):
    """The connections that the screens of the recording make. They stand for those to a running engine."""
    monkeypatch.setattr(Connection, "answering", threading.Event(), raising=False)
    monkeypatch.setattr(Connection, "made", [], raising=False)
    monkeypatch.setattr(torpor.console, "connect", Connection)
    yield Connection.made
    Connection.answering.set()


def test_a_slow_call_holds_up_neither_the_screen_nor_the_stop_of_its_user(recording, connections):
    app = Console(recording)

    def waits():
        assert app.said == "transfer.wait: under way" and not connections[0].closed

    wait = ["colon", *"transfer.wait", "space", *"candidate=3", "enter", waits]
    drive(app, ["p", "p", *wait, "c", Connection.answering.set, until(app, lambda: "asked of" in app.said)])
    assert app.said.startswith("transfer.wait: {")
    stopped, waited = connections
    assert [method for method, _ in stopped.calls] == ["pause", "resume"]
    assert waited.calls == [("transfer.wait", {"candidate": 3.0})]
    assert stopped.path == waited.path == recording.snapshot["processes"][0]["path"].replace(".events", ".sock")


def test_while_only_a_transfer_is_held_a_pause_is_asked_for_twice(recording, connections):
    [process] = recording.snapshot["processes"]
    process["stops"] = [{"stop": 3, "cause": "hold", "seconds": 1.0, "request": ""}]
    app, said = Console(recording), []
    drive(app, ["p", lambda: said.append(app.said), "n", lambda: said.append(app.said)])
    assert "the same key again" in said[0] and "nothing is stopped" in said[1] and connections == []
    drive(app := Console(recording), ["p", "p"])
    assert connections[0].calls == [("pause", {"lease": 60})] and app.said == ""
    process["stops"][0]["cause"] = "pause"
    drive(Console(recording), ["n", "p"])
    assert [method for method, _ in connections[1].calls] == ["step", "pause"]


def test_a_server_is_not_stopped_by_keys(recording, connections):
    recording.snapshot["processes"][0]["process"] = "front0"
    drive(app := Console(recording), ["p", "p"])
    assert "front0 is a server" in app.said and connections == []


def test_an_error_that_an_engine_answers_does_not_end_its_stop(recording, connections):
    app = Console(recording)
    said = []
    drive(app, ["p", "p", "colon", *"record.start", "space", *"method=x", "enter", lambda: said.append(app.said), "c"])
    assert "the disk is slow" in said[0]
    [connection] = connections
    assert connection.calls[1] == ("record.start", {"method": "x"}) and connection.calls[2][0] == "resume"


def torpor_events(directory, kind: str = "stop") -> list[str]:
    done = subprocess.run([BINARY, "events", directory, "--type", kind], capture_output=True, text=True, check=True)
    return [line.split("  stop=")[0] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("blocks", [True, False])
def test_a_made_up_engine_publishes_the_states_of_blocks_if_that_is_asked_for(blocks):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        words = [BINARY, "mock", directory, *(["--blocks"] if blocks else [])]
        engine = subprocess.Popen(words, stdout=subprocess.PIPE)
        try:
            assert b"publishes its events in" in engine.stdout.readline()
            began = time.monotonic()
            while not [line for line in torpor_events(directory, "registered") if "host" in line]:
                assert time.monotonic() - began < SECONDS and engine.poll() is None
                time.sleep(0.05)
            states = "".join(torpor_events(directory, "block"))
            assert all(state in states for state in ("in flight", "registered")) if blocks else states == ""
        finally:
            engine.terminate()
            engine.wait()
            engine.stdout.close()


def test_where_there_is_no_engine_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("TORPOR_BINARY", str(BINARY))
    app = Console(Live(str(tmp_path / "nothing")))
    began = time.monotonic()
    while app.source.ended is None:
        assert time.monotonic() - began < SECONDS
        time.sleep(0.01)
    drive(app, ["1", "4"])
    assert app.process is None and "nothing" in app.source.ended


READING = (
    "2",
    "enter",
    "8",
    "left_square_bracket",
    "right_square_bracket",
    "left_curly_bracket",
    "right_curly_bracket",
)


@pytest.mark.parametrize("path", ["nothing", "empty [/b]"])
def test_without_an_engine_no_key_ends_the_console(monkeypatch, tmp_path, path):
    monkeypatch.setenv("TORPOR_BINARY", str(BINARY))
    for folder in (tmp_path / "empty [", tmp_path / "empty [/b]"):
        folder.mkdir(mode=0o700)
    app, said = Console(Live(str(tmp_path / path))), []
    drive(app, [*READING, "t", "4", "enter", "8", lambda: said.append(app.said)])
    assert app.return_code in (None, 0) and app.process is None
    assert str(tmp_path / path) in said[0]


def test_what_the_source_refuses_is_said_and_the_console_goes_on(recording, monkeypatch):
    def fails(*_):
        raise errors.NotFound("the disk has\x1b[2J gone", "mount it")

    with monkeypatch.context() as broken:
        broken.setattr(recording, "events", fails)
        broken.setattr(recording, "lint_moments", fails)
        for key in READING:
            app, said = Console(recording), []
            drive(app, [key, lambda app=app, said=said: said.append(app.said)])
            assert "gone" in said[0] and "mount it" in said[0]
        broken.setattr(recording, "at", lambda moment: recording.snapshot if moment is None else fails())
        app = Console(recording)
        _, picture = drive(app, ["t", "2", "enter"])
        assert "gone" in app.said and app.moment is None
        assert "gone" in picture and "\x1b" not in picture
    app = Console(recording)
    drive(app, ["8", "t", "2", "enter"])
    assert app.said == "" and app.moment == 2


def test_names_with_ends_of_lines_are_names(recording, monkeypatch):
    name = "a\u2028b\u0085c"
    event = {"time": 1.0, "process": "core0", "sequence": 1, "type": "slot", "to": "decoding", "request": name}
    monkeypatch.setattr(
        "torpor.console.source.ask", lambda *_: json.dumps(event, ensure_ascii=False) + "\n" + json.dumps(event) + "\n"
    )
    assert [each["request"] for each in recording.events()] == [name, name]


def until(app, condition, seconds=SECONDS):
    """A step of drive(): looks until it holds."""

    def wait():
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, app.said
            time.sleep(0.05)
            app.look()

    return wait


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
def test_every_key_does_something_and_ends_nothing_on_a_made_up_engine(mock, size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the picture
    app = Console(Live(mock))
    keys = [key for binding in [*app.BINDINGS, *Lines.BINDINGS, *Slots.BINDINGS] for key in binding.key.split(",")]
    assert {"1", "8", "b", "x", "colon", "question_mark", "tab", "space", "left_square_bracket"} <= set(keys)
    presses = [key for key in keys if key != "q"]
    drive(
        app,
        [until(app, lambda: app.process and app.process["slots"]), *(k for key in presses for k in (key, "escape"))],
        size,
    )
    assert app.process is not None and app.return_code in (None, 0)
    assert [path.suffix for path in tmp_path.iterdir()] == [".svg"]


@pytest.mark.long
def test_readonly_every_key_only_reads(mock, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torpor.console, "connect", lambda *_, **__: pytest.fail("it connected"))
    app = Console(Live(mock), readonly=True)
    keys = [key for binding in app.BINDINGS for key in binding.key.split(",") if key != "q"]
    drive(
        app, [k for key in keys for k in (key, *(("enter", "escape") if key in ("b", "x", "colon") else ("escape",)))]
    )
    assert "read-only: no" in app.said


def test_a_breakpoint_is_set_hit_and_let_go_by_keys(mock):
    app = Console(Live(mock))
    stopped = until(app, lambda: app.process and app.process["stops"])
    lines, _ = drive(app, ["b", *"decoding", "space", *"once=true", "enter", stopped, "7"])
    assert any("by a breakpoint" in line for line in lines)
    app = Console(Live(mock))
    drive(app, ["colon", *"resume", "enter", until(app, lambda: app.process and not app.process["stops"])])
    app = Console(Live(mock))
    drive(app, ["colon", *"breakpoint.add", "space", *"type=slat", "enter"])
    assert "type is" in app.said  # what is wrong is said


def many(recording, count: int = 60) -> list[dict]:
    """Give the recording's process so many slots."""
    process = recording.snapshot["processes"][0]
    process["slots"] = [
        dict(process["slots"][0], request=f"r{number:02}", slot=number, computed_tokens=count - number)
        for number in range(count)
    ]
    return process["slots"]


def test_many_slots_can_be_chosen_and_stay_in_sight(recording):
    slots, app = many(recording), Console(recording)

    def another_begins():
        slots.append(dict(slots[0]))
        app.look()

    _, picture = drive(app, ["1", *["down"] * 50, another_begins], (80, 24))
    assert app.row == 50 and "r50" in picture and "r00" not in picture
    assert "REQUEST" in picture  # the heads stay


def test_what_was_scrolled_to_stays_in_sight(recording):
    slots, app, seen = many(recording), Console(recording), []

    def another_begins():
        slots.append(dict(slots[0]))
        app.look()

    def look():
        seen.append((app.query_one(Slots).scroll_offset.y, app.query_one(Slots).cursor_row))

    def scroll():
        app.query_one(Slots).scroll_to(y=30, animate=False)

    drive(app, ["1", scroll, look, another_begins, look], (80, 24))
    assert seen == [(30, 0), (30, 0)]


@pytest.mark.long
def test_the_chosen_slot_is_copied_in_any_order(recording):
    many(recording)
    drive(app := Console(recording), ["1", "i", "down", "y"], (80, 24))
    assert app.said == "copied r58"
    drive(app := Console(recording), ["1", *["s"] * 5, "y"], (80, 24))
    assert app.order == "request" and app.said == "copied r00"


def test_a_click_on_a_column_sorts_and_another_one_turns_the_order(recording):
    many(recording, 3)
    app, seen = Console(recording), []

    async def run():
        async with app.run_test(size=(80, 24)) as pilot:
            for column in (0, 2, 2, 4):  # by request, by computed tokens, and turned; HOST sorts nothing
                table = app.query_one(Slots)
                await pilot.pause()
                widths = [each.get_render_width(table) for each in table.ordered_columns]
                await pilot.click(Slots, offset=(1 + sum(widths[:column]) + 2, 0))
                await pilot.pause()
                seen.append([line.plain.split()[0] for line in app.body.lines[1:]])
            return app.body.lines[0].plain

    heads = asyncio.run(run())
    assert seen == [["r00", "r01", "r02"], ["r02", "r01", "r00"], ["r00", "r01", "r02"], ["r00", "r01", "r02"]]
    assert "COMPUTED ▼" in heads


def test_each_screen_says_what_it_is_for_and_where_the_others_are(recording):
    app, seen, keys = Console(recording), [], "12345678?"

    def look():
        seen.append([str(app.query_one(name).content) for name in ("#tabs", "#hint")])

    presses = ["question_mark" if key == "?" else key for key in keys]
    drive(app, [step for key in presses for step in (key, look)], (80, 24))
    assert [hint for _, hint in seen] == [pages.HINTS[key] for key in keys]
    assert all(len(words) <= 78 for both in seen for words in both)
    assert {tuple(word for word in tabs.split() if word.isdigit()) for tabs, _ in seen} == {tuple("12345678")}


def test_what_is_not_there_yet_is_said(recording):
    process = recording.snapshot["processes"][0]
    process |= {name: [] for name in ("slots", "operations", "memory", "tiers", "copies", "stops", "transfers")}
    app, seen = Console(recording), {}

    def look():
        seen[app.page] = [line.plain for line in app.body.lines]

    drive(app, [step for key in "1234567" for step in (key, look)], (80, 24))
    assert len(seen) == 7
    assert [key for key, lines in seen.items() if not any(re.match("No|nothing", line) for line in lines)] == []


def two_processes(recording, **first) -> list[dict]:
    """Beside the recording's process another one, which lives and did most; `first`: fields of the recording's."""
    [process] = recording.snapshot["processes"]
    other = json.loads(json.dumps(process)) | {"pid": 77, "alive": True, "lints": [], "operations": []}
    other["steps"]["seen"] += 1
    recording.snapshot["processes"] = [process | first, other]
    return recording.snapshot["processes"]


def test_processes_that_have_ended_are_hidden_until_asked_for_and_their_lints_are_not(recording):
    dead, _ = two_processes(recording, alive=False)
    assert dead["lints"]
    app, seen = Console(recording), []

    def look():
        seen.append((app.process["pid"], str(app.query_one("#top").content)))

    drive(app, [look, "tab", look, "d", look, "tab", look], (80, 24))
    assert [pid for pid, _ in seen] == [77, 77, 77, dead["pid"]]
    assert "1 ended (d)" in seen[0][1] and "failed operation" in seen[0][1] and "ended (d)" not in seen[2][1]


def test_memory_and_copies_of_workers_stand_beside_their_core(newest):
    core, worker = two_processes(newest, alive=True)
    worker["memory"], worker["copies"] = core["memory"], core["copies"]
    core |= {"memory": [], "copies": [], "pid": 66}
    core["steps"]["seen"] += 2
    app, seen = Console(newest), []

    def look():
        seen.append([line.plain for line in app.body.lines])

    def ends():  # what an ended worker had is not there
        worker["alive"] = False
        app.look()

    drive(app, ["5", look, "3", look, "5", ends, look], (80, 24))
    assert app.process["pid"] == 66
    memory, copies, none = seen
    assert any(line.split()[:2] == ["0", "kv_cache"] for line in memory) and any("pid 77" in line for line in memory)
    assert all(len(line) <= 78 for line in memory) and any("/s" in line for line in copies) and "No rank" in none[0]


def test_memory_of_an_ended_process_is_its_own(newest):
    dead, _ = two_processes(newest, alive=False)
    lines, _ = drive(Console(newest), ["d", "tab", "5"], (80, 24))
    assert any(f"pid {dead['pid']}" in line for line in lines) and not any("pid 77" in line for line in lines)


def test_bars_have_their_parts_and_their_whole():
    tier = {"tier": "host", "used_blocks": 50, "pinned_blocks": 25, "cached_blocks": 25, "empty_blocks": 25}
    blocks = {"registered": 0, "dropped": {}}
    line = pages.tiers({"tiers": [tier], "slots": [], "blocks": blocks})[1].plain
    assert line.endswith("█" * 6 + "▓" * 6 + "▒" * 6 + "░" * 6)
    full = tier | {"used_blocks": 100, "pinned_blocks": 100, "cached_blocks": 0, "empty_blocks": 0}
    assert pages.tiers({"tiers": [full], "slots": [], "blocks": blocks})[1].plain.endswith("█" * 24)


def test_phases_are_a_waterfall_with_bytes_and_rate():
    phase = {"state": "done", "bytes": 0}
    phases = [
        phase | {"phase": "capture", "after_seconds": 0.0, "seconds": 0.5},
        phase | {"phase": "save", "after_seconds": 0.5, "seconds": 0.5, "bytes": 2_000_000_000},
    ]
    sleep = {"operation": "sleep", "number": 1, "state": "done", "seconds": 1.0, "error": "", "phases": phases}
    _, capture, save, *_ = [line.plain for line in pages.operations({"operations": [sleep]})]
    assert capture.index("█") + 12 == save.index("█") and capture.count("█") == save.count("█") == 12
    assert "4.00 GB/s" in save and "GB/s" not in capture and len(save) <= 78


def test_slots_are_sorted_by_the_engine_as_by_the_keys(mock):
    with torpor.console.connect(mock) as engine:
        table = {each["method"]: each["parameters"] for each in engine.hello()["methods"]}
        fields = table["slots"]["sort"].partition(";")[0].replace(" or ", ", ").split(", ")
        assert tuple(fields) == pages.ORDERS[1:]
        # Stopped where there are two, whose order says something.
        engine.add_breakpoint(type="step", at_least=2 << 32, lease=300)
        until = time.monotonic() + SECONDS
        while not engine.stops()["stops"]:
            assert time.monotonic() < until
            time.sleep(0.02)
        process, before = engine.snapshot(), None
        while before != process["at"]:  # its last step ends
            before, process = process["at"], engine.snapshot()
        assert len(process["slots"]) > 1
        for order in pages.ORDERS[1:]:
            for inverted in (False, True):
                expected = [slot["request"] for slot in pages.chosen_slots(process, "", order, inverted)]
                sorted_there = engine.slots(sort=order, invert=inverted)["slots"]
                assert [slot["request"] for slot in sorted_there] == expected, (order, inverted)
        # What is known of one of them, by the command line and by Python.
        name = process["slots"][0]["request"]
        words = [BINARY, "live", "--engine", mock, "request", f"request={name}"]
        shown = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        story = engine.request(request=name)
        assert story["slot"]["request"] == name and story["states"][-1]["state"] == story["slot"]["state"]
        assert shown["states"] == story["states"] and {each["request"] for each in story["events"]} == {name}
        with pytest.raises(errors.NotFound, match="no event"):
            engine.request(request=name[:-1] + "x")


def test_an_engine_that_goes_leaves_its_last_words_and_another_one_is_shown_when_it_comes(mock):
    app = Console(Live(mock))
    pids = []

    def note():
        pids.append(app.process["pid"])
        subprocess.run(["kill", "-KILL", str(pids[0])], check=True)

    second = []

    def another():
        assert "LAST WORDS" in str(app.query_one("#top").content)
        second.append(subprocess.Popen([BINARY, "mock", mock], stdout=subprocess.PIPE))

    def alive(wanted):
        return until(app, lambda: app.process is not None and app.process["alive"] is wanted)

    try:
        drive(
            app,
            [alive(True), note, alive(False), another, alive(True), "p", "p", until(app, lambda: app.process["stops"])],
        )
        assert app.process["pid"] == second[0].pid != pids[0] and app.said == ""
    finally:
        for engine in second:
            engine.terminate()
            engine.wait()
            engine.stdout.close()


def test_without_colours_a_state_is_a_letter(recording, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    lines, picture = drive(Console(recording), ["1"])
    assert any("D decoding" in line for line in lines)
    colours = [bytes.fromhex(colour) for colour in re.findall(r"fill: #([0-9a-f]{6})", picture)]
    assert colours and all(max(colour) - min(colour) < 8 for colour in colours)  # greys
