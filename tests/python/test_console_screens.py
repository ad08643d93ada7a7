# SPDX-License-Identifier: Apache-2.0
"""The screens of the console, driven key by key: over a recording, and over a made-up engine that is really stopped."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
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
from torpor.console.app import Console, Lines  # noqa: E402
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
            lines = [line.plain for line in app.query_one(Lines)._lines]
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
    assert "no rank has told" in drive(Console(recording), ["5"], size)[0][0]  # version 1.0 had no such events
    assert "nothing stops" in drive(Console(recording), ["7"], size)[0][0]
    assert len(drive(Console(recording), ["8"], size)[0]) > 50


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
    assert pages.slots(then["slots"])[0].plain == lines[0]
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
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        engine = subprocess.Popen([BINARY, "mock", directory], stdout=subprocess.PIPE)
        engine.stdout.readline()
        yield directory
        engine.terminate()
        engine.wait()
        engine.stdout.close()


def test_an_engine_is_stopped_stepped_and_let_go_by_keys(mock):
    app = Console(Live(mock))
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

    def asks():
        assert "the same key again" in app.said
        app.look()
        assert not app.process["stops"]

    drive(app, [until(False), "p", asks, "n", asks, "p", "p", until(True), "n", "c", until(False)])
    assert shown == [False, True, False] and app.said == ""
    kinds = [line.split()[-1] for line in torpor_events(mock)]
    assert kinds.count("begun") == 1 and kinds.count("resumed") == 1


def torpor_events(directory) -> list[str]:
    done = subprocess.run([BINARY, "events", directory, "--type", "stop"], capture_output=True, text=True, check=True)
    return [line.split("  stop=")[0] for line in done.stdout.splitlines()]


def test_where_there_is_no_engine_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("TORPOR_BINARY", str(BINARY))
    app = Console(Live(str(tmp_path / "nothing")))
    began = time.monotonic()
    while app.source.ended is None:
        assert time.monotonic() - began < SECONDS
        time.sleep(0.01)
    drive(app, ["1", "4"])
    assert app.process is None and "nothing" in app.source.ended


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
    keys = [key for binding in [*app.BINDINGS, *Lines.BINDINGS] for key in binding.key.split(",")]
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


@pytest.mark.long
def test_many_slots_can_be_chosen_and_stay_in_sight(recording):
    process = recording.snapshot["processes"][0]
    process["slots"] = [dict(process["slots"][0], request=f"r{number:02}", slot=number) for number in range(60)]
    app = Console(recording)
    _, picture = drive(app, ["1", *["down"] * 50], (80, 24))
    assert app.row == 50 and "r50" in picture and "r00" not in picture
    drive(app := Console(recording), ["1", "i", "down", "y"], (80, 24))
    assert app.said == "copied r58"
    drive(app := Console(recording), ["1", *["s"] * 5, "y"], (80, 24))
    assert app.order == "request" and app.said == "copied r00"


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
        told = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        story = engine.request(request=name)
        assert story["slot"]["request"] == name and story["states"][-1]["state"] == story["slot"]["state"]
        assert told["states"] == story["states"] and {each["request"] for each in story["events"]} == {name}
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
