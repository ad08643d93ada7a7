# SPDX-License-Identifier: Apache-2.0
"""Requests leave the running engine and come back: each goes on as if it had never been away.

The batches of a run with a hibernation are others, so that log probabilities are compared to four digits; tokens are
compared as they are. "Scrambled": meanwhile the prefix cache is emptied and every byte of the KV cache overwritten.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from pathlib import Path

import pytest
import gpu_path
from conftest import InProcess, long_on_gpu_path
from requests_of_tests import REQUESTS, run
from test_bound_requests import answers_to_pieces
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request, RequestStatus

from torpor import errors
from torpor.vllm import frontend, portable, scheduler_values, sessions
from torpor.vllm.engine_values import Hibernated

pytestmark = [pytest.mark.gpu_path, pytest.mark.cpu]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 12}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def _structured(seed: int, **grammar) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=seed, max_tokens=24, structured_outputs=StructuredOutputsParams(**grammar)
    )


# Whose tokens no other request has a part in: one choice, or seeds.
CERTAIN = {
    name: request for name, request in REQUESTS.items() if request[1].temperature == 0 or request[1].seed is not None
} | {
    "schema": ("A thing as JSON: ", _structured(3, json=SCHEMA)),
    "regex": ("la la la", _structured(5, regex="[abc]{8}d[efg]{6}")),
    "bad-words": ("one two", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, bad_words=["the", " a"])),
    "min-p": (
        "numbers:",
        SamplingParams(temperature=1.0, seed=2, min_p=0.01, max_tokens=24, ignore_eos=True, logit_bias={100: 2.0}),
    ),
}


@pytest.fixture(scope="session")
def one(with_sessions) -> InProcess:
    return with_sessions


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """Of a test that failed, for the next one."""
    yield
    if "one" in request.fixturenames:
        one = request.getfixturevalue("one")
        for image in one.llm.torpor.hibernated():
            one.engine.abort_request(list(image.requests))


LOGPROBS_APART = 5e-4  # what sums in another order, as of another batch, may differ by


def alike(value, other) -> bool:
    """Return whether two answers are equal; log probabilities may be LOGPROBS_APART from each other."""
    if isinstance(value, float) and isinstance(other, float):
        return value == other or abs(value - other) <= LOGPROBS_APART
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(alike(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(alike, value, other))
    return value == other


def same(answers: dict, expected: dict) -> None:
    assert answers.keys() == expected.keys()
    for name, value in expected.items():
        assert alike(answers[name], value), (name, answers[name], value)


def unfinished(one) -> list[str]:
    return list(dict.fromkeys(state.external_req_id for state in one.engine.output_processor.request_states.values()))


def scramble(one) -> None:
    """Nothing of the KV from before is left."""
    while one.core.scheduler.has_requests() or one.core.batch_queue:
        one.engine.step()
    assert one.core.scheduler.reset_prefix_cache()
    address, size = regions(one)["kv_cache"]
    ctypes.memset(address, 0x55, size)


def regions(one) -> dict[str, tuple[int, int]]:
    """Address and size of the KV cache."""
    caches = [cache.untyped_storage() for cache in one.runner.kv_caches]
    begin = min(storage.data_ptr() for storage in caches)
    return {"kv_cache": (begin, max(storage.data_ptr() + storage.nbytes() for storage in caches) - begin)}


def idle(one) -> None:
    """Nothing of the test before is left, and the images took no memory along."""
    run(one.engine)
    assert one.llm.torpor.hibernated() == [] and not one.engine.has_unfinished_requests()
    scheduler = one.core.scheduler
    while scheduler.has_requests():
        one.engine.step()
    assert not scheduler.requests
    [ledger] = one.llm.torpor.ledger()
    assert ledger.arena_used_bytes == sum(tag.backup_host_bytes for tag in ledger.tags.values())


STEPS = [2, 9] if gpu_path.active() else [1, 3, 9, 20]
ARRIVED = 3 if gpu_path.active() else 2  # steps after which KV of a resumed request has arrived, and it has not run


def test_its_state_says_that_requests_may_leave_it(one):
    tiers = one.llm.torpor.state().tiers
    assert {name: tiers[name] for name in ("hibernate", "fork")} == {"hibernate": None, "fork": None}


@pytest.mark.parametrize("steps", STEPS)
def test_all_requests_leave_the_cache_is_scrambled_and_they_come_back(one, steps):
    expected = one.expected
    answers = one.begin(steps)
    left = one.llm.torpor.hibernate(unfinished(one))
    answers |= run(one.engine)
    assert not one.core.scheduler.requests and not one.engine.has_unfinished_requests()
    assert left.bytes > 0 and left.tokens > 0 and set(left.requests) == set(unfinished(one))
    assert one.llm.torpor.hibernated() == [left]
    scramble(one)
    resumed = one.llm.torpor.resume(left.id)
    assert resumed.id == left.id and resumed.requests == left.requests and not resumed.recomputed
    same(one.finish(answers), expected)
    idle(one)


@pytest.mark.core
def test_some_leave_while_the_others_run_to_their_end(one):
    expected = one.expected
    names = ["greedy", "two", "stops", "schema", "long-seeded"]
    answers = one.begin(6)
    left = one.llm.torpor.hibernate(names)
    answers |= run(one.engine)
    assert set(unfinished(one)) == set(names)
    scramble(one)
    one.llm.torpor.resume(left.id)
    same(one.finish(answers), expected)
    idle(one)


def test_each_goes_alone_and_again(one):
    """One image a request; each leaves twice, at other steps, beside the others that run."""
    expected = one.expected
    answers, away = one.begin(2), {}
    for turn in range(12):
        for name in unfinished(one):
            if name in away:
                one.llm.torpor.resume(away.pop(name))
            elif (turn + len(name)) % 3 == 0 and not _is_coming(one, name):
                with contextlib.suppress(errors.NotFound):  # its last token is in the step under way
                    away[name] = one.llm.torpor.hibernate(name).id
        answers |= run(one.engine, 2)
    for image in away.values():
        one.llm.torpor.resume(image)
    same(one.finish(answers), expected)
    idle(one)


def _is_coming(one, name: str) -> bool:
    coming = one.core.scheduler.connector.admissions.requests
    return any(i in coming for i in one.engine.output_processor.external_req_ids.get(name, ()))


def test_a_delta_stream_loses_no_token_and_has_none_twice(one):
    from vllm.sampling_params import RequestOutputKind

    def stream(hibernates: bool) -> list[int]:
        one.begin(0, ["greedy"])
        one.engine.abort_request(["greedy"])
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        one.engine.add_request("stream", "The capital of France is", params)
        tokens = []
        for number in range(100):
            for output in one.engine.step():
                tokens += output.outputs[0].token_ids
            if hibernates and number == 7:
                one.llm.torpor.resume(one.llm.torpor.hibernate("stream").id)
            if not one.engine.has_unfinished_requests():
                break
        return tokens

    assert len(stream(False)) == 30 and stream(True) == stream(False)


def test_llms_own_calls_run_beside_hibernated_requests(one):
    """Their loop ends when all but these have ended."""
    expected = one.expected
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    [plain] = one.llm.generate(["Hi"], short, use_tqdm=False)
    answers = one.begin(6, ["greedy", "two"])
    left = one.llm.torpor.hibernate(["greedy", "two"])
    run(one.engine)
    [output] = one.llm.generate(["Hi"], short, use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    one.llm.torpor.resume(left.id)
    same(one.finish(answers), {name: expected[name] for name in ("greedy", "two")})
    idle(one)


def test_preempted_requests_leave_without_kv(one):
    expected = one.expected
    answers = one.begin(9)
    one.core.reset_prefix_cache(reset_running_requests=True)
    assert not one.core.scheduler.running
    left = one.llm.torpor.hibernate(unfinished(one))
    answers |= run(one.engine)
    scramble(one)
    one.llm.torpor.resume(left.id)
    same(one.finish(answers), expected)
    idle(one)


@pytest.mark.core
def test_kv_that_comes_back_has_the_bytes_that_left(one):
    """Of all blocks, also of the last one, which is half full; looked at before the request takes a step."""
    one.begin(9)
    one.llm.sleep(level=0)  # ends the step under way
    one.llm.wake_up()
    ids = one.engine.output_processor.external_req_ids
    there = [name for name in unfinished(one) if ids[name][0] in one.core.scheduler.requests]
    expected = {name: kv for name in there if (kv := kv_of(one, name))}
    left = one.llm.torpor.hibernate(list(expected))
    run(one.engine)
    scramble(one)
    one.llm.torpor.resume(left.id)
    found = {}
    for _ in range(5):
        arrived = one.core.scheduler.finished_recving_kv_req_ids
        for name in expected.keys() - found.keys():
            if _request(one, name).request_id in arrived:
                found[name] = kv_of(one, name)
        one.engine.step()
    assert len(expected) > 5 and found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    run(one.engine)
    idle(one)


def _request(one, name: str):
    return one.core.scheduler.requests[one.engine.output_processor.external_req_ids[name][0]]


def kv_of(one, name: str) -> bytes:
    """Of the blocks of a request, block by block, layer by layer."""
    request = _request(one, name)
    (blocks,) = one.core.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    used = blocks[: -(-request.num_computed_tokens // one.core.scheduler.block_size)]
    count = one.core.scheduler.kv_cache_config.num_blocks
    caches = [cache.movedim(list(cache.shape).index(count), 0) for cache in one.runner.kv_caches]
    return b"".join(cache[block].contiguous().view(-1).numpy().tobytes() for block in used for cache in caches)


# --- the lifetime of an image -----------------------------------------------------------------------------------------


def test_an_abort_reaches_a_hibernated_request_and_frees_its_image(one):
    one.begin(5, ["greedy", "seeded", "two"])
    together = one.llm.torpor.hibernate(["greedy", "seeded"])
    alone = one.llm.torpor.hibernate(["two"])
    held = one.llm.torpor.ledger()[0].arena_used_bytes
    one.engine.abort_request(["greedy"])
    assert [image.requests for image in one.llm.torpor.hibernated()] == [
        each.requests for each in sorted([Hibernated(together.id, ("seeded",), 0, 0), alone], key=lambda each: each.id)
    ]
    one.engine.abort_request(["two"])
    assert 0 < one.llm.torpor.ledger()[0].arena_used_bytes < held
    one.engine.abort_request(["seeded"])
    with pytest.raises(errors.NotFound, match=together.id):
        one.llm.torpor.resume(together.id)
    idle(one)


def test_an_abort_while_it_comes_back_frees_all(one):
    free = one.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    one.begin(0, ["greedy"])
    one.engine.abort_request(["greedy"])
    run(one.engine)
    before = free()
    for steps in range(3):
        one.begin(5, ["greedy", "seeded"])
        left = one.llm.torpor.hibernate(["greedy", "seeded"])
        one.llm.torpor.resume(left.id)
        for _ in range(steps):
            one.engine.step()
        one.engine.abort_request(["greedy", "seeded"])
        idle(one)
        assert free() == before


def test_calls_may_be_repeated(one):
    one.begin(5, ["greedy", "seeded"])
    left = one.llm.torpor.hibernate(["greedy"], "mine")
    assert left.id == "mine" and one.llm.torpor.hibernate(["greedy"], "mine") == left
    for others in (["seeded"], ["greedy", "seeded"]):
        with pytest.raises(errors.InvalidArgument, match="the image mine has other requests"):
            one.llm.torpor.hibernate(others, "mine")
    with pytest.raises(errors.NotFound, match="does not run here"):
        one.llm.torpor.hibernate(["greedy"], "other")
    first = one.llm.torpor.resume("mine")
    assert one.llm.torpor.resume("mine") == first
    for image in (None, "mine"):
        with pytest.raises(errors.WrongState, match="is being resumed"):
            one.llm.torpor.hibernate(["greedy"], image)
    run(one.engine)
    with pytest.raises(errors.NotFound, match="there is no image mine"):
        one.llm.torpor.resume("mine")
    idle(one)


def test_an_id_of_an_image_may_be_used_again_at_once(one):
    """Also before the ranks have been told that the first one is gone."""
    expected = one.expected
    answers = one.begin(5, ["greedy"])
    one.llm.torpor.hibernate("greedy", "x")
    one.llm.torpor.resume("x")
    while _is_coming(one, "greedy"):
        answers |= run(one.engine, 1)
    assert one.core.scheduler.connector.admissions.orders.drops
    left = one.llm.torpor.hibernate("greedy", "x")
    scramble(one)
    assert one.llm.torpor.resume("x").requests == left.requests
    same(one.finish(answers), {"greedy": expected["greedy"]})
    idle(one)


def test_a_prompt_that_was_preempted_half_way_leaves_and_comes_back(one):
    """Model runner V1 never began what has no output: vLLM must not resume it there."""
    prompt = {"prompt_token_ids": [(7 * i) % 250 + 10 for i in range(700)]}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def answer(leaves: bool) -> list[int]:
        one.begin(0, ["greedy"])
        one.engine.abort_request(["greedy"])
        run(one.engine)
        one.engine.add_request("half", prompt, params)
        for _ in range(2):
            one.engine.step()
        if leaves:
            one.core.reset_prefix_cache(reset_running_requests=True)
            one.engine.step()
            assert 0 < _request(one, "half").num_computed_tokens < 700
            one.llm.torpor.resume(one.llm.torpor.hibernate("half").id)
        tokens = []
        for _ in range(200):
            for output in one.engine.step():
                tokens = list(output.outputs[0].token_ids)
            if not one.engine.has_unfinished_requests():
                break
        return tokens

    plain = answer(False)
    assert len(plain) == 8 and answer(True) == plain
    idle(one)


def test_a_prompt_that_comes_in_pieces_keeps_its_history_if_its_kv_is_dropped(one):
    expected = answers_to_pieces(one, lambda pieces: None)

    def drop(pieces) -> None:
        assert one.llm.reset_prefix_cache(reset_running_requests=True)
        assert one.core.scheduler.requests[pieces.id].num_computed_tokens == 0

    assert answers_to_pieces(one, drop) == expected


@pytest.mark.parametrize("how", ["host", "disk", "preempted"])
def test_what_a_request_counts_as_cached_is_what_was_when_its_prompt_began(one, monkeypatch, how):
    """Not the KV that it had computed itself, and brings along."""
    taken: list = []
    stock = Request.take_prefill_stats

    def take_prefill_stats(request):
        if (counted := stock(request)) is not None:
            taken.append(counted)
        return counted

    monkeypatch.setattr(Request, "take_prefill_stats", take_prefill_stats)
    shared = [(7 * i) % 250 + 10 for i in range(100)]

    def counted(leaves: bool) -> tuple[dict, set]:
        one.begin(0, ["greedy"])
        one.engine.abort_request(["greedy"])
        run(one.engine)
        one.llm.generate({"prompt_token_ids": shared}, SamplingParams(max_tokens=1), use_tqdm=False)
        taken.clear()
        prompt = {"prompt_token_ids": [*shared, *((11 * i) % 250 + 10 for i in range(600))]}
        one.engine.add_request("half", prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        one.engine.step()
        if how == "preempted":
            one.core.reset_prefix_cache(reset_running_requests=True)
        else:
            assert 100 < _request(one, "half").num_computed_tokens < 700
        if leaves:
            left = one.llm.torpor.hibernate("half", to="disk" if how == "disk" else "host")
            if how == "disk":  # this engine ends, and another one takes the image
                one.core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
                one.engine.abort_request(["half"])
                assert not one.engine.has_unfinished_requests()
            one.llm.torpor.resume(left.path or left.id)
        seen = set()
        while one.engine.has_unfinished_requests():
            seen |= {output.num_cached_tokens for output in one.engine.step()}
        [of_half] = taken
        idle(one)
        return vars(of_half), seen

    plain, seen = counted(leaves=False)
    assert plain["num_local_cached_tokens"] > 0 and seen == {plain["num_cached_tokens"]}
    assert counted(leaves=True) == (plain, seen)
    assert not one.core.scheduler.connector.admissions._counted


def test_what_no_values_can_hold_is_refused_by_name_and_runs_on(one, monkeypatch):
    expected = one.expected
    answers = one.begin(3, ["greedy"])
    odd = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, extra_args={"pair": (1, 2)})
    one.engine.add_request("odd", "Hello", odd)
    answers |= run(one.engine, 1)
    with pytest.raises(errors.Unsupported, match=r"cannot be hibernated: .*extra_args"):
        one.llm.torpor.hibernate(["greedy", "odd"])
    one.engine.abort_request(["odd"])

    def moved_request(*_):
        raise errors.Incompatible("no request can be made of it")

    with monkeypatch.context() as patch:
        patch.setattr(sessions.values, "moved_request", moved_request)
        with pytest.raises(errors.Unsupported, match="cannot be hibernated: no request can be made of it"):
            one.llm.torpor.hibernate("greedy")
    assert one.llm.torpor.hibernated() == []
    answers |= run(one.engine)
    same(one.finish({"greedy": answers["greedy"]}), {"greedy": expected["greedy"]})
    idle(one)


@contextlib.contextmanager
def interrupted(one, monkeypatch, method: str):
    """The front end is interrupted when the engine core has just done `method`, and before it hears of it."""
    stock = one.core.torpor_call

    def torpor_call(name: str, options: dict):
        reply = stock(name, options)
        if name == method:
            raise KeyboardInterrupt
        return reply

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(one.core, "torpor_call", torpor_call, raising=False)
        yield


def test_an_interrupted_call_undoes_what_it_did_and_no_more(one, monkeypatch):
    expected = one.expected
    answers = one.begin(5, ["greedy", "seeded"])
    with interrupted(one, monkeypatch, "hibernate"):
        one.llm.torpor.hibernate("greedy")
    answers |= run(one.engine, 3)
    left = one.llm.torpor.hibernate("greedy", "mine")
    with interrupted(one, monkeypatch, "hibernate"):
        one.llm.torpor.hibernate("greedy", "mine")
    assert one.llm.torpor.hibernated() == [left]
    with interrupted(one, monkeypatch, "resume_image"):
        one.llm.torpor.resume("mine")
    same(one.finish(answers), {name: expected[name] for name in ("greedy", "seeded")})
    idle(one)


@pytest.mark.parametrize(
    ("requests", "what"),
    [(["nobody"], "no unfinished request 'nobody'"), (["greedy", "nobody"], "'nobody'"), ([], "no request is named")],
)
def test_an_unknown_request_is_named_and_nothing_leaves(one, requests, what):
    one.begin(3, ["greedy"])
    with pytest.raises((errors.NotFound, errors.InvalidArgument), match=what):
        one.llm.torpor.hibernate(requests)
    assert one.llm.torpor.hibernated() == []
    run(one.engine)


def test_an_engine_with_hibernated_requests_sleeps_and_wakes_with_them(one):
    expected = one.expected
    answers = one.begin(6)
    names = ["greedy", "two", "schema", "long-seeded"]
    left = one.llm.torpor.hibernate(names)
    one.llm.sleep(level=1, preserve_state=True)
    with pytest.raises(errors.WrongState, match="asleep"):
        one.llm.torpor.resume(left.id)
    with pytest.raises(errors.WrongState, match="asleep"):
        one.llm.torpor.hibernate(["seeded"])
    answers |= run(one.engine, 1)
    assert one.llm.wake_up()
    one.llm.torpor.resume(left.id)
    one.llm.sleep(level=1, preserve_state=True)  # they are on their way
    assert one.llm.wake_up()
    answers |= run(one.engine, 1)
    one.llm.sleep(level=1, preserve_state=True)
    assert one.llm.wake_up()
    same(one.finish(answers), expected)
    idle(one)


@long_on_gpu_path
def test_no_checkpoint_is_written_without_them(one):
    expected = one.expected
    answers = one.begin(6)
    left = one.llm.torpor.hibernate(["greedy", "two"])
    for call in (one.llm.checkpoint, lambda: one.llm.sleep(level=1, preserve_state=True, to="disk")):
        with pytest.raises(errors.Unsupported, match=r"hibernated requests \(3\); resume or abort them first"):
            call()
    with pytest.raises(errors.Unsupported, match="checkpoint when nothing of this is left"):
        one.llm.checkpoint()
    answers |= run(one.engine, 1)
    one.llm.torpor.resume(left.id)
    answers |= run(one.engine, 3)
    path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    assert one.llm.wake_up() and path
    same(one.finish(answers), expected)
    idle(one)


def test_a_sleep_that_ends_all_requests_ends_these_too(one):
    one.begin(6, ["greedy", "two", "seeded"])
    one.llm.torpor.hibernate(["greedy", "two"])
    one.llm.sleep(level=1)
    assert one.llm.wake_up()
    idle(one)


def test_kv_of_other_weights_is_computed_again(one):
    expected = one.expected
    answers = one.begin(6)
    left = one.llm.torpor.hibernate(unfinished(one))
    answers |= run(one.engine)
    one.llm.sleep(level=1, mode="keep")  # without KV: what was computed before is not believed any more
    assert one.llm.wake_up()
    resumed = one.llm.torpor.resume(left.id)
    assert resumed.recomputed and one.llm.torpor.resume(left.id) == resumed
    same(one.finish(answers), expected)
    idle(one)


def _nothing(worker) -> None:
    """What a call of a function in the workers does to the weights, nobody can know."""


def _update(one) -> None:
    with one.llm.updating_weights():
        pass


WRITES = {
    "a function": lambda one: one.llm.collective_rpc(_nothing),
    "reload_weights": lambda one: one.llm.collective_rpc("reload_weights"),
    "reset_prefix_cache": lambda one: one.llm.reset_prefix_cache(),
}


@pytest.fixture
def loads(monkeypatch) -> list:
    """An entry for each request whose KV a rank was told to load."""
    found: list = []
    stock = portable._core.admit_error

    def admit_error(reply):
        found.append(reply)
        return stock(reply)

    monkeypatch.setattr(portable._core, "admit_error", admit_error)
    return found


@long_on_gpu_path
@pytest.mark.parametrize("how", [*WRITES, "updating_weights"])
def test_weights_that_may_have_been_written_are_noticed(one, how, loads):
    expected = one.expected
    answers = one.begin(6)
    left = one.llm.torpor.hibernate(unfinished(one))
    answers |= run(one.engine)
    (WRITES | {"updating_weights": _update})[how](one)
    assert one.llm.torpor.resume(left.id).recomputed
    same(one.finish(answers), expected)
    assert loads == []
    idle(one)


@long_on_gpu_path
@pytest.mark.parametrize("how", WRITES)
def test_they_are_noticed_while_requests_wait_for_blocks(one, how, loads):
    expected = one.expected
    answers = one.begin(6)
    left = one.llm.torpor.hibernate(unfinished(one))
    answers |= run(one.engine)
    assert not one.llm.torpor.resume(left.id).recomputed
    WRITES[how](one)
    same(one.finish(answers), expected)
    assert loads == []
    idle(one)


def test_nothing_comes_while_the_weights_of_an_engine_that_is_awake_are_written(one):
    one.begin(6, ["greedy"])
    left = one.llm.torpor.hibernate("greedy")
    run(one.engine)
    with one.llm.updating_weights(), pytest.raises(errors.WrongState, match="an update of the weights is under way"):
        one.llm.torpor.resume(left.id)
    assert one.llm.torpor.resume(left.id).recomputed
    run(one.engine)
    idle(one)


GREEDY = ["greedy", "long", "stops", "prefix-a"]


def _scale(one, factor: float) -> None:
    """Of the keys and values of all layers. Exact both ways."""
    with one.llm.updating_weights():
        for name, parameter in one.runner.model.named_parameters():
            if name.endswith("input_layernorm.weight"):
                parameter.data.mul_(factor)


def _over_new_weights(one, kv: str, leaves: bool, steps: int) -> dict:
    """Tokens of requests that have them in part from the old weights, in part from others."""
    answers = one.begin(9, GREEDY)
    if leaves:
        one.llm.torpor.resume(one.llm.torpor.hibernate(unfinished(one)).id)
        for _ in range(steps):
            answers |= run(one.engine, 1)
    one.llm.sleep(level=1, preserve_state=True)
    answers |= run(one.engine, 1)
    one.llm.wake_up(tags=["weights"])
    _scale(one, 2.0)
    try:
        assert one.llm.wake_up(kv=kv)
        answers |= run(one.engine, 400)
        assert not one.engine.has_unfinished_requests()
        return tokens_of(one.finish(answers))
    finally:
        one.engine.abort_request(unfinished(one))
        one.llm.sleep(level=0)
        _scale(one, 0.5)
        one.llm.wake_up()
        one.llm.reset_prefix_cache()


@pytest.mark.core
@pytest.mark.parametrize(("steps", "kv"), [(0, "recompute"), (0, "keep"), (ARRIVED, "recompute")])
def test_kv_of_other_weights_is_not_used_by_requests_on_their_way(one, steps, kv, loads):
    """Without blocks yet, or with KV that has arrived, and has not run."""
    expected = _over_new_weights(one, "recompute", leaves=False, steps=0)
    assert expected != tokens_of({name: one.expected[name] for name in GREEDY})
    assert _over_new_weights(one, kv, leaves=True, steps=steps) == expected
    assert (loads == []) == (steps == 0)
    idle(one)


# --- damage, and faults that must be found ----------------------------------------------------------------------------


def damage(pattern: bytes) -> None:
    """Overwrite these bytes with zeros wherever this process has them, but for `pattern` itself."""
    own = id(pattern) + bytes.__basicsize__ - 1
    piece = bytearray((1 << 20) + len(pattern))
    buffer = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    lines = Path("/proc/self/maps").read_text().splitlines()
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    found = 0
    try:
        for begin, end in [
            map(lambda text: int(text, 16), line.split()[0].split("-")) for line in lines if " rw" in line
        ]:
            for at in range(begin, end, 1 << 20):
                view = memoryview(piece)[: min(len(piece), end - at)]
                try:
                    got = os.preadv(memory, [view], at)
                except OSError:
                    break
                place = piece.find(pattern, 0, got)
                address = at + place
                if place >= 0 and address != own and not buffer <= address < buffer + len(piece):
                    ctypes.memset(address, 0, len(pattern))
                    found += 1
    finally:
        os.close(memory)
    assert found


def hibernated_and_damaged(one, resume: bool) -> tuple[dict, Hibernated]:
    """After some steps, "prefix-a" in an image whose host memory is damaged. `resume`: it is on its way back then."""
    answers = one.begin(9, ["prefix-a"])
    content = kv_of(one, "prefix-a")
    left = one.llm.torpor.hibernate(["prefix-a"])
    scramble(one)
    if resume:
        one.llm.torpor.resume(left.id)
    damage(content[1024:1536])
    return answers, left


@long_on_gpu_path
def test_a_damaged_image_is_refused_by_name(one):
    _, left = hibernated_and_damaged(one, resume=False)
    with pytest.raises(errors.Damaged, match=f"image {left.id}: kv_cache block 0 does not match its digest"):
        one.llm.torpor.resume(left.id)
    assert one.llm.torpor.hibernated() == [left] and not one.core.scheduler.requests
    one.engine.abort_request(["prefix-a"])
    idle(one)


def test_what_is_damaged_on_the_way_is_computed_again(one, said):
    answers, _ = hibernated_and_damaged(one, resume=True)
    tokens = tokens_of(one.finish(answers))
    assert "is computed again" in said.text and "do not match their digest" in said.text
    assert tokens == tokens_of({"prefix-a": one.expected["prefix-a"]})
    idle(one)


def test_without_that_check_the_tokens_would_be_others(one, monkeypatch):
    """So that the test before, and all others here, can fail."""
    monkeypatch.setattr(portable._core, "admit_error", lambda reply: None)
    answers, _ = hibernated_and_damaged(one, resume=True)
    assert tokens_of(one.finish(answers)) != tokens_of({"prefix-a": one.expected["prefix-a"]})
    one.llm.reset_prefix_cache()
    idle(one)


def test_requests_whose_loads_all_fail_run_all_the_same(one, monkeypatch, said):
    """They hold no blocks then, and vLLM keeps room for none of them."""
    answers = one.begin(9)
    left = one.llm.torpor.hibernate(unfinished(one))
    answers |= run(one.engine)
    monkeypatch.setattr(portable._core, "admit_error", lambda reply: "broken")
    one.llm.torpor.resume(left.id)
    for _ in range(3):
        answers |= run(one.engine, 1)
    scheduler = one.core.scheduler
    ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    assert not [r for r in scheduler._inflight_prefills if r.status in ready and r.num_computed_tokens == 0]
    answers |= run(one.engine, 400)
    assert not one.engine.has_unfinished_requests() and "broken" in said.text
    same(tokens_of(one.finish(answers)), tokens_of(one.expected))
    idle(one)


def tokens_of(answers: dict) -> dict:
    return {name: [choice[1] for choice in value[1]] for name, value in answers.items()}


@pytest.fixture
def said(caplog):
    """What torpor logs; vLLM's logger hands nothing on."""
    logger = logging.getLogger("vllm.torpor")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


