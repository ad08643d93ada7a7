# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler as values and back: requests, queues, block tables, block pool, prefix index."""

from __future__ import annotations

import time
from array import array

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus

from torpor.errors import Incompatible, WrongState
from torpor.vllm import adapters, connector_adapters, grammar, kept, multimodal, pooling, said
from torpor.vllm.inputs import Inputs, token_ids
from torpor.vllm.values import (
    MOST_TOKENS,
    are_plain,
    bounded,
    copied,
    sampling_from_value,
    sampling_to_value,
    unsupported_sampling,
)

_STATUS = {RequestStatus.WAITING: "waiting", RequestStatus.RUNNING: "running", RequestStatus.PREEMPTED: "preempted"}
_STATUS_BACK = {text: status for status, text in _STATUS.items()}
_COMPILING = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR  # waiting, too: made again it compiles again
_STREAMING = RequestStatus.WAITING_FOR_STREAMING_REQ  # waiting, too: for the next piece of its prompt

# torpor's own field of a request that a fork made: the forks that led to it (scheduler_state/fork_ancestry.h).
FORKED = "torpor_forked"
MOST_FORK_STEPS = 1000

# The fields of Request, by what a checkpoint does with them. Each field is in one of these lists.
# These are values of their own in the checkpoint.
_NEUTRAL_FIELDS = {
    "request_id", "client_index", "priority", "arrival_time", "status", "prompt_token_ids", "_output_token_ids",
    "num_computed_tokens", "num_preemptions", "max_tokens", "block_hashes", "cache_salt", "stop_reason",
    "sampling_params", "structured_output_request", "lora_request", "mm_features", "pooling_params", "prompt_embeds",
    "prompt_is_token_ids", "prefill_stats",
}  # fmt: skip
# These are copied as they are.
_ENGINE_FIELDS = (
    "next_decode_eligible_step", "last_sched_seq", "is_prefill_chunk", "shared_prefix_boundary", "replay_start",
    "num_nans_in_logits", "skip_reading_prefix_cache", "abort_immediately", "session_id", "kv_cache_report_mode",
    "num_stale_output_tokens", "drop_stale_output", "spec_token_ids", FORKED,
)  # fmt: skip
# Of _ENGINE_FIELDS, these belong to the place of the request in the scheduler of its engine and in the current step.
_PLACE_FIELDS = {
    "next_decode_eligible_step", "last_sched_seq", "is_prefill_chunk", "shared_prefix_boundary", "replay_start",
    "num_stale_output_tokens", "drop_stale_output", "spec_token_ids",
}  # fmt: skip
# These follow from others, or the new Request makes them.
_DERIVED_FIELDS = {
    "_all_token_ids", "output_token_ids", "all_token_ids", "num_prompt_tokens", "_block_hasher", "events",
    "_prompt_embeds_per_block_hashes", kept.ATTRIBUTE,
}  # fmt: skip
# These must have this value; with another value no checkpoint can hold the request.
_EMPTY_FIELDS = {"spec_decode_metrics": None, "resumable": False, "streaming_queue": None}
# How errors name fields of _EMPTY_FIELDS.
_SAID = {"resumable": "prompt that comes in pieces", "streaming_queue": "pieces of its prompt"}
# Counts of tokens that are being computed: 0 while the engine is stopped.
_IN_FLIGHT_FIELDS = ("num_output_placeholders", "num_in_flight_tokens")
_ODD_PARSER = "options of a reasoning parser that are no plain values"
# said.FIELDS are in the checkpoint as the client gave them (said.py).
_KNOWN_FIELDS = {
    *_NEUTRAL_FIELDS, *_ENGINE_FIELDS, *_DERIVED_FIELDS, *_EMPTY_FIELDS, *_IN_FLIGHT_FIELDS, *said.FIELDS,
}  # fmt: skip


def unknown_fields(request: Request) -> list[str]:
    """Return the fields of this request that the adapter does not know. A checkpoint would lack them."""
    return [f"unknown field {name} of vLLM's Request" for name in sorted(set(vars(request)) - _KNOWN_FIELDS)]


def unsupported_status(request: Request, may_load: bool = False) -> list[str]:
    """Return the request's status if no sleep can keep a request in it.

    `may_load`: the request may wait for torpor's connector, which loads its blocks before the sleep.
    """
    loads = may_load and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    if request.status in _STATUS or request.status in (_COMPILING, _STREAMING) or loads:
        return []
    return [f"a request in the status {request.status.name}"]


