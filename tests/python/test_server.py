# SPDX-License-Identifier: Apache-2.0
"""One server over sleeps to host: its routes, its clients, and what it refuses."""

import asyncio
import json
import tempfile
import threading

import httpx
import pytest
from conftest import IN_PROOF
from prometheus_client import CollectorRegistry, generate_latest
from servers import (
    ALICE,
    BOB,
    Reading,
    begin,
    make_server,
    of,
    played,
    reloaded,
    samples,
    sampling,
    until,
    until_sleeping,
)
from serving import ADMIN_KEY
from torpor.vllm.server.metrics import Metrics
from trace_collector import Collector, attributes
from zygote import MOST_SECONDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def traces():
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def events():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield path


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory, traces, events):
    options = ["--torpor-queue-limit", "4", "--torpor-response-log-seconds", "600", "--max-num-seqs", "16"]
    options += ["--torpor-console", "control", "--torpor-events-dir", events]
    options += ["--otlp-traces-endpoint", traces.endpoint]
    how = {
        "VLLM_SERVER_DEV_MODE": "1",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    server = make_server(tiny_model, tmp_path_factory.mktemp("server") / "torpor", *options, environment=how)
    server.start()
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.mark.core
def test_streams_stand_still_over_a_sleep_and_go_on_identically(server):
    async def scene(client):
        prompts = [f"Tell me {n} facts about the sea." for n in range(8)]
        expected = [Reading(f"e{n}") for n in range(8)]
        await asyncio.gather(*(client.chat(expected[n], prompts[n], **sampling(n, 200)) for n in range(8)))
        readings = [Reading(f"s{n}") for n in range(8)]
        tasks = [asyncio.create_task(client.chat(readings[n], prompts[n], **sampling(n, 200))) for n in range(8)]
        await until(lambda: all(reading.text for reading in readings))
        report = await client.post("/sleep", level=1)
        assert report["status"] == "sleeping" and report["requests"] == 8 and report["freed_bytes"] > 1e9
        assert (await client.http.get("/is_sleeping")).json() == {"is_sleeping": True}
        before = [reading.text for reading in readings]
        await asyncio.sleep(1)
        assert [reading.text for reading in readings] == before
        state = (await client.http.get("/torpor/state")).json()
        assert state["state"] == "asleep" and set(state["engine"]["tags"].values()) == {"detached"}
        assert (await client.http.get("/health")).status_code == 200
        assert (await client.http.get("/torpor/ready")).status_code == 503
        assert (await client.post("/wake_up"))["status"] == "awake"
        await asyncio.gather(*tasks)
        assert [reading.text for reading in readings] == [reading.text for reading in expected]
        assert all(reading.interruptions == 0 for reading in readings)

    played(server, scene)


def test_vllms_own_calls_that_pause_and_release_leave_a_server_that_can_be_woken(server):
    async def scene(client):
        async def says(sleeps: bool, ready: int) -> None:
            assert (await client.http.get("/is_sleeping")).json() == {"is_sleeping": sleeps}
            assert (await client.http.get("/torpor/ready")).status_code == ready

        await client.admin.post("/pause", params={"mode": "keep"})
        await says(sleeps=True, ready=200)
        assert (await client.post("/wake_up"))["status"] == "awake"
        await says(sleeps=False, ready=200)
        assert (await client.http.get("/is_paused")).json() == {"is_paused": False}

        await client.admin.post("/pause", params={"mode": "keep"})
        assert (await client.admin.post("/release_kv_cache_memory")).status_code == 200
        await says(sleeps=True, ready=503)
        assert (await client.http.get("/torpor/state")).json()["state"] == "asleep"
        assert (await client.admin.post("/torpor/checkpoint")).status_code == 409
        reading, task = begin(client, "released", max_tokens=5)
        while (await client.http.get("/torpor/state")).json()["queued"] == 0:
            await asyncio.sleep(0.02)
        assert (await client.post("/wake_up", tags="kv_cache"))["status"] == "awake"
        await task
        assert reading.text
        await says(sleeps=False, ready=200)

    played(server, scene)


def test_routers_that_know_vllms_level_2_serve_at_once(server):
    """/sleep?level=2, /wake_up, reload_weights, /reset_prefix_cache, whatever each of them answers (llama-swap)."""

    async def scene(client):
        prompts = [f"Tell me {n} facts about the moon." for n in range(3)]
        expected = [Reading(f"x{n}") for n in range(3)]
        await asyncio.gather(*(client.chat(expected[n], prompts[n], **sampling(n, 120)) for n in range(3)))
        for what, options in enumerate(({}, {"weights": "reload"}, {"mode": "abort"}, {})):
            in_flight = what == 3
            reading, task = Reading(f"flies{what}"), None
            if in_flight:
                task = asyncio.create_task(client.chat(reading, prompts[0], **sampling(0, 120)))
                await until(lambda reading=reading: reading.text)
            slept = await client.post("/sleep", level=2, **options)
            assert slept["reload"] == (["weights"] if options else []) and bool(slept["note"]) == bool(options)
            woken = await client.post("/wake_up")
            assert woken["status"] == "awake" and woken["reload"] == slept["reload"]
            assert ("weights without content" in woken["note"]) == bool(options)
            await reloaded(client)
            await client.admin.post("/reset_prefix_cache")
            asked = Reading(f"asked{what}")
            await client.chat(asked, prompts[1], **sampling(1, 120))
            assert asked.text == expected[1].text
            if task is not None:
                await task
                assert reading.text == expected[0].text

    played(server, scene)


def test_the_same_weights_loaded_in_vllms_own_order_ask_for_nothing(server):
    async def scene(client):
        expected, reading = Reading("without"), Reading("over a reload")
        await client.chat(expected, "Tell me about stars.", **sampling(1, 120))
        task = asyncio.create_task(client.chat(reading, "Tell me about stars.", **sampling(1, 120)))
        await until(lambda: reading.text)
        slept = await client.post("/sleep", level=2, weights="reload")
        assert slept["requests"] == 1 and slept["reload"] == ["weights"]
        assert (await client.post("/wake_up", tags="weights"))["status"] == "sleeping"
        await reloaded(client)
        assert (await client.post("/wake_up", tags="kv_cache"))["status"] == "awake"
        await task
        assert reading.text == expected.text and reading.interruptions == 0

    played(server, scene)


def test_a_named_mode_decides_about_the_requests_as_in_vllm(server):
    async def scene(client):
        reading, task = begin(client, "aborted")
        await until(lambda: reading.text)
        report = await client.post("/sleep", level=1, mode="abort")
        assert report["preserve_state"] is False
        await task
        assert reading.finish_reason == "abort"
        assert (await client.whole("aborted"))["choices"][0]["state"] == "aborted"

    played(server, scene)


def test_by_wait_it_falls_asleep_when_its_requests_have_ended(server):
    async def scene(client):
        reading, task = begin(client, "awaited", max_tokens=40)
        await until(lambda: reading.text)
        falling = asyncio.create_task(client.post("/sleep", level=1, mode="wait"))
        await until_sleeping(client)
        late, waits = begin(client, "late", max_tokens=3)  # comes meanwhile: waits for the wake
        report = await falling
        await task
        assert reading.finish_reason == "length" and reading.interruptions == 0
        assert report["status"] == "sleeping" and report["requests"] == 0 and report["freed_bytes"] > 1e9
        assert not late.text
        await client.post("/wake_up")
        await waits
        assert late.finish_reason == "length" and late.interruptions == 0

    played(server, scene)


def test_new_requests_wait_in_a_bounded_queue_while_it_sleeps(server):
    async def scene(client):
        await client.post("/sleep")
        waiting = [begin(client, f"q{n}", max_tokens=5) for n in range(4)]
        while (await client.http.get("/torpor/state")).json()["queued"] < 4:
            await asyncio.sleep(0.02)
        answer = await client.http.post(
            "/v1/chat/completions", json={"model": "model", "messages": [{"role": "user", "content": "Hi"}]}
        )
        assert (
            answer.status_code == 503
            and "4 requests wait" in answer.json()["error"]["message"]
            and int(answer.headers["Retry-After"]) > 0
        )
        assert (await client.http.get("/v1/models")).status_code == 200  # needs no engine
        for path in ("/v1/responses/resp_none/cancel", "/v1/completions/render"):
            answer = await client.http.post(path, timeout=MOST_SECONDS)
            assert answer.status_code in (403, 404), (path, answer.text)  # vLLM's answer: it was not held
        nobody = httpx.AsyncClient(base_url=server.url, timeout=MOST_SECONDS)
        for path in ("/invocations", "/generative_scoring", "/v1/systemone"):
            assert (await nobody.post(path, json={}, timeout=MOST_SECONDS)).status_code == 401, path
        await nobody.aclose()
        await client.post("/wake_up")
        await asyncio.gather(*(task for _, task in waiting))
        assert all(reading.text and reading.interruptions == 0 for reading, _ in waiting)

    played(server, scene)


def test_answers_are_there_by_request_id_for_their_tenant_only(server):
    async def scene(client):
        reading, task = begin(client, "mine", max_tokens=30)
        await task
        whole = await client.whole("mine")
        assert whole["choices"][0]["text"] == reading.text and whole["state"] == "ended"
        assert (await client.whole("chatcmpl-mine")) == whole  # the id in vLLM's response
        tokens = whole["choices"][0]["token_ids"]
        assert len(tokens) == 30
        for start in (0, 1, 17, 30):  # each token once, from wherever a reader begins; twice is two readers
            answer = await client.http.get("/torpor/requests/mine/stream", params={"from": start})
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert [token for event in events for token in event["choices"][0]["token_ids"]] == tokens[start:]
            assert answer.text.rstrip().endswith("data: [DONE]")
        resumed = await client.http.get("/torpor/requests/mine/stream", headers={"Last-Event-ID": "28"})
        assert resumed.text.startswith("id: 30\n")
        slashed, task = begin(client, "7f3c/ab#1", max_tokens=5)
        await task
        for name in ("7f3c/ab%231", "7f3c%2Fab%231", "cmpl-7f3c"):
            answer = await client.http.get(f"/torpor/requests/{name}")
            assert answer.status_code == (404 if name == "cmpl-7f3c" else 200), name
        assert slashed.text == (await client.whole("7f3c%2Fab%231"))["choices"][0]["text"]
        body = {"model": "model", "input": "Hi", "max_output_tokens": 5, "temperature": 0}
        answer = (await client.http.post("/v1/responses", json=body)).json()
        recorded = await client.whole(answer["id"])
        assert recorded["choices"][0]["text"] == answer["output"][0]["content"][0]["text"]
        as_bob = {"Authorization": f"Bearer {BOB}"}
        bob = httpx.AsyncClient(base_url=server.url, headers=as_bob, timeout=MOST_SECONDS)
        nobody = httpx.AsyncClient(base_url=server.url, timeout=MOST_SECONDS)
        assert (await bob.get("/torpor/requests/mine")).status_code == 404
        assert (await bob.delete("/torpor/requests/mine")).status_code == 404
        assert (await nobody.get("/torpor/requests/mine")).status_code == 401
        for path in ("/torpor/state", "/torpor/checkpoints"):
            assert (await nobody.get(path)).status_code == 401
        for path in ("/sleep", "/wake_up", "/torpor/checkpoint", "/torpor/plan"):
            assert (await nobody.post(path)).status_code == 401
        for path, status in (
            ("nobody", 404),
            ("mine/stream?from=31", 400),
            ("mine/stream?from=x", 400),
            ("mine/stream?from=1,2", 200),  # as if it had had a second choice, which is not here any more
            ("mine/stream?from=1,x", 400),
            ("mine/stream?from=1&from_text=1", 400),
        ):
            answer = await client.http.get(f"/torpor/requests/{path}")
            assert answer.status_code == status, (path, answer.text)
        await bob.aclose()
        await nobody.aclose()

    played(server, scene)


def test_several_prompts_and_choices_are_one_answer(server):
    async def scene(client):
        answer = await client.http.post(
            "/v1/completions",
            json={
                "model": "model",
                "prompt": ["The sea", "The sky"],
                "n": 2,
                "max_tokens": 8,
                "seed": 3,
                "temperature": 0.8,
            },
            headers={"X-Request-Id": "many"},
        )
        texts = {choice["index"]: choice["text"] for choice in answer.json()["choices"]}
        whole = await client.whole("many")
        assert {choice["index"]: choice["text"] for choice in whole["choices"]} == texts and len(texts) == 4
        stream = await client.http.get("/torpor/requests/many/stream", params={"from": "0,2,4,8"})
        counts = dict.fromkeys(range(4), 0)
        for line in stream.text.splitlines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                counts[choice["index"]] += len(choice["token_ids"])
        assert counts == {0: 8, 1: 6, 2: 4, 3: 0}

    played(server, scene)


def test_stop_strings_are_held_back_from_readers_as_from_clients(server):
    async def scene(client):
        free, task = begin(client, "free", max_tokens=40)
        await task
        word = free.text.split()[12]
        reading, task = begin(client, "stopped", max_tokens=40, stop=[word])
        await task
        assert reading.finish_reason == "stop" and word not in reading.text
        choice = (await client.whole("stopped"))["choices"][0]
        assert choice["text"] == reading.text and choice["stop_reason"] == word

    played(server, scene)


def test_clients_that_go_or_abort_or_lose_patience_while_it_sleeps(server):
    async def scene(client):
        endless = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}  # they are not over before the sleep
        gone, going = begin(client, "gone", **endless)
        aborted, aborting = begin(client, "given-up", **endless)
        stays, staying = begin(client, "stays")
        await until(lambda: gone.text and aborted.text and stays.text)
        await client.post("/sleep")
        going.cancel()  # its connection closes
        assert (await client.http.delete("/torpor/requests/given-up")).json() == {"aborted": 1}
        impatient = httpx.Timeout(MOST_SECONDS, read=0.3)
        with pytest.raises(httpx.ReadTimeout):
            body = {"model": "model", "prompt": "Hi", "max_tokens": 3}
            await client.http.post("/v1/completions", json=body, timeout=impatient)
        await asyncio.sleep(0.5)
        await client.post("/wake_up")
        await asyncio.gather(aborting, staying)
        while (await client.http.get("/torpor/state")).json()["responses"]["running"] > 0:
            await asyncio.sleep(0.02)
        assert stays.finish_reason == "length" and aborted.finish_reason == "abort"
        assert (await client.whole("gone"))["choices"][0]["state"] == "aborted"

    played(server, scene)


