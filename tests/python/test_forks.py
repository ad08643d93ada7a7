# SPDX-License-Identifier: Apache-2.0
"""Children of a live request have its blocks, go on with its tokens, and leave nothing behind.

Answers are compared with a run in which nobody forked: tokens as they are, log probabilities to four digits, for
batches of another size change the last ones.
"""

from __future__ import annotations

import pytest
import gpu_path
from conftest import InProcess
from inspector import look
from requests_of_tests import run
from test_sessions import CERTAIN, SCHEMA, idle, interrupted, kv_of, unfinished
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreEventType

from torpor import _core, errors
from torpor.vllm import frontend
from torpor.vllm.values import positions_to_value

pytestmark = [pytest.mark.gpu_path, pytest.mark.cpu]

ALONE = {name: request for name, request in CERTAIN.items() if request[1].n == 1}
STEPS = [2, 9] if gpu_path.active() else [1, 3, 9, 20]


@pytest.fixture
def one(with_sessions) -> InProcess:
    yield with_sessions
    with_sessions.engine.abort_request(unfinished(with_sessions))


def alike(found, expected) -> bool:
    """Equal, but for the last digits of log probabilities: batches have other sizes."""
    if isinstance(expected, float):
        return isinstance(found, float) and abs(found - expected) < 1e-3
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(alike(found[key], each) for key, each in expected.items())
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(alike, found, expected))
    return found == expected


def same(answers: dict, expected: dict) -> None:
    assert answers.keys() == expected.keys()
    for name, value in expected.items():
        assert alike(answers[name], value), name


def state_of(one, name: str):
    [internal] = one.engine.output_processor.external_req_ids[name]
    return one.core.scheduler.requests[internal]


def blocks_of(one, name: str) -> list[int]:
    (blocks,) = one.core.scheduler.kv_cache_manager.get_block_ids(state_of(one, name).request_id)
    return list(blocks)


def with_kv(one, name: str) -> int:
    return state_of(one, name).num_computed_tokens


def references(one, name: str) -> list[int]:
    pool = one.core.scheduler.kv_cache_manager.block_pool
    return [pool.blocks[block].ref_cnt for block in blocks_of(one, name)]


def whole(one) -> None:
    """All have ended, and the pool has all its blocks."""
    idle(one)
    pool = one.core.scheduler.kv_cache_manager.block_pool
    assert [block.block_id for block in pool.blocks if block.ref_cnt != 0 and not block.is_null] == []
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    manager = one.core.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    assert not manager.req_to_blocks and not manager.num_cached_block
    assert not one.core.scheduler.connector.admissions.requests


def settled(one) -> None:
    """No step is under way: what the front end knows is what the engine has."""
    one.llm.sleep(level=0)
    one.llm.wake_up()


def forked(one, name: str, n: int = 2, **options):
    """Its children, and that they have its blocks and bytes before anybody takes a step."""
    made = one.llm.torpor.fork(name, n, **options)
    assert made.parent == name and len(made.children) == n == len(set(made.children))
    size, scheduler = one.core.scheduler.block_size, one.core.scheduler
    computed = {with_kv(one, child) for child in made.children}
    assert len(computed) == 1
    [computed] = computed
    own, shared = blocks_of(one, name), computed // size
    assert made.shared_blocks == shared
    per_block = len(kv_of(one, name)) // max(1, -(-with_kv(one, name) // size))
    assert made.bytes == (n * per_block if computed % size else 0)
    seen = set(own)
    for child in made.children:
        table = blocks_of(one, child)
        assert table[:shared] == own[:shared]
        assert seen.isdisjoint(table[shared:])
        seen |= set(table[shared:])
        assert all(scheduler.kv_cache_manager.block_pool.blocks[block].ref_cnt == 1 for block in table[shared:])
        assert content(one, child, computed) == content(one, name, computed)
    return made


