# SPDX-License-Identifier: Apache-2.0
"""Every route of torpor refuses parameters and bodies that it does not know, and does nothing then."""

import re
from pathlib import Path

import pytest
from server_calls import EVERYTHING
from server_stubs import ADMIN, CLIENT, Engine, build, client, no_settings, run, started  # noqa: F401
from torpor.vllm.server.route_table import ROUTES
from torpor.vllm.server.routes import routes

AS_VLLM_HAS_THEM = {("GET", "/health"), ("GET", "/is_sleeping")}
OWN = sorted({(method, route.path) for route in routes().routes for method in route.methods} - AS_VLLM_HAS_THEM)
WITH_BODY = {("POST", "/torpor/console/{method}"), ("POST", "/torpor/take_over")}
# The right word for a wrong one, where a route has parameters.
MEANT = {
    ("POST", "/sleep"): ("levle", "level"),
    ("POST", "/wake_up"): ("tag", "tags"),
    ("POST", "/swap"): ("peer-timeout", "peer_timeout"),
    ("POST", "/torpor/plan"): ("preserve-state", "preserve_state"),
    ("POST", "/torpor/checkpoint"): ("metdata", "metadata"),
    ("GET", "/torpor/requests/{response:path}/stream"): ("from_txt", "from_text"),
    ("POST", "/v1/sessions/{session:path}/hibernate"): ("action-id", "action_id"),
    ("POST", "/v1/sessions/{session:path}/resume"): ("pathh", "path"),
    ("POST", "/v1/sessions/{session:path}/fork"): ("seed", "seeds"),
    ("POST", "/v1/sessions/{session:path}/move"): ("too", "to"),
    ("POST", "/v1/sessions/{session:path}/demote"): ("too", "to"),
    ("POST", "/v1/sessions/{session:path}/prefetch"): ("dedline", "deadline"),
    ("POST", "/v1/sessions/{session:path}/retain"): ("prioritiy", "priority"),
    ("POST", "/v1/sessions/{session:path}/pin"): ("tl", "ttl"),
    ("POST", "/v1/sessions/{session:path}/evict"): ("action-id", "action_id"),
    ("DELETE", "/v1/sessions/{session:path}"): ("action-id", "action_id"),
    ("POST", "/torpor/switch"): ("too", "to"),
    ("POST", "/torpor/take_over"): ("stp", "step"),
}


def address(path: str) -> str:
    path = path.replace("{request:path}", "one")
    return path.replace("{response:path}", "one").replace("{session:path}", "one").replace("{method}", "state")


def asked(monkeypatch, tmp_path, method: str, path: str, **how):
    """The answer, and what the engine was asked for since the server had started."""

    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, [], engine=Engine(tmp_path))
        await started(server)
        del server.engine.calls[:]
        async with client(app, ADMIN) as http:
            return await http.request(method, path, **how), server.engine.calls

    return run(scene())


def test_they_are_those_of_the_table():
    known = {route for route in ROUTES if "/torpor/" in route[1] or "/sessions" in route[1]}
    assert set(OWN) <= set(ROUTES) and known <= set(OWN)
    parameters = {
        (method, route.path): {field.alias for field in route.dependant.query_params}
        for route in routes().routes
        for method in route.methods
    }
    assert {route for route, names in parameters.items() if names} == set(MEANT)
    assert all(meant in parameters[route] for route, (_, meant) in MEANT.items())


@pytest.mark.parametrize(("method", "path"), OWN)
def test_an_unknown_parameter_is_refused_with_the_nearest_one(monkeypatch, tmp_path, method, path):
    wrong, meant = MEANT.get((method, path), ("level", ""))
    answer, calls = asked(monkeypatch, tmp_path, method, address(path), params={wrong: "2"})
    assert answer.status_code == 400 and calls == []
    error = answer.json()["error"]
    assert error["message"] == f"{error['what']} ({error['next_step']})" and error["type"] == "InvalidArgument"
    assert (
        error["code"] == "invalid_argument" and error["what"] == f"{method} {address(path)} has no parameter {wrong!r}"
    )
    assert error["next_step"].startswith(f"did you mean {meant}? It has " if meant else "It has none")