def test_a_slow_reader_and_one_that_comes_late_get_every_token(server):
    async def scene(client):
        reading, task = begin(client, "watched", max_tokens=150)
        await until(lambda: reading.text)

        async def slow() -> str:
            text = ""
            async with client.http.stream("GET", "/torpor/requests/watched/stream") as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["delta"]["content"]
                        await asyncio.sleep(0.02)
            return text

        watching = asyncio.create_task(slow())
        await client.post("/sleep")
        late = asyncio.create_task(slow())  # comes while it sleeps
        await asyncio.sleep(0.5)
        await client.post("/wake_up")
        await task
        assert await watching == reading.text and await late == reading.text

    played(server, scene)


@pytest.mark.longer
def test_hundreds_of_open_streams_over_a_sleep(server):
    many = 1000 if IN_PROOF else 250

    async def scene(client):
        def sleep_among_them() -> dict:
            """In a thread: the event loop of so many clients lags behind. No request ends before the sleep does: the
            engine takes no step until all have come, then fewer than an answer has tokens, and the sleep ends its stop.
            """
            as_admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
            with httpx.Client(
                base_url=server.url, headers={"Authorization": f"Bearer {ALICE}"}, timeout=MOST_SECONDS
            ) as other:

                def ask(method: str, **params):
                    return other.post(f"/torpor/console/{method}", headers=as_admin, json=params).raise_for_status()

                ask("pause", lease=300)
                stands.set()
                while other.get("/torpor/state").json()["responses"]["running"] < many:
                    assert not given_up.is_set()
                ask("step", steps=5)
                while not any(reading.text for reading in readings):
                    assert not given_up.is_set()
                    ask("stops")
                report = other.post("/sleep", headers=as_admin).json()
                other.post("/wake_up", headers=as_admin)
                return report

        stands, given_up = threading.Event(), threading.Event()
        readings = [Reading(f"t{n}") for n in range(many)]
        sleeping = asyncio.create_task(asyncio.to_thread(sleep_among_them))
        try:
            await asyncio.to_thread(stands.wait, 100)
            tasks = [asyncio.create_task(client.chat(each, "Hi", max_tokens=16, temperature=0)) for each in readings]
            assert (await sleeping)["requests"] == many
            await asyncio.gather(*tasks)
        finally:
            given_up.set()
        assert len({reading.text for reading in readings}) == 1 and all(
            reading.interruptions == 0 for reading in readings
        )

    played(server, scene)


