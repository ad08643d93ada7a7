# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: two ranks beside a KV connector that is not torpor's. Prints what became of two sleeps."""

import json
import os
import sys
from pathlib import Path

from conftest import ENGINE
from requests_of_tests import add_requests, final, run
from vllm import LLM, SamplingParams

from torpor import errors

REQUESTS = {
    name: ({"prompt_token_ids": list(range(20, 20 + length))}, SamplingParams(temperature=0, max_tokens=tokens))
    for name, length, tokens in (("sent", 70, 2), ("running", 40, 40))
}


def main() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))  # where new processes find the connector
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    model, directory, transfer = sys.argv[1:]
    llm = LLM(
        model, tensor_parallel_size=2, kv_transfer_config=json.loads(transfer),
        additional_config={"torpor": {"checkpoint_dir": f"{directory}/checkpoints"}}, **ENGINE,
    )  # fmt: skip
    engine = llm.llm_engine

    def begin(steps: int | None = None) -> dict:
        add_requests(engine, requests=REQUESTS)
        return run(engine, steps)

    expected = final(begin())
    answers = begin(4)
    assert answers["sent"][0] and not answers["running"][0]
    result = {"refused": ""}
    try:
        llm.sleep(level=1, preserve_state=True)
    except errors.DeviceError as problem:
        result["refused"] = problem.what
    result["asleep_after_it"] = llm.is_sleeping()
    answers |= run(engine, 2)
    llm.sleep(level=1, preserve_state=True)
    result["asleep"] = llm.is_sleeping()
    llm.wake_up()
    result["same"] = final(answers | run(engine)) == expected
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
