"""A process of the tests: an engine that shares KV blocks through a Redis server.

    connector_remote_process.py MODEL FOLDER OPTIONS SERVER

OPTIONS: those of the connector, as JSON. SERVER: the process id of the server, or 0. Prints what a round of requests
got; with a server, then what rounds got while that was stopped, and killed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from conftest import InProcess
from connector_served import ENGINE, Served, prompts


def round_of(served: Served, texts: list[str]) -> dict:
    began, before = time.monotonic(), served.side.stats()
    answers = served.round(texts)
    stats = served.side.stats()
    return {
        "tokens": [tokens for tokens, _ in answers],
        "cached": sum(cached for _, cached in answers),
        "seconds": time.monotonic() - began,
        "stats": {name: number - before.get(name, 0) for name, number in stats.items()},
    }


def without_the_server(served: Served, server: int) -> dict:
    """Nobody waits for one that is stopped, or gone; what it has is computed."""
    result = {}
    for name, how in (("stopped", signal.SIGSTOP), ("killed", signal.SIGKILL)):
        os.kill(server, how)
        served.one.core.scheduler.reset_prefix_cache()
        texts = [f"{name}: {text}" for text in prompts()]
        result[name] = round_of(served, texts)
        result[name]["again"] = round_of(served, texts)["tokens"]
    return result


def main() -> None:
    model, folder, options, server = sys.argv[1:5]
    torpor = {"offload": "eager", "host_bytes": "64MiB"} | json.loads(options)
    served = Served(InProcess(Path(model), Path(folder) / "checkpoints", torpor=torpor, **ENGINE))
    result = {"first": round_of(served, prompts())}
    served.one.core.scheduler.reset_prefix_cache(reset_connector=True)
    result["after a reset"] = round_of(served, prompts())
    if int(server):
        result |= without_the_server(served, int(server))
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
