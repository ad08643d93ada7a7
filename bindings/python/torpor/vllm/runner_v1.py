# SPDX-License-Identifier: Apache-2.0
"""Model runner V1, which vLLM uses on the CPU: its state as values and back.

Its batch is kept row by row; each seeded request has a generator of its own.
"""

from __future__ import annotations

from array import array

import torch
import vllm
from vllm.sampling_params import SamplingType
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from torpor.vllm import adapters, compat, device, kept
from torpor.vllm.inputs import Inputs
from torpor.vllm.values import (
    copied,
    logprobs_tensors_from_value,
    logprobs_tensors_to_value,
    sampling_from_value,
)

_TOKENS_OF_THINKING = ("prompt_tok_ids", "output_tok_ids")  # the request's own lists


def attention(runner) -> dict[str, str]:
    """Fields of the fingerprint that only V2 has."""
    return {}


def unsupported(runner) -> list[str]:
    return []


def lost_in_a_new_process(runner) -> list[str]:
    """Return the names of features whose state a new process cannot rebuild. It can rebuild that of vLLM's logits
    processors, which depends on requests and their tokens alone."""
    kinds = {type(processor) for processor in runner.input_batch.logitsprocs.all}
    found = [f"the logits processor {kind.__name__}" for kind in kinds if not kind.__module__.startswith("vllm.")]
    if getattr(runner, "is_multimodal_pruning_enabled", False) and runner.uses_mrope:
        found.append("pruned videos (video_pruning_rate)")  # positions that depend on what the encoder saw
    return found


def settle(runner) -> None:
    """Nothing is left to do between steps."""


def queries(runner):
    """What keeps the queries of scores by late interaction, if anything does."""
    return runner.late_interaction_runner


def restart_pooling(runner) -> None:
    """Forget the hidden states of chunks of prompts. vLLM keeps them over a preemption and adds those of all chunks."""
    for state in runner.requests.values():
        if state.pooling_states is not None:
            state.pooling_states.clean()


def capture(runner, sampling: dict[str, dict]) -> dict:
    """Rows, generators and cached requests. It keeps sampling parameters itself, of finished requests too."""
    generators = {}
    requests = []
    for request_id, state in runner.requests.items():
        if state.pooling_params is not None:  # begins again
            continue
        if state.generator is not None:
            generators[request_id] = state.generator.get_state().numpy().tobytes()
        requests.append({
            "id": request_id,
            "prompt_token_ids": kept.prompt(state, "q"),
            "output_token_ids": array("q", state.output_token_ids),
            "sampling": kept.sampling(state),
            "adapter": adapters.to_value(state.lora_request),
            "block_ids": [array("q", ids) for ids in state.block_ids],
            "num_computed_tokens": state.num_computed_tokens,
            "prompt_logprobs": logprobs_tensors_to_value(state.in_progress_prompt_logprobs_cpu),
            "thinking": _thinking_to_value(runner, request_id),
        })  # fmt: skip
    return {
        "rows": [i for i in runner.input_batch.req_ids if runner.requests[i].pooling_params is None],
        "default_generator": device.generator_state(runner.device),
        "generators": generators,
        "engine": {
            "requests": requests,
            "num_prompt_logprobs": dict(runner.num_prompt_logprobs),
            "accepted": _accepted(runner),
        }
        | ({"mamba_state_blocks": dict(runner.mamba_state_idx)} if runner.mamba_state_idx else {}),
    }


def _accepted(runner) -> dict[str, int]:
    """Return, for each request, how many tokens its last step accepted, if not one. With speculation a request has
    several states in a layer, and goes on from the one of this number."""
    accepted, rows = runner.input_batch.num_accepted_tokens_cpu, runner.input_batch.req_id_to_index
    return {request_id: int(accepted[row]) for request_id, row in rows.items() if accepted[row] != 1}


def drawn_from(runner, unseeded_waits: bool) -> frozenset[str]:
    """The generators of the process that unfinished requests draw from, of device.ALL."""
    unseeded = any(
        state.generator is None and state.sampling_params and state.sampling_params.sampling_type == SamplingType.RANDOM
        for state in runner.requests.values()
    )
    return frozenset({device.TORCH} if unseeded or unseeded_waits else ())


def reconnect(runner, value: dict) -> None:
    """Generators go back to where they were."""
    device.set_generator_state(runner.device, value["default_generator"])
    for request_id, state in value["generators"].items():
        if request_id in runner.requests:
            runner.requests[request_id].generator.set_state(device.state_tensor(state))