def bound_to_process(request: Request) -> list[str]:
    """What of this request no checkpoint can hold, by name.

    The request itself lives on in memory, over every sleep of this process; a new process ends it, by these names.
    """
    found = [f"its {_SAID.get(name, name)}" for name, empty in _EMPTY_FIELDS.items() if getattr(request, name) != empty]
    found += said.unsupported(request)
    found += multimodal.unsupported(request.mm_features)
    found += pooling.unsupported(request.pooling_params)
    if getattr(request.lora_request, "tensorizer_config_dict", None):  # until vLLM 0.31
        found.append("a LoRA adapter that a tensorizer loads")
    structured = request.structured_output_request
    if structured is not None and not are_plain(structured.reasoning_parser_kwargs):
        found.append(_ODD_PARSER)
    if request.sampling_params is not None:
        found += unsupported_sampling(request.sampling_params)
    return found


def assert_quiet(scheduler: Scheduler) -> None:
    """Raises WrongState, naming the request, if tokens are in flight: a step is under way, of another thread's."""
    for request in scheduler.requests.values():
        for name in _IN_FLIGHT_FIELDS:
            if getattr(request, name) != 0:
                what = f"request {request.request_id} has tokens in flight ({name}): the engine is in a step"
                raise WrongState(what, "try again when no other thread has it take one")


# Fields of a request on its way to the engine core: those of which a new process makes the same request again, …
_CARRIED_NEW_FIELDS = {
    "request_id", "external_req_id", "prompt_token_ids", "sampling_params", "arrival_time", "cache_salt",
    "client_index", "priority", "session_id", "reasoning_ended", "reasoning_parser_kwargs", "lora_request",
    "mm_features", "prompt_embeds", "prompt_is_token_ids",  # by a checkpoint; a record has only that there are some
    "trace_headers", "kv_hints",
}  # fmt: skip
# … those that say nothing about its tokens: what only data parallel engines look at, …
_IRRELEVANT_NEW_FIELDS = {"current_wave"}
# … and those with which it would be another request, or another model's, if a new process went on without them.
_LOST_NEW_FIELDS = {
    "pooling_params": "pooling",
    "data_parallel_rank": "its data parallel rank", "resumable": "its prompt that comes in pieces",
    "abort_immediately": "its transfer of KV",
}  # fmt: skip


def unrecordable(request: EngineCoreRequest) -> list[str]:
    """What this new request has that a new process cannot give it, by name; also fields unknown to this adapter."""
    found = set()
    for name, default in _new_request_defaults().items():
        if name in _CARRIED_NEW_FIELDS or name in _IRRELEVANT_NEW_FIELDS:
            continue
        item = getattr(request, name)
        if item is default or (isinstance(item, (list, dict, bool)) and not item):
            continue
        found.add(_LOST_NEW_FIELDS.get(name, f"the unknown field {name} of vLLM's EngineCoreRequest"))
    if not request.prompt_token_ids and request.prompt_embeds is None:
        found.add("a prompt without token ids")
    if not are_plain(request.reasoning_parser_kwargs):
        found.add(_ODD_PARSER)
    found.update(said.unsupported(request))
    if request.sampling_params is not None:
        found.update(unsupported_sampling(request.sampling_params))
    return sorted(found)


def _new_request_defaults() -> dict:
    """Each field with the value that means nothing; None for those that must be given."""
    fields, defaults = EngineCoreRequest.__struct_fields__, EngineCoreRequest.__struct_defaults__
    return dict.fromkeys(fields) | dict(zip(fields[len(fields) - len(defaults) :], defaults, strict=True))


def request_to_value(request: Request) -> dict:
    bound = ", ".join(bound_to_process(request))
    if request.pooling_params is not None:
        return _pooling_to_value(request, bound)
    hashes = request.block_hashes
    return {
        "id": request.request_id,
        "client_index": request.client_index,
        "priority": _bounded(request.priority),
        "arrival_time": request.arrival_time,
        "status": _STATUS.get(request.status, "waiting"),
        "prompt_token_ids": kept.prompt(request, "i"),
        "output_token_ids": array("i", request._output_token_ids),
        "num_computed_tokens": request.num_computed_tokens,
        "num_preemptions": request.num_preemptions,
        "max_tokens": bounded(request.max_tokens, MOST_TOKENS),
        "block_hashes": b"".join(hashes),
        "block_hash_bytes": len(hashes[0]) if hashes else 0,
        "cache_salt": request.cache_salt,
        "stop_reason": request.stop_reason,
        "sampling": kept.sampling(request),
        "engine": {name: copied(getattr(request, name)) for name in _ENGINE_FIELDS if hasattr(request, name)}
        | _wide_priority(request)
        | {
            "prefill_counted": request.prefill_stats is None,
            "structured": None if bound else grammar.to_value(request, request.status is _COMPILING),
        }
        | _counted_prefill(request)
        | _beside_tokens(request, bound),
    }


