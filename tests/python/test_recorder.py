# SPDX-License-Identifier: Apache-2.0
"""The record of answers beside an engine in this process: it has what clients were given, no more and no less."""

import pytest
from conftest import long_on_gpu_path
from requests_of_tests import REQUESTS, run

from vllm.v1.request import RequestStatus

from torpor import _core
from torpor.vllm.scheduler_values import drop_from_workers
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


def test_the_model_runner_forgets_what_has_ended_since_the_checkpoint(one, recorder):
    one.begin(2, ("greedy", "short"))
    path = one.llm.checkpoint().checkpoint
    while "short" in {state.external_req_id for state in one.engine.output_processor.request_states.values()}:
        one.engine.step()
    packed = recorder.answers.pack()
    recorder.close()
    run(one.engine)
    one.llm.reset_prefix_cache()
    report = one.llm.torpor.call("wake_up", {"from_checkpoint": path, "answers": packed, "hold": True})
    assert recorder.take_up(report["restored"], report["outputs"]) == []
    one.llm.torpor.call("end_hold", {"keep": True})
    [greedy] = recorder.answers.find("greedy", "")
    assert list(one.runner.requests) == list(one.core.scheduler.requests) == [greedy]
    [worker] = one.core.torpor_side.hooks.capture()["workers"]
    assert [item["id"] for item in worker["engine"]["requests"]] == worker["rows"] == [greedy]
    one.engine.abort_request(["greedy"])


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        ({}, True),
        ({"output_token_ids": [7, 8]}, False),  # a worker may be behind, never ahead
        ({"output_token_ids": [7, 8, 9, 10], "status": "preempted"}, True),
        ({"output_token_ids": [7, 5, 9]}, False),
        ({"prompt_token_ids": [2, 1]}, False),
        ({"output_token_ids": [], "status": "waiting"}, False),
        ({"id": "b"}, False),
    ],
)
def test_a_worker_keeps_what_a_request_goes_on_from(now, kept):
    of_worker = {"id": "a", "prompt_token_ids": [1, 2], "output_token_ids": [7, 8, 9]}
    workers = [{"rows": rows, "engine": {"requests": [of_worker]}} for rows in ([], ["a"])]
    request = {"id": "a", "prompt_token_ids": [1, 2], "output_token_ids": [7, 8, 9], "status": "running"} | now
    drop_from_workers({"scheduler": {"requests": [request]}, "workers": workers})
    assert [bool(worker["engine"]["requests"]) for worker in workers] == [kept, True]


def test_a_request_that_took_another_course_goes_on_from_the_delivered_tokens(one, recorder):
    """As many tokens as the checkpoint has, but others: nothing of the state that was saved for it is used."""
    names = ("greedy", "seeded")
    one.begin(9, names)
    path = one.llm.checkpoint().checkpoint
    drawn = {state.req_id: state.generator.get_state() for state in one.runner.requests.values() if state.generator}
    others = _core.DeliveryLog({"directory": None, "engine": one.llm.torpor.call("fingerprint"), "keep_seconds": 600})
    given = {}
    for name in names:
        answer = of(recorder, name)[0]
        request_id, tokens = answer["request"]["id"], list(answer["request"]["output_token_ids"])
        given[name] = [*tokens[:-1], 100 if tokens[-1] != 100 else 101]
        kept = {key: answer[key] for key in ("response", "tenant", "choice", "front")}
        others.start(kept | {"request": answer["request"] | {"output_token_ids": []}})
        step = {"text": "", "state": "running", "finish_reason": "", "stop_reason": None}
        others.step([step | {"id": request_id, "at": 0, "tokens": given[name]}])
    recorder.close()
    run(one.engine)
    one.llm.reset_prefix_cache()
    report = one.llm.torpor.call("wake_up", {"from_checkpoint": path, "answers": others.pack(), "hold": True})
    recorder.answers = others
    assert recorder.take_up(report["restored"], report["outputs"]) == []
    for state in one.runner.requests.values():
        assert state.output_token_ids == given[state.req_id.rsplit("-", 1)[0]] and state.num_computed_tokens == 0
        if state.generator is not None:
            assert state.generator.get_state().equal(drawn[state.req_id])
    one.llm.torpor.call("end_hold", {"keep": True})
    for state in one.engine.output_processor.request_states.values():
        state.queue = None
    [_, [[_, tokens, *_]], _] = one.finish({})["greedy"]
    prompt, params = REQUESTS["greedy"]
    again = params.clone()
    again.max_tokens -= len(given["greedy"])
    start = [*one.llm.get_tokenizer().encode(prompt), *given["greedy"]]
    [output] = one.llm.generate([{"prompt_token_ids": start}], again, use_tqdm=False)
    assert tokens == given["greedy"] + list(output.outputs[0].token_ids)
