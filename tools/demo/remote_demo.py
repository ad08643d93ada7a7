"""A checkpoint that leaves its machine: pushed to an S3 server, gone here, and pulled into an empty directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from engine_child import DemoError
from s3_server import BUCKET, S3Server
from screen import Screen, size

TORPOR = Path(__file__).resolve().parents[2] / "build/release/tools/torpor/torpor"


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
        "store": "s3",
        "checkpoint": pulled["path"],
        "pushed_bytes": pushed["moved_bytes"],
        "push_seconds": push_seconds,
        "pull_seconds": pull_seconds,
    }
