# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine of whichever vLLM this is writes a checkpoint in the middle of its answers, or
takes the requests of such a one. Prints what was answered."""

import json
import sys
from pathlib import Path

import vllm
from conftest import InProcess
from requests_of_tests import REQUESTS, run

# Releases draw seeded tokens in ways of their own; these are certain, their grammars too.
NAMES = [name for name, (_, params) in REQUESTS.items() if params.temperature == 0]


def tokens_of(answers: dict) -> dict:
    return {name: value[1][0][1] for name, value in answers.items()}


def main(word: str, model: Path, directory: Path) -> dict:
    one = InProcess(model, directory, torpor={"sessions": True}, num_gpu_blocks_override=200)
    if word == "write":
        answers = one.begin(9, NAMES)
        path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
        answers |= one.stopped()
        return {"version": vllm.__version__, "path": path, "given": tokens_of(answers)}
    report = one.llm.wake_up(from_checkpoint=word, identity="portable")
    begun = {r.request_id: r.num_computed_tokens for r in one.core.scheduler.requests.values()}
    one.engine.step()
    loaded = {i: r.num_computed_tokens for i, r in one.core.scheduler.requests.items()}
    ended = tokens_of(one.finish(run(one.engine)))
    alone = tokens_of(one.finish(one.begin(0, NAMES)))
    return {
        "version": vllm.__version__, "failed": report.failed_requests, "bytes": report.restored_bytes, "begun": begun,
        "loaded": loaded, "ended": ended, "alone": alone,
    }  # fmt: skip


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))), flush=True)
