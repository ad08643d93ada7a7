# SPDX-License-Identifier: Apache-2.0
"""Do what conversation() of answers.py says: as a transport of httpx, with and without asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

import httpx

from torpor.client.answers import Call, Close, Give, Read, Respond, Send, Wait, conversation


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
    """`inner` sends. `settings`: of conversation()."""

    def __init__(self, inner: httpx.BaseTransport, **settings: Any):
        self._inner, self._settings = inner, settings

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if (call := Call.of(request)) is None:
            return self._inner.handle_request(request)
        body = _Body(self._inner, conversation(call, **self._settings))
        return body.respond()

    def close(self) -> None:
        self._inner.close()


class _Body(httpx.SyncByteStream):
    """The body of a response, over as many connections as it takes."""

    def __init__(self, inner: httpx.BaseTransport, steps: Generator):
        self._inner, self._steps = inner, steps
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
        self._steps.close()
        if self._open is not None:
            self._open.close()
            self._open = None

    def _until_given(self) -> Any:
        """The next Respond or Give; None: it is over."""
        outcome: Any = None
        problem: httpx.TransportError | None = None
        while True:
            step = _next_step(self._steps, outcome, problem)
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
    def __init__(self, inner: httpx.AsyncBaseTransport, **settings: Any):
        self._inner, self._settings = inner, settings

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if (call := Call.of(request)) is None:
            return await self._inner.handle_async_request(request)
        body = _AsyncBody(self._inner, conversation(call, **self._settings))
        return await body.respond()

    async def aclose(self) -> None:
        await self._inner.aclose()


class _AsyncBody(httpx.AsyncByteStream):
    """As _Body."""

    def __init__(self, inner: httpx.AsyncBaseTransport, steps: Generator):
        self._inner, self._steps = inner, steps
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
        self._steps.close()
        if self._open is not None:
            await self._open.aclose()
            self._open = None

    async def _until_given(self) -> Any:
        outcome: Any = None
        problem: httpx.TransportError | None = None
        while True:
            step = _next_step(self._steps, outcome, problem)
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
            self._open = await self._inner.handle_async_request(step.request)
            self._pieces = aiter(self._open.stream)
            return self._open
        if isinstance(step, Read):
            return await anext(self._pieces, b"")
        if isinstance(step, Close):
            await step.response.aclose()
            self._open = None
            return None
        await asyncio.sleep(step.seconds)
        return None


def _next_step(steps: Generator, outcome: Any, problem: httpx.TransportError | None) -> Any:
    """Give the conversation what came of its last step. None: it is over."""
    try:
        return steps.throw(problem) if problem is not None else steps.send(outcome)
    except StopIteration:
        return None


def _of_a_stream(response: httpx.Response) -> list[tuple[str, str]]:
    """The headers without what describes one connection's body."""
    left_out = ("content-length", "content-encoding", "transfer-encoding", "connection")
    return [(name, value) for name, value in response.headers.multi_items() if name.lower() not in left_out]
