# SPDX-License-Identifier: Apache-2.0
"""What the response log reads of vLLM's requests by itself, how it writes that, and its limit in bytes: no engine."""

import asyncio
import json
import random
import re
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
from server_stubs import CLIENT, OTHER_CLIENT, Engine, build, client, metric, no_settings, run, started  # noqa: F401
from torpor import _core
from torpor.errors import InvalidArgument
from torpor.vllm.scheduler_values import unstarted_request
from torpor.vllm.server import recorder as server_recorder
from torpor.vllm.server import routes
from torpor.vllm.server.recorder import Recorder
from torpor.vllm.values import sampling_to_value
from vllm import SamplingParams

# --- what a step gave ------------------------------------------------------------------------------------------------


class Detokenizer:
    def __init__(self, stop_buffer_length: int = 0):
        self.token_ids, self.output_text, self.stop_buffer_length = [], "", stop_buffer_length

    @property
    def output_token_ids(self):
        return self.token_ids


class Slow(Detokenizer):
    """As vLLM's, whose list of tokens begins with the prompt."""

    def __init__(self, *args):
        super().__init__(*args)
        self.token_ids = [9, 9]

    @property
    def output_token_ids(self):
        return self.token_ids[2:]


class State:
    def __init__(self, request_id, detokenizer, in_pieces=False):
        self.request_id, self.detokenizer, self.streaming_input = request_id, detokenizer, in_pieces


class Processor:
    """`gives`: what the next step gives, by request: tokens, text, and how it ends."""

    def __init__(self):
        self.request_states, self.gives = {}, {}

    def add_request(self, *_): ...
    def abort_requests(self, *_): ...
    def propagate_error(self, *_): ...

    def process_outputs(self, outputs):
        for output in outputs:
            state = self.request_states[output.request_id]
            tokens, text, finish = self.gives[output.request_id]
            state.detokenizer.token_ids += tokens
            state.detokenizer.output_text += text
            if finish is not None:
                state.torpor_finish = (finish, None)
                if not state.streaming_input:
                    del self.request_states[output.request_id]


def request(request_id: str, prompt=(1, 2), tenant: str = "") -> dict:
    asked = unstarted_request(request_id, list(prompt), sampling_to_value(SamplingParams(max_tokens=4000)), 0.0)
    return {"request": asked, "response": request_id, "tenant": tenant, "choice": 0, "front": {"state": {}}}


def recorded(monkeypatch, directory=None, **options) -> tuple[Processor, Recorder]:
    monkeypatch.setattr(server_recorder, "FastIncrementalDetokenizer", Detokenizer)
    processor = Processor()
    log = _core.DeliveryLog({"directory": directory, "engine": {"model": "tiny"}} | options)
    return processor, Recorder(processor, log, False)


def begin(processor, recorder, request_id, detokenizer, in_pieces=False) -> State:
    state = processor.request_states[request_id] = State(request_id, detokenizer, in_pieces)
    if in_pieces:
        recorder._in_pieces.add(request_id)
    recorder.answers.start(request(request_id))
    return state


def step(processor, given: dict) -> None:
    processor.gives = given
    processor.process_outputs([SimpleNamespace(request_id=each) for each in given])


WORDS = ["", " word", "é", " 漢字", "🙂", "a\u0301", "\n"]


def test_the_log_reads_the_same_as_its_slow_way(monkeypatch):
    """Of texts in any alphabet, of text that is held back, and of each end; beside states that only Python reads."""
    chance = random.Random(3)
    processor, recorder = recorded(monkeypatch)
    asked_slowly = []
    slow_way = recorder.step_of
    recorder.step_of = lambda state: asked_slowly.append(state.request_id) or slow_way(state)
    states = {}
    for number in range(40):
        kind = Slow if number % 10 == 0 else Detokenizer
        states[f"r{number}"] = begin(processor, recorder, f"r{number}", kind(number % 4), in_pieces=number % 10 == 5)
    processor.request_states["unknown"] = State("unknown", Detokenizer())
    running = {*states, "unknown"}
    for number in range(60):
        given = {}
        for name in sorted(running):
            ends = number > 20 and chance.random() < 0.05 and name != "unknown"
            tokens = [chance.randrange(1 << 20) for _ in range(chance.choice((0, 1, 1, 1, 3)) if number else 1)]
            given[name] = (tokens, chance.choice(WORDS), chance.choice(("stop", "length", "abort")) if ends else None)
        asked_slowly.clear()
        step(processor, given)
        running -= {name for name, (_, _, finish) in given.items() if finish is not None}
        slowly = {name for name in given if name != "unknown"} & {
            name for name, state in states.items()
            if type(state.detokenizer) is Slow or state.streaming_input or given.get(name, (0, 0, None))[2] is not None
        }  # fmt: skip
        assert set(asked_slowly) == slowly
        for name, state in states.items():
            answer = recorder.answers.get(name)
            finish = getattr(state, "torpor_finish", None)
            assert list(answer["request"]["output_token_ids"]) == state.detokenizer.output_token_ids, name
            text = server_recorder.visible_text(state, finish is not None)
            assert answer["text"] == text, (name, number)
            assert answer["finish_reason"] == ("" if finish is None else finish[0])
            assert slow_way(state) is None, "the slow way finds more"
    assert recorder.failures == 0 and len(running) < 35


