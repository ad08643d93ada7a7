# SPDX-License-Identifier: Apache-2.0
"""The front end's part of `torpor.hibernate()` and `torpor.resume()`, one flow for both kinds of front end.

A front end keeps all that it has of a hibernated request: the stream that its reader holds stays open, and goes on with
the next token after resume().
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterable

from torpor.errors import Error, InvalidArgument, NotFound
from torpor.vllm import step_outputs
from torpor.vllm.engine_values import Hibernated, Resumed
from torpor.vllm.frontend import AsyncSide, BlockingSide

HIBERNATE = """Take running or waiting requests out of the engine. Return when their memory in it is free.

    Their tokens, samplers and KV move to host memory, verified; other requests go on. The streams of their readers stay
    open. An abort of a hibernated request frees its image.

    requests: ids as the requests were made with; of one with n > 1, all of its answers go. All leave, or none, but for
        those that end with the step under way: the result names those that left.
    image: id for resume(); None: a new one. The same call again, with the same id and requests, changes nothing.
    timeout: most seconds to wait for the running step; None: no bound.

    Raises NotFound for an id that is no unfinished request, Unsupported, with the reason, for one that cannot leave,
    NotEnoughRoom if the host memory of `arena_budget_bytes` is used up, WrongState if the engine sleeps. Then nothing
    has changed.
    """

RESUME = """Put the requests of an image back into the engine. Return when they wait there for their turn.

    Each goes on with its next token as soon as the engine has blocks for it. Its KV is verified on the way; what is
    damaged then is computed again from the tokens.

    image: id of hibernate(). The same call again, before they run, changes nothing.

    Raises NotFound for an id without requests, Damaged if the image does not match its digests, WrongState if the
    engine sleeps. Then the requests are still hibernated.
    """


async def hibernate(
    side: BlockingSide | AsyncSide, requests: str | Iterable[str], image: str | None, timeout: float | None
) -> Hibernated:
    internal = _internal(side, [requests] if isinstance(requests, str) else list(requests))
    if image is not None and (not isinstance(image, str) or not image):
        raise InvalidArgument(f"the image id {image!r}", "give a str that is not empty")
    names = {"image": image or uuid.uuid4().hex, "call": uuid.uuid4().hex}
    try:
        summary = await side.call("hibernate", names | {"requests": internal, "timeout": timeout})
    except (asyncio.CancelledError, KeyboardInterrupt):  # the engine core does it all the same
        with contextlib.suppress(Error):
            await side.call("undo_hibernate", names)
        raise
    if isinstance(side, BlockingSide):
        step_outputs.of(side.engine).hibernated |= set(summary["requests"])
    return Hibernated.from_value(summary, _names(side))


async def resume(side: BlockingSide | AsyncSide, image: str) -> Resumed:
    try:
        summary = await side.call("resume_image", {"image": image})
    except KeyboardInterrupt:  # the engine core may have done it
        if isinstance(side, BlockingSide):
            away = [each["requests"] for each in await side.call("images") if not each["resuming"]]
            step_outputs.of(side.engine).hibernated &= {each for requests in away for each in requests}
        raise
    if isinstance(side, BlockingSide):
        step_outputs.of(side.engine).hibernated -= set(summary["requests"])
    return Resumed.from_value(summary, _names(side))


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
