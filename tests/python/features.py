# SPDX-License-Identifier: Apache-2.0
"""Features of vLLM that change what engines keep of requests: how to switch each on, and requests that use it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gpu_path
from feature_models import ADAPTERS, beside, with_adapters, with_draft_model, with_eagle_head, with_vision
from grouped_models import MODELS
from tiny_model import NAMED, make_model

WAYS = ("in process", "new process", "take-over")


@dataclass(frozen=True)
class Feature:
    """One engine with the feature, and its requests."""

    requests: Callable[[Path], dict]  # of the model's folder: as add_requests() takes them
    options: Callable[[Path], dict] = lambda model: {}  # of the engine, over conftest.ENGINE
    model: Callable[[Path, Path], Path] = make_model  # (folder, one with the tokenizer): writes what is needed
    steps: tuple[int, int] = (3, 12)  # after so many it sleeps to host, and to disk
    shown: Callable[[dict], bool] = lambda expected: True  # whether its answers have what makes them special
    certain: tuple[str, ...] = ()  # requests that go on with the same tokens after a take-over; none said: all
    on: tuple[str, ...] = ("CPU", "GPU path")  # "CPU": model runner V1; "GPU path": V2 with async scheduling
    long_on: tuple[str, ...] = ()  # there only in tools/dev proof; something like it is in each run
    ways: tuple[str, ...] = WAYS
    own_files: bool = False  # of the model, for a new process: vLLM packs its weights, and a checkpoint has them packed
    row: str = ""  # of the table in docs/vllm.md; its name, unless said
    environment: dict[str, str] = field(default_factory=dict)


def _params(**options):
    from vllm import SamplingParams

    return SamplingParams(**({"max_tokens": 24, "ignore_eos": True} | options))


def _plain(_: Path) -> dict:
    return {
        "greedy": ("The capital of France is", _params(temperature=0)),
        "seeded": ("Once upon a time", _params(temperature=1.0, seed=7)),
        "long": ("foo bar " * 100, _params(temperature=0.8, seed=13, max_tokens=15)),
    }


def _repeating(_: Path) -> dict:
    """What is drafted is often right. On the CPU only greedy: others differ from run to run, even without torpor."""
    requests = {
        "greedy": ("The capital of France is", _params(temperature=0)),
        "repeating": ("la la la la la la", _params(temperature=0)),
        "long": ("foo bar " * 100, _params(temperature=0, max_tokens=15)),
    }
    seeded = {
        "seeded": ("once once once once", _params(temperature=0.6, seed=7)),
        "penalties": ("bar bar bar bar", _params(temperature=0.8, seed=3, repetition_penalty=1.1)),
    }
    return requests | (seeded if gpu_path.active() else {})


_GREEDY = ("greedy", "repeating", "long")


def _structured(**options):
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(**options)


_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 12}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def _by_grammar(_: Path) -> dict:
    def request(prompt: str, seed: int, **grammar) -> tuple:
        params = {"temperature": 1.0, "seed": seed, "ignore_eos": False, "structured_outputs": _structured(**grammar)}
        return prompt, _params(**params)

    return {
        "schema": request("An object:", 5, json=_SCHEMA),
        "regex": request("Letters:", 6, regex="(ab|cd){8,12}"),
        "choice": request("Which one?", 7, choice=["a sea of troubles", "a small town by the sea", "the old clock"]),
        "two": (
            "Two of them:",
            _params(n=2, seed=3, temperature=1.0, structured_outputs=_structured(regex="[a-f]{18}")),
        ),
        "free": ("The capital of France is", _params(temperature=0)),
    }


def _after_reasoning(_: Path) -> dict:
    """The grammar begins where the reasoning ends, at a token that comes sooner or later."""
    end = special_tokens()["</think>"]

    def request(seed: int, bias: float) -> tuple:
        params = {"logit_bias": {end: bias}, "structured_outputs": _structured(regex="(ab|cd){4,30}")}
        return "Think: <think>", _params(temperature=1.0, seed=seed, **params)

    def with_budget(tokens: int, prompt: str = "Think: <think>", **params) -> tuple:
        return prompt, _params(thinking_token_budget=tokens, **({"temperature": 0} | params))

    bias = 20.0 if gpu_path.active() else 21.0  # about as likely as all other tokens together
    return {
        "at once": request(1, 28.0),
        "soon": request(2 if gpu_path.active() else 20, bias),
        "later": request(15, bias),
        "never": request(3, -100.0),
        "budget for some": with_budget(6),
        "budget for many": with_budget(16),
        # It thinks from its second token on and says so repeatedly: counted from the last time, there would be more.
        "budget in the answer": with_budget(
            15, "Once upon a time", temperature=1.0, seed=7, logit_bias={special_tokens()["<think>"]: bias}
        ),
        "free": _plain(_)["greedy"],
    }


def _reasoning_ended_before_the_sleep(expected: dict) -> bool:
    """And not with the first token; and where the budget was used up."""
    end = special_tokens()["</think>"]
    places = {name: tokens.index(end) for name, (_, [[_, tokens, *_]], _) in expected.items() if end in tokens}
    budgets = [places.pop(name, None) for name in expected if name.startswith("budget for")]
    return any(0 < place < 10 for place in places.values()) and budgets == [6, 16]


def special_tokens() -> dict[str, int]:
    """By name, of this runner's model."""
    from gpu_path.model import SPECIAL

    return {token: number for number, token in enumerate(SPECIAL)} if gpu_path.active() else NAMED


