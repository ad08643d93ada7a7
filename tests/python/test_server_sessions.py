# SPDX-License-Identifier: Apache-2.0
"""/v1/sessions of a server: requests leave its engine and come back, fork and move, while their clients stream."""

import asyncio
import http.server as http_server
import json
import os
import shutil
import subprocess
import threading

import httpx
import inspector
import openai
import pytest
from servers import ALICE, BOB, Client, Reading, begin, make_server, of, played, samples, start_requests, until
from serving import ADMIN_KEY

pytestmark = pytest.mark.slow

PROMPT = "Tell me about the sea."
SAMPLING = {"max_tokens": 300, "temperature": 0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("sessions") / "torpor"


@pytest.fixture(scope="module")
def server(tiny_model, directory):
    server = make_server(tiny_model, directory, "--torpor-sessions", "--max-num-seqs", "16")
    server.start()
    server.wait_until_ready()
    yield server
    server.stop()


def http(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=600)


async def images(client: httpx.AsyncClient) -> list[dict]:
    answer = await client.get("/v1/sessions")
    assert answer.status_code == 200 and answer.json()["object"] == "list", answer.text
    return answer.json()["data"]


async def done(client: httpx.AsyncClient, url: str, method: str = "POST", **params) -> dict:
    answer = await client.request(method, url, params=params or None)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outcome"] == "accepted"
    return answer.json()


async def error(client: httpx.AsyncClient, url: str, method: str = "POST", **params) -> tuple[int, dict]:
    answer = await client.request(method, url, params=params or None)
    content = answer.json()["error"]
    assert content["message"].startswith(content["what"])  # the one shape of torpor's errors
    return answer.status_code, content


async def counted(client, **labels: str) -> float:
    metrics = samples((await client.http.get("/metrics")).text)
    return metrics[("torpor_session_actions_total", of(**labels))]


async def whole(client, name: str) -> str:
    return (await client.chat(Reading(name), PROMPT, **SAMPLING)).text


def test_a_stream_of_openais_client_stays_open_while_its_request_is_hibernated(server):
    async def scene(client):
        expected = await whole(client, "expected")
        others = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=ALICE, max_retries=0)
        given = []

        async def read() -> None:
            stream = await others.chat.completions.create(
                model="model", messages=[{"role": "user", "content": PROMPT}], stream=True,
                extra_headers={"X-Request-Id": "agent"}, **SAMPLING,
            )  # fmt: skip
            async for chunk in stream:
                given.append(chunk.choices[0].delta.content or "")

        task = asyncio.create_task(read())
        await until(lambda: len(given) > 3)
        left = await done(client.http, "/v1/sessions/agent/hibernate")
        assert left["requests"] == ["chatcmpl-agent"] and left["tier"] == "host" and left["bytes"] > 0
        assert left["tokens"] > 0 and "path" not in left
        [listed] = await images(client.http)
        assert listed == {name: left[name] for name in listed}
        assert await whole(client, "beside") == expected  # the engine serves the others
        before = len(given)  # all that was on its way has come
        assert await whole(client, "beside-2") == expected
        assert len(given) == before and not task.done()
        metrics = samples((await client.http.get("/metrics")).text)
        assert metrics[("torpor_hibernated_requests", of())] == 1
        back = await done(client.http, f"/v1/sessions/{left['id']}/resume")
        assert back["requests"] == ["chatcmpl-agent"] and back["recomputed"] is False
        await task
        assert "".join(given) == expected and await images(client.http) == []
        await others.close()

    played(server, scene)


