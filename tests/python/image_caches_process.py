# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine of a model with images, whose weights change. Prints what became of its caches.

image_caches_process.py FOLDER TOKENIZER
"""

import json
import sys
from pathlib import Path

import torch
from conftest import InProcess
from features import FEATURES

NAMES = ["picture", "same"]


def answers_of(one: InProcess) -> list[list[int]]:
    prompts, params = zip(*(one.requests[name] for name in NAMES), strict=True)
    outputs = one.llm.generate(list(prompts), list(params), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def recomputed(one: InProcess) -> bool:
    """Requests of an image that the engine core has no more are answered."""
    before = answers_of(one)
    answers = one.begin(3, NAMES)
    one.llm.sleep(level=0)
    one.llm.wake_up(kv="recompute")
    one.finish(answers)
    return answers_of(one) == before


def new_weights(one: InProcess, awake: bool) -> dict:
    """The same image, read by another encoder: as an engine answers that has never seen it."""
    before = answers_of(one)
    if not awake:
        one.llm.sleep(level=1, preserve_state=True)
        one.llm.wake_up(tags=["weights"])
    with one.llm.updating_weights(), torch.no_grad():
        for name, parameter in one.runner.get_model().named_parameters():
            if "vision" in name:
                parameter.mul_(-1.5)
    if not awake:
        one.llm.wake_up()
    found = answers_of(one)
    one.llm.reset_prefix_cache()
    one.llm.reset_mm_cache()
    one.core.reset_encoder_cache()
    return {"changed": found != before, "as_anew": found == answers_of(one)}


def main(folder: Path, tokenizer: Path) -> dict:
    feature = FEATURES["images"]
    model = feature.model(folder / "model", tokenizer)
    one = InProcess(model, folder / "store", requests=feature.requests(model), **feature.options(model))
    return {
        "recomputed": recomputed(one), "asleep": new_weights(one, awake=False), "awake": new_weights(one, awake=True),
    }  # fmt: skip


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(*map(Path, sys.argv[1:]))), flush=True)