@pytest.mark.parametrize(("method", "path"), sorted(set(OWN) - WITH_BODY))
@pytest.mark.parametrize("body", [b'{"level": 2, "to": "disk"}', b"level=2", b"[1]", b"x" * 100_000])
def test_a_body_is_refused_where_none_is_read(monkeypatch, tmp_path, method, path, body):
    answer, calls = asked(monkeypatch, tmp_path, method, address(path), content=body)
    assert answer.status_code == 400 and calls == []
    assert answer.json()["error"]["what"].startswith(f"{method} {address(path)} takes no body, and this one has ")


@pytest.mark.parametrize(
    ("body", "next_step"),
    [
        ({"level": 2}, "say it in the URL: /sleep?level=2"),
        ({"level": 2, "too": "disk"}, "did you mean to? It has level, mode, "),
        ({"nothing like it": 2}, "It has level, mode, "),
    ],
)
def test_a_body_with_parameters_is_refused_with_where_they_belong(monkeypatch, tmp_path, body, next_step):
    answer, _ = asked(monkeypatch, tmp_path, "POST", "/sleep", json=body)
    assert answer.json()["error"]["next_step"].startswith(next_step)


@pytest.mark.parametrize("path", ["/sleep", "/torpor/checkpoint"])
@pytest.mark.parametrize(
    ("pairs", "what"), [(["run"], "metadata has 'run'"), (["a=1", "a=2"], "metadata has 'a' twice")]
)
def test_metadata_is_names_with_values(monkeypatch, tmp_path, path, pairs, what):
    answer, calls = asked(monkeypatch, tmp_path, "POST", path, params={"metadata": pairs})
    assert answer.status_code == 400 and answer.json()["error"]["what"] == what
    assert not {"sleep", "checkpoint"} & {call[0] for call in calls}


@pytest.mark.parametrize("body", [b"", b"{}", b" {} "])
def test_an_empty_body_says_nothing(monkeypatch, tmp_path, body):
    answer, calls = asked(monkeypatch, tmp_path, "POST", "/sleep", content=body, params={"level": 1})
    assert answer.status_code == 200 and ("sleep", 1) in [call[:2] for call in calls]


@pytest.mark.parametrize(("method", "path"), sorted(AS_VLLM_HAS_THEM))
def test_probes_may_add_what_they_like(monkeypatch, tmp_path, method, path):
    answer, _ = asked(monkeypatch, tmp_path, method, path, params={"now": "1"}, content=b"hello")
    assert answer.status_code == 200


PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"
MISTAKES = re.findall(r"^\| `(\w+) (/\S*)` \| (\w+) \| (\d+) \| `(.*)` \|$", PAGE.read_text(), flags=re.M)
KEYS = {"none": None, "wrong": "wrong", "client": CLIENT, "admin": ADMIN}


def test_the_page_of_mistakes_has_what_a_server_answers(monkeypatch, tmp_path):
    """In one form, and the engine is asked for nothing."""
    assert {int(status) for *_, status, _ in MISTAKES} == {400, 401, 403, 404, 501}

    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, EVERYTHING, "--api-key", CLIENT, engine=Engine())
        await started(server)
        del server.engine.calls[:]
        for method, path, key, status, text in MISTAKES:
            async with client(app, KEYS[key]) as http:
                answer = await http.request(method, path)
            assert answer.status_code == int(status), (path, answer.text)
            error = answer.json()["error"]
            assert error["message"].startswith(text), answer.text
            assert error["message"] == f"{error['what']} ({error['next_step']})", answer.text
        assert not {"sleep", "wake_up", "checkpoint"} & {call[0] for call in server.engine.calls}

    run(scene())
