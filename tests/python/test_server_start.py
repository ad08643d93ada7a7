# SPDX-License-Identifier: Apache-2.0
"""A server that finds a checkpoint which does not fit its engine. Without an engine."""

from types import SimpleNamespace

import pytest
from server_stubs import Engine, build, metric, no_settings, run, started  # noqa: F401
from torpor.errors import Damaged, Incompatible
from torpor.vllm.scheduler_values import unstarted_request
from torpor.vllm.values import sampling_to_value
from vllm import SamplingParams

OTHER = Incompatible("max_num_seqs: checkpoint has 64, this engine has 32")


def answer(request_id: str) -> dict:
    request = unstarted_request(request_id, [1, 2], sampling_to_value(SamplingParams(max_tokens=4)), 0.0)
    return {"request": request, "response": request_id, "tenant": "", "choice": 0, "front": {"state": {}}}


def outcome(monkeypatch, directory, wakes_with, in_checkpoint=(), ended=(), running=(), **settings):
    """State of a server that found this at its start, and what it left."""

    async def scene():
        from torpor.vllm.server import life, start

        def read_checkpoint(path, key_file):
            assert path == str(directory)
            values = {"scheduler": {"requests": [{"id": each} for each in in_checkpoint]}}
            return SimpleNamespace(to_dict=lambda: values)  # as EngineCheckpoint has it

        monkeypatch.setattr(start, "_core", SimpleNamespace(read_checkpoint=read_checkpoint))
        engine = Engine(directory, wakes_with=wakes_with)
        _, server = build(monkeypatch, [], engine=engine, **settings)
        stock = life.Recorder

        def recorder(processor, answers, *others):
            found = stock(processor, answers, *others)
            for each in (*ended, *running):
                answers.start(answer(each))
            for each in ended:
                found.end(each, "finished", "stop", None)
            return found

        monkeypatch.setattr(life, "Recorder", recorder)
        await started(server)
        states = {each["request"]["id"]: each["state"] for each in server.recorder.answers.all()}
        return server, states

    return run(scene())


@pytest.mark.parametrize("in_checkpoint", [(), ("a", "b")])
def test_it_serves_without_one_that_holds_no_running_request(monkeypatch, tmp_path, in_checkpoint):
    server, _ = outcome(monkeypatch, tmp_path, OTHER, in_checkpoint, ended=("a", "b", "c"))
    assert server.state == "awake" and server.problem is None
    assert server.left_checkpoint == {"path": str(tmp_path), "why": str(OTHER)}
    wakes = [options for method, options in server.engine.calls if method == "wake_up"]
    assert len(wakes) == 1, "it has computed requests again"


@pytest.mark.parametrize(
    "found",
    [
        {"in_checkpoint": ("a",)},  # no record says that it has ended
        {"running": ("a",)},
        {"in_checkpoint": ("a", "b"), "ended": ("a",)},
    ],
)
def test_it_does_not_serve_without_one_that_would_lose_a_request(monkeypatch, tmp_path, found):
    server, _ = outcome(monkeypatch, tmp_path, OTHER, **found)
    assert server.state == "failed" and server.problem is OTHER and server.left_checkpoint is None


def test_damage_says_nothing_of_requests(monkeypatch, tmp_path):
    server, _ = outcome(monkeypatch, tmp_path, Damaged("STATE"))
    assert server.state == "failed"


def test_discard_ends_only_those_that_run(monkeypatch, tmp_path):
    server, states = outcome(monkeypatch, tmp_path, OTHER, running=("a",), ended=("b",), on_wake_error="discard")
    assert server.state == "awake" and states == {"a": "failed", "b": "finished"}
    assert metric(server, "torpor_start_requests", result="failed") == 1


class Store:
    """What is newest in the object store does not fit: only its answers came."""

    unfit = OTHER

    def __init__(self, *_):
        pass

    async def arrive(self, _fingerprint) -> str:
        return ""

    async def release(self) -> None:
        pass

    async def keep(self) -> None:
        pass


@pytest.mark.parametrize(("running", "state"), [((), "awake"), (("a",), "failed")])
def test_one_in_an_object_store_is_left_there_where_no_answer_runs(monkeypatch, tmp_path, running, state):
    from torpor.vllm.server import life

    monkeypatch.setattr(life, "Remote", Store)
    store = "s3://bucket/prefix"
    server, _ = outcome(monkeypatch, tmp_path, None, ended=("b",), running=running, object_store=store)
    assert server.state == state
    assert server.left_checkpoint == (None if running else {"path": store, "why": str(OTHER)})
