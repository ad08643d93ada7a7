# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: a server without an engine, whose console is asked over its socket. Prints the answers."""

import asyncio
import json
import subprocess
import sys
import tempfile
from types import SimpleNamespace

from inspector import BINARY
from server_stubs import Engine
from torpor.vllm.server import front, life
from torpor.vllm.server.settings import Settings

import torpor.console
from torpor import errors


def refused(console, method: str, **params) -> list:
    try:
        return ["answered", console.call(method, **params)]
    except errors.Error as problem:
        return [problem.code, problem.what, problem.next_step]


def asked(server, console, directory: str) -> dict:
    """In a thread of its own: the server's loop is another one's."""
    sleep = console.sleep(level=1, to="disk", tags="weights, kv_cache")
    state, woken = server.state, console.wake(kv="keep")
    console.sleep(mode="abort")
    server.engine.fails_with = errors.NotEnoughRoom("the disk is full", "remove something")
    failed = refused(console, "wake")
    server.engine.fails_with = None
    line = subprocess.run([BINARY, "live", "--engine", directory, "wake"], capture_output=True, text=True, timeout=600)
    return {
        "plan": console.plan(level=2, to="disk") == {},
        "sleep": [sleep["status"], sleep["freed_bytes"], state],
        "wake": woken["status"],
        "failed": failed,
        "by the command line": [line.returncode, json.loads(line.stdout or "{}").get("status"), line.stderr],
        "checkpoint": console.checkpoint()["checkpoint"],
        "wrong": [refused(console, "sleep", **each) for each in ({"level": 7}, {"to": "tape"}, {"mode": "kill"})],
        "events": [[event["from"], event["to"]] for event in console.events(types="control")["events"]],
    }


async def scene(role: str, directory: str) -> dict:
    life.holds_memory_of = lambda config: True
    engine = Engine()
    engine.vllm_config.additional_config["torpor"] |= {"events_dir": directory, "console": role}
    server = life.Server(engine, SimpleNamespace(), Settings(), "model")
    await server.start()
    front.begin(server)
    with torpor.console.connect(directory, 60, front=True) as console:
        if role == "read":
            return {
                method: (await asyncio.to_thread(refused, console, method))[0]
                for method in sorted(front.METHODS | {"hello"})
            }
        result = await asyncio.to_thread(asked, server, console, directory)
        return result | {"calls": [call for call in engine.calls if call[0] in ("plan_sleep", "sleep", "wake_up")]}


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        print("RESULT " + json.dumps(asyncio.run(scene(sys.argv[1], directory))), flush=True)


if __name__ == "__main__":
    main()
