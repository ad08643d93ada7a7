# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine that shares KV blocks through a Redis server.

    connector_remote_process.py MODEL FOLDER OPTIONS SERVER NEAR FAR

OPTIONS: those of the connector, as JSON. SERVER: the process id of the server, or 0. NEAR, FAR: processes in whose
networks this engine and the server are, or 0. Prints what a round of requests got, and another after a reset; with a
server instead what rounds got while the network between them was slowed and cut, and while the server was stopped, and
killed. An engine that shares uncompressed blocks through Redis has a disk too, and prints what a request got whose
blocks lie in four tiers.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/demo"))

import networks
from conftest import InProcess
from connector_served import ENGINE, Served, params, prompts
from suspend import suspend
from zygote import MOST_SECONDS

import torpor.console

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


def from_each_tier(served: Served, rings: str) -> dict:
    """A prompt of eight blocks and a rest: each tier is the nearest one that has two of them."""
    block = served.side.block_tokens
    prompt = [260 + number * 7 % 200 for number in range(8 * block + block // 2)]
    scheduler, answers = served.one.core.scheduler, []

    def ask(name: str, tokens: list[int]):
        served.one.engine.add_request(name, {"prompt_token_ids": tokens}, params(0))
        [request] = scheduler.requests.values()
        while served.one.engine.has_unfinished_requests():
            ended = [output for output in served.one.engine.step() if output.finished]
        answers.append(list(ended[0].outputs[0].token_ids))
        served.flush()
        return ended[0].num_cached_tokens, [key.hex() for key in request.block_hashes]

    _, keys = ask("computed", prompt)
    scheduler.reset_prefix_cache()
    answers_of_whole = answers.copy()
    ask("two blocks", prompt[: 2 * block + 1])
    before, stats = served.by_tier(), served.side.stats()
    with torpor.console.connect(rings) as engine:
        dropped = {
            tier: engine.call("block.drop", keys=",".join(keys[first:8]), tier=tier)["dropped"]
            for tier, first in (("host", 4), ("disk", 6))
        }
        cached, _ = ask("from each tier", prompt)
        event = engine.events(types="cached", limit=10_000)["events"][-1]
        story = engine.call("request", request=event["request"])["cached_tokens"]
    return {
        "dropped": dropped,
        "cached": cached,
        "tokens": [*answers_of_whole, answers[-1]],
        "counted": {tier: tokens - before[tier] for tier, tokens in served.by_tier().items()},
        "event": {name.removesuffix("_tokens"): tokens for name, tokens in event.items() if name.endswith("_tokens")},
        "story": story,
        "loaded": served.side.stats()["kv_store_onboarded_blocks"] - stats["kv_store_onboarded_blocks"],
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
    rings = ""
    if not server and torpor["kv_store"].startswith("redis") and torpor["block_compression"] == "none":
        rings = tempfile.mkdtemp(dir="/dev/shm")
        torpor |= {"disk_bytes": "64MiB", "disk_dir": str(Path(folder) / "disk")}
        torpor |= {"events_dir": rings, "console": "control"}
    served = Served(InProcess(Path(model), Path(folder) / "checkpoints", torpor=torpor, **ENGINE))
    if server:
        result = on_a_bad_network(served, networks.Wire(near, far)) if far else {}
        result |= without_the_server(served, server)
    else:
        result = {"first": round_of(served, prompts())}
        if rings:
            result["from each tier"] = from_each_tier(served, rings)
        served.one.core.scheduler.reset_prefix_cache(reset_connector=True)
        result["after a reset"] = round_of(served, prompts())
    print("RESULT " + json.dumps(result), flush=True)
    shutil.rmtree(rings, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
