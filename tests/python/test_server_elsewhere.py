# SPDX-License-Identifier: Apache-2.0
"""Two servers on two machines: nothing in common but an object store. One is killed, the other one goes on."""

import asyncio
import os
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from servers import ALICE, BUCKET, Client, Reading, S3Server, ServerEnded, make_server, sampling
from suspend import suspend
from torpor import _core
from torpor.errors import Busy, InvalidArgument, Unsupported
from torpor.vllm.server import remote
from torpor.vllm.server.routes import routes
from torpor.vllm.server.settings import Settings

pytestmark = pytest.mark.slow

REQUESTS, TOKENS = 4, 400


def test_a_module_without_libcurl_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.delattr(_core, "RemoteHome")
    settings, options = (
        Settings(object_store=f"file://{tmp_path}/store"),
        SimpleNamespace(checkpoint_dir=str(tmp_path), key_file=None),
    )
    with pytest.raises(Unsupported, match="--torpor-object-store"):
        remote.Remote(settings, options)


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, text in server.environment.items():
            patch.setenv(name, text)
        yield server


def test_of_many_that_want_to_own_one_does(s3):
    """The lock is the store's own conditional write."""
    homes = [_core.RemoteHome(f"s3://{BUCKET}/owners", 60, address=f"http://10.0.0.{n}:80") for n in range(6)]
    with ThreadPoolExecutor(len(homes)) as threads:
        assert sorted(threads.map(lambda home: home.take(), homes)) == [False] * 5 + [True]
    [owner] = [home for home in homes if home.owns()]
    others = [home for home in homes if home is not owner]
    owner.renew()
    assert {home.owner_address() for home in others} == {f"http://10.0.0.{homes.index(owner)}:80"}
    assert owner.owner_address() == ""
    assert not any(home.take() for home in others)
    owner.release()
    assert others[1].owner_address() == ""  # nobody's any more
    assert others[0].take() and others[0].before == owner.holder
    with pytest.raises(InvalidArgument):
        _core.RemoteHome(f"s3://{BUCKET}/owners", 60, address="http://a/b")


def test_a_replica_that_does_not_own_sends_readers_to_the_owner():
    """One that gave up waiting: it has no answers, and listens."""

    async def owner_address():
        return owner

    life = SimpleNamespace(
        recorder=None, has_log=True, state="failed", problem=None, remote=SimpleNamespace(owner_address=owner_address)
    )
    app = FastAPI()
    app.state.torpor = life
    app.include_router(routes())
    with TestClient(app, follow_redirects=False) as client:
        owner = "http://10.0.0.1:80"
        sent = client.get("/torpor/requests/chatcmpl-1/stream?from_text=12")
        assert (sent.status_code, sent.headers["location"]) == (
            307, "http://10.0.0.1:80/torpor/requests/chatcmpl-1/stream?from_text=12",
        )  # fmt: skip
        owner = ""
        assert client.get("/torpor/requests/chatcmpl-1/stream").status_code == 503


def test_a_store_that_cannot_be_reached_holds_nobody_up(s3):
    home = _core.RemoteHome(f"s3://{BUCKET}/unreachable", 12)
    assert home.take()
    s3.pause()
    try:
        for operation in (home.release, home.take):
            began = time.monotonic()
            with pytest.raises(Busy):
                operation()
            assert time.monotonic() - began < 60  # four seconds each; without a limit two minutes and a half
        assert not home.owns()
    finally:
        s3.go_on()


def test_a_store_that_did_not_answer_once_is_asked_again(s3, tmp_path, monkeypatch):
    settings = Settings(object_store=f"s3://{BUCKET}/slow", ownership_term_seconds=6)
    home = remote.Remote(settings, SimpleNamespace(checkpoint_dir=str(tmp_path), key_file=None))
    said = []
    monkeypatch.setattr(remote.logger, "warning", lambda *words: said.append(words))

    async def arrive() -> str:
        arriving = asyncio.create_task(home.arrive({}))
        while not said and not arriving.done():
            await asyncio.sleep(0.05)
        s3.go_on()
        return await arriving

    s3.pause()
    try:
        assert asyncio.run(asyncio.wait_for(arrive(), 600)) == ""  # nobody pushed anything there
    finally:
        s3.go_on()
    assert "is asked again" in said[0][0]


