# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine, stopped and looked at through its socket: no token is another, and nothing else is held up by it."""

import contextlib
import json
import queue
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
from conftest import LONG_ON_GPU_PATH
import gpu_path
from inspector import BINARY
from requests_of_tests import run
from vllm.v1.core.sched.interface import PauseState

import torpor.console
from torpor import errors

pytestmark = [pytest.mark.gpu_path, *LONG_ON_GPU_PATH]


@pytest.fixture
def console(one, events_dir, monkeypatch):
    """Connected to the engine of this process, which may be stopped."""
    monkeypatch.setenv("TORPOR_EVENTS_DIR", events_dir)
    monkeypatch.setenv("TORPOR_CONSOLE", "control")
    scheduler = one.core.scheduler
    monkeypatch.setattr(scheduler, "torpor_slots", None, raising=False)
    monkeypatch.setattr(scheduler, "torpor_gate", None, raising=False)
    with contextlib.suppress(AttributeError):
        monkeypatch.delattr(one.core, "torpor_side")
    one.finish(one.begin(1, ["greedy"]))  # its first step makes the socket
    with torpor.console.connect(events_dir) as engine:
        yield engine
        engine.resume()
        for each in engine.call("breakpoint.list")["breakpoints"]:
            engine.remove_breakpoint(each["breakpoint"])


def settled(engine) -> dict:
    """The batch in flight, where there is one, gives its tokens; and then nothing moves. What has ended."""
    answers = run(engine, 1) if gpu_path.active() else {}
    assert all(engine.step() == [] for _ in range(3))
    return answers


def test_a_stopped_engine_takes_no_step_but_those_asked_for_and_no_token_is_another(one, console):
    answers = one.begin(10)
    steps = one.core.scheduler.torpor_steps
    stop = console.pause(lease=300)["stop"]
    answers |= settled(one.engine)
    assert one.core.scheduler.torpor_steps == steps
    [row] = console.stops()["stops"]
    assert row["stop"] == stop and row["cause"] == "pause" and 0 < row["left_seconds"] <= 300
    assert {slot["state"] for slot in console.slots()["slots"]} >= {"decoding"}
    console.step(steps=20)
    answers |= run(one.engine, 40)
    assert one.core.scheduler.torpor_steps <= steps + 20
    assert one.core.scheduler.torpor_steps == steps + 20 or not one.core.scheduler.requests
    console.resume(stop=stop)
    assert one.finish(answers) == one.expected


def test_it_stops_behind_an_event_of_a_request_that_is_meant(one, console):
    console.add_breakpoint(type="slot", to="decoding", request="seeded*", once=True, lease=300)
    answers = one.begin(0)
    while not (stops := console.stops()["stops"]):
        answers |= run(one.engine, 1)
    assert stops[0]["request"].startswith("seeded")
    answers |= settled(one.engine)
    events = console.events(types="stop,control")["events"]
    assert events[-1]["to"] == "begun" and "breakpoint.add" in {each.get("from") for each in events}
    console.resume()
    assert one.finish(answers) == one.expected


def tokens_of(answers: dict, *names: str) -> list:
    return [[completion[1] for completion in answers[name][1]] for name in names]


def run_while(one, holds, answers: dict) -> None:
    while holds():
        answers |= run(one.engine, 1)


def test_one_request_is_held_without_a_connector_and_the_others_are_served(one, console):
    assert one.core.scheduler.connector is None
    names = ["greedy", "seeded", "short"]
    expected = one.finish(one.begin(0, names))
    hold = console.add_breakpoint(type="request", request="greedy*", alone=True, once=True, lease=300)
    answers = one.begin(0, names)
    run_while(one, lambda: one.engine.get_num_unfinished_requests() > 1, answers)
    [row] = console.stops()["stops"]
    assert (row["stop"], row["cause"], row["held"]) == (hold, "hold", 1) and row["request"].startswith("greedy")
    assert tokens_of(answers, "seeded", "short") == tokens_of(expected, "seeded", "short") and "greedy" not in answers
    [held] = one.core.scheduler.requests.values()
    assert held.num_computed_tokens == 0 and list(one.core.scheduler.waiting) == [held]
    assert run(one.engine, 5) == {}
    console.resume(stop=hold)
    assert tokens_of(one.finish(answers), *names) == tokens_of(expected, *names)
    answers = one.finish(one.begin(0, names))  # the breakpoint was for one
    assert tokens_of(answers, *names) == tokens_of(expected, *names)


