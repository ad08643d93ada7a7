# SPDX-License-Identifier: Apache-2.0
"""The record of answers beside an engine in this process: it has what clients were given, no more and no less."""

import pytest
from conftest import long_on_gpu_path
from requests_of_tests import run

from vllm.v1.request import RequestStatus

from torpor import _core
from torpor.vllm.server.recorder import Nobody, Recorder


@pytest.fixture
def recorder(one):
    """Listens to the engine's output processor for one test."""
    processor = one.engine.output_processor
    replaced = ("add_request", "process_outputs", "abort_requests", "propagate_error")
    stock = {name: getattr(processor, name) for name in replaced}
    answers = _core.DeliveryLog({"directory": None, "engine": one.llm.torpor.call("fingerprint"), "keep_seconds": 600})
    yield Recorder(processor, answers, False)
    for name, method in stock.items():
        setattr(processor, name, method)


def of(recorder, name: str) -> list[dict]:
    """The recorded choices of a request, in their order."""
    return [recorder.answers.get(request_id) for request_id in recorder.answers.find(name, "")]


def test_it_has_each_token_and_the_text_that_was_delivered(one, recorder):
    delivered = one.begin()
    while one.engine.has_unfinished_requests():
        delivered |= run(one.engine, 1)
        for name, (_, completions, _) in delivered.items():
            recorded = [recorder.answers.part(request_id) for request_id in recorder.answers.find(name, "")]
            for index, tokens, text, *_ in completions:
                assert recorded[index]["tokens"] == tokens and recorded[index]["text"] == text, name
    assert delivered == one.expected
    for name, (_, completions, _) in delivered.items():
        choices = of(recorder, name)
        for index, tokens, _, finish_reason, stop_reason, *_ in completions:
            choice = choices[index]
            assert (choice["choice"], choice["state"]) == (index, "finished")
            assert (choice["finish_reason"], choice["stop_reason"]) == (finish_reason, stop_reason)
            assert list(choice["request"]["output_token_ids"]) == tokens


def test_what_is_aborted_keeps_what_it_had(one, recorder):
    had = one.begin(12, ["greedy", "long"])["greedy"][1][0]
    for state in one.engine.output_processor.request_states.values():
        state.queue = Nobody()  # as in a server: each has its reader
    one.engine.abort_request(["greedy"])
    [choice] = of(recorder, "greedy")
    assert (choice["state"], choice["finish_reason"], choice["text"]) == ("aborted", "abort", had[2])
    assert recorder.answers.counts()["running"] == 1
    run(one.engine)
    assert recorder.answers.counts()["running"] == 0


@pytest.mark.gpu_path
@long_on_gpu_path
@pytest.mark.parametrize("since", [0, 2, 9])
def test_a_new_engine_goes_on_from_what_was_given_since_the_checkpoint(one, recorder, since):
    """As after a kill: no token that a reader has is drawn again, and the next ones are those that would have come."""
    names = ("greedy", "seeded", "prefix-a", "long", "penalties")
    one.begin(9, names)
    path = one.llm.checkpoint().checkpoint
    run(one.engine, since)
    given = {name: list(of(recorder, name)[0]["request"]["output_token_ids"]) for name in names}
    packed = recorder.answers.pack()
    recorder.close()  # the process is gone
    run(one.engine)
    one.llm.reset_prefix_cache()
    report = one.llm.torpor.call("wake_up", {"from_checkpoint": path, "answers": packed, "hold": True})
    assert recorder.take_up(report["restored"], report["outputs"]) == []
    one.llm.torpor.call("end_hold", {"keep": True})
    for state in one.engine.output_processor.request_states.values():
        assert list(state.detokenizer.output_token_ids) == given[state.external_req_id]
        state.queue = None  # step() returns what comes
    finished = one.finish({})
    for name in names:
        if of(recorder, name)[0]["state"] == "running":
            assert finished[name][1][0][1] == one.expected[name][1][0][1], name


def test_what_waited_when_the_server_stopped_is_queued_until_a_new_engine_schedules_it(one, recorder, monkeypatch):
    """In vLLM's metrics. A request that ran is not queued a second time."""
    one.begin(2, ("greedy", "seeded", "long", "long-seeded"))  # one of them waits
    path = one.llm.checkpoint().checkpoint
    packed = recorder.answers.pack()
    recorder.close()  # the process is gone
    run(one.engine)
    one.llm.reset_prefix_cache()
    report = one.llm.torpor.call("wake_up", {"from_checkpoint": path, "answers": packed, "hold": True})
    with monkeypatch.context() as counted:
        counted.setattr(one.engine.output_processor, "log_stats", True)
        assert recorder.take_up(report["restored"], report["outputs"]) == []
    one.llm.torpor.call("end_hold", {"keep": True})
    requests, states = one.core.scheduler.requests, one.engine.output_processor.request_states
    waiting = {name for name, request in requests.items() if request.status is RequestStatus.WAITING}
    assert 0 < len(waiting) < len(requests)
    assert {name for name, state in states.items() if state.stats.scheduled_ts == 0} == waiting
    for state in states.values():
        state.queue = None  # step() returns what comes
    one.finish({})
