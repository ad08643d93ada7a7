# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine whose model has no KV cache sleeps and wakes, also with requests that wait.

Takes the folder of the tiny model, for its tokenizer, and an empty one. Prints each embedding, before and after, and
why a checkpoint is refused. On the GPU path it sleeps without its requests, and prints why a sleep with them is
refused.
"""

import json
import os
import sys
from pathlib import Path

from conftest import gpu_path
from feature_models import encoder
from vllm import LLM, PoolingParams

from torpor.errors import Unsupported

TEXTS = ["the sea", "a red house and its garden", "once upon a time"]


def main() -> None:
    tokenizer_from, directory = map(Path, sys.argv[1:])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    model = encoder(directory / "encoder", tokenizer_from)
    options = {"torpor": {"checkpoint_dir": str(directory / "store")}}
    more = {"gpu_memory_utilization": 0.2} if gpu_path.active() else {}
    llm = LLM(str(model), dtype="float32", enforce_eager=True, max_num_seqs=8, additional_config=options, **more)
    engine = llm.llm_engine

    def embed() -> list:
        return [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]

    def finish() -> list:
        done = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output.outputs.data.tolist() for output in engine.step() if output.finished}
        return [done[str(number)] for number in range(len(TEXTS))]

    result = {"before": embed(), "after": [], "tags": [], "refused": []}
    if gpu_path.active():
        from gpu_path import pools

        try:
            llm.sleep(preserve_state=True)
        except Unsupported as problem:
            result["refused"].append(str(problem))
        llm.sleep(level=1)
        result["tags"].append(llm.torpor.state().tags)
        llm.wake_up()
        result |= {"after": [embed()], "misused": pools.misused()}
        print("RESULT " + json.dumps(result), flush=True)
        return
    for level in (1, 2):
        for number, text in enumerate(TEXTS):
            engine.add_request(str(number), text, PoolingParams(task="embed"))
        for checkpoint in (lambda: llm.sleep(preserve_state=True, to="disk"), llm.checkpoint):
            try:
                checkpoint()
            except Unsupported as problem:
                result["refused"].append(str(problem))
        slept = llm.sleep(level=level, preserve_state=True)
        result["tags"].append(llm.torpor.state().tags | {"freed": slept.freed_bytes > 0})
        assert llm.wake_up().fully_awake
        result["after"] += [finish(), embed()]
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
