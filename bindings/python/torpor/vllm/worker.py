"""Methods that torpor adds to vLLM's workers; reached by `collective_rpc`. Names begin with `torpor_`."""

from __future__ import annotations

from array import array
from contextlib import nullcontext

import torch
from vllm.sampling_params import SamplingType
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from torpor import _core
from torpor.vllm.memory import WorkerMemory
from torpor.vllm.options import Options
from torpor.vllm.values import logprobs_tensors_from_value, logprobs_tensors_to_value, sampling_from_value, sampling_to_value


def memory_context(self, tag: str):
    """CPUWorker._maybe_get_memory_pool_context: where vLLM is about to allocate weights or KV, in regions."""
    if not hasattr(self, "torpor_memory"):
        options = Options.of(self.vllm_config)
        names = ("arena_budget_bytes", "arena_prefault_bytes", "key_file")
        rank_options = {name: getattr(options, name) for name in names}
        self.torpor_memory = WorkerMemory(_core.RankMemory({"rank": self.rank} | rank_options), options.cpu_linear)
    if tag == "weights":
        return self.torpor_memory.loading_weights(self.model_runner)
    return self.torpor_memory.allocating_kv() if tag == "kv_cache" else nullcontext()


def torpor_rank(self, method: str, order: bytes) -> bytes:
    """Passes an order of the controller to this rank's memory. A failure is in the reply."""
    memory = self.torpor_memory
    if memory.kv_address and not getattr(self, "_torpor_kv_described", False):
        memory.describe_kv(self.model_runner)
        self._torpor_kv_described = True
    return memory.rank_memory.call(method, order)


def torpor_release_derived(self) -> None:
    self.torpor_memory.release_derived()


def torpor_rebuild_derived(self) -> None:
    self.torpor_memory.rebuild_derived()


def torpor_describe(self) -> dict:
    """What of this process can change tokens, and which runner it has."""
    runner = self.model_runner
    return {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "runner": type(runner).__name__,
        "v2": bool(getattr(self, "use_v2_model_runner", False)),
        "elsewhere": self.torpor_memory.elsewhere(runner.model),
        "batch_rows": len(runner.input_batch.req_ids) if hasattr(runner, "input_batch") else -1,
    }


def torpor_capture(self) -> dict:
    """Rows, generators and cached requests of this worker, as values."""
    runner = self.model_runner
    generators = {}
    requests = []
    for request_id, state in runner.requests.items():
        if state.generator is not None:
            generators[request_id] = state.generator.get_state().numpy().tobytes()
        requests.append({
            "id": request_id,
            "prompt_token_ids": array("q", state.prompt_token_ids),
            "output_token_ids": array("q", state.output_token_ids),
            "sampling": sampling_to_value(state.sampling_params),
            "block_ids": [array("q", ids) for ids in state.block_ids],
            "num_computed_tokens": state.num_computed_tokens,
            "prompt_logprobs": logprobs_tensors_to_value(state.in_progress_prompt_logprobs_cpu),
        })  # fmt: skip
    return {
        "rank": self.rank,
        "rows": list(runner.input_batch.req_ids),
        "default_generator": torch.get_rng_state().numpy().tobytes(),
        "generators": generators,
        "engine": {"requests": requests, "num_prompt_logprobs": dict(runner.num_prompt_logprobs)},
    }


def torpor_reconnect(self, workers: list[dict]) -> None:
    """The same worker lives on: generators go back to where they were, whatever ran in this process meanwhile."""
    value = workers[self.rank]
    torch.set_rng_state(_generator_state(value["default_generator"]))
    for request_id, state in value["generators"].items():
        if request_id in self.model_runner.requests:
            self.model_runner.requests[request_id].generator.set_state(_generator_state(state))


def torpor_restore(self, workers: list[dict], given_since: list[dict]) -> None:
    """A new worker: the batch is rebuilt row by row as it was, then the default generator is set.

    `given_since`: requests whose readers were given more tokens than this state has. They get them too, and a seeded one
    draws as often as it did for them.
    """
    torpor_forget(self)
    runner = self.model_runner
    value = workers[self.rank]
    given = {item["id"]: item for item in given_since}
    for item in value["engine"]["requests"]:
        generator = None
        if item["id"] in value["generators"]:
            generator = torch.Generator(device=self.device)
            generator.set_state(_generator_state(value["generators"][item["id"]]))
        since = given.pop(item["id"], None)
        if since is not None and generator is not None:
            _draw(generator, since["drawn"])
        state = CachedRequestState(
            req_id=item["id"],
            prompt_token_ids=list(item["prompt_token_ids"]),
            mm_features=[],
            sampling_params=sampling_from_value(item["sampling"]),
            generator=generator,
            block_ids=tuple(list(ids) for ids in item["block_ids"]),
            num_computed_tokens=item["num_computed_tokens"],
            output_token_ids=list((since or item)["output_token_ids"]),
        )
        state.in_progress_prompt_logprobs_cpu = logprobs_tensors_from_value(item["prompt_logprobs"])
        runner.requests[item["id"]] = state
    for item in given.values():
        runner.requests[item["id"]] = _begun_again(item, self.device)
    for request_id in value["rows"]:
        runner.input_batch.add_request(runner.requests[request_id])
    runner.num_prompt_logprobs.update(value["engine"]["num_prompt_logprobs"])
    torch.set_rng_state(_generator_state(value["default_generator"]))


def torpor_forget(self) -> None:
    """Empties the batch."""
    runner = self.model_runner
    for request_id in list(runner.input_batch.req_ids):
        runner.input_batch.remove_request(request_id)
    runner.input_batch.condense()
    runner.input_batch.refresh_metadata()
    runner.requests.clear()
    runner.num_prompt_logprobs.clear()


def torpor_mark_dirty(self, tag: str) -> None:
    self.torpor_memory.rank_memory.mark_dirty(tag)


def _begun_again(item: dict, device: torch.device) -> CachedRequestState:
    """A request as the worker keeps it while the scheduler has taken its blocks away."""
    sampling = sampling_from_value(item["sampling"])
    generator = None
    if sampling.sampling_type == SamplingType.RANDOM_SEED:
        generator = torch.Generator(device=device)
        generator.manual_seed(sampling.seed)
        _draw(generator, item["drawn"])
    return CachedRequestState(
        req_id=item["id"],
        prompt_token_ids=list(item["prompt_token_ids"]),
        mm_features=[],
        sampling_params=sampling,
        generator=generator,
        block_ids=tuple([] for _ in range(item["groups"])),
        num_computed_tokens=0,
        output_token_ids=list(item["output_token_ids"]),
    )


def _draw(generator: torch.Generator, times: int) -> None:
    """What vLLM's sampler on the CPU draws for a seeded request, one number a token (TopKTopPSampler.forward_cpu)."""
    torch.randint(0, 2**31, (times,), generator=generator, dtype=torch.long)


def _generator_state(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
