# SPDX-License-Identifier: Apache-2.0
"""Sessions of a server without an engine: whose request a name means, and what becomes of calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace

import msgspec
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import RequestStatus

from torpor import _core
from torpor.errors import Busy, InvalidArgument, NotFound, WrongState
from torpor.vllm import connector_options, fork_calls, outputs, residency_calls, session_calls
from torpor.vllm import sessions as in_the_core
from torpor.vllm.engine_values import KnownSession, SessionAnswer
from torpor.vllm.frontend import Report
from torpor.vllm.scheduler_values import unstarted_request
from torpor.vllm.server import moves, routes
from torpor.vllm.server import sessions as of_server
from torpor.vllm.server.access import Caller, caller_of_call
from torpor.vllm.server.life import Server
from torpor.vllm.server.recorder import Recorder
from torpor.vllm.server.sessions import ServerSide, Sessions, seeds_of
from torpor.vllm.server.tasks import Tasks
from torpor.vllm.values import sampling_to_value

ALICE, BOB = Caller("alice"), Caller("bob")
ADMIN = Caller("", is_admin=True, may_change=True)


class Counter:
    def labels(self, *_):
        return self

    def inc(self, *_) -> None:
        pass

    observe = inc


class Made:
    """A server by hand for Sessions: answers by tenant and response, requests that run, images of the engine."""

    def __init__(self):
        self.answers: dict[tuple[str, str], list[str]] = {}
        self.states: dict[str, SimpleNamespace] = {}
        self.created: dict[str, float] = {}
        self.images: list[dict] = []
        found = SimpleNamespace(find=lambda response, tenant: self.answers.get((tenant, response), []), get=self._get)
        self.server = SimpleNamespace(
            state="awake", has_log=True, recorder=True, options=SimpleNamespace(sessions=True),
            log=SimpleNamespace(answers=found), tasks=Tasks(lambda _: None), notify=lambda: None,
            metrics=SimpleNamespace(session_actions=Counter(), session_seconds=Counter()),
            app_state=SimpleNamespace(args=SimpleNamespace(ssl_certfile=None)),
            engine=SimpleNamespace(
                output_processor=SimpleNamespace(request_states=self.states), torpor=SimpleNamespace(call=self._call)
            ),
        )  # fmt: skip
        self.sessions = Sessions(self.server)
        self.sessions._side = lambda: SimpleNamespace()

    def answer(self, tenant: str, response: str, request: str, runs: bool = True, created: float = 0.0) -> None:
        self.answers[(tenant, response)] = [request]
        self.created[request] = created
        if runs:
            self.states[request] = SimpleNamespace(external_req_id=response)

    def image(self, name: str, *requests: str, **fields) -> None:
        self.images.append({
            "id": name, "requests": dict.fromkeys(requests, 1), "resuming": False, "preempted": False, "path": "",
            "bytes": 1, "tokens": 1,
        } | fields)  # fmt: skip

    def _get(self, request: str) -> dict | None:
        found = next((key for key, ids in self.answers.items() if request in ids), None)
        if found is None:
            return None
        return {
            "tenant": found[0], "response": found[1], "choice": self.answers[found].index(request),
            "state": "running" if request in self.states else "finished", "created": self.created[request],
        }  # fmt: skip

    async def _call(self, method: str, options: dict | None = None) -> list[dict]:
        assert method == "images"
        return [dict(each) for each in self.images]


@contextmanager
def called_by(caller: Caller) -> Iterator[None]:
    before = caller_of_call.set(caller)
    try:
        yield
    finally:
        caller_of_call.reset(before)


def run(scene) -> None:
    asyncio.run(asyncio.wait_for(scene, 600))


def test_a_name_that_was_used_again_means_the_answer_that_is_here():
    made = Made()
    made.answer("alice", "chatcmpl-x", "x-1")
    assert made.sessions.record_move("x-1", "http://127.0.0.1:8001").endswith("/torpor/requests/chatcmpl-x")
    assert made.sessions.moved_to(["x", "chatcmpl-x"], "alice") == "http://127.0.0.1:8001"
    assert made.sessions.moved_to(["chatcmpl-x"], "bob") is None
    made.answer("alice", "chatcmpl-x", "x-2")
    assert made.sessions.moved_to(["x", "chatcmpl-x"], "alice") is None
    made.answers.clear()  # the log knows nothing of it any more
    assert made.sessions.moved_to(["chatcmpl-x"], "alice") == "http://127.0.0.1:8001"


@pytest.mark.parametrize(("runs", "created", "is_here"), [(True, 0.5, True), (False, 2.0, True), (False, 0.5, False)])
def test_a_name_of_calls_of_two_routes_means_the_one_that_runs_or_the_newest(runs, created, is_here):
    made = Made()
    made.answer("alice", "chatcmpl-x", "x-1", runs=False, created=1.0)
    made.sessions.record_move("x-1", "http://127.0.0.1:8001")
    made.answer("alice", "cmpl-x", "x-2", runs=runs, created=created)
    names = of_server.names_of("x")
    assert made.sessions.newest(names, "alice") == (["x-2"] if is_here else ["x-1"])
    assert made.sessions.moved_to(names, "alice") == (None if is_here else "http://127.0.0.1:8001")
    assert made.sessions.newest(names, "bob") == []


@pytest.mark.parametrize("moves", [True, False])
def test_who_reads_an_answer_that_moves_does_not_take_it_for_complete(moves):
    async def scene():
        made = Made()
        made.answer("alice", "chatcmpl-x", "x-1")

        async def more(request, from_token, from_text=0) -> dict:
            if moves:
                made.sessions.record_move(request, "http://127.0.0.1:8001")
            return {
                "state": "failed", "tokens": [1], "text": "a", "tokens_end": 1, "text_end": 1, "finish_reason": "error",
                "stop_reason": of_server.MOVED,
            }  # fmt: skip

        life = made.server
        life.sessions, life.model, life.log.more = made.sessions, "model", more
        life.log.answers.part = lambda *_: {"tokens": [], "text": "", "tokens_end": 0, "text_end": 0}
        events = "".join([each async for each in routes._events(life, ["x-1"], [(0, 0)], [""])])
        assert ("data: [DONE]" in events) is not moves
        assert ("event: error" in events and "http://127.0.0.1:8001/torpor/requests/chatcmpl-x" in events) is moves

    run(scene())


@pytest.fixture
def two_choices():
    """A log with an answer of two choices, of which the first has ended."""
    log = _core.DeliveryLog({"engine": {"model": "tiny"}})
    sampling = sampling_to_value(SamplingParams(max_tokens=9))
    for choice in (0, 1):
        request = unstarted_request(f"{choice}_x", [1, 2, 3], sampling, 0.0)
        of_call = {"response": "chatcmpl-x", "tenant": "alice", "choice": choice, "call": 7, "front": {"echo": "p"}}
        log.start({"request": request} | of_call)
    end = {"state": "finished", "finish_reason": "stop", "stop_reason": "."}
    log.step([{"id": "0_x", "at": 0, "tokens": [4, 5], "text": "zero", **end}, _step("1_x", 0, [6], "one")])
    return log


def _step(request: str, at: int, tokens: list[int], text: str) -> dict:
    return {"id": request, "at": at, "tokens": tokens, "text": text}


def test_a_choice_has_its_number_also_where_another_one_is_gone(two_choices):
    async def scene():
        made = Made()
        two_choices.step([_step("1_x", 1, [], "") | {"state": "finished", "finish_reason": "length"}])

        async def more(*part) -> dict:
            return two_choices.part(*part)

        life = made.server
        life.sessions, life.model, life.log = made.sessions, "m", SimpleNamespace(answers=two_choices, more=more)
        event = await anext(routes._events(life, ["1_x"], [(0, 0)], [""]))
        assert json.loads(event.split("data: ")[1])["choices"][0]["index"] == 1
        assert event.startswith("id: 0,1\n")
        starts = routes.numbers("4,3", routes.places(life, ["1_x"]))
        assert starts == [3] and routes.numbers("7", routes.places(life, ["0_x", "1_x"])) == [7, 7]
        for few in ("4,", "x", ""):
            with pytest.raises(InvalidArgument, match="no place in an answer of 2 choices"):
                routes.numbers(few, [1])

    run(scene())


def test_choices_that_have_ended_move_with_the_others(two_choices, monkeypatch):
    there = Recorder(OutputProcessor(None, log_stats=False), _core.DeliveryLog({"engine": {}}), False)
    engine = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))
    here = SimpleNamespace(engine=engine, log=SimpleNamespace(answers=two_choices), tenants_id="t")
    stock = {"requests": [{"id": "1_x", "external_id": "chatcmpl-x"}], "parents": []}
    monkeypatch.setattr(of_server.frontend.AsyncSide, "capture", lambda *_: dict(stock))
    monkeypatch.setattr(of_server.frontend.AsyncSide, "take", lambda *_: None)
    outputs = ServerSide(here, None).capture(["1_x"])
    outputs = msgspec.msgpack.decode(msgspec.msgpack.encode(outputs))  # they go through the engine core's process
    taker = ServerSide(SimpleNamespace(engine=engine, log=there, tenants_id="t"), None)
    for _ in range(2):  # it may have come before
        taker.take(Report(outputs=outputs))
        taker.taken(outputs)
    assert there.failures == 0 and there.answers.find("chatcmpl-x", "alice") == ["0_x"]
    came, left = there.answers.get("0_x"), two_choices.get("0_x")
    same = ("text", "state", "finish_reason", "stop_reason", "choice", "front")
    assert [came[name] for name in same] == [left[name] for name in same]
    assert list(came["request"]["output_token_ids"]) == [4, 5]


def test_of_several_answers_of_one_name_the_one_that_runs_is_meant():
    made = Made()
    made.answer("alice", "chatcmpl-x", "ended", runs=False)
    made.answer("alice", "cmpl-x", "runs")
    with called_by(ALICE):
        assert made.sessions._running("x") == ["runs"]


def test_hibernated_requests_are_named_by_their_image_too():
    async def scene():
        made = Made()
        for tenant in ("alice", "bob"):
            made.answer(tenant, "chatcmpl-x", f"of-{tenant}")
            made.image(f"image-{tenant}", f"of-{tenant}")
        await made.sessions._look()
        for caller in (ALICE, ADMIN):
            with called_by(caller):
                assert made.sessions._running("image-alice") == ["of-alice"]
        with called_by(BOB), pytest.raises(NotFound):
            made.sessions._running("image-alice")

    run(scene())


def test_the_admin_does_not_take_one_tenants_image_for_anothers():
    async def scene():
        made = Made()
        for tenant in ("alice", "bob"):
            made.answer(tenant, "chatcmpl-x", f"of-{tenant}")
            made.image(f"image-{tenant}", f"of-{tenant}")
        with called_by(ADMIN):
            with pytest.raises(WrongState, match="2 tenants have a request x"):
                await made.sessions._image_named("x")
            assert (await made.sessions._image_named("image-bob"))["requests"] == {"of-bob": 1}
        with called_by(ALICE):
            assert (await made.sessions._image_named("x"))["id"] == "image-alice"

    run(scene())


def test_hibernating_what_another_call_hibernates_changes_nothing(monkeypatch):
    async def scene():
        made, asked = Made(), []
        made.answer("alice", "chatcmpl-x", "x-1")

        async def hibernate(side, requests, image, timeout, to):
            asked.append(image)
            await asyncio.sleep(0.01)
            if image is None:
                made.image("one", *requests)
            return SimpleNamespace(id="one", bytes=1, tokens=1, path="")

        monkeypatch.setattr(session_calls, "hibernate", hibernate)
        with called_by(ALICE):
            both = await asyncio.gather(*(made.sessions.hibernate("x", "host", None) for _ in range(2)))
        assert asked == [None, "one"] and [each["id"] for each in both] == ["one", "one"]

    run(scene())


def test_action_ids_of_tenants_do_not_meet_in_the_engine(monkeypatch):
    async def scene():
        made, asked = Made(), []
        made.answer("alice", "chatcmpl-x", "x-1")

        async def fork(side, request, n, at, seeds, action, timeout):
            asked.append(action)
            return SimpleNamespace(children=("child",), shared_blocks=0, bytes=0)

        monkeypatch.setattr(fork_calls, "fork", fork)
        with called_by(ALICE):
            first = await made.sessions.fork("x", 1, None, None, "step-1")
            again = await made.sessions.fork("x", 1, None, None, "step-1")
        assert asked == [None] and again["repeated"] and again["children"] == first["children"]

    run(scene())


@pytest.mark.parametrize("caller", [ALICE, BOB, ADMIN])
def test_who_deletes_a_session_in_tiers_deletes_its_own(monkeypatch, caller):
    async def scene():
        made, asked = Made(), []
        tiers = SimpleNamespace(kv_connector=connector_options.CLASS, kv_connector_extra_config={})
        made.server.engine.vllm_config = SimpleNamespace(kv_transfer_config=tiers)

        async def tenants_of(side, session):
            asked.append(session)
            return ["alice"] if session == "agent" else []

        async def call(side, verb, session, tenant, **options):
            return SessionAnswer("accepted", "", 1, 2, 3, 4, False, f"{verb} {session} of {tenant}")

        monkeypatch.setattr(residency_calls, "tenants_of", tenants_of)
        monkeypatch.setattr(residency_calls, "call", call)
        with called_by(caller):
            for name in ("other", *(["agent"] if caller is BOB else [])):
                with pytest.raises(NotFound, match=f"there is no image {name}"):
                    await made.sessions.delete(name, None)
            if caller is BOB:
                return
            ended = await made.sessions.delete("agent", None)
        assert (ended["action"], ended["outcome"], ended["freed_bytes"]) == ("delete", "accepted", 2)
        assert set(asked) == {"agent", "other"}

    run(scene())


def test_a_long_list_is_asked_for_page_by_page_and_is_in_the_order_of_use():
    fields = {name: 0 for name in KnownSession.__dataclass_fields__}
    pages = {None: [("a", 3), ("b", 9)], "b": [], "c": [("d", 5)]}
    behind = {None: "b", "b": "c", "c": None}

    async def call(method, options):
        assert method == "session_views" and options["tenant"] == "alice"
        sessions = [fields | {"id": name, "used": used} for name, used in pages[options["from"]]]
        return {"sessions": sessions, "next": behind[options["from"]]}

    side = SimpleNamespace(call=call, engine=SimpleNamespace(engine_core=None))
    assert [each.id for each in asyncio.run(residency_calls.known(side, "alice"))] == ["b", "d", "a"]


def test_a_call_that_failed_may_be_made_again_and_takes_no_place():
    async def scene():
        made = Made()
        with called_by(ALICE):
            for _ in range(3):
                with pytest.raises(NotFound):
                    await made.sessions.hibernate("nothing", "host", "a-1")
        await asyncio.sleep(0)
        assert not made.sessions._actions

    run(scene())


def test_a_call_that_takes_long_does_not_keep_what_is_remembered_of_others(monkeypatch):
    async def scene():
        made, goes_on = Made(), asyncio.Event()

        async def at_once() -> dict:
            return {}

        monkeypatch.setattr(of_server, "_MOST_ACTIONS", 2)
        with called_by(ALICE):
            long = asyncio.create_task(made.sessions._once(("move",), "long", goes_on.wait))
            await asyncio.sleep(0)
            for number in range(5):
                await made.sessions._once(("fork",), f"a-{number}", at_once)
            assert {action for _, action in made.sessions._actions} == {"long", "a-4"}
            goes_on.set()
            await long

    run(scene())


def test_the_end_of_a_server_waits_for_images_and_not_for_those_of_others(monkeypatch):
    async def scene():
        made, resumed = Made(), []
        made.image("mine", "a")
        made.image("taken", "b", path="/images/taken")
        made.image("read", "c", path="/images/read")
        made.image("preempted-1", "d", resuming=True, preempted=True)
        busy = iter([True, False])

        async def resume(side, image):
            resumed.append(image)
            if image == "read" and next(busy):
                raise Busy("another engine reads it")
            made.images = [each for each in made.images if each["id"] != image]
            if image == "taken":
                raise NotFound("another engine has taken it")

        monkeypatch.setattr(session_calls, "resume", resume)
        monkeypatch.setattr(of_server, "_LOOK_SECONDS", 0)
        await made.sessions.bring_back()
        assert resumed == ["mine", "taken", "read", "read"]
        assert [each["id"] for each in made.images] == ["preempted-1"]

    run(scene())


@pytest.mark.parametrize(
    ("state", "problem"), [("ending", "the server ends"), ("handing over", "hands over to its standby")]
)
def test_nothing_leaves_or_comes_once_the_server_ends_or_hands_over(state, problem):
    """Its checkpoint or its log may lack it: a request that came would be lost, one that moved would run twice."""

    async def scene():
        made = Made()
        made.answer("alice", "chatcmpl-x", "x-1")
        made.server.state = state
        calls = (
            lambda: made.sessions.hibernate("x", "host", None),
            lambda: made.sessions.resume("image", "/images/image", None),
            lambda: made.sessions.fork("x", 1, None, None, None),
            lambda: made.sessions.move("x", "http://127.0.0.1:8001", {}, None),
        )
        with called_by(ALICE):
            for call in calls:
                with pytest.raises(WrongState, match=problem):
                    await call()

    run(scene())


def test_a_request_is_not_given_away_once_the_server_hands_over(monkeypatch):
    """The hand-over began after the call: the log that the other server goes on from may lack the note."""

    async def scene():
        made, noted = Made(), []
        made.answer("alice", "chatcmpl-x", "x-1")

        async def move(side, requests, to, image, timeout):
            made.server.state = "handing over"
            await to("/images/one")

        async def note(*_) -> None:
            noted.append("note")

        async def forget(*_) -> None:
            noted.append("forget")

        monkeypatch.setattr(session_calls, "move", move)
        monkeypatch.setattr(moves, "note", note)
        monkeypatch.setattr(moves, "forget", forget)
        with called_by(ADMIN), pytest.raises(WrongState, match="hands over"):
            await made.sessions.move("x", "http://127.0.0.1:8001", {}, None)
        assert noted == ["forget"]

    run(scene())


def test_a_move_is_not_noted_in_a_log_that_is_closed():
    async def scene():
        made = Made()
        made.server.log.closed = True
        with pytest.raises(WrongState, match="closed"):
            await moves.note(made.server, ["x-1"], "/images/one", "http://127.0.0.1:8001")

    run(scene())


def test_a_sleep_that_waits_for_ends_does_not_wait_for_a_hibernated_request():
    async def scene():
        made = Made()
        made.answer("alice", "chatcmpl-x", "x-1")
        made.image("one", "x-1")
        await made.sessions._look()
        server = made.server
        server._adding, server.sessions, server.engine.errored = 0, made.sessions, False

        async def is_paused() -> bool:
            return False

        server.engine.is_paused = is_paused
        with pytest.raises(WrongState, match="1 requests are hibernated"):
            await Server._requests_ended(server, "awake")

    run(scene())


def test_a_seed_has_as_many_digits_as_one_can_have():
    assert seeds_of(["parent", str(2**63 - 1)]) == [None, 2**63 - 1]
    for wrong in ("9" * 5000, "-1", "٣", ""):
        with pytest.raises(InvalidArgument, match="the seed"):
            seeds_of([wrong])


def test_an_abort_reaches_a_hibernated_request_whose_blocks_another_connector_still_holds():
    def request(status: RequestStatus) -> SimpleNamespace:
        return SimpleNamespace(status=status, is_finished=lambda: RequestStatus.is_finished(status))

    ended, dropped = [], []
    requests = {"held": request(RequestStatus.FINISHED_ABORTED), "leaving": request(RequestStatus.RUNNING)}
    hooks = SimpleNamespace(core=None, scheduler=SimpleNamespace(requests=requests), call_ranks=dropped.append)
    core = in_the_core.Sessions(hooks)
    image = {"id": "one", "requests": {"held": 1, "leaving": 1}, "resuming": False, "path": ""}
    core._images = SimpleNamespace(summaries=lambda: [image], end=lambda name: ended.append(name) or b"drop")
    core._clients = {"held": 0, "leaving": 0}
    assert [each.request_id for each in core.end(["held", "leaving"])] == ["held"]
    assert ended == ["held"] and dropped == [b"drop"]


def test_an_engine_remembers_the_last_images_that_others_took_and_no_more(monkeypatch):
    there = ["a", "b", "c"]

    def read_back(image: str) -> None:
        raise NotFound(f"another engine has taken {image}")

    def forget(image: str) -> list[str]:
        there.remove(image)
        return [f"of-{image}"]

    images = SimpleNamespace(
        summaries=lambda: [
            {"id": each, "path": f"/images/{each}", "resuming": False, "requests": {}} for each in there
        ],
        read_back=read_back, forget=forget, put_back=lambda image: None,
    )  # fmt: skip
    monkeypatch.setattr(in_the_core, "_MOST_MOVED", 2)
    hooks = SimpleNamespace(
        core=None,
        scheduler=SimpleNamespace(requests={}),
        other_connector=SimpleNamespace(is_there=False),
        is_quiet=True,
    )
    core = in_the_core.Sessions(hooks)
    core.begun = lambda: (images, None)
    core.summaries = images.summaries
    for image in ("a", "b", "c", "c"):  # the last one again: who asked has not heard it
        assert core.resume(image)["moved"] == [f"of-{image}"]
    assert list(core._moved) == ["b", "c"]


def test_choices_of_an_engine_without_a_record_have_the_numbers_that_vllm_gives_them():
    """Of /v1/completions with several prompts: those of one prompt stand together."""
    params = SamplingParams(max_tokens=9, n=2, detokenize=False)
    before = OutputProcessor(None, log_stats=False)
    for prompt in (0, 1):
        request = EngineCoreRequest(
            request_id=f"x-{prompt}", external_req_id=f"cmpl-x-{prompt}", prompt_token_ids=[1, 2], mm_features=None,
            sampling_params=params, pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
            data_parallel_rank=None,
        )  # fmt: skip
        parent = ParentRequest(request)
        for index in (0, 1):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            before.add_request(child, None, parent, index, None)
    captured = outputs.capture(before)
    of_core = {"prompt_token_ids": [1, 2], "token_ids": [], "arrival_time": 0.0, "status": "waiting"}
    of_core["sampling"] = sampling_to_value(params)
    there = Recorder(OutputProcessor(None, log_stats=False), _core.DeliveryLog({"engine": {}}), False)
    assert there.take_up([of_core | {"id": each["id"]} for each in captured["requests"]], captured) == []
    expected = {"0_x-0": 0, "1_x-0": 1, "0_x-1": 2, "1_x-1": 3}
    assert {each["request"]["id"]: each["choice"] for each in there.answers.all()} == expected
    with called_by(ALICE):
        answers = {
            each["id"]: of_server._answer_of(each | of_core, captured["parents"]) for each in captured["requests"]
        }
    assert {name: answer["choice"] for name, answer in answers.items()} == expected
    assert {answer["response"] for answer in answers.values()} == {"cmpl-x"}
