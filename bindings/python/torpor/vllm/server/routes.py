# SPDX-License-Identifier: Apache-2.0
"""The server's routes: sleep and wake as vLLM's callers know them, and /torpor/*. For users: docs/server.md."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import nullcontext
from dataclasses import asdict
from functools import lru_cache
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from vllm.v1.engine.exceptions import EngineDeadError

import torpor.console
from torpor import _core, errors
from torpor.errors import Error, InvalidArgument, NotFound, Unauthenticated, WrongState
from torpor.vllm import exchange, residency_calls, tracing
from torpor.vllm.compat import lookup
from torpor.vllm.progress import Watcher
from torpor.vllm.server import front, swapping, switching
from torpor.vllm.server.access import caller_of_call
from torpor.vllm.server.front import summary
from torpor.vllm.server.life import Server
from torpor.vllm.server.recorder import answers_of_call
from torpor.vllm.server.refusals import content_of
from torpor.vllm.server.sessions import names_of, outcome_of, seeds_of
from torpor.vllm.server.strict import StrictRoute, as_vllm_has_it, takes_body
from torpor.vllm.weight_updates import kv_option

sleep_mode_operation_metrics = lookup("vllm.entrypoints.serve.dev.sleep.metrics", "sleep_mode_operation_metrics")
_STATUS = {
    errors.InvalidArgument: 400,
    errors.NotFound: 404,
    errors.WrongState: 409,
    errors.Busy: 409,
    errors.Unsupported: 501,
    errors.NotEnoughRoom: 507,
}
_PROGRESS_SECONDS = 0.5
_EVENT_STREAM = "text/event-stream"
_MAX_PARAMS = 1 << 16
_PATIENCE_WITH_ENGINE = 30  # seconds for an answer of its console
_LONGEST_WAIT = 300  # seconds, of transfer.wait
_PARSED = "X-Torpor-Parsed"  # of a stream: what is parsed(), as torpor.client reads it
_NEVER_PARSED = ("cmpl-", "generate-tokens-")  # ids of answers that are the model's text as it is


def recorded(operation: str):
    """In vLLM's own metrics of its sleep mode, if it has any."""
    return nullcontext() if sleep_mode_operation_metrics is None else sleep_mode_operation_metrics().record(operation)


