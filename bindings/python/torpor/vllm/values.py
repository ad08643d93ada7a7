# SPDX-License-Identifier: Apache-2.0
"""vLLM's per-request objects as plain values and back: SamplingParams, tensors, log probabilities, completions."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, overload

import msgspec
import numpy as np
import torch
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, SamplingMask
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplingMaskLists

from torpor.errors import Unsupported
from torpor.vllm import adapters, grammar
from torpor.vllm.compat import lookup

WeightVersionSpan = lookup("vllm.outputs", "WeightVersionSpan")

# Fields of SamplingParams that torpor knows by the same name, with what stands for vLLM's None.
_NEUTRAL: dict[str, list | None] = {
    "n": None, "temperature": None, "top_p": None, "top_k": None, "min_p": None, "presence_penalty": None,
    "frequency_penalty": None, "repetition_penalty": None, "seed": None, "stop": [], "stop_token_ids": [],
    "max_tokens": None, "min_tokens": None, "ignore_eos": None, "logprobs": None, "prompt_logprobs": None,
}  # fmt: skip
MOST_TOKENS = 2**31 - 1
_MOST_WIDE = 2**63 - 1
_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_DEFAULTS = SamplingParams()
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
}


def sampling_to_value(params: SamplingParams) -> dict:
    """The neutral fields, and under "engine" all others that differ from vLLM's default."""
    value = {name: getattr(params, name) for name in _NEUTRAL}
    for name in ("top_k", "max_tokens", "min_tokens"):  # more than any vocabulary, or any answer, has: the same
        value[name] = bounded(value[name], MOST_TOKENS)
    value["stop"] = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
    value["stop_token_ids"] = list(params.stop_token_ids or [])
    engine: dict[str, Any] = {
        "stop_is_none": params.stop is None, "stop_token_ids_is_none": params.stop_token_ids is None,
    }  # fmt: skip
    if (seed := params.seed) is not None and seed > _MOST_WIDE:
        value["seed"], engine["wide_seed"] = _MOST_WIDE, str(seed)
    for name in params.__struct_fields__:
        item, default = getattr(params, name), getattr(_DEFAULTS, name)
        if name in _NEUTRAL or item is default or (not isinstance(item, np.ndarray) and item == default):
            continue
        if name == "output_kind":
            item = item.value
        elif name == "_all_stop_token_ids":
            item = sorted(item)
        elif name == "logit_bias":
            item = [[token, bias] for token, bias in item.items()]
        elif name == "structured_outputs":
            item = grammar.params_to_value(item)
        elif name == "repetition_detection":
            item = {part: bounded(number) for part, number in asdict(item).items()}
        elif name == "extra_args" and (item := _options_to_value(item)) is None:  # unsupported_sampling() names it
            continue
        elif name == "prompt_logprob_token_ids":
            item = tensor_to_value(torch.from_numpy(item))
        engine[name] = bounded(item)
    return value | {"engine": engine}


def bounded(item, most: int = _MOST_WIDE):
    """A number as the format has room for it, where more means the same; all else as it is."""
    return min(item, most) if isinstance(item, int) and not isinstance(item, bool) else item


def sampling_from_value(value: dict) -> SamplingParams:
    engine = dict(value["engine"])
    wide_seed = engine.pop("wide_seed", None)
    stop_is_none, ids_are_none = engine.pop("stop_is_none"), engine.pop("stop_token_ids_is_none")
    params = SamplingParams()
    for name in _NEUTRAL:
        setattr(params, name, value[name])
    if wide_seed is not None and params.seed == _MOST_WIDE:  # a fork may have another one
        params.seed = int(wide_seed)
    params.stop = None if stop_is_none else list(value["stop"])
    params.stop_token_ids = None if ids_are_none else list(value["stop_token_ids"])
    for name, item in engine.items():
        if name == "output_kind":
            item = RequestOutputKind(item)
        elif name == "_all_stop_token_ids":
            item = set(item)
        elif name == "logit_bias":
            item = {token: bias for token, bias in item}
        elif name == "structured_outputs":
            item = grammar.params_from_value(item)
        elif name == "repetition_detection":
            item = RepetitionDetectionParams(**item)
        elif name == "extra_args":
            item = json.loads(item) if isinstance(item, str) else msgspec.msgpack.decode(item)
        elif name == "prompt_logprob_token_ids":
            item = tensor_from_value(item).numpy()
        setattr(params, name, item)
    return params