@pytest.mark.parametrize("harm", ["a token that is no number", "half of a surrogate", "no list of tokens", "no text"])
def test_what_it_cannot_read_is_left_to_python(monkeypatch, harm):
    processor, recorder = recorded(monkeypatch)
    asked = []
    recorder.step_of = lambda state: asked.append(state.request_id)
    state = begin(processor, recorder, "a", Detokenizer())
    if harm == "no list of tokens":
        state.detokenizer.token_ids = (1,)
        assert not recorder.answers.step_states([state], processor.request_states, set(), Detokenizer, recorder.step_of)
    elif harm == "no text":
        del state.detokenizer.output_text
        assert not recorder.answers.step_states([state], processor.request_states, set(), Detokenizer, recorder.step_of)
    else:
        step(processor, {"a": ([1 << 40], "x", None) if harm.startswith("a token") else ([1], "\ud800", None)})
    assert asked == ["a"]
    assert recorder.answers.position("a")["tokens_end"] == 0


def test_a_step_is_one_record(monkeypatch, tmp_path):
    """The log grows by one head of a record, whoever gets something: engine/delivery/FORMAT.md."""
    processor, recorder = recorded(monkeypatch, str(tmp_path / "answers"))
    for number in range(100):
        begin(processor, recorder, f"r{number:02}", Slow() if number % 10 == 0 else Detokenizer())
    [file] = (tmp_path / "answers").glob("answers-*")

    def records() -> list[int]:
        """The kind of each."""
        content, at, kinds = file.read_bytes(), 64, []
        while at < len(content):
            size = int.from_bytes(content[at : at + 4], "little")
            kinds.append(content[at + 20])
            at += 20 + size
        assert at == len(content)
        return kinds

    before = records()
    assert before.count(1) == 100 and 2 not in before
    for number in range(5):
        step(processor, {f"r{n:02}": ([1], " word", "stop" if n == number else None) for n in range(number, 100)})
        assert records() == [*before, *[2] * (number + 1)]
    step(processor, {"r50": ([], "", None)})
    assert len(records()) == len(before) + 5, "a record of nothing"


# --- those who read ---------------------------------------------------------------------------------------------------


