# SPDX-License-Identifier: Apache-2.0
"""Model runner V2, vLLM's default on a GPU: its state as values and back.

Each request has a slot; what the sampler needs of it stands in tensors at that slot. There is no persistent batch and
no generator for a request: noise is keyed by the request's seed and the position, and a request without a seed draws
one from numpy's generator when it gets its slot. Everything else that samples a token follows from the request's
tokens and parameters, and is computed again when the request is added.
"""

from __future__ import annotations

import functools
from array import array

import numpy as np
import torch
import vllm
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from torpor.errors import Incompatible, Unsupported, WrongState
from torpor.vllm import adapters, compat, device
from torpor.vllm.inputs import Embeddings, Inputs
from torpor.vllm.values import (
    logprobs_tensors_from_value,
    logprobs_tensors_to_value,
    sampling_from_value,
    tensor_from_value,
    tensor_to_value,
)

_LOGITS_PROCESSORS = (LogitBiasState, PenaltiesState, BadWordsState)  # they keep nothing but what tokens tell
# Speculators that keep nothing of a request but the drafts of its slot; what they compute from lies in the KV cache.
_SPECULATORS = ("NgramGPUSpeculator", "StandaloneARSpeculator", "EagleSpeculator", "MTPSpeculator")
# Counters of a slot that RequestState keeps in host memory, by name of the attribute.
_HOST_COUNTERS = ("max_seq_len", "num_computed_tokens_np", "num_computed_prefill_tokens")


def attention(runner) -> dict[str, str]:
    """Fields of the fingerprint: what computes attention and samples, and how the KV cache lies in memory."""
    backends = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    sampler = runner.sampler
    return {
        "attention": ",".join(sorted(backends)),
        "kv_layout_name": str(runner.kv_cache_config.kv_cache_layout),
        "sampler": "FlashInfer" if sampler is not None and sampler.use_flashinfer else "vLLM",
        "graphs": f"{runner.compilation_config.cudagraph_mode}, {runner.compilation_config.cudagraph_capture_sizes}",
    }


def lost_in_a_new_process(runner) -> list[str]:
    """Nothing: what keeps state of its own is refused for any sleep."""
    return []


def unsupported(runner) -> list[str]:
    """What it has that keeps state of requests which is not preserved, by name."""
    found = [*_as_expected()]
    sampler = runner.sampler
    if sampler is not None:
        if type(sampler) is not Sampler:
            found.append(f"the sampler {type(sampler).__name__}")
        for processor in sampler.logits_processors:
            if type(processor) not in _LOGITS_PROCESSORS:
                found.append(f"the logits processor {type(processor).__name__}")
    if type(runner.model_state) not in (DefaultModelState, MambaHybridModelState):
        found.append(f"the model state {type(runner.model_state).__name__}")
    elif getattr(runner.model_state, "recoverssm", None) is not None:
        found.append("RecoverSSM")
    elif getattr(runner.model_state, "mm_pruner", None) is not None:
        found.append("pruned videos (video_pruning_rate)")  # positions that depend on what the encoder saw
    speculator = runner.speculator
    if speculator is not None:
        if type(speculator).__name__ not in _SPECULATORS:
            found.append(f"speculation by {type(speculator).__name__}")
        if getattr(speculator, "draft_watermarker", None) is not None:
            found.append("watermarked drafts")
    if runner.adaptive_verification is not None:
        found.append("adaptive verification")
    if runner.parallel_config.enable_eplb:
        found.append("load balancing of experts")
    if runner.aux_output_connector is not None:
        found.append("an auxiliary output connector")
    return found


@functools.cache
def _as_expected() -> list[str]:
    try:
        compat.check(vllm.__version__, "v2")
    except Unsupported as problem:
        return [f"this model runner V2: {problem.what}"]
    return []


def settle(runner) -> None:
    """A stage of a pipeline before the last hears which tokens were sampled, and notes them some steps later: now."""
    if runner.pp_handler is not None:
        for _ in range(len(runner.pp_handler.queue)):
            runner.update_pp_decode_requests()


