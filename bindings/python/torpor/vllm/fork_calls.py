# SPDX-License-Identifier: Apache-2.0
"""The front end's part of `torpor.fork()`, one flow for both kinds of front end."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState

from torpor.errors import Error, InvalidArgument, NotFound, Unsupported
from torpor.vllm import frontend, outputs
from torpor.vllm.engine_values import Forked
from torpor.vllm.frontend import AsyncSide, BlockingSide

FORK = """Make `n` requests that go on from where a running or waiting one is, which goes on as well.

    The children share the full KV blocks of their parent; only the block that is half full is copied, once a child. An
    end of one frees its own references alone. A child without a seed of its own draws as its parent does: greedy and
    seeded ones give the parent's tokens, unseeded ones each their own. Their ids are in the result. Of an LLM, step()
    gives their outputs; of an AsyncLLM, torpor.vllm.attach(engine, id) is the stream of one. Outputs of the kind DELTA
    begin after the tokens that they have in common with their parent; all others have the whole answer.

    request: id that the request was made with; one with n = 1.
    n: 1 to 1,024.
    at: the children have the first `at` output tokens of their parent; None: all that it has now.
    seeds: a seed for each child, 0 to 2**63 - 1, or None: the parent's. A child draws from then on what a request of
        that seed draws after so many tokens.
    action: id of the fork. The same call again while one of its children lives changes nothing. None: a new one.
    timeout: most seconds to wait for the running step; None: no bound.

    Raises NotFound for an id that is no unfinished request, InvalidArgument, Unsupported, with the reason, for one
    that cannot be forked, NotEnoughRoom for want of free KV blocks, WrongState if the engine sleeps. Then nothing has
    changed.
    """

_MOST_SEED = 2**63 - 1


async def fork(
    side: BlockingSide | AsyncSide,
    request: str,
    n: int,
    at: int | None,
    seeds: Sequence[int | None] | None,
    action: str | None,
    timeout: float | None,
) -> Forked:
    processor = side.engine.output_processor
    _check(n, at, seeds, action)
    try:
        parent = _parent(processor, request).request_id
    except NotFound:
        if action is None:
            raise
        parent = None  # it may have ended since this fork was made
    action = action or uuid.uuid4().hex[:12]
    names = [f"{request}-{action}-{i}" for i in range(n)]
    options = {
        "request": parent,
        "name": request,
        "children": [f"{name}-{uuid.uuid4().hex[:8]}" for name in names],  # as vLLM makes its own of an id
        "at": at,
        "seeds": list(seeds) if seeds is not None else [None] * n,
        "action": action,
        "call": uuid.uuid4().hex,
        "timeout": timeout,
    }
    async with _turn(side):
        return await _fork(side, request, names, options)


async def _fork(side: BlockingSide | AsyncSide, request: str, names: list[str], options: dict) -> Forked:
    call, processor = options["call"], side.engine.output_processor
    try:
        answer = await side.call("fork", options)
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):  # the engine core does it all the same
        await _undo(side, call)
        raise
    forked = Forked(request, tuple(names), answer["shared_blocks"], answer["bytes"])
    if answer["repeated"]:
        return forked
    made: list[RequestState] = []
    try:
        parent = options["request"]  # the engine knows nothing yet of others that come meanwhile
        await frontend.caught_up_with(side, {parent: answer["sent"][parent]})
        of = _parent(processor, request)
        _take(side, of, names, answer, made)
        side.adopt(made, of, options["seeds"])
        await side.call("end_fork", {"call": call, "keep": True})
    except BaseException:
        side.disown(made)
        for state in made:
            _forget(side, state)
        await _undo(side, call)
        raise
    return forked


def _turn(side: BlockingSide | AsyncSide) -> contextlib.AbstractAsyncContextManager:
    """Let one fork of an AsyncLLM wait for another: the engine stands still for each."""
    if not isinstance(side, AsyncSide):
        return contextlib.nullcontext()
    return side.engine.__dict__.setdefault("torpor_forks", asyncio.Lock())


async def _undo(side: BlockingSide | AsyncSide, call: str) -> None:
    with contextlib.suppress(Error):
        await side.call("end_fork", {"call": call, "keep": False})


def _check(n: int, at: int | None, seeds: Sequence[int | None] | None, action: str | None) -> None:
    """Refuse what is no fork whatever the request is. Whether there are so many tokens and blocks: engine/forks.h."""
    if not _is_int(n) or not 1 <= n <= 1024:
        raise InvalidArgument(f"a fork into {n!r} requests", "give 1 to 1024")
    if at is not None and (not _is_int(at) or at < 0):
        raise InvalidArgument(f"a fork at output token {at!r}", "give a number, 0 or more, or None")
    if action is not None and (not isinstance(action, str) or not action):
        raise InvalidArgument(f"the action id {action!r}", "give a str that is not empty")
    if seeds is None:
        return
    if isinstance(seeds, (str, bytes)) or not isinstance(seeds, Sequence) or len(seeds) != n:
        raise InvalidArgument(f"seeds is {seeds!r}", f"give a list of {n}, one for each child")
    for seed in seeds:
        if seed is not None and (not _is_int(seed) or not 0 <= seed <= _MOST_SEED):
            raise InvalidArgument(f"the seed {seed!r}", "give a number of 0 to 2**63 - 1, or None")


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parent(processor: OutputProcessor, request: str) -> RequestState:
    """The front end's state of the request that is forked."""
    known = processor.external_req_ids.get(request) or [request]
    states = [processor.request_states[each] for each in known if each in processor.request_states]
    if not states:
        raise NotFound(f"there is no unfinished request {request!r}", "name it as it was made; it may have ended")
    if len(states) > 1 or states[0].parent_req is not None:
        raise Unsupported(f"request {request} cannot be forked: it has several answers", "make requests of n = 1")
    return states[0]