def test_the_bad_is_refused_by_name_and_nothing_happens(server):
    async def scene(client):
        for path in ("/sleep", "/wake_up", "/torpor/checkpoint"):
            answer = await client.http.post(path)  # with a client's key
            assert answer.status_code == 403 and "admin key" in answer.text, path
        for path, status, words in (
            ("/sleep?level=3", 400, "level"),
            ("/sleep?to=cloud", 400, "to"),
            ("/sleep?tags=nothing", 400, "there is no tag"),
            ("/sleep?tags=", 400, "there is no tag"),
            ("/sleep?weights=none", 400, "weights"),
            ("/sleep?mode=explode", 400, "mode"),
            ("/wake_up?tags=weights", 200, "awake"),
        ):
            answer = await client.admin.post(path)
            assert answer.status_code == status and words in answer.text, (path, answer.status_code, answer.text)
            assert (await client.http.get("/is_sleeping")).json() == {"is_sleeping": False}
        first, second = await asyncio.gather(client.admin.post("/sleep"), client.admin.post("/sleep"))
        assert sorted((first.status_code, second.status_code)) == [200, 409]
        again = await client.post("/sleep")
        assert again["changed"] is False and "already asleep" in again["note"]
        assert (await client.admin.post("/torpor/checkpoint")).status_code == 409

    played(server, scene)