def texts_of(events: str) -> dict[int, str]:
    """The text of each choice that these events of a stream give."""
    texts: dict[int, str] = {}
    for line in events.splitlines():
        if line.startswith("data: {"):
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            text = choice["text"] if "text" in choice else choice["delta"]["content"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def put_answer(server, request_id: str, words: list[str], ends: bool = True, **fields) -> None:
    """An answer that has one token for each word."""
    server.recorder._start(request(request_id) | fields)
    for at, text in enumerate(words):
        server.recorder.answers.step([{"id": request_id, "at": at, "tokens": [at], "text": text}])
    if ends:
        server.recorder.end(request_id, "finished", "stop", None)


def test_an_id_that_another_route_used_again_names_the_newest_answer(monkeypatch, tmp_path):
    async def scene():
        app, server = build(monkeypatch, [], engine=Engine(tmp_path))
        await started(server)
        put_answer(server, "chatcmpl-t", ["of ", "the ", "chat"])
        put_answer(server, "cmpl-t", ["com", "ple"], ends=False)
        async with client(app, None) as http:

            async def text_of() -> str:
                return (await http.get("/torpor/requests/t")).json()["choices"][0]["text"]

            assert await text_of() == "comple"
            assert (await http.delete("/torpor/requests/t")).json() == {"aborted": 1}
            assert [call[1] for call in server.engine.calls if call[0] == "abort"] == [["cmpl-t"]]
            reading = asyncio.create_task(http.get("/torpor/requests/t/stream?from_text=2"))
            while not server.recorder._changed:
                await asyncio.sleep(0.001)
            server.recorder.end("cmpl-t", "aborted", "abort", None)
            assert texts_of((await reading).text) == {0: "mple"}
            assert await text_of() == "comple"
            assert (await http.get("/torpor/requests/chatcmpl-t")).json()["choices"][0]["text"] == "of the chat"
            put_answer(server, "again", ["a newer chat"], response="chatcmpl-t")
            assert await text_of() == "a newer chat"

    run(scene())


@pytest.mark.parametrize(("query", "last", "expected"), [
    ("from_text=3", "3", {0: "gh"}), ("from=1", "3", {0: "gh"}), ("from_text=3", "", {0: "defgh"}),
    ("", "3", {0: "gh"}), ("", None, {0: "abcdefgh"}),
])  # fmt: skip
def test_a_reader_that_connects_again_goes_on_behind_its_last_event(monkeypatch, tmp_path, query, last, expected):
    """The query of a browser's EventSource stays that of its first connection."""

    async def scene():
        app, server = build(monkeypatch, [], engine=Engine(tmp_path))
        await started(server)
        put_answer(server, "cmpl-e", ["ab", "cd", "ef", "gh"])
        headers = {} if last is None else {"Last-Event-ID": last}
        async with client(app, None) as http:
            answer = await http.get(f"/torpor/requests/e/stream?{query}", headers=headers)
            assert texts_of(answer.text) == expected
            both = await http.get("/torpor/requests/e/stream?from=1&from_text=1", headers={"Last-Event-ID": "1"})
            wrong = await http.get("/torpor/requests/e/stream?from_text=1", headers={"Last-Event-ID": "5"})
            assert both.status_code == wrong.status_code == 400

    run(scene())


@pytest.mark.parametrize(("echo", "from_text", "last", "expected"), [
    ("", 3, "1,3", {0: "defgh", 1: "gh"}), ("Hi ", 1, "0,3", {0: "i abcdefgh", 1: "gh"}),
    ("Hi ", 4, "2,0", {0: "efgh", 1: "bcdefgh"}),
])  # fmt: skip
def test_a_choice_of_which_nothing_had_come_begins_where_the_query_says(
    monkeypatch, tmp_path, echo, from_text, last, expected
):
    async def scene():
        app, server = build(monkeypatch, [], engine=Engine(tmp_path))
        await started(server)
        front = {"state": {}} | ({"echo": echo} if echo else {})
        for choice in (0, 1):
            words = ["ab", "cd", "ef", "gh"]
            put_answer(server, f"cmpl-e-{choice}", words, response="cmpl-e", choice=choice, front=front)
        async with client(app, None) as http:
            path = f"/torpor/requests/e/stream?from_text={from_text}"
            assert texts_of((await http.get(path, headers={"Last-Event-ID": last})).text) == expected

    run(scene())


@pytest.mark.parametrize("start", [(0, 0), (1, 0), (0, 2)])
def test_a_reader_gets_what_was_held_back_when_the_request_is_aborted(monkeypatch, start):
    """A text that may become a stop string is held back; the abort releases it in a step without tokens."""

    async def scene():
        processor, recorder = recorded(monkeypatch)
        begin(processor, recorder, "cmpl-a", Detokenizer(stop_buffer_length=3))
        step(processor, {"cmpl-a": ([1], "abc漢", None)})
        step(processor, {"cmpl-a": ([2], "def", None)})
        before = recorder.answers.part("cmpl-a", *start)
        sessions = SimpleNamespace(where_it_went=lambda _: None)
        life = SimpleNamespace(log=recorder, sessions=sessions, model="model")
        events = routes._events(life, ["cmpl-a"], [start], [""])
        given = await anext(events)
        step(processor, {"cmpl-a": ([], "", "abort")})
        given += "".join([each async for each in events])
        whole = recorder.answers.part("cmpl-a")["text"]
        assert whole == "abc漢def" and "data: [DONE]" in given
        assert texts_of(given)[0] == whole[before["text_end"] - len(before["text"]) :]

    run(scene())


# --- the limit in bytes ----------------------------------------------------------------------------------------------


def limit(monkeypatch, text: str) -> int:
    from torpor.vllm.server.settings import Settings

    monkeypatch.setenv("TORPOR_SERVER_RESPONSE_LOG_BYTES", text)
    return Settings.from_environment().response_log_bytes


def test_the_limit_is_a_size(monkeypatch):
    from torpor.vllm.server.settings import Settings

    assert Settings().response_log_bytes == 256 << 20
    assert [limit(monkeypatch, text) for text in ("4GiB", "1 MiB", "0", "123")] == [4 << 30, 1 << 20, 0, 123]
    for text in ("4GB", "-1", "1.5GiB", "", "much"):
        with pytest.raises(InvalidArgument, match=f"TORPOR_SERVER_RESPONSE_LOG_BYTES is '{text}'") as problem:
            limit(monkeypatch, text)
        assert "4GiB" in problem.value.next_step


def end(server, request_id: str, tenant: str = "") -> None:
    answers = server.recorder.answers
    server.recorder._start(request(request_id, range(1, 5000), tenant))  # 20 kB
    answers.step([{"id": request_id, "at": 0, "tokens": [1], "text": "x", "state": "finished"}])


def test_what_the_limit_drops_is_counted_and_named_and_what_runs_is_not_dropped(monkeypatch, tmp_path):
    async def scene():
        from starlette.datastructures import Headers

        app, server = build(
            monkeypatch, [], "--api-key", CLIENT, OTHER_CLIENT, engine=Engine(tmp_path), response_log_bytes=50_000
        )
        await started(server)
        tenant = server.tenant(Headers({"Authorization": f"Bearer {CLIENT}"}))

        said = []
        monkeypatch.setattr(server_recorder.logger, "warning", lambda text, *_: said.append(text))
        for name in ("runs-1", "runs-2"):
            server.recorder._start(request(name, tenant=tenant))
        for number in range(6):
            end(server, f"chatcmpl-{number}", tenant)
        async with client(app) as http:
            states = [(await http.get(f"/torpor/requests/{n}")).status_code for n in (0, 1, 2, 3, 5, 6)]
            assert states in ([410, 410, 410, 200, 200, 404], [410, 410, 410, 410, 200, 404])
            gone = (await http.get("/torpor/requests/0/stream")).json()["error"]
            assert gone["code"] == "not_found" and "dropped it to make room" in gone["what"]
            assert gone["next_step"].startswith("do not send the request again")
            async with client(app, OTHER_CLIENT) as other:
                assert (await other.get("/torpor/requests/0")).status_code == 404
            for name in ("runs-1", "runs-2"):
                assert (await http.get(f"/torpor/requests/{name}")).json()["state"] == "running"
            counts = (await http.get("/torpor/state")).json()["responses"]
        dropped = states.count(410)
        assert counts["dropped"] == dropped and counts["running"] == 2 and counts["ended"] == 6 - dropped
        assert metric(server, "torpor_responses_dropped_total") == dropped
        assert len([text for text in said if "the response log is full" in text]) == 1

    run(scene())


def test_a_log_is_failing_until_it_has_what_could_not_be_written(monkeypatch, tmp_path):
    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(tmp_path), response_log_sync="never")
        await started(server)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        assert metric(server, "torpor_response_log_failing") == 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # as on a full disk
        try:
            for name in ("a", "b"):
                server.recorder._start(request(name))
            assert metric(server, "torpor_response_log_failing") == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert metric(server, "torpor_response_log_failures_total") == 1
        while metric(server, "torpor_response_log_failing"):
            await asyncio.sleep(0.01)

    run(scene())


