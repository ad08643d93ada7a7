# SPDX-License-Identifier: Apache-2.0
"""With --torpor-on-disconnect continue a request outlives its client, and nothing else: what is aborted ends."""

from __future__ import annotations

import asyncio
import importlib.util
from types import SimpleNamespace

import pytest
from server_stubs import ADMIN, Engine, build, client, client_goes, no_settings, run, started  # noqa: F401
from fastapi.responses import JSONResponse
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.utils.async_utils import merge_async_iterators

from torpor.errors import WrongState
from torpor.vllm.server.recorder import Nobody


async def serving(monkeypatch, directory):
    """Return an application, and a server with the request `r` of a client."""
    app, server = build(monkeypatch, [], engine=Engine(directory), on_disconnect="continue")
    await started(server)
    server.engine.output_processor.request_states["r"] = SimpleNamespace(queue=SimpleNamespace(put=lambda output: None))
    return app, server


def aborted(server) -> list:
    return [call[1] for call in server.engine.calls if call[0] == "abort"]


def runs_without_client(server) -> bool:
    return isinstance(server.engine.output_processor.request_states["r"].queue, Nobody)


async def generate(server, given: asyncio.Event):
    """As vLLM's: it aborts its request as it is cancelled or closed."""
    try:
        given.set()
        yield "a token"
        await asyncio.sleep(60)
    except (asyncio.CancelledError, GeneratorExit):
        await server.engine.abort("r", internal=True)
        raise


async def read(server, given: asyncio.Event) -> None:
    async for _ in generate(server, given):
        pass


async def cancelled(server, in_background: bool) -> None:
    given = asyncio.Event()
    task = asyncio.create_task(read(server, given))
    if in_background:
        server.app_state.openai_serving_responses = SimpleNamespace(background_tasks={"resp_1": task})
    await given.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("goes", ["cancelled", "closed"])
def test_a_request_whose_client_goes_runs_on(monkeypatch, tmp_path, goes):
    async def scene():
        _, server = await serving(monkeypatch, tmp_path)
        if goes == "cancelled":
            await cancelled(server, in_background=False)
        else:
            tokens = generate(server, asyncio.Event())
            await anext(tokens)
            await tokens.aclose()
        assert runs_without_client(server) and not aborted(server)

    run(scene())


def test_a_background_response_that_is_cancelled_ends(monkeypatch, tmp_path):
    """POST /v1/responses/ID/cancel cancels its task."""

    async def scene():
        _, server = await serving(monkeypatch, tmp_path)
        await cancelled(server, in_background=True)
        assert aborted(server) == ["r"]

    run(scene())


def test_an_abort_of_all_requests_ends_them(monkeypatch, tmp_path):
    """By vLLM's own POST /abort_requests, of its development mode."""
    newer = importlib.util.find_spec("vllm.entrypoints.rl") is not None
    routes = importlib.import_module(f"vllm.entrypoints.{'rl.online' if newer else 'serve.dev.rlhf'}.api_router")

    async def scene():
        from vllm.v1.engine import async_llm

        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        monkeypatch.setattr(async_llm, "AsyncLLM", Engine)
        app, server = await serving(monkeypatch, tmp_path)
        app.include_router(routes.router)
        app.state.engine_client = server.engine
        async with client(app, ADMIN) as http:
            assert (await http.post("/abort_requests", json={})).json() == {"status": "aborted", "aborted": 1}
            assert aborted(server) == [["r"]] and not runs_without_client(server)
            server.fail(WrongState("the engine is unrecoverable", "restart the server"))
            answer = await http.post("/abort_requests", json={})
            assert answer.status_code == 503 and "the next one goes on" in answer.json()["error"]["message"]
        with pytest.raises(GracefulHTTPError, match="the next one goes on"):  # nor does it say that it has aborted any
            await server.engine.abort(["r"], internal=True)
        assert aborted(server) == [["r"]]

    run(scene())


def test_what_could_not_be_added_as_a_whole_ends(monkeypatch, tmp_path):
    """A request with n > 1 whose client goes, or of which one part is refused, while it is sent to the engine."""

    async def scene():
        _, server = await serving(monkeypatch, tmp_path)

        async def add_request():
            await client_goes(server.engine, "r")

        server._stock_add = add_request
        await server.engine.add_request()
        assert aborted(server) == ["r"] and not runs_without_client(server)
        try:
            raise RuntimeError("no token can be drawn")
        except RuntimeError:
            await server.engine.abort("r", internal=True)
        assert aborted(server) == ["r", "r"]
        await client_goes(server.engine, "r")
        assert runs_without_client(server)

    run(scene())


def test_the_other_prompts_of_a_call_that_is_refused_end(monkeypatch, tmp_path):
    """vLLM refuses the call, so no client has a part of its answer; its X-Request-Id may be used again at once."""

    async def scene():
        app, server = await serving(monkeypatch, tmp_path)
        states = server.engine.output_processor.request_states

        async def add_request(name: str) -> None:
            if name == "refused":
                raise VLLMValidationError("token id 9 is out of vocabulary")
            states[name] = SimpleNamespace(queue=None)

        async def generate(name: str):
            await server.engine.add_request(name)
            try:
                await asyncio.sleep(60)
                yield name
            except asyncio.CancelledError:
                await server.engine.abort(name, internal=True)
                raise

        async def completions():
            try:
                return [each async for each in merge_async_iterators(*map(generate, ("first", "refused", "last")))]
            except VLLMValidationError as problem:
                return JSONResponse({"error": str(problem)}, 400)

        server._stock_add = add_request
        app.add_api_route("/v1/completions", completions, methods=["POST"])
        async with client(app) as http:
            assert (await http.post("/v1/completions", json={})).status_code == 400
        for _ in range(10):  # the generators notice that they are cancelled
            await asyncio.sleep(0)
        assert sorted(aborted(server)) == ["first", "last"]

    run(scene())
