# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: statistics of torpor's KV connector inside vLLM's MultiConnector, whose engine core is in
another process.

    member_stats_process.py MODEL TORPOR TRANSFER

Prints the tokens of an answer, and the names of torpor's metrics that have a value.
"""

import json
import logging
import os
import sys
import time

from conftest import ENGINE
from vllm import LLM, SamplingParams
from zygote import MOST_SECONDS

PROMPT = {"prompt_token_ids": [(7919 * at) % 1000 + 20 for at in range(200)]}  # more than a block


def main(model: str, torpor: dict, transfer: dict | None) -> dict:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    logging.getLogger("vllm.v1.metrics.loggers").setLevel(logging.INFO)  # vLLM logs statistics at this level only
    options = {} if transfer is None else {"kv_transfer_config": transfer}
    llm = LLM(model, additional_config={"torpor": torpor}, **ENGINE | options | {"disable_log_stats": False})
    names: set[str] = set()
    deadline = time.monotonic() + MOST_SECONDS
    while "torpor_offload_blocks" not in names and time.monotonic() < deadline:  # vLLM reports them once a second
        [output] = llm.generate([PROMPT], SamplingParams(max_tokens=16, ignore_eos=True), use_tqdm=False)
        names = {each.name for each in llm.get_metrics() if getattr(each, "value", 0)}
    llm.llm_engine.engine_core.shutdown()
    return {
        "tokens": len(output.outputs[0].token_ids),
        "metrics": sorted(name for name in names if name.startswith("torpor_")),
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], *map(json.loads, sys.argv[2:]))), flush=True)
