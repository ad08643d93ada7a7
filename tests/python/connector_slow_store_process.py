# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine whose shared store takes its time for each block.

    connector_slow_store_process.py MODEL FOLDER SECONDS

Prints how long checkpoints and sleeps took while blocks were on their way there, and what the requests got.
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

from torpor.errors import TimedOut


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


def end(served: Served) -> list[int]:
    """Return the tokens of the request that was in the middle."""
    ended = []
    while served.one.engine.has_unfinished_requests():
        ended += [output for output in served.one.engine.step() if output.finished]
    return list(ended[0].outputs[0].token_ids)


def main() -> None:
    model, folder, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    options = {"offload": "eager", "host_bytes": "64MiB", "kv_store": slow_store(seconds)}
    options |= {"kv_store_timeout_ms": int(10 * 1000 * seconds)}
    served = Served(InProcess(model, folder, torpor=options, **(ENGINE | {"num_gpu_blocks_override": 200})))
    llm, texts, found, tokens = served.one.llm, prompts(), {}, []

    def timed(name: str, call) -> None:
        began = time.monotonic()
        try:
            found[name] = {"report": call()}
        except TimedOut as problem:
            found[name] = {"error": str(problem)}
        found[name]["seconds"] = time.monotonic() - began

    for name, call, these in (
        ("checkpoint", lambda: llm.checkpoint().pause_seconds, texts[:3]),
        ("sleep", lambda: bool(llm.sleep(level=1, preserve_state=True, timeout=seconds / 2)), texts[3:6]),
        ("to disk", lambda: bool(llm.sleep(level=1, preserve_state=True, to="disk", timeout=0.5)), texts[6:9]),
    ):
        begin(served, name, these, 5)
        timed(name, call)
        if name == "sleep":
            llm.wake_up()
        tokens.append(end(served))
    print("RESULT " + json.dumps(found | {"tokens": tokens}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
