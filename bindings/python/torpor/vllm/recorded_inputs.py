# SPDX-License-Identifier: Apache-2.0
"""Inputs of an engine as events, for `python -m torpor.vllm.replay`: what each request asked, when, and its answer.

With the option `record_inputs` alone: prompts and answers are private, and go wherever the events go.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torpor import _core
from torpor.vllm.inputs import Inputs
from torpor.vllm.options import Options
from torpor.vllm.scheduler_values import bound_to_process
from torpor.vllm.slots import begin_events
from torpor.vllm.values import sampling_to_value

logger = logging.getLogger("vllm.torpor")

ENGINE, REQUEST, TOKENS, ABORT, ANSWER = "vllm engine", "vllm request", "vllm tokens", "vllm abort", "vllm answer"
_TOKENS_AT_ONCE = 500  # a text of an event has at most 8 KiB
_MOST_NAME = 256  # characters of a text that a client may choose


class RecordedInputs:
    """Of one scheduler."""

    def __init__(self, scheduler):
        self._requests = scheduler.requests
        self._live: dict = {}  # requests that have not ended, by id
        self._write(ENGINE, engine_options(scheduler.vllm_config))

    @staticmethod
    def of(scheduler) -> RecordedInputs | None:
        """None: they are not recorded."""
        options = Options.of(scheduler.vllm_config)
        if not options.record_inputs or not begin_events(scheduler.vllm_config, "core"):
            return None
        logger.warning(
            "torpor records the prompts and answers of all requests in %s (record_inputs): whoever has a copy of these "
            "events can read them",
            options.events_dir,
        )
        return RecordedInputs(scheduler)

    def add(self, request, step: int) -> None:
        """Before the step after this one the request is there. A further piece of a request's prompt is none."""
        if not self._has(request):
            return
        self._live[request.request_id] = request
        name = _name_of(request)
        words = {"id": name, "step": step, "priority": request.priority, "salt": request.cache_salt}
        prompt, why = list(request.prompt_token_ids or []), self._not_replayable(request)
        if why is None:
            words["sampling"] = sampling_to_value(request.sampling_params)
            why = None if _is_small(words) else "its sampling parameters"
        if why is not None:
            words = {"id": name, "step": step, "not_replayable": why[:_MOST_NAME]}
        self._write(REQUEST, words | {"tokens": len(prompt)})
        self._write_tokens(name, prompt)

    def abort(self, request_ids: str | Iterable[str] | None, step: int) -> None:
        """None: all of them."""
        ids = (
            [request_ids] if isinstance(request_ids, str) else list(self._live if request_ids is None else request_ids)
        )
        for request_id in ids:
            if (request := self._live.get(request_id)) is not None:
                self._write(ABORT, {"id": _name_of(request), "step": step})

    def look(self) -> None:
        """Write the answers of requests that have ended. Forget those that left without an end, as by a wake."""
        gone = [each for each in self._live.values() if each.is_finished() or not self._has(each)]
        for request in gone:
            del self._live[request.request_id]
            if not request.is_finished():
                continue
            name, tokens = _name_of(request), list(request.output_token_ids)
            self._write(ANSWER, {"id": name, "status": request.status.name, "tokens": len(tokens)})
            self._write_tokens(name, tokens)

    def _has(self, request) -> bool:
        return self._requests.get(request.request_id) is request

    @staticmethod
    def _not_replayable(request) -> str | None:
        if request.sampling_params is None:
            return "pooling"
        if Inputs.of(request):
            return "images or embeddings in its prompt"
        if request.lora_request is not None:
            return "its LoRA adapter"
        if request.num_output_tokens > 0:  # of a fork, or from an image
            return "the tokens of its answer that it came with"
        return next(iter(bound_to_process(request)), None)

    def _write_tokens(self, name: str, tokens: Sequence[int]) -> None:
        for first in range(0, len(tokens), _TOKENS_AT_ONCE):
            self._write(TOKENS, {"id": name, "first": first, "tokens": tokens[first : first + _TOKENS_AT_ONCE]})

    @staticmethod
    def _write(kind: str, words: dict) -> None:
        _core.record_input(kind, json.dumps(words, separators=(",", ":")))


def engine_options(vllm_config) -> dict:
    """Return arguments of vLLM's LLM with which an engine answers as this one does; and NOT_GIVEN, if it has some."""
    options = {name: item for name, value in ENGINE_OPTIONS.items() if (item := value(vllm_config)) is not None}
    names = not_given(vllm_config)
    for name in names:
        options.pop(name, None)
    return options | ({NOT_GIVEN: names} if names else {})