def _counted_prefill(request: Request) -> dict:
    """Return how much of the prompt was cached, which the request's first token will tell the front end."""
    counted = request.prefill_stats
    return {"prefill_stats": dict(vars(counted))} if counted is not None and any(vars(counted).values()) else {}


def _restore_counted_prefill(request: Request, engine: dict) -> None:
    """`engine`: of request_to_value(); loses what this takes. Older checkpoints lack the numbers."""
    for name, number in engine.pop("prefill_stats", {}).items():
        setattr(request.prefill_stats, name, number)
    if engine.pop("prefill_counted"):
        request.prefill_stats = None


def _bounded(number: int) -> int:
    return max(-(2**31), min(number, 2**31 - 1))


def _wide_priority(request: Request | EngineCoreRequest) -> dict:
    """A client may choose any priority of 64 bits; the neutral field has 32."""
    return {} if _bounded(request.priority) == request.priority else {"wide_priority": request.priority}


def _beside_tokens(request: Request, bound: str) -> dict:
    """What it has besides its tokens: what its blocks depend on, and what was said of it. Or why it cannot go on
    elsewhere."""
    if bound:
        return {"bound": bound, "other_hash_keys": True}
    adapter, inputs = adapters.to_value(request.lora_request), Inputs.of(request)
    other = adapter is not None or bool(inputs)
    return {"adapter": adapter, "other_hash_keys": other, "said": said.to_value(request)} | inputs.to_value()


def moved_request(value: dict, block_hasher) -> Request:
    """As request_from_value(), of a request that stood elsewhere: in another engine, or in this one, which it left. It
    waits, and has nothing of its place there. Raises Incompatible."""
    engine = {name: item for name, item in value["engine"].items() if name not in _ENGINE_FIELDS}
    keys = {"block_hashes": b"", "block_hash_bytes": 0}  # made anew: other engines may hash otherwise
    request = request_from_value(value | keys | {"engine": engine, "num_computed_tokens": 0}, block_hasher)
    for name, item in value["engine"].items():
        if name in _ENGINE_FIELDS and name not in _PLACE_FIELDS and (hasattr(request, name) or name == FORKED):
            setattr(request, name, item)
    if not request.use_structured_output:
        request.status = RequestStatus.WAITING
    return request


def put_pooling_back(scheduler: Scheduler) -> bool:
    """Let pooling requests that run wait again, without KV, as if vLLM had lacked blocks for them. Return whether there
    were any."""
    pooling_requests = [request for request in scheduler.running if request.pooling_params is not None]
    for request in reversed(pooling_requests):
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    return bool(pooling_requests)


def _pooling_to_value(request: Request, bound: str) -> dict:
    """What it was asked: a new process begins it again."""
    sampling = sampling_to_value(SamplingParams(max_tokens=request.max_tokens))
    value = unstarted_request(request.request_id, token_ids(request), sampling, request.arrival_time)
    value["engine"]["pooling"] = "" if bound else pooling.to_value(request.pooling_params)
    value["engine"] |= _beside_tokens(request, bound) | _wide_priority(request)
    return value | {
        "client_index": request.client_index,
        "priority": _bounded(request.priority),
        "cache_salt": request.cache_salt,
    }


def not_taken(request: Request, vllm_config) -> str | None:
    """Why an engine with this configuration would compute something else for it."""
    model, reasoning = vllm_config.model_config, vllm_config.reasoning_config
    if request.prompt_embeds is not None and not model.enable_prompt_embeds:
        return "its prompt has embeddings, and this engine takes none: start it with enable_prompt_embeds"
    params = request.sampling_params
    if getattr(params, "trace_decode_token_ids", None) and not model.enable_trace_replay:
        return "it follows given tokens, and this engine does not: start it with enable_trace_replay"
    has_budget = getattr(params, "thinking_token_budget", None) is not None
    if has_budget and (reasoning is None or not reasoning.enabled):
        return (
            "it has a thinking budget, and this engine has no reasoning_config: start it with reasoning_parser or "
            "reasoning_config"
        )
    return None


