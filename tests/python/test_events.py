# SPDX-License-Identifier: Apache-2.0
"""What vLLM's engine tells as events, and the verbs of `torpor` that read it."""

import contextlib
import json
import subprocess
import tempfile

import pytest
from conftest import LONG_ON_GPU_PATH
from inspector import BINARY, look

pytestmark = [pytest.mark.gpu_path, *LONG_ON_GPU_PATH]


@pytest.fixture
def directory(events_dir):
    return events_dir


@pytest.fixture
def published(one, directory, monkeypatch):
    """The engine of this process, with what it tells; `published()` gives the events since the test began."""
    monkeypatch.setenv("TORPOR_EVENTS_DIR", directory)
    monkeypatch.setattr(one.core.scheduler, "torpor_slots", None, raising=False)
    with contextlib.suppress(AttributeError):
        monkeypatch.delattr(one.core, "torpor_side")
    seen = 0

    def events() -> list[dict]:
        done = subprocess.run([BINARY, "events", directory, "--json"], capture_output=True, text=True, check=True)
        return [event for event in map(json.loads, done.stdout.splitlines()) if event["sequence"] > seen]

    one.begin(1, ["greedy"])  # the ring is there from now on
    one.finish({})
    seen = max(event["sequence"] for event in events())
    return events


def test_each_requests_way_is_published_and_no_token_is_another(one, published):
    answers = one.begin(12)
    requests = set(one.core.scheduler.requests)
    assert one.finish(answers) == one.expected
    one.begin(1, ["greedy"])  # the ends of a step's requests are seen in the next one
    ways: dict[str, list[str]] = {}
    for event in published():
        assert event["type"] not in ("lost", "error"), event
        if event["type"] == "slot" and event["request"] in requests:
            way = ways.setdefault(event["request"], [])
            assert event["from"] == (way[-1] if way else "none")
            if event["from"] != event["to"]:
                way.append(event["to"])
    for request in requests:
        assert ways[request][:2] == ["initialized", "prefilling"] and ways[request][-1] == "finished", ways[request]
    assert sum("decoding" in ways[request] for request in requests) >= len(requests) - 1
    steps = [event for event in published() if event["type"] == "step"]
    assert len(steps) >= 12 and max(step["running"] for step in steps) > 4


def test_sleeps_and_wakes_are_published_by_phase(one, published, directory):
    answers = one.begin(5)
    slept = one.llm.sleep(level=1, preserve_state=True, to="host")
    woken = one.llm.wake_up()
    assert one.finish(answers) == one.expected
    [process] = look("console", directory)["processes"]
    assert process["alive"] and process["engine"] == "awake" and process["lost_events"] == 0
    for row, report in zip(process["operations"][-2:], (slept, woken), strict=True):
        assert row["state"] == "done" and not row["error"]
        assert [phase["phase"] for phase in row["phases"]] == [phase["name"] for phase in report.phases]
        assert [phase["bytes"] for phase in row["phases"]] == [phase["bytes"] for phase in report.phases]
    states = [event["to"] for event in published() if event["type"] == "engine"]
    assert states == ["falling asleep", "asleep", "waking", "awake"]


def test_without_a_connector_it_tells_every_type_but_those_of_transfers_between_tiers(one, published, monkeypatch):
    """Those are in test_connector.py, stop and control in test_console.py.

    copy and memory are the rank's, which here is older than the ring: test_other_processes.py.
    """
    monkeypatch.setenv("TORPOR_EVENTS_KEYS", "1")
    monkeypatch.setattr(one.core.scheduler, "torpor_slots", None, raising=False)
    answers = one.begin(8)
    one.llm.sleep(level=1, preserve_state=True, to="host")
    one.llm.wake_up()
    assert one.finish(answers) == one.expected
    assert {event["type"] for event in published()} - {"stop", "control"} == set(
        "engine key operation phase request slot step tier".split()
    )


def test_a_sleep_that_fails_says_why_and_what_was_undone(one, published, directory, monkeypatch):
    answers = one.begin(5)
    one.llm.torpor.call("state")  # its hooks are there
    monkeypatch.setattr(one.core.torpor_side.hooks, "capture", lambda: 1 / 0)
    with pytest.raises(Exception, match="division"):
        one.llm.sleep(level=1, preserve_state=True, to="host")
    monkeypatch.undo()
    assert one.finish(answers) == one.expected
    row = look("console", directory)["processes"][0]["operations"][-1]
    assert row["state"] == "failed" and "division" in row["error"]
    assert [(phase["phase"], phase["state"]) for phase in row["phases"]] == [
        ("quiesce", "undone"),
        ("capture", "failed"),
    ]


def test_a_recording_has_what_was_published(one, published, directory, tmp_path):
    recorder = subprocess.Popen([BINARY, "record", directory, "-o", tmp_path / "r", "--json"], stdout=subprocess.PIPE)
    try:
        assert one.finish(one.begin(12)) == one.expected
    finally:
        recorder.send_signal(2)
        result = json.loads(recorder.communicate(timeout=600)[0])
    assert result["processes"] == 1 and result["lost"] == 0 and result["events"] > 100
    recorded = subprocess.run([BINARY, "events", tmp_path / "r", "--json"], capture_output=True, text=True, check=True)
    by_sequence = {event["sequence"]: event for event in map(json.loads, recorded.stdout.splitlines())}
    now = published()
    assert len(now) > 100 and all(
        by_sequence[event["sequence"]] == event for event in now if event["sequence"] in by_sequence
    )
    assert sum(event["sequence"] in by_sequence for event in now) > len(now) - 20  # but what came after it ended
    trace = subprocess.run([BINARY, "events", tmp_path / "r", "--export", "perfetto"], capture_output=True, check=True)
    assert any(event["name"] == "decoding" for event in json.loads(trace.stdout)["traceEvents"])


def test_a_recording_waits_for_the_first_engine(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as rings:
        rings += "/made-by-the-engine"
        words = [BINARY, "record", rings, "-o", tmp_path, "--for", "2s", "--json"]
        recorder = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert b"waits for an engine" in recorder.stderr.readline()
        with subprocess.Popen([BINARY, "mock", rings], stdout=subprocess.DEVNULL) as engine:
            written, _ = recorder.communicate(timeout=600)
            engine.terminate()
    assert recorder.returncode == 0
    result = json.loads(written)
    assert result["processes"] == 1 and result["events"] > 0


def test_a_recording_of_nothing_is_an_error(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as rings:
        words = [BINARY, "record", rings, "-o", tmp_path, "--for", "0.2s"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 3 and f"no process has published events in {rings}" in done.stderr


def test_a_directory_that_is_of_no_use_stops_no_engine(one, monkeypatch, tmp_path, caplog):
    """It is not on tmpfs, or not the user's alone."""
    from torpor.vllm import slots

    tmp_path.chmod(0o755)
    monkeypatch.setenv("TORPOR_EVENTS_DIR", str(tmp_path))
    monkeypatch.setattr(slots._core, "begin_events", _refused)
    monkeypatch.setattr(one.core.scheduler, "torpor_slots", None, raising=False)
    assert one.finish(one.begin(3)) == one.expected
    assert one.core.scheduler.torpor_slots is False


def _refused(*_):
    from torpor.errors import WrongState

    raise WrongState("not on tmpfs", "use another directory")
