# SPDX-License-Identifier: Apache-2.0
"""The front end's part of a request as values and back: what was delivered, its detokenizer, its log probabilities.

Tokens and sampling parameters are not stored twice: the engine core adds its own on wake (engine_core._with_tokens).
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable

import torch
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest

from torpor.errors import Incompatible
from torpor.vllm import adapters, pooling
from torpor.vllm.values import (
    bounded,
    completion_from_value,
    completion_to_value,
    masks_from_value,
    masks_to_value,
    positions_from_value,
    positions_to_value,
    sampling_from_value,
    sampling_to_value,
    tensor_from_value,
    tensor_to_value,
)

# Of vLLM's metrics of a request: moments on the engine core's clock, of which a value has how long they are past, …
_MOMENTS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
# … and what is copied.
_COUNTED = ("num_preemptions", "first_token_latency", "is_corrupted")
_PLAIN_FIELDS = (
    "is_prefilling",
    "num_cached_tokens",
    "num_cache_creation_tokens",
    "stream_interval",
    "sent_tokens_offset",
)


class KnownEnd(RequestState):
    """A request of a front end that remembers how it ended, and whether a wake in a new process has restored it."""

    torpor_finish: tuple[str, int | str | None] | None = None  # finish reason and stop reason
    torpor_restored = False

    def make_request_output(self, new_token_ids, pooling_output, finish_reason, stop_reason, *args, **kwargs):
        """Every output of a request passes here, and its end with its reason."""
        if finish_reason is not None:
            self.torpor_finish = (str(finish_reason), stop_reason)
        output = super().make_request_output(new_token_ids, pooling_output, finish_reason, stop_reason, *args, **kwargs)
        if self.torpor_restored and output is not None:
            output.torpor_restored = True
        return output


def state_to_value(state: RequestState) -> dict:
    """One request of a front end."""
    return _state_to_value(state)


def state_from_value(processor: OutputProcessor, item: dict) -> RequestState:
    """The reverse, for a request that answers alone. Its `text` is None where only the tokens are known."""
    return _state_from_value(processor, item | {"parent": None}, {})


def capture(processor: OutputProcessor, requests: Iterable[str] | None = None) -> dict:
    """All requests that this front end waits for, or those of them with these ids. Every output of theirs that the
    engine sent has been processed before."""
    wanted = processor.request_states.keys() if requests is None else set(requests)
    states = [state for request_id, state in processor.request_states.items() if request_id in wanted]
    own = {state.parent_req.request_id for state in states if state.parent_req is not None}
    return {
        "requests": [_state_to_value(state) for state in states],
        "parents": [
            _parent_to_value(parent)
            for parent in processor.parent_requests.values()
            if requests is None or parent.request_id in own
        ],
    }


def restore(
    processor: OutputProcessor, outputs: dict, with_queues: bool, lost: list[dict] | None = None
) -> dict[str, RequestOutputCollector]:
    """Fills an empty processor. With queues (AsyncLLM), returns the collector of each request by its external id.

    `lost`: takes the id of each request whose text comes out otherwise, and why; without it this raises Incompatible.
    """
    parents = {}
    collectors: dict[str, RequestOutputCollector] = {}
    for item in outputs["parents"]:
        parents[item["id"]] = processor.parent_requests[item["id"]] = _parent_from_value(item)
    for item in outputs.get("ended", ()):  # aborted while their siblings were in the same image
        _end_without(item, parents, "abort", None)
    for item in outputs["requests"]:
        if "token_ids" not in item:  # the checkpoint was repaired: the request is not in it any more
            _end_without(item, parents, "error", "dropped by torpor repair")
            continue
        try:
            state = _state_from_value(processor, item, parents)
        except Incompatible as problem:
            if lost is None:
                raise
            lost.append({"id": item["id"], "error": str(problem)})
            state = _state_from_value(processor, item | {"text": None}, parents)  # it is to end with that error
        if with_queues:
            collector = collectors.setdefault(
                state.external_req_id, RequestOutputCollector(state.output_kind, state.external_req_id)
            )
            state.queue = collector
        else:
            state.torpor_restored = True
        processor.request_states[state.request_id] = state
        processor.external_req_ids[state.external_req_id].append(state.request_id)
    for parent in parents.values():
        if not parent.child_requests:
            del processor.parent_requests[parent.request_id]
    return collectors


def forget(processor: OutputProcessor, outputs: dict) -> None:
    """Undo restore(), which may have come half-way. Requests of others stay."""
    for item in outputs["requests"]:
        if processor.request_states.pop(item["id"], None) is None:
            continue
        ids = processor.external_req_ids.get(item["external_id"], [])
        if item["id"] in ids:
            ids.remove(item["id"])
        if not ids:
            processor.external_req_ids.pop(item["external_id"], None)
    for item in outputs["parents"]:
        processor.parent_requests.pop(item["id"], None)


def forget_all(processor: OutputProcessor) -> None:
    """Undo restore() of a server that has taken no request of its own."""
    processor.request_states.clear()
    processor.parent_requests.clear()
    processor.external_req_ids.clear()


def fail(processor: OutputProcessor, failed: list[dict]) -> list[RequestOutput]:
    """Ends requests that the engine core could not restore, with the finish reason "error" and why as stop reason.

    Their last outputs go into their queues, or are returned where they have none.
    """
    ends = [
        EngineCoreOutput(item["id"], [], finish_reason=FinishReason.ERROR, stop_reason=item["error"]) for item in failed
    ]
    return processor.process_outputs(ends).request_outputs


def so_far(processor: OutputProcessor, requests: Container[str]) -> dict[str, dict]:
    """Return the answer so far of each of these requests, by its id in the engine core, with the token spans (version,
    start, end) of each set of weights."""
    return {
        request_id: {
            "request_id": state.external_req_id,
            "index": state.request_index,
            "prompt_token_ids": list(state.prompt_token_ids or ()),
            "token_ids": list(state.detokenizer.output_token_ids),
            "weight_versions": _versions(state),
        }
        for request_id, state in processor.request_states.items()
        if request_id in requests and state.detokenizer is not None
    }


def _versions(state: RequestState) -> list[list]:
    starts = getattr(state, "weight_version_starts", ())
    ends = [start for _, start in starts[1:]] + [state.detokenizer.num_output_tokens()]
    return [[version, start, end] for (version, start), end in zip(starts, ends, strict=False)]


def _end_without(item: dict, parents: dict[str, ParentRequest], reason: str, stop_reason: str | None) -> None:
    """Its siblings, if it was one of several answers to one prompt, end that call without it."""
    if (parent := parents.get(item["parent"])) is not None:
        parent.child_requests.discard(item["id"])
        if parent.output_aggregator:
            parent.output_aggregator[item["index"]] = CompletionOutput(
                index=item["index"],
                text=item["text"],
                token_ids=[],
                cumulative_logprob=None,
                logprobs=None,
                finish_reason=reason,
                stop_reason=stop_reason,
            )


def _state_to_value(state: RequestState) -> dict:
    if state.detokenizer is None:
        return _pooling_to_value(state)
    logprobs = state.logprobs_processor
    return {
        "id": state.request_id,
        "external_id": state.external_req_id,
        "parent": state.parent_req.request_id if state.parent_req is not None else None,
        "index": state.request_index,
        "adapter": adapters.to_value(state.lora_request),
        "prompt": state.prompt,
        "weight_versions": [[version, start] for version, start in getattr(state, "weight_version_starts", ())],
        "text": getattr(state.detokenizer, "output_text", ""),
        "text_offset": getattr(state.detokenizer, "_last_output_text_offset", 0),
        "logprobs": positions_to_value(logprobs.logprobs),
        "prompt_logprobs": positions_to_value(logprobs.prompt_logprobs),
        "cumulative_logprob": logprobs.cumulative_logprob,
        "prompt_scores": None if (scores := _scores(logprobs)) is None else tensor_to_value(torch.from_numpy(scores)),
        "sampling_masks": masks_to_value(state.sampling_mask_chunks),
        "embedded": _embedded(state),
        "stats": _stats_to_value(state),
    } | {name: bounded(getattr(state, name)) for name in _PLAIN_FIELDS}


def _stats_to_value(state: RequestState) -> dict | None:
    if (stats := state.stats) is None:
        return None
    now = time.monotonic()
    past = {name: now - moment for name in _MOMENTS if (moment := getattr(stats, name)) > 0}
    return {"past": past} | {name: getattr(stats, name) for name in _COUNTED}


def _restore_stats(state: RequestState, item: dict) -> None:
    """No moment stays 0 unless the engine core is about to set it: vLLM would count the time since this machine
    started."""
    if (stats := state.stats) is None:
        return
    now, tokens = time.monotonic(), len(item.get("token_ids", ()))
    known = item.get("stats")  # None: older, or of an engine without metrics
    past = {} if known is None else known["past"]
    never_ran = item.get("status") == "waiting" and tokens == 0  # who has a token and waits came from elsewhere
    for name in _MOMENTS:
        if name in past or name != "scheduled_ts" or not never_ran:
            setattr(stats, name, now - past.get(name, 0.0))
    stats.num_generation_tokens = tokens
    if known is not None:
        for name in _COUNTED:
            setattr(stats, name, known[name])


def _scores(logprobs):
    """Of given tokens in the prompt's places, until they are delivered. vLLM 0.31 has none."""
    return getattr(logprobs, "prompt_token_id_logprobs", None)