def routes() -> APIRouter:
    """Who may call them is decided by the Gate, from route_table.py."""
    router = APIRouter(route_class=StrictRoute)

    def server(request: Request) -> Server:
        return request.app.state.torpor

    async def answered(call, request: Request) -> Response:
        """The result of an operation as JSON, or, when events are asked for, what it does meanwhile. `call` is given a
        function that watches its progress, or None."""
        tracing.asked_by.set(request.headers)
        if _EVENT_STREAM in request.headers.get("Accept", ""):
            so_far: dict = {}
            task = asyncio.create_task(call(lambda progress: so_far.update(asdict(progress))))
            return StreamingResponse(_with_progress(task, so_far), media_type=_EVENT_STREAM)
        try:
            return JSONResponse(await call(None))
        except Error as problem:
            return refused(problem)

    # --- as vLLM's callers know them ----------------------------------------------------------------------------------

    @router.post("/sleep")
    async def sleep(
        raw_request: Request,
        level: Annotated[int, Query(ge=0, le=2)] = 1,
        mode: Literal["abort", "wait", "keep", None] = None,
        preserve_state: bool | None = None,
        to: Literal["host", "disk"] = "host",
        weights: Literal["store", "reload", None] = None,
        tags: Annotated[list[str] | None, Query()] = None,
        metadata: Annotated[list[str] | None, Query()] = None,
    ) -> Response:
        """Put the engine to sleep. Requests are preserved, unless the call names a `mode` or `preserve_state=false`.

        level: 0 only pauses. 1 and 2 free the weights and the KV cache.
        mode: what becomes of requests that are not preserved. `abort`: they end. `keep`: they are computed again after
            the wake. `wait`: the engine sleeps when they have ended, and new ones wait for the wake.
        preserve_state: `true` keeps requests with their KV blocks; they go on without recompute.
        to: `host` memory, or `disk`: a checkpoint.
        weights: `store` keeps the weights, `reload` does not. Without it they are kept; at level 2 only if requests
            are preserved. See [semantics.md](semantics.md#calls).
        tags: only these of weights and kv_cache.
        metadata: NAME=VALUE, once or more, which the checkpoint keeps. It needs `to=disk`.
        """

        async def call(progress: Watcher | None) -> dict:
            options = {"weights": weights, "tags": tags, "metadata": front.metadata_of(metadata), "progress": progress}
            with recorded("sleep"):
                return await front.sleep(server(raw_request), level, mode, preserve_state, to, options)

        return await answered(call, raw_request)

    @router.post("/wake_up")
    async def wake_up(
        raw_request: Request,
        tags: Annotated[list[str] | None, Query()] = None,
        kv: Literal["recompute", "keep", "abort", None] = None,
        weights_changed: bool = False,
        early: bool = False,
        swap_in_from: str | None = None,
    ) -> Response:
        """Wake the engine. `reload` and `note` of the answer name what has no content and must be loaded.

        tags: only these of weights and kv_cache; without it all.
        kv: after new weights were loaded, what becomes of requests that have KV of the old ones. `recompute`: it is
            computed again. `keep`: they go on with it. `abort`: they end. Without it such a wake fails with 409. See
            [semantics.md](semantics.md#waking).
        weights_changed: `true` is `kv=recompute`.
        early: with `true` it answers, and requests go on, before cached prefixes are back. See
            [semantics.md](semantics.md#a-post-copy-wake).
        swap_in_from: path of a swap channel. The server that a `POST /swap` was sent to gives it.
        """

        async def call(progress: Watcher | None) -> dict:
            kv_of_old = kv_option(kv, weights_changed)
            with recorded("wake"):
                report = await server(raw_request).wake_up(tags, kv_of_old, progress, early, swap_in_from)
            return {"status": "awake" if report.fully_awake else "sleeping", "tags": tags} | summary(report)

        return await answered(call, raw_request)

    @router.get("/is_sleeping")
    @as_vllm_has_it
    async def is_sleeping(raw_request: Request) -> JSONResponse:
        """Whether the engine sleeps or is paused, as vLLM has it."""
        life = server(raw_request)
        return JSONResponse({"is_sleeping": life.state != "awake" or await life.engine.is_sleeping()})

    @router.get("/health")
    @as_vllm_has_it
    async def health(raw_request: Request) -> Response:
        """Liveness: 200 while the engine lives, also asleep, and if a new process would meet the same problem.

        503 when a restart may help.
        """
        life = server(raw_request)
        try:
            await life.engine.check_health()
        except EngineDeadError:
            return Response(status_code=503)
        if life.state == "failed":
            return JSONResponse(failure(life), 503 if life.restart_may_help() else 200)
        return Response(status_code=200)

    # --- torpor's own -------------------------------------------------------------------------------------------------

    @router.get("/torpor/ready")
    async def ready(raw_request: Request) -> Response:
        """Readiness: 200 when the server takes new requests, now or after a wake of their own; otherwise 503.

        It takes them while the engine is awake, and while it sleeps with `--torpor-wake-on-request`.
        """
        life = server(raw_request)
        wakes = life.settings.wake_on_request and life.state in ("falling asleep", "asleep", "waking")
        taken = life.state == "awake" or wakes
        content = failure(life) if life.state == "failed" else {"state": life.state}
        return JSONResponse({"ready": taken} | content, 200 if taken else 503)

    @router.get("/torpor/state")
    async def state(raw_request: Request) -> JSONResponse:
        """The state, memory by tag, counts of answers, and the newest checkpoint."""
        life = server(raw_request)
        content = {
            "state": life.state,
            "queued": life.queued,
            "last_checkpoint": life.last_checkpoint,
            "left_checkpoint": life.left_checkpoint,
            "response_log": life.settings.response_log,
            "problem": life.problem.to_dict() if life.problem else None,
        }
        if life.recorder is not None:
            content["responses"] = life.recorder.answers.counts() | {"log_failures": life.recorder.failures}
        if life.standby is not None:
            content["standby"] = life.standby.to_dict()
        if life.state in ("awake", "asleep", "standby"):  # otherwise the engine is busy, or gone
            state = await life.engine.torpor.call("state")
            ledger = await life.engine.torpor.call("ledger")
            content |= {"engine": state, "ledger": ledger}
            life.metrics.ledger(ledger)
        return JSONResponse(content)

    @router.get("/torpor/console")
    async def page() -> Response:
        """A page that follows the engine. It asks for that with the admin key that is typed into it."""
        return Response(*_page())

    @router.post("/torpor/console/{method}")
    @takes_body
    async def console(raw_request: Request, method: str) -> Response:
        """A call of the console. Its parameters are a JSON object in the body.

        What a call stops stays stopped for its lease, because each call is a connection of its own. `plan`, `sleep`,
        `wake` and `checkpoint` are among the methods.

        method: name of the method. See [console.md](console.md#stopping-an-engine).
        """
        try:
            params = await _params(raw_request)
            life = server(raw_request)
            if method in front.METHODS:
                return JSONResponse(await front.carry_out(life, method, params))
            return JSONResponse(await asyncio.to_thread(ask_console, await life.console(), method, params))
        except Error as problem:
            return refused(problem)

    @router.post("/torpor/plan")
    async def plan(
        raw_request: Request,
        level: Annotated[int, Query(ge=0, le=2)] = 1,
        preserve_state: bool = True,
        to: Literal["host", "disk"] = "host",
    ) -> Response:
        """Return what a sleep would move and free. Nothing changes, but the engine takes no step meanwhile.

        level: as in `POST /sleep`.
        preserve_state: as in `POST /sleep`, but true without it.
        to: as in `POST /sleep`.
        """

        async def call(_progress) -> dict:
            return await front.plan(server(raw_request), level, preserve_state, to)

        return await answered(call, raw_request)

    @router.post("/swap")
    async def swap(
        raw_request: Request,
        to: str,
        peer_timeout: Annotated[float, Query(gt=0, allow_inf_nan=False)] = exchange.PEER_SECONDS,
    ) -> Response:
        """Put this engine to sleep while the one of another server wakes on its memory.

        See [server.md](server.md#a-swap-with-another-server).

        to: URL of the other server on this host, as `http://127.0.0.1:8001`.
        peer_timeout: seconds without a heartbeat of one engine after which the other one gives the swap up.
        """

        async def call(progress: Watcher | None) -> dict:
            with recorded("sleep"):
                return await swapping.swap(server(raw_request), to, peer_timeout, raw_request.headers, progress)

        return await answered(call, raw_request)

    @router.post("/torpor/switch")
    async def switch(raw_request: Request, to: str | None = None) -> Response:
        """Hand all requests over to the standby of this server, and end.

        Until the standby serves, this server can go on, and does if the standby cannot. See
        [standby.md](standby.md#a-planned-switch).

        to: URL of the standby on this host, as `http://127.0.0.1:8001`; without it, as the standby has recorded it.
        """

        async def call(_progress) -> dict:
            return await switching.switch(server(raw_request), to, raw_request.headers)

        return await answered(call, raw_request)

    @router.post("/torpor/take_over")
    @takes_body
    async def take_over(raw_request: Request, step: Literal["prepare", "commit", "cancel", "progress"]) -> Response:
        """Called by an owner that hands over to this standby (`POST /torpor/switch`).

        step: `prepare`: say whether this server could go on, and take memory. `commit`: own the directory and serve.
            `cancel`: release the memory. `progress`: say how much of a step in progress is done.
        """

        async def call(_progress) -> dict:
            life = server(raw_request)
            if life.standby is None:
                raise WrongState("this server is no standby", "ask one that was started with --torpor-standby-of")
            return await life.standby.take_over_from(step, await _params(raw_request))

        return await answered(call, raw_request)

    @router.post("/torpor/checkpoint")
    async def checkpoint(raw_request: Request, metadata: Annotated[list[str] | None, Query()] = None) -> Response:
        """Write a checkpoint while the engine serves. `seconds` of the answer is how long the engine took no step.

        metadata: as in `POST /sleep`.
        """

        async def call(progress: Watcher | None) -> dict:
            return summary(await server(raw_request).checkpoint(progress, front.metadata_of(metadata)))

        return await answered(call, raw_request)

    @router.get("/torpor/checkpoints")
    async def checkpoints(raw_request: Request) -> Response:
        """The checkpoints in `--torpor-checkpoint-dir`."""
        options = server(raw_request).options
        try:
            found = (
                await asyncio.to_thread(_core.list_checkpoints, options.checkpoint_dir, options.key_file)
                if options.checkpoint_dir
                else []
            )
        except errors.NotFound:
            found = []
        except Error as problem:
            return refused(problem)
        return JSONResponse({"directory": options.checkpoint_dir, "checkpoints": found})

    # Before the next, which takes any path: an id may have slashes.
    @router.get("/torpor/requests/{response:path}/stream")
    async def stream(
        raw_request: Request,
        response: str,
        from_tokens: Annotated[str | None, Query(alias="from")] = None,
        from_text: str | None = None,
    ) -> Response:
        """The rest of an answer as server-sent events. It is complete with `data: [DONE]`.

        response: id of the answer, or its `X-Request-Id`.
        from: number of tokens that the reader has. One number for each choice, with commas, or one for all. The header
            `Last-Event-ID`, which a browser's EventSource sends when it connects again, wins over this and `from_text`.
        from_text: number of characters that the reader has, in the same form.
        """
        life = server(raw_request)
        ids = await choices(life, response, raw_request)
        if isinstance(ids, Response):
            return ids
        try:
            if from_tokens is not None and from_text is not None:
                raise InvalidArgument("both from and from_text are given", "give one of them")
            starts, before = starts_of(life, ids, from_tokens, from_text, raw_request.headers.get("Last-Event-ID", ""))
            for each, start in zip(ids, starts, strict=True):  # refused before the stream begins
                life.log.answers.part(each, *start)
        except Error as problem:
            return refused(problem)
        found = parsed(life, ids[0])
        headers = {_PARSED: ", ".join(found)} if found else None
        return StreamingResponse(_events(life, ids, starts, before), headers=headers, media_type=_EVENT_STREAM)

    @router.get("/torpor/requests/{response:path}")
    async def answer(raw_request: Request, response: str) -> Response:
        """An answer so far: text, token ids, and how it ended. `parsed` names what the text still contains and this
        server's own answers have apart from it: `reasoning`, `tools`.

        response: id of the answer, or its `X-Request-Id`.
        """
        life = server(raw_request)
        ids = await choices(life, response, raw_request)
        if isinstance(ids, Response):
            return ids
        parts, indices = [life.log.answers.part(each) for each in ids], places(life, ids)
        await life.log.durable()
        content = [
            {
                "index": index,
                "state": part["state"],
                "text": part["text"],
                "token_ids": part["tokens"],
                "finish_reason": part["finish_reason"] or None,
                "stop_reason": part["stop_reason"],
            }
            for index, part in zip(indices, parts, strict=True)
        ]
        running = any(part["state"] == "running" for part in parts)
        return JSONResponse(
            {
                "id": life.log.answers.get(ids[0])["response"],
                "object": "torpor.response",
                "state": "running" if running else "ended",
                "parsed": parsed(life, ids[0]),
                "choices": content,
            }
        )

    @router.get("/torpor/has/{request:path}")
    async def has(raw_request: Request, request: str) -> Response:
        """Say whether this server has a request, or had it: the server that gave it away asks.

        request: vLLM's id of it.
        """
        life = server(raw_request)
        if life.recorder is None:
            return refused(WrongState(f"the server is {life.state}", "ask again once /torpor/ready is 200"), 503)
        # One that it is taking is in the engine's front end, and in the log once nobody else can take it.
        taking = request in life.engine.output_processor.request_states
        return JSONResponse({"has": taking or life.log.answers.get(request) is not None})

    @router.delete("/torpor/requests/{response:path}")
    async def abort(raw_request: Request, response: str) -> Response:
        """Abort a request.

        response: id of its answer, or its `X-Request-Id`.
        """
        life = server(raw_request)
        ids = await choices(life, response, raw_request)
        if isinstance(ids, Response):
            return ids
        try:
            await life.abort(ids)
        except Error as problem:
            return refused(problem)
        return JSONResponse({"aborted": len(ids)})

    # --- sessions -----------------------------------------------------------------------------------------------------

    @router.get("/v1/sessions")
    async def sessions(raw_request: Request) -> Response:
        """List the caller's images of hibernated requests, and its sessions in tiers; with the admin key, all.

        An image has the object `session.image`, a session in tiers the object `session`.
        """
        return await outcome(server(raw_request).sessions.listed())

    @router.post("/v1/sessions/{session:path}/hibernate")
    async def hibernate(
        raw_request: Request, session: str, to: Literal["host", "disk"] = "host", action_id: str | None = None
    ) -> Response:
        """Take the request out of the engine. Its streams stay open.

        session: the `X-Request-Id` of a request, the `id` of its response, or the id of an image.
        to: where its KV goes: `host`, memory of the host; or `disk`, an image in the checkpoint directory.
        action_id: an id of this call, 1 to 64 letters, digits or `. _ : -`; the same call again returns the same
            result.
        """
        return await outcome(server(raw_request).sessions.hibernate(session, to, action_id))

    @router.post("/v1/sessions/{session:path}/resume")
    async def resume(
        raw_request: Request, session: str, path: str | None = None, action_id: str | None = None
    ) -> Response:
        """Put the requests of an image back.

        session: the `X-Request-Id` of a request, the `id` of its response, or the id of an image.
        path: an image on disk that another server wrote; it needs the admin key.
        action_id: an id of this call, 1 to 64 letters, digits or `. _ : -`; the same call again returns the same
            result.
        """
        if path is not None and not caller_of_call.get().may_change:
            problem = Unauthenticated("path is for the admin key", "resume an image of this server by its id")
            return refused(problem, 403, outcome="rejected")
        return await outcome(server(raw_request).sessions.resume(session, path, action_id))

    @router.post("/v1/sessions/{session:path}/fork")
    async def fork(
        raw_request: Request,
        session: str,
        n: Annotated[int, Query(ge=1, le=1024)],
        at: Annotated[int | None, Query(ge=0)] = None,
        seeds: Annotated[list[str] | None, Query()] = None,
        action_id: str | None = None,
    ) -> Response:
        """Make requests that go on from where this one is. Their answers are at `/torpor/requests/CHILD`.

        session: the `X-Request-Id` of a request that runs, or the `id` of its response.
        n: number of requests to make.
        at: how many of the output tokens they have; all, if it is left out; 0: only the prompt.
        seeds: a seed for each of them, or `parent` for one that draws as the parent does.
        action_id: an id of this call, 1 to 64 letters, digits or `. _ : -`; the same call again returns the same
            result.
        """

        async def call() -> dict:
            return await server(raw_request).sessions.fork(session, n, at, seeds_of(seeds), action_id)

        return await outcome(call())

    @router.post("/v1/sessions/{session:path}/move")
    async def move(raw_request: Request, session: str, to: str, action_id: str | None = None) -> Response:
        """Have another server take the request. It reads the same directory and has the same admin key.

        session: the `X-Request-Id` of a request, the `id` of its response, or the id of an image.
        to: address of that server on this host, as `http://127.0.0.1:8001`.
        action_id: an id of this call, 1 to 64 letters, digits or `. _ : -`; the same call again returns the same
            result.
        """
        return await outcome(server(raw_request).sessions.move(session, to, raw_request.headers, action_id))

    @router.post("/v1/sessions/{session:path}/demote")
    async def demote(
        raw_request: Request,
        session: str,
        to: Literal["host", "disk", "remote"] = "host",
        action_id: str | None = None,
    ) -> Response:
        """Copy the session's KV blocks to a tier, then free those nearer to the engine. Answers when that is done.

        session: the `session_id` of its requests.
        to: `host` memory, `disk`, or `remote`, the store that engines share.
        action_id: as in `POST /v1/sessions/ID/hibernate`.
        """
        return await outcome(server(raw_request).sessions.move_blocks("demote", session, action_id, {"to": to}))

    @router.post("/v1/sessions/{session:path}/prefetch")
    async def prefetch(
        raw_request: Request,
        session: str,
        to: Literal["host", "device"] = "host",
        deadline: Annotated[float | None, Query(gt=0, allow_inf_nan=False)] = None,
        action_id: str | None = None,
    ) -> Response:
        """Copy the session's KV blocks to host memory, or load them to the device. Answers when that is done.

        session: the `session_id` of its requests.
        to: `host`: from disk and the shared store. `device`: from all tiers, into free blocks of the engine.
        deadline: seconds after which blocks that are not on their way yet are left out.
        action_id: as in `POST /v1/sessions/ID/hibernate`.
        """
        try:
            options = residency_calls.prefetch_options(to, deadline)
        except Error as problem:
            return refused(problem, outcome=outcome_of(problem))
        return await outcome(server(raw_request).sessions.move_blocks("prefetch", session, action_id, options))

    @router.post("/v1/sessions/{session:path}/retain")
    async def retain(
        raw_request: Request,
        session: str,
        ttl: Annotated[float, Query(gt=0, allow_inf_nan=False)],
        priority: Annotated[int, Query(ge=-1000000, le=1000000)] = 0,
        action_id: str | None = None,
    ) -> Response:
        """Keep the session's KV blocks in host memory for a time, unless others need the room.

        session: the `session_id` of its requests.
        ttl: seconds.
        priority: sessions of a lower one make room first.
        action_id: as in `POST /v1/sessions/ID/hibernate`.
        """
        options = {"seconds": ttl, "priority": priority}
        return await outcome(server(raw_request).sessions.move_blocks("retain", session, action_id, options))

    @router.post("/v1/sessions/{session:path}/pin")
    async def pin(
        raw_request: Request,
        session: str,
        ttl: Annotated[float, Query(gt=0, allow_inf_nan=False)],
        action_id: str | None = None,
    ) -> Response:
        """Keep the session's KV blocks in host memory for a time, within the budget of `session_pin_share`.

        session: the `session_id` of its requests.
        ttl: seconds.
        action_id: as in `POST /v1/sessions/ID/hibernate`.
        """
        return await outcome(server(raw_request).sessions.move_blocks("pin", session, action_id, {"seconds": ttl}))

    @router.post("/v1/sessions/{session:path}/evict")
    async def evict(raw_request: Request, session: str, action_id: str | None = None) -> Response:
        """Drop the session's KV blocks from the device, host memory and disk, and forget the session.

        session: the `session_id` of its requests.
        action_id: as in `POST /v1/sessions/ID/hibernate`.
        """
        return await outcome(server(raw_request).sessions.move_blocks("evict", session, action_id, {}))

    @router.delete("/v1/sessions/{session:path}")
    async def delete(raw_request: Request, session: str, action_id: str | None = None) -> Response:
        """End the requests of an image, and free it; where there is no image, evict the session in tiers.

        session: the `X-Request-Id` of a request, the `id` of its response, or the id of an image; or a `session_id`.
        action_id: as in `POST /v1/sessions/ID/hibernate`.
        """
        return await outcome(server(raw_request).sessions.delete(session, action_id))

    return router