def test_who_reads_bytes_sees_a_comment_in_its_stream_and_in_one_that_was_taken_up(server):
    async def scene(client):
        body = {"model": "model", "prompt": PROMPT, "stream": True, **SAMPLING}
        lines: list[str] = []
        taken_up: list[str] = []

        async def read(into, method, path, **how) -> None:
            async with client.http.stream(method, path, **how) as answer:
                async for line in answer.aiter_lines():
                    into.append(line)

        tasks = [
            asyncio.create_task(read(lines, "POST", "/v1/completions", json=body, headers={"X-Request-Id": "raw"}))
        ]
        await until(lambda: any("text" in line for line in lines))
        tasks.append(asyncio.create_task(read(taken_up, "GET", "/torpor/requests/raw/stream")))
        await until(lambda: taken_up)
        assert ": asleep" not in lines + taken_up
        await done(client.http, "/v1/sessions/cmpl-raw/hibernate")
        await until(lambda: ": asleep" in lines and ": asleep" in taken_up)
        await done(client.http, "/v1/sessions/raw/resume")
        await asyncio.gather(*tasks)
        assert lines[-2:] == ["data: [DONE]", ""] and lines.count(": asleep") == 1
        assert "data: [DONE]" in taken_up

    played(server, scene)


def test_another_tenant_finds_nothing_and_the_admin_all(server):
    async def scene(client):
        reading, task = begin(client, "mine", PROMPT)
        await until(lambda: reading.text)
        async with http(server.url, BOB) as bob:
            for verb in ("hibernate", "resume", "fork?n=2"):
                status, said = await error(bob, f"/v1/sessions/mine/{verb}")
                assert status == 404 and said["outcome"] == "missing" and said["type"] == "NotFound"
            left = await done(client.admin, "/v1/sessions/mine/hibernate")
            assert await images(bob) == [] and len(await images(client.http)) == 1
            for name in ("mine", left["id"]):
                for path, method in ((f"/v1/sessions/{name}/resume", "POST"), (f"/v1/sessions/{name}", "DELETE")):
                    assert (await error(bob, path, method))[0] == 404
        assert [each["id"] for each in await images(client.admin)] == [left["id"]]
        await done(client.admin, f"/v1/sessions/{left['id']}/resume")
        await task
        assert reading.interruptions == 0

    played(server, scene)


def test_a_call_with_the_same_action_id_is_made_once(server):
    async def scene(client):
        reading, task = begin(client, "once", PROMPT)
        await until(lambda: reading.text)
        before = await counted(client, verb="hibernate", outcome="repeated")
        calls = [done(client.http, "/v1/sessions/once/hibernate", action_id="a-1") for _ in range(3)]
        left = await asyncio.gather(*calls)
        assert [each.pop("repeated") for each in left].count(False) == 1 and left[0] == left[1] == left[2]
        assert await counted(client, verb="hibernate", outcome="repeated") == before + 2
        assert (await done(client.http, "/v1/sessions/once/hibernate"))["id"] == left[0]["id"]  # it is away already
        status, said = await error(client.http, "/v1/sessions/once/resume", action_id="a-1")
        assert status == 400 and "another call" in said["what"] and said["outcome"] == "rejected"
        status, said = await error(client.http, "/v1/sessions/once/resume", action_id="a b")
        assert status == 400 and "'a b'" in said["what"]
        await done(client.http, "/v1/sessions/once/resume", action_id="a-2")
        await done(client.http, "/v1/sessions/once/resume")  # it runs already
        await task
        assert (await done(client.http, "/v1/sessions/once/hibernate", action_id="a-1"))["repeated"]
        assert (await error(client.http, "/v1/sessions/once/hibernate"))[0] == 404  # it has ended
        assert await images(client.http) == []

    played(server, scene)