def test_no_client_stops_a_sleep_by_a_number(server):
    """One that cannot be sent to the engine core, which vLLM does not notice before, and wide ones that it takes."""

    async def scene(client):
        body = {"model": "model", "prompt": "The sea", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        unsent = await client.http.post("/v1/completions", json=body, headers={"X-Vllm-Priority": "9" * 23})
        assert unsent.status_code >= 400
        wide = body | {
            "priority": 1_790_000_000_000,
            "top_k": 3_000_000_000,
            "repetition_detection": {"max_pattern_size": 2, "min_count": 2**63 + 5},
            "temperature": 1,
            "seed": 5,
            "stream": True,
        }
        expected = [line async for line in lines_of(client, wide)]
        lines = lines_of(client, wide)
        seen = [await anext(lines)]
        report = await client.post("/sleep", level=1)
        assert report["requests"] == 1 and report["seconds"] < 20
        await client.post("/wake_up")
        seen += [line async for line in lines]
        assert texts_of(seen) == texts_of(expected) != ""

    async def lines_of(client, body: dict):
        async with client.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield line

    def texts_of(lines: list[str]) -> str:
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)

    played(server, scene)


def test_a_text_that_begins_with_its_prompt_is_taken_up_where_its_client_is(server):
    async def scene(client):
        prompt = "Once upon a time in a länd far away"
        body = {"model": "model", "prompt": [prompt, "Two"], "max_tokens": 40, "temperature": 0, "echo": True}
        answer = await client.http.post("/v1/completions", json=body, headers={"X-Request-Id": "echoed"})
        wholes = [choice["text"] for choice in answer.json()["choices"]]
        assert wholes[0].startswith(prompt) and wholes[1].startswith("Two") and min(map(len, wholes)) > 10
        for has in ((0, 0), (4, 1), (len(prompt), 3), (len(prompt) + 5, 6), (len(wholes[0]) - 1, len(wholes[1]))):
            stream = await client.http.get(f"/torpor/requests/echoed/stream?from_text={has[0]},{has[1]}")
            texts = [whole[:count] for whole, count in zip(wholes, has, strict=True)]
            lines = stream.text.splitlines()
            # Who lost the connection behind the first event goes on from its id: it has nothing of the other choice.
            (first,) = json.loads(next(line for line in lines if line.startswith("data: {"))[6:])["choices"]
            went_on = next(line for line in lines if line.startswith("id: "))[4:].split(",")
            rest = await client.http.get(f"/torpor/requests/echoed/stream?from={','.join(went_on)}")
            later = [line for line in rest.text.splitlines() if line.startswith("data: {")]
            others = [json.loads(line[6:])["choices"][0] for line in later]
            other = 1 - first["index"]
            assert has[other] == 0 or wholes[other].endswith("".join(c["text"] for c in others if c["index"] == other))
            tokens = sum(len(c["token_ids"]) for c in others if c["index"] == other)
            assert tokens > 0 or has[other] == len(wholes[other])
            for line in lines:
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    texts[choice["index"]] += choice["text"]
            assert texts == wholes, has
        beyond = await client.http.get(f"/torpor/requests/echoed/stream?from_text={len(wholes[0]) + 1},0")
        assert beyond.status_code == 400

    played(server, scene)


