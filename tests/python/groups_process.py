# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine whose model has several KV groups. Prints what its tables look like asleep, and
what requests that begin after a wake find in the prefix cache, beside what they find if the engine only stood still."""

import json
import sys
from pathlib import Path

from conftest import InProcess, gpu_path
from grouped_models import MODELS
from requests_of_tests import REQUESTS, SHARED, answer, final, run

from torpor.vllm.pool_values import pool_to_value

LATER = ("later", SHARED + "It said", REQUESTS["prefix-a"][1])
WAYS = ("pause", "disk") if gpu_path.active() else ("pause", "host", "disk")
NAMES = ["prefix-a", "prefix-b", "long", "seeded", "two"]


def tables(one: InProcess) -> list[dict]:
    """Of each group: its manager, the most blocks of a request, and how many null blocks are in its tables."""
    return [
        {
            "manager": type(manager).__name__,
            "longest": max(map(len, manager.req_to_blocks.values()), default=0),
            "null": sum(block.is_null for held in manager.req_to_blocks.values() for block in held),
        }
        for manager in one.core.scheduler.kv_cache_manager.coordinator.single_type_managers
    ]


def to_the_end(one: InProcess, answers: dict, before: tuple = ()) -> dict:
    """All answers, and how many tokens of each prompt the prefix cache had; `before`: a request added first."""
    if before:
        one.engine.add_request(*before)
    found = {}
    while one.engine.has_unfinished_requests():
        for output in one.engine.step():
            answers[output.request_id] = answer(output)
            found[output.request_id] = output.num_cached_tokens
    return {"answers": final(answers), "found": found}


def stood_still(one: InProcess, steps: int, way: str, preempt: bool = False) -> dict:
    """A run that only paused ("pause"), slept ("host"), or was given up and went on from its checkpoint ("disk")."""
    answers = one.begin(steps, NAMES)
    if preempt:
        one.core.reset_prefix_cache(reset_running_requests=True)
        assert not one.core.scheduler.running
    return slept(one, answers, way, LATER)


def slept(one: InProcess, answers: dict, way: str, later: tuple = ()) -> dict:
    report = one.llm.sleep(level=0) if way == "pause" else one.llm.sleep(level=1, preserve_state=True, to=way)
    answers |= one.stopped()
    before = pool_to_value(one.core.scheduler)
    if way == "disk":
        one.llm.wake_up()
        run(one.engine)
        one.llm.reset_prefix_cache()
        one.llm.wake_up(from_checkpoint=report.checkpoint)
    else:
        one.llm.wake_up()
    assert pool_to_value(one.core.scheduler) == before, f"{way}: the groups have other notes of their blocks"
    done = to_the_end(one, answers, later)
    return done | {"recomputed": 0 if way == "pause" else one.llm.torpor.state().recomputed_tokens}


def with_a_part_of_a_block(one: InProcess, way: str) -> dict:
    """As stood_still(), at the step between the one that cached a part of a block and the one that writes over it."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [260 + number * 7 % 200 for number in range(114)]}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    managers = one.core.scheduler.kv_cache_manager.coordinator.single_type_managers
    one.begin(0, NAMES)
    run(one.engine)
    one.llm.reset_prefix_cache()
    one.engine.add_request("first", prompt, params)
    answers = {}
    while not managers[0]._partial_hit_reqs:
        answers |= run(one.engine, 1)
    done = slept(one, answers, way)
    return done | {"second": to_the_end(one, {}, ("second", prompt, params))}


def convolution_weights(one: InProcess, other: Path) -> dict:
    """Whether the weights of convolutions follow those loaded, where layers see them as tensors of their own."""
    from safetensors.torch import load_file

    layers = [
        (name, layer)
        for name, layer in one.runner.model.named_modules()
        if getattr(layer, "conv_weights", None) is not None
    ]
    one.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    files = load_file(other / "model.safetensors")
    loaded = [bool((layer.conv_weights == files[f"{name}.conv1d.weight"][:, 0]).all()) for name, layer in layers]
    shared = [layer.conv_weights.data_ptr() == layer.conv1d.weight.data_ptr() for _, layer in layers]
    return {"layers": len(layers), "loaded": loaded, "shared": shared}


def main() -> None:
    kind, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    make = MODELS[kind]
    one = InProcess(make(folder / "model"), folder / "store", **options)
    one.begin(10, NAMES)
    result = {"checkpoint": one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint, "tables": tables(one)}
    one.llm.wake_up()
    run(one.engine)
    for name, preempt in (("kept", False), ("preempted", True)):
        result[name] = {way: stood_still(one, 10, way, preempt) for way in WAYS}
    if "prefix_match_unit" in options:
        result["in part"] = {way: with_a_part_of_a_block(one, way) for way in WAYS}
    if kind == "states":
        result["convolutions"] = convolution_weights(one, make(folder / "other", seed=8))
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