def request_from_value(value: dict, block_hasher) -> Request:
    """A new Request, its grammar not compiled yet.

    Raises Incompatible when its block hashes come out otherwise than they were.
    """
    engine = dict(value["engine"])
    # Absent in older ones.
    added = ("structured", "adapter", "features", "embeddings", "pooling", "bound", "elsewhere", "said")
    beside = {
        name: engine.pop(name, None) for name in (*added, "features_elsewhere", "other_hash_keys", "wide_priority")
    }
    structured, pooled = beside["structured"], beside["pooling"]
    if (bound := beside["bound"]) is not None:
        raise Incompatible(f"request {value['id']}: {bound} could not leave the process that slept", "send it again")
    if beside["elsewhere"] or beside["features_elsewhere"]:
        raise Incompatible(
            f"request {value['id']}: its {beside['elsewhere'] or 'images'} are in no checkpoint", "send it again"
        )
    request = Request(
        request_id=value["id"],
        sampling_params=None if pooled else sampling_from_value(value["sampling"]),
        pooling_params=pooling.from_value(pooled),
        client_index=value["client_index"],
        arrival_time=value["arrival_time"],
        cache_salt=value["cache_salt"],
        priority=value["priority"] if beside["wide_priority"] is None else beside["wide_priority"],
        block_hasher=block_hasher,
        lora_request=adapters.from_value(beside["adapter"]),
        **Inputs.from_value(beside).arguments(list(value["prompt_token_ids"])),
        **grammar.from_value(structured),
    )
    said.restore(request, beside["said"])
    if len(value["output_token_ids"]) > 0:
        request.append_output_token_ids(list(value["output_token_ids"]))
    if not b"".join(request.block_hashes).startswith(value["block_hashes"]):  # tokens that were given since have more
        raise Incompatible(
            f"request {value['id']}: its block hashes come out otherwise in this engine",
            "use the same prefix caching settings and PYTHONHASHSEED",
        )
    if structured is None or not structured["compiling"] or request.num_output_tokens > 0:
        request.status = _STATUS_BACK[value["status"]]
    for name in ("num_computed_tokens", "num_preemptions", "max_tokens", "stop_reason"):
        setattr(request, name, value[name])
    _restore_counted_prefill(request, engine)
    for name, item in engine.items():
        setattr(request, name, item)
    return request


def new_request_to_value(request: EngineCoreRequest) -> dict:
    """A request on its way to the engine core, as request_to_value() would give it there before its first step."""
    sampling = sampling_to_value(request.sampling_params)
    value = unstarted_request(request.request_id, token_ids(request), sampling, request.arrival_time)
    value["engine"] |= {
        "session_id": request.session_id,
        "structured": grammar.new_to_value(request),
        "adapter": adapters.to_value(request.lora_request),
        "said": said.to_value(request),
    } | _wide_priority(request)
    if inputs := Inputs.of(request):
        value["engine"]["elsewhere"] = "embeddings" if inputs.embeddings is not None else "images"
    return value | {
        "client_index": request.client_index,
        "priority": _bounded(request.priority),
        "cache_salt": request.cache_salt,
    }


def unrestorable_request_to_value(request: EngineCoreRequest) -> dict:
    """Enough to tell which request it was, for one that is not begun again: nothing of it may be missing by mistake."""
    sampling = sampling_to_value(SamplingParams(max_tokens=request.sampling_params.max_tokens))
    return unstarted_request(request.request_id, request.prompt_token_ids or [0], sampling, request.arrival_time)


def unstarted_request(request_id: str, prompt_token_ids: list[int], sampling: dict, arrival_time: float) -> dict:
    return {
        "id": request_id,
        "client_index": 0,
        "priority": 0,
        "arrival_time": arrival_time,
        "status": "waiting",
        "prompt_token_ids": array("i", prompt_token_ids),
        "output_token_ids": array("i"),
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "max_tokens": sampling["max_tokens"],
        "block_hashes": b"",
        "block_hash_bytes": 0,
        "cache_salt": None,
        "stop_reason": None,
        "sampling": sampling,
        "engine": {"prefill_counted": False},
    }


def drop_from_workers(checkpoint: dict) -> None:
    """Remove from the workers' state the requests that have ended since, or whose tokens then do not begin those now.

    The C++ code that rolls a checkpoint forward has removed their rows. It does not know the state that workers also
    keep of requests without a row.
    """
    requests = {item["id"]: item for item in checkpoint["scheduler"]["requests"]}
    for worker in checkpoint["workers"]:
        rows = set(worker["rows"])
        worker["engine"]["requests"] = [
            item
            for item in worker["engine"]["requests"]
            if item["id"] in rows or _goes_on_from(item, requests.get(item["id"]))
        ]