def not_given(vllm_config) -> list[str]:
    """Options that change tokens and that no recording gives to another engine: they name code, or are too long."""
    model, structured = vllm_config.model_config, vllm_config.structured_outputs_config
    speculation = vllm_config.speculative_config
    found = {
        "logits_processors": bool(model.logits_processors),
        "model_class_overrides": bool(getattr(model, "model_class_overrides", None)),
        "reasoning_parser_plugin": bool(getattr(structured, "reasoning_parser_plugin", None)),
        "hf_overrides": bool(model.hf_overrides)
        and not (isinstance(model.hf_overrides, dict) and _is_small(model.hf_overrides, 4000)),
        "speculative_config": speculation is not None and speculation.method not in SPECULATION_METHODS,
    }
    return [name for name, is_so in found.items() if is_so]


def _speculation(vllm_config) -> dict | None:
    fields = _fields(vllm_config.speculative_config, SPECULATION_FIELDS)
    if fields and fields.get("model") == vllm_config.model_config.model:  # vLLM finds it there, wherever that lies then
        del fields["model"]
    return fields


# Fields that are given again, of structured_outputs_config and of speculative_config.
STRUCTURED_FIELDS = (
    "backend", "disable_any_whitespace", "disable_additional_properties", "reasoning_parser", "enable_in_reasoning",
)  # fmt: skip
SPECULATION_FIELDS = (
    "method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "quantization", "revision",
    "rejection_sample_method", "parallel_drafting", "num_speculative_tokens_per_batch_size",
)  # fmt: skip
SPECULATION_METHODS = ("ngram", "ngram_gpu", "draft_model", "eagle", "eagle3", "mtp", "suffix")


def _fields(config, names: Sequence[str]) -> dict | None:
    if config is None:
        return None
    return {name: item for name in names if (item := getattr(config, name, None)) is not None}


ENGINE_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "model": lambda config: config.model_config.model,
    "revision": lambda config: config.model_config.revision,
    "dtype": lambda config: str(config.model_config.dtype).removeprefix("torch."),
    "quantization": lambda config: config.model_config.quantization,
    "seed": lambda config: config.model_config.seed,
    "max_model_len": lambda config: config.model_config.max_model_len,
    "enforce_eager": lambda config: config.model_config.enforce_eager,
    "max_num_seqs": lambda config: config.scheduler_config.max_num_seqs,
    "max_num_batched_tokens": lambda config: config.scheduler_config.max_num_batched_tokens,
    "scheduling_policy": lambda config: config.scheduler_config.policy,
    "async_scheduling": lambda config: bool(config.scheduler_config.async_scheduling),
    "enable_prefix_caching": lambda config: bool(config.cache_config.enable_prefix_caching),
    "kv_cache_dtype": lambda config: config.cache_config.cache_dtype,
    "block_size": lambda config: config.cache_config.block_size,
    "num_gpu_blocks_override": lambda config: config.cache_config.num_gpu_blocks,
    "tensor_parallel_size": lambda config: config.parallel_config.tensor_parallel_size,
    "pipeline_parallel_size": lambda config: config.parallel_config.pipeline_parallel_size,
    "enable_chunked_prefill": lambda config: bool(config.scheduler_config.enable_chunked_prefill),
    "long_prefill_token_threshold": lambda config: config.scheduler_config.long_prefill_token_threshold,
    "max_logprobs": lambda config: config.model_config.max_logprobs,
    "hf_overrides": lambda config: config.model_config.hf_overrides or None,
    "structured_outputs_config": lambda config: _fields(config.structured_outputs_config, STRUCTURED_FIELDS),
    "speculative_config": lambda config: _speculation(config),
    # Not every version of vLLM has these.
    "enable_trace_replay": lambda config: getattr(config.model_config, "enable_trace_replay", None) or None,
    "use_fp64_gumbel": lambda config: getattr(config.model_config, "use_fp64_gumbel", None) or None,
}
NOT_GIVEN = "not_given"  # the key of not_given() beside them


def _name_of(request) -> str:
    """Return the id of a request; of a long one, as a client may choose it, the beginning and a digest."""
    name = request.request_id
    if len(name) <= _MOST_NAME:
        return name
    return f"{name[:_MOST_NAME]}-{hashlib.sha256(name.encode(errors='backslashreplace')).hexdigest()}"


def _is_small(words: dict, most: int = 8000) -> bool:
    try:
        return len(json.dumps(words)) < most
    except (TypeError, ValueError):
        return False