# --- a checkpoint whose requests come the same way --------------------------------------------------------------------


def checkpoint_of(one, steps: int) -> tuple[str, dict]:
    """A checkpoint after so many steps, and what its requests had answered; the engine is empty then, and scrambled."""
    answers = one.begin(steps)
    path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    answers |= one.stopped()
    assert one.llm.wake_up()
    run(one.engine)
    scramble(one)
    return path, answers


@pytest.mark.parametrize("steps", STEPS)
def test_all_requests_of_a_checkpoint_are_admitted_with_their_kv(one, steps):
    expected = one.expected
    path, answers = checkpoint_of(one, steps)
    report = one.llm.wake_up(from_checkpoint=path, identity="portable")
    assert report and report.checkpoint == path and report.failed_requests == [] and report.restored_bytes > 0
    begun = {request.request_id: request.num_tokens for request in one.core.scheduler.requests.values()}
    same(one.finish(answers), expected)
    assert len(begun) >= report.requests > 5
    idle(one)


def test_no_token_of_a_checkpoint_is_computed_again(one):
    path, _ = checkpoint_of(one, 9)
    one.llm.wake_up(from_checkpoint=path, identity="portable")
    decoding = {i for i, request in one.core.scheduler.requests.items() if request.num_output_tokens > 0}
    scheduled = 0
    for _ in range(4):
        before = {i: request.num_computed_tokens for i, request in one.core.scheduler.requests.items()}
        one.engine.step()
        for i, request in one.core.scheduler.requests.items():
            if i in decoding and before.get(i, 0) > 0:
                assert request.num_computed_tokens - before[i] <= 1 + gpu_path.active()
                scheduled += 1
    assert scheduled > 5
    run(one.engine)
    idle(one)


