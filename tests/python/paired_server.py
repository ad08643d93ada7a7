# SPDX-License-Identifier: Apache-2.0
"""A server as `torpor pair` starts it, without an engine.

It holds the lock of the response log, names itself as the owner, follows the owner as a standby, publishes its states,
and accepts clients where torpor's server would. torpor.vllm.serve reads its command line. It sends each client
"PORT STATES": the states that it has been in.

paired_server.py -m torpor.vllm.serve FOLDER …: each line of FOLDER/fail-PORT is an exit code with which a process of
this port ends at its start, one a start; "failed": it is failed, and stays there. With FOLDER/hang-PORT a standby of
this port does not end on SIGTERM. With FOLDER/fail-take-over-PORT the next take-over of this port fails. A server that
owns fails on SIGUSR1, as one does that cannot go on after a switch: it owns nothing then, and gives no heartbeat. On
SIGUSR2 it hands over to its standby, as in a switch that succeeds, and stays in "ending" for ever.
"""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from torpor import _core
from torpor.errors import Busy
from torpor.vllm.serve import take_options
from torpor.vllm.server import listening
from torpor.vllm.server.settings import Settings


def fail_as_asked(folder: Path, port: int, enter) -> None:
    asked = folder / f"fail-{port}"
    codes = asked.read_text().split() if asked.exists() else []
    if codes:
        asked.write_text("\n".join(codes[1:]))
        if codes[0] == "failed":
            enter("failed")
            signal.pause()
        sys.exit(int(codes[0]))


def main() -> None:
    assert sys.argv[1:3] == ["-m", "torpor.vllm.serve"], sys.argv
    rest = take_options(sys.argv[3:])
    settings = Settings.from_environment()
    port = int(rest[rest.index("--port") + 1])
    directory = os.environ["TORPOR_CHECKPOINT_DIR"]
    states = []

    def enter(state: str) -> None:
        states.append(state)
        print(f"process {os.getpid()} is {state}", flush=True)
        listening.publish(settings.state_fd, state)

    enter("starting")
    fail_as_asked(Path(rest[0]), port, enter)
    clients = listening.socket_of(settings.listen_fd)
    watch = _core.OwnerWatch(directory)
    watch.wait(0)
    with socket.create_server(("127.0.0.1", port)):
        if settings.standby_of:
            if (Path(rest[0]) / f"hang-{port}").exists():
                signal.signal(signal.SIGTERM, lambda *_: enter("ending"))
            enter("standby")
            handed_over = Path(rest[0]) / "handed-over"
            while not handed_over.exists() and watch.wait(0.1)["state"] not in ("ended", "silent"):
                time.sleep(0.01)
            enter("taking over")
            if not handed_over.exists():
                watch.end_owner(60)
            if (failing := Path(rest[0]) / f"fail-take-over-{port}").exists():
                failing.unlink()
                enter("failed")
                while True:
                    signal.pause()
        log = {"directory": f"{directory}/answers", "engine": {"model": "none"}}
        try:
            answers = _core.DeliveryLog(log)
        except Busy as problem:
            sys.exit(f"two owners: {problem}")
        record = _core.OwnerRecord(directory, settings.ownership_term_seconds)

        # A signal that comes just before a blocking call, or to another thread, would not end that call: so it is read.
        signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)
        failed = threading.Event()
        threading.Thread(target=beat, args=(record, settings, failed), daemon=True).start()
        enter("awake")
        (Path(rest[0]) / "handed-over").unlink(missing_ok=True)
        threading.Thread(target=serve, args=(clients, port, states), daemon=True).start()
        while (number := os.read(signals, 1)[0]) != signal.SIGTERM:
            failed.set()
            answers.hand_over()
            if number == signal.SIGUSR2:
                stay_in_ending(Path(rest[0]) / "handed-over", enter)
            enter("failed")
        enter("ending")
        answers.close()
        os._exit(17)  # what its parent is to end with


def stay_in_ending(handed_over: Path, enter) -> None:
    handed_over.touch()
    while handed_over.exists():  # until the standby serves
        time.sleep(0.01)
    enter("ending")
    while True:
        signal.pause()


def serve(clients: socket.socket, port: int, states: list[str]) -> None:
    while True:
        connection, _ = clients.accept()
        with connection:
            connection.sendall(f"{port} {','.join(states)}".encode())


def beat(record: _core.OwnerRecord, settings: Settings, failed: threading.Event) -> None:
    while not failed.wait(settings.ownership_term_seconds / 10):
        record.beat()


if __name__ == "__main__":
    main()
