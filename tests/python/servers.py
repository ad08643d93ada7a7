# SPDX-License-Identifier: Apache-2.0
"""Servers and clients of the server tests: tools/demo/serving.py with what all of them need."""

import asyncio
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/demo"))

from prometheus_client.parser import text_string_to_metric_families
from s3_server import BUCKET, S3Server
from serving import Client, Reading, Server, ServerEnded
from zygote import MOST_SECONDS, shared

__all__ = [
    "ALICE", "BOB", "BUCKET", "DEFERRED_BY_HAND", "Client", "Reading", "S3Server", "Server", "ServerEnded", "begin",
    "make_server", "of", "played", "reloaded", "samples", "sampling", "start_requests", "until", "until_sleeping",
]  # fmt: skip

DEFERRED_BY_HAND = ("--worker-extension-cls", "deferred_by_hand.DeferredByHand")
ALICE, BOB = "key-of-alice", "key-of-bob"


class ForkedServer(Server):
    """A server whose processes are forked from one that has vLLM. tools/dev demo --server starts a real one."""

    def _launch(self, command, out):
        return shared().popen(command[1:], env=self._environment, stdout=out, stderr=out)


def make_server(
    model: Path,
    directory: Path,
    *options: str,
    name: str = "server",
    dtype: str = "float32",
    environment: dict[str, str] | None = None,
) -> Server:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    own = {"VLLM_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    # As users have it, whatever engines of the test process have: core and worker in processes of their own.
    own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | (environment or {})
    return ForkedServer(model, directory, ["--dtype", dtype, *options], own, keys=(ALICE, BOB), name=name)


def samples(metrics: str) -> dict[tuple[str, frozenset], float]:
    """What /metrics has, by name and labels."""
    found = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}


def of(**labels: str) -> frozenset:
    """Labels of a metric, with those of the engine."""
    return frozenset(({"model_name": "model", "engine": "0"} | labels).items())


def start_requests(metrics: dict[tuple[str, frozenset], float]) -> dict[str, float]:
    """Return those of samples() that say what the start of the server found, without zeros."""
    found = [(dict(labels), count) for (name, labels), count in metrics.items() if name == "torpor_start_requests"]
    return {labels["result"]: count for labels, count in found if count > 0}


def sampling(number: int, max_tokens: int) -> dict:
    """Greedy and seeded in turn: both have one right answer."""
    return {"max_tokens": max_tokens} | (
        {"temperature": 0} if number % 2 == 0 else {"temperature": 0.8, "top_p": 0.95, "seed": number}
    )


def played(server, scene):
    """Runs an async scene with Alice's client."""

    async def run():
        client = Client(server.url, ALICE)
        try:
            return await asyncio.wait_for(scene(client), MOST_SECONDS)
        finally:
            if (await client.http.get("/is_sleeping")).json()["is_sleeping"]:
                await client.admin.post("/wake_up")
            await client.close()

    return asyncio.run(run())


async def until(condition, seconds=MOST_SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)


def begin(client, request_id, prompt="Tell me about the sea.", **options) -> tuple[Reading, asyncio.Task]:
    reading = Reading(request_id)
    options = {"max_tokens": 300, "temperature": 0} | options
    return reading, asyncio.create_task(client.chat(reading, prompt, **options))


async def until_sleeping(client):
    while not (await client.http.get("/is_sleeping")).json()["is_sleeping"]:
        await asyncio.sleep(0.02)


async def reloaded(client) -> None:
    answer = await client.admin.post("/collective_rpc", json={"method": "reload_weights"})
    assert answer.status_code == 200, answer.text
