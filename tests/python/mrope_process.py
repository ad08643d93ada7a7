# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine whose model has rotary embeddings with several positions a token (M-RoPE). Its
requests leave and come back, fork, and wake from a checkpoint. Prints the answers of each."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from conftest import InProcess
from requests_of_tests import run
from vllm import SamplingParams
from vllm.model_executor.models.llama import LlamaForCausalLM

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
REQUESTS = {
    "greedy": ("The capital of France is", SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)),
    "seeded": ("Once upon a time", SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True)),
}


def positions(self, tokens: list[int], features: list) -> tuple[torch.Tensor, int]:
    """Each of the three counts otherwise, as in a prompt with images; the answer goes on behind all of them."""
    places = torch.arange(len(tokens))
    return torch.stack([places, places // 2, places // 3]), 5


def tokens_of(answers: dict) -> dict:
    return {name: answer[1][0][1] for name, answer in answers.items()}


def main(model: Path, directory: str) -> dict:
    LlamaForCausalLM.supports_mrope = True
    LlamaForCausalLM.get_mrope_input_positions = positions
    one = InProcess(
        model, Path(directory), torpor={"sessions": True}, requests=REQUESTS, hf_overrides={"rope_parameters": ROPE}
    )
    result = {"uses_mrope": one.runner.uses_mrope, "plain": tokens_of(one.expected)}
    answers = one.begin(5)
    left = one.llm.torpor.hibernate(list(REQUESTS))
    one.llm.torpor.resume(left.id)
    result["resumed"] = tokens_of(one.finish(answers))
    answers = one.begin(5)
    [child] = one.llm.torpor.fork("greedy", 1).children
    forked = tokens_of(one.finish(answers))
    result["child"] = forked.pop(child)
    result["forked"] = forked
    answers = one.begin(5)
    path = one.llm.checkpoint().checkpoint
    run(one.engine)
    one.llm.reset_prefix_cache()
    one.llm.wake_up(from_checkpoint=path)
    result["woken"] = tokens_of(one.finish(answers))
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print("RESULT " + json.dumps(main(Path(sys.argv[1]), directory)), flush=True)