def _with_adapters(model: Path) -> dict:
    """Two adapters fit beside each other: requests of the third wait for a place."""
    from vllm.lora.request import LoRARequest

    def adapter(number: int) -> dict:
        name = ADAPTERS[number]
        return {"lora_request": LoRARequest(name, number + 1, str(beside(model, name)))}

    return {
        "bare": ("The capital of France is", _params(temperature=0)),
        "first": ("The capital of France is", _params(temperature=0), adapter(0)),
        "second": ("The capital of France is", _params(temperature=0, max_tokens=15), adapter(1)),
        "seeded": ("Once upon a time", _params(temperature=1.0, seed=7), adapter(0)),
        "third": ("The capital of France is", _params(temperature=0, max_tokens=15), adapter(2)),
    }


def _long_and_shared(_: Path) -> dict:
    """Prompts of several steps and many blocks; two share most of theirs."""
    from requests_of_tests import SHARED

    return _plain(_) | {
        "shared-a": (SHARED + "He said", _params(temperature=0)),
        "shared-b": (SHARED + "She said", _params(temperature=0.9, seed=4)),
    }


def _masked(_: Path) -> dict:
    """Each answer says which tokens each of its own was drawn from. One of two choices ends before the other."""
    return {
        "seeded": ("Once upon a time", _params(temperature=1.0, seed=7, top_k=8)),
        "wide": ("foo bar " * 100, _params(temperature=0.8, seed=13, top_k=300, top_p=0.9, max_tokens=15)),
        "two": ("Two of them:", _params(n=2, seed=3, temperature=1.0, top_k=5, stop=["e"], min_tokens=2)),
    }


def _made(kind: str):
    return lambda folder, _: MODELS[kind](folder)


def _drafting(method: str, name: str):
    return lambda model: {
        "speculative_config": {"method": method, "model": str(beside(model, name)), "num_speculative_tokens": 2}
    }


def _with_images(_: Path) -> dict:
    """Pictures in prompts; each fills more than a chunk, one of them comes twice."""
    import numpy
    from PIL import Image

    tokens = special_tokens()

    def picture(seed: int, side: int):
        pixels = numpy.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=numpy.uint8)
        return Image.fromarray(pixels)

    def prompt(before: list[int], *pictures) -> dict:
        return {
            "prompt_token_ids": before + [tokens["<image>"], 90] * len(pictures) + [100, 101],
            "multi_modal_data": {"image": list(pictures)},
        }

    return {
        "text": ("The capital of France is", _params(temperature=0)),
        "picture": (prompt([50, 51], picture(1, 56)), _params(temperature=0)),
        "same": (prompt([60], picture(1, 56)), _params(temperature=1.0, seed=3)),
        "two": (prompt([70] * 40, picture(2, 168), picture(3, 200)), _params(temperature=0, max_tokens=12)),
    }


def _embedded(model: Path) -> dict:
    """Prompts without tokens, of one chunk and of many, and with tokens in between. Beside them options that are no
    JSON; on the GPU path, tokens and scores that were asked for."""
    import numpy
    import torch

    config = json.loads((model / "config.json").read_text())

    def prompt(length: int, seed: int) -> dict:
        noise = torch.randn(length, config["hidden_size"], generator=torch.Generator().manual_seed(seed))
        return {"prompt_embeds": noise * 0.1}

    def mixed(length: int, seed: int) -> dict:
        """Every third place has a token of its own, the others a special one that stands for an embedding."""
        is_token = [place % 3 == 0 for place in range(length)]
        tokens = [100 + place % 40 if own else special_tokens()["<image>"] for place, own in enumerate(is_token)]
        return prompt(length, seed) | {"prompt_token_ids": tokens, "prompt_is_token_ids": is_token}

    requests = {
        "mixed": (mixed(170, 4), _params(temperature=0)),
        "mixed seeded": (mixed(40, 5), _params(temperature=1.0, seed=21)),
        "short": (prompt(20, 1), _params(temperature=0)),
        "long": (prompt(150, 2), _params(temperature=0.8, seed=13)),
        "longer": (prompt(300, 3), _params(temperature=0, max_tokens=15)),
        # On the CPU it waits in the checkpoint of a take-over, and has tokens after it.
        "by grammar": (
            prompt(20, 6),
            _params(temperature=1.0, seed=5, structured_outputs=_structured(regex="[a-f]{18}")),
        ),
        "options": ("The capital of France is", _params(temperature=0, extra_args={"x": b"y", "z": {1: 2}})),
    }
    if gpu_path.active():
        places = numpy.arange(398, dtype=numpy.int32).reshape(199, 2) % 90
        tokens = {"prompt_token_ids": [50 + number % 40 for number in range(200)]}
        requests |= {
            "given": ("Once upon a time", _params(temperature=1.0, seed=3, trace_decode_token_ids=_GIVEN)),
            "scores": (tokens, _params(temperature=0, prompt_logprob_token_ids=places)),
        }
    return requests