@long_on_gpu_path
def test_a_checkpoint_of_another_model_is_refused_by_field(one, monkeypatch):
    path, _ = checkpoint_of(one, 3)
    hooks = one.core.torpor_side.hooks
    fields = hooks.fingerprint()
    monkeypatch.setattr(type(hooks), "fingerprint", lambda self: fields | {"model_config": "other", "threads": "99"})
    with pytest.raises(errors.Incompatible, match="model_config: checkpoint has") as refused:
        one.llm.wake_up(from_checkpoint=path, identity="portable")
    assert "threads" not in str(refused.value)
    assert not one.core.scheduler.requests
    idle(one)


@long_on_gpu_path
def test_an_engine_with_requests_takes_no_checkpoint(one):
    path, _ = checkpoint_of(one, 3)
    one.begin(2, ["greedy"])
    with pytest.raises(errors.WrongState, match="requests of its own"):
        one.llm.wake_up(from_checkpoint=path, identity="portable")
    with pytest.raises(errors.InvalidArgument, match="without a checkpoint"):
        one.llm.wake_up(identity="portable")
    with pytest.raises(errors.InvalidArgument, match="identity is 'near'"):
        one.llm.wake_up(from_checkpoint=path, identity="near")
    with pytest.raises(errors.InvalidArgument, match="with other arguments"):
        one.llm.wake_up(from_checkpoint=path, identity="portable", early=False, kv="keep")
    run(one.engine)
    idle(one)


