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
from redis_server import RedisServer
from s3_server import BUCKET, S3Server
from screen import Screen, size

TORPOR = Path(__file__).resolve().parents[2] / "build/release/tools/torpor/torpor"


DOCUMENT_TOKENS = 1000
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
                    "dir": str(directory / name),
                    "offload": "eager",
                    "host_bytes": "512MiB",
                    "remote": server.url,
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


def take_elsewhere(checkpoint: Path, directory: Path, kill: Callable[[], None], screen: Screen) -> dict:
    """Calls `kill` once the checkpoint is pushed. Where it lies afterwards, and what the ways there and back took."""
    url = f"s3://{BUCKET}/demo"
    with S3Server(directory / "s3") as server:
        screen.line(f"S3 server (SeaweedFS): {server.environment['AWS_ENDPOINT_URL']}")

        def torpor(*words: object) -> tuple[dict, float]:
            began = time.monotonic()
            done = subprocess.run(
                [TORPOR, *map(str, words), "--json"],
                env=os.environ | server.environment,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise DemoError(f"torpor {words[0]}: {done.stderr.strip()}")
            return json.loads(done.stdout), time.monotonic() - began

        pushed, push_seconds = torpor("push", checkpoint, url)
        screen.line(f"torpor push: {size(pushed['moved_bytes'])} in {push_seconds:.2f} s; kill -9")
        kill()
        for generation in checkpoint.parent.glob("g-*"):
            shutil.rmtree(generation)
        pulled, pull_seconds = torpor("pull", url, directory / "elsewhere")
        screen.line(f"torpor pull: {size(pulled['moved_bytes'])} in {pull_seconds:.2f} s, to {pulled['path']}")
    return {
        "store": "redis, s3",
        "checkpoint": pulled["path"],
        "pushed_bytes": pushed["moved_bytes"],
        "push_seconds": push_seconds,
        "pull_seconds": pull_seconds,
    }