def test_an_image_on_disk_comes_back_or_goes(server, directory):
    async def scene(client):
        expected = await whole(client, "expected")
        reading, task = begin(client, "stored", PROMPT)
        await until(lambda: reading.text)
        left = await done(client.http, "/v1/sessions/stored/hibernate")
        stored = await done(client.http, "/v1/sessions/stored/hibernate", to="disk")
        assert stored["id"] == left["id"] and stored["tier"] == "disk" and "path" not in stored
        [shown] = await images(client.admin)
        assert shown["path"] == str(directory / "images" / left["id"])
        assert await listed_by_the_inspector(server, ADMIN_KEY) == (0, [shown])
        without_path = {name: value for name, value in shown.items() if name != "path"}
        assert await listed_by_the_inspector(server, ALICE) == (0, [without_path])
        assert await listed_by_the_inspector(server, BOB) == (0, [])
        assert await listed_by_the_inspector(server, "another") == (7, None)
        await done(client.http, "/v1/sessions/stored/resume")
        await task
        assert reading.text == expected
        reading, task = begin(client, "dropped", PROMPT)
        await until(lambda: reading.text)
        assert (await error(client.http, "/v1/sessions/dropped", "DELETE"))[0] == 404  # it is not hibernated
        await done(client.http, "/v1/sessions/dropped/hibernate", to="disk")
        gone = await done(client.http, "/v1/sessions/dropped", "DELETE")
        assert gone["requests"] == ["chatcmpl-dropped"]
        await task
        assert reading.finish_reason == "abort" and await images(client.http) == []
        assert list((directory / "images").iterdir()) == []

    played(server, scene)


