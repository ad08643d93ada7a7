# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine of a model with images, whose weights change, or whose images lie in shared memory.
Prints what became of its caches.

image_caches_process.py weights|shared FOLDER TOKENIZER
"""

import json
import os
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


def other_pictures(one: InProcess) -> None:
    """Requests with pictures that no other has, as large as those of the first ones."""
    import numpy
    from PIL import Image

    for name in ("picture", "same", "two"):
        prompt, params = one.requests[name]
        for shade in (10, 90):
            pictures = [
                Image.fromarray(numpy.full((known.size[1], known.size[0], 3), shade + number, dtype=numpy.uint8))
                for number, known in enumerate(prompt["multi_modal_data"]["image"])
            ]
            one.engine.add_request(f"{name} {shade}", prompt | {"multi_modal_data": {"image": pictures}}, params)


def in_shared_memory(one: InProcess) -> dict:
    """One request runs, the others have their images only in vLLM's shared memory."""
    expected = one.expected
    one.llm.reset_mm_cache()
    answers = one.begin(3)
    slept = one.llm.sleep(level=1, preserve_state=True, to="disk")
    answers |= one.stopped()
    one.llm.wake_up()
    other_pictures(one)
    finished = one.finish(answers)
    one.llm.reset_prefix_cache()
    woken = one.llm.wake_up(from_checkpoint=slept.checkpoint)
    alone = one.finish({})
    return {
        "same_answers": {name: finished[name] for name in expected} == expected,
        "bound": sorted(each["id"].split("-")[0] for each in slept.bound_requests),
        "failed": sorted(each["id"].split("-")[0] for each in woken.failed_requests),
        "why": sorted({each["error"].partition(": ")[2] for each in woken.failed_requests}),
        "text_goes_on": alone["text"][1][0][1] == expected["text"][1][0][1],
    }


def main(what: str, folder: Path, tokenizer: Path) -> dict:
    feature = FEATURES["images"]
    model = feature.model(folder / "model", tokenizer)
    options = feature.options(model)
    if what == "shared":
        os.environ["VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"] = f"torpor_test_{os.getpid()}"
        options |= {"max_num_seqs": 1, "mm_processor_cache_type": "shm", "mm_processor_cache_gb": 0.05}
    one = InProcess(model, folder / "store", requests=feature.requests(model), **options)
    if what == "shared":
        return in_shared_memory(one)
    return {
        "recomputed": recomputed(one), "asleep": new_weights(one, awake=False), "awake": new_weights(one, awake=True),
    }  # fmt: skip


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], *map(Path, sys.argv[2:]))), flush=True)
