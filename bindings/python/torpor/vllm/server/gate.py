# SPDX-License-Identifier: Apache-2.0
"""The way into a server that may be asleep: ASGI middleware that by its route lets a call in, holds or refuses it."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.routing import Match, get_route_path
from vllm.logger import init_logger

from torpor.errors import Error
from torpor.vllm.server import event_stream
from torpor.vllm.server.access import Access, Refusal, caller_of_call
from torpor.vllm.server.event_stream import EventStream, asks_for_events
from torpor.vllm.server.life import ABORTS_NOTHING, HANDED_OVER, let_in
from torpor.vllm.server.recorder import (
    Echo,
    answers_of_call,
    call_of_client,
    echo_of_call,
    new_call,
    refusals_of_call,
    tenant_of_call,
)
from torpor.vllm.server.route_table import UNKNOWN, Asleep, Rule, Who, rule_of

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

_RETRY_AFTER_SECONDS = "5"
_MOST_KEPT_BYTES = 1 << 20  # of what a request sends while it waits; then it is no longer seen whether its client goes
_TYPES = {401: "Unauthorized", 403: "PermissionDeniedError", 409: "ConflictError", 503: "ServiceUnavailableError"}


class Gate:
    def __init__(self, app, access: Access):
        self.app = app
        self.access = access
        self._said: set[str] = set()  # unknown routes that the log names

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] in ("http", "websocket") and (rule := self._rule(scope)) is not None:
            server = scope["app"].state.torpor
            headers = Headers(scope=scope)
            tenant = server.tenant(headers)
            tenant_of_call.set(tenant)
            caller_of_call.set(self.access.caller(headers, tenant))
            answers: set[str] = set()
            answers_of_call.set(answers)
            refusals_of_call.set([])
            call_of_client.set(new_call())
            refusal = self.access.refusal(rule.who, headers)
            if scope["type"] == "http" and get_route_path(scope) == "/v1/completions":
                echo = Echo(receive)
                receive = echo.receive
                echo_of_call.set(echo)
            if refusal is None and rule.who is Who.CLIENT and scope["type"] == "http":
                seconds = getattr(scope["app"].state.args, "sse_keep_alive_interval", 0) or event_stream.SECONDS
                send = EventStream(server, get_route_path(scope), send, seconds, answers)
            try:
                return await self._answer(scope, receive, send, rule, headers, refusal)
            finally:
                if isinstance(send, EventStream):
                    send.close()
        return await self.app(scope, receive, send)

    async def _answer(self, scope, receive, send, rule: Rule, headers: Headers, refusal) -> None:
        server = scope["app"].state.torpor
        if refusal is None and rule.asleep is Asleep.HELD:
            refusal = _used_id(server, headers)  # at once, and again when it is let in: another one may have come
            if refusal is None:
                receive = _Held(receive, send if isinstance(send, EventStream) else None, scope, headers)
                refusal = await receive.until_let_in(server)
                if receive.gone:
                    return None
                let_in.set(True)
                refusal = refusal or _used_id(server, headers)
        elif refusal is None:
            refusal = await self._refusal_by_state(rule, server)
        if refusal is not None:
            return await _refuse(scope, receive, send, refusal)
        return await self.app(scope, receive, send)

    def _rule(self, scope) -> Rule | None:
        """None: there is no such route, vLLM says so."""
        route = next((route for route in scope["app"].routes if route.matches(scope)[0] is Match.FULL), None)
        if route is None:
            return None
        rule = rule_of("WEBSOCKET" if scope["type"] == "websocket" else scope["method"], get_route_path(scope))
        if rule is not None:
            return rule
        name = getattr(route, "path", type(route).__name__)
        if name not in self._said:
            self._said.add(name)
            logger.warning("torpor does not know the route %s: it is refused while the engine is not awake", name)
        return UNKNOWN

    async def _refusal_by_state(self, rule: Rule, server) -> Refusal | None:
        match rule.asleep:
            case Asleep.ENDS_REQUESTS if await server.has_handed_over():  # vLLM answers before it has aborted any
                return Refusal(409, HANDED_OVER, "ask the next one")
            case Asleep.ENDS_REQUESTS if rule.who is not Who.CLIENT and server.aborts_nothing:
                return Refusal(503, ABORTS_NOTHING, "ask the next one")
            case Asleep.NEEDS_WEIGHTS if not await server.has_weights():
                return Refusal(409, f"the server is {server.state}", "POST /wake_up?tags=weights first")
            case Asleep.REFUSED if server.state != "awake":
                return Refusal(409, f"the server is {server.state}", "wake it first: POST /wake_up")
            case Asleep.UNKNOWN if server.state != "awake":
                return Refusal(503, f"the server is {server.state}, and torpor does not know what this route needs")
        return None


def _used_id(server, headers: Headers) -> Refusal | None:
    given_id = headers.get("X-Request-Id")
    why = server.recorder.used_request_id(given_id) if given_id and server.recorder is not None else None
    return None if why is None else Refusal(409, why)


class _Held:
    """A request that waits, as long as its client does: what it sends meanwhile is kept for the application."""

    def __init__(self, receive, events: EventStream | None, scope, headers: Headers):
        """`events`: its way out; None: it is no HTTP request, and nobody looks whether its client goes."""
        self.gone = False
        self._receive = receive
        self._events, self._scope, self._headers = events, scope, headers
        self._kept: list[dict] = []
        self._next: asyncio.Task | None = None

    async def __call__(self) -> dict:
        if self._kept:
            return self._kept.pop(0)
        if self._next is not None:
            task, self._next = self._next, None
            return await task
        return await self._receive()

    async def until_let_in(self, server) -> Refusal | None:
        """Why it is not, or None."""
        entering = asyncio.ensure_future(server.let_in())
        try:
            await asyncio.sleep(0)
            kept_bytes = 0
            while self._events is not None and not entering.done() and kept_bytes < _MOST_KEPT_BYTES:
                self._next = self._next or asyncio.ensure_future(self._receive())
                await asyncio.wait({entering, self._next}, return_when=asyncio.FIRST_COMPLETED)
                if self._next.done():
                    message, self._next = self._next.result(), None
                    if message["type"] == "http.disconnect":
                        self.gone = True
                        return None
                    self._kept.append(message)
                    kept_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False) and not entering.done():
                        await self._begin_events(self._events)
            why = await entering
            return None if why is None else Refusal(503, why)
        finally:
            entering.cancel()

    async def _begin_events(self, events: EventStream) -> None:
        """Where its whole body asks for a stream, its client gets status and headers while it waits."""
        body = b"".join(message.get("body", b"") for message in self._kept)
        if asks_for_events(get_route_path(self._scope), self._headers, body):
            await events.begin()


async def _refuse(scope, receive, send, refusal: Refusal) -> None:
    status, what, next_step = refusal
    why = str(Error(what, next_step))
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1013 if status == 503 else 1008, "reason": why[:120]})
    retry = {"Retry-After": _RETRY_AFTER_SECONDS} if status == 503 else {}
    content = {"error": {"message": why, "type": _TYPES[status], "code": status, "what": what, "next_step": next_step}}
    await JSONResponse(content, status, retry)(scope, receive, send)
