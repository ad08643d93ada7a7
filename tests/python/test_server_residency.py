# SPDX-License-Identifier: Apache-2.0
"""/v1/sessions of a server with tiers: KV blocks of sessions whose requests have ended move, each tenant's alone."""

import asyncio
import json
import os
import subprocess

import httpx
import inspector
import pytest
from servers import ALICE, BOB, make_server, of, played, samples

pytestmark = pytest.mark.slow

PROMPT = "The clock on the wall of the old station has not moved since the war. " * 12


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("residency")
    tiers = {"offload": "eager", "host_bytes": "32MiB", "disk_bytes": "32MiB", "disk_dir": str(folder / "kv")}
    config = json.dumps({"torpor": tiers})
    server = make_server(tiny_model, folder / "torpor", "--max-num-seqs", "16", "--additional-config", config)
    server.start()
    server.wait_until_ready()
    yield server
    server.stop()


def http(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=600)


async def ask(client: httpx.AsyncClient, **named) -> dict:
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    headers = {"X-Session-ID": named.pop("header")} if "header" in named else {}
    answer = await client.post("/v1/completions", json=body | named, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def listed(client: httpx.AsyncClient) -> dict[str, dict]:
    answer = await client.get("/v1/sessions")
    assert answer.status_code == 200, answer.text
    return {each["id"]: each for each in answer.json()["data"]}


async def call(client: httpx.AsyncClient, path: str, method: str = "POST", **params) -> tuple[int, dict]:
    answer = await client.request(method, f"/v1/sessions/{path}", params=params or None)
    return answer.status_code, answer.json()


def test_a_client_moves_the_blocks_of_its_sessions_and_answers_stay_the_same(server):
    async def scene(client):
        expected = (await ask(client.http))["choices"][0]["text"]
        assert (await ask(client.http, session_id="agent"))["choices"][0]["text"] == expected
        assert (await ask(client.http, header="by/header"))["choices"][0]["text"] == expected
        known = await listed(client.http)
        assert known.keys() == {"agent", "by/header"} and known["agent"]["tier"] == "device"
        assert known["agent"]["object"] == "session" and "tenant" not in known["agent"]
        status, said = await call(client.http, "agent/demote", to="disk", action_id="d-1")
        assert (status, said["outcome"], said["repeated"]) == (200, "accepted", False), said
        assert said["kept_bytes"] > 0  # the other session has the same blocks
        status, said = await call(client.http, "by/header/demote", to="disk")
        assert said["freed_bytes"] >= said["bytes"] > 0  # also the blocks that were computed twice
        known = await listed(client.http)
        for each in known.values():
            assert (each["tier"], each["device_bytes"], each["disk_bytes"]) == ("disk", 0, each["bytes"])
        assert (await call(client.http, "agent/demote", to="disk", action_id="d-1"))[1]["repeated"]
        status, said = await call(client.http, "by/header/prefetch", to="device")
        assert (status, said["outcome"]) == (200, "accepted"), said
        known = (await listed(client.http))["by/header"]
        assert (known["tier"], known["device_bytes"]) == ("device", known["bytes"])
        assert (await ask(client.http, session_id="agent"))["choices"][0]["text"] == expected
        status, said = await call(client.http, "by/header/prefetch", deadline=600)
        assert (status, said["outcome"]) == (200, "accepted"), said
        for verb, held in (("retain", "retained"), ("pin", "pinned")):
            assert (await call(client.http, f"agent/{verb}", ttl=3600))[1]["outcome"] == "accepted"
            assert (await listed(client.http))["agent"]["held"] == held
        metrics = samples((await client.http.get("/metrics")).text)
        assert metrics[("torpor_session_actions_total", of(verb="demote", outcome="accepted"))] == 2
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORPOR_")}
        shown = await asyncio.to_thread(
            subprocess.run, [inspector.BINARY, "sessions", server.url],
            env=environment | {"TORPOR_API_KEY": ALICE}, capture_output=True, text=True,
        )  # fmt: skip
        assert shown.returncode == 0 and "by/header" in shown.stdout and "pinned" in shown.stdout, shown

    played(server, scene)


def test_another_tenant_finds_nothing_and_the_admin_all(server):
    async def scene(client):
        await ask(client.http, session_id="mine")
        async with http(server.url, BOB) as bob:
            assert "mine" not in await listed(bob)
            for verb in ("demote", "prefetch", "retain?ttl=1", "pin?ttl=1", "evict"):
                status, said = await call(bob, f"mine/{verb}")
                assert (status, said["error"]["outcome"]) == (404, "missing"), said
            assert (await call(bob, "mine", "DELETE"))[0] == 404
            # What a client writes about its tenant does not count.
            forged = {"torpor_tenant": "x"}
            await ask(bob, session_id="mine", vllm_xargs=forged)
            assert "mine" in await listed(bob)
        status, said = await call(client.admin, "mine/demote")
        assert status == 409 and "2 tenants" in said["error"]["what"]
        status, said = await call(client.http, "mine", "DELETE")
        assert (status, said["outcome"]) == (200, "accepted")
        assert "mine" not in await listed(client.http)
        assert (await call(client.admin, "mine/demote"))[1]["outcome"] == "accepted"

    played(server, scene)


def test_what_cannot_be_done_is_said(server):
    async def scene(client):
        await ask(client.http, session_id="wrong")
        status, said = await call(client.http, "wrong/demote", to="remote")
        assert (status, said["error"]["outcome"]) == (501, "rejected") and "no tier remote" in said["error"]["what"]
        assert (await call(client.http, "wrong/prefetch", to="disk"))[0] == 400
        assert (await call(client.http, "wrong/pin"))[0] == 400  # without a ttl
        assert (await call(client.http, "wrong/demote", to="tape"))[0] == 400
        status, said = await call(client.http, "wrong/hibernate")
        assert status == 501 and "--torpor-sessions" in said["error"]["next_step"]
        await client.admin.post("/sleep")
        assert (await call(client.http, "wrong/demote"))[0] == 409
        await client.admin.post("/wake_up")
        assert (await call(client.http, "wrong/demote"))[1]["outcome"] == "accepted"

    played(server, scene)
