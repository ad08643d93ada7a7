# SPDX-License-Identifier: Apache-2.0
"""Moves of requests to another server, one of which may be killed meanwhile: no request runs on both.

The source notes in its response log, durable, that it gives a request away, before the other server can take its image.
If the source is killed, its next start finds the note. While the image is there, nobody has taken it: the start deletes
it, which one process can do, and goes on with the request. If it is gone, the start asks the other server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from vllm.logger import init_logger

from torpor import _core
from torpor.errors import Busy, Error, NotFound, WrongState
from torpor.vllm.server import loopback
from torpor.vllm.server.other_server import Other
from torpor.vllm.session_calls import MOVED

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

_ASK_SECONDS = 60.0  # for a server that starts, too
_RETRY_SECONDS = 0.5


async def note(server, requests: Iterable[str], image: str, to: str) -> None:
    """Note durably that the server at `to` may take these requests from their image, a path. Raises FileError or
    NotEnoughRoom where the response log cannot be written, and WrongState where it is closed, because the engine or the
    server ends: then nobody may be asked."""
    if server.log.closed:
        raise WrongState("the response log of this server is closed", "call the next server")
    _write(server, requests, {"moving": {"image": image, "to": to}})
    await asyncio.to_thread(server.log.answers.sync)


async def forget(server, requests: Iterable[str]) -> None:
    """Delete the notes of these requests: they are here again. Without it a start asks the other server once more."""
    try:
        _write(server, requests, None)
    except Error as problem:
        logger.warning("torpor: that a request was not moved is not recorded: %s", problem)


def _write(server, requests: Iterable[str], content: dict | None) -> None:
    answers = server.log.answers
    running = {}
    for each in requests:
        try:
            position = answers.position(each)
        except NotFound:
            continue
        if position["state"] == "running":
            running[each] = position["tokens_end"]
    answers.step([
        {"id": each, "at": end, "tokens": [], "text": "", "note": content} for each, end in running.items()
    ])  # fmt: skip


async def settle(server) -> None:
    """At a start: find out who has the requests that an earlier process of this server was giving away. End those here
    that another server has. If it cannot be asked for a minute, it counts as having them."""
    images: dict[str, list[dict]] = {}
    for answer in server.log.answers.all():
        if answer["state"] == "running" and isinstance(answer["note"], dict):
            images.setdefault(answer["note"]["moving"]["image"], []).append(answer)
    deadline = time.monotonic() + _ASK_SECONDS
    for image, answers in images.items():
        to = answers[0]["note"]["moving"]["to"]
        requests = [each["request"]["id"] for each in answers]
        if await _was_claimed(server, image, deadline):
            logger.info("torpor: the server at %s has not taken %s: they go on here", to, ", ".join(requests))
        else:
            requests = [each for each in requests if not await _went(server, each, to, deadline)]
        await forget(server, requests)


async def _was_claimed(server, image: str, deadline: float) -> bool:
    """Delete the image, so that nobody takes it any more. Return False if it is gone, or cannot be read."""
    while True:
        try:
            await asyncio.to_thread(_core.claim_image, image, server.options.key_file)
            return True
        except NotFound:
            return False
        except Busy:  # a process reads it, and takes it or not: then it is gone, or there is no lock any more
            await asyncio.sleep(_RETRY_SECONDS)
        except Error as problem:
            logger.warning("torpor: the image %s cannot be read: %s", image, problem)
            return False
        if time.monotonic() >= deadline + _ASK_SECONDS:
            logger.error("torpor: another process still reads the image %s", image)
            return False


async def _went(server, request: str, to: str, deadline: float) -> bool:
    """End the answer of a request here if the server at `to` has it, or cannot be asked."""
    key = server.settings.admin()
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        other = Other(await loopback.checked(to), headers, server.app_state.args)
        if not await has(other, request, deadline):
            logger.info("torpor: %s does not have %s: it goes on here", other, request)
            return False
        logger.info("torpor: %s has %s", other, request)
    except Error as problem:
        logger.error("torpor: %s does not go on here, because the server at %s may have it: %s", request, to, problem)
    where = server.sessions.record_move(request, to)
    server.log.end(request, "failed", "error", f"{MOVED}: {where}")
    return True


async def has(other: Other, request: str, deadline: float | None = None) -> bool:
    """Return whether another server has a request, by vLLM's id. Ask again until `deadline`, or for a minute. Raises
    the last error."""
    deadline = time.monotonic() + _ASK_SECONDS if deadline is None else deadline
    while True:
        try:
            return await other.has(request)
        except Error:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_RETRY_SECONDS)