def restart_pooling(runner) -> None:
    """Nothing is to be done: vLLM forgets a preempted request."""


def queries(runner):
    """What keeps the queries of scores by late interaction, if anything does."""
    return runner.pooling_runner and runner.pooling_runner.late_interaction_runner


def capture(runner, sampling: dict[str, dict]) -> dict:
    """Slots, seeds and counters. `sampling`: parameters of the unfinished requests, as values; the runner keeps none.

    Finished requests hold their slots until the runner is told: those slots stay taken, and nothing else is kept.
    """
    _assert_quiet(runner)
    states = runner.req_states
    requests = []
    for request_id, slot in states.req_id_to_index.items():
        if sampling.get(request_id) is not None:
            requests.append({"id": request_id, "sampling": sampling[request_id]} | _slot_to_value(runner, slot))
            requests[-1]["prompt_logprobs"] = [
                logprobs_tensors_to_value(tensors) for tensors in _prompt_logprobs(runner).get(request_id, ())
            ]
            requests[-1]["prompt_scores"] = _scores_to_value(runner, request_id)
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "rows": [i for i in sorted(states.req_id_to_index, key=states.req_id_to_index.get) if sampling.get(i, True)],
        "default_generator": device.generator_state(runner.device),
        "generators": {},
        "engine": {
            "requests": requests,
            "slots": {request_id: int(slot) for request_id, slot in states.req_id_to_index.items()},
            "free_slots": array("q", states.free_indices),
            "numpy": [name, keys.tobytes(), int(position), int(has_gauss), float(gauss)],
        },
    }


def drawn_from(runner, unseeded_waits: bool) -> frozenset[str]:
    """The generators of the process that unfinished requests draw from, of device.ALL. Requests draw by seed and
    position; one without a seed has one drawn when it begins."""
    return frozenset({device.NUMPY} if unseeded_waits else ())


def reconnect(runner, value: dict) -> None:
    """As restore(): what vLLM allocates with the weights is gone when they were not kept."""
    # restore() takes them out of the runner: should it fail, the next call finds them here.
    runner.torpor_inputs = inputs = _inputs(runner) | getattr(runner, "torpor_inputs", {})
    restore(runner, value, [], inputs)
    adapters.place(runner, adapters.slots(runner))  # their memory may have been given back with the weights
    runner.torpor_inputs = {}


def restore(runner, value: dict, given_since: list[dict], inputs: dict[str, Inputs]) -> None:
    """Every request goes back into its slot.

    One of `given_since` computes what was given as if it belonged to its prompt; those without a slot get one from
    the scheduler. `inputs`: see worker.py.
    """
    states, engine = runner.req_states, value["engine"]
    slots = {request_id: engine["slots"][request_id] for request_id in value["rows"]}
    freed = [slot for request_id, slot in engine["slots"].items() if request_id not in slots]
    free = [*engine["free_slots"], *freed]
    if sorted([*slots.values(), *free]) != list(range(runner.max_num_reqs)):
        raise Incompatible("the slots of its requests are not those of this runner", "use another checkpoint")
    forget(runner)
    given = {item["id"]: item for item in given_since}
    items = [item for item in engine["requests"] if item["id"] in slots]
    new = SchedulerOutput.make_empty()
    new.scheduled_new_reqs = [_as_new(item, given.get(item["id"]), inputs.get(item["id"], Inputs())) for item in items]
    states.free_indices = [slots[item["id"]] for item in reversed(items)]  # it takes them from the end
    runner.add_requests(new)
    for item in items:
        _correct_slot(runner, slots[item["id"]], item, item["id"] in given)
        if item["prompt_logprobs"]:
            _prompt_logprobs(runner)[item["id"]] = [_on_device(runner, value) for value in item["prompt_logprobs"]]
        _restore_scores(runner, item)
    for request_id, slot in slots.items():  # of finished requests too
        states.req_id_to_index[request_id] = slot
        states.index_to_req_id[slot] = request_id
    states.free_indices = free
    runner.block_tables.apply_staged_writes()
    states.apply_staged_writes()
    if runner.sampler is not None:
        runner.sampler.apply_staged_writes()
    name, keys, position, has_gauss, gauss = engine["numpy"]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, gauss))
    device.set_generator_state(runner.device, value["default_generator"])