def content(one, name: str, tokens: int) -> list:
    """Keys and values of the first tokens of a request, as vLLM's own view of the cache has them."""
    size = one.core.scheduler.block_size
    caches = []
    for cache in one.runner.kv_caches:
        by_block = cache.movedim(list(cache.shape).index(one.core.scheduler.kv_cache_config.num_blocks), 0)
        places = [dim for dim, length in enumerate(by_block.shape) if dim > 0 and length == size]
        assert len(places) == 1
        for at, block in enumerate(blocks_of(one, name)[: -(-tokens // size)]):
            count = min(size, tokens - at * size)
            caches.append(by_block[block].narrow(places[0] - 1, 0, count).contiguous().numpy().tobytes())
    return caches


def finished(one, answers: dict, made: dict) -> dict:
    """What was answered, by the name of the parent; children apart."""
    every = one.finish(answers)
    return {child: every.pop(child) for each in made.values() for child in each.children} | every


@pytest.mark.core
@pytest.mark.parametrize("steps", STEPS)
def test_children_of_all_kinds_of_requests_give_the_tokens_of_their_parents(one, steps):
    expected = one.expected
    answers = one.begin(steps)
    settled(one)
    made = {name: forked(one, name) for name in unfinished(one) if name in ALONE}
    assert len(made) > 7
    found = finished(one, answers, made)
    for name, each in made.items():
        for child in each.children:
            assert alike(found[child], expected[name]), (name, child)
    same({name: value for name, value in found.items() if name in expected}, expected)
    whole(one)


@pytest.mark.parametrize("n", [1, 4])
def test_other_requests_fill_the_cache_between(one, n):
    """The parent ends at once; what it shared is freed with the last child, and not before."""
    expected = one.expected
    names = ["greedy", "seeded", "prefix-a", "long-seeded"]
    answers = one.begin(9, names)
    settled(one)
    made = {name: forked(one, name, n) for name in unfinished(one)}
    assert len(made) > 2 and any(n + 1 in references(one, name) for name in made)
    one.engine.abort_request(list(made))
    assert any(n in references(one, each.children[0]) for each in made.values())
    fill = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for number in range(4):
        prompt = {"prompt_token_ids": [(11 * i + number) % 250 + 10 for i in range(600)]}
        one.engine.add_request(f"other-{number}", prompt, fill)
    found = finished(one, answers, made)
    for name, each in made.items():
        for child in each.children:
            assert alike(found[child], expected[name]), child
    whole(one)


def test_children_that_are_aborted_free_their_own_references_alone(one):
    expected = one.expected
    answers = one.begin(9, ["prefix-a", "seeded"])
    settled(one)
    before = references(one, "prefix-a")
    made = forked(one, "prefix-a", 3)
    assert references(one, "prefix-a")[0] == before[0] + 3
    one.engine.abort_request([made.children[1]])
    assert references(one, "prefix-a")[0] == before[0] + 2
    answers |= run(one.engine, 3)
    one.engine.abort_request([made.children[0]])
    answers |= run(one.engine, 1)
    assert references(one, "prefix-a")[0] == before[0] + 1
    found = finished(one, answers, {})
    assert alike(found.pop(made.children[2]), expected["prefix-a"])
    same(found, {name: expected[name] for name in ("prefix-a", "seeded")})
    whole(one)


EARLIER = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 3},
    "penalties": {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 2},
    "flat": {"temperature": 1.0, "seed": 8, "logprobs": 2, "flat_logprobs": True, "min_tokens": 12},
    "prompt": {"temperature": 0, "prompt_logprobs": 1, "logprobs": 0},
    "stops": {"temperature": 1.0, "seed": 9, "stop": ["zzz"], "logprobs": 1},
    "schema": {"temperature": 1.0, "seed": 3, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "regex": {"temperature": 1.0, "seed": 5, "structured_outputs": StructuredOutputsParams(regex="[abc]{30}d")},
}


@pytest.mark.parametrize("name", EARLIER)
def test_children_begin_at_an_earlier_token(one, name):
    """None, one, those with which full blocks have KV and no other has, one more, and one in the middle of a block."""
    size = one.core.scheduler.block_size
    prompt = {"prompt_token_ids": [(7 * i) % 250 + 20 for i in range(2 * size - 4)]}
    params = SamplingParams(max_tokens=24, ignore_eos="structured_outputs" not in EARLIER[name], **EARLIER[name])
    one.begin(0, ["greedy"])
    one.engine.abort_request(["greedy"])
    run(one.engine)
    one.engine.add_request("plain", prompt, params.clone())
    plain = run(one.engine)["plain"]
    one.engine.add_request("parent", prompt, params.clone())
    answers: dict = {}
    while state_of(one, "parent").num_output_tokens < 10:  # a grammar is compiled meanwhile
        answers |= run(one.engine, 1)
    settled(one)
    made = {at: forked(one, "parent", 2, at=at) for at in (0, 1, 5, 6, 8)}
    copied = [at for at, each in made.items() if each.bytes > 0]
    assert copied == ([1, 6, 8] if name == "prompt" else [0, 1, 6, 8])  # of which the prompt is computed again
    found = finished(one, answers, made)
    for at, each in made.items():
        for child in each.children:
            assert alike(found[child], plain), (at, child)
    assert alike(found["parent"], plain)
    whole(one)


def seeded(one, seed: int, name: str = "seeded") -> list:
    """The answer of this request with another seed."""
    prompt, params = CERTAIN[name]
    params = params.clone()
    params.seed = seed
    one.engine.add_request("reference", prompt, params)
    return run(one.engine)["reference"]


@pytest.mark.core
def test_each_child_draws_from_its_own_seed(one):
    expected = one.expected
    references = {seed: seeded(one, seed) for seed in (101, 7)}
    assert alike(references[7], expected["seeded"])
    answers = one.begin(9, ["seeded"])
    settled(one)
    begun = one.llm.torpor.fork("seeded", 2, at=0, seeds=[101, 7])
    here = one.llm.torpor.fork("seeded", 5, seeds=[7, None, 101, 101, 102])
    earlier = one.llm.torpor.fork("seeded", 3, at=4, seeds=[7, None, 101])
    found = finished(one, answers, {"begun": begun, "here": here, "earlier": earlier})
    answered = [found[child] for each in (begun, here, earlier) for child in each.children]
    parent = expected["seeded"]
    assert [alike(each, parent) for each in answered] == [False, True, True, True, *[False] * 3, True, True, False]
    assert alike(answered[0], references[101]) and alike(answered[4], answered[5])
    tokens = [each[1][0][1] for each in answered]
    assert tokens[6] != tokens[4] and tokens[9][:4] == tokens[2][:4] and tokens[9][4:] != tokens[4][4:]
    whole(one)


@pytest.mark.parametrize("before", ["nothing", "hibernated", "checkpoint"])
def test_children_without_a_seed_draw_each_for_itself(one, before):
    prompt, _ = CERTAIN["greedy"]
    one.begin(0, ["greedy"])
    one.engine.abort_request(["greedy"])
    one.engine.add_request("free", prompt, SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True))
    answers = run(one.engine, 6)
    if before != "nothing":
        one.llm.torpor.resume(one.llm.torpor.hibernate("free").id)
        answers |= run(one.engine, 4)
    if before == "checkpoint":
        path = one.llm.checkpoint().checkpoint
        one.engine.abort_request(["free"])
        run(one.engine)
        one.llm.reset_prefix_cache()
        one.core.torpor_side.sessions.drawn_seeds.clear()  # as in a new process
        one.llm.wake_up(from_checkpoint=path)
    settled(one)
    made = forked(one, "free", 3)
    with_seeds = one.llm.torpor.fork("free", 2, seeds=[5, 5])
    found = finished(one, answers, {"free": made, "seeded": with_seeds})
    tokens = [found[name][1][0][1] for name in ("free", *made.children)]
    assert len({tuple(each) for each in tokens}) == 4
    assert found[with_seeds.children[0]] == found[with_seeds.children[1]]
    whole(one)


def test_blocks_of_equal_tokens_are_not_the_parents(one):
    """Another block has the same key, and a look-up in the prefix cache finds it first."""
    expected = one.expected
    answers = one.begin(9, ["prefix-a"])
    settled(one)
    first = blocks_of(one, "prefix-a")
    one.llm.torpor.resume(one.llm.torpor.hibernate("prefix-a").id)
    while not one.core.scheduler.running:
        answers |= run(one.engine, 1)
    settled(one)
    assert first[0] not in blocks_of(one, "prefix-a")
    hits, count, _ = one.core.scheduler.kv_cache_manager.get_computed_blocks(state_of(one, "prefix-a"))
    assert count > 0 and hits.get_block_ids()[0][0] not in blocks_of(one, "prefix-a")
    made = forked(one, "prefix-a", 2)
    found = finished(one, answers, {"a": made})
    for child in made.children:
        assert alike(found[child], expected["prefix-a"])
    whole(one)


def test_children_of_children_and_of_requests_that_left(one):
    expected = one.expected
    answers = one.begin(5, ["seeded", "schema"])
    settled(one)
    made = {name: forked(one, name, 1) for name in ("seeded", "schema")}
    child = made["seeded"].children[0]
    for call in (lambda: one.llm.torpor.fork(child, 1), lambda: one.llm.torpor.hibernate(child)):
        with pytest.raises(errors.WrongState, match="wait for its next token"):
            call()
    answers |= run(one.engine, 4)
    settled(one)
    made["child"] = forked(one, child, 2)
    answers |= run(one.engine, 4)
    left = one.llm.torpor.hibernate(made["child"].children[0])
    with pytest.raises(errors.NotFound, match="hibernated"):
        one.llm.torpor.fork(made["child"].children[0], 1)
    answers |= run(one.engine, 3)
    one.llm.torpor.resume(left.id)
    found = finished(one, answers, made)
    for name in (child, *made["child"].children):
        assert alike(found[name], expected["seeded"])
    assert alike(found[made["schema"].children[0]], expected["schema"])
    whole(one)


def test_a_prompt_that_is_half_way_and_one_that_waits(one):
    prompt = {"prompt_token_ids": [(7 * i) % 250 + 10 for i in range(700)]}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    one.begin(0, ["greedy"])
    one.engine.abort_request(["greedy"])
    run(one.engine)
    one.engine.add_request("half", prompt, params)
    waiting = one.llm.torpor.fork("half", 2)
    assert (waiting.shared_blocks, waiting.bytes) == (0, 0)
    one.engine.abort_request(waiting.children)
    for _ in range(3):
        one.engine.step()
    settled(one)
    assert 0 < with_kv(one, "half") < 700
    made = {"waiting": waiting, "half": forked(one, "half", 2)}
    answers = one.finish({})
    plain = answers["half"]
    assert len(plain[1][0][1]) == 8
    assert [answers[child] for child in made["half"].children] == [plain] * 2
    whole(one)


def test_a_child_of_a_stream_of_deltas_goes_on_where_the_parent_was(one):
    one.begin(0, ["greedy"])
    one.engine.abort_request(["greedy"])
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.DELTA, logprobs=1
    )
    one.engine.add_request("stream", "The capital of France is", params)
    deltas: dict = {}
    made = None
    for number in range(100):
        for output in one.engine.step():
            deltas.setdefault(output.request_id, []).append(output.outputs[0])
        if number == 9:
            settled(one)
            made = {None: forked(one, "stream", 1), 3: forked(one, "stream", 1, at=3)}
            shared = state_of(one, "stream").num_output_tokens
        if not one.engine.has_unfinished_requests():
            break
    tokens = [token for delta in deltas["stream"] for token in delta.token_ids]
    text = "".join(delta.text for delta in deltas["stream"])
    assert len(tokens) == 30
    for at, each in made.items():
        of_child = deltas[each.children[0]]
        begin = shared if at is None else at
        assert [token for delta in of_child for token in delta.token_ids] == tokens[begin:]
        assert text.endswith(part := "".join(delta.text for delta in of_child)) and 0 < len(part) < len(text)
        assert sum(len(delta.logprobs) for delta in of_child) == 30 - begin
        assert of_child[-1].cumulative_logprob == pytest.approx(deltas["stream"][-1].cumulative_logprob, abs=1e-3)
    whole(one)