@long_on_gpu_path
def test_a_portable_wake_that_is_interrupted_ends_its_own_requests_and_holds_nothing(one, monkeypatch):
    expected = one.expected
    path, answers = checkpoint_of(one, 3)
    with interrupted(one, monkeypatch, "wake_portable"):
        one.llm.wake_up(from_checkpoint=path, identity="portable")
    assert not one.core.scheduler.requests and not one.core.torpor_side.hooks.is_quiet
    assert one.llm.wake_up(from_checkpoint=path, identity="portable")
    same(one.finish(answers), expected)
    one.begin(2, ["greedy"])
    with interrupted(one, monkeypatch, "wake_portable"):  # refused: it has a request
        one.core.torpor_call("wake_portable", {"from_checkpoint": path})
    with pytest.raises(errors.WrongState, match="requests of its own"):
        one.llm.wake_up(from_checkpoint=path, identity="portable")
    one.core.torpor_call("end_portable", {"keep": False})
    same(one.finish({}), {"greedy": expected["greedy"]})
    idle(one)


@long_on_gpu_path
def test_nothing_else_happens_before_the_front_end_has_the_requests(one, monkeypatch):
    expected = one.expected
    path, answers = checkpoint_of(one, 3)
    refused = []
    stock = frontend.BlockingSide.take

    def take(side, report, *lost):
        for call in (
            lambda: one.llm.sleep(level=1, preserve_state=True),
            lambda: one.llm.sleep(level=0),
            one.llm.checkpoint,
            lambda: one.llm.torpor.hibernate("greedy"),
        ):
            with pytest.raises(errors.Error) as problem:
                call()
            refused.append(str(problem.value))
        stock(side, report, *lost)

    monkeypatch.setattr(frontend.BlockingSide, "take", take)
    assert one.llm.wake_up(from_checkpoint=path, identity="portable")
    assert ["a portable wake is under way" in each for each in refused] == [True, True, True, False]
    same(one.finish(answers), expected)
    idle(one)