def test_what_a_server_was_overtaken_with_is_not_gone_on_from(tmp_path, monkeypatch):
    """Also not if it is killed before it has written a checkpoint of its own."""
    there = ["pushed", "never-pushed"]
    monkeypatch.setattr(remote._core, "list_checkpoints", lambda *_: [{"path": f"{tmp_path}/{name}"} for name in there])
    store = Settings(object_store=f"file://{tmp_path}/store", ownership_term_seconds=6)
    (tmp_path / "store").mkdir()

    def start(before: str, holder: str) -> str:
        server = remote.Remote(store, SimpleNamespace(checkpoint_dir=str(tmp_path), key_file=None))
        server._home = SimpleNamespace(before=before, holder=holder, fetch=lambda *_: f"/where/it/was/{there[0]}")
        return server._fetch({})

    pushed = str(tmp_path / "pushed")
    assert start("somebody", "a") == pushed
    assert start("a", "b") == pushed and start("b", "c") == pushed
    there.append("its-own")
    assert start("c", "d") == ""  # the newest of the directory
    assert start("d", "e") == ""
    assert start("another", "f") == pushed
    there.remove("pushed")
    assert start("f", "g") == ""
    assert stat.S_IMODE((tmp_path / "remote.holder").stat().st_mode) == 0o600


def test_whom_a_directory_goes_on_from_is_on_disk_when_it_is_said(tmp_path, monkeypatch):
    """After a loss of power the file is the old one or the new one, and not empty."""
    done = []
    for name in ("fsync", "replace"):
        stock = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, stock=stock: (done.append(name), stock(*a))[1])
    monkeypatch.setattr(remote._core, "list_checkpoints", lambda *_: [])
    store = Settings(object_store=f"file://{tmp_path}/store", ownership_term_seconds=6)
    (tmp_path / "store").mkdir()
    server = remote.Remote(store, SimpleNamespace(checkpoint_dir=str(tmp_path / "dir"), key_file=None))
    server._home = SimpleNamespace(before="", holder="a", fetch=lambda *_: "")
    assert server._fetch({}) == "" and done == ["fsync", "replace", "fsync"]
    assert [path.name for path in (tmp_path / "dir").iterdir()] == ["remote.holder"]


@pytest.mark.long
def test_what_was_pushed_goes_on_elsewhere(s3, tiny_model, tmp_path):
    store = f"s3://{BUCKET}/servers"
    options = [
        "--torpor-object-store",
        store,
        "--torpor-ownership-term-seconds",
        "12",
    ]  # longer than a busy machine stands still
    first, second = (
        make_server(tiny_model, tmp_path / name / "torpor", *options, name=name, environment=s3.environment)
        for name in ("first", "second")
    )
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
    try:
        asyncio.run(asyncio.wait_for(scene(first, second, store, tmp_path), 600))
    finally:
        first.stop()
        second.stop()


async def started(server):
    server.start()
    await asyncio.to_thread(server.wait_until_ready)


def elsewhere(client: Client, server) -> Client:
    """A client that goes on at another server: a gateway would send it there."""
    client.http.base_url = server.url
    client.also_at[:] = [server.url]
    return client


async def scene(first, second, store, folder):
    await started(first)
    client = Client(first.url, ALICE)
    prompts = [f"Tell me of the sea, part {n}." for n in range(REQUESTS)]
    expected = [Reading(f"expected-{n}") for n in range(REQUESTS)]
    await asyncio.gather(*(client.chat(expected[n], prompts[n], **sampling(n, TOKENS)) for n in range(REQUESTS)))

    second.start()  # it waits as long as the first one lives: two and a half terms at most
    while not second.log.exists() or "another server may own" not in second.log.read_text():
        assert second.running(), second.end_of_log()
        await asyncio.sleep(0.05)
    readings = [Reading(f"r-{n}") for n in range(REQUESTS)]
    tasks = [asyncio.create_task(client.chat(readings[n], prompts[n], **sampling(n, TOKENS))) for n in range(REQUESTS)]
    while not all(reading.text for reading in readings):
        await asyncio.sleep(0.02)
    report = await client.post("/torpor/checkpoint")
    assert report["pushed"], first.end_of_log(40)
    assert not all(task.done() for task in tasks), "the requests were over before the kill"

    began = time.monotonic()
    await asyncio.to_thread(first.kill)
    elsewhere(client, second)
    await asyncio.to_thread(second.wait_until_ready)
    print(f"ready elsewhere {time.monotonic() - began:.1f} s after the kill", flush=True)
    await asyncio.gather(*tasks)
    assert [reading.text for reading in readings] == [reading.text for reading in expected]
    assert "woken from" in second.log.read_text()
    assert any(reading.taken_up_at for reading in readings)

    # A drained one gives it back; who served before finds in the store what it has not.
    again = [Reading(f"again-{n}") for n in range(REQUESTS)]
    at_second = Client(second.url, ALICE)
    tasks = [asyncio.create_task(at_second.chat(again[n], prompts[n], **sampling(n, TOKENS))) for n in range(REQUESTS)]
    while not all(reading.text for reading in again):
        await asyncio.sleep(0.02)
    assert await asyncio.to_thread(second.terminate) == 0
    assert "torpor: pushed as" in second.log.read_text(), second.end_of_log(40)
    elsewhere(at_second, first)
    await started(first)
    await asyncio.gather(*tasks)
    assert [reading.text for reading in again] == [reading.text for reading in expected]
    assert list((folder / "first" / "torpor").glob("answers-before-*"))
    await client.close()
    await at_second.close()
    await stands_still(first, store)