async def outcome(call: Awaitable[dict]) -> Response:
    """The answer of a verb of /v1/sessions, or its error with the outcome that it has."""
    try:
        return JSONResponse(await call)
    except Error as problem:
        return refused(problem, outcome=outcome_of(problem))


def failure(life: Server) -> dict:
    return {
        "state": life.state,
        "error": life.problem.to_dict() if life.problem else None,
        "restart_may_help": life.restart_may_help(),
    }


async def choices(life: Server, response: str, request: Request) -> list[str] | Response:
    """Ids of the choices of an answer; by the id in vLLM's response, or by the X-Request-Id that the client gave. If
    there is none, or another server has to be asked, the response that says so: an HTTPException would be an error in
    vLLM's log for each such call."""
    if not life.has_log:
        return refused(WrongState("this server has no response log", "start it with --torpor-response-log on"))
    if life.recorder is None:
        return await _of_owner(life, request)
    whose = life.tenant(request.headers)
    names = names_of(response)
    if (address := life.sessions.moved_to(names, whose)) is not None:
        return _at(address, request)
    if ids := life.sessions.newest(names, whose):
        if life.state == "failed" and any(life.log.answers.position(each)["state"] == "running" for each in ids):
            return await _of_owner(life, request)  # nobody computes more of it here
        if (given := answers_of_call.get()) is not None:
            given.update(ids)
        return ids
    if any(life.recorder.answers.was_dropped(name, whose) for name in names):
        what = f"the answer {response} has ended, and the response log dropped it to make room for newer ones"
        return refused(NotFound(what, "do not send the request again: it was answered"), 410)
    if life.state == "failed":  # another server may have begun it since
        return await _of_owner(life, request)
    what = f"there is no answer {response}: it was never begun here, is not yours, or ended too long ago"
    return refused(NotFound(what, "send the request again"))