@long_on_gpu_path
def test_a_request_whose_text_comes_out_otherwise_fails_alone(one, monkeypatch):
    """As with a tokenizer that makes another text of its tokens."""
    expected = one.expected
    path, answers = checkpoint_of(one, 3)
    stock = one.core.torpor_call

    def torpor_call(name: str, options: dict):
        reply = stock(name, options)
        if name == "wake_portable":
            for item in reply["result"]["outputs"]["requests"]:
                item["text"] += "?" if item["external_id"] == "greedy" else ""
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(one.core, "torpor_call", torpor_call)
        report = one.llm.wake_up(from_checkpoint=path, identity="portable")
    [failed] = report.failed_requests
    assert "greedy" in failed["id"] and "another text of its tokens" in failed["error"]
    assert failed["id"] not in one.core.scheduler.requests and report.requests == len(one.core.scheduler.requests)
    found = one.finish(answers)
    assert found.pop("greedy")[1][0][3] == "error"
    same(found, {name: value for name, value in expected.items() if name != "greedy"})
    idle(one)


@long_on_gpu_path
def test_a_front_end_that_cannot_take_the_requests_keeps_those_of_others(one, monkeypatch):
    expected = one.expected
    path, _ = checkpoint_of(one, 3)
    prompt, params = CERTAIN["greedy"]

    def clear_caches(side):
        one.engine.add_request("new", prompt, params.clone())
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(frontend.BlockingSide, "clear_caches", clear_caches)
        with pytest.raises(RuntimeError, match="no"):
            one.llm.wake_up(from_checkpoint=path, identity="portable")
    assert unfinished(one) == ["new"] and len(one.core.scheduler.requests) == 1
    assert tokens_of(run(one.engine)) == {"new": tokens_of({"greedy": expected["greedy"]})["greedy"]}
    idle(one)


@long_on_gpu_path
def test_hibernated_requests_do_not_keep_wait_for_completion(one):
    path, _ = checkpoint_of(one, 3)
    assert one.llm.wake_up(from_checkpoint=path, identity="portable")
    names = unfinished(one)
    one.engine.step()
    left = one.llm.torpor.hibernate("greedy")
    steps = iter(range(600))
    stock = one.engine.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.engine, "step", lambda: next(steps) >= 0 and stock())
        ended = one.llm.wait_for_completion()
        assert {output.request_id for output in ended} == {*names} - {"greedy"}
        one.llm.torpor.resume(left.id)
        assert [output.request_id for output in one.llm.wait_for_completion()] == ["greedy"]
    idle(one)


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (SamplingParams(thinking_token_budget=4), "a thinking budget"),
        (SamplingParams(extra_args={"pair": (1, 2)}), "extra_args"),
    ],
)
def test_what_cannot_leave_a_checkpoint_is_known_from_its_values(params, why):
    request = Request("a", [1, 2, 3], params, None)
    assert why in sessions._bound_to_its_engine(scheduler_values.request_to_value(request))
