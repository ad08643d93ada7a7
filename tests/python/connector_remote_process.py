# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine that shares KV blocks through a Redis server.

    connector_remote_process.py MODEL FOLDER OPTIONS SERVER NEAR FAR

OPTIONS: those of the connector, as JSON. SERVER: the process id of the server, or 0. NEAR, FAR: processes in whose
networks this engine and the server are, or 0. Prints what a round of requests got, and another after a reset; with a
server instead what rounds got while the network between them was slowed and cut, and while the server was stopped, and
killed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/demo"))

import networks
from conftest import InProcess
from connector_served import ENGINE, Served, prompts
from suspend import suspend
from zygote import MOST_SECONDS

SLOW = "200kbit"  # a block takes longer than kv_store_timeout_ms


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


def cut_off(served: Served, name: str) -> dict:
    """What is computed while the server cannot be had; nothing of it was found when it is asked for again."""
    served.one.core.scheduler.reset_prefix_cache()
    texts = [f"{name}: {text}" for text in prompts()]
    result = round_of(served, texts)
    result["again"] = round_of(served, texts)["tokens"]
    return result


def on_a_bad_network(served: Served, wire: networks.Wire) -> dict:
    wire.slow(SLOW)
    result = {"slowed": cut_off(served, "slowed")}
    wire.cut()
    result["cut"] = cut_off(served, "cut")
    wire.mend()
    end, rounds = time.monotonic() + MOST_SECONDS, 0
    while True:
        rounds += 1
        result["mended"] = cut_off(served, f"mended {rounds}")
        if result["mended"]["stats"].get("publish_transferred", 0) > 0 or time.monotonic() > end:
            return result
        time.sleep(0.2)


def without_the_server(served: Served, server: int) -> dict:
    """Nobody waits for one that is stopped, or gone; what it has is computed."""
    result = {}
    suspend(server)
    result = {"stopped": cut_off(served, "stopped")}
    os.kill(server, signal.SIGKILL)
    return result | {"killed": cut_off(served, "killed")}


def main() -> None:
    model, folder, options = sys.argv[1:4]
    server, near, far = map(int, sys.argv[4:7])
    if near:
        networks.enter(near)
        os.environ["VLLM_HOST_IP"] = "127.0.0.1"
    torpor = {"offload": "eager", "host_bytes": "64MiB", "advanced": {"policy_timeout_ms": 1000 * MOST_SECONDS}}
    torpor |= json.loads(options)
    served = Served(InProcess(Path(model), Path(folder) / "checkpoints", torpor=torpor, **ENGINE))
    if server:
        result = on_a_bad_network(served, networks.Wire(near, far)) if far else {}
        result |= without_the_server(served, server)
    else:
        result = {"first": round_of(served, prompts())}
        served.one.core.scheduler.reset_prefix_cache(reset_connector=True)
        result["after a reset"] = round_of(served, prompts())
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