def restore(runner, value: dict, given_since: list[dict], inputs: dict[str, Inputs]) -> None:
    """The batch is rebuilt row by row as it was, then the default generator is set.

    A seeded request of `given_since` draws as often as it did for what was given. `inputs`: see worker.py.
    """
    forget(runner)
    given = {item["id"]: item for item in given_since}
    for item in value["engine"]["requests"]:
        sampling, generator = sampling_from_value(item["sampling"]), None
        if item["id"] in value["generators"]:
            generator = torch.Generator(device=runner.device)
            generator.set_state(device.state_tensor(value["generators"][item["id"]]))
        elif sampling.sampling_type == SamplingType.RANDOM_SEED and item["id"] in given:
            continue  # it begins again, and its generator too
        since = given.pop(item["id"], None)
        if since is not None and generator is not None:
            _draw(runner, generator, since["drawn"])
        state = CachedRequestState(
            req_id=item["id"],
            sampling_params=sampling,
            generator=generator,
            block_ids=tuple(list(ids) for ids in item["block_ids"]),
            num_computed_tokens=item["num_computed_tokens"],
            output_token_ids=list((since or item)["output_token_ids"]),
            lora_request=adapters.from_value(item.get("adapter")),
            **inputs.get(item["id"], Inputs()).arguments(list(item["prompt_token_ids"])),
        )
        state.in_progress_prompt_logprobs_cpu = logprobs_tensors_from_value(item["prompt_logprobs"])
        runner.requests[item["id"]] = state
    for item in given.values():
        runner.requests[item["id"]] = _begun_again(runner, item, inputs.get(item["id"], Inputs()))
    if runner.uses_mrope:  # positions of rotary embeddings, by image and text
        for state in runner.requests.values():
            runner._init_mrope_positions(state)
    for request_id in value["rows"]:
        runner.input_batch.add_request(runner.requests[request_id])
    for request_id, count in value["engine"].get("accepted", {}).items():
        if (row := runner.input_batch.req_id_to_index.get(request_id)) is not None:
            runner.input_batch.num_accepted_tokens_cpu[row] = count
    _restore_thinking(runner, value["engine"]["requests"])
    of_prompts, state_blocks = value["engine"]["num_prompt_logprobs"], value["engine"].get("mamba_state_blocks", {})
    runner.num_prompt_logprobs.update({name: count for name, count in of_prompts.items() if name in runner.requests})
    runner.mamba_state_idx.update({name: block for name, block in state_blocks.items() if name in runner.requests})
    device.set_generator_state(runner.device, value["default_generator"])


def request_to_value(runner, request_id: str) -> dict:
    """Return the state of a request's random generator, which its tokens do not tell; None: it has none."""
    state = runner.requests.get(request_id)
    generator = None if state is None else state.generator
    return {"generator": None if generator is None else generator.get_state().numpy().tobytes()}


def expect(runner, item: dict) -> None:
    """Keep a request that comes into the engine with output tokens: this runner is about to be given it as resumed.

    `item`: id, prompt and output tokens, sampling parameters, and "of_runner" of request_to_value(); there "drawn":
    so often a request of its seed drew before.
    """
    sampling = sampling_from_value(item["sampling"])
    generator = None
    if (drawn := item["of_runner"]["generator"]) is not None:
        generator = torch.Generator(device=runner.device)
        generator.set_state(device.state_tensor(drawn))
    elif sampling.sampling_type == SamplingType.RANDOM_SEED:  # it had not run here
        generator = torch.Generator(device=runner.device)
        generator.manual_seed(sampling.seed)
        _draw(runner, generator, item["of_runner"].get("drawn", 0))
    runner.requests[item["id"]] = state = CachedRequestState(
        req_id=item["id"],
        prompt_token_ids=list(item["prompt_token_ids"]),
        mm_features=[],
        sampling_params=sampling,
        generator=generator,
        block_ids=([],),  # it gets them when it is scheduled
        num_computed_tokens=0,
        output_token_ids=list(item["output_token_ids"]),
    )
    if runner.uses_mrope:
        runner._init_mrope_positions(state)


def forget(runner) -> None:
    for request_id in list(runner.input_batch.req_ids):
        runner.input_batch.remove_request(request_id)
    runner.input_batch.condense()
    runner.input_batch.refresh_metadata()
    runner.requests.clear()
    runner.num_prompt_logprobs.clear()
    runner.mamba_state_idx.clear()


def _thinking_to_value(runner, request_id: str) -> dict | None:
    """How far a request with a thinking budget has come, without its tokens. None: it has no budget, or no row."""
    holder, row = runner.input_batch.thinking_budget_state_holder, runner.input_batch.req_id_to_index.get(request_id)
    if holder is None or row not in holder._state:
        return None
    thinking = holder._state[row]
    return {name: copied(item) for name, item in thinking.items() if name not in _TOKENS_OF_THINKING}


def _restore_thinking(runner, requests: list[dict]) -> None:
    """Counted anew from its tokens, it would differ where the thinking began in the answer."""
    holder, rows = runner.input_batch.thinking_budget_state_holder, runner.input_batch.req_id_to_index
    if holder is None:  # a request with a budget does not go on here: scheduler_values.not_taken()
        return
    counted = {item["id"]: item["thinking"] for item in requests if item.get("thinking") and item["id"] in rows}
    if not counted:
        return
    runner.input_batch.refresh_metadata()  # makes the states
    states = holder._state
    for request_id, thinking in counted.items():
        states[rows[request_id]].update(thinking)


def _begun_again(runner, item: dict, inputs: Inputs) -> CachedRequestState:
    """A request as the worker keeps it while the scheduler has taken its blocks away."""
    sampling = sampling_from_value(item["sampling"])
    generator = None
    if sampling.sampling_type == SamplingType.RANDOM_SEED:
        generator = torch.Generator(device=runner.device)
        generator.manual_seed(sampling.seed)
        _draw(runner, generator, len(item["output_token_ids"]))
    return CachedRequestState(
        req_id=item["id"],
        sampling_params=sampling,
        generator=generator,
        block_ids=tuple([] for _ in range(item["groups"])),
        num_computed_tokens=0,
        output_token_ids=list(item["output_token_ids"]),
        lora_request=adapters.from_value(item["adapter"]),
        **inputs.arguments(list(item["prompt_token_ids"])),
    )


def _draw(runner, generator: torch.Generator, times: int) -> None:
    """What vLLM's sampler on the CPU draws for a seeded request, for so many tokens (TopKTopPSampler.forward_cpu)."""
    precise = runner.sampler.topk_topp_sampler.use_fp64_gumbel
    if not precise and compat.manifest(vllm.__version__).CPU_SAMPLER_DRAWS == "a number":
        torch.randint(0, 2**31, (times,), generator=generator, dtype=torch.long)
        return
    words = torch.empty(runner.input_batch.vocab_size, dtype=torch.float64 if precise else torch.float32)
    for _ in range(times):
        words.exponential_(generator=generator)
