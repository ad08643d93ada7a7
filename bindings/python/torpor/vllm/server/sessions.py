# SPDX-License-Identifier: Apache-2.0
"""/v1/sessions: requests of this server leave its engine and come back, fork, and move to another server; and the KV
blocks of sessions whose requests have ended move between tiers.

The engine does it (session_calls.py, fork_calls.py). Here is what a server has beside it: whose request it is, the
response log, of which clients read, streams that stay open, and calls that are sent twice.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from http import HTTPStatus
from urllib.parse import quote

from vllm.sampling_params import SamplingParams
from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger
from vllm.v1.engine.output_processor import RequestState

from torpor.errors import Busy, Error, Incompatible, InvalidArgument, NotFound, TimedOut, Unsupported, WrongState
from torpor.vllm import connector_options, fork_calls, frontend, residency_calls, session_calls
from torpor.vllm.engine_values import KnownSession
from torpor.vllm.frontend import Report
from torpor.vllm.outputs import KnownEnd
from torpor.vllm.server import loopback, moves
from torpor.vllm.server.access import caller_of_call
from torpor.vllm.server.other_server import Other
from torpor.vllm.server.recorder import RESPONSE_ID_STARTS, Nobody, place_of, split_response_id, tenant_of_call
from torpor.vllm.session_calls import MOVED

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

_MOST_ACTIONS = 4096  # whose results are remembered
_MOST_MOVED = 65536  # answers of which it is remembered where they went
_ACTION = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)
_SEED = re.compile(r"[0-9]{1,19}", re.ASCII)
_LOOK_SECONDS = 0.02  # between looks whether requests have come back


def outcome_of(problem: Error) -> str:
    """Return the outcome of a call that failed so."""
    if isinstance(problem, NotFound):
        return "missing"
    return "deferred" if isinstance(problem, Busy) else "rejected"


class Sessions:
    """The sessions of one life.Server, in its event loop."""

    def __init__(self, server):
        self._server = server
        self._away: dict[str, str] = {}  # the image of each hibernated request, by vLLM's id
        # By tenant and response, for answers that moved: the other server's address, and vLLM's ids of what it has.
        self._moved: OrderedDict[tuple[str, str], tuple[str, frozenset[str]]] = OrderedDict()
        self._actions: OrderedDict[tuple[str, str], tuple[tuple, asyncio.Task]] = OrderedDict()
        self._turn = asyncio.Lock()  # the engine stands still for each verb

    # --- what others ask ---

    def away(self) -> set[str]:
        """Return vLLM's ids of the requests that are hibernated."""
        running = self._server.engine.output_processor.request_states
        self._away = {each: image for each, image in self._away.items() if each in running}
        return set(self._away)

    def are_away(self, requests: Collection[str]) -> bool:
        """Return whether any of these requests is hibernated."""
        return bool(self._away) and not self.away().isdisjoint(requests)

    def moved_to(self, names: Iterable[str], tenant: str) -> str | None:
        """Return the address of the server that has taken an answer of one of these names, or None. A name that was
        used again means the newest answer, which is here."""
        names = list(names)
        newest = self.newest(names, tenant)
        for name in names:
            address, went = self._moved.get((tenant, name), (None, frozenset()))
            if address is not None and (not newest or not went.isdisjoint(newest)):
                return address
        return None

    def newest(self, names: Iterable[str], tenant: str) -> list[str]:
        """Return vLLM's ids of the choices of one answer that has one of these names; none, if there is no such answer.
        Calls of several routes may have had one X-Request-Id, one after the other: of their answers it is the one that
        runs, or the newest."""
        answers = self._server.log.answers
        found = [ids for name in names if (ids := answers.find(name, tenant))]

        def place(ids: list[str]) -> tuple[bool, float]:
            kept = [answers.get(each) for each in ids]
            return any(each["state"] == "running" for each in kept), max(each["created"] for each in kept)

        if len(found) > 1:
            found = [max(found, key=place)]
        return found[0] if found else []

    async def bring_back(self, seconds: float | None = None) -> None:
        """Resume all hibernated requests. Return when all of them are in the engine, so that a checkpoint has them.

        seconds: raise TimedOut, which names them, when some are not back after so long; None: wait for them. Those that
            are back then run on.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            async with asyncio.timeout(seconds):
                await self._turn.acquire()
        except TimeoutError:
            what = f"a call of /v1/sessions is in progress for {seconds:g} s"
            raise TimedOut(what, "call this again when that has ended") from None
        try:
            while images := await self._images_or_resuming():
                if deadline is not None and time.monotonic() > deadline:
                    names = ", ".join(image["id"] for image in images)
                    what = f"hibernated requests are not back after {seconds:g} s: {names}"
                    raise TimedOut(what, "abort them (DELETE /v1/sessions/ID), or call this again when fewer run")
                for image in images:
                    if not image["resuming"]:
                        with suppress(Busy, NotFound):  # another engine reads it, or has taken it
                            await session_calls.resume(self._side(), image["id"])
                await self._look()
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._turn.release()

    # --- the verbs ---

    async def listed(self) -> dict:
        """Return the images of this caller's requests, and the caller's sessions in tiers."""
        data = []
        if self._server.options.sessions or not self.has_tiers:
            self._check_on()
            data = [self._shown(each) for each in await self._images() if self._is_mine(each)]
        if self.has_tiers:
            caller = caller_of_call.get()
            known = await residency_calls.known(self._side(), None if caller.is_admin else caller.tenant)
            data += [_shown_session(each) for each in known]
        return {"object": "list", "data": data}

    @property
    def has_tiers(self) -> bool:
        """Whether the engine has torpor's connector, whose tiers hold the blocks of finished sessions."""
        return connector_options.has_tiers(self._server.engine.vllm_config.kv_transfer_config)

    async def hibernate(self, name: str, to: str, action: str | None) -> dict:
        async def run() -> dict:
            async with self._at_turn():
                ids = self._running(name)
                left = await session_calls.hibernate(self._side(), ids, self._image_of(ids), None, to)
                await self._look()
            kept = {"id": left.id, "bytes": left.bytes, "tokens": left.tokens, "path": left.path}
            return self._shown(kept | {"requests": ids})

        return await self._action("hibernate", (name, to), action, run)

    async def resume(self, name: str, path: str | None, action: str | None) -> dict:
        """`path`: the directory of an image of another server, of this id."""

        async def run() -> dict:
            if path is not None:
                return await self._take(name, path)
            image = await self._image_named(name)
            if image is None:  # it runs already
                return {"object": "session.image", "requests": self._responses(self._running(name))}
            async with self._at_turn():
                resumed = await session_calls.resume(self._side(), image["id"])
                await self._look()
            return self._shown(image) | {"recomputed": resumed.recomputed}

        return await self._action("resume", (name, path), action, run)

    async def _take(self, name: str, path: str) -> dict:
        if os.path.basename(path) != name or not os.path.isabs(path):
            raise InvalidArgument(f"{path!r} is not the image {name}", "give the absolute path that its server named")
        async with self._at_turn():
            resumed = await session_calls.resume(self._side(), path)
            await self._look()
        running = self._server.engine.output_processor.request_states
        ids = [each for each, state in running.items() if state.external_req_id in resumed.requests]
        return {
            "id": resumed.id, "object": "session.image", "requests": self._responses(ids),
            "recomputed": resumed.recomputed,
        }  # fmt: skip

    async def fork(self, name: str, n: int, at: int | None, seeds: list[int | None] | None, action: str | None) -> dict:
        async def run() -> dict:
            ids = self._running(name)
            if len(ids) > 1:
                raise Unsupported(f"request {name} cannot be forked: it has several answers", "make requests of n = 1")
            async with self._at_turn():  # without the action: the engine would not tell it from another tenant's
                forked = await fork_calls.fork(self._side(), ids[0], n, at, seeds, None, None)
            return {
                "object": "session.fork", "parent": self._responses(ids)[0], "children": list(forked.children),
                "shared_blocks": forked.shared_blocks, "bytes": forked.bytes,
            }  # fmt: skip

        return await self._action("fork", (name, n, at, tuple(seeds or ())), action, run)

    async def move(self, name: str, to: str, headers: Mapping[str, str], action: str | None) -> dict:
        """`to`: address of the other server, which is asked with the key of these `headers`."""

        async def run() -> dict:
            other = Other(await loopback.checked(to), headers, self._server.app_state.args)
            self._check_goes_on()
            ids = self._running(name)
            responses = self._responses(ids)
            side = self._side()
            side.gone_to = other

            async def give(path: str) -> dict:
                self._check_goes_on()
                await moves.note(self._server, ids, path, other.url)
                return await other.resume(path)

            try:
                moved = await session_calls.move(side, ids, give, self._image_of(ids), None)
            except BaseException:
                await self._look()
                await moves.forget(self._server, [each for each in ids if each not in self._away])
                raise
            await self._look()
            return {"id": moved.id, "object": "session.move", "requests": responses, "to": other.url}

        return await self._action("move", (name, to), action, run)

    async def move_blocks(self, verb: str, name: str, action: str | None, options: dict) -> dict:
        """Demote, prefetch, retain, pin or evict the blocks of a session. `options`: of EngineSide.session_call()."""

        async def run() -> dict:
            tenant = await self._tenant_of(name)
            answer = await residency_calls.call(self._side(), verb, name, tenant, **options)
            match answer.outcome:
                case "missing":
                    raise NotFound(
                        f"{answer.reason}: none of yours has ended a request here, or it was forgotten", _LIST
                    )
                case "deferred":
                    raise Busy(answer.reason, "call this again later")
                case "rejected":
                    raise Unsupported(answer.reason, "start the server with that tier, or name another one")
            return {
                "id": name, "object": "session", "outcome": answer.outcome, "reason": answer.reason,
                "bytes": answer.bytes, "freed_bytes": answer.freed_bytes, "kept_bytes": answer.kept_bytes,
                "epoch": answer.epoch,
            }  # fmt: skip

        return await self._action(verb, (name, *sorted(options.items())), action, run, self._check_tiers)

    async def _tenant_of(self, name: str) -> str:
        """Return the tenant of the session of this id that the caller means."""
        caller = caller_of_call.get()
        if not caller.is_admin:
            return caller.tenant
        tenants = await residency_calls.tenants_of(self._side(), name)
        if len(tenants) > 1:
            raise WrongState(f"{len(tenants)} tenants have a session {name}", "call this with the key of one")
        return next(iter(tenants), caller.tenant)

    async def delete(self, name: str, action: str | None) -> dict:
        """End the hibernated requests of this name; where there are none, evict the session of this id."""
        if not self._server.options.sessions and self.has_tiers:
            return await self.move_blocks("evict", name, action, {})

        async def run() -> dict:
            image = await self._image_named(name)
            if image is None:
                if self.has_tiers and await self._is_known(name):
                    return await self.move_blocks("evict", name, None, {})
                raise NotFound(f"there is no image {name}: no hibernated request of yours is called so", _LIST)
            shown = self._shown(image)
            await self._server.abort(list(image["requests"]))
            await self._look()
            return shown

        return await self._action("delete", (name,), action, run)

    async def _is_known(self, name: str) -> bool:
        """Return whether the tiers have a session of this id that the caller may mean."""
        caller = caller_of_call.get()
        tenants = await residency_calls.tenants_of(self._side(), name)
        return bool(tenants) if caller.is_admin else caller.tenant in tenants

    # --- each verb's call ---

    async def _action(
        self,
        verb: str,
        what: tuple,
        action: str | None,
        run: Callable[[], Awaitable[dict]],
        check: Callable[[], None] | None = None,
    ) -> dict:
        """Carry out a verb, to its end even if its caller disconnects. A repeated call, by the id of its action,
        returns the result of the first; a call that failed may be made again. `check` raises where the server does not
        have the verb."""
        metrics, began = self._server.metrics, time.monotonic()
        try:
            (check or self._check_on)()
            result, repeated = await self._once((verb, *what), action, run)
        except Error as problem:
            metrics.session_actions.labels(verb, outcome_of(problem)).inc()
            raise
        outcome = result.get("outcome", "accepted")
        metrics.session_actions.labels(verb, "repeated" if repeated else outcome).inc()
        if not repeated:
            metrics.session_seconds.labels(verb).observe(time.monotonic() - began)
        return result | {"action": verb, "outcome": outcome, "repeated": repeated}

    async def _once(self, call: tuple, action: str | None, run: Callable[[], Awaitable[dict]]) -> tuple[dict, bool]:
        if action is None:
            return await asyncio.shield(self._server.tasks.run(run())), False
        if not _ACTION.fullmatch(action):
            raise InvalidArgument(f"the action id {action!r}", "give 1 to 64 letters, digits, or any of . _ : -")
        caller = caller_of_call.get()
        key = ("admin" if caller.is_admin else f"tenant {caller.tenant}", action)
        known = self._actions.get(key)
        if known is not None:
            if known[0] != call:
                raise InvalidArgument(f"the action id {action} was given to another call", "give each call its own")
            if not _failed(known[1]):
                return await asyncio.shield(known[1]), True
        task = self._server.tasks.run(run())
        self._actions[key] = (call, task)
        self._actions.move_to_end(key)
        task.add_done_callback(lambda ended: self._forget_failed(key, ended))
        while len(self._actions) > _MOST_ACTIONS:
            oldest = next((known for known, (_, made) in self._actions.items() if made.done()), None)
            if oldest is None:
                break
            del self._actions[oldest]
        return await asyncio.shield(task), False

    def _forget_failed(self, key: tuple[str, str], task: asyncio.Task) -> None:
        """Forget a call that failed: it may be made again, and takes no place of those that succeeded."""
        known = self._actions.get(key)
        if known is not None and known[1] is task and _failed(task):
            del self._actions[key]

    @asynccontextmanager
    async def _at_turn(self) -> AsyncIterator[None]:
        """One verb after the other, and none once the end of the server has brought all requests back."""
        async with self._turn:
            self._check_goes_on()
            yield

    def _check_goes_on(self) -> None:
        """Raise WrongState once the end or a hand-over of the server may have brought all requests back: its checkpoint
        or its log would lack what a verb does."""
        if self._server.state == "ending":
            raise WrongState("the server ends", "call the next one")
        if self._server.state == "handing over":
            raise WrongState("the server hands over to its standby", "call this again when that has ended")

    def _check_on(self) -> None:
        server = self._server
        if not server.options.sessions:
            raise Unsupported("sessions: this server was started without them", "start it with --torpor-sessions")
        if not server.has_log:
            raise WrongState("this server has no response log", "start it with --torpor-response-log on")
        if server.recorder is None:
            raise WrongState(f"the server is {server.state}", "ask again once /torpor/ready is 200")

    def _check_tiers(self) -> None:
        if not self.has_tiers:
            raise Unsupported(
                "sessions in tiers: this server has none",
                'start it with --additional-config \'{"torpor": {"offload": "eager", "host_bytes": "8GiB"}}\'',
            )
        self._check_serves()

    def _check_serves(self) -> None:
        if self._server.state != "awake":
            raise WrongState(f"the server is {self._server.state}", "ask again once /torpor/ready is 200")

    # --- names ---

    def _running(self, name: str) -> list[str]:
        """Return vLLM's ids of the unfinished choices of an answer of this caller, by any of its names, or by the image
        that has them."""
        server, caller = self._server, caller_of_call.get()
        running = server.engine.output_processor.request_states
        names = set(names_of(name))
        if caller.is_admin:
            found = [each for each, state in running.items() if _external_names(state) & names]
            tenants = {self._kept(each)["tenant"] for each in found}
            if len(tenants) > 1:
                raise WrongState(f"{len(tenants)} tenants have a request {name}", "call this with the key of one")
        else:
            known = (server.log.answers.find(each, caller.tenant) for each in names_of(name))
            unfinished = ([each for each in ids if each in running] for ids in known)
            found = next(filter(None, unfinished), [])
        found = found or self._hibernated_in(name)
        if not found:
            what = f"there is no unfinished request {name}: it was never begun here, is not yours, or has ended"
            raise NotFound(what, "name it by its X-Request-Id, or by the id of its response")
        return found

    def _hibernated_in(self, image: str) -> list[str]:
        """Return vLLM's ids of the requests of the image of this id, if it is this caller's."""
        requests = [each for each in self.away() if self._away[each] == image]
        return requests if requests and self._is_mine({"requests": requests}) else []

    def _image_of(self, requests: Iterable[str]) -> str | None:
        """Return the image that has the hibernated ones of these requests, or None."""
        return next((self._away[each] for each in requests if each in self._away), None)

    def _kept(self, request: str) -> dict:
        """Return what the response log has of a request, by vLLM's id: its response and tenant among them."""
        answer = self._server.log.answers.get(request)
        if answer is not None:
            return answer
        state = self._server.engine.output_processor.request_states.get(request)
        return {"tenant": None, "response": request if state is None else split_response_id(state.external_req_id)[0]}

    def _responses(self, ids: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(self._kept(each)["response"] for each in ids))

    def _is_mine(self, image: dict) -> bool:
        caller = caller_of_call.get()
        return caller.is_admin or all(self._kept(each)["tenant"] == caller.tenant for each in image["requests"])

    async def _images(self) -> list[dict]:
        """Return the images whose requests are hibernated, as the engine core has them: by vLLM's ids of requests."""
        return [each for each in await self._images_or_resuming() if not each["resuming"]]

    async def _images_or_resuming(self) -> list[dict]:
        """Return the images of requests that are hibernated or being resumed, but for preempted requests: a checkpoint
        computes their tokens again."""
        return [each for each in await self._server.engine.torpor.call("images") if not each["preempted"]]

    async def _image_named(self, name: str) -> dict | None:
        """Return the image of this id, or of the answer of this name, if it is this caller's."""
        mine = [each for each in await self._images() if self._is_mine(each)]
        found = [each for each in mine if each["id"] == name]
        found = found or [each for each in mine if set(names_of(name)) & set(self._responses(each["requests"]))]
        tenants = {self._kept(request)["tenant"] for each in found for request in each["requests"]}
        if len(tenants) > 1:
            raise WrongState(f"{len(tenants)} tenants have a request {name}", "name the image, by its id")
        return found[0] if found else None

    def _shown(self, image: dict) -> dict:
        shown = {
            "id": image["id"], "object": "session.image", "requests": self._responses(image["requests"]),
            "tier": "disk" if image["path"] else "host", "bytes": image["bytes"], "tokens": image["tokens"],
        }  # fmt: skip
        return shown | ({"path": image["path"]} if image["path"] and caller_of_call.get().may_change else {})

    # --- what changes ---

    def _side(self) -> ServerSide:
        return ServerSide(self._server, self)

    async def _look(self) -> None:
        """Learn which requests are hibernated, after a call that has changed it."""
        self._away = {each: image["id"] for image in await self._images() for each in image["requests"]}
        self._server.notify()

    def record_move(self, request: str, address: str) -> str:
        """Record that another server has this request. Return where its client finds the answer."""
        kept = self._kept(request)
        key = kept["tenant"] or "", kept["response"]
        before = self._moved.pop(key, ("", frozenset()))[1]
        self._moved[key] = (address, before | {request})
        while len(self._moved) > _MOST_MOVED:
            self._moved.popitem(last=False)
        return _answer_at(address, kept["response"])

    def where_it_went(self, request: str) -> str | None:
        """Return where the answer of this request goes on, if another server has it."""
        kept = self._kept(request)
        address, went = self._moved.get((kept["tenant"] or "", kept["response"]), ("", frozenset()))
        return _answer_at(address, kept["response"]) if request in went else None

    def forget_move(self, tenant: str, response: str) -> None:
        """Record that an answer that has moved away is here again."""
        self._moved.pop((tenant, response), None)