def test_a_stream_that_waits_for_a_wake_hears_of_the_sleep_at_once(server):
    def text_of(lines: list[str]) -> str:
        assert lines[-1] == "data: [DONE]"
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))

    async def scene(client):
        body = {"model": "model", "prompt": "The sea", "max_tokens": 30, "temperature": 0, "stream": True}
        awake = await client.http.post("/v1/completions", json=body)
        expected = text_of([line for line in awake.text.splitlines() if line])
        await client.post("/sleep")
        async with client.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
            lines = answer.aiter_lines()
            assert await asyncio.wait_for(anext(lines), MOST_SECONDS) == ": asleep"
            assert (await client.http.get("/torpor/state")).json()["queued"] == 1
            await client.post("/wake_up")
            assert text_of([line async for line in lines if line]) == expected != ""
        await client.post("/sleep")
        unknown = asyncio.create_task(client.http.post("/v1/completions", json=body | {"model": "nobody"}))
        while (await client.http.get("/torpor/state")).json()["queued"] == 0:
            await asyncio.sleep(0.01)
        await client.post("/wake_up")
        refused = [line for line in (await unknown).text.splitlines() if line and line != ": asleep"]
        assert json.loads(refused[0][6:])["error"]["code"] == 404 and refused[1:] == ["data: [DONE]"]

    played(server, scene)


