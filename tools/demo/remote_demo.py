# SPDX-License-Identifier: Apache-2.0
"""What goes from engine to engine over a network: KV blocks through a Redis server, and a checkpoint that is pushed to
an S3 server, gone here, and pulled into an empty directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import offload_demo
from engine_child import DemoError
from networks import NEAR, Wire, inside
from redis_server import RedisServer
from s3_server import BUCKET, S3Server
from screen import Screen, size

TORPOR = os.environ.get("TORPOR_BINARY") or Path(__file__).resolve().parents[2] / "build/release/tools/torpor/torpor"


DOCUMENT_TOKENS = 1000
ALONE = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}  # of a network that nothing but the store is in
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}  # two engines on the same cores: who waits must not spin


def share(model: Path, directory: Path, max_tokens: int, screen: Screen) -> dict:
    """Two engines with nothing in common but a Redis server: the second one is asked what the first one answered."""
    with RedisServer(directory / "redis") as server:
        screen.line(f"Redis server: {server.url}")
        sides = []
        try:
            for name in ("first", "second"):
                (directory / name).mkdir()
                options = {
                    "checkpoint_dir": str(directory / name),
                    "offload": "eager",
                    "host_bytes": "512MiB",
                    "kv_store": server.url,
                }
                log = directory / f"{name}.log"
                sides.append(offload_demo.Side(model, directory / name, log, DOCUMENT_TOKENS, options, PATIENT))
                sides[-1].launch()
            for side in sides:
                side.start()
            text = (offload_demo.DOCUMENTS / offload_demo.READ).read_text()
            prompt = sides[0].tokens(text)[:DOCUMENT_TOKENS] + sides[0].tokens(offload_demo.QUESTION)
            answers = []
            for side, name in zip(sides, ("the first engine", "the second one"), strict=True):
                answers.append(side.ask(prompt, max_tokens))
                side.process.order("settle")  # what goes out has arrived
                screen.line(f"{name}: {offload_demo.said(answers[-1])}")
        finally:
            for side in sides:
                side.kill()
    first, second = answers
    if second["cached_tokens"] <= first["cached_tokens"]:
        raise DemoError(f"the second engine found nothing; the log has more: {log}")
    if second["tokens"] != first["tokens"]:
        raise DemoError("the second engine answers something else than the first")
    return {
        "remote_cached_tokens": second["cached_tokens"],
        "remote_prompt_tokens": len(prompt),
        "remote_first_token_seconds": [answer["first_token_seconds"] for answer in answers],
    }


def take_elsewhere(
    checkpoint: Path, directory: Path, kill: Callable[[], None], screen: Screen, wire: Wire | None
) -> dict:
    """Calls `kill` once the checkpoint is pushed. Where it lies afterwards, and what the ways there and back took.
    With a `wire` the store is at one end of it, and who pulls at the other one; without, all are on one network."""
    url = f"s3://{BUCKET}/demo"
    near, far = ([], []) if wire is None else (inside(wire.near), inside(wire.far))
    with S3Server(directory / "s3", inside=near, host="127.0.0.1" if wire is None else NEAR) as server:
        screen.line(f"S3 server (SeaweedFS): {server.environment['AWS_ENDPOINT_URL']}")
        if wire is None:
            screen.line(
                "no network of its own for the place where it wakes: the kernel gives none here, or tc is not there"
            )
        else:
            screen.line("the place where it wakes has a network of its own: a wire to the S3 server, and nothing else")

        def torpor(before: list[str], *words: object) -> tuple[dict, float]:
            began = time.monotonic()
            done = subprocess.run(
                [*before, TORPOR, *map(str, words), "--json"],
                env=os.environ | server.environment,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise DemoError(f"torpor {words[0]}: {done.stderr.strip()}")
            return json.loads(done.stdout), time.monotonic() - began

        pushed, push_seconds = torpor(near, "push", checkpoint, url)
        screen.line(f"torpor push: {size(pushed['moved_bytes'])} in {push_seconds:.2f} s; kill -9")
        kill()
        for generation in checkpoint.parent.glob("g-*"):
            shutil.rmtree(generation)
        pulled, pull_seconds = torpor(far, "pull", url, directory / "elsewhere")
        screen.line(f"torpor pull: {size(pulled['moved_bytes'])} in {pull_seconds:.2f} s, to {pulled['path']}")
    return {
        "store": "redis, s3",
        "own_network": wire is not None,
        "checkpoint": pulled["path"],
        "pushed_bytes": pushed["moved_bytes"],
        "push_seconds": push_seconds,
        "pull_seconds": pull_seconds,
    }