@pytest.mark.parametrize("flat", [False, True])
def test_a_child_of_deltas_that_begins_again_has_all_log_probabilities_of_its_prompt(one, flat):
    """The parent has given its own, and has them no more."""
    one.begin(0, ["greedy"])
    one.engine.abort_request(["greedy"])
    run(one.engine)
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA, prompt_logprobs=1,
        flat_logprobs=flat,
    )  # fmt: skip
    one.engine.add_request("stream", "The capital of France is", params)
    first: dict = {}
    made = None
    while one.engine.has_unfinished_requests():
        for output in one.engine.step():
            first.setdefault(output.request_id, output.prompt_logprobs)
        if made is None and "stream" in first:
            settled(one)
            made = one.llm.torpor.fork("stream", 1, at=0)
    of_parent, of_child = first["stream"], first[made.children[0]]
    assert type(of_child) is type(of_parent) is (FlatLogprobs if flat else list)
    assert len(of_parent) > 4 and not of_parent[0]
    assert alike(positions_to_value(of_child), positions_to_value(of_parent))
    whole(one)


def test_llms_own_calls_return_their_own_requests(one):
    expected = one.expected
    answers = one.begin(5, ["greedy"])
    settled(one)
    made = forked(one, "greedy", 2)
    one.engine.abort_request(["greedy"])
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    [output] = one.llm.generate(["Hi"], short, use_tqdm=False)
    assert output.finished and output.request_id not in made.children
    found = finished(one, answers, {"greedy": made})
    for child in made.children:
        assert alike(found[child], expected["greedy"])
    whole(one)


