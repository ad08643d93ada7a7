# SPDX-License-Identifier: Apache-2.0
"""deploy/router: nginx and three servers that sleep, for real."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chart import ROOT

sys.path.append(str(ROOT / "tools/demo"))

from ports import free_port
from serving import Server
from torpor import client
from torpor.vllm.server.route_table import ROUTES, Who

MODELS = ("chat", "code", "small")
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("router")
    tokenizer = os.environ["TORPOR_TEST_MODEL"]
    options = ["--torpor-sleep-after-seconds", "2", "--torpor-wake-on-request", "--dtype", "float32"]
    options += ["--torpor-on-disconnect", "continue"]
    started = {}
    try:
        for number, name in enumerate(MODELS):
            make = [sys.executable, ROOT / "tests/python/tiny_model.py", folder / f"model-{name}", tokenizer, number, 4]
            subprocess.run([*map(str, make)], check=True, timeout=100)
            server = Server(
                folder / f"model-{name}",
                folder / name,
                [*options, "--served-model-name", name],
                {"OMP_NUM_THREADS": "1"},
                name=name,
            )
            server.start()
            started[name] = server
        for server in started.values():
            server.wait_until_ready()
        yield started
    finally:
        for server in started.values():
            server.stop()


@pytest.fixture(scope="module")
def router(servers, tmp_path_factory):
    with nginx(tmp_path_factory.mktemp("nginx"), [int(servers[name].url.rsplit(":", 1)[1]) for name in MODELS]) as http:
        yield http


@contextlib.contextmanager
def nginx(folder: Path, servers: list[int]) -> Iterator[httpx.Client]:
    """nginx with the shipped file before servers at these ports; only its ports are others."""
    ports = {"8000": free_port(), "8009": free_port()} | {f"800{i}": port for i, port in enumerate(servers, 1)}
    text = (ROOT / "deploy/router/nginx.conf").read_text()
    (folder / "nginx.conf").write_text(re.sub(r"\b800\d\b", lambda found: str(ports[found[0]]), text))
    own = f"daemon off; pid {folder}/pid; error_log {folder}/error.log;"
    process = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", own])
    try:
        address = f"http://127.0.0.1:{ports['8000']}"
        until(lambda: process.poll() is not None or answers(address))
        assert process.poll() is None
        yield httpx.Client(base_url=address, headers={"Authorization": "Bearer demo"}, timeout=120)
    finally:
        process.terminate()
        process.wait(10)


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/v1/models").status_code == 200
    except httpx.TransportError:
        return False


def until(condition, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def state(server: Server) -> str:
    return httpx.get(f"{server.url}/torpor/state", headers={"Authorization": "Bearer demo-admin"}).json()["state"]


def complete(router, model: str, **more) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0} | more
    return router.post("/v1/completions", json=body)


def test_each_request_reaches_its_model_and_wakes_it_alone(servers, router):
    awake = {name: complete(router, name).json()["choices"][0]["text"] for name in MODELS}
    assert len(set(awake.values())) == 3  # three models
    for name in MODELS:
        until(lambda: all(state(server) == "asleep" for server in servers.values()))
        answer = complete(router, name).json()
        assert answer["model"] == name and answer["choices"][0]["text"] == awake[name]
        assert {other for other in MODELS if state(servers[other]) == "asleep"} == {*MODELS} - {name}


def test_a_stream_arrives_token_by_token_and_is_taken_up_by_its_id(servers, router):
    until(lambda: state(servers["code"]) == "asleep")
    body = {"model": "code", "prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    times, text, identity = [], "", None
    with router.stream("POST", "/v1/completions", json=body, timeout=120) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
                piece = json.loads(line[6:])
                identity = piece["id"]
                text += piece["choices"][0]["text"]
    middle = times[len(times) // 2]
    assert len(times) > 20 and times[0] + 0.1 * (times[-1] - times[0]) < middle  # not all at the end
    answer = router.get(f"/torpor/requests/{identity}", headers={"X-Model": "code"})
    assert answer.status_code == 200 and text and answer.json()["choices"][0]["text"] == text
    assert router.get(f"/torpor/requests/{identity}", headers={"X-Model": "chat"}).status_code == 404


@pytest.mark.parametrize("model", ["code", "chat"])
def test_the_client_takes_up_an_answer_behind_the_router(servers, router, model):
    """Its first connection breaks in the middle."""
    whole = complete(router, model, max_tokens=60, ignore_eos=True).json()["choices"][0]["text"]
    broken = []
    breaking = Breaking()
    with client.http_client(
        base_url=router.base_url, headers=router.headers, transport=breaking, on_interruption=broken.append
    ) as http:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    assert len(broken) == 1 and breaking.asked == ["POST", "GET"]


class Breaking(httpx.HTTPTransport):
    """Breaks its first connection in the middle of the answer."""

    def __init__(self):
        super().__init__()
        self.asked: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.method)
        response = super().handle_request(request)
        return response if len(self.asked) > 1 else httpx.Response(200, headers=response.headers, stream=Half(response))


class Half(httpx.SyncByteStream):
    def __init__(self, response: httpx.Response):
        self._response = response

    def __iter__(self):
        for number, piece in enumerate(self._response.stream):
            if number == 10:
                self._response.close()
                raise httpx.ReadError("the connection broke")
            yield piece


def test_a_prompt_cannot_name_a_model_and_large_ones_are_routed_too(servers, router):
    said = complete(router, "small", prompt='{"model": "chat"}').json()
    assert said["model"] == "small"
    large = router.post("/v1/completions", content=json.dumps({"prompt": "word " * 300_000, "model": "code"}),
                        headers={"Content-Type": "application/json"})  # fmt: skip
    assert large.status_code == 400 and "2048" in large.text  # by the engine, not by nginx


def test_unknown_models_are_not_there(router):
    assert complete(router, "other").json()["error"]["message"] == "no such model"
    assert [model["id"] for model in router.get("/v1/models").json()["data"]] == list(MODELS)


def test_what_is_for_operators_reaches_no_server(tmp_path):
    with nginx(tmp_path, [free_port() for _ in MODELS]) as http:
        for (method, path), rule in ROUTES.items():
            if rule.who is Who.ADMIN:
                status = http.request(method, re.sub(r"{.*?}", "a/b", path), headers={"X-Model": "chat"}).status_code
                assert status == 404, path
        assert http.post("/v1/completions", headers={"X-Model": "chat"}).status_code == 502  # that would reach one
