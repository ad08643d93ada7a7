# SPDX-License-Identifier: Apache-2.0
"""A process of the tests on the GPU path: an engine in it or in other processes.

It prints what is in force and the engine's answers."""

import asyncio
import json
import os
import sys
from pathlib import Path

from conftest import ENGINE, InProcess  # finds the GPU path
from requests_of_tests import REQUESTS, add_requests, answer, final, run
from gpu_path import numbers

# Those that an engine in another process answers the same each time: one choice, and no draw of the engine's own.
CERTAIN = [name for name, (_, p) in REQUESTS.items() if p.n == 1 and (p.seed is not None or p.temperature == 0)]


def in_this_process(model: Path, directory: Path, runs: int, names=None) -> dict:
    from gpu_path.plugin import report

    one = InProcess(model, directory)
    result = {"before": report(one.core), "runs": []}
    for _ in range(runs):
        answers = one.begin(3, names)
        result["in_flight"] = report(one.core)["batches_in_flight"]
        result["runs"].append(one.finish(answers))
    result["kernels"] = differences_of_kernels()
    result["by_grammar"] = by_grammar(one)
    if os.environ.get("TORPOR_GPU_PATH_SLOW_COPIES") == "1":
        result |= without_waiting(one)
    return result


def by_grammar(one: InProcess) -> str:
    """What a grammar leaves of the words; its kernel computes masks, and its steps are sampled late."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex="[abc]{8}d")
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, structured_outputs=grammar)
    one.engine.add_request("grammar", "la la la la", params)
    [[_, [[_, _, text, *_]], _]] = run(one.engine).values()
    return text


def differences_of_kernels() -> list[float]:
    """Between what PyTorch does on the GPU path and vLLM's kernels, interpreted: log probabilities, ranks."""
    import torch
    from vllm.v1.worker.gpu.sample import logprob

    draws = torch.Generator().manual_seed(5)
    logits = 6 * torch.randn(9, 512, generator=draws)
    logits[:, 40:60] = float("-inf")  # as a processor of logits leaves them
    logits[3, 100:110] = logits[3, 7]
    sampled = torch.tensor([7, 9, 300, 7, 500, 1, 2, 100, 11])
    ours = logprob.compute_topk_scores(logits, 5, sampled)
    instead = logprob._topk_log_softmax_kernel, logprob._ranks_kernel
    logprob._topk_log_softmax_kernel, logprob._ranks_kernel = (each.kernel for each in instead)
    theirs = logprob.compute_topk_scores(logits, 5, sampled)
    logprob._topk_log_softmax_kernel, logprob._ranks_kernel = instead
    pairs = zip((ours.logprobs, ours.selected_token_ranks), (theirs.logprobs, theirs.selected_token_ranks), strict=True)
    return [float((one - other).abs().max()) for one, other in pairs]


class BothWays:
    """Launches each kernel with Triton's interpreter too, on the same memory, and compares all of it afterwards."""

    def __init__(self) -> None:
        self.launches: dict[str, int] = {}
        self.different: list[str] = []
        install = numbers.install
        numbers.install = lambda interpreter: self._install(interpreter, install)

    def _install(self, interpreter, install) -> None:
        kind = interpreter.InterpretedFunction
        theirs = kind.run
        install(interpreter)
        ours = kind.run

        def run(kernel, *args, **kwargs):
            tensors = [each for each in (*args, *kwargs.values()) if hasattr(each, "data_ptr")]
            before = [tensor.clone() for tensor in tensors]
            theirs(kernel, *args, **kwargs)
            expected = [tensor.clone() for tensor in tensors]
            for tensor, content in zip(tensors, before, strict=True):
                tensor.copy_(content)
            ours(kernel, *args, **kwargs)
            name = kernel.fn.__name__
            self.launches[name] = self.launches.get(name, 0) + 1
            for one, other in zip(tensors, expected, strict=True):
                if not bool(((one == other) | ((one != one) & (other != other))).all()):
                    self.different.append(name)

        kind.run = run


def both_ways(model: Path, directory: Path) -> dict:
    """An engine, and one that guesses, whose kernels are compared."""
    compared = BothWays()
    result = in_this_process(model, directory, 1)
    guessing = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    other = InProcess(model, directory / "guessing", speculative_config=guessing)
    other.finish(other.begin(0, ["greedy", "seeded", "penalties"]))
    return result | {"launches": compared.launches, "different": compared.different}


def without_waiting(one: InProcess) -> dict:
    """What is seen of a step whose end nobody waits for."""
    from gpu_path import slow_copies

    one.begin(3, CERTAIN)
    sampled = one.runner.req_states.last_sampled_tokens
    before = sampled.clone()
    one.core.model_executor.driver_worker.worker.synchronize_device()
    late = int((sampled != before).sum())
    one.finish({})
    stock, slow_copies.Event.synchronize = slow_copies.Event.synchronize, lambda event: None
    try:
        unawaited = one.finish(one.begin(0, ["greedy", "seeded"]))
    finally:
        slow_copies.Event.synchronize = stock
    return {"late": late, "unawaited": unawaited}


def in_other_processes(model: Path, directory: Path, ranks: int) -> dict:
    from vllm import LLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    torpor = {"torpor": {"checkpoint_dir": str(directory)}}
    llm = LLM(str(model), additional_config=torpor, tensor_parallel_size=ranks, **ENGINE)
    client = llm.llm_engine.engine_core
    try:
        result = {"before": client.call_utility("gpu_path_report"), "runs": []}
        for _ in range(2):
            llm.reset_prefix_cache()
            add_requests(llm.llm_engine, CERTAIN)
            answers = run(llm.llm_engine, 2)
            result["in_flight"] = client.call_utility("gpu_path_report")["batches_in_flight"]
            result["runs"].append(final(answers | run(llm.llm_engine)))
    finally:
        client.shutdown()
    return result


async def asynchronously(model: Path, directory: Path) -> dict:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    torpor = {"torpor": {"checkpoint_dir": str(directory)}}
    arguments = AsyncEngineArgs(model=str(model), additional_config=torpor, disable_log_stats=True, **ENGINE)
    engine = AsyncLLM.from_engine_args(arguments)
    begun = asyncio.Event()

    async def read(name: str) -> list:
        prompt, params = REQUESTS[name]
        async for output in engine.generate(prompt, params.clone(), name):
            last = output
            begun.set()
        return last

    try:
        result = {"before": await engine.engine_core.call_utility_async("gpu_path_report"), "runs": []}
        for _ in range(2):
            await engine.reset_prefix_cache()
            begun.clear()
            readers = [asyncio.create_task(read(name)) for name in CERTAIN]
            await begun.wait()
            result["in_flight"] = (await engine.engine_core.call_utility_async("gpu_path_report"))["batches_in_flight"]
            outputs = await asyncio.gather(*readers)
            result["runs"].append({name: answer(output) for name, output in zip(CERTAIN, outputs, strict=True)})
    finally:
        engine.shutdown()
    return result


def main() -> None:
    kind, model, directory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if kind == "in-process":
        result = in_this_process(model, directory, 2)
    elif kind == "both-ways":
        result = both_ways(model, directory)
    elif kind == "briefly":
        result = in_this_process(model, directory, 1, ["greedy", "seeded", "penalties", "long"])
    elif kind == "async":
        result = asyncio.run(asynchronously(model, directory))
    else:
        result = in_other_processes(model, directory, {"own-core": 1, "two-ranks": 2}[kind])
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
