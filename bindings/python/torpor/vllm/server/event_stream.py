# SPDX-License-Identifier: Apache-2.0
"""The way out of a streamed answer: while the engine is not awake, its server hands over, or its request is hibernated,
comment lines keep its connection open.

Proxies and clients give up a connection without a byte, many after a minute. A client of server-sent events passes over
a line that begins with a colon.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from starlette.datastructures import Headers

SECONDS = 15.0  # between two comments, unless --sse-keep-alive-interval of vLLM says otherwise
_COMMENT = b": asleep\n\n"
_NOT_AWAKE = ("falling asleep", "asleep", "waking", "handing over")
_TYPE = "text/event-stream"
# Routes whose answers are streamed if "stream" is true, and whether an error is data before [DONE], or an event.
_STREAMED = {
    "/v1/chat/completions": True, "/v1/completions": True, "/inference/v1/generate": True,
    "/v1/responses": False, "/v1/messages": False, "/cohere/v2/chat": False,
}  # fmt: skip
# Of an answer to them, also if it is taken up, where its request outlives its connection: torpor.client then says when
# nobody wants the rest.
_GOES_ON = (b"x-torpor-on-disconnect", b"continue")


def asks_for_events(path: str, headers: Headers, body: bytes) -> bool:
    """Whether the answer to this request is to be streamed."""
    if path not in _STREAMED or not headers.get("Content-Type", "").startswith("application/json"):
        return False
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("stream") is True


class EventStream:
    """The send() of one call, in the server's event loop. What is no event stream passes as it is."""

    def __init__(self, server, path: str, send, seconds: float, answers: set[str]):
        """`answers`: ids of the requests whose answers the call gives. Recorder and routes add to the set."""
        self._answers = answers
        self._server, self._path, self._send, self._seconds = server, path, send, seconds
        self._sending = asyncio.Lock()
        self._between_events = True
        self._begun = False  # before the application has answered
        self._refusal: bytes | None = None  # its answer, which is no event stream
        self._comments: asyncio.Task | None = None

    async def begin(self) -> None:
        """Send status, headers and the first comment of a request that waits for a wake."""
        async with self._sending:
            self._begun = True
            headers = [(b"content-type", f"{_TYPE}; charset=utf-8".encode()), *self._about_disconnect()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self._comment_from_now_on()

    async def __call__(self, message) -> None:
        async with self._sending:
            if message["type"] == "http.response.start":
                content_type = Headers(raw=message["headers"]).get("Content-Type", "")
                is_stream = message["status"] == 200 and content_type.startswith(_TYPE)
                if self._begun:
                    self._refusal = None if is_stream else b""
                    return
                await self._send(message | {"headers": [*message["headers"], *self._about_disconnect()]})
                if is_stream:
                    self._comment_from_now_on()
            elif message["type"] == "http.response.body":
                await self._send_body(message)
            else:
                await self._send(message)

    def _about_disconnect(self) -> list[tuple[bytes, bytes]]:
        is_answer = self._path in _STREAMED or self._path.startswith("/torpor/requests/")
        return [_GOES_ON] if is_answer and self._server.settings.on_disconnect == "continue" else []

    async def _send_body(self, message) -> None:
        ends = not message.get("more_body", False)
        if self._refusal is not None:
            self._refusal += message.get("body", b"")
            if not ends:
                return
            message = {"type": "http.response.body", "body": self._as_event(self._refusal)}
        if body := message.get("body", b""):
            self._between_events = body.endswith((b"\n\n", b"\r\n\r\n"))
        if ends:
            self.close()
        await self._send(message)

    def _as_event(self, answer: bytes) -> bytes:
        """A refusal of a request whose status is sent already."""
        data = b"data: " + b" ".join(answer.splitlines()) + b"\n\n"
        return data + b"data: [DONE]\n\n" if _STREAMED.get(self._path, True) else b"event: error\n" + data

    def _comment_from_now_on(self) -> None:
        self._comments = asyncio.create_task(self._comment_while_not_awake())

    async def _comment_while_not_awake(self) -> None:
        with suppress(OSError):  # the client is gone
            while True:
                while not self._waits():
                    await self._server.changed()
                async with self._sending:
                    if self._between_events:
                        await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._until_awake(), self._seconds)

    def _waits(self) -> bool:
        return self._server.state in _NOT_AWAKE or self._server.sessions.are_away(self._answers)

    async def _until_awake(self) -> None:
        while self._waits():
            await self._server.changed()

    def close(self) -> None:
        if self._comments is not None:
            self._comments.cancel()
            self._comments = None