def parsed(life: Server, request_id: str) -> list[str]:
    """Return what vLLM parses out of the text of such an answer before it sends it to the client."""
    if life.log.answers.get(request_id)["response"].startswith(_NEVER_PARSED):
        return []
    args = life.app_state.args
    found = {
        "reasoning": life.engine.vllm_config.structured_outputs_config.reasoning_parser,
        "tools": args.enable_auto_tool_choice and args.tool_call_parser,
    }
    return [name for name, parser in found.items() if parser]


def _at(address: str, request: Request) -> Response:
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"{address}{request.url.path}{query}", 307)


async def _of_owner(life: Server, request: Request) -> Response:
    """The response to a call about an answer that another server goes on with: where that is, if it is known."""
    if life.remote is not None and (owner := await life.remote.owner_address()):
        return _at(owner, request)
    state = f"the server is {life.state}" + (f": {life.problem}" if life.problem else "")
    return refused(WrongState(state, "ask again once /torpor/ready is 200, or ask the next server"), 503)


def places(life: Server, ids: list[str]) -> list[int]:
    """The numbers by which a client knows these choices. Others of the answer may not be here."""
    return [life.log.answers.get(each)["choice"] for each in ids]


def numbers(text: str, choices: list[int]) -> list[int]:
    """Return what `text` has for each of these choices: one number for all, or one for each choice of the answer, those
    that are not here among them."""
    parts = text.split(",")
    are_numbers = all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts)
    if not are_numbers or 1 < len(parts) <= max(choices):
        count = max(choices) + 1
        raise InvalidArgument(
            f"{text!r} is no place in an answer of {count} choices",
            f"give one number, or {count} with commas between them",
        )
    return [int(parts[0] if len(parts) == 1 else parts[each]) for each in choices]


