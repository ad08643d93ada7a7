# SPDX-License-Identifier: Apache-2.0
"""Levels, tags and what becomes of requests without preserve_state."""

import asyncio
from pathlib import Path

import numpy
import pytest
import torch
from conftest import LONG_ON_GPU_PATH, kept_tags, result_of, tags
from requests_of_tests import REQUESTS, final
from tiny_model import make_model

from torpor import errors
from torpor.vllm.front_end_methods import sleep_options


@pytest.mark.gpu_path
def test_level_0_only_pauses(one):
    answers = one.begin(10)
    report = one.llm.sleep(level=0)
    assert report.changed and report.freed_bytes == 0
    answers |= one.stopped()
    one.llm.wake_up()
    assert one.finish(answers) == one.expected


@pytest.mark.parametrize("to", ["host", "disk"])
def test_without_preserve_state_requests_are_aborted(one, zygote, tiny_model, to):
    one.begin(10)
    report = one.llm.sleep(level=1, to=to)
    assert report.freed_bytes > 0
    one.stopped()
    one.llm.wake_up()
    assert not one.engine.has_unfinished_requests()
    assert one.finish(one.begin()) == one.expected  # the weights are right
    if to == "disk":  # it has no requests, and wakes all the same
        one.llm.reset_prefix_cache()
        woken = one.llm.wake_up(from_checkpoint=report.checkpoint)
        assert woken and woken.requests == 0 and not one.engine.has_unfinished_requests()
        process = Path(__file__).with_name("new_process.py")
        [result] = result_of(zygote.run([process, tiny_model, one.directory, report.checkpoint]))
        assert result["requests"] == 0 and result["answers"] == {} and result["failed"] == []
        assert one.finish(one.begin()) == one.expected


@pytest.mark.gpu_path
def test_without_preserve_state_requests_can_be_recomputed(one):
    """vLLM's mode "keep": their KV is dropped and computed again."""
    names = ("greedy", "prefix-a", "long", "short")  # stock vLLM on the CPU cannot resume a seeded request in chunks
    answers = one.begin(10, names)
    computed = sum(request.num_computed_tokens for request in one.core.scheduler.requests.values())
    one.llm.sleep(level=1, mode="keep")
    assert one.engine.has_unfinished_requests()
    one.llm.wake_up()
    finished = one.finish(answers)
    assert one.llm.torpor.state().recomputed_tokens == computed > 100
    for name in names:
        [_, tokens, text, *_] = finished[name][1][0]
        assert (tokens, text) == tuple(one.expected[name][1][0][1:3]), name


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"level": 0}, marks=LONG_ON_GPU_PATH),
        pytest.param({"level": 1}, marks=LONG_ON_GPU_PATH),
        {"level": 1, "preserve_state": True, "to": "disk"},
    ],
)
@pytest.mark.gpu_path
def test_running_requests_can_be_finished_first(one, options):
    """vLLM's mode "wait": what runs ends before the sleep, what is queued stays queued and runs after the wake."""
    expected = one.expected
    answers = one.begin(20)
    prompt, params = REQUESTS["greedy"]
    one.engine.add_request("late", prompt, params)
    report = one.llm.sleep(mode="wait", **options)
    assert report.changed and one.llm.is_sleeping()
    assert [request_id.split("-")[0] for request_id in one.core.scheduler.requests] == ["late"]
    answers |= one.stopped()  # what ended before the sleep
    assert final(answers) == expected
    assert one.llm.wake_up()
    assert one.finish({})["late"] == expected["greedy"]
    assert one.core.scheduler.pause_state.name == "UNPAUSED"


def test_a_wait_that_takes_too_long_is_given_up_and_nothing_is_lost(one):
    answers = one.begin(10)
    with pytest.raises(errors.TimedOut, match=f"{len(one.core.scheduler.running)} requests") as caught:
        one.llm.sleep(mode="wait", timeout=0)
    assert "abort" in caught.value.next_step and not caught.value.state_changed
    assert not one.llm.is_sleeping() and one.core.scheduler.pause_state.name == "UNPAUSED"
    assert one.finish(answers) == one.expected