def test_a_name_that_documents_have_of_the_state_is_in_it(monkeypatch, tmp_path):
    """Names of `engine` and `standby` are an engine's own and a standby's: they are not looked up."""
    found = {}
    for page in (Path(__file__).parents[2] / "docs").rglob("*.md"):
        named = re.findall(r"`([\w.]+)`\s+of\s+(?:\S+\s+){0,2}`(?:GET )?/torpor/state`", page.read_text())
        found |= dict.fromkeys(named, page.name)

    async def scene():
        app, server = build(monkeypatch, [], engine=Engine(tmp_path))
        await started(server)
        async with client(app, None) as http:
            state = (await http.get("/torpor/state")).json()
        for path, page in found.items():
            here, names = state, path.split(".")
            for name in names if names[0] not in ("engine", "standby") else ():
                assert name in here, f"{page}: /torpor/state has no {path}"
                here = here[name]

    run(scene())
    assert {"responses.dropped", "responses.set_aside", "left_checkpoint"} <= found.keys()


def test_a_large_limit_drops_nothing(monkeypatch, tmp_path):
    async def scene():
        _, server = build(monkeypatch, [], engine=Engine(tmp_path), response_log_bytes=1 << 30)
        await started(server)
        for number in range(6):
            end(server, f"chatcmpl-{number}")
        assert server.recorder.answers.counts()["dropped"] == 0 and server.recorder.answers.counts()["ended"] == 6

    run(scene())


def test_an_answer_says_what_the_server_parses_out_of_its_text(monkeypatch, tmp_path):
    async def scene():
        words = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        app, server = build(monkeypatch, [], *words, engine=Engine(tmp_path))
        await started(server)
        end(server, "chatcmpl-chat")
        end(server, "cmpl-text")
        parsed = {}
        async with client(app, None) as http:
            for parser in ("", "qwen3"):
                server.engine.vllm_config.structured_outputs_config.reasoning_parser = parser
                for name in ("chat", "text"):
                    answer = await http.get(f"/torpor/requests/{name}")
                    stream = await http.get(f"/torpor/requests/{name}/stream")
                    parsed[parser, name] = answer.json()["parsed"], stream.headers.get("X-Torpor-Parsed")
        assert parsed == {
            ("", "chat"): (["tools"], "tools"),
            ("qwen3", "chat"): (["reasoning", "tools"], "reasoning, tools"),
            ("", "text"): ([], None),
            ("qwen3", "text"): ([], None),
        }

    run(scene())