_LIST = "GET /v1/sessions lists those that there are"
_TENANT = "torpor_tenant"  # in the extra arguments of a request (bindings/bind_connector.cpp)


def name_tenant(args: tuple, kwargs: dict) -> None:
    """Write the tenant of the present call into its request, so that the engine does not mix the sessions of tenants.
    What a client has written there goes. `args`, `kwargs`: of AsyncLLM.add_request()."""
    given = dict(zip(("request_id", "prompt", "params"), args, strict=False)) | kwargs
    tenant = tenant_of_call.get()
    for each in (given.get("params"), getattr(given.get("prompt"), "sampling_params", None)):
        extra = getattr(each, "extra_args", None) or {}
        if isinstance(each, SamplingParams) and (tenant or _TENANT in extra):
            others = {name: value for name, value in extra.items() if name != _TENANT}
            each.extra_args = others | ({_TENANT: tenant} if tenant else {})


def _shown_session(known: KnownSession) -> dict:
    shown = {name: value for name, value in asdict(known).items() if name != "tenant"}
    return {"id": shown.pop("id"), "object": "session"} | shown


class ServerSide(frontend.AsyncSide):
    """The front end of a server: requests that come have answers in its response log, and clients read them there."""

    def __init__(self, server, sessions: Sessions):
        super().__init__(server.engine)
        self._server, self._sessions = server, sessions
        self.gone_to: Other | None = None  # the server that a move gives its requests to
        self._come: list[RequestState] = []  # since take(), until taken(), with the answer of each:
        self._answers: dict[str, dict] = {}
        self._ended: list[dict] = []  # choices of these answers that ended before the others moved

    def capture(self, requests: Iterable[str]) -> dict:
        """Return this front end's part of these requests, with what the response log has of them."""
        outputs, log = super().capture(requests), self._server.log.answers
        answers: dict[str, dict] = {}
        ended: dict[str, dict] = {}  # other choices of these answers
        for each in outputs["requests"]:
            if (answer := log.get(each["id"])) is None:
                continue
            request = dict(answer["request"]) | {"prompt_token_ids": [], "output_token_ids": []}
            kept = {name: answer[name] for name in ("response", "tenant", "choice")}
            answers[each["id"]] = kept | {"request": request, "echo": answer["front"].get("echo")}
            for sibling in log.find(answer["response"], answer["tenant"]):
                if sibling not in ended and log.position(sibling)["state"] != "running":
                    ended[sibling] = _ended_answer(log.get(sibling))
        served = {"tenants": self._server.tenants_id, "answers": answers, "ended": list(ended.values())}
        return outputs | {"served": served}

    def take(self, report: Report, lost: list[dict] | None = None) -> None:
        outputs = report["outputs"]
        served = outputs.get("served") or {"tenants": "", "answers": {}}
        tenants = {each["tenant"] for each in served["answers"].values()} - {""}
        if tenants and served["tenants"] != self._server.tenants_id:
            raise Incompatible(
                "the requests of this image are of tenants whom this server cannot tell apart",
                "give both servers the same answers/tenants.secret",
            )
        log = self._server.log.answers
        if known := [each["external_id"] for each in outputs["requests"] if log.get(each["id"]) is not None]:
            raise WrongState(
                f"the response log of this server has the request {split_response_id(known[0])[0]} already",
                "move it to another server, or wait for --torpor-response-log-seconds",
            )
        super().take(report, lost)
        states = self.engine.output_processor.request_states
        come = [each for each in outputs["requests"] if each["id"] in states]
        self._answers = {
            each["id"]: served["answers"].get(each["id"]) or _answer_of(each, outputs["parents"]) for each in come
        }
        self._come, self._ended = [states[each["id"]] for each in come], served.get("ended", [])
        for state in self._come:
            state.__class__ = KnownEnd  # it may end before it is recorded
            self._without_reader(state)

    def taken(self, outputs: dict) -> None:
        """Record the requests as answers of this server: the other one has them no more."""
        self._adopt(self._come, self._answers)
        for each in self._ended:
            if self._server.log.answers.get(each["request"]["id"]) is None:
                self._server.log.adopt_ended(each)

    async def lost_by_taker(self, requests: list[str]) -> str | None:
        assert self.gone_to is not None
        try:
            if all([await moves.has(self.gone_to, each) for each in requests]):
                return None
        except Error as problem:
            logger.error(
                "torpor: whether %s has the requests that it was given is not known: %s", self.gone_to, problem
            )
            return None
        return f"{self.gone_to} ended while it took this request: send it again"

    def forget(self, outputs: dict) -> None:
        for each in outputs["requests"]:
            self._end(each["id"])
        super().forget(outputs)

    def adopt(self, states: list[RequestState], parent: RequestState, seeds: Sequence[int | None]) -> None:
        """Record children of a fork as answers of their own, of their parent's tenant."""
        known = self._server.log.answers.get(parent.request_id)
        if known is None:
            raise WrongState(f"request {parent.external_req_id} is not in the response log", "send it again")
        answers = {}
        for state, seed in zip(states, seeds, strict=True):
            sampling = known["request"]["sampling"] | ({} if seed is None else {"seed": seed})
            answers[state.request_id] = {
                "response": state.external_req_id, "tenant": known["tenant"], "choice": 0,
                "request": known["request"] | {"sampling": sampling},
            }  # fmt: skip
        self._adopt(states, answers)

    def disown(self, states: list[RequestState]) -> None:
        for each in states:
            self._end(each.request_id)

    def _without_reader(self, state: RequestState) -> None:
        """Its clients read the response log."""
        getattr(self.engine, "torpor_collectors", {}).pop(state.external_req_id, None)
        state.queue = Nobody()

    def _adopt(self, states: list[RequestState], answers: dict[str, dict]) -> None:
        for state in states:
            self._without_reader(state)
            answer = answers[state.request_id]
            self._server.log.adopt(state, answer)
            self._sessions.forget_move(answer["tenant"], answer["response"])

    def _end(self, request: str) -> None:
        if self._server.log.answers.get(request) is not None:
            self._server.log.end(request, "failed", "error", "it did not come into this engine")

    def fail(self, failed: list[dict]) -> None:
        states = self.engine.output_processor.request_states
        for each in failed:
            state = states.get(each["id"])
            if state is None or each["error"] != MOVED or self.gone_to is None:
                continue
            where = self._sessions.record_move(each["id"], self.gone_to.url)
            each["error"] = f"{MOVED}: {where}"
            if state.queue is not None:
                state.queue.put(GracefulHTTPError(
                    f"another server has this request; take up its answer at {where}", HTTPStatus.SERVICE_UNAVAILABLE
                ))  # fmt: skip
        super().fail(failed)


