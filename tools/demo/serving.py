# SPDX-License-Identifier: Apache-2.0
"""A server of torpor as a child process, and clients that lose no answer: for the demo, the benchmark and the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from ports import free_port

from torpor.client import HAS_CHARACTERS, AsyncOpenAI, Interruption

START_SECONDS = 400
KEY, ADMIN_KEY = "demo", "demo-admin"


@contextlib.contextmanager
def folder_for_logs(prefix: str) -> Iterator[Path]:
    """For servers and what they write. It stays, and is named, where something went wrong."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except BaseException:
        print(f"the logs are in {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder)


class ServerEnded(Exception):
    """The server's process ended, or said that it cannot serve; with what its log says."""


class Server:
    """`python -m torpor.vllm.serve` on a free port of this machine."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        options: list[str] = (),
        environment: dict[str, str] | None = None,
        keys: tuple[str, ...] = (KEY,),
        name: str = "server",
    ):
        self.log = directory.parent / f"{name}.log"
        self._process: subprocess.Popen | None = None
        self._command = [
            sys.executable, "-m", "torpor.vllm.serve", str(model), "--served-model-name", "model", "--enforce-eager",
            "--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "64", "--max-num-batched-tokens", "512",
            "--api-key", *keys, "--torpor-checkpoint-dir", str(directory), *options,
        ]  # fmt: skip
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        self._environment = os.environ | own | {"TORPOR_ADMIN_KEY": ADMIN_KEY} | (environment or {})
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, options: list[str] = ()) -> None:
        with open(self.log, "a") as out:
            self._process = self._launch([*self._command, "--port", str(self._port), *options], out)

    def _launch(self, command: list[str], out) -> subprocess.Popen:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self._environment)

    def wait_until_ready(self) -> None:
        """Raises ServerEnded when it ends, and when it says that it could not wake."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                answer = httpx.get(f"{self.url}/torpor/ready", timeout=5)
                if answer.status_code == 404:  # vLLM's own server
                    answer = httpx.get(f"{self.url}/health", timeout=5)
                if answer.status_code == 200:
                    return
                raise ServerEnded(answer.text)
            except httpx.TransportError:
                pass
            if self._process.poll() is not None:
                raise ServerEnded(f"exit code {self._process.returncode}. The end of {self.log}:\n{self.end_of_log()}")
            time.sleep(0.1)
        raise ServerEnded(f"not ready after {START_SECONDS} s: {self.log}")

    def end_of_log(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=120)

    def ended(self, seconds: float = 120) -> int:
        """Wait until it ends by itself. Return its exit code."""
        return self._process.wait(timeout=seconds)

    def kill(self, what: str = "all") -> None:
        """SIGKILL to "front end", "engine core" or "all"; returns when all have ended, as they should on their own."""
        family = [self.pid, *descendants(self.pid)]
        victims = {
            "all": family,
            "front end": [self.pid],
            "engine core": [pid for pid in family if "EngineCore" in command_of(pid)],
        }[what]
        if not victims:
            raise ServerEnded(f"no process of the server is its {what}")
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        self._process.wait(timeout=120)
        deadline = time.monotonic() + 60
        while left := [pid for pid in family if pid != self.pid and alive(pid)]:
            if time.monotonic() > deadline:
                raise ServerEnded(f"{len(left)} processes live on after the end of the {what}")
            time.sleep(0.05)

    def stop(self) -> None:
        if self.running():
            self.kill()


@dataclass
class Reading:
    """What one client has of its answer."""

    request_id: str
    text: str = ""
    finish_reason: str | None = None
    interruptions: int = 0
    errors: list[str] = field(default_factory=list)  # what ended each connection that was interrupted
    taken_up_at: list[int] = field(default_factory=list)  # characters that it had then
    begun_again: int = (
        0  # of the interruptions, those after which it was begun again: the server had never acknowledged it
    )
    times: list[float] = field(default_factory=list)  # of each piece of text
    pieces_before: list[int] = field(default_factory=list)  # of each interruption: the pieces that had come then


class Client:
    """Streams chats with torpor's OpenAI client, and keeps what happened to each of them.

    `http` asks as the client, `admin` and post() as the operator.
    """

    def __init__(self, url: str, key: str = KEY, admin_key: str = ADMIN_KEY):
        self.url = url
        self.also_at: list[str] = []  # other servers that may have the answers
        self._readings: dict[str, Reading] = {}
        self._openai = AsyncOpenAI(
            base_url=f"{url}/v1", api_key=key, max_retries=0, also_at=self.also_at, on_interruption=self._interrupted,
            abort_on_close=False,  # a task that a test cancels stands for a client that is killed
        )  # fmt: skip
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2)  # vLLM closes what was idle for 5 s
        self.http, self.admin = (
            httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {each}"}, timeout=600, limits=limits)
            for each in (key, admin_key)
        )

    async def close(self) -> None:
        await self._openai.close()
        await self.http.aclose()
        await self.admin.aclose()

    async def chat(self, reading: Reading, prompt: str, **sampling) -> Reading:
        """The whole answer, whatever happens to the server meanwhile, as long as one comes back."""
        self._readings[reading.request_id] = reading
        if reading.text:  # it was begun elsewhere
            reading.taken_up_at.append(len(reading.text))
        stream = await self._openai.chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": prompt}],
            stream=True,
            extra_headers={"X-Request-Id": reading.request_id}
            | ({HAS_CHARACTERS: str(len(reading.text))} if reading.text else {}),
            **sampling,
        )
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.delta.content:
                    reading.text += choice.delta.content
                    reading.times.append(time.monotonic())
                reading.finish_reason = choice.finish_reason or reading.finish_reason
        return reading

    def _interrupted(self, what: Interruption) -> None:
        reading = self._readings[what.request_id]
        if what.sent_again:
            reading.begun_again = reading.interruptions
            return
        reading.interruptions += 1
        reading.errors.append(f"{what.characters} characters read: {what.problem}")
        reading.pieces_before.append(len(reading.times))
        if what.characters:
            reading.taken_up_at.append(what.characters)

    async def whole(self, request_id: str) -> dict:
        answer = await self.http.get(f"/torpor/requests/{request_id}")
        answer.raise_for_status()
        return answer.json()

    async def post(self, path: str, **parameters) -> dict:
        answer = await self.admin.post(path, params=parameters)
        if answer.status_code != 200:
            raise ServerEnded(f"{path}: {answer.status_code} {answer.text}")
        return answer.json()


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, []))
    for child in found:
        found += children.get(child, [])
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """A zombie has ended: its parent went before it could be asked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
