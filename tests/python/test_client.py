# SPDX-License-Identifier: Apache-2.0
"""torpor.client beside a server that breaks its connections: no piece of an answer is lost, none comes twice."""

from __future__ import annotations

import asyncio
import gc
import json
import ssl
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec

import anyio
import httpx
import openai
import pytest
from answering_server import TEXT, AnsweringServer

from torpor import client
from torpor.client import answers, transports

WHOLE = "".join(TEXT)
MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(answers, "_WAIT_SECONDS", 0.001)


@pytest.fixture
def server():
    one = AnsweringServer()
    yield one
    one.close()


class Interruptions(list):
    def __call__(self, what: client.Interruption) -> None:
        self.append(what)


def made(server: AnsweringServer, **options) -> openai.OpenAI:
    return client.OpenAI(
        **{"base_url": f"{server.url}/v1", "api_key": "key", "max_retries": 0, "give_up_after": 10} | options
    )


def streamed(one: openai.OpenAI, request_id: str = "mine", **options) -> dict[int, str]:
    """The texts of the choices; fails if one goes on behind its end."""
    texts: dict[int, str] = {}
    ended = set()
    headers = {"X-Request-Id": request_id} | options.pop("headers", {})
    stream = one.chat.completions.create(model="m", messages=MESSAGES, stream=True, extra_headers=headers, **options)
    for chunk in stream:
        for choice in chunk.choices:
            assert choice.index not in ended
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                ended.add(choice.index)
    return texts