async def stands_still(server, store):
    """Another one owns meanwhile: the server ends as soon as it runs again, and gives nothing back."""
    suspend(server.pid)
    other = _core.RemoteHome(store, 60)
    try:
        while not await asyncio.to_thread(other.take):
            await asyncio.sleep(0.1)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    while server.running():
        await asyncio.sleep(0.05)
    assert "does not own what is in" in server.end_of_log(60)
    await asyncio.to_thread(other.renew)
    await asyncio.to_thread(other.release)


MANY, SHORT = 300, 80


@pytest.mark.long
def test_three_hundred_requests_over_a_kill_and_through_a_replica(s3, tiny_model, tmp_path):
    """Two servers. The second gave up waiting and sends readers to the first, which is killed; then it takes over."""
    store = f"s3://{BUCKET}/many"
    servers = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        options = [
            "--torpor-object-store",
            store,
            "--torpor-ownership-term-seconds",
            "20",
            "--torpor-on-disconnect",
            "continue",
        ]
        servers.append(
            make_server(tiny_model, tmp_path / name / "torpor", *options, name=name, environment=s3.environment)
        )
    try:
        asyncio.run(asyncio.wait_for(many(*servers), 1200))
    finally:
        for server in servers:
            server.stop()


async def many(first, second):
    first.start(["--torpor-advertise-address", first.url])
    await asyncio.to_thread(first.wait_until_ready)
    second.start()
    with pytest.raises(ServerEnded, match="another server owns"):
        await asyncio.to_thread(second.wait_until_ready)
    client = Client(first.url, ALICE)
    prompts = [f"Tell me of the sea, part {n}." for n in range(MANY)]
    expected = [Reading(f"expected-{n}") for n in range(MANY)]
    await asyncio.gather(*(client.chat(expected[n], prompts[n], **sampling(n, SHORT)) for n in range(MANY)))

    readings = [Reading(f"r-{n}") for n in range(MANY)]
    tasks = [asyncio.create_task(client.chat(readings[n], prompts[n], **sampling(n, SHORT))) for n in range(MANY)]
    while sum(bool(reading.text) for reading in readings) < 20:
        await asyncio.sleep(0.02)
    report = await client.post("/torpor/checkpoint")
    assert report["pushed"], first.end_of_log(40)

    # A reader that lost its connection asks the replica, which does not own, and is sent to where the rest is.
    lost = next(n for n in range(MANY) if readings[n].text and not tasks[n].done())
    tasks[lost].cancel()
    await asyncio.gather(tasks[lost], return_exceptions=True)
    at_replica = Client(second.url, ALICE)
    path, begin = f"/torpor/requests/{readings[lost].request_id}/stream", readings[lost].text
    sent = await at_replica.http.get(path, params={"from_text": len(begin)})
    assert (sent.status_code, sent.headers["location"]) == (307, f"{first.url}{path}?from_text={len(begin)}")
    client.http.base_url, follow = first.url, Reading(readings[lost].request_id, text=begin)
    await client.chat(follow, prompts[lost], **sampling(lost, SHORT))
    assert follow.taken_up_at[0] == len(begin) and follow.text == expected[lost].text
    readings[lost] = follow

    assert sum(not task.done() for task in tasks) >= 50, "too many requests were over before the kill"
    await asyncio.to_thread(first.kill)
    await asyncio.to_thread(second.kill)
    second.start()
    elsewhere(client, second)
    await asyncio.to_thread(second.wait_until_ready)
    await asyncio.gather(*(task for task in tasks if not task.cancelled()))
    assert [reading.text for reading in readings] == [reading.text for reading in expected]
    assert all(reading.finish_reason == "length" for reading in readings)
    taken_up = sum(bool(reading.taken_up_at) for reading in readings)
    begun_again = sum(bool(reading.begun_again) for reading in readings)
    print(f"proof: {MANY} requests identical; {taken_up} taken up elsewhere, {begun_again} sent again", flush=True)
    await client.close()
    await at_replica.close()
