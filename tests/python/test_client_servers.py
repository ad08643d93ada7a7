# SPDX-License-Identifier: Apache-2.0
"""torpor.client beside several servers that fail in all orders: an answer is all of one server's, and a call ends."""

from __future__ import annotations

import json
import random

import httpx
import pytest

from torpor import client
from torpor.client import answers, servers

A, B, C = "http://a", "http://b", "http://c"
TEXTS = {A: "Alpha begins.", B: "Beta says more.", C: "Gamma."}
RETRY = {"Retry-After": "5"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(answers, "_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(servers, "_PATIENCE_SECONDS", 0.0)


class World(httpx.MockTransport):
    """Each server does what its script says to one call after the other, and serves when that is over:

    `down`: nobody listens; `busy`: 503; `refuses`: 503 before it has begun; `lost`: the connection breaks before the
    call arrives; a number: it answers, and the connection breaks after so many characters.
    """

    def __init__(self, **scripts: list):
        super().__init__(self.answer)
        self.scripts = {f"http://{name}": list(script) for name, script in scripts.items()}
        self.has: dict[str, str] = {}  # the text of each server that has begun an answer
        self.calls: list[str] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        at = f"http://{request.url.host}"
        self.calls.append(f"{request.method} {request.url.host}")
        does = self.scripts[at].pop(0) if self.scripts.get(at) else None
        if does == "down":
            raise httpx.ConnectError("nobody listens")
        if does in ("busy", "refuses"):
            return httpx.Response(503, headers=RETRY if does == "refuses" else {})
        if does == "lost":
            raise httpx.ReadError("broken")
        if request.method == "POST":
            if at in self.has:
                return httpx.Response(409)
            self.has[at] = TEXTS[at]
        elif at not in self.has:
            return httpx.Response(404)
        if not request.url.path.endswith("/stream") and not json.loads(request.content or b"{}").get("stream"):
            return self._whole(at, does)
        start = int(request.url.params.get("from_text", 0))
        if start > len(self.has[at]):
            return httpx.Response(400)
        return httpx.Response(200, content=_stream(self.has[at], start, does))

    def _whole(self, at: str, breaks: int | None) -> httpx.Response:
        if breaks is not None:
            raise httpx.ReadError("broken")
        choice = {"index": 0, "text": self.has[at], "finish_reason": "stop", "stop_reason": None}
        return httpx.Response(200, json={"id": "x", "state": "ended", "choices": [choice]})


def _stream(text: str, start: int, breaks: int | None):
    for position in range(start, len(text) if breaks is None else min(start + breaks, len(text))):
        yield _event({"index": 0, "text": text[position], "finish_reason": None})
    if breaks is not None:
        raise httpx.ReadError("broken")
    yield _event({"index": 0, "text": "", "finish_reason": "stop"}) + b"data: [DONE]\n\n"


def _event(choice: dict) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def read(world: World, also_at=(B,), streamed: bool = True, **options) -> str:
    with client.http_client(transport=world, also_at=also_at, **({"give_up_after": 10} | options)) as http:
        body = {"model": "m", "prompt": "Tell", "stream": streamed}
        answer = http.post(f"{A}/v1/completions", json=body)
    if not streamed:
        return answer.json()["choices"][0]["text"]
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def posts(world: World) -> list[str]:
    return [call[5:] for call in world.calls if call.startswith("POST")]


def test_only_a_server_whose_answer_was_begun_is_asked_for_its_rest():
    """The first one accepts, is killed before a character and restarts: it goes on with an answer of its own."""
    world = World(a=[0, "down"], b=[None, 4, "lost", "lost"])
    assert read(world) == TEXTS[B]
    assert set(world.has) == {A, B} and world.calls[-3:] == ["GET b"] * 3
    gone = World(a=[0, "down"], b=[None, 4, *["down"] * 10**4])
    with pytest.raises(client.NotResumable, match=r"within 0\.05 s: http://b: ConnectError"):
        read(gone, give_up_after=0.05)


def test_before_a_character_any_of_the_begun_answers_will_do():
    world = World(a=[0, "down"], b=[None, 0, "down", "down"])
    assert read(world) == TEXTS[A] and posts(world) == ["a", "b"]


def test_each_server_is_asked_before_the_request_is_sent_again():
    world = World(a=["lost"])
    world.has[C] = TEXTS[C]
    assert read(world, also_at=(B, C)) == TEXTS[C] and posts(world) == ["a"]
    assert world.calls == ["POST a", "GET a", "GET b", "GET c"]
    world = World(a=["lost"])
    assert read(world, also_at=(B, C)) == TEXTS[A] and world.calls[-2:] == ["GET c", "POST a"]


def test_a_server_that_may_have_it_is_waited_for(monkeypatch):
    monkeypatch.setattr(servers, "_PATIENCE_SECONDS", 60.0)
    world = World(a=[0, "down", "busy", "lost", "down"])
    assert read(world) == TEXTS[A] and posts(world) == ["a"]
    world = World(a=[0, "busy"], b=["down", "busy"])
    assert read(world, streamed=False) == TEXTS[A] and posts(world) == ["a"]


@pytest.mark.parametrize("first", ["down", "refuses"])
def test_a_server_that_cannot_have_it_is_not_waited_for(monkeypatch, first):
    """As an owner that is dead, or one that has become the standby of its standby."""
    monkeypatch.setattr(servers, "_PATIENCE_SECONDS", 60.0)
    for streamed in (True, False):
        world = World(a=[first] * 9)
        assert read(world, streamed=streamed) == TEXTS[B] and posts(world) == ["a", "b"]


def test_what_comes_of_a_server_that_never_answers_is_an_error_that_names_all(monkeypatch):
    monkeypatch.setattr(servers, "_PATIENCE_SECONDS", 60.0)
    for world in (World(a=[0, *["down"] * 10**4]), World(a=[5, *["down"] * 10**4])):
        with pytest.raises(client.NotResumable, match=r"no server gave the answer within 0\.02 s") as problem:
            read(world, give_up_after=0.02)
        assert "http://a: ConnectError" in str(problem.value) and "http://b: " in str(problem.value)
        assert posts(world) == ["a"]


def test_whatever_the_order_of_failures_a_call_ends_with_the_text_of_one_server():
    done = 0
    for seed in range(800):
        luck = random.Random(seed)
        choices = ["down", "busy", "refuses", "lost", 0, 1, 3, None]
        world = World(**{name: luck.choices(choices, k=luck.randrange(9)) for name in "abc"})
        also_at = luck.choice([(B,), (B, C)])
        try:
            text = read(world, also_at, streamed=luck.random() < 0.8, give_up_after=luck.choice([0.0, 10]))
        except httpx.TransportError:
            continue
        assert text in TEXTS.values(), (seed, text)
        done += 1
    assert done > 300
