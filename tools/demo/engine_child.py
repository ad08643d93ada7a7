# SPDX-License-Identifier: Apache-2.0
"""The child with the engine, as the demo's parent sees it: orders and answers as JSON lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


class DemoError(Exception):
    """What was wrong and what to do, for the user."""


class EngineProcess:
    """The child with the engine (engine_process.py). `inside`: words before its command (networks.py).

    `memory_share`: vLLM sizes the KV cache by this share of the machine's memory; None: it gets 1 GiB.
    """

    def __init__(
        self,
        model: Path,
        directory: Path,
        log: Path,
        environment: dict[str, str],
        *arguments: str,
        inside: list[str] = (),
        memory_share: float | None = None,
    ):
        self._log = log
        order_out, self._order = os.pipe()
        self._answer, answer_in = os.pipe()
        # One thread count and one hash seed for both processes: they are part of what makes tokens equal.
        environment = (
            os.environ
            | environment
            | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONHASHSEED": "0",
            }
        )
        if memory_share is not None:
            del environment["VLLM_CPU_KVCACHE_SPACE"]
            arguments = (*arguments, "--options", json.dumps({"gpu_memory_utilization": memory_share}))
        command = [
            *inside,
            sys.executable,
            HERE / "engine_process.py",
            "--model",
            model,
            "--dir",
            directory,
            "--orders",
            order_out,
            "--answers",
            answer_in,
            *arguments,
        ]
        with open(log, "a") as out:
            self._process = subprocess.Popen(
                [str(c) for c in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=(order_out, answer_in),
                env=environment,
            )
        os.close(order_out)
        os.close(answer_in)
        self._answers = os.fdopen(self._answer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        self._result(None)

    def order(self, name: str, on_event=None, **arguments) -> dict:
        os.write(self._order, (json.dumps({"do": name} | arguments) + "\n").encode())
        return self._result(on_event)

    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise DemoError(f"process {self.pid} has no VmRSS")

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        if not self._answers.closed:
            self._answers.close()
            os.close(self._order)

    def _result(self, on_event) -> dict:
        for line in self._answers:
            message = json.loads(line)
            if "done" in message:
                return message["done"]
            if "error" in message:
                raise DemoError(f"the engine refused: {message['error']}")
            if on_event is not None:
                on_event(message)
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        raise DemoError(f"the engine's process ended. The end of {self._log}:\n{tail}")