def starts_of(
    life: Server, ids: list[str], from_tokens: str | None, from_text: str | None, last_event: str
) -> tuple[list[tuple[int, int]], list[str]]:
    """Where the rest of each choice begins, as a token and a character for DeliveryLog.part(); and what the reader
    lacks of the prompt before it (echo).

    last_event: the id of the last event that the reader got, if it connects again: a browser's EventSource sends it
        with the query of its first connection, behind which it has got more since.
    """
    indices = places(life, ids)
    tokens = numbers(last_event or ("0" if from_tokens is None else from_tokens), indices)
    starts, before = [(token, 0) for token in tokens], [""] * len(ids)
    if from_text is None:
        return starts, before
    missing, characters = behind_echo(life, ids, numbers(from_text, indices))
    for index, (each, token, character) in enumerate(zip(ids, tokens, characters, strict=True)):
        rest = life.log.answers.part(each, token)
        # Of a choice that has had no event yet, the id names only the token in which the place of the query lies.
        if token == 0 or rest["text_end"] - len(rest["text"]) < character:
            starts[index], before[index] = (0, character), missing[index]
    return starts, before


def behind_echo(life: Server, ids: list[str], starts: list[int]) -> tuple[list[str], list[int]]:
    """Where a reader has so many characters of each answer, and the prompt was given before it (echo): what is missing
    of the prompt, and how many characters of the answer itself the reader has."""
    echoes = [(life.log.answers.get(each) or {}).get("front", {}).get("echo", "") for each in ids]
    missing = [echo[start:] for echo, start in zip(echoes, starts, strict=True)]
    return missing, [max(0, start - len(echo)) for echo, start in zip(echoes, starts, strict=True)]