# --- calls that change nothing ----------------------------------------------------------------------------------------


def test_calls_may_be_repeated(one):
    expected = one.expected
    answers = one.begin(5, ["greedy"])
    made = one.llm.torpor.fork("greedy", 2, action="mine")
    assert made.children == ("greedy-mine-0", "greedy-mine-1")
    assert one.llm.torpor.fork("greedy", 2, action="mine") == made
    answers |= run(one.engine, 2)
    assert one.llm.torpor.fork("greedy", 2, action="mine") == made
    for options in ({"n": 3}, {"n": 2, "at": 1}, {"n": 2, "seeds": [1, 2]}):
        with pytest.raises(errors.InvalidArgument, match="the action mine was another fork"):
            one.llm.torpor.fork("greedy", action="mine", **options)
    assert len(unfinished(one)) == 3
    found = finished(one, answers, {"greedy": made})
    assert alike(found[made.children[1]], expected["greedy"])
    assert one.core.torpor_side.forks._done.keys() == {"mine"}
    one.begin(2, ["greedy"])
    one.llm.torpor.fork("greedy", 1, action="other")
    assert one.core.torpor_side.forks._done.keys() == {"other"}
    run(one.engine)
    whole(one)


def test_a_repeated_call_finds_its_children_when_the_parent_has_ended(one):
    one.begin(3, ["greedy"])
    made = one.llm.torpor.fork("greedy", 1, action="mine")
    one.engine.abort_request(["greedy"])
    assert one.llm.torpor.fork("greedy", 1, action="mine") == made
    with pytest.raises(errors.NotFound, match="no unfinished request 'greedy'"):
        one.llm.torpor.fork("greedy", 1, action="another")
    run(one.engine)
    whole(one)