def _take(
    side: BlockingSide | AsyncSide, parent: RequestState, names: list[str], answer: dict, made: list[RequestState]
) -> None:
    """Expect the children, from the tokens on that they have. `made` takes the state of each as it is made."""
    processor = side.engine.output_processor
    for name, child in zip(names, answer["children"], strict=True):
        if name in processor.external_req_ids:
            raise InvalidArgument(f"there is a request {name} already", "give the fork another action id")
        of_core = {key: answer[key] for key in ("prompt_token_ids", "token_ids", "sampling", "arrival_time")}
        value = _cut(parent, answer["token_ids"])  # of each its own: its lists grow with it
        state = outputs.state_from_value(processor, value | of_core | {"id": child, "external_id": name})
        if state.output_kind is RequestOutputKind.DELTA:
            state.sent_tokens_offset = len(answer["token_ids"])
            state.detokenizer.get_next_output_text(False, True)  # it notes what of the text has been given
        if isinstance(side, AsyncSide):
            state.queue = RequestOutputCollector(state.output_kind, name)
            side.engine.__dict__.setdefault("torpor_collectors", {})[name] = state.queue
        else:
            state.torpor_restored = True  # LLM.generate() returns its own requests; step() gives the others
        made.append(state)
        processor.request_states[child] = state
        processor.external_req_ids[name].append(child)
    if isinstance(side, AsyncSide):
        side.engine._run_output_handler()


def _forget(side: BlockingSide | AsyncSide, state: RequestState) -> None:
    """Undo _take() for one child."""
    processor = side.engine.output_processor
    processor.request_states.pop(state.request_id, None)
    processor.external_req_ids.pop(state.external_req_id, None)
    getattr(side.engine, "torpor_collectors", {}).pop(state.external_req_id, None)


def _cut(parent: RequestState, tokens: list[int]) -> dict:
    """The values of a request that has only these first output tokens of `parent`."""
    value, count = outputs.state_to_value(parent), len(tokens)
    value |= {"parent": None, "index": 0, "text_offset": 0, "sent_tokens_offset": 0, "pooling": None}
    if count == 0:
        value |= {"is_prefilling": True, "num_cached_tokens": 0, "num_cache_creation_tokens": 0, "stats": None}
        value["status"] = "waiting"
        del value["prompt_logprobs"]  # they are computed again, as those of a new request
    if count < parent.detokenizer.num_output_tokens():
        value["text"] = None
        value["weight_versions"] = [span for span in value["weight_versions"] if span[1] < count]
        if value["logprobs"] is not None:
            value["logprobs"] = _first(value["logprobs"], count)
            value["cumulative_logprob"] = float(sum(_of_tokens(value["logprobs"], tokens)))
    masks = [position for chunk in value["sampling_masks"] for position in chunk]
    given = parent.output_kind is RequestOutputKind.DELTA
    value["sampling_masks"] = [masks[:count]] if masks[:count] and not given else []
    return value


def _first(positions, count: int):
    """Return the first positions of what values.positions_to_value() gave."""
    if not isinstance(positions, dict):
        return positions[:count]
    end = positions["end_indices"][count - 1] if count else 0
    of_position = ("start_indices", "end_indices")
    return {name: items[: count if name in of_position else end] for name, items in positions.items()}


def _of_tokens(positions, tokens: list[int]) -> list[float]:
    """The log probability of each token that was drawn."""
    if isinstance(positions, dict):  # vLLM puts the drawn one first
        return [positions["logprobs"][start] for start in positions["start_indices"]]
    return [
        next(logprob for known, logprob, *_ in position if known == token)
        for position, token in zip(positions, tokens, strict=True)
    ]