async def _events(life: Server, ids: list[str], starts: list[tuple[int, int]], before: list[str]) -> AsyncIterator[str]:
    """Chunks as vLLM sends them, with their token ids; the id of an event is the `from` that goes on behind it. The
    first text of each choice stands behind its `before`. `starts`, `before`: of starts_of()."""
    before = list(before)
    response = life.log.answers.get(ids[0])["response"]
    chat = response.startswith("chatcmpl-")
    head = {
        "id": response,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(time.time()),
        "model": life.model,
    }
    indices = places(life, ids)
    # What was sent of each choice: up to which token, and which character.
    parts = [life.log.answers.part(each, *start) for each, start in zip(ids, starts, strict=True)]
    ends = [part["tokens_end"] - len(part["tokens"]) for part in parts]
    text_ends = [part["text_end"] - len(part["text"]) for part in parts]
    waits = {
        asyncio.create_task(life.log.more(each, *start)): index
        for index, (each, start) in enumerate(zip(ids, starts, strict=True))
    }
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waits.__getitem__):  # the order of a set is chance
                index, part = waits.pop(task), task.result()
                ended, text = part["state"] != "running", part["text"]
                # An abort releases text that might have become a stop string, without another token.
                if ended and len(text) < part["text_end"] - text_ends[index]:
                    text = life.log.answers.part(ids[index], 0, text_ends[index])["text"]
                text, before[index] = before[index] + text, ""
                ends[index], text_ends[index] = part["tokens_end"], part["text_end"]
                if ended and (where := life.sessions.where_it_went(ids[index])) is not None:
                    raise WrongState(f"another server has this request, at {where}", "take up its answer there")
                choice = {
                    "index": indices[index],
                    "token_ids": part["tokens"],
                    "finish_reason": part["finish_reason"] or None,
                    "stop_reason": part["stop_reason"],
                }
                choice |= {"delta": {"content": text}} if chat else {"text": text}
                of_choices = dict(zip(indices, ends, strict=True))
                last_id = ",".join(str(of_choices.get(each, 0)) for each in range(max(indices) + 1))
                yield f"id: {last_id}\ndata: {json.dumps(head | {'choices': [choice]})}\n\n"
                if not ended:
                    waits[asyncio.create_task(life.log.more(ids[index], part["tokens_end"]))] = index
        yield "data: [DONE]\n\n"
    except Error as problem:  # the server ends, or another one has it; without a word the answer would look complete
        yield f"event: error\ndata: {json.dumps(content_of(problem))}\n\n"
    finally:
        for task in waits:
            task.cancel()