def test_a_fork_does_not_wait_for_requests_that_come_meanwhile(one, monkeypatch):
    one.begin(4, ["greedy"])
    stock = frontend.caught_up_with

    async def caught_up_with(side, *arguments):
        prompt, params = CERTAIN["seeded"]
        one.engine.add_request("late", prompt, params.clone())
        return await stock(side, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(frontend, "caught_up_with", caught_up_with)
        patch.setattr(frontend, "_DRAIN_SECONDS", 5.0)
        assert len(one.llm.torpor.fork("greedy", 2).children) == 2
    assert "late" in unfinished(one)
    run(one.engine)
    whole(one)


def test_an_interrupted_call_undoes_what_it_did_and_no_more(one, monkeypatch):
    expected = one.expected
    answers = one.begin(5, ["prefix-a"])
    made = one.llm.torpor.fork("prefix-a", 1, action="mine")
    before = references(one, "prefix-a")
    for method in ("fork", "end_fork"):
        with interrupted(one, monkeypatch, method):
            one.llm.torpor.fork("prefix-a", 2)
        assert references(one, "prefix-a") == before and not one.core.torpor_side.hooks.is_quiet
        assert unfinished(one) == ["prefix-a", *made.children]
    with interrupted(one, monkeypatch, "fork"):
        one.llm.torpor.fork("prefix-a", 1, action="mine")
    assert unfinished(one) == ["prefix-a", *made.children]
    found = finished(one, answers, {"a": made})
    assert alike(found[made.children[0]], expected["prefix-a"])
    whole(one)


def test_a_front_end_that_cannot_take_the_children_leaves_none(one, monkeypatch):
    from torpor.vllm import fork_calls

    expected = one.expected
    answers = one.begin(5, ["seeded"])
    before = references(one, "seeded")
    stock, taken = fork_calls.outputs.state_from_value, []

    def state_from_value(*arguments):
        if len(taken) == 1:
            raise RuntimeError("no")
        taken.append(arguments)
        return stock(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fork_calls.outputs, "state_from_value", state_from_value)
        with pytest.raises(RuntimeError, match="no"):
            one.llm.torpor.fork("seeded", 3)
    assert references(one, "seeded") == before and unfinished(one) == ["seeded"]
    with pytest.raises(errors.InvalidArgument, match="there is a request seeded-x-0 already"):
        prompt, params = CERTAIN["greedy"]
        one.engine.add_request("seeded-x-0", prompt, params.clone())
        one.llm.torpor.fork("seeded", 2, action="x")
    assert unfinished(one) == ["seeded", "seeded-x-0"]
    one.engine.abort_request(["seeded-x-0"])
    same(one.finish(answers), {"seeded": expected["seeded"]})
    whole(one)


def test_nothing_else_happens_before_the_front_end_has_the_children(one, monkeypatch):
    from torpor.vllm import fork_calls

    expected = one.expected
    answers = one.begin(5, ["greedy"])
    refused, stock = [], fork_calls._take

    def take(*arguments):
        for call in (
            lambda: one.llm.sleep(level=1, preserve_state=True),
            one.llm.checkpoint,
            lambda: one.llm.torpor.hibernate("greedy"),
            lambda: one.llm.torpor.fork("greedy", 1),
        ):
            with pytest.raises(errors.WrongState, match="a fork is under way"):
                call()
            refused.append(call)
        stock(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fork_calls, "_take", take)
        made = one.llm.torpor.fork("greedy", 1)
    assert len(refused) == 4
    found = finished(one, answers, {"greedy": made})
    assert alike(found[made.children[0]], expected["greedy"])
    whole(one)


@pytest.mark.parametrize("fault", ["the copy", "the next child", "the scheduler"])
def test_a_fork_that_fails_half_way_leaves_nothing(one, monkeypatch, fault):
    expected = one.expected
    answers = one.begin(9, ["prefix-a"])
    settled(one)
    before = references(one, "prefix-a")
    free = one.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    scheduler = one.core.scheduler
    where, name = {
        "the copy": (_core, "copy_blocks"),
        "the next child": (scheduler.kv_cache_manager.block_pool, "get_new_blocks"),
        "the scheduler": (scheduler, "add_request"),
    }[fault]
    stock, calls = getattr(where, name), []

    def broken(*arguments):
        calls.append(arguments)
        if fault == "the copy" or len(calls) == 2:
            raise errors.DeviceError("broken")
        return stock(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, broken)
        with pytest.raises(errors.DeviceError, match="broken"):
            one.llm.torpor.fork("prefix-a", 3)
    assert calls and references(one, "prefix-a") == before and len(scheduler.requests) == 1
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    same(one.finish(answers), {"prefix-a": expected["prefix-a"]})
    whole(one)


@pytest.mark.parametrize(
    ("request_id", "options", "error", "what"),
    [
        ("nobody", {"n": 1}, errors.NotFound, "no unfinished request 'nobody'"),
        ("two", {"n": 1}, errors.Unsupported, "request two cannot be forked: it has several answers"),
        ("odd", {"n": 1}, errors.Unsupported, "cannot be forked: .*extra_args"),
        ("greedy", {"n": 0}, errors.InvalidArgument, "a fork into 0 requests"),
        ("greedy", {"n": True}, errors.InvalidArgument, "a fork into True requests"),
        ("greedy", {"n": 1025}, errors.InvalidArgument, "a fork into 1025 requests"),
        ("greedy", {"n": 1, "at": -1}, errors.InvalidArgument, "a fork at output token -1"),
        ("greedy", {"n": 1, "at": 99}, errors.InvalidArgument, r"a fork at output token 99: the request has \d"),
        ("greedy", {"n": 2, "seeds": [1]}, errors.InvalidArgument, "give a list of 2"),
        ("greedy", {"n": 1, "seeds": [-1]}, errors.InvalidArgument, "the seed -1"),
        ("greedy", {"n": 1, "seeds": [2**63]}, errors.InvalidArgument, "the seed 9223372036854775808"),
        ("greedy", {"n": 1, "action": ""}, errors.InvalidArgument, "the action id ''"),
        ("greedy", {"n": 1000}, errors.NotEnoughRoom, r"a fork needs 1000 KV blocks, \d+ are free"),
    ],
)
def test_what_cannot_be_is_said_and_the_parent_goes_on(one, request_id, options, error, what):
    expected = one.expected
    answers = one.begin(4, ["greedy", "two"])
    odd = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, extra_args={"pair": (1, 2)})
    one.engine.add_request("odd", "Hello", odd)
    answers |= run(one.engine, 1)
    with pytest.raises(error, match=what):
        one.llm.torpor.fork(request_id, **options)
    assert set(unfinished(one)) == {"greedy", "two", "odd"} and not one.core.torpor_side.hooks.is_quiet
    one.engine.abort_request(["odd"])
    same({name: one_of for name, one_of in one.finish(answers).items() if name != "odd"},
         {name: expected[name] for name in ("greedy", "two")})  # fmt: skip
    whole(one)


