# SPDX-License-Identifier: Apache-2.0
"""Inputs of an engine as events, for `python -m torpor.vllm.replay`: what each request asked, when, and its answer.

With the option `record_inputs` alone: prompts and answers are private, and go wherever the events go.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence

from torpor import _core
from torpor.vllm.inputs import Inputs
from torpor.vllm.options import Options
from torpor.vllm.scheduler_values import bound_to_process
from torpor.vllm.slots import begin_events
from torpor.vllm.values import sampling_to_value

logger = logging.getLogger("vllm.torpor")

ENGINE, REQUEST, TOKENS, ABORT, ANSWER = "vllm engine", "vllm request", "vllm tokens", "vllm abort", "vllm answer"
_TOKENS_AT_ONCE = 500  # a text of an event has at most 8 KiB


class RecordedInputs:
    """Of one scheduler."""

    def __init__(self, scheduler):
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
        """Before the step after this one the request is there."""
        self._live[request.request_id] = request
        words = {"id": request.request_id, "step": step, "priority": request.priority, "salt": request.cache_salt}
        prompt, why = list(request.prompt_token_ids or []), self._not_replayable(request)
        if why is None:
            words["sampling"] = sampling_to_value(request.sampling_params)
            why = None if _is_small(words) else "its sampling parameters"
        if why is not None:
            words = {"id": request.request_id, "step": step, "not_replayable": why}
        self._write(REQUEST, words | {"tokens": len(prompt)})
        self._write_tokens(request.request_id, prompt)

    def abort(self, request_ids: str | Iterable[str] | None, step: int) -> None:
        """None: all of them."""
        ids = (
            [request_ids] if isinstance(request_ids, str) else list(self._live if request_ids is None else request_ids)
        )
        for request_id in ids:
            if request_id in self._live:
                self._write(ABORT, {"id": request_id, "step": step})

    def look(self) -> None:
        """Write the answers of requests that have ended."""
        for request in [request for request in self._live.values() if request.is_finished()]:
            del self._live[request.request_id]
            tokens = list(request.output_token_ids)
            self._write(ANSWER, {"id": request.request_id, "status": request.status.name, "tokens": len(tokens)})
            self._write_tokens(request.request_id, tokens)

    @staticmethod
    def _not_replayable(request) -> str | None:
        if request.sampling_params is None:
            return "pooling"
        if Inputs.of(request):
            return "images or embeddings in its prompt"
        if request.lora_request is not None:
            return "its LoRA adapter"
        return next(iter(bound_to_process(request)), None)

    def _write_tokens(self, request_id: str, tokens: Sequence[int]) -> None:
        for first in range(0, len(tokens), _TOKENS_AT_ONCE):
            self._write(TOKENS, {"id": request_id, "first": first, "tokens": tokens[first : first + _TOKENS_AT_ONCE]})

    @staticmethod
    def _write(kind: str, words: dict) -> None:
        _core.record_input(kind, json.dumps(words, separators=(",", ":")))


def engine_options(vllm_config) -> dict:
    """What an engine needs to answer as this one does, as arguments of vLLM's LLM."""
    model, cache, scheduling = vllm_config.model_config, vllm_config.cache_config, vllm_config.scheduler_config
    return {
        "model": model.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": model.seed,
        "max_model_len": model.max_model_len,
        "enforce_eager": model.enforce_eager,
        "max_num_seqs": scheduling.max_num_seqs,
        "max_num_batched_tokens": scheduling.max_num_batched_tokens,
        "async_scheduling": bool(scheduling.async_scheduling),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "block_size": cache.block_size,
        "num_gpu_blocks_override": cache.num_gpu_blocks,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
    }


def _is_small(words: dict) -> bool:
    try:
        return len(json.dumps(words)) < 8000
    except (TypeError, ValueError):
        return False