async def response(client, path, **params) -> tuple[dict, dict]:
    """The report of an operation that is asked for events, and the last progress before it."""
    answer = await client.admin.post(path, params=params, headers={"Accept": "text/event-stream"})
    events = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
    assert events[-1] == "done" and "phase" in events
    values = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    return values[-1], values[len(events) - 1 - events[::-1].index("progress")]


def test_a_sleep_to_disk_reports_what_it_does_and_plans_tell_the_truth(server):
    async def scene(client):
        reading, task = begin(client, "planned")
        await until(lambda: reading.text)
        plan = await client.post("/torpor/plan", to="disk")
        assert plan["requests"] == 1 and plan["free_bytes"]["kv_cache"] > 1e9 and not plan["problems"]
        done, last = await response(client, "/torpor/checkpoint", metadata=["run=7", "note=a=b"])
        assert done["metadata"] == {"run": "7", "note": "a=b"}
        listed = (await client.http.get("/torpor/checkpoints")).json()["checkpoints"]
        assert listed[-1]["metadata"] == done["metadata"]
        assert last["phase"] == "verify" and last["bytes_done"] == last["bytes_total"] >= done["saved_bytes"] > 0
        done, last = await response(client, "/sleep", to="disk")
        assert last["phase"] == "detach" and last["bytes_done"] == last["bytes_total"] == done["saved_bytes"] > 0
        assert done["freed_bytes"] == sum(plan["free_bytes"].values())
        listed = (await client.http.get("/torpor/checkpoints")).json()["checkpoints"]
        assert listed[-1]["path"] == done["checkpoint"] and listed[-1]["readable"]
        await client.post("/wake_up")
        await task
        assert reading.interruptions == 0 and reading.finish_reason == "length"

    played(server, scene)


