# SPDX-License-Identifier: Apache-2.0
"""torpor switch from one release of vLLM to the next, with streams that run."""

import asyncio
import functools
import json
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from conftest import ROOT
from devtool import other_vllm
from servers import ALICE, Client, Reading, until
from serving import ADMIN_KEY
from test_upgrade import CLIENTS, ServerOf, asked, version_of
from zygote import ENVIRONMENT, Zygote, shared

SECONDS = 600
TOKENS = 600  # none ends before the switch
INSPECTOR = ROOT / "build/release/tools/torpor/torpor"


@functools.cache
def zygote_of(version: str) -> Zygote:
    if version == "0.32":
        return shared()
    python, more = other_vllm.environment(version)
    return Zygote(python, env=os.environ | ENVIRONMENT | more)


class ForkedServerOf(ServerOf):
    """Its processes are forked from one that has the vLLM of this release."""

    def __init__(self, version: str, model: Path, directory: Path, name: str):
        more = {} if version == "0.32" else other_vllm.environment(version)[1]
        super().__init__(model, directory, name, None, more)
        self._version = version

    def _launch(self, command, out):
        return zygote_of(self._version).popen(command[1:], env=self._environment, stdout=out, stderr=out)


def await_ready(server: ServerOf) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        assert server.running() and time.monotonic() < deadline, server.end_of_log()
        with suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/torpor/ready", timeout=60).status_code == 200:
                return
        time.sleep(0.1)


def until_it_follows(standby: ServerOf, owner: ServerOf) -> None:
    deadline = time.monotonic() + SECONDS
    headers = {"Authorization": f"Bearer {ALICE}"}
    while True:
        assert standby.running() and time.monotonic() < deadline, standby.end_of_log()
        with suppress(httpx.TransportError):
            state = httpx.get(f"{standby.url}/torpor/state", headers=headers, timeout=60).json()
            assert state["state"] != "failed", state
            if state["state"] == "standby" and state["standby"]["owner"]["pid"] == owner.pid:
                return
        time.sleep(0.1)


def switched(owner: ServerOf) -> dict:
    words = [INSPECTOR, "switch", owner.url, "--json"]
    environment = os.environ | {"TORPOR_ADMIN_KEY": ADMIN_KEY}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def switched_in_the_middle(old: ServerOf, new: ServerOf, readings: list[Reading]) -> tuple[dict, list[Reading]]:
    """Return what the switch said, and answers to the same prompts that the new server alone has given."""
    client = Client(old.url, ALICE)
    client.also_at.append(new.url)
    tasks = asked(client, readings, TOKENS)
    await until(lambda: all(len(reading.text) > 20 for reading in readings), SECONDS)
    done = await asyncio.to_thread(switched, old)
    assert await asyncio.to_thread(old.ended, SECONDS) == 0
    await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)
    await client.close()
    client = Client(new.url, ALICE)
    alone = await asyncio.gather(*asked(client, [Reading(f"alone-{number}") for number in range(CLIENTS)], TOKENS))
    await client.close()
    return done, alone


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after", "sessions"), [("0.31", "0.32", True), ("0.32", "0.33", True), ("0.32", "0.33", False)]
)
def test_running_answers_are_switched_to_the_next_vllm(tiny, tmp_path, before, after, sessions):
    """`sessions`: of the new server, which then takes the KV over; else it computes the KV again."""
    old = ForkedServerOf(before, tiny, tmp_path / "torpor", "old")
    new = ForkedServerOf(after, tiny, tmp_path / "torpor", "new")
    readings = [Reading(f"note-{number}") for number in range(CLIENTS)]
    options = ["--torpor-standby-of", str(tmp_path / "torpor"), "--torpor-on-wake-error", "recompute"]
    try:
        old.start()
        await_ready(old)
        new.start([*options, *(["--torpor-sessions"] if sessions else [])])
        until_it_follows(new, old)
        assert version_of(old).startswith(before) and version_of(new).startswith(after)
        done, alone = asyncio.run(switched_in_the_middle(old, new, readings))
        print("switched:", before, after, done)
        assert done["requests"] == CLIENTS
        assert done["kv"] == ("restored" if sessions else "recomputed"), new.end_of_log(60)
        # Greedy ones: in float32 both releases compute the same tokens. Each draws seeded ones in its own way.
        assert [reading.text for reading in readings[::2]] == [reading.text for reading in alone[::2]]
        for reading in readings:
            assert reading.interruptions >= 1 and reading.begun_again == 0, reading
            url, as_alice = f"{new.url}/torpor/requests/{reading.request_id}", {"Authorization": f"Bearer {ALICE}"}
            whole = httpx.get(url, headers=as_alice, timeout=SECONDS).json()
            assert reading.text == whole["choices"][0]["text"] and reading.finish_reason == "length"
    finally:
        old.stop()
        new.stop()