def test_wrong_arguments_are_refused_before_it_waits(one):
    answers = one.begin(10)
    running = list(one.core.scheduler.running)
    for options in ({"level": 7}, {"tags": ["wieghts"]}, {"timeout": -1}, {"to": "tape"}):
        with pytest.raises(errors.InvalidArgument):
            one.llm.sleep(mode="wait", **options)
    assert one.core.scheduler.running == running and one.core.scheduler.pause_state.name == "UNPAUSED"
    assert one.finish(answers) == one.expected


def test_a_sleep_that_fails_after_the_wait_leaves_the_engine_awake(one, tmp_path, monkeypatch):
    from torpor import _core

    one.llm.torpor.call("state")
    side = one.core.torpor_side
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setattr(side, "controller", _core.SleepController(side.hooks, {"directory": str(blocked)}))
    answers = one.begin(10)
    with pytest.raises(errors.Error):
        one.llm.sleep(mode="wait", preserve_state=True, to="disk")
    assert one.core.scheduler.pause_state.name == "UNPAUSED" and not one.core.scheduler.torpor_frozen
    prompt, params = REQUESTS["short"]
    one.engine.add_request("late", prompt, params)
    finished = one.finish(answers)
    assert finished.pop("late") == one.expected["short"] and finished == one.expected


@pytest.mark.gpu_path
@pytest.mark.gpu_path
def test_level_0_ends_requests_if_the_call_says_so(one):
    expected = one.expected
    one.begin(12, ["greedy", "prefix-a"])
    for mode in (None, "keep"):
        one.llm.sleep(level=0, mode=mode)
        assert len(one.core.scheduler.requests) == 2
        one.llm.wake_up()
    one.llm.sleep(level=0, mode="abort")
    assert not one.core.scheduler.requests
    one.stopped()  # what a batch in flight gave
    one.llm.wake_up()
    assert not one.engine.has_unfinished_requests()
    assert one.finish(one.begin(12)) == expected


def test_a_servers_route_hands_the_mode_on_that_the_call_names():
    from torpor.vllm.server import front

    asked = []

    class Life:
        async def sleep(self, level, mode, preserve_state, to, **options):
            asked.append(sleep_options(level, mode, preserve_state, to, "abort", None, None, None, None)["in_flight"])
            return {}

    for mode in (None, "abort", "keep", "wait"):
        asyncio.run(front.sleep(Life(), 0, mode, None, "host", {}))
    assert asked == ["freeze", "abort", "freeze", "freeze"]


def test_level_2_says_what_to_reload(one):
    one.begin(5)
    report = one.llm.sleep(level=2)
    ledger = report.ledgers[0]["tags"]
    assert report.saved_bytes == sum(ledger[tag]["region_bytes"] for tag in kept_tags())
    assert report.reload == ["weights"] and "loaded after the wake" in report.note
    woken = one.llm.wake_up()
    assert woken and woken.reload == ["weights"] and "answers are wrong until" in woken.note
    one.llm.collective_rpc("reload_weights")
    assert one.finish(one.begin()) == one.expected


@pytest.mark.gpu_path
def test_level_2_with_preserve_state_keeps_all_and_a_bare_wake_goes_on(one):
    answers = one.begin(10)
    report = one.llm.sleep(level=2, preserve_state=True)
    assert report.level == 2 and report.kept_blocks > 0 and report.reload == [] and report.note == ""
    assert report.ledgers[0]["tags"]["weights"]["backup_host_bytes"] > 0
    assert one.llm.torpor.state().tags == tags("detached", "detached", "detached")
    answers |= one.stopped()
    woken = one.llm.wake_up()
    assert woken and woken.reload == [] and woken.note == ""
    assert one.finish(answers) == one.expected
    assert one.llm.torpor.state().recomputed_tokens == 0


def test_what_weights_says_wins_over_the_level(one):
    _ = one.expected
    plan = one.llm.torpor.plan_sleep(level=2, weights="store")
    assert plan.save_bytes["weights"] > 0
    assert one.llm.sleep(level=2, weights="store").reload == []
    assert one.llm.wake_up().reload == []
    assert one.finish(one.begin()) == one.expected
    for options in ({"level": 1}, {"level": 2}, {"level": 2, "preserve_state": True}):
        assert one.llm.sleep(**options, weights="reload").reload == ["weights"]
        assert one.llm.wake_up().reload == ["weights"]  # nothing was kept, so it runs
        assert not one.llm.is_sleeping()
        one.llm.collective_rpc("reload_weights")
    assert one.finish(one.begin()) == one.expected