def _embedded(state: RequestState) -> int:
    """The length of a prompt without token ids. The embeddings themselves are the engine core's."""
    return state.prompt_len if state.prompt_token_ids is None else 0


def _pooling_to_value(state: RequestState) -> dict:
    """Nothing was delivered of it."""
    return {
        "id": state.request_id,
        "external_id": state.external_req_id,
        "parent": None,
        "index": state.request_index,
        "adapter": adapters.to_value(state.lora_request),
        "prompt": state.prompt,
        "text": None,
        "embedded": _embedded(state),
        "stats": _stats_to_value(state),
    }


def _state_from_value(processor: OutputProcessor, item: dict, parents: dict[str, ParentRequest]) -> RequestState:
    pooled, embedded = pooling.from_value(item.get("pooling")), item.get("embedded", 0)
    request = EngineCoreRequest(
        request_id=item["id"],
        prompt_token_ids=None if embedded else item["prompt_token_ids"],
        prompt_embeds=torch.empty(embedded, 0) if embedded else None,  # only its length is looked at
        mm_features=None,
        sampling_params=None if pooled else sampling_from_value(item["sampling"]),
        pooling_params=pooled,
        arrival_time=item["arrival_time"],
        lora_request=adapters.from_value(item.get("adapter")),
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=item["external_id"],
    )
    state = KnownEnd.from_new_request(
        tokenizer=processor.tokenizer,
        request=request,
        prompt=item["prompt"],
        parent_req=parents.get(item["parent"]),
        request_index=item["index"],
        queue=None,
        log_stats=processor.log_stats,
        stream_interval=processor.stream_interval,
    )
    _restore_stats(state, item)
    if pooled is not None:
        return state
    for name in _PLAIN_FIELDS:
        setattr(state, name, item[name])
    if hasattr(state, "weight_version_starts"):
        state.weight_version_starts = [(version, start) for version, start in item["weight_versions"]]
    state.sampling_mask_chunks = masks_from_value(item.get("sampling_masks", []))  # absent in older checkpoints
    _replay(state, item)
    logprobs = state.logprobs_processor
    logprobs.logprobs = positions_from_value(item["logprobs"])
    if "prompt_logprobs" in item:  # not in that of a fork that begins again
        logprobs.prompt_logprobs = positions_from_value(item["prompt_logprobs"])
    logprobs.cumulative_logprob = item["cumulative_logprob"]
    if (scores := item.get("prompt_scores")) is not None:
        logprobs.prompt_token_id_logprobs = tensor_from_value(scores).numpy()
    return state