# --- beside sleeps ----------------------------------------------------------------------------------------------------


def test_children_sleep_and_wake_before_their_first_step(one):
    expected = one.expected
    answers = one.begin(6, ["prefix-a", "stops", "seeded"])
    settled(one)
    made = {name: forked(one, name, 2) for name in ("prefix-a", "stops", "seeded")}
    for call in (one.llm.checkpoint, lambda: one.llm.sleep(level=1, preserve_state=True, to="disk")):
        with pytest.raises(errors.Unsupported, match=r"forked requests that have not begun \(6\)"):
            call()
    with pytest.raises(errors.WrongState, match="asleep"):
        one.llm.sleep(level=1, preserve_state=True)
        one.llm.torpor.fork("seeded", 1)
    assert one.llm.wake_up()
    answers |= run(one.engine, 3)
    path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    assert one.llm.wake_up() and path
    found = finished(one, answers, made)
    for name, each in made.items():
        for child in each.children:
            assert alike(found[child], expected[name])
    whole(one)


def test_a_second_sleep_does_not_take_what_a_block_had_before_the_fork(one):
    """No step between: the block that the child got was another request's when the first sleep copied it."""
    expected = one.expected
    answers = one.begin(6, ["greedy", "seeded"])
    one.llm.sleep(level=1, preserve_state=True)
    assert one.llm.wake_up()
    given = blocks_of(one, "greedy")[0]
    one.engine.abort_request(["greedy"])
    made = forked(one, "seeded", 1)
    assert blocks_of(one, made.children[0])[0] == given
    kept = kv_of(one, made.children[0])
    one.llm.sleep(level=1, preserve_state=True)
    assert one.llm.wake_up()
    assert kv_of(one, made.children[0]) == kept
    found = finished(one, answers, {"seeded": made})
    assert alike(found[made.children[0]], expected["seeded"])
    whole(one)


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_kv_that_is_dropped_is_computed_again(one, how):
    expected = one.expected
    answers = one.begin(6, ["prefix-a", "seeded", "penalties"])
    settled(one)
    made = {name: forked(one, name, 2) for name in unfinished(one)}
    if how == "keep":
        one.llm.sleep(level=1, mode="keep")
        assert one.llm.wake_up()
    else:
        one.llm.sleep(level=1, preserve_state=True)
        answers |= run(one.engine, 1)
        one.llm.wake_up(tags=["weights"])
        assert one.llm.wake_up(kv="recompute")
    found = finished(one, answers, made)
    for name, each in made.items():
        for child in each.children:
            assert alike(found[child], expected[name])
    whole(one)