def test_no_tags_are_not_all_tags(one):
    answers = one.begin(10)
    for call in (one.llm.sleep, one.llm.wake_up, lambda tags: one.llm.sleep(mode="wait", tags=tags)):
        with pytest.raises(errors.InvalidArgument, match="tags is an empty list"):
            call(tags=[])
    assert not one.llm.is_sleeping()
    one.llm.sleep(preserve_state=True)
    with pytest.raises(errors.InvalidArgument, match="tags is an empty list"):
        one.llm.wake_up(tags=[])
    assert set(one.llm.torpor.state().tags.values()) == {"detached"}
    one.llm.wake_up()
    assert one.finish(answers) == one.expected


@pytest.mark.gpu_path
def test_tags_wake_one_by_one(one):
    answers = one.begin(10)
    assert one.llm.sleep(level=1, preserve_state=True), "a sleep that succeeded is not false"
    first = one.llm.wake_up(tags=["weights"])
    assert first.changed and not first and one.llm.is_sleeping()
    answers |= one.stopped()
    assert one.llm.torpor.state().tags == tags("attached", "detached")
    again = one.llm.wake_up(tags=["weights"])  # as trainers do, which do not look
    assert not again.changed and not again.fully_awake
    assert one.llm.wake_up(tags=["kv_cache"])
    assert one.finish(answers) == one.expected


def test_vllms_executor_says_what_sleeps(one):
    """Trainers ask it whether to wake the engine."""
    executor = one.core.model_executor
    answers = one.begin(10)
    assert not executor.is_sleeping
    one.llm.sleep(level=0)
    assert not executor.is_sleeping
    one.llm.sleep(level=1, preserve_state=True)
    assert executor.sleeping_tags == {"weights", "kv_cache"}
    with pytest.raises(errors.InvalidArgument):
        one.llm.wake_up(tags=["weight"])
    one.llm.wake_up(tags=["weights"])
    assert executor.is_sleeping and executor.sleeping_tags == {"kv_cache"}
    one.llm.wake_up()
    assert not executor.is_sleeping
    assert one.finish(answers) == one.expected


@pytest.mark.gpu_path
def test_what_a_trainer_draws_while_the_engine_sleeps_stays_drawn(one):
    """It shares the process, and so its generators, with this engine core. No request draws from them."""
    names = ["greedy", "seeded"]
    answers = one.begin(10, names)
    one.llm.sleep(level=1, preserve_state=True)
    drawn = [(torch.rand(4).tolist(), numpy.random.rand(4).tolist())]
    one.llm.wake_up()
    drawn.append((torch.rand(4).tolist(), numpy.random.rand(4).tolist()))
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]
    assert one.finish(answers) == {name: one.expected[name] for name in names}


def test_a_worker_of_an_external_launcher_may_have_any_rank(one):
    worker = one.core.model_executor.driver_worker.worker
    answers, worker.rank = one.begin(10), 1
    try:
        one.llm.sleep(level=1, preserve_state=True)
        one.llm.wake_up()
    finally:
        worker.rank = 0
    assert one.finish(answers) == one.expected


