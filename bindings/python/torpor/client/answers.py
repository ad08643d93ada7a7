# SPDX-License-Identifier: Apache-2.0
"""A Call knows what its client has of an answer, and what to do when a connection breaks. This module neither waits
nor sends.

conversation() is a generator: it yields what to do, and is sent what came of it. transports.py does it, with and
without asyncio.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

from torpor.client.servers import NOT_HERE, Servers

# Of a request whose answer was begun by another client, or process: what it has of it, one number a choice.
HAS_CHARACTERS = "X-Torpor-Has-Characters"
_WAIT_SECONDS = 0.2  # before the first new try; twice as long before each further one that brings nothing
_LONGEST_WAIT_SECONDS = 2.0
_JSON = {"Content-Type": "application/json"}
_PATHS = ("/v1/chat/completions", "/v1/completions")
_MOST_REDIRECTS = 5
_NOT_NOW = (425, 502, 503, 504)  # a server that starts, wakes, ends, or is not there yet
_LATER = (*_NOT_NOW, 429, 500)  # nor is an answer that was begun given up for these
# Fields of a request after which an answer's text alone is not what its client gets: true ones, …
_MORE_THAN_TEXT = ("tools", "functions", "echo", "return_token_ids", "return_prompt_text")
_NUMBERS = ("logprobs", "prompt_logprobs")  # … and those of which 0 asks for something, too.
# What a server says of a call that goes on when its connection breaks.
_ON_DISCONNECT = "X-Torpor-On-Disconnect"
_ABORT_SECONDS = 1.0  # for each step of it: whoever closes a stream, be it the garbage collector, waits for that
# What a server says of a chat whose own answer has its reasoning apart from its text.
PARSED = "X-Torpor-Parsed"
_REASONING = "reasoning"
_CUT_OFF = ("abort", "error")  # finish reasons of answers that their server gave up
# Headers of a request that the question for its answer does not have: they are about the request's body, its connection
# or the form of its answer.
_LEFT_HEADERS = ("host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect", "range")
_LEFT_HEADER_STARTS = ("content-", "accept", "proxy-", "if-")
_MODEL = "X-Model"  # a router that chooses by the body's model finds it here, as such a question has no body


class NotResumable(httpx.ReadError):
    """The connection broke, and the rest of the answer cannot be had: why, and from what error."""


class Interruption(NamedTuple):
    """A connection broke; on_interruption gets this."""

    request_id: str
    characters: int  # of text that it has, of all choices
    problem: str
    sent_again: bool  # no server had it


class Send(NamedTuple):
    request: httpx.Request


class Read(NamedTuple):
    """The next piece of the body, b"" at its end."""

    response: Any


class Close(NamedTuple):
    response: Any


class Wait(NamedTuple):
    seconds: float


class Give(NamedTuple):
    """Part of the body, for the caller."""

    body: bytes


class Respond(NamedTuple):
    """The response, for the caller; `passed_on`: with the body that it has."""

    response: httpx.Response
    passed_on: bool


Step = Send | Read | Close | Wait | Give | Respond


class Call:
    """A chat or a completion, and what there is of its answer."""

    def __init__(self, request: httpx.Request, body: dict):
        self.request = request
        self.request_id = request.headers.setdefault("X-Request-Id", str(uuid.uuid4()))
        self.streamed = bool(body.get("stream"))
        if self.streamed:
            request.headers["Accept-Encoding"] = "identity"  # its events are read as they come
        self._body = body
        self._chat = request.url.path.endswith(_PATHS[0])
        has: str | None = request.headers.pop(HAS_CHARACTERS, None)
        self.begun_elsewhere = has is not None
        counts = [] if has is None else has.split(",")
        if not all(count.isascii() and count.isdigit() for count in counts):
            raise ValueError(f"{HAS_CHARACTERS} is {has!r}: give a number, or one a choice with commas between them")
        self._texts = {index: int(count) for index, count in enumerate(counts)}  # of each choice
        self._ended: set[int] = set()
        self._count = body["n"] if isinstance(body.get("n"), int) and body["n"] > 0 else 1
        self._unresumable = next((f"it has {name!r}" for name in _more_than_text(body)), "")
        self._rest = b""  # of an event
        self._taken_up = False  # what is read
        self.read_at = ""  # origin of the server whose record of it was read: a request outlives such a connection
        self.complete = False
        self.over = False  # nothing more is asked or sent for it
        self.cut_off = ""  # why the server ended the answer before its end
        self.broken = b""  # the event by which the server said that it gave up
        self.for_now = False  # as it ends or starts

    @classmethod
    def of(cls, request: httpx.Request) -> Call | None:
        """None: an answer to this request is not recorded."""
        if request.method != "POST" or not request.url.path.endswith(_PATHS):
            return None
        try:
            body = json.loads(request.content)
        except (ValueError, httpx.RequestNotRead):
            return None
        return cls(request, body) if isinstance(body, dict) else None

    @property
    def characters(self) -> int:
        return sum(self._texts.values())

    @property
    def begun(self) -> bool:
        """Whether the caller has something of the answer."""
        return self.characters > 0 or bool(self._ended)

    @property
    def unfinished(self) -> bool:
        """Whether there is more to come that its caller can still get."""
        all_ended = len(self._ended) >= self._count and self._texts.keys() <= self._ended
        return not (self.over or self.complete or all_ended)

    @property
    def why_not(self) -> str:
        """Why the rest of the answer cannot be had; empty: it can."""
        if self._unresumable or not self.streamed:
            return self._unresumable
        of_one_text = self._chat or isinstance(self._body.get("prompt"), str)
        return "" if of_one_text else "it has several prompts, or token ids"

    def why_not_from(self, parsed: str) -> str:
        """The same for an answer of whose text a server parses something. `parsed`: what, with commas between. A
        request with tools is not resumed anyway."""
        if self._chat and _REASONING in parsed.split(","):
            return "the server parses the reasoning of chats (--reasoning-parser)"
        return self.why_not

    def ask(self, base: str = "") -> httpx.Request:
        """The request for the answer from its beginning. `base`: of `also_at`; empty: the first server."""
        if not base:
            return self.request
        asked = self.request.url
        url = self._at(
            base, asked.path[asked.path.rindex("/v1/") :] + (f"?{asked.query.decode()}" if asked.query else "")
        )
        headers = self.request.headers.copy()
        headers["Host"] = url.netloc.decode()
        extensions = self.request.extensions
        return httpx.Request("POST", url, headers=headers, content=self.request.content, extensions=extensions)

    def take_up(self, base: str = "", location: str = "") -> httpx.Request:
        """The request for the rest, or for the whole answer. `location`: the URL to which a server sent it on."""
        path = f"/torpor/requests/{quote(self.request_id, safe='')}"
        if self.streamed:
            has = (str(self._texts.get(index, 0)) for index in range(self._count))
            path += f"/stream?from_text={','.join(has)}"
        url = self._at(base or str(self.request.url), path)
        if location:
            sent_by, url = url, url.join(location)
            if url.scheme != sent_by.scheme:
                raise NotResumable(f"the answer is at {url}: the key is not sent there", request=self.request)
        return httpx.Request("GET", url, headers=self._headers_about_it(), extensions=self.request.extensions)

    def abort(self, last: httpx.Request) -> httpx.Request:
        """The request that ends it at the server of its last request."""
        url = self._at(str(last.url), f"/torpor/requests/{quote(self.request_id, safe='')}")
        if last.method == "GET":  # there may have been a redirect
            url = last.url.copy_with(raw_path=last.url.raw_path.partition(b"?")[0].removesuffix(b"/stream"))
        extensions = self.request.extensions | {"timeout": httpx.Timeout(_ABORT_SECONDS).as_dict()}
        return httpx.Request("DELETE", url, headers=self._headers_about_it(), extensions=extensions)

    def _headers_about_it(self) -> httpx.Headers:
        """Return the headers of a question for the answer."""
        headers = self.request.headers.copy()
        for name in list(headers):
            if name in _LEFT_HEADERS or name.startswith(_LEFT_HEADER_STARTS):
                del headers[name]
        model = self._body.get("model")
        if isinstance(model, str) and model.isascii() and model.isprintable():
            headers.setdefault(_MODEL, model)
        return headers

    @staticmethod
    def _at(base: str, path: str) -> httpx.URL:
        url = httpx.URL(base)
        prefix = url.path.rstrip("/")
        for end in (*_PATHS, "/v1"):
            prefix = prefix.removesuffix(end)
        return url.copy_with(raw_path=(prefix + path).encode())

    def feed(self, piece: bytes) -> bytes:
        """Return the whole events of a stream so far, for the caller, up to one that says that the server gave up, or
        ended the answer before its end."""
        *events, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        given = b""
        for event in events:
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            known = self._note(data)
            if self.cut_off:
                break
            if known is None:
                self.broken = event + b"\n\n"
                break
            given += b"" if known else _without_id(event)
        return given

    def begin_reading(self, taken_up: bool) -> None:
        """`taken_up`: of an answer that another connection began."""
        self._rest, self.broken = b"", b""  # of a connection that broke
        self._taken_up = taken_up

    def end_without_done(self) -> bytes:
        """Return what is missing behind the last event where all choices have ended."""
        self.complete = len(self._ended) >= self._count
        return b"data: [DONE]\n\n" if self.complete else b""

    def _note(self, data: bytes) -> bool | None:
        """Whether the caller has it: a choice that has ended, given again by another connection. None: an error."""
        self.complete = self.complete or data == b"[DONE]"
        try:
            event = json.loads(data)
        except ValueError:
            return False
        if not isinstance(event, dict):
            return False
        if "error" in event:
            error = event["error"]
            self.for_now = isinstance(error, dict) and error.get("code") in _NOT_NOW
            return None
        choices = event.get("choices") or ()
        if choices and all(choice.get("index", 0) in self._ended for choice in choices):
            return True
        if self._taken_up:  # at first hand it is vLLM's own answer
            self.cut_off = next(filter(None, map(_why_cut_off, choices)), "")
            if self.cut_off:
                return False
        for choice in choices:
            index, delta = choice.get("index", 0), choice.get("delta") or {}
            text = delta.get("content") if self._chat else choice.get("text")
            self._texts[index] = self._texts.get(index, 0) + len(text or "")
            for name in ("tool_calls", "function_call", "reasoning", "reasoning_content"):
                if delta.get(name):
                    self._unresumable = f"its answer has {name!r}"
            if choice.get("finish_reason"):
                self._ended.add(index)
        return False

    def whole(self, answer: dict) -> bytes | None:
        """The answer that the server recorded as vLLM would have given it; None: it has not ended."""
        why = self.why_not_from(",".join(answer.get("parsed", ())))
        why = why or next(filter(None, map(_why_cut_off, answer["choices"])), "")
        if why:
            raise _not_resumable(self, "the connection broke", why)
        if answer["state"] == "running":
            return None
        choices = []
        for part in answer["choices"]:
            text: dict = {"message": {"role": "assistant", "content": part["text"]}} if self._chat else {
                "text": part["text"]
            }  # fmt: skip
            ends = {name: part[name] for name in ("index", "finish_reason", "stop_reason")}
            choices.append(ends | text | {"logprobs": None})
        kind = "chat.completion" if self._chat else "text_completion"
        about = {"id": answer["id"], "object": kind, "created": int(time.time()), "model": self._body.get("model")}
        return json.dumps(about | {"choices": choices, "usage": None}).encode()


def _more_than_text(body: dict) -> list[str]:
    """Fields of a request for more than text, or for less than the text that is recorded."""
    fields = [name for name in _MORE_THAN_TEXT if body.get(name)]
    fields += [name for name in _NUMBERS if body.get(name) is not None and body[name] is not False]
    return fields + ["include_reasoning"] * (body.get("include_reasoning", True) is not True)


def _why_cut_off(choice: dict) -> str:
    """Why its server ended this choice before its end; empty: it did not."""
    if choice.get("finish_reason") not in _CUT_OFF:
        return ""
    if choice.get("stop_reason"):
        return f"the server ended it: {choice['stop_reason']}"
    if choice["finish_reason"] == "error":
        return "it failed at the server"
    return "the server ended it when the connection broke; start it with --torpor-on-disconnect continue"


def _without_id(event: bytes) -> bytes:
    """Return an event as vLLM sends it. The server gives events an id when an answer is taken up. OpenAI's package
    keeps the last id, and then reads a comment (": asleep") as an event without data, at which it fails."""
    lines = [line for line in event.split(b"\n") if not line.startswith(b"id:")]
    return b"\n".join(lines) + b"\n\n"


def conversation(
    call: Call,
    give_up_after: float,
    on_interruption: Callable[[Interruption], None] | None,
    also_at: Sequence[str] = (),
    going_on: set[str] | None = None,
) -> Generator[Step, Any, None]:
    """Yield what to do for this call. Send and Read are sent a response and bytes, or have httpx's error thrown.

    `going_on`: gets the origins of servers whose calls go on when their connections break.
    """
    servers = Servers(origin(call.request), also_at, call.begun_elsewhere)
    responded = False
    in_vain = 0
    failures, redirects, heard = int(call.begun_elsewhere), 0, time.monotonic()
    request = call.take_up() if failures else call.ask()
    while True:
        asks = request.method == "GET"
        answered = refused = False
        try:
            response = yield Send(request)
            answered = response.status_code == 200
            if answered and going_on is not None and response.headers.get(_ON_DISCONNECT) == "continue":
                going_on.add(origin(request))
            if answered and asks:
                call.read_at = origin(request)
            for_now = _for_now(asks, failures > 0, servers.several)
            # With this header a server refuses what it has not begun.
            refused = not asks and response.status_code == 503 and "Retry-After" in response.headers
            if not asks and not responded and not answered and response.status_code not in for_now:
                yield Respond(response, True)
                return
            if asks and response.status_code in (307, 308) and redirects < _MOST_REDIRECTS:
                yield Close(response)
                redirects += 1
                request = call.take_up(servers.base, response.headers.get("Location", ""))
                continue
            if asks and response.status_code == 404 and not call.begun:
                yield Close(response)
                servers.replied(NOT_HERE)
                redirects = 0
                if not servers.may_send_again():
                    if not servers.next():
                        yield Wait(_WAIT_SECONDS)
                    request = call.take_up(servers.base)
                    continue
                if call.broken and not call.for_now:
                    call.complete = True
                    yield Give(call.broken)
                    return
                _report(on_interruption, call, "no server has it", sent_again=True)
                request = call.ask(servers.base)
                continue
            if not answered:
                refusal = f"{response.status_code}: {(yield from _body(response)).decode(errors='replace')[:400]}"
                if response.status_code in for_now:
                    raise httpx.ReadError(refusal, request=call.request)
                raise NotResumable(refusal, request=call.request)
            if not asks:
                servers.sent()
            elif why := call.why_not_from(response.headers.get(PARSED, "").replace(" ", "")):
                raise _not_resumable(call, "the connection broke", why)
            if not call.streamed:
                body = yield from _body(response)
                whole = call.whole(json.loads(body)) if asks else body
                if whole is not None:
                    headers = _JSON if asks else response.headers
                    yield Respond(httpx.Response(200, headers=headers, content=whole), True)
                    return
                heard, in_vain = time.monotonic(), 0  # the server has it, and works at it
                yield Wait(_WAIT_SECONDS)
                continue
            if not responded:
                yield Respond(response, False)
                responded = True
            call.begin_reading(taken_up=asks)
            while piece := (yield Read(response)):
                if events := call.feed(piece):
                    heard, in_vain = time.monotonic(), 0
                    if call.begun:
                        servers.gave()
                    yield Give(events)
                if call.complete or call.broken or call.cut_off:
                    break
            yield Close(response)
            if call.complete:
                return
            if call.cut_off:
                raise _not_resumable(call, "the connection broke", call.cut_off)
            why = call.broken.decode(errors="replace")[:400] or "the stream ended before [DONE]"
            raise httpx.ReadError(why, request=call.request)
        except NotResumable:
            raise
        except httpx.TransportError as problem:
            unreached = isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout)
            if not asks and not unreached and not refused:
                servers.sent()
            if answered or not asks:
                servers.broke()
            else:
                servers.replied(repr(problem))
            if time.monotonic() - heard > give_up_after:
                if not also_at:
                    raise
                servers.replied(repr(problem))
                what = f"no server gave the answer within {give_up_after:g} s: {servers.replies()}"
                raise NotResumable(what, request=call.request) from problem
            if responded and call.why_not:
                raise _not_resumable(call, repr(problem), call.why_not) from problem
            if missing := call.end_without_done():
                yield Give(missing)
                return
            failures += 1
            if failures == 1 or not isinstance(problem, httpx.ConnectError):  # or still nobody listens
                _report(on_interruption, call, repr(problem))
            if in_vain > 0:  # the first time the same server is asked
                servers.next()
            in_vain += 1
        request, redirects = call.take_up(servers.base), 0
        yield Wait(min(_WAIT_SECONDS * 2 ** min(in_vain - 1, 10), _LONGEST_WAIT_SECONDS))


def origin(request: httpx.Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc.decode()}"


def _for_now(asks: bool, again: bool, several: bool) -> tuple[int, ...]:
    """Refusals that are waited out. `asks`: of a question for an answer; otherwise of a request, which was sent `again`
    or for the first time."""
    if not asks:
        return (*_LATER, 409) if again else _NOT_NOW  # 409: it has arrived
    # 400: the server that took it over has not come so far yet. 404: nor has another one heard of it.
    return (*_LATER, 400, 404) if several else (*_LATER, 400)


def _not_resumable(call: Call, problem: str, why: str) -> NotResumable:
    what = f"{problem}, and the rest of the answer cannot be taken up: {why}"
    return NotResumable(what, request=call.request)


def _report(on_interruption, call: Call, problem: str, sent_again: bool = False) -> None:
    if on_interruption is not None:
        on_interruption(Interruption(call.request_id, call.characters, problem, sent_again))


def _body(response) -> Generator[Step, Any, bytes]:
    found = b""
    while piece := (yield Read(response)):
        found += piece
    yield Close(response)
    return found