def _ended_answer(answer: dict) -> dict:
    """Return what another server is to have of a choice that has ended. `answer`: as the log has it."""
    names = ("response", "tenant", "choice", "front", "text", "state", "finish_reason", "stop_reason")
    tokens = {name: list(answer["request"][name]) for name in ("prompt_token_ids", "output_token_ids")}
    return {name: answer[name] for name in names} | {"request": dict(answer["request"]) | tokens}


def _answer_of(item: dict, parents: list[dict]) -> dict:
    """Return what the log is to have of a request of an engine without a server. It is of the tenant who calls."""
    response, choice = place_of(item, parents)
    made = {name: item[name] for name in ("sampling", "arrival_time")}
    tenant = caller_of_call.get().tenant
    return {"response": response, "tenant": tenant, "choice": choice, "request": made}


def names_of(name: str) -> tuple[str, ...]:
    """Return the ids that a response of vLLM's may have, if a client gives its id or its X-Request-Id."""
    return (name, *(start + name for start in RESPONSE_ID_STARTS), f"{name}_0")


def _external_names(state: RequestState) -> set[str]:
    return {state.external_req_id, split_response_id(state.external_req_id)[0]}


def _answer_at(address: str, response: str) -> str:
    return f"{address}/torpor/requests/{quote(response, safe='')}"


def _failed(task: asyncio.Task) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def seeds_of(words: list[str] | None) -> list[int | None] | None:
    """Return the seeds of a fork, as a query has them: a number each, or "parent" for that of the parent."""
    if words is None:
        return None
    if wrong := [each for each in words if each != "parent" and not _SEED.fullmatch(each)]:
        raise InvalidArgument(f"the seed {wrong[0]!r}", 'give a number of 0 to 2**63 - 1, or "parent"')
    return [None if each == "parent" else int(each) for each in words]
