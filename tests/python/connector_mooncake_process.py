# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine that shares KV blocks through a Mooncake store.

    connector_mooncake_process.py MODEL FOLDER OPTIONS SITE MASTER

OPTIONS: those of the connector, as JSON. SITE: where Mooncake's client is. MASTER: the process id of the master, or 0.
Prints what a round of requests got; with a master, then what rounds got in the middle of which it was killed.
"""

import json
import os
import signal
import sys
from pathlib import Path

from conftest import InProcess
from connector_remote_process import cut_off, round_of
from connector_served import ENGINE, Served, prompts


def killed_in_the_middle(served: Served, master: int) -> list:
    """The tokens of requests of which the first blocks may still be found."""
    served.one.core.scheduler.reset_prefix_cache()
    ids, steps = served.ask(prompts()), []

    def kill_once() -> None:
        steps.append(None)
        if len(steps) == 2:
            os.kill(master, signal.SIGKILL)

    answers = served.answers(kill_once)
    assert len(steps) >= 2
    return [answers[each][0] for each in ids]


def main() -> None:
    model, folder, options, site = sys.argv[1:5]
    master = int(sys.argv[5])
    sys.path.append(site)
    torpor = {"offload": "eager", "host_bytes": "64MiB"} | json.loads(options)
    served = Served(InProcess(Path(model), Path(folder) / "checkpoints", torpor=torpor, **ENGINE))
    result = {"first": round_of(served, prompts())}
    if master:
        result["in the middle"] = killed_in_the_middle(served, master)
        result["killed"] = cut_off(served, "killed")
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