def _replay(state: RequestState, item: dict) -> None:
    """A decode stream cannot be copied: a new one gets the same tokens one by one, with stop strings switched off."""
    detokenizer = state.detokenizer
    stop = getattr(detokenizer, "stop", None)
    if stop is not None:
        detokenizer.stop = []
    for token in item["token_ids"]:
        detokenizer.update([token], False)
    if stop is not None:
        detokenizer.stop = stop
        detokenizer._last_output_text_offset = item["text_offset"]
    if item["text"] is not None and getattr(detokenizer, "output_text", "") != item["text"]:
        raise Incompatible(
            f"request {item['external_id']}: this tokenizer makes another text of its tokens",
            "use the tokenizer of the engine that slept",
        )


def _parent_to_value(parent: ParentRequest) -> dict:
    return {
        "id": parent.request_id,
        "external_id": parent.external_req_id,
        "sampling": sampling_to_value(parent.sampling_params),
        "children": sorted(parent.child_requests),
        "finished": [completion_to_value(output) for output in parent.output_aggregator],
        "max_tokens_seen": parent.max_num_generation_tokens,
    }


def _parent_from_value(item: dict) -> ParentRequest:
    parent = object.__new__(ParentRequest)
    parent.request_id = item["id"]
    parent.external_req_id = item["external_id"]
    parent.sampling_params = sampling_from_value(item["sampling"])
    parent.child_requests = set(item["children"])
    parent.output_aggregator = [completion_from_value(output) for output in item["finished"]]
    parent.max_num_generation_tokens = item["max_tokens_seen"]
    parent.cached_child_sampling_params = None
    return parent
