# SPDX-License-Identifier: Apache-2.0
"""An upgrade of vLLM with requests in flight, as docs/server.md has it: a server of an older one is drained in the
middle of its answers, and one of this vLLM goes on with them in the same directory."""

import asyncio
import os
from pathlib import Path

import httpx
import pytest
from devtool import other_vllm
from servers import ALICE, BOB, Client, Reading, sampling, until

from serving import Server

CLIENTS, TOKENS = 4, 120


class ServerOf(Server):
    """A server of the vLLM of another environment, if one is named."""

    def __init__(self, model: Path, directory: Path, name: str, python: Path | None, more: dict[str, str]):
        own = {"VLLM_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ["PYTHONPATH"]}
        super().__init__(model, directory, ["--dtype", "float32"], own | more, keys=(ALICE, BOB), name=name)
        if python is not None:
            self._command[0] = str(python)


def version_of(server: Server) -> str:
    return httpx.get(f"{server.url}/version", timeout=600).json()["version"]


def asked(client: Client, readings: list[Reading], tokens: int = TOKENS) -> list[asyncio.Task]:
    return [
        asyncio.create_task(
            client.chat(
                reading,
                f"Write note {number} about the sea.",
                **sampling(number, tokens),
                extra_body={"ignore_eos": True},
            )
        )
        for number, reading in enumerate(readings)
    ]


async def drained_in_the_middle(old: Server, new: Server, readings: list[Reading], options: list[str]) -> list[Reading]:
    """Return answers to the same prompts that the new server alone has given."""
    client = Client(old.url, ALICE)
    client.also_at.append(new.url)
    tasks = asked(client, readings)
    await until(lambda: all(len(reading.text) > 20 for reading in readings))
    assert await asyncio.to_thread(old.terminate) == 0
    new.start(["--torpor-on-wake-error", "recompute", *options])
    await asyncio.to_thread(new.wait_until_ready)
    await asyncio.wait_for(asyncio.gather(*tasks), 600)
    await client.close()
    client = Client(new.url, ALICE)
    alone = await asyncio.gather(*asked(client, [Reading(f"alone-{number}") for number in range(CLIENTS)]))
    await client.close()
    return alone


@pytest.mark.long
@pytest.mark.parametrize(("options", "woken"), [
    ([], "woken from the response log in"), (["--torpor-sessions"], "4 requests go on (0 of them rolled forward, 0 "),
])  # fmt: skip
def test_running_answers_go_on_with_the_next_vllm(tiny, tmp_path, options, woken):
    """Their KV is computed again, or with sessions comes along."""
    python, more = other_vllm.environment("0.31")
    old = ServerOf(tiny, tmp_path / "torpor", "old", python, more)
    new = ServerOf(tiny, tmp_path / "torpor", "new", None, {})
    readings = [Reading(f"note-{number}") for number in range(CLIENTS)]
    try:
        old.start()
        old.wait_until_ready()
        assert version_of(old).startswith("0.31")
        alone = asyncio.run(drained_in_the_middle(old, new, readings, options))
        assert version_of(new).startswith("0.32")
        assert woken in new.log.read_text()
        # Greedy ones: in float32 both releases compute the same tokens. Each draws seeded ones in its own way.
        assert [reading.text for reading in readings[::2]] == [reading.text for reading in alone[::2]]
        for reading in readings:
            # The old server may take a client once more before it ceases to listen.
            assert reading.interruptions >= 1 and reading.begun_again == 0, reading
            url, as_alice = f"{new.url}/torpor/requests/{reading.request_id}", {"Authorization": f"Bearer {ALICE}"}
            whole = httpx.get(url, headers=as_alice, timeout=600).json()
            assert reading.text == whole["choices"][0]["text"] and reading.finish_reason == "length"
    finally:
        old.stop()
        new.stop()