def test_generating_while_asleep_is_refused_and_names_what_is_missing(one):
    answers = one.begin(10)
    one.llm.sleep(level=1, preserve_state=True)
    one.llm.wake_up(tags=["weights"])
    before = set(one.engine.output_processor.request_states)
    prompt, params = REQUESTS["short"]
    with pytest.raises(errors.WrongState, match="kv_cache") as caught:
        one.llm.generate([prompt], params, use_tqdm=False)
    assert "weights" not in caught.value.what
    with pytest.raises(errors.WrongState, match="kv_cache"):
        one.llm.chat(
            [{"role": "user", "content": prompt}], params, use_tqdm=False, chat_template="{{ messages[0].content }}"
        )
    assert one.engine.output_processor.request_states.keys() == before
    one.llm.wake_up()
    assert one.finish(answers).keys() == one.expected.keys()
    [output] = one.llm.generate([prompt], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == one.expected["short"][1][0][1]


def test_only_the_kv_cache_may_sleep(one):
    answers = one.begin(10)
    one.llm.sleep(level=1, preserve_state=True, tags=["kv_cache"])
    assert one.llm.torpor.state().tags["weights"] == "attached"
    one.llm.wake_up()
    assert one.finish(answers) == one.expected


def test_an_idle_engine_sleeps_too(one):
    one.begin()
    one.finish({})
    report = one.llm.sleep(level=1, preserve_state=True, to="disk")
    assert report.changed and report.requests == 0
    one.llm.wake_up()
    assert one.finish(one.begin()) == one.expected


@pytest.mark.gpu_path
def test_a_plan_tells_what_a_sleep_would_do(one):
    answers = one.begin(10)
    plan = one.llm.torpor.plan_sleep(level=1, preserve_state=True)
    report = one.llm.sleep(level=1, preserve_state=True)
    assert plan.requests == report.requests
    assert sum(plan.save_bytes.values()) == report.saved_bytes
    assert sum(plan.free_bytes.values()) == report.freed_bytes
    one.llm.wake_up()
    assert one.finish(answers) == one.expected


@pytest.mark.gpu_path
def test_requests_that_come_in_while_asleep_wait(one):
    answers = one.begin(10)
    one.llm.sleep(level=1, preserve_state=True)
    prompt, params = REQUESTS["greedy"]
    one.engine.add_request("late", prompt, params)
    answers |= one.stopped()
    one.llm.wake_up()
    finished = one.finish(answers)
    assert finished["late"] == one.expected["greedy"]
    assert finished["greedy"] == one.expected["greedy"]


@pytest.mark.gpu_path
def test_requests_can_be_aborted_while_asleep(one):
    answers = one.begin(10)
    one.llm.sleep(level=1, preserve_state=True)
    one.engine.abort_request(["greedy", "long"])
    one.llm.wake_up()
    finished = one.finish(answers)
    assert "greedy" not in finished and "long" not in finished
    assert finished["seeded"] == one.expected["seeded"]


@pytest.mark.gpu_path
def test_new_weights_loaded_while_the_kv_sleeps_go_on_from_the_tokens_so_far(one, tiny_model, real_model, tmp_path):
    """The loop of RL: rollouts sleep half-done, weights change, rollouts go on; KV of the old weights is never used."""
    names = ["greedy", "prefix-a"]
    expected = one.expected
    half_done = one.begin(12, names)
    computed = sum(request.num_computed_tokens for request in one.core.scheduler.requests.values())
    one.llm.sleep(level=1, preserve_state=True)
    half_done |= one.stopped()
    one.llm.wake_up(tags=["weights"])
    other = make_model(tmp_path / "other", real_model, seed=8)
    one.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    assert one.llm.wake_up(tags=["kv_cache"], kv="recompute")
    finished = one.finish(half_done)
    assert one.llm.torpor.state().recomputed_tokens == computed > 100
    try:
        tokenizer = one.llm.get_tokenizer()
        for name in names:
            prompt, params = REQUESTS[name]
            so_far = half_done[name][1][0][1]
            tokens = finished[name][1][0][1]
            assert len(so_far) >= 10 and tokens[: len(so_far)] == so_far
            # Expected: what the new weights answer to prompt and tokens so far, with no cache.
            one.llm.reset_prefix_cache()
            rest = params.clone()
            rest.max_tokens = params.max_tokens - len(so_far)
            [output] = one.llm.generate(
                [{"prompt_token_ids": tokenizer(prompt).input_ids + so_far}], rest, use_tqdm=False
            )
            assert tokens[len(so_far) :] == list(output.outputs[0].token_ids), name
        assert {n: finished[n] for n in names} != {n: expected[n] for n in names}
    finally:
        one.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tiny_model)})
    assert one.finish(one.begin()) == expected


def test_new_weights_are_what_the_next_sleep_keeps(one, tiny_model, real_model, tmp_path):
    other = make_model(tmp_path / "other", real_model, seed=8)
    one.begin()
    one.finish({})
    one.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    try:
        awake = one.finish(one.begin())
        assert awake["greedy"] != one.expected["greedy"]
        answers = one.begin(10)
        one.llm.sleep(level=1, preserve_state=True)
        one.llm.wake_up()
        assert one.finish(answers) == awake
    finally:
        one.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tiny_model)})
    assert one.finish(one.begin()) == one.expected
