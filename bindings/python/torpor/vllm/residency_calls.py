# SPDX-License-Identifier: Apache-2.0
"""The front end's part of `torpor.sessions[…]`: where the KV blocks of a finished session lie, one flow for both kinds
of front end."""

from __future__ import annotations

from torpor.errors import InvalidArgument, Unsupported
from torpor.vllm import data_parallel, frontend
from torpor.vllm.engine_values import KnownSession, SessionAnswer
from torpor.vllm.frontend import AsyncSide, BlockingSide


async def call(
    side: BlockingSide | AsyncSide, verb: str, session: str, tenant: str = "", action: str | None = None, **options
) -> SessionAnswer:
    """Carry out a verb to its end. The engine serves meanwhile."""
    _check(side, session)
    given = {"verb": verb, "session": session, "tenant": tenant, "action": action or ""} | options
    answer = await side.call("session_call", given)
    repeated = answer["repeated"]
    while not answer["done"]:
        await (side.pause() if side.serves_meanwhile() else side.advance())
        answer = await side.call("session_answer", {"tenant": tenant, "action": answer["action_id"]})
    return SessionAnswer.from_value(answer | {"repeated": repeated})


async def known(side: BlockingSide | AsyncSide, tenant: str | None = "") -> list[KnownSession]:
    """Return the sessions of a tenant, the most recently used first; of all tenants if it is None. The engine takes
    steps between the pages of a long list."""
    _check(side, "all")
    found: list[dict] = []
    behind = None
    while True:
        page = await side.call("session_views", {"tenant": tenant, "from": behind})
        found += page["sessions"]
        if (behind := page["next"]) is None:
            break
    found.sort(key=lambda each: each.pop("used"), reverse=True)
    return [KnownSession.from_value(each) for each in found]


async def tenants_of(side: BlockingSide | AsyncSide, session: str) -> list[str]:
    """Return the tenants that have a session of this id."""
    _check(side, session)
    return await side.call("session_tenants", {"session": session})


def _check(side: BlockingSide | AsyncSide, session: str) -> None:
    if not isinstance(session, str) or not session:
        raise InvalidArgument(f"the session id {session!r}", "give a str that is not empty")
    if data_parallel.has_several(side.engine.engine_core):
        raise Unsupported("sessions of data parallel engines: each has its own", "use engines of one rank each")


