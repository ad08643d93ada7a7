# SPDX-License-Identifier: Apache-2.0
"""The requests that the tests put to an engine, and what is compared of their answers."""

from __future__ import annotations

import msgspec
import gpu_path
from vllm import PoolingRequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

SHARED = "In a small town by the sea there lived an old clock maker who had never once been late for anything. " * 4


def _params(**options) -> SamplingParams:
    values = {"max_tokens": 40, "ignore_eos": True} | options
    if gpu_path.active():  # each step takes longer there
        values["max_tokens"] = values["max_tokens"] * 3 // 5
    return SamplingParams(**values)


# What is said of a request and no token depends on: it travels with it (torpor/vllm/said.py).
SAID = {
    "trace_headers": {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"},
    "kv_hints": KvHintsEnvelope("1", "message", [KvHintAction("action", "pin", "2", {"tokens": [1, 2], "of": None})]),
}
OF_TRANSFERS = {
    "kv_transfer_params": {"do_remote_decode": False, "remote": [1, {"block": 2.5}]},
    "ec_transfer_params": {"image": ["a", None]},
}

# Greedy, seeded, unseeded; shared prefixes; n > 1; stop strings; penalties; log probabilities; prompts of many chunks.
REQUESTS = {
    "greedy": ("The capital of France is", _params(temperature=0, extra_args=OF_TRANSFERS)),
    "seeded": ("Once upon a time", _params(temperature=1.0, seed=7)),
    "unseeded": ("My name is", _params(temperature=1.0)),
    "prefix-a": (SHARED + "He said", _params(temperature=0, max_tokens=30)),
    "prefix-b": (SHARED + "She said", _params(temperature=0.9, top_k=50, top_p=0.9)),
    "two": ("Write a poem:", _params(temperature=1.0, n=2, seed=11, max_tokens=25)),
    "stops": (
        "one two three",
        _params(
            temperature=1.0, seed=3, stop=["e", "zz"], logprobs=3, flat_logprobs=True, max_tokens=60, min_tokens=12
        ),
    ),
    "penalties": (
        "la la la la",
        _params(temperature=0.7, seed=5, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3),
    ),
    "bias": (
        "numbers:",
        _params(temperature=1.0, min_p=0.01, min_tokens=5, logit_bias={100: 2.0, 200: -5.0}, logprobs=1),
    ),
    "long": ("foo bar " * 150, _params(temperature=0, prompt_logprobs=1, max_tokens=20)),
    "long-seeded": ("bar foo " * 100, _params(temperature=0.8, seed=13, max_tokens=15)),
    "short": ("Hi", _params(temperature=0, max_tokens=3)),
}
FURTHER = {"greedy": SAID}  # arguments of add_request(), besides


def _position(entry) -> dict | None:
    return (
        None
        if entry is None
        else {token: (item.logprob, item.rank, item.decoded_token) for token, item in entry.items()}
    )


def _positions(logprobs) -> list | dict | None:
    if isinstance(logprobs, FlatLogprobs):
        return {name: list(items) for name, items in vars(logprobs).items()}
    return logprobs and [_position(entry) for entry in logprobs]


def answer(output) -> list:
    """All of a RequestOutput that its reader sees, as plain values that survive JSON.

    Of a pooling request its vector, or the number and the mean of its vectors: batches decide about the last digits,
    which are left out.
    """
    if isinstance(output, PoolingRequestOutput):
        data = output.outputs.data
        rows, vector = ([len(data)], data.mean(0)) if data.dim() > 1 else ([], data.flatten())
        return [output.finished, [[0, rows + [round(number, 4) for number in vector.tolist()]]], None]
    completions = [
        [
            c.index,
            list(c.token_ids),
            c.text,
            c.finish_reason,
            c.stop_reason,
            c.cumulative_logprob,
            _positions(c.logprobs),
            c.sampling_mask and c.sampling_mask.token_ids,
        ]
        for c in output.outputs
    ]
    scores = getattr(output, "prompt_token_id_logprobs", None)  # vLLM 0.31 has none
    of_prompt = _positions(output.prompt_logprobs) if scores is None else scores.tolist()
    return [output.finished, sorted(completions, key=lambda c: c[0]), of_prompt]


def add_requests(engine, names=None, max_tokens: int | None = None, requests: dict | None = None) -> None:
    """`requests`: by name, each a prompt, its parameters and, if there are any, further arguments of add_request()."""
    requests = requests or {name: (*request, FURTHER.get(name, {})) for name, request in REQUESTS.items()}
    for name in names or requests:
        prompt, params, *further = requests[name]
        if max_tokens is not None:
            params = params.clone()
            params.max_tokens = max_tokens
        engine.add_request(name, prompt, params, **(further[0] if further else {}))


def said_of(core, name: str) -> dict:
    """What the request of this name has in the scheduler, as values that survive JSON; empty: it has ended."""
    found = [each for each in core.scheduler.requests.values() if each.request_id.rsplit("-", 1)[0] == name]
    return {key: msgspec.to_builtins(getattr(found[0], key)) for key in (*SAID, *OF_TRANSFERS)} if found else {}


def run(engine, steps: int | None = None) -> dict:
    """The latest answer of each request that came in within `steps` engine steps."""
    answers, made = {}, 0
    while engine.has_unfinished_requests() and (steps is None or made < steps):
        for output in engine.step():
            answers[output.request_id] = answer(output)
        made += 1
    return answers


def final(answers: dict) -> dict:
    return {name: value for name, value in answers.items() if value[0]}
