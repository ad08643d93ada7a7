# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine whose shared store takes its time for each block.

    connector_slow_store_process.py MODEL FOLDER SECONDS [sessions]

With `sessions` torpor's connector is inside vLLM's MultiConnector. Prints how long checkpoints, sleeps and pauses took
while blocks were on their way there, and what the requests got.
"""

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from conftest import InProcess
from connector_served import ENGINE, Served, params, prompts
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


def serve(connection: socket.socket, seconds: float) -> None:
    """Speak Redis's protocol, have no block, and store each one slowly."""
    answers = {b"SET": b"+OK\r\n", b"GET": b"$-1\r\n"}
    reader = connection.makefile("rb")
    while line := reader.readline():
        words = []
        for _ in range(int(line[1:])):
            size = int(reader.readline()[1:])
            words.append(reader.read(size))
            reader.read(2)
        command = words[0].upper()
        if command == b"SET":
            time.sleep(seconds)
        connection.sendall(answers.get(command, b":0\r\n"))


def slow_store(seconds: float) -> str:
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            threading.Thread(target=serve, args=(server.accept()[0], seconds), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"redis://127.0.0.1:{server.getsockname()[1]}/tests"


def begin(served: Served, name: str, texts: list[str], steps: int) -> None:
    """Blocks of `texts` are on their way to the store, and a request is in the middle."""
    for number, text in enumerate(texts):
        served.one.engine.add_request(f"{name}-{number}", {"prompt": text}, params(0))
    while served.one.engine.has_unfinished_requests():
        served.one.engine.step()
    served.one.engine.add_request(name, {"prompt": prompts()[-1]}, params(0, 40))
    for _ in range(steps):
        served.one.engine.step()
    assert served.side.busy()


def end(served: Served) -> list[list[int]]:
    """Return the tokens of each request that was in the middle."""
    ended = []
    while served.one.engine.has_unfinished_requests():
        ended += [output for output in served.one.engine.step() if output.finished]
    return [list(output.outputs[0].token_ids) for output in ended]


def main() -> None:
    model, folder, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    options = {"offload": "eager", "host_bytes": "64MiB", "kv_store": slow_store(seconds)}
    options |= {"kv_store_timeout_ms": int(10 * 1000 * seconds), "sessions": sys.argv[4:] == ["sessions"]}
    served = Served(InProcess(model, folder, torpor=options, **(ENGINE | {"num_gpu_blocks_override": 200})))
    llm, texts, found, tokens = served.one.llm, prompts(), {}, []

    def timed(name: str, call) -> None:
        began = time.monotonic()
        try:
            found[name] = {"report": call()}
        except Exception as problem:
            found[name] = {"error": str(problem)}
        found[name]["seconds"] = time.monotonic() - began

    def sleep_without_requests() -> bool:
        tokens.extend(end(served))
        return bool(llm.sleep(level=1, mode="wait", timeout=seconds / 2))

    def pause() -> None:
        try:
            served.one.core.pause_scheduler("keep", True)
        finally:
            served.one.core.resume_scheduler()

    keeps = {"preserve_state": True}
    calls = {
        "checkpoint": lambda: llm.checkpoint().pause_seconds,
        "sleep": lambda: bool(llm.sleep(level=1, timeout=seconds / 2, **keeps)),
        "without requests": sleep_without_requests,
        "to disk": lambda: bool(llm.sleep(level=1, to="disk", timeout=0.5, **keeps)),
    }
    if options["sessions"]:
        calls = {"sleep": calls["sleep"], "pause": pause, "without requests": sleep_without_requests}
        if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):  # no sleep beside another connector keeps requests
            keeps = {"mode": "keep"}
    for number, (name, call) in enumerate(calls.items()):
        begin(served, name, texts[3 * number : 3 * number + 3], 5)
        timed(name, call)
        if llm.is_sleeping():
            llm.wake_up()
        tokens += end(served)
    print("RESULT " + json.dumps(found | {"tokens": tokens}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