def unsupported_sampling(params: SamplingParams) -> list[str]:
    """Names of parameters that no checkpoint can hold."""
    if params.extra_args is None or _options_to_value(params.extra_args) is not None:
        return []
    return ["sampling parameter extra_args with what is no plain value"]


def _options_to_value(options: dict) -> str | bytes | None:
    """As JSON; as msgpack where JSON does not bring it back (bytes, keys that are numbers); None where neither does."""
    if are_plain(options):
        return json.dumps(options)
    try:
        packed = msgspec.msgpack.encode(options)
        return packed if bool(msgspec.msgpack.decode(packed) == options) else None
    except (TypeError, ValueError, OverflowError):
        return None


def copied(item):
    """What the engine may change: a state is read when it has gone on."""
    return list(item) if isinstance(item, list) else item


def are_plain(options: dict | None) -> bool:
    """Whether JSON brings them back as they are."""
    try:
        return options is None or json.loads(json.dumps(options)) == options
    except (TypeError, ValueError):
        return False


def tensor_to_value(tensor: torch.Tensor) -> dict:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "bytes": flat.view(torch.uint8).numpy().tobytes()}


def tensor_from_value(value: dict) -> torch.Tensor:
    content = torch.from_numpy(np.frombuffer(value["bytes"], dtype=np.uint8).copy())
    return content.view(_DTYPES[value["dtype"]]).reshape(value["shape"])


def logprobs_tensors_to_value(tensors: LogprobsTensors | None) -> list | None:
    if tensors is None:
        return None
    if tensors.cu_num_generated_tokens is not None or tensors.cu_num_generated_tokens_tensor is not None:
        raise Unsupported(
            "prompt log probabilities with token boundaries are in progress", "sleep after this prompt was processed"
        )
    return [tensor_to_value(t) for t in tensors[:3]]


@overload
def logprobs_tensors_from_value(value: list) -> LogprobsTensors: ...
@overload
def logprobs_tensors_from_value(value: None) -> None: ...
def logprobs_tensors_from_value(value: list | None) -> LogprobsTensors | None:
    return None if value is None else LogprobsTensors(*(tensor_from_value(item) for item in value))


def masks_to_value(chunks: list[SamplingMaskLists]) -> list[list[list[int]]]:
    """Of each step, and each token that it gave: which tokens it was drawn from."""
    return [chunk.to_nested_list() for chunk in chunks]


def masks_from_value(value: list[list[list[int]]]) -> list[SamplingMaskLists]:
    chunks = []
    for positions in value:
        tokens = np.array([token for position in positions for token in position], dtype=np.int32)
        ends = np.cumsum([0, *map(len, positions)], dtype=np.int64)
        chunks.append(SamplingMaskLists(tokens, ends))
    return chunks


def positions_to_value(positions) -> list | dict | None:
    """Log probabilities by position: each None, or a list of [token, logprob, rank, text]. Flat ones: lists by name."""
    if positions is None:
        return None
    if isinstance(positions, FlatLogprobs):
        return {name: list(items) for name, items in vars(positions).items()}
    return [
        None if p is None else [[token, item.logprob, item.rank, item.decoded_token] for token, item in p.items()]
        for p in positions
    ]


def positions_from_value(value: list | dict | None):
    if value is None:
        return None
    if isinstance(value, dict):
        return FlatLogprobs(**value)
    return [
        None if p is None else {token: Logprob(logprob, rank, text) for token, logprob, rank, text in p} for p in value
    ]


def completion_to_value(output: CompletionOutput | None) -> dict | None:
    if output is None:
        return None
    versions = getattr(output, "weight_versions", None)
    return {
        "index": output.index,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "cumulative_logprob": output.cumulative_logprob,
        "logprobs": positions_to_value(output.logprobs),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "weight_versions": None if versions is None else [[s.version, s.start, s.end] for s in versions],
        "sampling_mask": None if output.sampling_mask is None else output.sampling_mask.token_ids,
        "adapter": adapters.to_value(output.lora_request),
    }


def completion_from_value(value: dict | None) -> CompletionOutput | None:
    if value is None:
        return None
    fields = value | {"logprobs": positions_from_value(value["logprobs"])}
    versions = fields.pop("weight_versions", None)  # absent in older checkpoints, as are the next two
    fields["lora_request"] = adapters.from_value(fields.pop("adapter", None))
    if (mask := fields.pop("sampling_mask", None)) is not None:
        fields["sampling_mask"] = SamplingMask(mask)
    if versions is not None:
        fields["weight_versions"] = [WeightVersionSpan(*span) for span in versions]
    return CompletionOutput(**fields)