async def _with_progress(task: asyncio.Task, so_far: dict) -> AsyncIterator[str]:
    began, ended = time.monotonic(), False
    while not ended:
        ended = bool((await asyncio.wait({task}, timeout=_PROGRESS_SECONDS))[0])
        progress = so_far | {"seconds": round(time.monotonic() - began, 3)}
        yield f"event: progress\ndata: {json.dumps(progress)}\n\n"
    try:
        result = await task
        for phase in result.get("phases", result.get("slept", {}).get("phases", [])):
            yield f"event: phase\ndata: {json.dumps(phase)}\n\n"
        yield f"event: done\ndata: {json.dumps(result)}\n\n"
    except Error as problem:
        yield f"event: error\ndata: {json.dumps(problem.to_dict())}\n\n"


def refused(problem: Error, status: int | None = None, **more: str) -> JSONResponse:
    """`more`: further fields of the error."""
    content = content_of(problem)
    content["error"] |= more
    return JSONResponse(content, status or _STATUS.get(type(problem), 500))


async def _params(request: Request) -> dict:
    """The call's parameters: the body, if there is one."""
    if len(body := await request.body()) > _MAX_PARAMS:
        raise InvalidArgument(f"a body of {len(body)} bytes", f"give at most {_MAX_PARAMS}")
    try:
        params = json.loads(body or b"{}")
    except ValueError:
        params = None
    if not isinstance(params, dict):
        raise InvalidArgument("the body is no JSON object", 'give {"name": value}, or nothing')
    return params


