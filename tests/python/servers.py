"""Servers and clients of the server tests: tools/demo/serving.py with what all of them need."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/demo"))

from s3_server import BUCKET, S3Server  # noqa: E402
from serving import Client, Reading, Server, ServerEnded  # noqa: E402
from zygote import shared  # noqa: E402

__all__ = [
    "ALICE", "BOB", "BUCKET", "LATE_BY_HAND", "Client", "Reading", "S3Server", "Server", "ServerEnded", "make_server",
    "sampling",
]  # fmt: skip

LATE_BY_HAND = ("--worker-extension-cls", "late_by_hand.LateByHand")
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
    own = {"VLLM_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": "1", "PYTHONPATH": path} | (environment or {})
    return ForkedServer(model, directory, ["--dtype", dtype, *options], own, keys=(ALICE, BOB), name=name)


def sampling(number: int, max_tokens: int) -> dict:
    """Greedy and seeded in turn: both have one right answer."""
    return {"max_tokens": max_tokens} | (
        {"temperature": 0} if number % 2 == 0 else {"temperature": 0.8, "top_p": 0.95, "seed": number}
    )
