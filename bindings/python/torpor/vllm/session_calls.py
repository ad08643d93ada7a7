# SPDX-License-Identifier: Apache-2.0
"""The front end's part of `torpor.hibernate()` and `torpor.resume()`, one flow for both kinds of front end.

A front end keeps all that it has of a hibernated request: the stream that its reader holds stays open, and goes on with
the next token after resume().
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from torpor import _core
from torpor.errors import Error, InvalidArgument, NotFound, WrongState
from torpor.vllm import frontend, step_outputs
from torpor.vllm.engine_values import Hibernated, Moved, Resumed
from torpor.vllm.frontend import AsyncSide, BlockingSide, Report
from torpor.vllm.paths import expanded

MOVED = "another engine has taken this request"

HIBERNATE = """Take running or waiting requests out of the engine. Return when their memory in it is free.

    Their tokens, samplers and KV move to host memory, or from there to disk, verified; other requests go on. The
    streams of their readers stay open. An abort of a hibernated request frees its image.

    requests: ids as the requests were made with; of one with n > 1, all of its answers go. All leave, or none, but for
        those that end with the step under way: the result names those that left.
    image: id for resume(); None: a new one. The same call again, with the same id and requests, changes nothing.
    timeout: most seconds to wait for the running step; None: no bound.
    to: "host" memory, or "disk": a durable image in the directory of checkpoints; the result names its path, and a new
        process may resume it, too. Also then it needs room in host memory first.

    Raises NotFound for an id that is no unfinished request, Unsupported, with the reason, for one that cannot leave,
    NotEnoughRoom if the host memory of `arena_budget_bytes` is used up, WrongState if the engine sleeps; for "disk"
    InvalidArgument for an id that cannot be a file's name, FileError where the disk fails. Then nothing has changed.
    """

RESUME = """Put the requests of an image back into the engine. Return when they wait there for their turn.

    Each goes on with its next token as soon as the engine has blocks for it. Its KV is verified on the way; what is
    damaged then is computed again from the tokens.

    image: id of hibernate(), or the path of an image on disk: then they come into this engine, whichever engine they
        were in, and go on as restored requests do. The same call again, before they run, changes nothing.

    Raises NotFound for an id without requests, or if another engine has taken the image; Busy while another engine
    reads it; Damaged if the image does not match its digests; Incompatible, by field, for one of another model or KV
    layout; WrongState if the engine sleeps. Then the requests are still hibernated, unless another engine has taken
    the image: then they have ended here.
    """

MOVE = """Have another engine take requests. Return when it has.

    They leave as by hibernate(to="disk"). The other engine, which sees the same directory, resumes the image. Until it
    has verified all of it, this engine has the requests; if it does not take them, they run on here. Their readers here
    get an end with the finish reason "error" and "another engine has taken this request".

    requests, image, timeout: as in hibernate().
    to: the other front end, or a function that is called with the path of the image, and has the other engine call
        resume(path).

    Raises what `to` raises, if the other engine has not taken them, or WrongState; Busy while the other engine still
    reads the image: call resume(image) later.
    """


async def hibernate(
    side: BlockingSide | AsyncSide,
    requests: str | Iterable[str],
    image: str | None,
    timeout: float | None,
    to: str = "host",
) -> Hibernated:
    if to not in ("host", "disk"):
        raise InvalidArgument(f"to is {to!r}", 'use "host" or "disk"')
    internal = _internal(side, [requests] if isinstance(requests, str) else list(requests))
    if image is not None and (not isinstance(image, str) or not image):
        raise InvalidArgument(f"the image id {image!r}", "give a str that is not empty")
    names = {"image": image or uuid.uuid4().hex, "call": uuid.uuid4().hex}
    if to == "disk":
        _core.check_image_name(names["image"])
    try:
        summary = await side.call("hibernate", names | {"requests": internal, "timeout": timeout})
    except (asyncio.CancelledError, KeyboardInterrupt):  # the engine core does it all the same
        with contextlib.suppress(Error):
            await side.call("undo_hibernate", names)
        raise
    if to == "disk":
        summary = await _stored(side, names, summary, set(internal) - set(summary["requests"]))
    if isinstance(side, BlockingSide):
        step_outputs.of(side.engine).hibernated |= set(summary["requests"])
    return Hibernated.from_value(summary, _names(side))


async def _stored(side: BlockingSide | AsyncSide, names: dict, summary: dict, ended: set[str]) -> dict:
    """Have the image lie on disk, with this front end's part of its requests. After an error they run on. `ended`:
    those that were named, too, and ended before they could leave."""
    try:
        await frontend.caught_up_with(side, summary["requests"], ended)
        outputs = side.capture(summary["requests"])
        return await side.call("store_image", {"image": names["image"], "outputs": outputs})
    except BaseException:
        with contextlib.suppress(Error):
            await side.call("undo_hibernate", names)
        raise


async def resume(side: BlockingSide | AsyncSide, image: str | os.PathLike) -> Resumed:
    call = {"call": uuid.uuid4().hex}
    options = call | {"image": os.fspath(image)}
    if isinstance(image, os.PathLike) or "/" in image:
        options["path"] = os.path.abspath(expanded(image))
    try:
        summary = await side.call("resume_image", options)
    except (asyncio.CancelledError, KeyboardInterrupt):  # the engine core may have done it
        with contextlib.suppress(Error):
            await side.call("end_portable", call | {"keep": False})
        if isinstance(side, BlockingSide):
            away = [each["requests"] for each in await side.call("images") if not each["resuming"]]
            step_outputs.of(side.engine).hibernated &= {each for requests in away for each in requests}
        raise
    if "outputs" in summary:
        await _take(side, summary, call)
    elif "moved" in summary:
        _end_moved(side, summary)
        raise NotFound(f"another engine has taken the image {summary['path']}", "its requests go on there")
    elif isinstance(side, BlockingSide):
        step_outputs.of(side.engine).hibernated -= set(summary["requests"])
    return Resumed.from_value(summary, _names(side))


async def _take(side: BlockingSide | AsyncSide, summary: dict, call: dict) -> None:
    """Have the requests of an image of another engine, which stand still in this one until then."""
    processor, outputs = side.engine.output_processor, summary["outputs"]
    try:
        names = [each["external_id"] for each in outputs["requests"]]
        if known := [name for name in names if name in processor.external_req_ids]:
            raise WrongState(f"this engine has a request {known[0]} of its own", "resume the image elsewhere")
        try:
            side.take(Report(outputs=outputs, failed_requests=[]))
        except BaseException:
            side.forget(outputs)
            raise
    except BaseException:
        await side.call("end_portable", call | {"keep": False})
        raise
    claim = _claim(side, outputs, call)
    if isinstance(side, BlockingSide):
        await claim
        return
    task = asyncio.ensure_future(claim)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:  # the engine core does it all the same
        with contextlib.suppress(Error):
            await asyncio.shield(task)
        raise


async def _claim(side: BlockingSide | AsyncSide, outputs: dict, call: dict) -> None:
    """Have the engine core take the image for good, and go on with its requests."""
    try:
        await side.call("end_portable", call | {"keep": True})
    except Error:  # another engine has taken the image
        side.forget(outputs)
        raise
    side.taken(outputs)


def _end_moved(side: BlockingSide | AsyncSide, summary: dict, why: str = MOVED) -> tuple[str, ...]:
    """The readers of requests that another engine has taken hear so. Return the ids that these were made with."""
    states = side.engine.output_processor.request_states
    there = [each for each in summary["moved"] if each in states]
    names = tuple(dict.fromkeys(states[each].external_req_id for each in there))
    if isinstance(side, BlockingSide):
        step_outputs.of(side.engine).hibernated -= set(summary["moved"])
    side.fail([{"id": each, "error": why} for each in there])
    return names


async def move(
    side: BlockingSide | AsyncSide,
    requests: str | Iterable[str],
    to: Callable[[str], Any] | Any,
    image: str | None,
    timeout: float | None,
) -> Moved:
    left = await hibernate(side, requests, image, timeout, to="disk")
    problem: BaseException | None = None
    try:
        taking = to.torpor.resume(left.path) if hasattr(to, "torpor") else to(left.path)
        if inspect.isawaitable(taking):
            await taking
    except BaseException as raised:  # perhaps the other engine has the requests all the same
        problem = raised
    try:
        summary = await side.call("resume_image", {"image": left.id, "call": uuid.uuid4().hex})
    except Error as why:
        raise why from problem
    if "moved" in summary:
        lost = None if problem is None else await side.lost_by_taker(summary["moved"])
        moved = Moved(left.id, _end_moved(side, summary, lost or MOVED))
        if problem is not None and (lost is not None or not isinstance(problem, Exception)):
            raise problem
        return moved
    if isinstance(side, BlockingSide):
        step_outputs.of(side.engine).hibernated -= set(summary["requests"])
    raise problem or WrongState(f"nobody has taken the image {left.path}", "have the other engine resume it")


async def images(side: BlockingSide | AsyncSide) -> list[Hibernated]:
    return [Hibernated.from_value(each, _names(side)) for each in await side.call("images") if not each["resuming"]]


def _internal(side: BlockingSide | AsyncSide, requests: list[str]) -> list[str]:
    """vLLM's own ids of these requests."""
    if not requests:
        raise InvalidArgument("no request is named", "name one at least")
    processor = side.engine.output_processor
    found: dict[str, None] = {}
    for request_id in requests:
        known = processor.external_req_ids.get(request_id) or [request_id]
        if any(each not in processor.request_states for each in known):
            raise NotFound(
                f"there is no unfinished request {request_id!r}", "name it as it was made; it may have ended"
            )
        found |= dict.fromkeys(known)
    return list(found)


def _names(side: BlockingSide | AsyncSide) -> dict[str, str]:
    return {i: state.external_req_id for i, state in side.engine.output_processor.request_states.items()}