def test_wherever_a_stream_breaks_its_text_is_whole(server):
    """At every byte, in the middle of a character too; the second connection breaks as well."""
    server.stream_piece = 1000
    with made(server) as one:
        assert streamed(one, "unbroken") == {0: WHOLE}
        for cut in range(1, 700, 5):
            server.cuts, server.resets = [cut, cut // 2 + 1], cut % 2 == 0
            assert streamed(one, f"cut-{cut}") == {0: WHOLE}, cut
            if server.cuts:  # behind the end of the body
                assert cut > 500
                return
    pytest.fail("no body was shorter than the cuts")


def test_choices_go_on_where_each_of_them_is():
    server = AnsweringServer(choices=3, stream_piece=1000)
    with made(server) as one:
        for cut in range(40, 1500, 20):  # some end before others
            server.cuts = [cut]
            assert streamed(one, f"cut-{cut}", n=3) == {0: WHOLE, 1: WHOLE, 2: WHOLE}
    server.close()


def test_a_call_that_never_arrived_is_sent_again_and_one_that_did_is_not(server):
    broken = Interruptions()
    with made(server, on_interruption=broken) as one:
        server.lost = 2
        assert streamed(one) == {0: WHOLE}
        assert [call.split()[0] for call in server.calls] == ["POST", "GET", "POST", "GET", "POST"]
        assert [each.sent_again for each in broken] == [False, True, False, True]
        server.calls.clear()
        server.cuts = [1]
        assert streamed(one, "arrived") == {0: WHOLE}
        assert [call.split()[0] for call in server.calls] == ["POST", "GET"]


def begun(one: openai.OpenAI, request_id: str, **more: str):
    """A stream whose first connection is there. `more`: headers."""
    headers = {"X-Request-Id": request_id} | more
    return one.chat.completions.create(model="m", messages=MESSAGES, stream=True, extra_headers=headers)


def text_of(stream) -> str:
    return "".join(chunk.choices[0].delta.content for chunk in stream)


def test_a_server_that_starts_is_waited_for_and_other_refusals_reach_the_caller(server):
    broken = Interruptions()
    with made(server, on_interruption=broken) as one:
        server.cuts = [200]
        stream = begun(one, "starts")
        server.statuses = [503, 503]
        assert text_of(stream) == WHOLE
        assert broken[0].request_id == "starts" and len(broken) == 3 and "503" in broken[1].problem
        server.statuses = [503, 503, 503]  # to the first call, and to the question for its answer
        assert text_of(begun(one, "too early")) == WHOLE
        server.statuses = [400]
        with pytest.raises(openai.BadRequestError):
            begun(one, "refused")
        assert text_of(begun(one, "taken")) == WHOLE
        with pytest.raises(openai.ConflictError):  # the id is another call's
            begun(one, "taken")
        server.cuts = [300]
        stream = begun(one, "dropped")
        server.statuses = [410]
        with not_resumable("410"):
            list(stream)


@contextmanager
def not_resumable(why: str):
    """openai has errors of its own around those of httpx."""
    with pytest.raises(openai.APIConnectionError) as problem:
        yield
    assert isinstance(problem.value.__cause__, client.NotResumable) and why in str(problem.value.__cause__)


def test_an_error_event_is_taken_up_and_not_given(server):
    server.error_event = 2
    with made(server) as one:
        assert streamed(one) == {0: WHOLE}
        server.refused = True  # by an event alone, as vLLM refuses what it finds out late
        with pytest.raises(openai.APIError, match="the engine is gone"):
            streamed(one, "refused")
        assert server.calls[-1].startswith("GET /torpor/requests/refused/stream")
        server.refused, server.error_code = True, 503  # it ends; the next one has not heard of this call
        assert streamed(one, "too late") == {0: WHOLE}


def test_what_is_parsed_is_not_taken_up_as_text(server):
    server.lost = 1
    with made(server) as one:  # nothing of it was given
        assert streamed(one, "never arrived", tools=[{"type": "function", "function": {"name": "f"}}]) == {0: WHOLE}
    server.cuts = [400]
    with made(server) as one, not_resumable("'tools'"):
        streamed(one, tools=[{"type": "function", "function": {"name": "f"}}])
    server.cuts, server.extra = [400], {"reasoning": "so"}
    with made(server) as one, not_resumable("'reasoning'"):
        streamed(one, "thinks")


def test_a_whole_answer_is_fetched_when_it_has_ended(server):
    server.running = 3
    with made(server) as one:
        server.lost = 1
        server.answers["whole"] = {"messages": MESSAGES}  # it arrived, and the connection broke
        found = one.chat.completions.create(model="m", messages=MESSAGES, extra_headers={"X-Request-Id": "whole"})
        assert found.choices[0].message.content == WHOLE and found.choices[0].finish_reason == "length"
        assert [call.split()[0] for call in server.calls] == ["POST", "GET", "GET", "GET", "GET"]
        plain = one.chat.completions.create(model="m", messages=MESSAGES, extra_headers={"X-Request-Id": "plain"})
        assert plain.choices[0].message.content == WHOLE


def test_another_server_has_it(server):
    second = AnsweringServer()
    also_at = []
    with made(server, also_at=also_at) as one:
        server.cuts = [250]
        stream = begun(one, "moved")
        second.answers["moved"] = {"messages": MESSAGES}
        second.statuses = [404, 400]  # it has not heard of it, and then it has less of it than the client
        also_at.append(f"{second.url}/v1")
        server.close()
        assert text_of(stream) == WHOLE
    assert second.calls and all(call.startswith("GET") for call in second.calls)
    second.close()


def test_an_answer_that_another_process_began_is_taken_up(server):
    server.answers["theirs/1"] = {"messages": MESSAGES}
    with made(server) as one:
        with pytest.raises((openai.APIConnectionError, ValueError), match=r"Connection error|'ten'"):
            streamed(one, "theirs/1", headers={client.HAS_CHARACTERS: "ten"})
        texts = streamed(one, "theirs/1", headers={client.HAS_CHARACTERS: "10"})
    assert texts == {0: WHOLE[10:]} and server.calls == ["GET /torpor/requests/theirs%2F1/stream?from_text=10"]


def test_it_gives_up_after_its_time_with_the_first_error(server):
    server.cuts = [250]
    with made(server, give_up_after=0.05) as one:
        stream = begun(one, "mine")
        server.close()
        with pytest.raises(openai.APIConnectionError) as problem:
            list(stream)
        assert isinstance(problem.value.__cause__, httpx.ConnectError)


def test_the_asynchronous_client_does_the_same(server):
    async def scene() -> None:
        async with client.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as one:

            async def read(number: int) -> str:
                stream = await one.chat.completions.create(
                    model="m", messages=MESSAGES, stream=True, extra_headers={"X-Request-Id": f"r{number}"}
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            server.cuts = [cut for cut in range(20, 500, 20)]
            assert await asyncio.gather(*(read(number) for number in range(12))) == [WHOLE] * 12
            server.lost = 1
            found = await one.chat.completions.create(model="m", messages=MESSAGES)
            assert found.choices[0].message.content == WHOLE

    asyncio.run(scene())


def test_completions_and_other_calls(server):
    with made(server) as one:
        server.cuts = [200]
        stream = one.completions.create(model="m", prompt="Tell", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == WHOLE
        server.cuts = [200]
        with not_resumable("several prompts"):
            list(one.completions.create(model="m", prompt=["a", "b"], stream=True))
    with client.http_client(base_url=server.url) as http:
        assert http.get("/torpor/requests/none", headers={"Authorization": "Bearer key"}).status_code == 404


@pytest.mark.parametrize(
    ("finish", "stop", "why"),
    [
        ("abort", None, "start it with --torpor-on-disconnect continue"),
        ("error", "another tokenizer", "the server ended it: another tokenizer"),
        ("error", None, "it failed at the server"),
    ],
)
def test_an_answer_that_its_server_cut_off_does_not_look_complete(server, finish, stop, why):
    server.cut_off, server.stream_piece = (finish, stop), 1000
    with made(server) as one:
        assert streamed(one, "unbroken") == {0: WHOLE}
        server.cuts = [250]
        texts = []
        with not_resumable(why):
            for chunk in begun(one, "cut"):
                texts.append(chunk.choices[0].delta.content)
        text = "".join(texts)
        assert WHOLE.startswith(text) and len(text) >= len("".join(TEXT[:-1]))  # all but what came with the end
        server.answers["whole"] = {"messages": MESSAGES}
        server.lost = 1
        with not_resumable(why):
            one.chat.completions.create(model="m", messages=MESSAGES, extra_headers={"X-Request-Id": "whole"})


def test_a_choice_that_ended_before_may_have_been_cut_off_then():
    """Its caller has seen that."""
    request = httpx.Request("POST", "http://server/v1/chat/completions", json={"stream": True, "n": 2})
    call = answers.Call.of(request)
    ends = [{"choices": [{"index": index, "delta": {}, "finish_reason": "abort"}]} for index in range(2)]
    events = [f"data: {json.dumps(end)}\n\n".encode() for end in ends]
    call.begin_reading(taken_up=False)
    assert call.feed(events[0]) == events[0]
    call.begin_reading(taken_up=True)
    assert call.feed(events[0]) == b"" and not call.cut_off
    assert call.feed(events[1]) == b"" and "--torpor-on-disconnect continue" in call.cut_off


def fields_of_more_than_text() -> list[tuple[str, dict]]:
    return [
        ("include_reasoning", {"include_reasoning": False}),
        ("return_token_ids", {"return_token_ids": True}),
        ("return_prompt_text", {"return_prompt_text": True}),
        ("logprobs", {"logprobs": 0}),
        ("prompt_logprobs", {"prompt_logprobs": 0}),
    ]


@pytest.mark.parametrize(("name", "fields"), fields_of_more_than_text())
def test_what_asks_for_more_than_text_or_less_is_not_taken_up(server, name, fields):
    server.cuts = [300]
    with made(server) as one, not_resumable(repr(name)):
        list(one.completions.create(model="m", prompt="Tell", stream=True, extra_body=fields))
    unused = {"include_reasoning": True, "return_token_ids": False, "logprobs": None}
    server.cuts = [300]
    with made(server) as one:
        stream = one.completions.create(model="m", prompt="Tell", stream=True, extra_body=unused)
        assert "".join(chunk.choices[0].text for chunk in stream) == WHOLE


def test_a_chat_of_a_server_that_parses_reasoning_is_not_taken_up(server):
    server.parsed = ["reasoning", "tools"]
    with made(server) as one:
        server.cuts = [20]  # before any reasoning has come: the answer would begin with it
        with not_resumable("--reasoning-parser"):
            streamed(one, "streamed")
        server.answers["whole"] = {"messages": MESSAGES}
        server.lost = 1
        with not_resumable("--reasoning-parser"):
            one.chat.completions.create(model="m", messages=MESSAGES, extra_headers={"X-Request-Id": "whole"})
        server.cuts = [200]
        stream = one.completions.create(model="m", prompt="Tell", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == WHOLE
        server.parsed = ["tools"]  # the chat has none
        server.cuts = [200]
        assert streamed(one, "without tools") == {0: WHOLE}


def test_the_question_for_an_answer_has_the_headers_of_its_call(server):
    server.cuts, server.stream_piece = [200], 1000
    headers = {"X-Tenant": "sea", "traceparent": "00-1", "Accept-Language": "en", "If-None-Match": "a", "TE": "gzip"}
    with made(server, default_headers={"X-Gateway": "yes"}) as one:
        assert streamed(one, headers=headers) == {0: WHOLE}
    posted, asked = ({name.lower(): value for name, value in each.items()} for each in server.headers)
    for name in ("x-tenant", "traceparent", "x-gateway", "x-request-id", "user-agent", "authorization"):
        assert asked[name] == posted[name]
    assert asked["x-model"] == "m" and "x-model" not in posted
    left = {"content-type", "content-length", "accept", "accept-language", "accept-encoding", "if-none-match", "te"}
    assert posted.keys() >= left and not asked.keys() & left
    assert posted["accept-encoding"] == "identity"  # nothing on the way packs its events


@pytest.mark.parametrize(
    ("model", "headers", "named"),
    [("sea/7b", {}, "sea/7b"), ("sea", {"X-Model": "alias"}, "alias"), ("naïve", {}, None), ("a\nb", {}, None)],
)
def test_questions_about_an_answer_name_the_model_of_its_call(model, headers, named):
    """For a router that chooses by it: they have no body."""
    body = {"stream": True, "model": model}
    call = answers.Call.of(httpx.Request("POST", "http://one/v1/completions", json=body, headers=headers))
    assert call.take_up().headers.get("X-Model") == named == call.abort(call.ask()).headers.get("X-Model")


def test_urls_at_other_servers_are_those_of_the_call():
    request = httpx.Request("POST", "http://one/v1/chat/completions?team=sea", json={"stream": True})
    call = answers.Call.of(request)
    assert call.ask("https://two/models/v1").url == "https://two/models/v1/chat/completions?team=sea"
    with pytest.raises(client.NotResumable, match="the key is not sent there"):
        call.take_up("https://two/v1", "http://three/torpor/requests/x")
    assert call.take_up("https://two/v1", "https://three/torpor/requests/x").url == "https://three/torpor/requests/x"
    assert call.take_up("", "").url.path.startswith("/torpor/requests/")  # a redirect without an address


def test_an_answer_of_which_nothing_has_come_is_asked_for_first(server):
    server.answers["theirs"] = {"messages": MESSAGES}
    headers = {client.HAS_CHARACTERS: "0"}
    with made(server) as one:
        assert streamed(one, "theirs", headers=headers) == {0: WHOLE}
        assert server.calls == ["GET /torpor/requests/theirs/stream?from_text=0"]
        server.calls.clear()
        assert streamed(one, "never arrived", headers=headers) == {0: WHOLE}
        assert [call.split()[0] for call in server.calls] == ["GET", "POST"]
        server.statuses = [404, 400]  # no server has it, and it is refused
        with pytest.raises(openai.BadRequestError):
            streamed(one, "refused", headers=headers)


# --- how it sends -----------------------------------------------------------------------------------------------------


class SeenContext(ssl.SSLContext):
    """Whoever connects with it learns so."""

    def wrap_socket(self, *_, **__):
        raise ssl.SSLError("this context was asked")

    wrap_bio = wrap_socket


def posted_to(url: str, asynchronous: bool, **options) -> str:
    """The text of a stream of which the first connection may break."""
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    options = {"headers": {"Authorization": "Bearer key"}, "give_up_after": 0.0} | options

    async def scene() -> str:
        async with client.async_http_client(**options) as http:
            return (await http.post(f"{url}/v1/chat/completions", json=body)).text

    if asynchronous:
        return asyncio.run(scene())
    with client.http_client(**options) as http:
        return http.post(f"{url}/v1/chat/completions", json=body).text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_options_of_sending_do_what_they_do_in_httpx(server, monkeypatch, asynchronous):
    with pytest.raises(httpx.ConnectError, match="this context was asked"):
        posted_to(server.url.replace("http", "https"), asynchronous, verify=SeenContext(ssl.PROTOCOL_TLS_CLIENT))
    elsewhere = "http://torpor.invalid"

    def mounted() -> dict:
        transport = httpx.AsyncHTTPTransport if asynchronous else httpx.HTTPTransport
        return {"mounts": {elsewhere: transport(proxy=server.url)}}

    monkeypatch.setenv("HTTP_PROXY", server.url)
    for options in ({"proxy": server.url}, mounted(), {}):
        server.cuts = [200]
        text = posted_to(elsewhere, asynchronous, give_up_after=10, **options)
        assert text.endswith("data: [DONE]\n\n") and "and 🌊 deep" in text
        assert [call.split()[0] for call in server.calls] == ["POST", "GET"]  # the question, too, goes by the proxy
        server.calls.clear()
    with pytest.raises(httpx.ConnectError):
        posted_to(elsewhere, asynchronous, trust_env=False)
    monkeypatch.setenv("NO_PROXY", "torpor.invalid")
    with pytest.raises(httpx.ConnectError):
        posted_to(elsewhere, asynchronous)
    assert server.calls == []


def test_clients_of_openai_take_these_options_and_no_client_of_their_caller(server):
    server.cuts = [200]
    with client.OpenAI(base_url="http://torpor.invalid/v1", api_key="key", max_retries=0, proxy=server.url) as one:
        assert streamed(one) == {0: WHOLE}
    for kind, made_by_caller in ((client.OpenAI, httpx.Client()), (client.AsyncOpenAI, httpx.AsyncClient())):
        with pytest.raises(TypeError, match="http_client is given: this client would not resume"):
            kind(api_key="key", http_client=made_by_caller)


# --- a call that its caller closes ------------------------------------------------------------------------------------


@pytest.fixture
def going_on(server):
    """A server that says that its requests outlive their connections, and gives half of each stream."""
    server.goes_on, server.holds, server.stream_piece = True, threading.Event(), 20
    yield server
    server.holds.set()


def deleted(server) -> list[str]:
    return [call for call in server.calls if call.startswith("DELETE")]


def test_a_stream_that_is_closed_before_its_end_ends_at_its_server(going_on):
    with made(going_on) as one:
        stream = begun(one, "theirs/1")
        next(stream)
        stream.close()
        assert deleted(going_on) == ["DELETE /torpor/requests/theirs%2F1"]
        asked = {name.lower(): value for name, value in going_on.headers[-1].items()}
        assert asked["authorization"] == "Bearer key" and "content-type" not in asked
        for _ in begun(one, "dropped"):
            break
        gc.collect()  # nobody has the stream any more
        assert deleted(going_on)[1:] == ["DELETE /torpor/requests/dropped"]
        began = time.monotonic()
        stream = begun(one, "gone")
        next(stream)
        going_on.close()
        stream.close()  # nobody answers
        assert time.monotonic() - began < 5


def test_a_stream_that_is_closed_at_its_end_or_runs_no_further_is_not_aborted(server):
    server.stream_piece = 1000
    with made(server) as one:
        next(begun(one, "of vLLM")).choices  # noqa: B018
        server.goes_on = True
        assert streamed(one, "whole") == {0: WHOLE}
        stream = begun(one, "ended")
        assert any(chunk.choices[0].finish_reason for chunk in stream)
        stream.close()  # before [DONE]
    server.refused = True
    with made(server) as one, pytest.raises(openai.APIError, match="the engine is gone"):
        streamed(one, "refused")
    with made(server, abort_on_close=False) as one:
        next(begun(one, "for later"))
    assert not deleted(server)


def test_a_stream_that_was_taken_up_ends_where_it_is_read(going_on):
    """Whatever the server said before: no server ends an answer when the connection of such a stream is closed."""
    going_on.goes_on, going_on.cuts = False, [200]
    with made(going_on) as one:
        stream = begun(one, "mine")
        while not any(call.startswith("GET") for call in going_on.calls):
            next(stream)
        stream.close()
        assert deleted(going_on) == ["DELETE /torpor/requests/mine"]
        next(other := begun(one, "other"))
        other.close()  # that ends it, as the server has not said otherwise
    assert deleted(going_on) == ["DELETE /torpor/requests/mine"]


def test_who_only_takes_up_the_answer_of_another_does_not_end_it(going_on):
    with made(going_on) as one, made(going_on) as reader:
        next(begins := begun(one, "mine"))
        stream = begun(reader, "mine", **{client.HAS_CHARACTERS: "0"})
        next(stream)
        stream.close()
        assert not deleted(going_on)
        begins.close()
    assert deleted(going_on) == ["DELETE /torpor/requests/mine"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_asynchronous_call_that_is_cancelled_ends_at_its_server(going_on, is_stream):
    """A whole answer's server is known by an earlier answer."""

    async def scene() -> None:
        async with client.AsyncOpenAI(base_url=f"{going_on.url}/v1", api_key="key", max_retries=0) as one:

            async def read(name: str, **options):
                stream = await one.chat.completions.create(
                    model="m", messages=MESSAGES, extra_headers={"X-Request-Id": name}, **options
                )
                async for _ in stream:
                    read_some.set()

            read_some = asyncio.Event()
            streaming = asyncio.create_task(read("one", stream=True))
            await read_some.wait()
            streaming.cancel()
            if not is_stream:
                asking = asyncio.create_task(read("two"))
                while "two" not in going_on.answers:
                    await asyncio.sleep(0.01)
                asking.cancel()
                await asyncio.wait({asking})
            await asyncio.wait({streaming})

    asyncio.run(scene())
    assert sorted(deleted(going_on)) == [
        f"DELETE /torpor/requests/{name}" for name in (["one"] if is_stream else ["one", "two"])
    ]


def test_a_call_that_is_cancelled_by_a_scope_of_anyio_ends_at_its_server_too(going_on):
    """As in a gateway on Starlette, whose own client went: nothing more is awaited in that scope."""

    async def scene() -> None:
        async with client.async_http_client(base_url=going_on.url, headers={"Authorization": "Bearer key"}) as http:
            with anyio.CancelScope() as scope:
                body = {"model": "m", "messages": MESSAGES, "stream": True}
                async with http.stream(
                    "POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"}
                ) as answer:
                    async for _ in answer.aiter_bytes():
                        scope.cancel()

    asyncio.run(scene())
    assert deleted(going_on) == ["DELETE /torpor/requests/mine"]


@pytest.mark.parametrize(
    "backend",
    ["asyncio", pytest.param("trio", marks=pytest.mark.skipif(find_spec("trio") is None, reason="needs trio"))],
)
def test_without_tasks_of_asyncio_a_stream_is_closed_and_ends_at_its_server_too(going_on, monkeypatch, backend):
    """As with trio, where a cancelled scope is all that there is to close it in."""

    async def scene() -> None:
        inner = transports.AsyncSender({})
        transport = transports.AsyncResumingTransport(inner, True, give_up_after=10, on_interruption=None)
        async with httpx.AsyncClient(transport=transport, headers={"Authorization": "Bearer key"}) as http:
            with anyio.CancelScope() as scope:
                body = {"model": "m", "messages": MESSAGES, "stream": True}
                url, named = f"{going_on.url}/v1/chat/completions", {"X-Request-Id": "mine"}
                async with http.stream("POST", url, json=body, headers=named) as answer:
                    async for _ in answer.aiter_bytes():
                        if any(call.startswith("GET") for call in going_on.calls):  # it waited before that
                            scope.cancel()
            assert not [each for each in inner._client._transport._pool.connections if not each.is_idle()]

    monkeypatch.setattr(transports, "_in_asyncio", lambda: False)
    going_on.cuts = [200]
    anyio.run(scene, backend=backend)
    assert deleted(going_on) == ["DELETE /torpor/requests/mine"]