_GIVEN = [100 + number * 7 % 50 for number in range(20)]


def _asked_for_is_there(expected: dict) -> bool:
    return not gpu_path.active() or (expected["given"][1][0][1] == _GIVEN and len(expected["scores"][2]) == 199)


def _pooled(_: Path) -> dict:
    """Prompts of one chunk and of many; some wait. Documents are compared with a query that a worker keeps. Three are
    half-way when the engine sleeps: one whose answer is a vector for each token, the query, and a document."""
    from vllm import PoolingParams
    from vllm.pooling_params import LateInteractionParams

    def request(prompt: str) -> tuple:
        return prompt, PoolingParams(task="embed")

    def scored(prompt: str, **how) -> tuple:
        return prompt, PoolingParams(
            task="token_embed", late_interaction_params=LateInteractionParams(query_key="q", **how)
        )

    return {
        "tokens": ("Once upon a time " * 40, PoolingParams(task="token_embed")),
        "query": scored("a small town " * 40, mode="cache_query", query_uses=2),
        "document": scored("In a small town by the sea " * 30, mode="score_doc"),
        "another": scored("foo bar " * 90, mode="score_doc"),
        "short": request("The capital of France is"),
        "long": request("foo bar " * 150),
        "longer": request("la la once upon a time " * 60),
        "last": request("My name is"),
    }


FEATURES = {
    "structured output, xgrammar": Feature(
        _by_grammar, lambda model: {"structured_outputs_config": {"backend": "xgrammar"}}
    ),
    "structured output, guidance": Feature(
        _by_grammar, lambda model: {"structured_outputs_config": {"backend": "guidance"}}, long_on=("GPU path",)
    ),
    "structured output after reasoning": Feature(
        _after_reasoning,
        lambda model: {"structured_outputs_config": {"backend": "xgrammar"}, "reasoning_parser": "deepseek_r1"},
        shown=_reasoning_ended_before_the_sleep,
        row="structured output after reasoning, thinking budgets",
        long_on=("CPU", "GPU path"),
    ),
    "prefix hashes by xxhash": Feature(
        _plain, lambda model: {"prefix_caching_hash_algo": "xxhash"}, long_on=("GPU path",)
    ),
    "speculation, n-gram": Feature(
        _repeating,
        lambda model: {
            "speculative_config": {
                "method": "ngram_gpu" if gpu_path.active() else "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        },
        certain=_GREEDY,
        long_on=("CPU",),  # what proposes is compiled there
    ),
    "speculation, draft model": Feature(
        _repeating, _drafting("draft_model", "draft"), model=with_draft_model, certain=_GREEDY, long_on=("GPU path",)
    ),
    "speculation, EAGLE": Feature(
        _repeating, _drafting("eagle", "eagle"), model=with_eagle_head, certain=_GREEDY, long_on=("GPU path",)
    ),
    "LoRA": Feature(
        _with_adapters,
        lambda model: {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 3},
        model=with_adapters,
    ),
    "images": Feature(
        _with_images, lambda model: {"limit_mm_per_prompt": {"image": 2}}, model=with_vision, steps=(3, 9)
    ),
    "sliding windows and full attention": Feature(_long_and_shared, model=_made("windows")),
    "attention in chunks and full attention": Feature(_long_and_shared, model=_made("chunks"), long_on=("GPU path",)),
    "Mamba and attention, without a prefix cache": Feature(
        _long_and_shared, lambda model: {"enable_prefix_caching": False}, model=_made("states"), long_on=("GPU path",)
    ),
    "short convolutions and attention, with a prefix cache": Feature(
        _long_and_shared, model=_made("convolutions"), long_on=("GPU path",)
    ),
    "pooling, begun again": Feature(
        _pooled,
        lambda model: {"runner": "pooling", "convert": "embed", "long_prefill_token_threshold": 40},
        steps=(1, 2),
        ways=WAYS[:2],
        row="pooling, begun again; scores by late interaction",
        long_on=("GPU path",),
    ),
    "prompts as embeddings": Feature(
        _embedded,
        lambda model: {"enable_prompt_embeds": True, "enable_trace_replay": gpu_path.active()},
        steps=(2, 9),
        shown=_asked_for_is_there,
        row="prompts as embeddings; given tokens and scores of a prompt (V2)",
        long_on=("GPU path",),
    ),
    "sampling masks": Feature(
        _masked,
        lambda model: {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"},
        on=("GPU path",),
        shown=lambda expected: all(choice[-1] for _, choices, _ in expected.values() for choice in choices),
        row="masks of what was sampled from (V2)",
    ),
    "experts": Feature(_plain, model=_made("experts"), own_files=True, long_on=("GPU path",)),
    "KV cache events": Feature(
        _plain, lambda model: {"kv_events_config": {"enable_kv_cache_events": True}}, long_on=("GPU path",)
    ),
}