def _goes_on_from(of_worker: dict, request: dict | None) -> bool:
    """Whether a worker's state of a request is the beginning of what the request is now."""
    if request is None or (request["status"] == "waiting" and len(request["output_token_ids"]) == 0):
        return False  # a new request may have the id of one that has ended
    tokens = list(of_worker["output_token_ids"])
    same_prompt = list(of_worker["prompt_token_ids"]) == list(request["prompt_token_ids"])
    return same_prompt and list(request["output_token_ids"][: len(tokens)]) == tokens


def given_since(checkpoint: dict) -> list[dict]:
    """Requests with more output tokens than the workers of the checkpoint know; `drawn`: how many more.

    After drop_from_workers(). The last worker is of the last stage of a pipeline, which samples; others may hear of
    tokens a step later.
    """
    known = {item["id"]: len(item["output_token_ids"]) for item in checkpoint["workers"][-1]["engine"]["requests"]}
    given = []
    for item in checkpoint["scheduler"]["requests"]:
        drawn = len(item["output_token_ids"]) - known.get(item["id"], 0)
        if drawn > 0:
            given.append({
                "id": item["id"],
                "prompt_token_ids": array("q", item["prompt_token_ids"]),
                "output_token_ids": array("q", item["output_token_ids"]),
                "sampling": item["sampling"],
                "adapter": item["engine"].get("adapter"),
                "groups": len(checkpoint["kv"]["groups"]),
                "drawn": drawn,
            })  # fmt: skip
    return given


# Counters of the scheduler that decide about later steps; not every version of vLLM has all.
_COUNTERS = (
    "current_step", "sched_step_seq", "processed_step_seq", "prefill_capacity_bound", "last_prefill_step",
    "num_executed_steps",
)  # fmt: skip


def scheduler_to_value(scheduler: Scheduler) -> dict:
    return {
        "policy": scheduler.policy.value,
        "requests": [request_to_value(request) for request in scheduler.requests.values()],
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "held": [request.request_id for request in scheduler.kv_holding_waiting],
        "finished": sorted(scheduler.finished_req_ids),
        "engine": {name: getattr(scheduler, name) for name in _COUNTERS if hasattr(scheduler, name)}
        | {
            "prev_step_scheduled": sorted(scheduler.prev_step_scheduled_req_ids),
            "reset_preempted": sorted(scheduler.reset_preempted_req_ids),
            "inflight_prefills": [request.request_id for request in scheduler._inflight_prefills],
            "spec_token_placeholders": copied(getattr(scheduler, "_spec_token_placeholders", None)),
            "deferred": sorted(request.request_id for request in scheduler.deferred_waiting),
        }
        | ({} if connector_adapters.keys_of(scheduler) is None else {"adapters_in_keys": True}),
    }


def scheduler_from_value(scheduler: Scheduler, value: dict, requests: dict[str, Request]) -> None:
    """Fills an empty scheduler. `requests` are those that could be rebuilt; ids of others are left out."""

    def alive(ids):
        return [requests[request_id] for request_id in ids if request_id in requests]

    engine = value["engine"]  # empty in a checkpoint without requests
    scheduler.requests.update(
        (item["id"], requests[item["id"]]) for item in value["requests"] if item["id"] in requests
    )
    scheduler.running.extend(alive(value["running"]))
    for request in alive(value["waiting"]):
        scheduler.waiting.add_request(request)
    for request in alive(value["held"]):
        scheduler.kv_holding_waiting.add_request(request)
    scheduler.finished_req_ids.update(value["finished"])
    for name in _COUNTERS:
        if name in engine:
            setattr(scheduler, name, engine[name])
    scheduler.prev_step_scheduled_req_ids.update(engine.get("prev_step_scheduled", ()))
    scheduler.reset_preempted_req_ids.update(engine.get("reset_preempted", ()))
    scheduler._inflight_prefills.update(alive(engine.get("inflight_prefills", ())))
    scheduler.deferred_waiting.update(alive(engine.get("deferred", ())))  # absent in older checkpoints, as is the next
    if (placeholders := engine.get("spec_token_placeholders")) is not None:
        scheduler._spec_token_placeholders = list(placeholders)


def empty_scheduler(scheduler: Scheduler) -> None:
    """Takes out what scheduler_from_value() put in. The block pool is emptied by pool_values.empty_pool()."""
    scheduler.requests.clear()
    scheduler.running.clear()
    for queue in (scheduler.waiting, scheduler.kv_holding_waiting):
        queue.remove_requests(list(queue))
    scheduler.finished_req_ids.clear()
    scheduler.prev_step_scheduled_req_ids.clear()
    scheduler.reset_preempted_req_ids.clear()
    scheduler._inflight_prefills.clear()
    scheduler.deferred_waiting.clear()
    scheduler.reset_encoder_cache()