def test_a_pause_may_come_before_children_have_run(one):
    answers = one.begin(6, ["prefix-a", "seeded", "penalties"])
    settled(one)
    made = {name: forked(one, name, 2) for name in unfinished(one)}
    one.core.pause_scheduler("keep", True)
    pool = one.core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    one.core.resume_scheduler()
    found = finished(one, answers, made)
    for name, each in made.items():
        for child in each.children:
            assert alike(found[child], one.expected[name])
    whole(one)


def test_images_know_from_whom_and_where_a_child_was_forked(one):
    expected = one.expected
    answers = one.begin(9, ["greedy", "seeded"])
    settled(one)
    [child] = one.llm.torpor.fork("greedy", 1, at=2).children
    answers |= run(one.engine, 4)
    settled(one)
    [last] = one.llm.torpor.fork(child, 1, at=3, seeds=[5]).children
    answers |= run(one.engine, 2)
    ids = {name: state_of(one, name).request_id for name in ("greedy", child, last)}
    one.llm.torpor.hibernate(["greedy"], "first", to="disk")
    for _ in range(2):  # also after they came back
        left = one.llm.torpor.hibernate([child, last], "others", to="disk")
        tree = look("tree", one.directory / "images")
        [root] = tree["forks"]
        assert (root["request"], root["image"]) == (ids["greedy"], "first")
        [of_child] = root["children"]
        assert (of_child["request"], of_child["at"], of_child["image"]) == (ids[child], 2, "others")
        [of_last] = of_child["children"]
        assert (of_last["request"], of_last["at"], of_last["seed"], of_last["children"]) == (ids[last], 3, 5, [])
        assert all(image["digests"] == "whole" for image in tree["images"])
        found = look("diff", one.directory / "images/first", left.path, code=6)
        assert {each["b"]: each["by"] for each in found["pairs"]} == {ids[child]: "fork", ids[last]: "fork"}
        one.llm.torpor.resume(left.path)
        while any(image["id"] == left.id for image in one.llm.torpor.call("images")):  # until its requests run
            answers |= run(one.engine, 1)
    one.llm.torpor.resume("first")
    found = one.finish(answers)
    assert alike(found[child], expected["greedy"])
    same({name: found[name] for name in ("greedy", "seeded")}, {name: expected[name] for name in ("greedy", "seeded")})
    whole(one)


def test_vllms_metrics_have_when_a_child_was_queued(one, monkeypatch):
    """One without a token is queued as a new request. Another one was queued and scheduled as its parent."""
    one.begin(5, ["greedy"])
    with monkeypatch.context() as counted:
        for each in (one.core.scheduler, one.engine.output_processor):
            counted.setattr(each, "log_stats", True)
        counted.setattr(one.core.scheduler, "make_stats", lambda *args, **kwargs: None)  # the engine began without
        made = {at: one.llm.torpor.fork("greedy", 1, at=at).children[0] for at in (0, None)}
    events = {at: [event.type for event in state_of(one, child).events] for at, child in made.items()}
    assert events == {0: [EngineCoreEventType.QUEUED], None: []}
    processor = one.engine.output_processor
    states = {at: processor.request_states[processor.external_req_ids[child][0]] for at, child in made.items()}
    assert states[0].stats.scheduled_ts == 0 < states[None].stats.scheduled_ts
    one.finish({})
    whole(one)