def test_a_server_without_sessions_says_so(server):
    async def scene(client):
        answer = await client.admin.get("/v1/sessions")
        assert answer.status_code == 501 and "--torpor-sessions" in answer.json()["error"]["next_step"]

    played(server, scene)


def test_metrics_tell_what_happened(server):
    async def scene(client):
        await client.post("/sleep")
        asleep = (await client.http.get("/metrics")).text
        await client.post("/wake_up")
        awake = (await client.http.get("/metrics")).text

        asleep, awake = samples(asleep), samples(awake)
        assert asleep["torpor_state", of(state="asleep")] == awake["torpor_state", of(state="awake")] == 1
        slept = "torpor_operations_total", of(operation="sleep", outcome="ok", tier="host")
        woken = "torpor_operations_total", of(operation="wake", outcome="ok", tier="host")
        assert awake[slept] == asleep[slept] > 0 and awake[woken] == asleep[woken] + 1
        weights = "torpor_tag_bytes", of(place="engine", tag="weights")
        assert asleep[weights] == 0 < awake[weights]
        restored, freed = (("torpor_moved_bytes_total", of(direction=each)) for each in ("restored", "freed"))
        assert awake[restored] > asleep[restored] and asleep[freed] > 1e9
        assert asleep["vllm:engine_sleep_state", of(sleep_state="awake")] == 0
        assert awake["torpor_response_log_bytes", of()] > 0
        assert awake["torpor_start_requests", of(result="failed")] == 0
        assert awake["torpor_queue_seconds_count", of()] >= 0
        # The alerts are tried on what the class exports (tests/deploy): a server exports that, and what it knows.
        registry = CollectorRegistry()
        Metrics("model", registry)
        begins_with = samples(generate_latest(registry).decode()).keys()
        own = {series for series in awake if series[0].startswith("torpor_")}
        assert begins_with <= own and {name for name, _ in own - begins_with} <= {
            "torpor_tag_bytes", "torpor_start_timestamp_seconds", "torpor_response_log_bytes",
            "torpor_checkpoint_bytes", "torpor_checkpoint_timestamp_seconds", "torpor_response_log_failing",
            "torpor_checkpoint_not_due_timestamp_seconds",
        }  # fmt: skip

    played(server, scene)


def test_an_operation_belongs_to_the_trace_of_the_request_that_asked_for_it(server, traces):
    async def scene(client):
        trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        with_trace = {"traceparent": f"00-{trace}-{parent}-01"}
        slept = (await client.admin.post("/sleep", headers=with_trace)).json()
        await client.admin.post("/wake_up", headers=with_trace | {"Accept": "text/event-stream"})
        await client.post("/sleep")
        await client.post("/wake_up")

        def of_trace(name):
            return [span for span in traces.named(name) if span.trace_id.hex() == trace]

        await until(lambda: of_trace("torpor.sleep") and of_trace("torpor.wake_up"))
        for name in ("torpor.sleep", "torpor.wake_up"):
            (span,) = of_trace(name)
            assert span.parent_span_id.hex() == parent and len(traces.inside(span)) >= 2
        (span,) = of_trace("torpor.sleep")
        assert attributes(span)["torpor.freed_bytes"] == slept["freed_bytes"]

    played(server, scene)