def seconds(name: str, given: float) -> float:
    """Return a time that a caller gave, or raise InvalidArgument."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
        raise InvalidArgument(f"{name} is {given!r}", "give seconds, more than 0")
    return float(given)


def prefetch_options(to: str, deadline: float | None) -> dict:
    if to not in ("host", "device"):
        raise InvalidArgument(f"to is {to!r}", 'use "host" or "device"')
    return {"to": to, "seconds": 0.0 if deadline is None else seconds("deadline", deadline)}


class Session:
    """One session of an LLM or LLMEngine: calls return when they are done. Other requests are served meanwhile."""

    def __init__(self, engine, session: str):
        self._side = frontend.BlockingSide(engine)
        self.id = session

    def _call(self, verb: str, action_id: str | None, **options) -> SessionAnswer:
        return frontend.finish(call(self._side, verb, self.id, action=action_id, **options))

    def demote(self, to: str = "host", *, action_id: str | None = None) -> SessionAnswer:
        """Copy the session's KV blocks to a tier, then free those that are nearer to the engine.

        Return when every rank has proved its copies and the blocks are free. A block that a running request uses, or
        that another session wants nearer, stays where it is (`kept_bytes`).

        to: "host" memory, "disk", or "remote": the store that engines share.
        action_id: id of this call; the same call again returns the answer of the first. None: it is not repeated.

        Returns a SessionAnswer. "clipped": some blocks could not be copied, and stay; "deferred": a request of the
        session runs, or too many calls are under way; "rejected": the engine has no such tier; "missing": there is no
        such session. The tokens of later requests do not depend on it. Raises InvalidArgument for wrong arguments,
        Unsupported for an engine without tiers, WrongState if it sleeps.
        """
        return self._call("demote", action_id, to=to)

    def prefetch(
        self, to: str = "host", *, deadline: float | None = None, action_id: str | None = None
    ) -> SessionAnswer:
        """Copy the session's KV blocks to host memory, or to the device. Return when that is done.

        To host memory, blocks are copied from disk and from the shared store; the session's next request loads them
        from there. To the device, blocks of all tiers are loaded into free blocks of the engine, at most the share
        `session_prefetch_share` of them. The session's next request finds them there. Other requests may take them
        before, as they take any free block, the least recently used ones first.

        to: "host" or "device".
        deadline: seconds after which blocks that are not on their way yet are left out ("clipped"). None: no deadline.
        action_id: as in demote().

        Returns a SessionAnswer; "clipped": not all blocks are there, and `reason` says why; "rejected": an engine with
        several groups of KV blocks, or with offload="lazy", loads nothing to the device. Raises as demote() does.
        """
        return self._call("prefetch", action_id, **prefetch_options(to, deadline))

    def retain(self, ttl: float, *, priority: int = 0, action_id: str | None = None) -> SessionAnswer:
        """Keep the session's KV blocks in host memory for a time, unless others need the room.

        Blocks that are not there are copied there first. If host memory is full, sessions of the lowest priority make
        room first. Blocks that later requests of the session compute are kept, too.

        ttl: seconds. priority: higher ones stay longer. action_id: as in demote().

        Returns a SessionAnswer, "clipped" if the budget `session_pin_share` has no room for all blocks, or if the ttl
        is longer than `session_pin_seconds`. Raises as demote() does.
        """
        return self._call("retain", action_id, seconds=seconds("ttl", ttl), priority=priority)

    def pin(self, ttl: float, *, action_id: str | None = None) -> SessionAnswer:
        """Keep the session's KV blocks in host memory for a time, whoever needs the room.

        As retain(), but pinned blocks make no room for others before their time is over. Retained blocks of other
        sessions make room for them. A demotion to disk or to the shared store ends the pin.

        ttl: seconds. action_id: as in demote().

        Returns a SessionAnswer, as retain() does. Raises as demote() does.
        """
        return self._call("pin", action_id, seconds=seconds("ttl", ttl))

    def evict(self, *, action_id: str | None = None) -> SessionAnswer:
        """Drop the session's KV blocks from the device, from host memory and from disk, and forget the session.

        Blocks that another session has, too, and those in the shared store stay. action_id: as in demote().

        Returns a SessionAnswer. Raises as demote() does.
        """
        return self._call("evict", action_id)


class AwaitedSession:
    """One session of an AsyncLLM. Its methods are those of Session, and are awaited."""

    def __init__(self, engine, session: str):
        self._side = frontend.AsyncSide(engine)
        self.id = session

    async def _call(self, verb: str, action_id: str | None, **options) -> SessionAnswer:
        return await call(self._side, verb, self.id, action=action_id, **options)

    async def demote(self, to: str = "host", *, action_id: str | None = None) -> SessionAnswer:
        return await self._call("demote", action_id, to=to)

    async def prefetch(
        self, to: str = "host", *, deadline: float | None = None, action_id: str | None = None
    ) -> SessionAnswer:
        return await self._call("prefetch", action_id, **prefetch_options(to, deadline))

    async def retain(self, ttl: float, *, priority: int = 0, action_id: str | None = None) -> SessionAnswer:
        return await self._call("retain", action_id, seconds=seconds("ttl", ttl), priority=priority)

    async def pin(self, ttl: float, *, action_id: str | None = None) -> SessionAnswer:
        return await self._call("pin", action_id, seconds=seconds("ttl", ttl))

    async def evict(self, *, action_id: str | None = None) -> SessionAnswer:
        return await self._call("evict", action_id)


for _name in ("demote", "prefetch", "retain", "pin", "evict"):
    getattr(AwaitedSession, _name).__doc__ = getattr(Session, _name).__doc__


class Sessions:
    """The sessions of an LLM or LLMEngine: `sessions["a"]` is one of them, whether it is known or not."""

    def __init__(self, engine):
        self._engine = engine

    def __getitem__(self, session: str) -> Session:
        return Session(self._engine, session)

    def known(self) -> list[KnownSession]:
        """Return the sessions that the engine knows, the most recently used first."""
        return frontend.finish(known(frontend.BlockingSide(self._engine)))


class AwaitedSessions:
    """The sessions of an AsyncLLM."""

    def __init__(self, engine):
        self._engine = engine

    def __getitem__(self, session: str) -> AwaitedSession:
        return AwaitedSession(self._engine, session)

    async def known(self) -> list[KnownSession]:
        """Return the sessions that the engine knows, the most recently used first."""
        return await known(frontend.AsyncSide(self._engine))