def request_to_value(runner, request_id: str) -> dict:
    """Return the seed of a request's noise, given or drawn, which its tokens do not tell; None: it has none yet."""
    slot = runner.req_states.req_id_to_index.get(request_id)
    if slot is None or runner.sampler is None:
        return {"seed": None}
    return {"seed": int(runner.sampler.sampling_states.seeds.np[slot])}


def expect(runner, item: dict) -> None:
    """Nothing: the scheduler gives this runner all tokens of a request with its blocks."""


def forget(runner) -> None:
    """All slots are free."""
    for request_id in list(runner.req_states.req_id_to_index):
        runner._remove_request(request_id)
    runner.req_states.free_indices = list(range(runner.max_num_reqs))


def _slot_to_value(runner, slot: int) -> dict:
    states, tables = runner.req_states, runner.block_tables
    total = int(states.total_len.gpu[slot])
    prompt = int(states.prompt_len.np[slot])
    tokens = states.all_token_ids.gpu[slot, :total].cpu().numpy().astype(np.int64)
    held = [int(count) for count in tables.num_blocks.np[:, slot]]
    parts = getattr(tables, "blocks_per_kv_block", [1] * len(held))  # vLLM 0.31 has the attention kernel's blocks there
    value = {
        "adapter": adapters.to_value(runner.lora_state.lora_requests.get(states.index_to_req_id[slot])),
        "prompt_token_ids": array("q", tokens[:prompt].tobytes()),
        "output_token_ids": array("q", tokens[prompt:].tobytes()),
        "block_ids": [
            array("q", (table.gpu[slot, :count:part].cpu().numpy().astype(np.int64) // part).tobytes())
            for table, count, part in zip(tables.block_tables, held, parts, strict=True)
        ],
        "num_computed_tokens": int(states.num_computed_tokens.gpu[slot]),
        "prefill_len": int(states.prefill_len.np[slot]),
        "last_sampled": [int(token) for token in states.last_sampled_tokens[slot].cpu()],
        "next_prefill": [int(token) for token in states.next_prefill_tokens[:, slot].cpu()],
        "drafts": _drafts_to_value(runner, slot),
    } | {name: int(getattr(states, name)[slot]) for name in _HOST_COUNTERS}
    if isinstance(runner.model_state, MambaHybridModelState):
        value["mamba"] = {name: int(tensor[slot]) for name, tensor in _mamba_slots(runner.model_state).items()}
    if runner.sampler is not None:
        seeds = runner.sampler.sampling_states
        value |= {"seed": int(seeds.seeds.np[slot]), "seed_set": bool(seeds.seeds_set[slot])}
    return value


def _as_new(item: dict, since: dict | None, inputs: Inputs) -> NewRequestData:
    """As the scheduler would send it with all its tokens: bias, penalties and bad words are counted from them."""
    prompt = list(item["prompt_token_ids"])
    return NewRequestData(
        req_id=item["id"],
        sampling_params=sampling_from_value(item["sampling"]),
        pooling_params=None,
        block_ids=tuple(list(ids) for ids in item["block_ids"]),
        num_computed_tokens=item["num_computed_tokens"],
        lora_request=adapters.from_value(item["adapter"]),
        prefill_token_ids=[*prompt, *(since or item)["output_token_ids"]],
        **inputs.arguments(prompt),
    )


def _correct_slot(runner, slot: int, item: dict, given: bool) -> None:
    """What adding a request sets otherwise than it was: it has not just begun."""
    states = runner.req_states
    if not given:
        states.prefill_len.np[slot] = item["prefill_len"]
    for name in _HOST_COUNTERS:
        getattr(states, name)[slot] = item[name]
    states.last_sampled_tokens[slot] = torch.tensor(item["last_sampled"], device=runner.device)
    states.next_prefill_tokens[:, slot] = torch.tensor(item["next_prefill"], device=runner.device)
    if "mamba" in item:
        for name, tensor in _mamba_slots(runner.model_state).items():
            tensor[slot] = item["mamba"][name]
    if not given and item["drafts"] is not None:
        _set_drafts(runner, slot, item["drafts"])
    if runner.sampler is not None:
        seeds = runner.sampler.sampling_states
        seeds.seeds.np[slot], seeds.seeds_set[slot] = item["seed"], item["seed_set"]


def _mamba_slots(state: MambaHybridModelState) -> dict[str, torch.Tensor]:
    """What a model with Mamba layers keeps of each slot from one step to the next; the states are KV blocks."""
    slots = {"accepted_tokens": state.num_accepted_tokens_gpu}
    return slots | ({"state_block": state._mamba_state_idx_gpu} if state._align_mode else {})


def _drafts_to_value(runner, slot: int) -> dict | None:
    """Speculation: the tokens proposed for the next step, and the logits that they were drawn from, if any."""
    if runner.speculator is None:
        return None
    logits = getattr(runner.speculator, "draft_logits", None)
    return {
        "tokens": [int(token) for token in runner.req_states.draft_tokens[slot].cpu()],
        "logits": None if logits is None else tensor_to_value(logits[slot].view(torch.uint8)),
    }


def _set_drafts(runner, slot: int, value: dict) -> None:
    runner.req_states.draft_tokens[slot] = torch.tensor(value["tokens"], device=runner.device)
    if value["logits"] is not None:
        logits = runner.speculator.draft_logits[slot]
        logits.copy_(tensor_from_value(value["logits"]).view(logits.dtype))


def _prompt_logprobs(runner) -> dict[str, list]:
    """Those of prompts that are computed in pieces, by request; only the last pipeline stage has them."""
    worker = runner.prompt_logprobs_worker
    return {} if worker is None else worker.in_progress_prompt_logprobs


def _scores_to_value(runner, request_id: str) -> dict | None:
    """How far the prompt's scores of given tokens have come; None if there are none any more."""
    state = _prompt_scores(runner).get(request_id)
    if state is None:
        return None
    return {"scores": None if state.scores is None else tensor_to_value(state.scores)}


def _restore_scores(runner, item: dict) -> None:
    """Adding a request begins them anew."""
    begun, value = _prompt_scores(runner), item.get("prompt_scores")  # absent in older checkpoints
    if value is None:
        begun.pop(item["id"], None)
    elif value["scores"] is not None:
        begun[item["id"]].scores = tensor_from_value(value["scores"]).to(runner.device)


def _prompt_scores(runner) -> dict:
    return getattr(runner.prompt_logprobs_worker, "token_id_scores", {})


def _inputs(runner) -> dict[str, Inputs]:
    """What prompts have besides tokens, of the requests that have a slot."""
    features = {} if runner.encoder_cache is None else runner.encoder_cache.mm_features
    state = getattr(runner.model_state, "prompt_embeds_state", None)
    tensors = {} if state is None else state.gpu_tensors
    found = {request_id: Inputs(of_request) for request_id, of_request in features.items()}
    for request_id, (tensor, mask) in tensors.items():
        embeddings = Embeddings(tensor.cpu(), None if mask is None else [bool(each) for each in mask.cpu()], True)
        found.setdefault(request_id, Inputs()).embeddings = embeddings
    return found


def _on_device(runner, value: list) -> LogprobsTensors:
    return LogprobsTensors(*(tensor.to(runner.device) for tensor in logprobs_tensors_from_value(value)[:3]))


def _assert_quiet(runner) -> None:
    """Between steps nothing is staged, and no forward pass waits for its sampling."""
    states = runner.req_states
    staged = [states.total_len, states.all_token_ids, states.num_computed_tokens, *runner.block_tables.block_tables]
    if runner.execute_model_state is not None or any(tensor._staged_write_indices for tensor in staged):
        next_step = "try again when no other thread has it take one"
        raise WrongState("the model runner is in the middle of a step", next_step)