def test_a_request_that_is_held_sleeps_and_is_admitted_by_that(one, console):
    names = ["greedy", "short"]
    expected = one.finish(one.begin(0, names))
    console.add_breakpoint(type="request", request="greedy*", alone=True, lease=300)
    answers = one.begin(0, names)
    run_while(one, lambda: "short" not in answers or not answers["short"][0], answers)
    assert len(console.stops()["stops"]) == 1 and "greedy" not in answers
    assert one.llm.sleep(level=1, preserve_state=True, to="host").requests == 1
    assert console.stops()["stops"] == []
    one.llm.wake_up()
    assert tokens_of(one.finish(answers), *names) == tokens_of(expected, *names)  # it is not held a second time


def test_a_sleep_and_a_wake_end_the_stop_and_are_not_held_up(one, console):
    answers = one.begin(10)
    console.pause(lease=300)
    console.add_breakpoint(type="slot", lease=300)
    console.add_breakpoint(type="step", lease=300)
    assert one.llm.sleep(level=1, preserve_state=True, to="host").changed
    assert console.snapshot()["engine"] == "asleep" and console.stops()["stops"] == []  # it answers asleep, too
    with pytest.raises(errors.NotFound):
        console.resume(stop=1 << 20)
    one.llm.wake_up()
    for each in console.call("breakpoint.list")["breakpoints"]:
        console.remove_breakpoint(each["breakpoint"])
    console.resume()
    assert one.finish(answers) == one.expected


@pytest.mark.parametrize(("sent", "lease"), [(signal.SIGKILL, 300), (signal.SIGSTOP, 2)])
def test_where_its_console_is_killed_or_stands_still_the_engine_goes_on(one, console, sent, lease):
    answers = one.begin(10)
    other = subprocess.Popen(
        [BINARY, "live", "--engine", console.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        other.stdin.write(f"pause lease={lease}\n")
        other.stdin.flush()
        assert "stop" in json.loads(other.stdout.readline())["result"]
        answers |= settled(one.engine)
        other.send_signal(sent)
        began = time.monotonic()
        while console.stops()["stops"]:
            assert time.monotonic() - began < 200  # the lease of one that was killed is longer
            time.sleep(0.01)
        assert one.finish(answers) == one.expected
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()


def test_the_command_line_asks_and_says_what_is_wrong(console):
    def live(*words, code=0):
        done = subprocess.run(
            [BINARY, "live", "--engine", console.path, *words], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert json.loads(live("hello"))["role"] == "control"
    assert json.loads(live("pause", "lease=300"))["stop"] > 0
    assert len(console.stops()["stops"]) == 1  # it stays for its lease
    assert json.loads(live("resume"))["resumed"] == 1
    assert "preempted" in live("breakpoint.add", "type=slot", "to=nowhere", code=2)
    assert "breakpoint.list" in live("nothing", code=2)


def test_over_http_a_stop_stays_for_its_lease(console):
    from torpor.vllm.server.routes import ask_console

    stop = ask_console(console.path, "pause", {"lease": 300})["stop"]
    assert [each["stop"] for each in console.stops()["stops"]] == [stop]
    assert ask_console(console.path, "resume", {"stop": stop}) == {"resumed": 1}
    with pytest.raises(errors.WrongState, match="no console"):
        ask_console(None, "pause", {})
    with pytest.raises(errors.Unsupported):
        ask_console(console.path, "subscribe", {})


def test_an_engine_core_of_its_own_waits_for_messages_while_it_stands():
    """What EngineCoreProc's loop asks, without its process: a message, the stop's end and SIGTERM end the waiting."""
    from torpor.vllm import slots

    stands, works = threading.Event(), threading.Event()
    core = SimpleNamespace(input_queue=queue.Queue(), is_running=lambda: True)
    core.scheduler = SimpleNamespace(
        torpor_slots=False, torpor_gate=lambda: not stands.is_set(), pause_state=PauseState.UNPAUSED
    )

    def stock() -> bool:
        return works.is_set() and not (core.scheduler.torpor_gate is not None and slots.stands(core.scheduler))

    assert not slots.has_work(core, stock)
    works.set()
    assert slots.has_work(core, stock)
    stands.set()
    core.input_queue.put("an abort")
    assert not slots.has_work(core, stock)  # it takes the message
    core.input_queue.get()
    for _ in range(20):  # it goes on as soon as it may, whenever that is
        stands.set()
        threading.Timer(0.005, stands.clear).start()
        assert slots.has_work(core, stock)
    stands.set()
    core.scheduler.pause_state = PauseState.PAUSED_NEW  # vLLM waits for its requests to end
    assert slots.has_work(core, stock)
    core.scheduler.pause_state = PauseState.UNPAUSED
    core.is_running = lambda: False
    ended = []
    slots_core, slots._core = slots._core, SimpleNamespace(end_stops=lambda: (ended.append(1), stands.clear()))
    try:
        assert slots.has_work(core, stock) and ended
    finally:
        slots._core = slots_core