async def listed_by_the_inspector(server, key: str) -> tuple[int, list | None]:
    """The exit code and images of `torpor sessions URL`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORPOR_")}
    command = [inspector.BINARY, "sessions", server.url, "--json"]
    ended = await asyncio.to_thread(
        subprocess.run, command, env=environment | {"TORPOR_API_KEY": key}, capture_output=True, text=True
    )
    said = json.loads(ended.stdout)
    images = [each | {"object": "session.image"} for each in said["images"]] if "images" in said else None
    return ended.returncode, images


def test_forks_are_answers_of_their_own(server):
    async def scene(client):
        expected = await whole(client, "expected")
        reading, task = begin(client, "tree", PROMPT)
        await until(lambda: reading.text)
        forked = await done(client.http, "/v1/sessions/tree/fork", n=2, action_id="f")
        assert forked["parent"] == "chatcmpl-tree" and len(forked["children"]) == 2
        again = await done(client.http, "/v1/sessions/tree/fork", n=2, action_id="f")
        assert again["repeated"] and again["children"] == forked["children"]
        sampled = await done(client.http, "/v1/sessions/tree/fork", n=1, at=0, seeds="parent")
        await task
        for child in forked["children"] + sampled["children"]:
            async with client.http.stream("GET", f"/torpor/requests/{child}/stream") as answer:
                assert answer.status_code == 200
                text = "".join([line async for line in answer.aiter_lines()])
            assert text.endswith("data: [DONE]")
            assert (await client.whole(child))["choices"][0]["text"] == expected
            async with http(server.url, BOB) as bob:
                assert (await bob.get(f"/torpor/requests/{child}")).status_code == 404
        assert reading.text == expected
        assert (await error(client.http, "/v1/sessions/tree/fork", n=2))[0] == 404

    played(server, scene)


def test_what_is_wrong_is_said(server):
    async def scene(client):
        reading, task = begin(client, "wrong", PROMPT)
        await until(lambda: reading.text)
        status, said = await error(client.http, "/v1/sessions/wrong/hibernate", actionid="1")
        assert status == 400 and said["next_step"].startswith("did you mean action_id? ")
        status, said = await error(client.http, "/v1/sessions/wrong/fork", n=1, seeds="x")
        assert status == 400 and said["what"] == "the seed 'x'"
        assert (await client.http.post("/v1/sessions/wrong/fork", params={"n": 0})).status_code == 400
        answer = await client.http.post("/v1/sessions/wrong/move", params={"to": server.url})
        assert answer.status_code == 403 and "admin key" in answer.json()["error"]["message"]
        status, said = await error(client.http, "/v1/sessions/x/resume", path="/tmp/x")
        assert status == 403 and said["type"] == "Unauthenticated"
        status, said = await error(client.admin, "/v1/sessions/wrong/move", to="http://10.0.0.1:80")
        assert status == 400 and "not a loopback address" in said["what"]
        status, said = await error(client.admin, "/v1/sessions/x/resume", path="/tmp/y")
        assert status == 400 and "is not the image x" in said["what"]
        assert (await httpx.AsyncClient(timeout=600).get(f"{server.url}/v1/sessions")).status_code == 401
        await client.post("/sleep")
        assert (await client.http.post("/v1/sessions/wrong/hibernate")).status_code == 409
        assert (await client.http.get("/v1/sessions")).status_code == 200
        await client.post("/wake_up")
        await task
        assert reading.interruptions == 0

    played(server, scene)


@pytest.fixture(scope="module")
def others_directory(tmp_path_factory):
    return tmp_path_factory.mktemp("other") / "torpor"


@pytest.fixture(scope="module")
def other(server, tiny_model, directory, others_directory):
    """A second server, which knows the same tenants."""
    other = make_server(tiny_model, others_directory, "--torpor-sessions", "--max-num-seqs", "16", name="other")
    (others_directory / "answers").mkdir(parents=True, mode=0o700)
    others_directory.chmod(0o700)
    shutil.copy(directory / "answers" / "tenants.secret", others_directory / "answers" / "tenants.secret")
    other.start()
    other.wait_until_ready()
    yield other
    other.stop()


def test_a_request_moves_to_another_server_and_its_client_follows(server, other):
    played(server, lambda client: moved(client, other))


def test_a_choice_that_has_ended_moves_with_the_others(server, other):
    played(server, lambda client: moved_with_one_that_ended(client, other))


async def moved_with_one_that_ended(client, other) -> None:
    body = SAMPLING | {"model": "model", "prompt": [PROMPT, "Once upon a time"], "ignore_eos": True}
    first, second = [each["text"] for each in (await client.http.post("/v1/completions", json=body)).json()["choices"]]
    stop = next(each for at in range(5, 90) if (each := first[at : at + 3]) not in second)
    named = {"X-Request-Id": "two"}
    task = asyncio.create_task(client.http.post("/v1/completions", json=body | {"stop": stop}, headers=named))

    async def choices(client) -> list[dict]:
        answer = await client.get("/torpor/requests/two")
        return answer.json()["choices"] if answer.status_code == 200 else []

    async def one_has_ended() -> bool:
        return [each["state"] for each in await choices(client.http)] == ["finished", "running"]

    while not await one_has_ended():
        await asyncio.sleep(0.005)
    await done(client.admin, "/v1/sessions/two/move", to=other.url)
    await task
    async with http(other.url, ALICE) as there:
        while (found := await choices(there))[1]["state"] == "running":
            await asyncio.sleep(0.05)
    assert [each["index"] for each in found] == [0, 1] and [each["text"] for each in found][1] == second
    assert found[0]["finish_reason"] == "stop" and first.startswith(found[0]["text"])


async def moved(client, other) -> None:
    expected = await whole(client, "expected")
    reading, task = begin(client, "moves", PROMPT)
    away, waits = begin(client, "moves-later", PROMPT)
    await until(lambda: reading.text and away.text)
    await done(client.http, "/v1/sessions/moves-later/hibernate")
    for name in ("moves", "moves-later"):
        went = await done(client.admin, f"/v1/sessions/{name}/move", to=other.url)
        assert went["requests"] == [f"chatcmpl-{name}"] and went["to"] == other.url
    await asyncio.gather(task, waits)
    assert reading.text == expected and away.text == expected
    assert reading.interruptions == 1 and "another server has this request" in reading.errors[0]
    sent_on = await client.http.get("/torpor/requests/moves")
    assert sent_on.status_code == 307
    assert sent_on.headers["Location"] == f"{other.url}/torpor/requests/moves"
    assert await images(client.admin) == []
    there = Client(other.url, ALICE)
    assert (await there.whole("moves"))["choices"][0]["text"] == expected
    async with http(other.url, BOB) as bob:
        assert (await bob.get("/torpor/requests/moves")).status_code == 404
    reading, task = begin(client, "stays", PROMPT)
    await until(lambda: reading.text)
    status, said = await error(client.admin, "/v1/sessions/stays/move", to="http://127.0.0.1:9")
    assert status == 500 and "cannot be reached" in said["what"]
    await task
    assert reading.text == expected and reading.interruptions == 0  # it runs on where it was
    await there.close()


class Between(http_server.ThreadingHTTPServer):
    """An address before another server. When that one has been asked to resume an image, or just before, something
    happens, and who called gets no answer."""

    def __init__(self, url: str, happens, after: bool):
        super().__init__(("127.0.0.1", 0), PassOn)
        self.behind, self.happens, self.after = url, happens, after
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class PassOn(http_server.BaseHTTPRequestHandler):
    server: Between

    def do_GET(self) -> None:
        answer = self.pass_on()
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def do_POST(self) -> None:
        if self.server.after:
            assert self.pass_on().status_code == 200
        self.server.happens()

    def pass_on(self) -> httpx.Response:
        key = {"Authorization": self.headers["Authorization"]}
        return httpx.request(self.command, self.server.behind + self.path, headers=key, timeout=600)

    def log_message(self, *_) -> None:
        pass


@pytest.mark.parametrize("taken", [True, False])
def test_a_request_of_a_server_that_is_killed_in_a_move_runs_on_one_server(server, other, others_directory, taken):
    """`taken`: the other server has the request when its own is killed."""
    asyncio.run(asyncio.wait_for(killed_in_a_move(server, other, others_directory, taken), 600))


async def killed_in_a_move(target, source, sources_directory, taken: bool) -> None:
    there, client, name = Client(target.url, ALICE), Client(source.url, ALICE), f"killed-{taken}"
    expected = await whole(there, f"expected-{taken}")
    reading, task = begin(client, name, PROMPT)
    await until(lambda: reading.text)
    await done(client.http, f"/v1/sessions/{name}/hibernate")
    between = Between(target.url, source.kill, after=taken)
    with pytest.raises(httpx.HTTPError):
        await client.admin.post(f"/v1/sessions/{name}/move", params={"to": between.url}, timeout=600)
    task.cancel()
    source.start()
    await asyncio.to_thread(source.wait_until_ready)
    found = start_requests(samples((await client.http.get("/metrics")).text))
    answers = [await each.http.get(f"/torpor/requests/{name}") for each in (client, there)]
    if taken:
        assert [each.status_code for each in answers] == [307, 200] and "added" not in found
        assert answers[0].headers["Location"] == f"{between.url}/torpor/requests/{name}"
    else:
        assert [each.status_code for each in answers] == [200, 404] and found["added"] == 1
    has_it = there if taken else client
    while (answer := await has_it.whole(name))["state"] == "running":
        await asyncio.sleep(0.05)
    assert answer["choices"][0]["text"] == expected
    assert not list((sources_directory / "images").iterdir())
    between.shutdown()
    between.server_close()
    for each in (there, client):
        await each.close()


def test_a_server_that_ends_takes_hibernated_requests_along(tiny_model, tmp_path):
    server = make_server(tiny_model, tmp_path / "torpor", "--torpor-sessions")
    server.start()
    try:
        server.wait_until_ready()
        asyncio.run(asyncio.wait_for(over_a_restart(server), 600))
    finally:
        server.stop()


async def over_a_restart(server) -> None:
    client = Client(server.url, ALICE)
    expected = await whole(client, "expected")
    readings = [begin(client, name, PROMPT) for name in ("host", "disk", "runs")]
    await until(lambda: all(reading.text for reading, _ in readings))
    await done(client.http, "/v1/sessions/host/hibernate")
    await done(client.http, "/v1/sessions/disk/hibernate", to="disk")
    assert await asyncio.to_thread(server.terminate) == 0
    server.start()
    await asyncio.to_thread(server.wait_until_ready)
    await asyncio.gather(*(task for _, task in readings))
    assert [reading.text for reading, _ in readings] == [expected] * 3
    metrics = samples((await client.http.get("/metrics")).text)
    assert metrics[("torpor_start_requests", of(result="restored"))] >= 2  # with their KV, from one checkpoint
    assert metrics[("torpor_start_requests", of(result="added"))] == 0
    await client.close()
