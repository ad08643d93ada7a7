# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine with torpor's KV connector, whose worker has a process of its own.

    connector_killed_process.py WHOM MODEL FOLDER

WHOM "worker": it is killed in the middle of the second round, while blocks move; prints how serving ended. "none": asks
the same of what is on disk. Both print the tokens of a round and how many of the prompts' were not computed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from conftest import InProcess
from connector_served import ENGINE, Served, prompts
from zygote import MOST_SECONDS


def process_of(worker) -> int:
    return os.getpid()


def killed_in_the_middle(served: Served) -> dict:
    """Return how many loads were under way, and the error with which serving ended."""
    scheduler = served.one.core.scheduler
    scheduler.reset_prefix_cache()
    [worker] = served.one.core.collective_rpc(process_of)
    served.ask(prompts(), 64)
    while not (loading := served.side.core.loading):
        served.one.engine.step()
    os.kill(worker, signal.SIGKILL)
    began = time.monotonic()
    try:
        while time.monotonic() < began + MOST_SECONDS:
            served.one.engine.step()
    except Exception as error:
        return {"loading": loading, "error": f"{type(error).__name__}: {error}"}
    return {"loading": loading, "error": None}


def main() -> None:
    whom, model, folder = sys.argv[1:4]
    offload = {"offload": "eager", "host_bytes": "2MiB", "disk_bytes": "64MiB"}
    one = InProcess(Path(model), Path(folder) / "left", torpor=offload, distributed_executor_backend="mp", **ENGINE)
    served = Served(one)
    answers = served.round(prompts())
    result = {
        "tokens": [tokens for tokens, _ in answers],
        "cached": sum(cached for _, cached in answers),
        "stats": served.side.stats(),
    }
    if whom == "worker":
        result["ended"] = killed_in_the_middle(served)
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
