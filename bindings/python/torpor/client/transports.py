# SPDX-License-Identifier: Apache-2.0
"""Do what conversation() of answers.py says: as a transport of httpx, with asyncio or trio, or without them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

import anyio  # httpx needs it, too
import httpx

from torpor.client.answers import Call, Close, Give, Read, Respond, Send, Wait, conversation, origin


class Sender(httpx.BaseTransport):
    """Sends each request as an httpx.Client does, by the transport that is right for its URL: another server may be
    behind another proxy, or behind none."""

    def __init__(self, options: dict[str, Any]):
        """`options`: of httpx.Client."""
        self._client = httpx.Client(**options)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        # Not send(), which logs each request: the client around this one does.
        return self._client._transport_for_url(request.url).handle_request(request)

    def close(self) -> None:
        self._client.close()


class ResumingTransport(httpx.BaseTransport):
    """`inner` sends. `abort_on_close`: of http_client(); `settings`: of conversation()."""

    def __init__(self, inner: httpx.BaseTransport, abort_on_close: bool, **settings: Any):
        self._inner, self._settings = inner, settings
        self._closing = _Closing(abort_on_close)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if (call := Call.of(request)) is None:
            return self._inner.handle_request(request)
        steps = conversation(call, **self._settings, going_on=self._closing.going_on)
        return _Body(self._inner, steps, call, self._closing).respond()

    def close(self) -> None:
        self._inner.close()


class _Closing:
    """Decides whether a call that is closed before its end is aborted at its server."""

    def __init__(self, aborts: bool):
        self._aborts = aborts
        self.going_on: set[str] = set()  # origins of servers whose calls go on when their connections break

    def request(self, call: Call, last: httpx.Request | None) -> httpx.Request | None:
        """Return the request that aborts the call; None: it is not aborted, as where it only takes up another's answer.

        `last`: the last request of the call.
        """
        if (
            not self._aborts
            or call.begun_elsewhere
            or not call.unfinished
            or last is None
            or origin(last) not in (*self.going_on, call.read_at)
        ):
            return None
        return call.abort(last)


class _Body(httpx.SyncByteStream):
    """The body of a response, over as many connections as it takes."""

    def __init__(self, inner: httpx.BaseTransport, steps: Generator, call: Call, closing: _Closing):
        self._inner, self._steps, self._call, self._closing = inner, steps, call, closing
        self._last: httpx.Request | None = None
        self._open: httpx.Response | None = None
        self._pieces: Iterator[bytes] = iter(())

    def respond(self) -> httpx.Response:
        try:
            given = self._until_given()
        except BaseException:
            self.close()
            raise
        assert isinstance(given, Respond)
        if given.passed_on:
            self._open = None
            return given.response
        return httpx.Response(given.response.status_code, headers=_of_a_stream(given.response), stream=self)

    def __iter__(self) -> Iterator[bytes]:
        while (given := self._until_given()) is not None:
            yield given.body

    def close(self) -> None:
        abort = self._closing.request(self._call, self._last)
        self._steps.close()
        self._call.over = True
        if self._open is not None:
            self._open.close()
            self._open = None
        if abort is not None:
            with contextlib.suppress(Exception):  # then it runs to its end
                self._inner.handle_request(abort).close()

    def _until_given(self) -> Any:
        """The next Respond or Give; None: it is over."""
        outcome: Any = None
        problem: httpx.TransportError | None = None
        while True:
            step = _next_step(self._steps, self._call, outcome, problem)
            if step is None or isinstance(step, Respond | Give):
                return step
            outcome = problem = None
            try:
                outcome = self._do(step)
            except httpx.TransportError as failed:
                problem = failed

    def _do(self, step: Send | Read | Close | Wait) -> Any:
        if isinstance(step, Send):
            if self._open is not None:
                self._open.close()
            self._last = step.request
            self._open = self._inner.handle_request(step.request)
            self._pieces = iter(self._open.stream)
            return self._open
        if isinstance(step, Read):
            return next(self._pieces, b"")
        if isinstance(step, Close):
            step.response.close()
            self._open = None
            return None
        time.sleep(step.seconds)
        return None


class AsyncSender(httpx.AsyncBaseTransport):
    """As Sender."""

    def __init__(self, options: dict[str, Any]):
        self._client = httpx.AsyncClient(**options)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._client._transport_for_url(request.url).handle_async_request(request)

    async def aclose(self) -> None:
        await self._client.aclose()


class AsyncResumingTransport(httpx.AsyncBaseTransport):
    def __init__(self, inner: httpx.AsyncBaseTransport, abort_on_close: bool, **settings: Any):
        self._inner, self._settings = inner, settings
        self._closing = _Closing(abort_on_close)
        self._aborting: set[asyncio.Task] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if (call := Call.of(request)) is None:
            return await self._inner.handle_async_request(request)
        steps = conversation(call, **self._settings, going_on=self._closing.going_on)
        return await _AsyncBody(self._inner, steps, call, self._closing, self._aborting).respond()

    async def aclose(self) -> None:
        if self._aborting:
            await asyncio.wait(self._aborting)
        await self._inner.aclose()


class _AsyncBody(httpx.AsyncByteStream):
    """As _Body."""

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        steps: Generator,
        call: Call,
        closing: _Closing,
        aborting: set[asyncio.Task],
    ):
        self._inner, self._steps, self._call, self._closing = inner, steps, call, closing
        self._aborting = aborting
        self._last: httpx.Request | None = None
        self._open: httpx.Response | None = None
        self._pieces: Any = None

    async def respond(self) -> httpx.Response:
        try:
            given = await self._until_given()
        except BaseException:
            await self.aclose()
            raise
        assert isinstance(given, Respond)
        if given.passed_on:
            self._open = None
            return given.response
        return httpx.Response(given.response.status_code, headers=_of_a_stream(given.response), stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (given := await self._until_given()) is not None:
            yield given.body

    async def aclose(self) -> None:
        aborting = None
        abort = self._closing.request(self._call, self._last)
        if abort is not None and _in_asyncio():
            # In a task of its own: the one that closes may be cancelled, and so may all that it awaits.
            aborting = asyncio.create_task(self._abort(abort))
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)
        self._steps.close()
        self._call.over = True
        if self._open is not None:
            await self._open.aclose()
            self._open = None
        if aborting is not None:
            await asyncio.shield(aborting)
        elif abort is not None:
            with anyio.CancelScope(shield=True):
                await self._abort(abort)

    async def _abort(self, request: httpx.Request) -> None:
        with contextlib.suppress(Exception):  # then it runs to its end
            await (await self._inner.handle_async_request(request)).aclose()

    async def _until_given(self) -> Any:
        outcome: Any = None
        problem: httpx.TransportError | None = None
        while True:
            step = _next_step(self._steps, self._call, outcome, problem)
            if step is None or isinstance(step, Respond | Give):
                return step
            outcome = problem = None
            try:
                outcome = await self._do(step)
            except httpx.TransportError as failed:
                problem = failed

    async def _do(self, step: Send | Read | Close | Wait) -> Any:
        if isinstance(step, Send):
            if self._open is not None:
                await self._open.aclose()
            self._last = step.request
            self._open = await self._inner.handle_async_request(step.request)
            self._pieces = aiter(self._open.stream)
            return self._open
        if isinstance(step, Read):
            return await anext(self._pieces, b"")
        if isinstance(step, Close):
            await step.response.aclose()
            self._open = None
            return None
        await anyio.sleep(step.seconds)
        return None


def _next_step(steps: Generator, call: Call, outcome: Any, problem: httpx.TransportError | None) -> Any:
    """Give the conversation what came of its last step. None: it is over."""
    try:
        return steps.throw(problem) if problem is not None else steps.send(outcome)
    except StopIteration:
        call.over = True
        return None
    except BaseException:
        call.over = True
        raise


def _in_asyncio() -> bool:
    """Whether asyncio runs this, not trio."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _of_a_stream(response: httpx.Response) -> list[tuple[str, str]]:
    """The headers without what describes one connection's body."""
    left_out = ("content-length", "content-encoding", "transfer-encoding", "connection")
    return [(name, value) for name, value in response.headers.multi_items() if name.lower() not in left_out]