@lru_cache(maxsize=1)
def _page() -> tuple[str, int, dict]:
    """Text, status and headers: only the page's own script and style run, and it asks nobody but this server."""
    text = _core.console_page()
    script, style = (
        base64.b64encode(hashlib.sha256(text.split(f"<{part}>")[1].split(f"</{part}>")[0].encode()).digest()).decode()
        for part in ("script", "style")
    )
    policy = (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return text, 200, headers


def ask_console(path: str | None, method: str, params: dict) -> dict:
    if path is None:
        raise errors.WrongState("this engine has no console", 'start it with the option console="read" or "control"')
    if method == "subscribe":
        raise errors.Unsupported("a subscription over HTTP", "ask for events with `after`, or use the socket")
    if method in ("pause", "breakpoint.add"):
        params = params | {"stay": True}
    waits = _seconds_of_waiting(params) if method == "transfer.wait" else 0
    try:
        with torpor.console.connect(path, _PATIENCE_WITH_ENGINE) as engine:
            return engine.call_within(waits, method, **params)
    except Error:
        raise  # also those that are an OSError
    except TimeoutError:
        raise errors.TimedOut(f"the engine has not answered {method}", "look whether its process hangs") from None
    except OSError as problem:
        raise errors.Busy(f"the connection to the engine failed: {problem}", "look whether its process lives") from None


def _seconds_of_waiting(params: dict) -> float:
    """Return how long the engine may wait before it answers. It refuses at once what is no number of seconds."""
    timeout = params.get("timeout", 30)
    return min(max(0, timeout), _LONGEST_WAIT) if isinstance(timeout, int | float) else 0
