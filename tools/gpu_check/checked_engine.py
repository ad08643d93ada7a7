# SPDX-License-Identifier: Apache-2.0
"""The engine that the checks put to sleep, and the requests that they give it."""

from __future__ import annotations

import os

from vllm import LLM, SamplingParams

TOKENS = 24  # of each answer; the steps of a run are few more


def _params(**options) -> SamplingParams:
    return SamplingParams(**({"max_tokens": TOKENS, "ignore_eos": True} | options))


# Greedy; seeded with everything that is counted or looked up at a request's slot; unseeded; a prompt of several chunks.
REQUESTS = {
    "greedy": ("The old clock maker was never late", _params(temperature=0)),
    "penalties": (
        "la la la town",
        _params(
            temperature=0.8,
            seed=5,
            repetition_penalty=1.2,
            presence_penalty=0.4,
            frequency_penalty=0.3,
            logit_bias={100: 2.0, 200: -5.0},
            min_tokens=20,
            logprobs=2,
        ),
    ),
    "unseeded": ("Once upon a time", _params(temperature=1.0, top_k=50, top_p=0.9)),
    "long": ("foo bar " * 80, _params(temperature=0, prompt_logprobs=1, max_tokens=12)),
}
# Without log probabilities and penalties FlashInfer may sample; none has a seed of its own.
UNSEEDED = {
    f"unseeded-{number}": (prompt, _params(temperature=1.0, top_k=40, top_p=0.9))
    for number, prompt in enumerate(("My name is", "In a small town", "He said", "They were"))
}
# With drafts, which are often right here: without the options that vLLM refuses beside them.
DRAFTED = {
    "greedy": ("la la la la la la", _params(temperature=0)),
    "seeded": ("once once once once", _params(temperature=0.6, seed=7, repetition_penalty=1.1, logprobs=2)),
    "unseeded": REQUESTS["unseeded"],
    "long": REQUESTS["long"],
}
OPTIONS = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128, "seed": 0, "enforce_eager": True}
ON_GPU_PATH = {"block_size": 32, "dtype": "float32"}
ON_CUDA = {"kv_cache_memory_bytes": 2 << 30}


class CheckedEngine:
    """An LLM whose engine core lives in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), and runs of its requests."""

    def __init__(self, model: str, directory: str, gpu_path: bool, options: dict):
        torpor = {"checkpoint_dir": directory, "retain_checkpoints": 100} | (
            {} if gpu_path else {"gpu_preserve_state": True}
        )
        self.gpu_path = gpu_path
        self.requests = DRAFTED if "speculative_config" in options else REQUESTS
        self.directory = directory
        options = OPTIONS | (ON_GPU_PATH if gpu_path else ON_CUDA) | options
        self.uses_torpor = os.environ.get("TORPOR_ENABLED") != "0"
        if self.uses_torpor:
            options["additional_config"] = {"torpor": torpor}
        self.llm = LLM(model, **options)
        self.engine = self.llm.llm_engine
        self._references: dict[int, dict] = {}
        self._uninterrupted: dict | None = None

    @property
    def core(self):
        return self.engine.engine_core.engine_core

    @property
    def runner(self):
        return self.core.model_executor.driver_worker.worker.model_runner

    def begin(self, steps: int, requests: dict | None = None) -> dict:
        """The requests from the same start each time, whatever the run before left; then so many steps."""
        import numpy
        import torch

        if self.uses_torpor and self.llm.is_sleeping():
            self.llm.wake_up()
        if left := [state.external_req_id for state in self.engine.output_processor.request_states.values()]:
            self.engine.abort_request(left)
        self.run()
        self.llm.reset_prefix_cache()
        torch.manual_seed(3)  # of the GPUs too
        numpy.random.seed(3)
        for name, (prompt, params) in (requests or self.requests).items():
            self.engine.add_request(name, prompt, params)
        return self.run(steps)

    def run(self, steps: int | None = None) -> dict:
        """The latest answer of each request that came in within `steps` steps, or until all have ended."""
        answers, made = {}, 0
        while self.engine.has_unfinished_requests() and (steps is None or made < steps):
            for output in self.engine.step():
                answers[output.request_id] = answer(output)
            made += 1
        return answers

    def slept(self, answers: dict, sleep, wake=None) -> dict:
        """Sleeps and wakes as these functions of the LLM do; then the run to its end."""
        sleep(self.llm)
        answers |= self.run(1)  # what was given while the engine came to stand still
        wake(self.llm) if wake else self.llm.wake_up()
        return self.finish(answers)

    def finish(self, answers: dict) -> dict:
        answers |= self.run()
        return {name: value for name, value in answers.items() if value[0]}

    def uninterrupted(self) -> dict:
        if self._uninterrupted is None:
            self._uninterrupted = self.finish(self.begin(0))
        return self._uninterrupted

    def reference(self, steps: int) -> dict:
        """Return the reference run: it paused after so many steps, and nothing was moved."""
        if steps not in self._references:
            self._references[steps] = self.slept(self.begin(steps), pause)
        return self._references[steps]


def pause(llm: LLM) -> None:
    llm.sleep(level=0)


def answer(output) -> list:
    """All of a RequestOutput that its reader sees, as plain values that survive JSON."""
    choices = [
        [list(c.token_ids), c.text, c.finish_reason, c.cumulative_logprob, [_position(p) for p in c.logprobs or ()]]
        for c in output.outputs
    ]
    return [output.finished, choices, [_position(p) for p in output.prompt_logprobs or ()]]


def _position(entry) -> list | None:
    return entry and [[token, item.logprob, item.rank] for token, item in entry.items()]


def differing(given: dict, expected: dict) -> str:
    """Which answers are not as expected, and at which token; empty if none."""
    found = []
    for name in sorted(given.keys() | expected.keys()):
        ours, theirs = given.get(name), expected.get(name)
        if ours is None or theirs is None:
            found.append(f"{name}: {'not finished' if ours is None else 'unexpected'}")
        elif ours != theirs:
            pairs = enumerate(zip(ours[1][0][0], theirs[1][0][0], strict=False))
            position = next((i for i, (one, other) in pairs if one != other), None)
            found.append(f"{name}: {'beside its tokens' if position is None else f'from token {position}'}")
    return "; ".join(found)
